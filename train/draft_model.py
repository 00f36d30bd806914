"""Training of a small model on text that its target writes, to draft for it (DistillSpec, Zhou et al. 2023)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from spectr_jax import Drafter, Model
from spectr_jax.draft import model_drafter
from spectr_jax.io.hub.families import read_spec, spec_of_layers
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from spectr_jax.io.hub.save import save_hub_model
from spectr_jax.io.model_files import ModelFiles, open_model
from spectr_jax.io.tokenizer import TokenizerBase, check_same_tokens
from spectr_jax.io.untrusted import whole
from spectr_jax.models.causal_lm import causal_lm, hidden_states
from spectr_jax.models.causal_lm_config import CausalLMConfig
from train.draft_kind import DraftKind, as_float32
from train.head_step import Guesses, HeadBatch, guesses_ahead

_EMBEDDINGS = ('embedding', 'position_embedding', 'unembedding')


def _spread(num_layers: int, num_chosen: int) -> tuple[int, ...]:
  """Layers at equal distances, the first and the last among them."""
  return tuple(np.linspace(0, num_layers - 1, num_chosen).round().astype(int).tolist())


@dataclasses.dataclass(frozen=True)
class ModelKind(DraftKind):
  """A small model: some of the target's layers, between the target's embedding and output head, which stay as they are;
  or another model, all of which is trained.
  """

  fields = {'num_layers': whole(1)}
  folder, num_depths = 'model', 1

  config: CausalLMConfig
  spec: Mapping[str, Any]  # the content of its `config.json`
  layers: tuple[int, ...] | None  # the target's that it begins with; None for another model

  @classmethod
  def of(cls, config, target: CausalLMConfig, files: ModelFiles) -> ModelKind:
    if not config.init_from:
      if config.num_layers > target.num_layers:
        raise ValueError(f'config.num_layers must be at most {target.num_layers}, got {config.num_layers}')
      layers = _spread(target.num_layers, config.num_layers)
      spec = spec_of_layers(files.spec, layers)
    else:
      try:
        own = open_model(config.init_from)
        spec, layers = own.spec, None
        check_same_tokens([('the target', files.tokenizer()), (config.init_from, own.tokenizer())])
      except ValueError as error:
        raise ValueError(f'config.init_from: {config.init_from}: {error}') from error
    model_config = dataclasses.replace(read_spec(spec)[1], dtype=config.dtype)
    if model_config.logit_soft_cap is not None:
      raise ValueError('models whose logits are capped are not trained here')
    if model_config.has_sinks:
      raise ValueError('models with sinks of attention (gpt-oss) are not trained here')
    return cls(model_config, spec, layers)

  def init_params(self, key: jax.Array, target: Model, unembedding: jax.Array) -> dict[str, Any]:
    del key, unembedding
    assert self.layers is not None  # another model has parameters
    own = {f'layer_{i}': target.params[f'layer_{layer}'] for i, layer in enumerate(self.layers)}
    return as_float32({'final_norm': target.params['final_norm'], **own})

  def load_params(self, path: epath.PathLike, target: Model) -> tuple[dict[str, Any], np.ndarray | None]:
    """As for `DraftKind`; tokens that one of both models does not have are no guesses that count."""
    model = open_model(path).load(dtype='float32', weights=None, mesh=None)
    ids = np.arange(model.vocab_size, dtype=np.int32) if model.vocab_size < target.vocab_size else None
    return dict(model.params), ids

  def frozen_params(self, target: Model) -> dict[str, Any]:
    """The target's embedding and output head, if the model is made of its layers."""
    if self.layers is None:
      return {}
    return {'embeddings': {name: target.params[name] for name in _EMBEDDINGS if name in target.params}}

  def guesses(self, params: Mapping[str, Any], frozen: Mapping[str, Any], batch: HeadBatch) -> list[Guesses]:
    """As for `DraftKind`: a model guesses one token ahead of the text, whoever wrote it."""
    whole = jax.tree.map(lambda x: x.astype(self.config.dtype), {**frozen.get('embeddings', {}), **params})
    tokens = jnp.where(batch.tokens < self.config.vocab_size, batch.tokens, 0)  # as `Model.with_vocab_size` reads them
    hidden = hidden_states(whole, self.config, tokens[:, :-1])[:, 1:]
    unembedding = whole['unembedding'] if 'unembedding' in whole else whole['embedding'].T
    return [guesses_ahead(hidden, unembedding[:, : frozen['unembedding'].shape[1]], 0)]

  def drafter(
    self, params: Mapping[str, Any], frozen: Mapping[str, Any], target_ids: np.ndarray | None, vocab_size: int
  ) -> Drafter:
    del target_ids, vocab_size
    return model_drafter(causal_lm({**frozen.get('embeddings', {}), **params}, self.config))

  def save(self, path: epath.PathLike, drafter: Drafter, tokenizer: TokenizerBase, info: Mapping[str, Any]) -> None:
    assert isinstance(tokenizer, HubTokenizer)  # that of a public model
    save_hub_model(path, drafter.model, tokenizer, self.spec, info=info, overwrite=True)
