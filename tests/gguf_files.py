"""GGUF files of tiny models, as llama.cpp's conversion writes them."""

import re

import gguf
import numpy as np
import tiny_hub
from gguf import GGMLQuantizationType as Type
from hub_specs import SPECS as TINY

HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCAB, LAYERS, CONTEXT = 4, 2, 16, 64, 40, 2, 128
_WIDE = {'vocab_size': VOCAB, 'hidden_size': WIDTH, 'intermediate_size': 96, 'max_position_embeddings': CONTEXT}
_GEMMA = {'head_dim': HEAD_DIM, 'hidden_act': 'gelu_pytorch_tanh'}
_GEMMA4 = {'rms_norm_eps': 1e-5, 'head_dim': HEAD_DIM, 'global_head_dim': 2 * HEAD_DIM, 'sliding_window': 24}
_WINDOWED = _GEMMA | {'query_pre_attn_scalar': HEAD_DIM, 'sliding_window': 24}
_GRANITE = _WIDE | {
  'rms_norm_eps': 1e-5, 'mamba_n_groups': 2, 'shared_intermediate_size': 96, 'embedding_multiplier': 3.0,
  'residual_multiplier': 0.5,
}  # fmt: skip
_QWEN35 = {'rms_norm_eps': 1e-5, 'head_dim': HEAD_DIM, 'linear_value_head_dim': HEAD_DIM}
# The `config.json` of a model by llama.cpp's name of its architecture: rows are wide enough for blocks of 32.
SPECS = {
  'llama': TINY['llama'] | _WIDE | {'attention_bias': True, 'rms_norm_eps': 1e-5},
  'qwen2': TINY['qwen2'] | _WIDE | {'rms_norm_eps': 1e-5},
  'qwen3': TINY['qwen3'] | _WIDE | {'head_dim': HEAD_DIM, 'rms_norm_eps': 1e-5, 'tie_word_embeddings': True},
  'mixtral': TINY['mixtral'] | _WIDE | {'rms_norm_eps': 1e-5},
  'qwen3moe': TINY['qwen3_moe']
  | _WIDE
  | {'rms_norm_eps': 1e-5, 'head_dim': HEAD_DIM, 'moe_intermediate_size': 32, 'mlp_only_layers': []},
  'olmoe': TINY['olmoe'] | _WIDE | {'rms_norm_eps': 1e-5, 'num_key_value_heads': KV_HEADS},
  'gpt-oss': TINY['gpt_oss']
  | _WIDE
  | {'rms_norm_eps': 1e-5, 'head_dim': HEAD_DIM, 'sliding_window': 24, 'rope_parameters': {'rope_type': 'default'}},
  'gemma': TINY['gemma'] | _WIDE | _GEMMA | {'rms_norm_eps': 1e-5},
  'gemma2': TINY['gemma2']
  | _WIDE
  | _WINDOWED
  | {'rms_norm_eps': 1e-5, 'attn_logit_softcapping': 40.0, 'final_logit_softcapping': 30.0},
  'gemma3': {
    'architectures': ['Gemma3ForCausalLM'], 'num_hidden_layers': LAYERS, 'num_attention_heads': HEADS,
    'num_key_value_heads': KV_HEADS, 'rms_norm_eps': 1e-5, **_WIDE, **_WINDOWED,
  },
  'gemma4': TINY['gemma4'] | _WIDE | _GEMMA4 | {'hidden_size_per_layer_input': 32, 'vocab_size_per_layer_input': VOCAB},
  'gemma4 mixture': TINY['gemma4_mixture']
  | _WIDE
  | _GEMMA4
  | {'attention_k_eq_v': True, 'num_global_key_value_heads': 1, 'moe_intermediate_size': 32},
  'granitehybrid': TINY['granite_hybrid'] | _GRANITE,
  'granitehybrid mixture': TINY['granite_hybrid'] | _GRANITE | {'num_local_experts': 4, 'num_experts_per_tok': 2},
  'qwen35': TINY['qwen3_5'] | _WIDE | _QWEN35 | {'linear_num_value_heads': 6},
  'qwen35moe': TINY['qwen3_5_moe']
  | _WIDE
  | _QWEN35
  | dict.fromkeys(('intermediate_size', 'moe_intermediate_size', 'shared_expert_intermediate_size'), 32),
  'lfm2': TINY['lfm2']
  | _WIDE
  | {'rms_norm_eps': 1e-5, 'conv_bias': False, 'block_auto_adjust_ff_dim': False, 'rope_theta': 1e6},
  'gptneox': TINY['gpt_neox'] | _WIDE | {'rotary_pct': 0.25, 'use_parallel_residual': False},
  'gpt2': TINY['gpt2'] | {'vocab_size': VOCAB, 'n_embd': WIDTH, 'n_positions': CONTEXT},
}  # fmt: skip
SIZES = {
  'block_count': LAYERS, 'context_length': CONTEXT, 'embedding_length': WIDTH, 'feed_forward_length': 96,
  'attention.head_count': HEADS,
}  # fmt: skip
_RMS = {'attention.layer_norm_rms_epsilon': 1e-5, 'attention.head_count_kv': KV_HEADS}
_GEMMA4_RMS = {
  'block_count': 4, 'attention.layer_norm_rms_epsilon': 1e-5, 'attention.sliding_window': 24,
  'attention.sliding_window_pattern': [True, False] * 2, 'final_logit_softcapping': 5.0,
  **dict.fromkeys(('attention.key_length', 'attention.value_length', 'rope.dimension_count'), 2 * HEAD_DIM),
  **dict.fromkeys(('attention.key_length_swa', 'attention.value_length_swa', 'rope.dimension_count_swa'), HEAD_DIM),
}  # fmt: skip
_GRANITE_METADATA = {
  'attention.layer_norm_rms_epsilon': 1e-5, 'attention.head_count_kv': [0, KV_HEADS], 'ssm.conv_kernel': 4,
  'ssm.state_size': 6, 'ssm.group_count': 2, 'ssm.inner_size': 2 * WIDTH, 'ssm.time_step_rank': 4,
  'rope.scaling.finetuned': False, 'attention.scale': 0.3, 'logit_scale': 2.0, 'embedding_scale': 3.0,
  'residual_scale': 0.5,
}  # fmt: skip
_QWEN35_METADATA = _RMS | {
  'attention.key_length': HEAD_DIM, 'attention.value_length': HEAD_DIM, 'rope.dimension_count': HEAD_DIM // 4,
  'ssm.conv_kernel': 4, 'ssm.state_size': 3, 'ssm.group_count': 2, 'ssm.inner_size': 64, 'ssm.time_step_rank': 4,
  'full_attention_interval': 2,
}  # fmt: skip
METADATA = {
  'llama': _RMS | {'rope.dimension_count': HEAD_DIM, 'rope.freq_base': 5e5},
  'qwen2': _RMS,
  'qwen3': _RMS | {'attention.key_length': HEAD_DIM, 'attention.value_length': HEAD_DIM},
  'mixtral': _RMS | {'expert_count': 4, 'expert_used_count': 2, 'rope.freq_base': 1e6},
  'qwen3moe': _RMS
  | {'attention.key_length': HEAD_DIM, 'attention.value_length': HEAD_DIM}
  | {'expert_count': 5, 'expert_used_count': 2, 'expert_feed_forward_length': 32},
  'olmoe': _RMS | {'expert_count': 6, 'expert_used_count': 3},
  'gpt-oss': _RMS
  | {'attention.key_length': HEAD_DIM, 'attention.value_length': HEAD_DIM, 'attention.sliding_window': 24}
  | {'expert_count': 4, 'expert_used_count': 2, 'expert_feed_forward_length': 96, 'rope.freq_base': 15e4},
  'gemma': _RMS | {'attention.key_length': HEAD_DIM},
  'gemma2': _RMS | {'attention.key_length': HEAD_DIM, 'attention.sliding_window': 24, 'attn_logit_softcapping': 40.0},
  'gemma3': _RMS | {'attention.key_length': HEAD_DIM, 'attention.sliding_window': 24},
  'gemma4': _GEMMA4_RMS
  | {'attention.head_count_kv': KV_HEADS, 'embedding_length_per_layer_input': 32, 'attention.shared_kv_layers': 2}
  | {'feed_forward_length': [96, 96, 192, 192]},
  'gemma4 mixture': _GEMMA4_RMS
  | {'attention.head_count_kv': [KV_HEADS, 1] * 2, 'rope.freq_base': 1e6, 'rope.freq_base_swa': 1e4}
  | {'expert_count': 5, 'expert_used_count': 2, 'expert_feed_forward_length': 32},
  'granitehybrid': _GRANITE_METADATA,
  'granitehybrid mixture': _GRANITE_METADATA
  | {'expert_count': 4, 'expert_used_count': 2, 'expert_shared_feed_forward_length': 96},
  'qwen35': _QWEN35_METADATA | {'ssm.time_step_rank': 6, 'ssm.inner_size': 96},
  'qwen35moe': _QWEN35_METADATA
  | {'expert_count': 5, 'expert_used_count': 2, 'expert_feed_forward_length': 32}
  | {'expert_shared_feed_forward_length': 32, 'feed_forward_length': None},
  'lfm2': _RMS | {'attention.head_count_kv': [0, KV_HEADS], 'shortconv.l_cache': 3, 'rope.freq_base': 1e6},
  'gptneox': {'attention.layer_norm_epsilon': 1e-5, 'rope.dimension_count': 4, 'use_parallel_residual': False},
  'gpt2': {'attention.layer_norm_epsilon': 1e-5, 'feed_forward_length': 4 * WIDTH},
}
_KINDS = {
  'mixtral': 'llama',
  'gemma4 mixture': 'gemma4',
  'granitehybrid mixture': 'granitehybrid',
}  # models that share another one's architecture
# Numbers that stand beside the tensors of modules, and a factor of each of Gemma 4's frequencies.
_BESIDE = {
  'router.scale': 'ffn_gate_inp.scale', 'router.per_expert_scale': 'ffn_down_exps.scale', '.A_log': 'ssm_a',
  'mamba.D': 'ssm_d', '.dt_bias': 'ssm_dt.bias', 'input_linear.gate': 'ffn_gate.weight',
  'input_linear.up': 'ffn_up.weight', 'shared_mlp.output_linear.weight': 'ffn_down.weight',
  **{f'block_sparse_moe.experts.{part}_proj.weight': f'ffn_{part}_exps.weight' for part in ('gate', 'up', 'down')},
}  # fmt: skip
TURNED = np.where(np.arange(HEAD_DIM) < HEAD_DIM // 4, 1, 1e30).astype(np.float32)
_OF_EXPERT = re.compile(r'(?<=experts)\.(\d+)')
TOKENIZER = {'model': 'gpt2', 'pre': 'gpt-2', 'tokens': ['a', 'b', 'ab'], 'merges': ['a b']}


def tensors_of(architecture):
  """The tensors of a model, by the hub's names."""
  return tiny_hub.tensors_of(SPECS[architecture])


def kind_of(architecture):
  """llama.cpp's name of the architecture that a model of `SPECS` has."""
  return _KINDS.get(architecture, architecture)


def stored_names(architecture):
  """llama.cpp's name of a tensor by the hub's, from the package that converts."""
  kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
  names = gguf.get_tensor_name_map(kinds[kind_of(architecture)], 4)

  def stored_name(name):
    beside = next((stored for hub, stored in _BESIDE.items() if name.endswith(hub)), None)
    if beside:
      is_shared = architecture == 'granitehybrid mixture' and re.fullmatch(r'ffn_(gate|up|down)\.weight', beside)
      return f'blk.{name.split(".")[2]}.{beside.replace(".", "_shexp.") if is_shared else beside}'
    module, _, leaf = (name if name.endswith(('weight', 'bias')) else f'{name}.weight').rpartition('.')
    return f'{names.get_name(module)}.{leaf}'

  return stored_name


def with_experts_joined(tensors):
  """Tensors by the hub's names, with those of all experts as one, without a number; in Gemma 4 gates with ups."""
  joined = {}
  for name, tensor in tensors.items():
    joined.setdefault(_OF_EXPERT.sub('', name), []).append(tensor)
  joined = {name: np.stack(parts) if '.experts.' in name else parts[0] for name, parts in joined.items()}
  for name in [name for name in joined if name.endswith('shared_mlp.input_linear.weight')]:
    gate, up = np.split(joined.pop(name), 2)
    joined |= {name.replace('weight', 'gate'): gate, name.replace('weight', 'up'): up}
  for name in [name for name in joined if re.search(r'\d\.experts\.gate_proj', name)]:
    both = [joined.pop(name.replace('gate', part)) for part in ('gate', 'up')]
    joined[name.replace('gate', 'gate_up')] = np.concatenate(both, axis=1)
  return joined


def converted(architecture, name, tensor):
  """A tensor as llama.cpp stores it."""
  architecture = kind_of(architecture)
  if architecture in ('llama', 'granitehybrid') and ('q_proj' in name or 'k_proj' in name):
    heads = HEADS if 'q_proj' in name else KV_HEADS
    return tensor.reshape(heads, 2, HEAD_DIM // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
  if architecture == 'gptneox' and 'query_key_value' in name:
    heads = tensor.reshape(HEADS, 3, HEAD_DIM, *tensor.shape[1:])
    return np.concatenate([heads[:, part].reshape(WIDTH, *tensor.shape[1:]) for part in range(3)])
  if architecture == 'gpt2' and '.h.' in name and tensor.ndim == 2:
    return tensor.T
  if name.endswith(('conv.conv.weight', 'conv1d.weight')):
    tensor = tensor[:, 0]
  if 'linear_attn' in name and 'norm' not in name:
    tensor = -np.exp(tensor) if name.endswith('A_log') else tensor
    num, width = (
      SPECS[architecture]['linear_num_value_heads'],
      1 if re.search('_[ab]\\.|A_log|dt_bias', name) else HEAD_DIM,
    )
    axis = -1 if 'out_proj' in name else 0
    moved = np.moveaxis(tensor, axis, 0)
    values = moved[-num * width :].reshape(2, num // 2, width, -1).swapaxes(0, 1).reshape(num * width, *moved.shape[1:])
    return np.moveaxis(np.concatenate([moved[: -num * width], values]), 0, axis)
  if '.mamba.' in name and name.endswith(('A_log', 'D', 'norm.weight')):
    tensor = -np.exp(tensor) if name.endswith('A_log') else tensor
    return tensor.reshape(2 if name.endswith('norm.weight') else len(tensor), -1)
  has_offset = architecture in ('gemma', 'gemma2', 'gemma3', 'qwen35', 'qwen35moe')
  if has_offset and name.endswith('norm.weight') and 'linear_attn' not in name:
    return tensor + 1
  return tensor


def write(path, architecture, metadata, tensors=()):
  """Writes a file of metadata, of which None is left out, and of names, arrays and types of tensors."""
  writer = gguf.GGUFWriter(path, architecture)
  adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
  for key, value in metadata.items():
    if value is not None:
      adders.get(type(value), writer.add_array)(key, value)
  for name, tensor, kind in tensors:
    writer.add_tensor(name, tensor, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def write_model(path, architecture='llama', kind=Type.F32, metadata=None, tensors=None, extra=()):
  """Writes a tiny model of an architecture of `SPECS`, with matrices of a type.

  `metadata` replaces the defaults, and None removes them; `tensors` by the hub's names are in place of its own, and
  `extra` has further ones as they are stored.
  """
  kind_name = kind_of(architecture)
  own = {f'{kind_name}.{key}': value for key, value in (SIZES | METADATA.get(architecture, {})).items()}
  tokenizer = {f'tokenizer.ggml.{name}': value for name, value in TOKENIZER.items()}
  stored = []
  for name, tensor in with_experts_joined(tensors_of(architecture) if tensors is None else tensors).items():
    tensor = np.ascontiguousarray(converted(architecture, name, tensor))
    is_small = name.endswith(('bias', 'A_log', '.D', 'conv.weight', 'conv1d.weight', 'norm.weight'))
    as_kind = kind if tensor.ndim >= 2 and not is_small else Type.F32
    stored.append((stored_names(architecture)(name), gguf.quants.quantize(tensor, as_kind), as_kind))
  if kind_name == 'gemma4':
    stored.append(('rope_freqs.weight', TURNED, Type.F32))
  return write(path, kind_name, own | tokenizer | (metadata or {}), [*stored, *extra])
