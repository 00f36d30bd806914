"""The `config.json` of a tiny model of every family, with what distinguishes the family turned on."""

_SIZES = {
  'vocab_size': 32, 'hidden_size': 16, 'intermediate_size': 24, 'num_hidden_layers': 2, 'num_attention_heads': 4,
  'num_key_value_heads': 2, 'max_position_embeddings': 32,
}  # fmt: skip
_GEMMA = {'head_dim': 6, 'query_pre_attn_scalar': 5, 'sliding_window': 4}

_GEMMA4 = {
  'num_hidden_layers': 4, 'head_dim': 6, 'global_head_dim': 8, 'sliding_window': 4, 'final_logit_softcapping': 5.0,
  'layer_types': ['sliding_attention', 'full_attention'] * 2,
}  # fmt: skip


def _spec(architecture, **fields):
  return {**_SIZES, 'architectures': [architecture], **fields}


SPECS = {
  'llama': _spec('LlamaForCausalLM', rope_theta=5e5, torch_dtype='float32'),
  'mistral': _spec('MistralForCausalLM', sliding_window=4),
  'qwen2': _spec('Qwen2ForCausalLM', tie_word_embeddings=True),
  'qwen3': _spec('Qwen3ForCausalLM', head_dim=6),
  'mixtral': _spec('MixtralForCausalLM', num_local_experts=4, num_experts_per_tok=2),
  'qwen3_moe': _spec('Qwen3MoeForCausalLM', num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12,
    mlp_only_layers=[0], norm_topk_prob=True,
  ),
  'olmoe': _spec('OlmoeForCausalLM', num_experts=6, num_experts_per_tok=3, num_key_value_heads=None),
  'glm4_moe': _spec('Glm4MoeForCausalLM', n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=12,
    n_group=4, topk_group=2, n_shared_experts=2, routed_scaling_factor=1.5, use_qk_norm=True, attention_bias=True,
  ),
  'gpt_oss': _spec('GptOssForCausalLM', num_local_experts=4, num_experts_per_tok=2, sliding_window=4, head_dim=4),
  'granite': _spec('GraniteForCausalLM', attention_multiplier=0.3, embedding_multiplier=3.0, residual_multiplier=0.5,
    logits_scaling=2.0, tie_word_embeddings=True,
  ),
  'granitemoe': _spec('GraniteMoeForCausalLM', num_local_experts=4, num_experts_per_tok=2, attention_multiplier=0.3,
    embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0,
  ),
  'gemma': _spec('GemmaForCausalLM', head_dim=6, hidden_act='gelu'),
  'gemma2': _spec('Gemma2ForCausalLM', **_GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
  'gemma3': _spec('Gemma3ForCausalLM', **_GEMMA, sliding_window_pattern=2, rope_local_base_freq=100.0,
    attn_logit_softcapping=3.0, final_logit_softcapping=5.0,
  ),
  'gemma4': _spec('Gemma4ForCausalLM', **_GEMMA4, hidden_size_per_layer_input=4, vocab_size_per_layer_input=32,
    num_kv_shared_layers=2, use_double_wide_mlp=True,
  ),
  'gemma4_keys': _spec('Gemma4ForCausalLM', **_GEMMA4, hidden_size_per_layer_input=0, attention_k_eq_v=True,
    num_global_key_value_heads=1,
  ),
  'gemma4_mixture': _spec('Gemma4ForCausalLM', **_GEMMA4, hidden_size_per_layer_input=0, enable_moe_block=True,
    num_experts=5, top_k_experts=2, moe_intermediate_size=12,
  ),
  'gemma4_unified': _spec('Gemma4UnifiedForCausalLM', **_GEMMA4),
  'qwen3_5': _spec('Qwen3_5ForCausalLM', head_dim=8, linear_key_head_dim=3, linear_value_head_dim=5,
    linear_num_key_heads=2, linear_num_value_heads=4, layer_types=['linear_attention', 'full_attention'],
  ),
  'qwen3_5_moe': _spec('Qwen3_5MoeForCausalLM', head_dim=8, linear_key_head_dim=3, linear_value_head_dim=5,
    linear_num_key_heads=2, linear_num_value_heads=4, layer_types=['linear_attention', 'full_attention'], num_experts=5,
    num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=10,
  ),
  'qwen3_next': _spec('Qwen3NextForCausalLM', head_dim=8, linear_key_head_dim=3, linear_value_head_dim=5,
    linear_num_key_heads=2, linear_num_value_heads=4, layer_types=['linear_attention', 'full_attention'], num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=10,
  ),
  'granite_hybrid': _spec('GraniteMoeHybridForCausalLM', layer_types=['mamba', 'attention'], mamba_n_heads=4,
    mamba_d_state=6, num_local_experts=0, shared_intermediate_size=20, attention_multiplier=0.3, logits_scaling=2.0,
  ),
  'lfm2': _spec('Lfm2ForCausalLM', layer_types=['conv', 'full_attention'], conv_bias=True, block_multiple_of=8),
  'lfm2_moe': _spec('Lfm2MoeForCausalLM', layer_types=['conv', 'full_attention'], num_experts=4, num_experts_per_tok=2,
    num_dense_layers=1, moe_intermediate_size=12,
  ),
  'falcon_h1': _spec('FalconH1ForCausalLM', mamba_d_ssm=24, mamba_n_heads=4, mamba_d_state=6, mamba_rms_norm=True,
    key_multiplier=0.7, attention_in_multiplier=1.2, ssm_multipliers=[0.7, 0.8, 0.9, 1.1, 1.2], lm_head_multiplier=0.5,
    mlp_multipliers=[0.8, 0.6], mamba_n_groups=2,
  ),
  'nemotron_h': _spec('NemotronHForCausalLM', num_hidden_layers=4, hybrid_override_pattern='ME*-', mamba_num_heads=4,
    mamba_head_dim=6, n_groups=2, ssm_state_size=6, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
    moe_shared_expert_intermediate_size=10, head_dim=4,
  ),
  'gpt_neox': _spec('GPTNeoXForCausalLM', num_key_value_heads=None, rotary_pct=0.5),
  'gpt2': {
    'architectures': ['GPT2LMHeadModel'], 'vocab_size': 32, 'n_embd': 16, 'n_layer': 2, 'n_head': 4, 'n_positions': 32,
  },
}  # fmt: skip
