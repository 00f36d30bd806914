"""What configurations with recurrent layers may say: traits, older names, and numbers that are refused."""

import math

import pytest
from hub_specs import SPECS

from spectr_jax.io.hub.families import read_spec

_QWEN, _GRANITE, _LFM2 = SPECS['qwen3_5'], SPECS['granite_hybrid'], SPECS['lfm2']


def _without(spec, *names):
  return {name: value for name, value in spec.items() if name not in names}


def test_files_without_names_of_layers():
  """By the interval of attention, and by the numbers of layers with attention."""
  spec = _without(_QWEN, 'layer_types') | {'num_hidden_layers': 4}
  assert read_spec(spec)[1].recurrence.layers == (True, True, True, False)
  assert read_spec(spec | {'full_attention_interval': 2})[1].recurrence.layers == (True, False, True, False)
  spec = _without(_LFM2, 'layer_types') | {'full_attn_idxs': [1]}
  assert read_spec(spec)[1].recurrence.layers == (True, False)


def test_both_names_of_granites_layers():
  newer = _GRANITE | {'layer_types': ['linear_attention', 'full_attention']}
  assert read_spec(newer)[1] == read_spec(_GRANITE)[1]


def test_steps_of_mamba():
  limits = [0.01, {'__float__': 'Infinity'}]
  assert read_spec(_GRANITE)[1].recurrence.steps == (0.0, math.inf)
  assert read_spec(_GRANITE | {'time_step_limit': limits})[1].recurrence.steps == (0.01, math.inf)


def test_positions():
  """Without a word none turn; the widths of MLPs are those that are shared."""
  config = read_spec(_GRANITE)[1]
  assert config.rope.frequencies == ()
  assert config.mlp_dim == 20
  assert len(read_spec(_GRANITE | {'position_embedding_type': 'rope'})[1].rope.frequencies) == config.head_dim // 2


def test_mlps_of_lfm2():
  """Two thirds of the width, times a factor, in whole units."""
  assert read_spec(_LFM2)[1].mlp_dim == 16  # of 24, in units of 8
  assert read_spec(_LFM2 | {'block_ffn_dim_multiplier': 1.1})[1].mlp_dim == 24
  assert read_spec(_LFM2 | {'block_auto_adjust_ff_dim': False})[1].mlp_dim == 24
  assert read_spec(_LFM2 | {'block_auto_adjust_ff_dim': False, 'block_ff_dim': 40})[1].mlp_dim == 40


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    (_QWEN | {'linear_num_value_heads': 10**9}, 'linear_num_value_heads must be'),
    (_QWEN | {'linear_num_value_heads': 3}, '3 heads of recurrent layers do not divide into num_groups 2'),
    (_QWEN | {'linear_key_head_dim': -1}, 'linear_key_head_dim must be'),
    (_QWEN | {'linear_conv_kernel_dim': 10**6}, 'linear_conv_kernel_dim must be'),
    (_QWEN | {'attn_output_gate': False}, 'attn_output_gate false is not supported'),
    (_QWEN | {'layer_types': ['linear_attention', 'sliding_attention']}, 'layer_types: .*sliding_attention.* is not'),
    (_QWEN | {'layer_types': ['linear_attention'] * 2}, 'one of which has attention'),
    (_QWEN | {'layer_types': ['full_attention']}, 'layer_types names 1 layers, but there are 2'),
    (_GRANITE | {'mamba_d_head': 7}, 'mamba_d_head 7 times mamba_n_heads 4 is not 32'),
    (_GRANITE | {'mamba_d_head': 'wide'}, 'mamba_d_head .*wide.* times'),
    (_GRANITE | {'mamba_n_groups': 3}, 'do not divide into num_groups 3'),
    (_GRANITE | {'time_step_limit': [2.0, 1.0]}, 'steps of recurrent layers'),
    (_GRANITE | {'time_step_limit': [{'__float__': 'NaN'}, 1.0]}, 'time_step_limit must be two numbers'),
    (_GRANITE | {'time_step_limit': [1.0]}, 'time_step_limit must be two numbers'),
    (_LFM2 | {'conv_L_cache': 0}, 'conv_L_cache must be'),
  ],
)
def test_what_is_refused(spec, message):
  with pytest.raises(ValueError, match=f'config.json: .*{message}'):
    read_spec(spec)
