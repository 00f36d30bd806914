"""Tiny random heads in the names and configurations that are published, as arrays; and a target for them."""

import itertools
import json

import jax
import numpy as np
from safetensors.numpy import save_file

from spectr_jax.models import causal_lm

V, VD, D, MLP, LAYERS = 23, 11, 16, 24, 5
HEADS, KV_HEADS = 4, 2
_SIZES = {
  'hidden_size': D, 'intermediate_size': MLP, 'num_attention_heads': HEADS, 'num_key_value_heads': KV_HEADS,
  'num_hidden_layers': 1, 'rms_norm_eps': 1e-5, 'hidden_act': 'silu', 'vocab_size': V,
}  # fmt: skip
IDS = np.sort(np.random.default_rng(3).choice(V, VD, replace=False))
TARGET = causal_lm.CausalLMConfig(
  V, D, LAYERS, HEADS, KV_HEADS, D // HEADS, MLP, 64, rope=causal_lm.Rope((1.0, 0.1)), is_tied=True
)


def tiny_target(config=TARGET):
  """A target whose logits depend on the context."""
  rng = np.random.default_rng(0)

  def draw(shape):
    scale = 0.3 if len(shape.shape) == 1 else 2 * shape.shape[0] ** -0.5
    return (rng.normal(size=shape.shape) * scale + (len(shape.shape) == 1)).astype(np.float32)

  return causal_lm.causal_lm(jax.tree.map(draw, causal_lm.param_shapes(config)), config)


def _block(prefix, qkv_inputs=D, **others):
  width = D // HEADS
  shapes = {
    'self_attn.q_proj': (D, qkv_inputs), 'self_attn.k_proj': (KV_HEADS * width, qkv_inputs),
    'self_attn.v_proj': (KV_HEADS * width, qkv_inputs), 'self_attn.o_proj': (D, D), 'mlp.gate_proj': (MLP, D),
    'mlp.up_proj': (MLP, D), 'mlp.down_proj': (D, MLP), 'post_attention_layernorm': (D,),
  }  # fmt: skip
  return {f'{prefix}{name}.weight': shape for name, shape in (shapes | others).items()}


def _eagle3(block, num_features=3):
  shapes = _block(block, 2 * D, input_layernorm=(D,), hidden_norm=(D,))
  return shapes | {'fc.weight': (D, num_features * D), 'norm.weight': (D,), 'lm_head.weight': (VD, D)}


def _speculators(*, is_joint):
  norms = {'input_norm.weight': (3 * D,)} if is_joint else {f'fc_norm.{i}.weight': (D,) for i in range(3)}
  qk = {f'layers.0.self_attn.{name}_norm.weight': (D // HEADS,) for name in 'qk'}
  return _eagle3('layers.0.') | norms | qk | {'embed_tokens.weight': (V, D)}


def _peagle():
  qk = {f'self_attn.{name}_norm': (D // HEADS,) for name in 'qk'}
  shapes = _speculators(is_joint=True) | _block('layers.1.', input_layernorm=(D,), **qk)
  return shapes | {'mask_hidden': (1, 1, 3 * D)}


_SPECULATORS = {
  'speculators_model_type': 'eagle3',
  'transformer_layer_config': {**_SIZES, 'model_type': 'qwen3', 'rope_theta': 500.0},
  'draft_vocab_size': VD,
  'eagle_aux_hidden_state_layer_ids': [1, 3, 4],
  'norm_before_residual': True,
}
_QWEN_MTP = {
  'mtp.fc.weight': (D, 2 * D), 'mtp.pre_fc_norm_embedding.weight': (D,), 'mtp.pre_fc_norm_hidden.weight': (D,),
  'mtp.norm.weight': (D,),
}  # fmt: skip
_DEEPSEEK_MTP = {
  'eh_proj.weight': (D, 2 * D), 'enorm.weight': (D,), 'hnorm.weight': (D,), 'shared_head.norm.weight': (D,),
  'shared_head.head.weight': (V, D), 'embed_tokens.weight': (V, D),
}  # fmt: skip
RANK, SLOTS, MASK, GROUP, CANDIDATES = 6, 4, 20, 8, 5
_ONE_PASS_SIZES = _SIZES | {'num_hidden_layers': 2, 'block_size': SLOTS, 'head_dim': D // HEADS, 'model_type': 'qwen3'}


def _one_pass(markov=None, confidence_inputs=0, vocab_size=V, *, is_own=True):
  qk = {f'self_attn.{name}_norm': (D // HEADS,) for name in 'qk'}
  shapes = {'fc.weight': (D, 2 * D), 'hidden_norm.weight': (D,), 'norm.weight': (D,)}
  for layer in range(2):
    shapes |= _block(f'layers.{layer}.', input_layernorm=(D,), **qk)
  if is_own:
    shapes |= {'embed_tokens.weight': (V, D)}
  if is_own or vocab_size != V:
    shapes |= {'lm_head.weight': (vocab_size, D)}
  parts = {'gated': {'gate_proj': (RANK, D + RANK)}, 'rnn': {'joint_proj': (3 * RANK, 2 * RANK + D)}}
  if markov is not None:
    shapes |= {'markov_head.markov_w1.weight': (V, RANK), 'markov_head.markov_w2.weight': (vocab_size, RANK)}
    for name, shape in parts.get(markov, {}).items():
      shapes |= {f'markov_head.{name}.weight': shape, f'markov_head.{name}.bias': shape[:1]}
  if confidence_inputs:
    shapes |= {'confidence_head.proj.weight': (1, confidence_inputs), 'confidence_head.proj.bias': (1,)}
  return shapes


def _dflash2():
  groups = D // GROUP
  shapes = {'candidate_selector.hidden_projection.weight': (RANK, D)}
  shapes |= {f'candidate_selector.{name}_codebook': (V, RANK) for name in ('predecessor', 'successor')}
  for layer, name in itertools.product(range(2), ('attention_conv', 'mlp_conv')):
    shapes |= {f'layers.{layer}.{name}.base_kernel': (2, 2, D)}
    shapes |= {f'layers.{layer}.{name}.kernel_projection.weight': (2 * 2 * groups, D)}
  return _one_pass(is_own=False) | shapes


def _dspark(kind):
  return _ONE_PASS_SIZES | {
    'architectures': ['Qwen3DSparkModel'], 'target_layer_ids': [-1, 2], 'mask_token_id': MASK, 'num_anchors': 512,
    'enable_confidence_head': True, 'confidence_head_with_markov': True, 'markov_rank': RANK, 'markov_head_type': kind,
  }  # fmt: skip


def _one_pass_speculators(kind, **fields):
  block = {key: value for key, value in _ONE_PASS_SIZES.items() if key != 'block_size'}
  return fields | {
    'speculators_model_type': kind, 'block_size': SLOTS, 'mask_token_id': MASK, 'draft_vocab_size': VD,
    'aux_hidden_state_layer_ids': [0, 3],
    'transformer_layer_config': block | {'layer_types': ['sliding_attention', 'full_attention'], 'sliding_window': 3},
  }  # fmt: skip


def _dflash(architecture, last_type, options=(), **fields):
  nested = {'target_layer_ids': [0, 3], 'mask_token_id': MASK} | dict(options)
  windows = {'layer_types': ['sliding_attention', last_type], 'sliding_window': 3}
  return _ONE_PASS_SIZES | windows | fields | {'architectures': [architecture], 'dflash_config': nested}


_SELECTOR = {'conv_kernel_size': 2, 'conv_group_size': GROUP, 'selector_rank': RANK, 'selector_top_k': CANDIDATES}
_MEDUSA = ('0.linear.weight', (D, D)), ('0.linear.bias', (D,)), ('1.weight', (V, D))
# Name -> config.json, shapes by name.
HEADS_BY_NAME = {
  'eagle': (_SIZES | {'bias': True}, _block('layers.0.') | {'fc.weight': (D, 2 * D), 'fc.bias': (D,)}),
  'eagle3': (_SIZES | {'draft_vocab_size': VD}, _eagle3('midlayer.')),
  'speculators': (_SPECULATORS | {'fc_norm': True, 'norm_output': True}, _speculators(is_joint=False)),
  'speculators joint': (_SPECULATORS | {'norm_before_fc': True}, _speculators(is_joint=True)),
  'medusa': ({'medusa_num_heads': 2, 'medusa_num_layers': 1}, {f'{i}.{x}': y for i in range(5) for x, y in _MEDUSA}),
  'dflash': (_dflash('DFlashDraftModel', 'full_attention', num_target_layers=LAYERS), _one_pass(is_own=False)),
  'speculators peagle': (
    _SPECULATORS
    | {
      'speculators_model_type': 'peagle',
      'transformer_layer_config': {**_SPECULATORS['transformer_layer_config'], 'num_hidden_layers': 2},
      'norm_before_fc': True,
      'mask_token_id': MASK,
    },
    _peagle(),
  ),
  'dflash2': (_dflash('DFlash2DraftModel', 'sliding_attention', _SELECTOR, is_causal=False), _dflash2()),
  'speculators dflash2': (_one_pass_speculators('dflash2', **_SELECTOR), _dflash2()),
  'dspark': (_dspark('vanilla'), _one_pass('vanilla', D + RANK)),
  'dspark gated': (_dspark('gated'), _one_pass('gated', D + RANK)),
  'dspark rnn': (_dspark('rnn'), _one_pass('rnn', D)),
  'speculators dflash': (_one_pass_speculators('dflash'), _one_pass(vocab_size=VD, is_own=False)),
  'speculators dspark': (
    _one_pass_speculators('dspark', sample_from_anchor=False, sliding_window_non_causal=True),
    _one_pass('rnn', D + RANK, VD, is_own=False),
  ),
  'mtp': (
    _SIZES | {'num_hidden_layers': LAYERS, 'partial_rotary_factor': 0.5, 'rope_theta': 300.0},
    _block('mtp.layers.0.', input_layernorm=(D,)) | _QWEN_MTP,
  ),
  'deepseek mtp': (
    _SIZES | {'num_hidden_layers': LAYERS},
    {
      **_block(f'model.layers.{LAYERS}.', input_layernorm=(D,)),
      **{f'model.layers.{LAYERS}.{name}': shape for name, shape in _DEEPSEEK_MTP.items()},
      'model.norm.weight': (D,),
    },
  ),
}


def arrays_of(name, seed=0):
  """A head's tensors, `{name: array}`; `d2t` and `t2d` where it is reduced."""
  _, shapes = HEADS_BY_NAME[name]
  rng = np.random.default_rng(seed)
  scale = 0.6 if name == 'eagle' else 1.5  # without norms large weights make hidden states grow from guess to guess
  arrays = {}
  for key, shape in shapes.items():
    mean, std = (0, scale * shape[-1] ** -0.5) if len(shape) > 1 else (1 if shape else 0, 0.3)
    arrays[key] = (mean + std * rng.normal(size=shape)).astype(np.float32)
  if shapes.get('lm_head.weight') == (VD, D):
    arrays |= {'d2t': IDS - np.arange(VD), 't2d': np.isin(np.arange(V), IDS)}
  return arrays


def write_head(folder, name, changes=(), spec=None):
  """Writes a head, with changes of its tensors and of `config.json`; None leaves one out."""
  folder.mkdir(exist_ok=True)
  arrays = {key: array for key, array in (arrays_of(name) | dict(changes)).items() if array is not None}
  content = {key: value for key, value in (HEADS_BY_NAME[name][0] | (spec or {})).items() if value is not None}
  save_file(arrays, folder / 'model.safetensors')
  (folder / 'config.json').write_text(json.dumps(content))
  return folder
