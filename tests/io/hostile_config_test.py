"""Mutated configurations of models and heads: each loads or is refused in one line, within bounds."""

import argparse
import dataclasses
import inspect
import json

import gguf_files
import hostile
import jax
import numpy as np
import published_heads
import pytest
from hub_specs import SPECS
from tiny_hub import write_model

from spectr_jax import Tokenizer, load_drafter, save_model
from spectr_jax.io.heads.head_files import output_head_rows
from spectr_jax.io.heads.layout import target_sizes
from spectr_jax.io.hub.gguf_config import hub_config
from spectr_jax.io.hub.gguf_header import GgufHeader, StoredTensor
from spectr_jax.io.hub.gguf_metadata import architecture_of
from spectr_jax.io.hub.gguf_tensors import GgufTensors
from spectr_jax.io.hub.hub_model import load_hub_model, make_model
from spectr_jax.io.model_files import load_model
from spectr_jax.io.untrusted import named
from spectr_jax.models import causal_lm, transformer

TEXT = inspect.getsource(argparse)
pytestmark = pytest.mark.slow

# Fields as files have them beside those of `SPECS`, with values that change nothing.
_MORE = {
  'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e4},
  'layer_types': ['full_attention'] * 2,
  'eos_token_id': [1, 2],
  'bos_token_id': 0,
  'hidden_act': 'silu',
  'tie_word_embeddings': False,
  'attention_bias': False,
  'num_experts': 0,
  'use_bidirectional_attention': False,
}
_YARN = {'rope_type': 'yarn', 'factor': 2.0, 'original_max_position_embeddings': 32, 'beta_fast': 32, 'mscale': 1.0}
_LLAMA3 = {
  'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1, 'high_freq_factor': 4,
  'original_max_position_embeddings': 32,
}  # fmt: skip
_CASES = SPECS | {
  'llama, more fields': SPECS['llama'] | _MORE,
  'yarn': SPECS['llama'] | {'rope_scaling': _YARN},
  'llama3': SPECS['llama'] | {'rope_scaling': _LLAMA3},
}


def test_configurations_of_the_hub(tmp_path):
  tally = hostile.Tally(tmp_path)
  for name, spec in _CASES.items():
    folder = write_model(tmp_path / name.replace(' ', '_'), spec)
    for rng in hostile.rngs(170, name):
      content = hostile.mutated_json_text(spec, rng)
      (folder / 'config.json').write_bytes(content)
      tally.read(lambda folder=folder: load_hub_model(folder), (name, content))
  tally.check()


def test_configurations_of_heads(tmp_path, monkeypatch):
  tally, target = hostile.Tally(tmp_path), published_heads.tiny_target()
  # What is asked of the target takes most of the time and depends on no head.
  sizes, rows = target_sizes(target), output_head_rows(target, None, 'float32')
  monkeypatch.setattr('spectr_jax.io.heads.head_files.target_sizes', lambda target: sizes)
  monkeypatch.setattr('spectr_jax.io.heads.head_files.output_head_rows', lambda target, ids, dtype: rows)
  folders = {name: tmp_path / name.replace(' ', '_') for name in published_heads.HEADS_BY_NAME}
  nested = {'eagle_config': {'eagle_aux_hidden_state_layer_ids': [1, 2, 3], 'use_aux_hidden_state': True}}
  for name, folder in folders.items():
    published_heads.write_head(folder, name)
    spec = published_heads.HEADS_BY_NAME[name][0] | (nested if name == 'eagle3' else {})
    for rng in hostile.rngs(290, name):
      content = hostile.mutated_json_text(spec, rng)
      (folder / 'config.json').write_bytes(content)
      tally.read(lambda folder=folder: load_drafter(folder, target), (name, content))
  tally.check()


def _header(architecture):
  """A GGUF file's header with tensors of the shapes of a tiny model."""
  stored_name, tensors, offset = gguf_files.stored_names(architecture), {}, 0
  for name, array in gguf_files.with_experts_joined(gguf_files.tensors_of(architecture)).items():
    tensors[stored_name(name)] = StoredTensor(gguf_files.converted(architecture, name, array).shape, 0, offset)
    offset += array.nbytes
  data = np.random.default_rng(0).normal(size=offset // 4).astype(np.float32).view(np.uint8)
  own = gguf_files.SIZES | gguf_files.METADATA[architecture] | _MORE_METADATA.get(architecture, {})
  kind = gguf_files.kind_of(architecture)
  if kind == 'gemma4':
    tensors['rope_freqs.weight'] = StoredTensor(gguf_files.TURNED.shape, 0, offset)
    data = np.concatenate([data, gguf_files.TURNED.view(np.uint8)])
  metadata = {'general.architecture': kind} | {f'{kind}.{key}': x for key, x in own.items()}
  return GgufHeader('there.gguf', metadata, tensors, data)


_MORE_METADATA = {
  'llama': {
    'attention.head_count_kv': [2, 2], 'rope.scaling.type': 'yarn', 'rope.scaling.factor': 2.0, 'vocab_size': 40,
    'rope.scaling.original_context_length': 32, 'attention.sliding_window': 8,
  },
  'gemma3': {'attention.sliding_window_pattern': [True, False]},
}  # fmt: skip
_IDS = {'tokenizer.ggml.eos_token_id': 1}


def _as_gguf(value):
  """A JSON value as far as GGUF can hold it."""
  if isinstance(value, list):
    return [each for each in map(_as_gguf, value) if each is not None]
  return value if isinstance(value, bool | int | float | str) else None


def test_metadata_of_gguf_files():
  tally = hostile.Tally('there.gguf')

  def read(header):
    with named(header.path):
      config = hub_config(header)
      return make_model(config, GgufTensors(header, config, architecture_of(header)), where=header.path)

  for architecture in gguf_files.SPECS:
    header = _header(architecture)
    read(header)
    for rng in hostile.rngs(255, architecture):
      mutated = hostile.mutated_json(header.metadata | _IDS, rng)
      values = {key: _as_gguf(value) for key, value in mutated.items()} if isinstance(mutated, dict) else {}
      values = {key: value for key, value in values.items() if value is not None}
      other = dataclasses.replace(header, metadata=values)
      tally.read(lambda other=other: read(other), (architecture, values))
  tally.check()


def _own_model(tmp_path):
  config = causal_lm.lm1b_config(vocab_size=300, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=32, context_length=32)
  model = causal_lm.causal_lm(transformer.init_params(jax.random.key(0), config), config)
  save_model(tmp_path / 'model', model, Tokenizer.train([TEXT], 300))
  return tmp_path / 'model'


def test_descriptions_of_own_models(tmp_path):
  folder = _own_model(tmp_path)
  spec, tally = json.loads((folder / 'config.json').read_text()), hostile.Tally(tmp_path)
  for rng in hostile.rngs(500):
    content = json.dumps(hostile.mutated_json(spec, rng)).encode()
    content = hostile.mutated_bytes(content, rng) if rng.random() < 0.2 else content
    (folder / 'config.json').write_bytes(content)
    tally.read(lambda: load_model(folder), content)
  tally.check(500)
