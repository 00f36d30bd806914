"""Networks that guess a block of tokens in one pass: DFlash, DSpark.

A few decoder blocks run once over W slots: the last token of the text, then W - 1 times a mask token. The text behind
them is there as the target's hidden states, which a product and a norm map to a context. Every layer projects keys and
values of the context with its own kernels, keeps them in a cache, and attends to them and to all W slots. Slots are not
written to the cache: what they hold are guesses.

The output of a slot gives logits U, whatever is guessed in the slots before. DFlash stops there, so its guesses at
different depths are independent. In DSpark a small sequential part adds a bias B(x) for the token x before, so the W
logits become a Markov chain, softmax(U_k + B(x_{k-1})), and any tree of guesses is drawn from one pass.

Sources: DFlash (arXiv:2602.06036), DSpark (arXiv:2607.05147). Parameters are a nested dict of arrays of one dtype, with
kernels `[in, out]`, see `param_shapes`.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from spectr_jax.model import KVCache
from spectr_jax.models import causal_lm, layers
from spectr_jax.models.causal_lm_config import CausalLMConfig, check_sizes
from spectr_jax.models.products import matmul

_KINDS = ('vanilla', 'gated', 'rnn')


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
    if self.kind not in _KINDS:
      raise ValueError(f'kind must be one of {", ".join(_KINDS)}; got {self.kind!r}')


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
    markov: The sequential part, or None for independent guesses.
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

  @property
  def max_depth(self) -> int:
    """The tokens that it guesses ahead."""
    return self.num_slots if self.guesses_at_root else self.num_slots - 1


def param_shapes(config: OnePassConfig) -> dict[str, Any]:
  """The shapes of all parameters, a nested dict of `jax.ShapeDtypeStruct`.

  The output head is one of them also where it is made of the target's rows: it is gathered once, when it is loaded.

  Args:
    config: The network.
  """
  backbone, width = config.backbone, config.backbone.embed_dim

  def array(*shape, dtype=backbone.dtype):
    return jax.ShapeDtypeStruct(shape, dtype)

  def linear(num_in, num_out):
    return {'kernel': array(num_in, num_out), 'bias': array(num_out)}

  of_decoder = causal_lm.param_shapes(backbone)
  shapes = {name: shape for name, shape in of_decoder.items() if name.startswith('layer_') or name == 'final_norm'}
  shapes |= {
    'features': {'kernel': array(len(config.feature_layers) * config.target_dim, width)},
    'features_norm': {'gain': array(width)},
    'unembedding': array(width, backbone.vocab_size),
  }
  if config.num_embedded is not None:
    shapes['embedding'] = array(config.num_embedded, width)
  if config.is_reduced:
    shapes['target_ids'] = array(backbone.vocab_size, dtype='int32')
  rank = 0 if config.markov is None else config.markov.rank
  if config.markov is not None:
    more = {
      'vanilla': {},
      'gated': {'gate': linear(width + rank, rank)},
      'rnn': {'joint': linear(2 * rank + width, 3 * rank)},
    }
    shapes['markov'] = {
      'embedding': array(config.markov.num_tokens, rank),
      'unembedding': array(rank, backbone.vocab_size),
      **more[config.markov.kind],
    }
  if config.confidence is not None:
    shapes['confidence'] = linear(width + (rank if config.confidence == 'markov' else 0), 1)
  return shapes


def init_cache(config: OnePassConfig, batch_size: int, cache_size: int) -> KVCache:
  """An empty cache of the keys and values of the context.

  Args:
    config: The network.
    batch_size: B, rows.
    cache_size: Tokens that a row can hold.
  """
  backbone = config.backbone
  return KVCache.empty(
    num_layers=backbone.num_layers,
    batch_size=batch_size,
    num_heads=backbone.num_cached_heads,
    head_dim=backbone.head_dim,
    cache_size=cache_size,
    dtype=backbone.cache_dtype or backbone.dtype,
  )


def _rotations(config: OnePassConfig, positions: jax.Array) -> list[Any]:
  """The angles of rotary positions of every layer."""
  backbone = config.backbone
  by_rope = {rope: causal_lm.rotation_of(rope, positions) for rope in map(backbone.rope_of, range(backbone.num_layers))}
  return [by_rope[backbone.rope_of(layer)] for layer in range(backbone.num_layers)]


def read_context(
  params: Mapping[str, Any], config: OnePassConfig, features: jax.Array, positions: jax.Array, cache: KVCache
) -> KVCache:
  """The cache with the keys and values of some tokens' context pending.

  Args:
    params: The parameters.
    config: The network.
    features: `[B, N, F, target_dim]`, the target's hidden states at these tokens.
    positions: int32 `[B, N]`, their positions.
    cache: The cache, with nothing pending.
  """
  backbone, num_new = config.backbone, features.shape[1]
  joined = features.astype(backbone.dtype).reshape(*features.shape[:2], -1)
  context = causal_lm.norm(params['features_norm'], causal_lm.linear(params['features'], joined), backbone)
  pending = []
  for layer, rotation in enumerate(_rotations(config, positions)):
    _, key, value = causal_lm.project(params[f'layer_{layer}']['attention'], backbone, context, rotation)
    keys, values = jnp.transpose(key, (0, 2, 3, 1)), jnp.transpose(value, (0, 2, 1, 3))
    pending.append(cache.append(layer, keys, values, num_pending_slots=num_new))
  keys, values = zip(*pending, strict=True)
  return dataclasses.replace(cache, pending_keys=keys, pending_values=values, num_pending=cache.num_pending + num_new)


def _visible(config: OnePassConfig, window: int | None, positions: jax.Array, cache: KVCache):
  """The slots of the block, bool `[1, W, W]`, and those of the cache that each slot attends to, as in `causal_lm`."""
  slots = jnp.arange(config.num_slots)
  ahead = slots - slots[:, None]  # of the other slot over this one
  seen = jnp.ones(ahead.shape, bool)
  if window is None:
    return seen[None], causal_lm.visible_slots(None, positions, cache)
  if config.has_causal_windows:
    seen &= ahead <= 0
  if config.sees_from_root:
    return seen[None], causal_lm.visible_slots(window + 1, positions[:, :1], cache)  # the root counts itself
  return (seen & (jnp.abs(ahead) < window))[None], causal_lm.visible_slots(window, positions, cache)


def run_block(params: Mapping[str, Any], config: OnePassConfig, embedded: jax.Array, cache: KVCache) -> jax.Array:
  """The outputs of all slots, `[B, W, embed_dim]`, the inputs of the output head.

  Args:
    params: The parameters.
    config: The network.
    embedded: `[B, W, embed_dim]`, the embedded last token and mask tokens.
    cache: The context of all tokens before the last one; it stays as it is.
  """
  backbone = config.backbone
  positions = cache.lengths[:, None] + jnp.arange(config.num_slots)
  windows = {backbone.window(layer) for layer in range(backbone.num_layers)}
  visible = {window: _visible(config, window, positions, cache) for window in windows}
  x = embedded.astype(backbone.dtype)
  for layer, rotation in enumerate(_rotations(config, positions)):
    seen = visible[backbone.window(layer)]
    x, _, _ = causal_lm.block(params[f'layer_{layer}'], backbone, layer, x, rotation, seen, cache)
  return causal_lm.norm(params['final_norm'], x, backbone)


def unembed(params: Mapping[str, Any], output: jax.Array) -> jax.Array:
  """Logits U of the Vd tokens that can be guessed, `[..., Vd]`, in float32 or wider.

  Args:
    params: The parameters.
    output: `[..., embed_dim]`, from `run_block`.
  """
  return matmul(output, params['unembedding'])


def embed_before(params: Mapping[str, Any], config: OnePassConfig, tokens: jax.Array) -> jax.Array:
  """The embeddings e of the tokens before, `[..., rank]`, of a network with a sequential part.

  Args:
    params: The parameters.
    config: The network.
    tokens: Integers `[...]`.
  """
  return layers.take_rows(params['markov']['embedding'], tokens).astype(config.backbone.dtype)


def bias(
  params: Mapping[str, Any], config: OnePassConfig, before: jax.Array, output: jax.Array, state: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """The bias of a slot's logits by the tokens before it, see `Markov`.

  Args:
    params: The parameters.
    config: The network, with a sequential part.
    before: `[..., rank]`, from `embed_before`.
    output: `[..., embed_dim]`, the outputs of the slot.
    state: `[..., rank]`, s before the slot, 0 before the first. Only `rnn` reads it; None for others.

  Returns:
    `[..., Vd]` in float32 or wider, and s after the slot.

  Raises:
    ValueError: The network has no sequential part.
  """
  if config.markov is None:
    raise ValueError('this network has no sequential part')
  own = params['markov']
  if config.markov.kind == 'gated':
    mixed = jax.nn.sigmoid(causal_lm.linear(own['gate'], jnp.concatenate([output, before], axis=-1))) * before
  elif config.markov.kind == 'rnn':
    product = causal_lm.linear(own['joint'], jnp.concatenate([state, before, output], axis=-1))
    gate, candidate, mixed = jnp.split(product, 3, axis=-1)
    gate, mixed = jax.nn.sigmoid(gate), jnp.tanh(mixed)
    state = gate * state + (1 - gate) * jnp.tanh(candidate)
  else:
    mixed = before
  return matmul(mixed, own['unembedding']), state


def confidence(
  params: Mapping[str, Any], config: OnePassConfig, output: jax.Array, before: jax.Array | None
) -> jax.Array:
  """The estimated chance that the guess of a slot is accepted, `[...]`, in float32 or wider (DSpark, section 3).

  It reads neither that guess nor a later one.

  Args:
    params: The parameters.
    config: The network, with an estimate.
    output: `[..., embed_dim]`, the outputs of the slot.
    before: `[..., rank]`, from `embed_before`; only read if `config.confidence` is `markov`.
  """
  read = output if config.confidence == 'hidden' else jnp.concatenate([output, before], axis=-1)
  own = params['confidence']
  return jax.nn.sigmoid(matmul(read, own['kernel'])[..., 0] + own['bias'][0])
