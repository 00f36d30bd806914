"""The models of `benchmarks.speed`: a target and what drafts for it, ours and the peer's; rounds that keep no guess."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import spectr_jax
from benchmarks import timing
from configs import head as head_experiment
from spectr_jax import Drafter, Model
from spectr_jax.draft import head_drafter, one_pass_drafter
from spectr_jax.io.hub.hub_model import read_hub_config
from spectr_jax.kernels import native
from spectr_jax.kernels.int8 import BLOCKS
from spectr_jax.methods import Method
from spectr_jax.models import causal_lm, head, one_pass
from spectr_jax.models.causal_lm import lm1b_config
from spectr_jax.models.causal_lm_config import CausalLMConfig
from spectr_jax.models.head import HeadConfig
from spectr_jax.models.one_pass_config import OnePassConfig
from spectr_jax.models.transformer import init_params
from spectr_jax.proposal import Independent, Proposal
from spectr_jax.sampling import draw
from spectr_jax.verifiers import Verdict, Verifier
from train import eagle3_head, one_pass_head

SHAPES = {
  'A': lm1b_config(32000, 768, num_layers=10, num_heads=12, mlp_dim=3072, context_length=512),
  'B': lm1b_config(32000, 144, num_layers=6, num_heads=4, mlp_dim=576, context_length=512),
}
HEAD_TOKENS = 32000  # tokens that the head guesses, as EAGLE-3 has them


def make_model(shape: str, dtype: str) -> Model:
  """A model of one of `SHAPES` with random weights of a type."""
  config = dataclasses.replace(SHAPES[shape], dtype=dtype)
  return causal_lm.causal_lm(init_params(jax.random.key(0), config), config).for_decoding()


def read_config(name: str, dtype: str) -> CausalLMConfig:
  """The configuration of a name in `SHAPES`, or in a folder."""
  return dataclasses.replace(SHAPES[name], dtype=dtype) if name in SHAPES else read_hub_config(name, dtype=dtype)


def head_config(target: CausalLMConfig) -> HeadConfig:
  """The sizes of EAGLE-3's head for a target of at least 6 layers."""
  config = head_experiment.get_config('eagle3')
  config.update({'vocab_size': min(HEAD_TOKENS, target.vocab_size), 'has_unembedding': True, 'dtype': target.dtype})
  return eagle3_head.head_config(config, target)


def one_pass_config(target: CausalLMConfig, num_slots: int) -> OnePassConfig:
  """The sizes of a DSpark network of two layers that guesses `num_slots` tokens, for a target of at least 6 layers."""
  config = head_experiment.get_config('dspark')
  vocab_size = min(HEAD_TOKENS, target.vocab_size)
  rank = min(config.markov_rank, target.embed_dim)
  config.update(vocab_size=vocab_size, has_unembedding=True, dtype=target.dtype, block_size=num_slots, markov_rank=rank)
  return one_pass_head.one_pass_config(config, target, 0)


def bytes_per_step(config: CausalLMConfig) -> int:
  """Bytes of the weights that a step reads; of an embedding that is no output head it reads a row per token."""
  unread = 0 if config.is_tied else config.vocab_size * config.embed_dim
  return (config.num_params - unread) * jnp.dtype(config.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Models:
  """A target and what drafts for it, each made when it is first needed."""

  target: str = 'A'  # a name in `SHAPES` or a folder with `config.json`, for random weights; or a model from disk
  draft: str | None = 'B'  # a shape or folder; None for a target from disk
  has_head: bool = False  # with one of EAGLE-3's sizes, and one of DSpark's that guesses in one pass
  dtype: str = 'bfloat16'
  draft_dtype: str | None = None  # None for that of the target
  weights: str | None = None  # `int8`, `blocks`, or None for weights as they are on disk
  num_slots: int = 1  # tokens that the head of one pass guesses
  text: str = 'README.md'  # that prompts for a model from disk are cut from

  @functools.cached_property
  def _loaded(self):
    """The model on disk as it is stored, and its tokenizer."""
    return spectr_jax.load_model(self.target, dtype=self.dtype, weights=self.weights)

  @functools.cached_property
  def config(self) -> CausalLMConfig:
    return causal_lm.config_of(self._loaded[0]) if self.draft is None else read_config(self.target, self.dtype)

  def _random(self, name: str, number: int, dtype: str) -> Model:
    if name in SHAPES:
      return make_model(name, dtype)
    config, key = read_hub_config(name, dtype=dtype), jax.random.split(jax.random.key(0), 3)[number]
    return causal_lm.causal_lm(causal_lm.init_params(key, config), config).for_decoding()

  @functools.cached_property
  def decoding(self) -> Model:
    """The target in the form that decodes fastest."""
    return self._random(self.target, 0, self.dtype) if self.draft is not None else self._loaded[0].for_decoding()

  def forms(self) -> dict[str, Model]:
    """The target by the name of its products; one from disk with those of XLA as well, and in its own blocks."""
    forms = {native.form() or 'XLA': self.decoding}
    if native.form() and self.draft is None:
      with native.disabled():
        forms['XLA'] = self._loaded[0].for_decoding()
    if self.draft is None and self.target.endswith('.gguf') and self.weights is None:
      blocks, _ = spectr_jax.load_model(self.target, dtype=self.dtype, weights=BLOCKS)
      forms['blocks'] = blocks.for_decoding()
    return forms

  @functools.cached_property
  def drafts(self) -> dict[str, Model | Drafter]:
    """All that drafts for the target, by name, with random weights made on the device; none for one from disk."""
    if self.draft is None:
      return {}
    config, draft = self.config, self._random(self.draft, 1, self.draft_dtype or self.dtype)
    drafts: dict[str, Model | Drafter] = {'draft': draft.with_vocab_size(config.vocab_size)}
    if self.has_head:
      key = jax.random.split(jax.random.key(0), 3)[2]
      own = head_config(config)
      drafts['head'] = head_drafter(head.init_params(key, own), own, config.vocab_size).for_decoding()
      network = one_pass_config(config, self.num_slots)
      params = head.random_params(key, one_pass.param_shapes(network))
      drafts['one pass'] = one_pass_drafter(params, network, config.vocab_size).for_decoding()
    return drafts

  def make_peer(self, name: str, dtype: str, device: str):
    """The target or draft in Hugging Face's transformers."""
    from benchmarks import peer

    if name in SHAPES:
      return peer.make_model(SHAPES[name], dtype)
    return (peer.load_gguf if self.draft is None else peer.make_public)(name, dtype, device)

  def prompts(self, batch_size: int, length: int | None = None) -> np.ndarray:
    """Prompts, int32 `[batch_size, length or PROMPT_LENGTH]`: random tokens, or the text's, repeated as needed."""
    if self.draft is None:
      ids = np.array(self._loaded[1].encode(pathlib.Path(self.text).read_text(encoding='utf-8')), np.int32)
    else:
      ids = timing.prompts(batch_size, self.config.vocab_size)
    return np.resize(ids, (batch_size, length or timing.PROMPT_LENGTH))


@dataclasses.dataclass(frozen=True)
class KeepNothing(Verifier):
  """Draws the next token from the target's distribution after the root, and keeps no guess.

  Guesses and all distributions are computed nevertheless, since a round looks for logits that are not finite.
  """

  proposal_rules = (object,)

  def verify(self, keys, tree, proposal: Proposal, target_probs, state) -> Verdict:
    del proposal
    token = draw(jax.random.uniform(keys[0], dtype=target_probs.dtype), target_probs[0])
    return Verdict.at(tree, jnp.zeros((), jnp.int32), token, state)

  def law(self, tree, proposal: Proposal, target_probs, state) -> jax.Array:
    del tree, proposal, state
    return jnp.zeros_like(target_probs).at[0].set(target_probs[0])


UNVERIFIED = Method('no verification', KeepNothing(), Independent(), is_lossless=True, source='')
