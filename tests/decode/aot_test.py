"""Compilation ahead of time: the sizes that its options name. What it compiles is in tests/tpu_test.py."""

import dataclasses
import json
import math

import commands
import jax
import pytest
from hub_specs import SPECS
from jax.sharding import AbstractMesh

from decode import aot
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.io.hub.families import read_spec
from spectr_jax.models.causal_lm_config import CausalLMConfig, is_lm1b
from spectr_jax.tree import TokenTree

_HUB = commands.ROOT / 'configs/hub'


def _num_entries(model):
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.params))


@pytest.mark.parametrize(
  ('name', 'num_params', 'num_kv_heads'),
  [
    ('llama_3_8b', 8_030_261_248, 8),
    ('llama_3_70b', 70_553_706_496, 8),
    ('qwen_3_8b', 8_190_735_360, 8),
    ('gpt_oss_20b', 20_914_757_184, 8),
    ('gemma_4_26b_a4b', 25_233_141_790, 8),
    ('qwen_3_5_9b', 8_953_803_264, 4),
    ('qwen_3_5_35b_a3b', 34_660_610_688, 2),
  ],
)
def test_shapes_of_public_models(name, num_params, num_kv_heads):
  config = aot.read_config(str(_HUB / name), 'bfloat16')
  assert isinstance(config, CausalLMConfig)
  assert (config.num_params, config.num_kv_heads, config.dtype) == (num_params, num_kv_heads, 'bfloat16')
  model = aot.abstract_model(config)
  assert _num_entries(model) == num_params
  assert {type(leaf) for leaf in jax.tree.leaves(model.params)} == {jax.ShapeDtypeStruct}


def test_sizes_of_files_and_of_heads_for_a_target():
  config = aot.read_config(str(commands.ROOT / 'configs/lm1b.py:6m'), 'float32')
  assert is_lm1b(config)
  assert config.dtype == 'float32'
  target = aot.read_config(str(_HUB / 'llama_3_8b'), 'bfloat16')
  head_file = commands.ROOT / 'configs/head.py'
  dspark = aot.read_draft(f'{head_file}:dspark', target, 'bfloat16')
  assert (dspark.max_depth, dspark.backbone.vocab_size, dspark.is_reduced) == (7, 8192, True)
  drafter = aot.abstract_head(dspark, target.vocab_size)
  assert {type(leaf) for leaf in jax.tree.leaves(drafter.params)} == {jax.ShapeDtypeStruct}
  assert (drafter.estimates, drafter.max_depth, drafter.feature_layers) == (True, 7, (2, 16, 29))
  eagle = aot.read_draft(f'{head_file}:eagle3', target, 'bfloat16')
  assert (eagle.block.vocab_size, aot.abstract_head(eagle, target.vocab_size).vocab_size) == (8192, target.vocab_size)
  with pytest.raises(ValueError, match='configs/head.py:medusa is not compiled here; of heads eagle3, dspark'):
    aot.read_draft(f'{head_file}:medusa', target, 'bfloat16')
  small = aot.read_config(str(commands.ROOT / 'configs/lm1b.py:6m'), 'float32')
  with pytest.raises(ValueError, match='cannot say that is_gated is False'):
    aot.read_draft(f'{head_file}:dspark', small, 'bfloat16')
  assert aot.read_draft(str(_HUB / 'draft_of_llama_3'), target, 'bfloat16').vocab_size == target.vocab_size


def test_products_are_counted_once_per_parameter():
  """All parameters but gains, biases and, with a head of its own, the embedding are multiplied by each token."""
  tied = aot.abstract_model(aot.read_config(str(_HUB / 'draft_of_llama_3'), 'bfloat16'))
  gains = 768 * (2 * 12 + 1)
  assert aot.matmul_flops(tied, 3) == 2 * 3 * (_num_entries(tied) - gains)
  config = aot.read_config(str(_HUB / 'llama_3_8b'), 'bfloat16')
  untied = aot.abstract_model(config)
  gains = config.embed_dim * (2 * config.num_layers + 1)
  embedding = config.vocab_size * config.embed_dim
  assert aot.matmul_flops(untied, 5) == 2 * 5 * (_num_entries(untied) - gains - embedding)
  mixture = aot.abstract_model(aot.read_config(str(_HUB / 'gpt_oss_20b'), 'bfloat16'))
  of_layer = 2 * 2880 * 64 * (64 + 8) + 2880 * 32 + 4 * 3 * 2880**2  # attention, the router, and 4 of 32 experts
  assert aot.matmul_flops(mixture, 1) == 2 * (24 * of_layer + 201_088 * 2880)


@pytest.mark.parametrize(
  ('option', 'change', 'message'),
  [
    ('--target_config=/no/such/folder', None, 'no model at /no/such/folder: expected a folder with config.json'),
    ('--draft_config=nobody/nothing', None, 'no model at nobody/nothing'),
    ('--target_config=configs/none.py', None, 'cannot load config configs/none.py'),
    (
      '--target=pretrained/target',
      None,
      "Unknown command line flag 'target'. Did you mean: target_config; --help lists",
    ),
    (
      '',
      {'architectures': ['BloomForCausalLM']},
      'architecture BloomForCausalLM is unknown; known are LlamaForCausalLM',
    ),
    ('', {'vocab_size': 'many'}, "vocab_size must be a whole number from 1 to 4194304, got 'many'"),
  ],
)
def test_sizes_that_are_not_there_or_not_known_are_refused(tmp_path, option, change, message):
  if change is not None:
    (tmp_path / 'config.json').write_text(json.dumps(SPECS['llama'] | change))
    option = f'--target_config={tmp_path}'
  assert message in commands.refuse('decode.aot', option, HF_HUB_OFFLINE='1')


@pytest.mark.parametrize(
  ('sizes', 'max_new_tokens', 'message'),
  [
    ({'data': 2, 'model': 4}, 25, "prompts of 8 tokens with 25 new ones exceed the models' limit of 32"),
    ({'data': 1, 'model': 3}, 8, '4 heads with 2 heads of keys and values cannot be sharded over model:3'),
  ],
)
def test_what_does_not_fit_public_models_is_refused(sizes, max_new_tokens, message):
  _, config = read_spec(SPECS['llama'])
  sharding = DecodeSharding(AbstractMesh(tuple(sizes.values()), tuple(sizes)))
  with pytest.raises(ValueError, match=message):
    aot.analyse(
      sharding, 'speculative', TokenTree.chains(1, 2), target=config, draft=config, batch_size=2, prompt_length=8,
      max_new_tokens=max_new_tokens,
    )  # fmt: skip


def test_a_pair_gets_one_vocabulary_and_copies_of_heads():
  _, config = read_spec(SPECS['llama'])
  draft = dataclasses.replace(config, vocab_size=30)
  mesh = AbstractMesh((1, 4), ('data', 'model'))
  for is_divided, width in ((False, 8), (True, 16)):
    target, small = aot.abstract_pair(config, draft, DecodeSharding(mesh, is_draft_divided=is_divided))
    assert small.vocab_size == target.vocab_size == 32
    shapes = [model.params['layer_0']['attention']['k']['kernel'].shape for model in (target, small)]
    assert shapes == [(16, 16), (16, width)]
