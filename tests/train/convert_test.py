"""Folders of older versions become folders of today's."""

import argparse
import inspect
import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from spectr_jax import Tokenizer, load_model
from spectr_jax.models import transformer
from spectr_jax.models.causal_lm import lm1b_config
from train.convert import convert

_SIZES = {'vocab_size': 400, 'embed_dim': 16, 'num_layers': 2, 'num_heads': 2, 'mlp_dim': 32}


def _as_in_version(params, version):
  """Parameters as a folder of format 1, 2 or 3 has them: one product for queries, keys and values."""

  def product(kernel):
    return {'kernel': kernel if version == 3 else kernel.T}

  def block(node):
    parts = np.stack([np.asarray(node['attention'][name]['kernel']).reshape(16, 2, 8) for name in 'qkv'], axis=1)
    return {
      'qkv': product((parts if version == 1 else parts.swapaxes(1, 2)).reshape(16, 48)),
      'attention_out': product(np.asarray(node['attention']['out']['kernel'])),
      'mlp_in': product(np.asarray(node['mlp']['up']['kernel'])),
      'mlp_out': product(np.asarray(node['mlp']['down']['kernel'])),
      'attention_norm': node['attention_norm'],
      'mlp_norm': node['mlp_norm'],
    }

  return {name: block(node) if name.startswith('layer_') else node for name, node in params.items()}


@pytest.mark.parametrize('version', [1, 2, 3])
def test_converted_models_are_the_same(version, tmp_path):
  config = lm1b_config(**_SIZES, context_length=32)
  params = jax.tree.map(np.asarray, transformer.init_params(jax.random.key(0), config))
  old, tokenizer = tmp_path / 'old', Tokenizer.train([inspect.getsource(argparse)], 400)
  old.mkdir()
  tokenizer.save(old / 'tokenizer.json')
  spec = {'format': version, 'config': _SIZES | {'max_length': 32}, 'param_dtype': 'float32', 'info': {'steps': 7}}
  (old / 'model.json').write_text(json.dumps(spec))
  with ocp.PyTreeCheckpointer() as checkpointer:
    checkpointer.save(old / 'params', _as_in_version(params, version))

  convert(old, tmp_path / 'new')
  model, loaded = load_model(tmp_path / 'new')
  jax.tree.map(np.testing.assert_array_equal, dict(model.params), params)
  assert model.context_length == 32
  assert loaded.encode('an argument') == tokenizer.encode('an argument')


def test_what_is_no_older_model_is_refused(tmp_path):
  with pytest.raises(ValueError, match='has no model.json: it is not a model of an older version'):
    convert(tmp_path, tmp_path / 'new')
