"""What configurations with recurrent layers may say: traits, older names, and numbers that are refused."""

import math
import types

import numpy as np
import pytest
from hub_specs import SPECS
from tiny_hub import Recorded, tensors_of

from spectr_jax.io.heads.head_sizes import block_config
from spectr_jax.io.hub.families import read_spec, spec_of_layers
from spectr_jax.io.hub.hub_model import make_model

_QWEN, _GRANITE, _LFM2, _LFM2_MOE = (SPECS[name] for name in ('qwen3_5', 'granite_hybrid', 'lfm2', 'lfm2_moe'))
_FALCON, _NEMOTRON = SPECS['falcon_h1'], SPECS['nemotron_h']


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
  assert read_spec(_GRANITE)[1].recurrence.steps == (0.0, math.inf)
  for limits in ([0.01, {'__float__': 'Infinity'}], [0.01, math.inf]):
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


def test_letters_and_names_of_nemotrons_layers():
  newer = _without(_NEMOTRON, 'hybrid_override_pattern', 'num_hidden_layers')
  for mixers in (('linear_attention', 'full_attention'), ('mamba', 'attention')):
    kinds = [mixers[0], 'moe', mixers[1], 'mlp']
    assert read_spec(newer | {'layers_block_type': kinds})[1] == read_spec(_NEMOTRON)[1]
  config = read_spec(_NEMOTRON)[1]
  assert config.parts == ('mixer', 'mlp', 'mixer', 'mlp')
  assert config.experts.layers == (False, True, False, False)
  assert [config.has_attention(layer) for layer in range(4)] == [False, False, True, False]
  fewer = spec_of_layers(_NEMOTRON, (1, 2))
  assert read_spec(fewer)[1].experts.layers == (True, False)


def test_multipliers_of_falcon_are_factors_of_kernels():
  tensors = tensors_of(_FALCON)
  params = make_model(_FALCON, Recorded(tensors)).params['layer_1']
  ssm = np.repeat(np.float32([0.7, 0.8, 0.9, 1.1, 1.2]), [24, 24, 12, 12, 4])
  factors = {
    'attention/q': ('self_attn.q_proj', 1.2), 'attention/k': ('self_attn.k_proj', 0.7 * 1.2),
    'attention/v': ('self_attn.v_proj', 1.2), 'attention/out': ('self_attn.o_proj', 1.0),
    'mlp/gate': ('feed_forward.gate_proj', 0.8), 'mlp/up': ('feed_forward.up_proj', 1.0),
    'mlp/down': ('feed_forward.down_proj', 0.6), 'recurrence/into': ('mamba.in_proj', ssm),
    'recurrence/out': ('mamba.out_proj', 1.0),
  }  # fmt: skip
  for path, (name, factor) in factors.items():
    part, module = path.split('/')
    kernel = tensors[f'model.layers.1.{name}.weight'].T
    np.testing.assert_allclose(params[part][module]['kernel'], kernel * factor, rtol=1e-6, err_msg=path)
  config = read_spec(_FALCON | {'mamba_d_ssm': None, 'embedding_multiplier': 3.0})[1]
  assert (config.recurrence.inner_dim, config.embedding_scale, config.logit_scale) == (32, 3.0, 0.5)
  assert config.recurrence.norm == 'before'
  assert read_spec(_FALCON | {'mamba_norm_before_gate': False})[1].recurrence.norm == 'behind'


def test_layers_that_guess_stand_beside_the_model():
  tensors = tensors_of(_QWEN)
  make_model(_QWEN, Recorded(tensors | {'mtp.fc.weight': np.ones((16, 32), np.float32)}))
  with pytest.raises(ValueError, match='1 tensors too many, the first of them mtq.fc.weight'):
    make_model(_QWEN, Recorded(tensors | {'mtq.fc.weight': np.ones((16, 32), np.float32)}))


def test_no_head_is_trained_for_recurrent_layers():
  for spec in (_QWEN, _FALCON, _NEMOTRON):
    with pytest.raises(ValueError, match='no head is trained for a target with recurrent layers'):
      block_config(types.SimpleNamespace(vocab_size=8), read_spec(spec)[1], num_layers=1)


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
    (_without(_LFM2_MOE, 'layer_types'), 'Lfm2MoeForCausalLM has no layer_types'),
    (_LFM2_MOE | {'num_experts_per_tok': 5}, 'num_chosen of experts must be from 1 to 4'),
    (_FALCON | {'mlp_multipliers': [1.0]}, 'mlp_multipliers must be 2 numbers and ssm_multipliers 5, got 1 and 5'),
    (_FALCON | {'key_multiplier': 0.0}, 'key_multiplier must be a finite number of at least 1e-06'),
    (_FALCON | {'mamba_proj_bias': True}, 'mamba_proj_bias and projectors_bias that differ'),
    (_FALCON | {'mamba_d_ssm': 26}, 'times mamba_n_heads 4 is not 26'),
    (_NEMOTRON | {'moe_latent_size': 8}, 'moe_latent_size 8, .* is not supported'),
    (_NEMOTRON | {'attention_bias': True}, 'attention_bias True is not supported'),
    (_NEMOTRON | {'mamba_hidden_act': 'relu'}, 'mamba_hidden_act .*relu.* is not supported'),
    (_NEMOTRON | {'hybrid_override_pattern': 'MX*-'}, 'a layer .*X.* is not supported; known are linear_attention'),
    (_NEMOTRON | {'hybrid_override_pattern': 'ME-*', 'layers_block_type': ['moe'] * 4}, 'contradict each other'),
    (_NEMOTRON | {'num_hidden_layers': 5}, 'there are 4 kinds of layers, but num_hidden_layers is 5'),
    (_NEMOTRON | {'hybrid_override_pattern': 'ME--'}, 'one of which has attention'),
    (_without(_NEMOTRON, 'hybrid_override_pattern'), 'NemotronHForCausalLM has no layers_block_type'),
  ],
)
def test_what_is_refused(spec, message):
  with pytest.raises(ValueError, match=f'config.json: .*{message}'):
    read_spec(spec)
