"""Training of networks that guess a block in one pass: DSpark (arXiv:2607.05147) and DFlash (arXiv:2602.06036).

A text is divided into blocks, one behind the other, which begin at another place whenever the text is seen. Each block
guesses its tokens from the token before it, the target's hidden states up to there, and in DSpark the tokens of the
text within the block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax import Model
from spectr_jax.draft import one_pass_drafter
from spectr_jax.draft.one_pass_drafter import config_of
from spectr_jax.io.heads.head_sizes import ONE_PASS_FIELDS, one_pass_config
from spectr_jax.io.model_files import ModelFiles
from spectr_jax.models import causal_lm, one_pass
from spectr_jax.models.causal_lm_config import CausalLMConfig
from spectr_jax.models.one_pass_config import OnePassConfig
from train.draft_kind import FeatureHead, as_float32, begin_features
from train.head_step import Guesses, HeadBatch


def run_blocks(
  params: Mapping[str, Any], config: OnePassConfig, embedded: jax.Array, features: jax.Array, anchors: jax.Array
) -> jax.Array:
  """The outputs `[B, A, W, embed_dim]` of all slots of blocks of each text, from the slots' embedded tokens, of the
  same shape. A block, whose first slot is at its place of `anchors` `[B, A]`, reads the `features` `[B, S, F,
  target_dim]` before it. The layers of `config` have no windows.
  """
  (batch_size, size), (num_blocks, num_slots) = features.shape[:2], embedded.shape[1:3]
  num_all = num_blocks * num_slots
  positions = jnp.broadcast_to(jnp.arange(size), (batch_size, size))
  # The context stands before the slots among what is pending, since attention to a cache has no gradient.
  cache = config.backbone.empty_cache(batch_size, 0).with_pending_slots(size + num_all)
  cache = one_pass.read_context(params, config, features, positions, cache)
  block = jnp.arange(num_all) // num_slots
  own = jnp.broadcast_to(block == block[:, None], (batch_size, num_all, num_all))
  before = jnp.arange(size) < jnp.repeat(anchors, num_slots, axis=1)[..., None]
  seen = jnp.concatenate([before, own], axis=-1)
  places = (anchors[..., None] + jnp.arange(num_slots)).reshape(batch_size, -1)
  flat = embedded.reshape(batch_size, -1, embedded.shape[-1])
  outputs = one_pass.run_slots(params, config, flat, places, lambda window: (seen, None, places), cache)
  return outputs.reshape(*embedded.shape[:3], -1)


def _principal(embedding: jax.Array, rank: int) -> jax.Array:
  """Embedded tokens `[V, D]` along their `rank` directions of largest variance, with mean 0 and variance 1 in each."""
  centered = embedding - jnp.mean(embedding, axis=0)
  variances, directions = jnp.linalg.eigh(centered.T @ centered / len(centered))
  directions, variances = directions[:, -rank:], variances[-rank:]
  # Which of two opposite directions comes out depends on the machine.
  largest = jnp.take_along_axis(directions, jnp.argmax(jnp.abs(directions), axis=0)[None], axis=0)
  return centered @ (directions * jnp.sign(largest) / jnp.sqrt(jnp.maximum(variances, 1e-12)))


@dataclasses.dataclass(frozen=True)
class OnePassKind(FeatureHead):
  """A network that guesses a block in one pass."""

  fields = ONE_PASS_FIELDS
  config_of = staticmethod(config_of)
  param_shapes = staticmethod(one_pass.param_shapes)
  make_drafter = staticmethod(one_pass_drafter)

  config: OnePassConfig
  # Whether layers and context begin as the target's last layers and what these read; else they are random. The final
  # norm begins as the target's in any case.
  from_target: bool

  @property
  def num_ids(self) -> int | None:
    return self.config.backbone.vocab_size

  @property
  def num_depths(self) -> int:
    return self.config.max_depth

  @classmethod
  def of(cls, config, target: CausalLMConfig, files: ModelFiles) -> OnePassKind:
    mask_id = config.mask_id
    if mask_id == -1:
      eos_ids = files.tokenizer().eos_ids
      if not eos_ids:
        raise ValueError('config.mask_id must be a token: the tokenizer has none that ends a text')
      mask_id = eos_ids[0]
    return cls(one_pass_config(config, target, mask_id), config.from_target)

  def init_params(self, key: jax.Array, target: Model, unembedding: jax.Array) -> dict[str, Any]:
    config, params = self.config, self.random_params(key, unembedding)
    params['final_norm'] = as_float32(target.params['final_norm'])
    if config.markov is not None:
      embedding = self.frozen_params(target)['embedding'].astype(jnp.float32)
      params['markov']['embedding'] = _principal(embedding, config.markov.rank)
      params['markov']['unembedding'] = jnp.zeros_like(params['markov']['unembedding'])
    if config.confidence is not None:
      params['confidence'] = jax.tree.map(jnp.zeros_like, params['confidence'])
    if self.from_target:
      self._begin_as_target(params, target)
    return params

  def _begin_as_target(self, params: dict[str, Any], target: Model) -> None:
    """Sets layers to the target's last ones, and the context to the last hidden state that is read, normed."""
    backbone, num_layers = self.config.backbone, causal_lm.config_of(target).num_layers
    for i in range(backbone.num_layers):
      own, layer = params[f'layer_{i}'], as_float32(target.params[f'layer_{num_layers - backbone.num_layers + i}'])
      own['attention'] |= layer['attention']
      own['attention_norm'] = layer['attention_norm']
      if 'down' in layer['mlp'] and layer['mlp']['down']['kernel'].shape[0] == backbone.mlp_dim:
        own |= {'mlp': layer['mlp'], 'mlp_norm': layer['mlp_norm']}
    params['features']['kernel'] = begin_features(params['features']['kernel'], backbone.embed_dim)
    params['features_norm'] = as_float32(target.params[f'layer_{num_layers - 1}']['attention_norm'])

  def guesses(self, params: Mapping[str, Any], frozen: Mapping[str, Any], batch: HeadBatch) -> list[Guesses]:
    config, depth = self.config, self.num_depths
    params = jax.tree.map(lambda x: x.astype(config.backbone.dtype), dict(params))
    batch_size, size = batch.tokens.shape
    num_slots, offsets = config.num_slots, batch.offsets[:, None] % depth
    # Block j begins at token `offsets + j * depth` and guesses the `depth` tokens behind it.
    anchors = offsets + jnp.arange((size - 2) // depth + 1) * depth
    places = jnp.minimum(anchors[..., None] + jnp.arange(num_slots), size - 1)
    tokens = jnp.take_along_axis(batch.tokens, places.reshape(batch_size, -1), axis=1).reshape(places.shape)
    masked = tokens.at[..., 1:].set(config.mask_id)
    embedded = jnp.take(frozen['embedding'], masked, axis=0)
    outputs = run_blocks(params, config, embedded, batch.features[:, :, :-1], anchors)
    mixed = confidence = before = None
    if config.markov is not None:
      # Slots that guess the token behind their own place read what stands there, others what stands before it.
      last = tokens if config.guesses_at_root else jnp.concatenate([tokens[..., :1], tokens[..., :-1]], axis=-1)
      before = one_pass.embed_before(params, config, last)
      mixed = self._read_before(params, before, outputs)
    if config.confidence is not None:
      confidence = one_pass.confidence_logits(params, config, outputs, before)
    # Entry i guesses token i + 2, the `ahead`-th one behind the anchor of the first block.
    ahead = jnp.arange(size - 2) + 1 - offsets

    def by_entry(x):
      """`[B, S - 2, ...]` of `[B, A, W, ...]`; anything for entries that no block guesses."""
      if x is None:
        return None
      flat = x[:, :, num_slots - depth :].reshape(batch_size, -1, *x.shape[3:])
      index = jnp.maximum(ahead, 0)
      return jax.vmap(lambda row, places: row[places])(flat, index)

    products = [(by_entry(outputs), params.get('unembedding', frozen['unembedding']))]
    if mixed is not None:
      products.append((by_entry(mixed), params['markov']['unembedding']))
    return [Guesses(tuple(products), jnp.where(ahead < 0, -1, ahead % depth), by_entry(confidence))]

  def _read_before(self, params: Mapping[str, Any], before: jax.Array, outputs: jax.Array) -> jax.Array:
    """The factor of every slot's bias, `[B, A, W, rank]`, given the tokens of the text before each slot."""
    assert self.config.markov is not None
    if self.config.markov.kind != 'rnn':
      return one_pass.read_before(params, self.config, before, outputs, None)[0]
    state: jax.Array | None = jnp.zeros_like(before[:, :, 0])
    slots = []
    for slot in range(self.config.num_slots):
      mixed, state = one_pass.read_before(params, self.config, before[:, :, slot], outputs[:, :, slot], state)
      slots.append(mixed)
    return jnp.stack(slots, axis=2)
