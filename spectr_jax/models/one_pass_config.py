"""The sizes of networks that guess a block of tokens in one pass; the networks are those of `models/one_pass.py`."""

from __future__ import annotations

import dataclasses
import reprlib
from typing import Literal

from spectr_jax.models.causal_lm_config import CausalLMConfig, check_sizes

MARKOV_KINDS = ('vanilla', 'gated', 'rnn')


@dataclasses.dataclass(frozen=True)
class Markov:
  """The sequential part of DSpark: how the token before biases the logits of a slot.

  With e the embedding of that token, `[rank]`, h the output of the slot and [;] side by side, the bias is W of
    `vanilla`: e;
    `gated`: sigmoid(G [h; e]) e;
    `rnn`: tanh(o), where (g, c, o) = J [s; e; h], and the state s becomes sigmoid(g) s + (1 - sigmoid(g)) tanh(c).

  Attributes:
    rank: Width of e and s.
    num_tokens: Tokens that e is there for, at least the target's.
    kind: `vanilla`, `gated` or `rnn`.

  Raises:
    ValueError: A size is not a positive integer, or the kind is unknown.
  """

  rank: int
  num_tokens: int
  kind: Literal['vanilla', 'gated', 'rnn'] = 'vanilla'

  def __post_init__(self):
    check_sizes(self, 'rank', 'num_tokens')
    if self.kind not in MARKOV_KINDS:
      raise ValueError(f'kind must be one of {", ".join(MARKOV_KINDS)}; got {self.kind!r}')


@dataclasses.dataclass(frozen=True)
class Selector:
  """The sequential part of DFlash 2: a distribution over the likeliest tokens of a slot, given the token before.

  With h the output of the slot, a candidate y after the token x has the logit U(y) + sum of a(x) (P h) b(y), over the
  entries of the three vectors. Tokens that are no candidates are not guessed.

  Attributes:
    rank: Width of a(x), P h and b(y).
    num_tokens: Tokens that a and b are there for, at least the target's.
    num_candidates: The number of likeliest tokens that are candidates.

  Raises:
    ValueError: A size is not a positive integer.
  """

  rank: int
  num_tokens: int
  num_candidates: int

  def __post_init__(self):
    check_sizes(self, 'rank', 'num_tokens', 'num_candidates')


@dataclasses.dataclass(frozen=True)
class Convolution:
  """The mixing of neighboring slots in DFlash 2: before and after attention, and before and after the MLP.

  Slot i becomes the sum over taps t of (b_t + d_{i,t}) x_{i-t}, entry by entry, without slots before the first. The
  kernel b is fixed. d is linear in the normalized input of attention or MLP, with one number for a group of entries.

  Attributes:
    num_taps: Slots that are mixed, a slot itself included.
    group_size: Neighboring entries that share d.

  Raises:
    ValueError: A size is not a positive integer.
  """

  num_taps: int
  group_size: int

  def __post_init__(self):
    check_sizes(self, 'num_taps', 'group_size')


@dataclasses.dataclass(frozen=True)
class OnePassConfig:
  """The sizes of a network that guesses a block in one pass, and what it does where published ones differ.

  Attributes:
    backbone: Sizes of its decoder blocks. Its `vocab_size` is Vd, the tokens that it can guess, and its windows are
      those of `sees_from_root` and `has_causal_windows`.
    target_dim: Width of the target's hidden states.
    feature_layers: The F layers of the target that it reads, numbered as in `Model.features_fn`.
    num_slots: W, the last token included.
    mask_id: The token that fills the slots behind the last token.
    guesses_at_root: Whether slot 0 guesses the token after the last one (DSpark), so that W tokens are guessed; else
      slot 1 does, and W - 1 are (DFlash).
    sees_from_root: Whether a window of n tokens is that of the n tokens before the last one for all slots, and ends no
      slot's view of others; else it ends with the slot itself, as in decoders.
    has_causal_windows: Whether slots do not attend to later ones in layers that have a window.
    markov: The sequential part of DSpark, or None.
    selector: That of DFlash 2, or None. With neither, guesses are independent of each other.
    convolution: How neighboring slots are mixed, or None for not at all.
    confidence: What the estimate reads whether a slot's guess is accepted: the slot's output alone (`hidden`), or the
      embedding of the token before as well (`markov`). None if there is no estimate.
    num_embedded: Tokens of an embedding of its own; None if it reads the target's.
    has_unembedding: Whether it has an output head of its own; else it takes the target's rows.
    is_reduced: Whether it guesses some of the target's tokens only, those of the parameter `target_ids`.

  Raises:
    ValueError: A size, layer or token is no number that it can be, or options contradict each other.
  """

  backbone: CausalLMConfig
  target_dim: int
  feature_layers: tuple[int, ...]
  num_slots: int
  mask_id: int
  guesses_at_root: bool = False
  sees_from_root: bool = False
  has_causal_windows: bool = True
  markov: Markov | None = None
  selector: Selector | None = None
  convolution: Convolution | None = None
  confidence: Literal['hidden', 'markov'] | None = None
  num_embedded: int | None = None
  has_unembedding: bool = True
  is_reduced: bool = False

  def __post_init__(self):
    if self.backbone.rope is None:
      raise ValueError('a network that guesses in one pass has rotary positions, got rope None')
    own = ['num_embedded'] if self.num_embedded is not None else []
    check_sizes(self, 'target_dim', 'num_slots', *own)
    if not self.max_depth:
      raise ValueError('a block of 1 slot guesses nothing: its only token is the last one')
    if not self.feature_layers or any(type(layer) is not int for layer in self.feature_layers):
      raise ValueError(f'feature_layers must be integers, at least one, got {reprlib.repr(self.feature_layers)}')
    if type(self.mask_id) is not int or self.mask_id < 0:
      raise ValueError(f'mask_id must be a token, got {self.mask_id!r}')
    if self.num_embedded is not None and self.mask_id >= self.num_embedded:
      raise ValueError(f'mask_id {self.mask_id} is not among the {self.num_embedded} tokens of the embedding')
    if self.confidence not in (None, 'hidden', 'markov'):
      raise ValueError(f'confidence must be hidden, markov or None, got {self.confidence!r}')
    if self.confidence == 'markov' and self.markov is None:
      raise ValueError('confidence markov reads the embedding of the sequential part, and markov is None')
    if self.selector is not None:
      if self.markov is not None or self.is_reduced:
        raise ValueError('a selector stands alone: without markov, and with all tokens of the target')
      if self.selector.num_candidates > self.backbone.vocab_size:
        raise ValueError(
          f'{self.selector.num_candidates} candidates were asked for among {self.backbone.vocab_size} tokens'
        )
    if self.convolution is not None:
      width = self.backbone.embed_dim
      if width % self.convolution.group_size:
        raise ValueError(f'a width of {width} does not divide into groups of {self.convolution.group_size}')
      if self.convolution.num_taps > self.num_slots:
        raise ValueError(f'a convolution of {self.convolution.num_taps} taps needs as many slots, got {self.num_slots}')

  @property
  def max_depth(self) -> int:
    """The tokens that it guesses ahead."""
    return self.num_slots if self.guesses_at_root else self.num_slots - 1
