"""Every family beside its implementation in `transformers`: tiny random models, saved by it and loaded here.

pip install -e '.[test,parity]' && python -m pytest -m parity tests/parity
"""

import contextlib
import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hub

from spectr_jax import SamplingParams, TokenTree, generate
from spectr_jax.io.hub.families import read_spec, spec_of_layers
from spectr_jax.io.hub.hub_model import load_hub_model, read_json
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from spectr_jax.io.hub.save import save_hub_model
from spectr_jax.model import Model
from spectr_jax.models.causal_lm import causal_lm

torch = pytest.importorskip('torch', reason='needs the extra parity')
transformers = pytest.importorskip('transformers', reason='needs the extra parity')
safetensors = pytest.importorskip('safetensors.torch', reason='needs the extra parity')
pytestmark = [pytest.mark.parity, pytest.mark.usefixtures('highest')]

SIZES = {
  'vocab_size': 61, 'hidden_size': 32, 'intermediate_size': 48, 'num_hidden_layers': 3, 'num_attention_heads': 4,
  'num_key_value_heads': 2, 'max_position_embeddings': 64, 'pad_token_id': 0, 'bos_token_id': 1, 'eos_token_id': 2,
}  # fmt: skip
_LLAMA3 = {
  'rope_type': 'llama3', 'rope_theta': 10000.0, 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
  'original_max_position_embeddings': 32,
}  # fmt: skip
# Of GGUF files that store what each frequency is divided by.
_DIVISORS = {
  'rope_type': 'longrope', 'rope_theta': 1e4, 'short_factor': [1.0, 1.5, 2.5, 7.0], 'long_factor': [1.0, 1.5, 2.5, 7.0],
  'original_max_position_embeddings': 16, 'factor': 4.0,
}  # fmt: skip
_GEMMA = {'head_dim': 12, 'query_pre_attn_scalar': 10, 'sliding_window': 5}
_TWO_ROPES = {
  'full_attention': {'rope_type': 'linear', 'rope_theta': 1e4, 'factor': 8.0},
  'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e2},
}
_GPT_NEOX = {'num_key_value_heads': None}
_GPT2 = {
  'vocab_size': 61, 'n_embd': 32, 'n_layer': 3, 'n_head': 4, 'n_positions': 64, 'bos_token_id': 1, 'eos_token_id': 2,
}  # fmt: skip
_YARN = {'rope_type': 'yarn', 'rope_theta': 1e4, 'factor': 4.0, 'original_max_position_embeddings': 16}
_LINEAR = {'rope_type': 'linear', 'rope_theta': 1e5, 'factor': 4.0}
_QWEN3_MOE = {
  'head_dim': 12, 'num_experts': 5, 'num_experts_per_tok': 2, 'moe_intermediate_size': 24, 'mlp_only_layers': [1],
  'norm_topk_prob': True,
}  # fmt: skip
_GPT_OSS = {
  'head_dim': 16, 'num_local_experts': 4, 'num_experts_per_tok': 2, 'sliding_window': 5,
  'rope_parameters': {**_YARN, 'truncate': False},
}  # fmt: skip
_GLM4_MOE = {
  'head_dim': 12, 'n_routed_experts': 8, 'num_experts_per_tok': 3, 'n_group': 4, 'topk_group': 2,
  'moe_intermediate_size': 24, 'n_shared_experts': 2, 'routed_scaling_factor': 1.5, 'use_qk_norm': True,
  'attention_bias': True,
}  # fmt: skip
_GLM4_MOE_PLAIN = _GLM4_MOE | {
  'n_group': 1, 'topk_group': 1, 'use_qk_norm': False, 'attention_bias': False, 'first_k_dense_replace': 0,
  'norm_topk_prob': False,
}  # fmt: skip
_GRANITE = {'attention_multiplier': 0.3, 'embedding_multiplier': 3.0, 'residual_multiplier': 0.5, 'logits_scaling': 2.0}
_BIASED = {'tie_word_embeddings': True, 'attention_bias': True, 'mlp_bias': True, 'head_dim': 12}
_CAPPED = _GEMMA | {'attn_logit_softcapping': 2.0, 'final_logit_softcapping': 3.0}
_KINDS = ['sliding_attention', 'sliding_attention', 'full_attention']
_GEMMA4 = {
  'num_hidden_layers': 6, 'head_dim': 16, 'global_head_dim': 32, 'sliding_window': 5, 'layer_types': _KINDS * 2,
  'final_logit_softcapping': 3.0,
}  # fmt: skip
_GEMMA4_SMALL = _GEMMA4 | {
  'num_kv_shared_layers': 2, 'use_double_wide_mlp': True, 'hidden_size_per_layer_input': 8,
  'vocab_size_per_layer_input': 61, 'layer_types': [*_KINDS, *_KINDS[1:], 'sliding_attention'],
}  # fmt: skip
_GEMMA4_LARGE = _GEMMA4 | {
  'hidden_size_per_layer_input': 0, 'attention_k_eq_v': True, 'num_global_key_value_heads': 1,
  'use_bidirectional_attention': 'vision',
}  # fmt: skip
_GEMMA4_MIXTURE = _GEMMA4_LARGE | {
  'enable_moe_block': True, 'num_experts': 6, 'top_k_experts': 3, 'moe_intermediate_size': 24,
}  # fmt: skip
_QWEN3_5 = {
  'head_dim': 16, 'linear_key_head_dim': 6, 'linear_value_head_dim': 10, 'linear_num_key_heads': 2,
  'linear_num_value_heads': 4, 'layer_types': ['linear_attention', 'linear_attention', 'full_attention'],
}  # fmt: skip
_QWEN3_5_MOE = _QWEN3_5 | {
  'num_experts': 5, 'num_experts_per_tok': 2, 'moe_intermediate_size': 24, 'shared_expert_intermediate_size': 20,
}  # fmt: skip
_GRANITE_HYBRID = {
  'layer_types': ['mamba', 'mamba', 'attention'], 'mamba_n_heads': 8, 'mamba_d_head': 8, 'mamba_n_groups': 2,
  'mamba_d_state': 6, 'num_local_experts': 0, 'num_experts_per_tok': 0, 'shared_intermediate_size': 40,
  'attention_multiplier': 0.3, 'embedding_multiplier': 3.0, 'residual_multiplier': 0.5, 'logits_scaling': 2.0,
}  # fmt: skip
_GRANITE_HYBRID_MOE = _GRANITE_HYBRID | {
  'num_local_experts': 4, 'num_experts_per_tok': 2, 'position_embedding_type': 'rope', 'mamba_proj_bias': True,
}  # fmt: skip
_LFM2 = {'layer_types': ['conv', 'conv', 'full_attention'], 'block_auto_adjust_ff_dim': False}
_LFM2_MOE = {
  'layer_types': ['conv', 'conv', 'full_attention'], 'num_experts': 6, 'num_experts_per_tok': 3, 'num_dense_layers': 1,
  'moe_intermediate_size': 24, 'routed_scaling_factor': 1.5,
}  # fmt: skip
_FALCON_H1 = {
  'mamba_d_ssm': 48, 'mamba_n_heads': 6, 'mamba_d_head': 8, 'mamba_n_groups': 2, 'mamba_d_state': 6,
  'lm_head_multiplier': 0.5, 'embedding_multiplier': 3.0, 'mlp_multipliers': [0.8, 0.6], 'key_multiplier': 0.7,
  'attention_out_multiplier': 0.9, 'attention_in_multiplier': 1.2, 'ssm_multipliers': [0.7, 0.8, 0.9, 1.1, 1.2],
  'ssm_in_multiplier': 1.3, 'ssm_out_multiplier': 0.4, 'head_dim': 12,
}  # fmt: skip
_FALCON_H1_NORMED = _FALCON_H1 | {
  'mamba_rms_norm': True, 'mamba_norm_before_gate': False, 'attention_bias': True, 'mlp_bias': True,
  'mamba_proj_bias': True, 'projectors_bias': True,
}  # fmt: skip
# Transformers bounds the steps of several tokens by `time_step_min`, those of single ones not.
_NEMOTRON_H = {
  'layers_block_type': ['linear_attention', 'moe', 'full_attention', 'mlp', 'linear_attention'], 'head_dim': 12,
  'mamba_num_heads': 6, 'mamba_head_dim': 8, 'n_groups': 2, 'ssm_state_size': 6, 'time_step_min': 1e-9,
  'n_routed_experts': 8, 'num_experts_per_tok': 3, 'n_group': 4, 'topk_group': 2, 'moe_intermediate_size': 24,
  'moe_shared_expert_intermediate_size': 20, 'routed_scaling_factor': 1.5, 'num_hidden_layers': None,
}  # fmt: skip
_NEMOTRON_H_BIASED = _NEMOTRON_H | {
  'layers_block_type': ['linear_attention', 'mlp', 'full_attention'], 'use_bias': True, 'mlp_bias': True,
  'use_conv_bias': False,
}  # fmt: skip
# Name -> class of the model, and what differs from SIZES.
CASES = {
  'llama': ('LlamaForCausalLM', {}),
  'llama_tied_biased': ('LlamaForCausalLM', _BIASED),
  'llama_llama3': ('LlamaForCausalLM', {'rope_parameters': _LLAMA3}),
  'llama_linear': ('LlamaForCausalLM', {'rope_parameters': _LINEAR}),
  'llama_divisors': ('LlamaForCausalLM', {'rope_parameters': _DIVISORS}),
  'llama_yarn': ('LlamaForCausalLM', {'rope_parameters': _YARN}),
  'mistral': ('MistralForCausalLM', {'sliding_window': 5}),
  'qwen2': ('Qwen2ForCausalLM', {'tie_word_embeddings': True}),
  'qwen2_windows': ('Qwen2ForCausalLM', {'use_sliding_window': True, 'sliding_window': 4, 'max_window_layers': 1}),
  'qwen3': ('Qwen3ForCausalLM', {'head_dim': 12}),
  'mixtral': ('MixtralForCausalLM', {'num_local_experts': 4, 'num_experts_per_tok': 2, 'sliding_window': 5}),
  'qwen3_moe': ('Qwen3MoeForCausalLM', _QWEN3_MOE),
  'qwen3_moe_sparse': ('Qwen3MoeForCausalLM', _QWEN3_MOE | {'decoder_sparse_step': 2, 'norm_topk_prob': False}),
  'olmoe': ('OlmoeForCausalLM', {'num_experts': 6, 'num_experts_per_tok': 3}),
  'glm4_moe': ('Glm4MoeForCausalLM', _GLM4_MOE),
  'glm4_moe_plain': ('Glm4MoeForCausalLM', _GLM4_MOE_PLAIN),
  'gpt_oss': ('GptOssForCausalLM', _GPT_OSS),
  'granite': ('GraniteForCausalLM', _GRANITE | {'attention_bias': True, 'mlp_bias': True}),
  'granitemoe': ('GraniteMoeForCausalLM', _GRANITE | {'num_local_experts': 4, 'num_experts_per_tok': 2}),
  'gemma': ('GemmaForCausalLM', {'head_dim': 12}),
  'gemma2': ('Gemma2ForCausalLM', _CAPPED),
  'gemma3': ('Gemma3ForCausalLM', {**_GEMMA, 'rope_parameters': _TWO_ROPES, 'sliding_window_pattern': 3}),
  'gemma4_small': ('Gemma4ForCausalLM', _GEMMA4_SMALL),
  'gemma4_large': ('Gemma4ForCausalLM', _GEMMA4_LARGE),
  'gemma4_mixture': ('Gemma4ForCausalLM', _GEMMA4_MIXTURE),
  'gemma4_unified': ('Gemma4UnifiedForCausalLM', _GEMMA4 | {'attention_k_eq_v': True}),
  'qwen3_5': ('Qwen3_5ForCausalLM', _QWEN3_5),
  'qwen3_5_moe': ('Qwen3_5MoeForCausalLM', _QWEN3_5_MOE),
  'qwen3_next': ('Qwen3NextForCausalLM', _QWEN3_5_MOE | {'mlp_only_layers': [1], 'norm_topk_prob': True}),
  'granite_hybrid': ('GraniteMoeHybridForCausalLM', _GRANITE_HYBRID),
  'granite_hybrid_moe': ('GraniteMoeHybridForCausalLM', _GRANITE_HYBRID_MOE),
  'lfm2': ('Lfm2ForCausalLM', _LFM2),
  'lfm2_biased': ('Lfm2ForCausalLM', _LFM2 | {'conv_bias': True}),
  'lfm2_moe': ('Lfm2MoeForCausalLM', _LFM2_MOE),
  'lfm2_moe_unbiased': ('Lfm2MoeForCausalLM', _LFM2_MOE | {'use_expert_bias': False, 'norm_topk_prob': False}),
  'falcon_h1': ('FalconH1ForCausalLM', _FALCON_H1),
  'falcon_h1_normed': ('FalconH1ForCausalLM', _FALCON_H1_NORMED),
  'falcon_h1_normed_first': ('FalconH1ForCausalLM', _FALCON_H1 | {'mamba_rms_norm': True}),
  'nemotron_h': ('NemotronHForCausalLM', _NEMOTRON_H),
  'nemotron_h_biased': ('NemotronHForCausalLM', _NEMOTRON_H_BIASED),
  'gpt_neox': ('GPTNeoXForCausalLM', _GPT_NEOX),
  'gpt_neox_sequential': ('GPTNeoXForCausalLM', {**_GPT_NEOX, 'use_parallel_residual': False}),
  'gpt2': ('GPT2LMHeadModel', None),
}
TREE = TokenTree((0, 0, 1, 1, 2, 4))  # depths 0, 1, 1, 2, 2, 2, 3
LENGTHS = np.array([11, 7, 1])
# Relative to the largest logit. float32: two orders of summation. bfloat16: 8 bits, amplified through three layers.
TOLERANCE = {'float32': 1e-4, 'bfloat16': 0.05}


def _class_and_config(name):
  model_name, differences = CASES[name]
  model_class = getattr(transformers, model_name)
  sizes = _GPT2 if differences is None else {**SIZES, **differences}
  return model_class, model_class.config_class(**{k: v for k, v in sizes.items() if v is not None})


@pytest.fixture(scope='module', params=CASES)
def case(request, tmp_path_factory):
  """The reference, and the folder that it was saved to."""
  model_class, config = _class_and_config(request.param)
  reference = random_reference(model_class, config)
  folder = tmp_path_factory.mktemp(request.param)
  reference.save_pretrained(folder)
  return reference, folder


def random_reference(model_class, config):
  """A model whose parameters all count."""
  torch.manual_seed(0)
  reference = model_class._from_config(config, attn_implementation='eager').eval()
  with torch.no_grad():
    ends = 'layer_scalar', '_correction_bias', 'expert_bias'
    scales = [named for named in reference.named_buffers() if named[0].endswith(ends)]
    for name, parameter in (*reference.named_parameters(), *scales):
      if name.endswith(('bias', 'norm.weight')) or parameter.ndim == 1:
        parameter += 0.3 * torch.randn_like(parameter)  # they begin as constants, which hide mistakes
      else:
        parameter *= 4  # so that the context counts
  return reference


def _texts():
  """Prompts `[B, P]`, the tokens of a tree after them `[B, N + 1]`, and the text of every row and node."""
  rng = np.random.default_rng(0)
  prompts, tokens = rng.integers(3, 61, (3, LENGTHS.max())), rng.integers(3, 61, (3, 7))
  texts = [
    [*prompt[:length], *(row[node] for node in (0, *path) if node >= 0)]
    for prompt, length, row in zip(prompts.tolist(), LENGTHS, tokens.tolist())
    for path in TREE.paths.tolist()
  ]
  return prompts, tokens, texts


def _reference_logits(reference, texts):
  with torch.no_grad():
    return np.stack([reference(torch.tensor([text])).logits[0, -1].float().numpy() for text in texts])


def _assert_near(found, expected, reference, dtype):
  errors = np.abs(np.asarray(found) - expected).max(axis=-1) / np.abs(expected).max()
  # In 16 bits a token between two experts may be sent to another one.
  may_differ = dtype == 'bfloat16' and hasattr(reference.config, 'num_experts_per_tok')
  assert (np.median(errors) if may_differ else errors.max()) < TOLERANCE[dtype], errors


@jax.jit
def _prefill(model, prompts, lengths):
  return model.prefill(prompts, lengths, model.init_cache_fn(prompts.shape[0], 24))[0]


def _assert_same_logits_of_prompts(model, reference, dtype):
  """Of whole prompts, ragged: what stands behind a row's end does not count."""
  prompts, _, _ = _texts()
  expected = _reference_logits(reference, [row[:n] for row, n in zip(prompts.tolist(), LENGTHS)])
  positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
  causal = jnp.tril(jnp.ones((prompts.shape[1],) * 2, bool))
  logits = jax.jit(Model.apply)(model, prompts, positions, causal, model.init_cache_fn(3, 24)).logits
  _assert_near(logits[np.arange(3), LENGTHS - 1], expected, reference, dtype)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_prompts_trees_and_steps_have_the_references_logits(case, dtype):
  reference, folder = case
  model = load_hub_model(folder, dtype=dtype)
  kernels = [leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(model.params) if keys[-1].key == 'kernel']
  assert {kernel.dtype for kernel in kernels} == {jnp.dtype(dtype)}
  config = read_spec(read_json(folder))[1]
  if dtype == 'bfloat16' and (config.query_scale == 1 or config.recurrence):
    # Scores that are not scaled amplify rounding, and states collect it: caches_test compares both with float32.
    return
  reference = copy.deepcopy(reference).to(getattr(torch, dtype))
  prompts, tokens, texts = _texts()
  apply = jax.jit(Model.apply)
  _assert_same_logits_of_prompts(model, reference, dtype)
  # A tree after them.
  expected = _reference_logits(reference, texts).reshape(3, 7, -1)
  cache = _prefill(model, prompts, LENGTHS)
  output = apply(model, tokens, LENGTHS[:, None] + TREE.depths, jnp.asarray(TREE.ancestors), cache)
  _assert_near(output.logits, expected, reference, dtype)
  # One path of it, token by token.
  nodes = [0, 1, 4, 6]
  for depth, node in enumerate(nodes):
    output = apply(model, tokens[:, node : node + 1], LENGTHS[:, None] + depth, jnp.ones((1, 1), bool), cache)
    _assert_near(output.logits[:, 0], expected[:, node], reference, dtype)
    cache = output.cache.commit(jnp.zeros((3, 1), jnp.int32), jnp.ones(3, jnp.int32))


def test_greedy_texts_are_the_references(case):
  reference, folder = case
  model = load_hub_model(folder).for_decoding()
  prompts, _, _ = _texts()
  settings = {'method': 'race_traversal', 'tree': TokenTree.chains(2, 3), 'max_new_tokens': 12}
  near = jax.tree.map(lambda x: x + 0.02 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), model.params)
  draft = dataclasses.replace(model, params=near)
  new = generate(jax.random.key(0), model, draft, prompts, LENGTHS, sampling=SamplingParams(0.0), **settings)
  texts = [row[:n] for row, n in zip(prompts.tolist(), LENGTHS)]
  for _ in range(12):
    logits = _reference_logits(reference, texts)
    texts = [[*text, int(row.argmax())] for text, row in zip(texts, logits)]
  np.testing.assert_array_equal(new.tokens, [text[-12:] for text in texts])


def test_some_layers_written_here_are_read_there(case, tmp_path):
  """Layers 0 and 2, written by `save_hub_model`: the reference reads them, and has the same logits."""
  reference, folder = case
  layers, spec = (0, 2), read_json(folder)
  if read_spec(spec)[1].full_head_dim is not None:
    with pytest.raises(ValueError, match='some alone are no model'):
      spec_of_layers(spec, layers)
    return
  model, fewer = load_hub_model(folder, dtype='float32'), spec_of_layers(spec, layers)
  params = {name: leaf for name, leaf in model.params.items() if not name.startswith('layer_')}
  params |= {f'layer_{i}': model.params[f'layer_{layer}'] for i, layer in enumerate(layers)}
  config = dataclasses.replace(read_spec(fewer)[1], dtype='float32')
  model = causal_lm(params, config)
  tokenizer = HubTokenizer.from_parts(tiny_hub.backend(), bos_id=1, eos_ids=[2], add_bos=False)
  if not read_spec(fewer)[0].is_saved:
    with pytest.raises(ValueError, match=f'a model of the family {fewer["model_type"]} is not saved'):
      save_hub_model(tmp_path / 'written', model, tokenizer, fewer, param_dtype='float32')
    return
  save_hub_model(tmp_path / 'written', model, tokenizer, fewer, param_dtype='float32')
  theirs = type(reference).from_pretrained(tmp_path / 'written', attn_implementation='eager').eval()
  assert theirs.config.num_hidden_layers == 2
  tokens = np.random.default_rng(0).integers(0, 61, (2, 12))
  with torch.no_grad():
    wanted = theirs(torch.tensor(tokens)).logits.numpy()
  positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)
  found = model.apply(tokens, positions, jnp.tril(jnp.ones((12, 12), bool)), model.init_cache_fn(2, 1)).logits
  _assert_near(found, wanted, reference, 'float32')


@pytest.mark.parametrize('differs', [True, False])
@pytest.mark.parametrize('name', ['llama', 'qwen3', 'gemma', 'gemma3', 'gpt_neox', 'gpt2'])
def test_a_stored_head_beside_a_tied_embedding(name, differs, tmp_path):
  """The reference keeps a head that differs, and says so."""
  model_class, config = _class_and_config(name)
  config.tie_word_embeddings = False
  torch.manual_seed(0)
  whole = model_class._from_config(config, attn_implementation='eager')
  if not differs:
    whole.get_output_embeddings().weight.data = whole.get_input_embeddings().weight.data.clone()
  whole.config.tie_word_embeddings = True
  state = {key: tensor.clone().contiguous() for key, tensor in whole.state_dict().items()}
  whole.config.architectures = [model_class.__name__]
  whole.config.save_pretrained(tmp_path)
  safetensors.save_file(state, tmp_path / 'model.safetensors', metadata={'format': 'pt'})
  reference = model_class.from_pretrained(tmp_path, attn_implementation='eager').eval()
  is_tied = reference.get_output_embeddings().weight is reference.get_input_embeddings().weight
  assert is_tied != differs
  with pytest.warns(UserWarning, match='hold different numbers') if differs else contextlib.nullcontext():
    model = load_hub_model(tmp_path, dtype='float32')
  assert ('unembedding' in model.params) == differs
  _assert_same_logits_of_prompts(model, reference, 'float32')
