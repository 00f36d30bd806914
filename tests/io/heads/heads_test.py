"""Published heads: what is recognised, where every tensor comes to, what does not fit, and what is written."""

import dataclasses
import json
import warnings

import hostile
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from published_heads import (
  CANDIDATES,
  GROUP,
  HEADS_BY_NAME,
  IDS,
  LAYERS,
  MASK,
  RANK,
  SLOTS,
  TARGET,
  VD,
  D,
  V,
  arrays_of,
  tiny_target,
  write_head,
)
from safetensors import safe_open

import spectr_jax
from spectr_jax import SamplingParams, TokenTree, load_drafter, save_drafter
from spectr_jax.draft import head_drafter, lookup_drafter
from spectr_jax.draft.head_drafter import config_of
from spectr_jax.draft.medusa_drafter import config_of as medusa_config_of
from spectr_jax.draft.one_pass_drafter import config_of as one_pass_config_of
from spectr_jax.engine.loop import noise_keys, propose
from spectr_jax.io.heads import save as heads_save
from spectr_jax.io.heads.head_files import open_head
from spectr_jax.models import causal_lm
from spectr_jax.models.one_pass_config import Convolution, Selector
from spectr_jax.models.recurrent import Recurrence
from tests.slow import slow_but

_FORMATS = {
  'eagle': 'EAGLE', 'eagle3': 'EAGLE-3', 'speculators': 'speculators', 'speculators joint': 'speculators',
  'medusa': 'Medusa', 'mtp': 'MTP', 'deepseek mtp': 'MTP, DeepSeek', 'dflash': 'DFlash', 'dspark': 'DSpark',
  'dspark gated': 'DSpark', 'dspark rnn': 'DSpark', 'speculators dflash': 'speculators',
  'speculators dspark': 'speculators', 'dflash2': 'DFlash 2', 'speculators dflash2': 'speculators',
  'speculators peagle': 'speculators',
}  # fmt: skip


_MEDUSA_HEADS = {f'{i}.1.weight': None for i in range(5)}
_DFLASH = {'target_layer_ids': [0, 3], 'mask_token_id': MASK}
_MARKOV = 'markov_head.markov_w1.weight', 'markov_head.markov_w2.weight'
_DFLASH2 = _DFLASH | {'conv_kernel_size': 2, 'conv_group_size': GROUP, 'selector_top_k': CANDIDATES}


@pytest.fixture(scope='module')
def target():
  return tiny_target()


@pytest.mark.parametrize('name', HEADS_BY_NAME)
def test_every_format_is_recognised(tmp_path, target, name):
  found = open_head(write_head(tmp_path, name))
  assert (found.format, found.is_part) == (_FORMATS[name], name == 'deepseek mtp')
  assert found.load(target).vocab_size == V


def test_an_mtp_layer_with_gates_for_a_target_with_recurrent_layers(tmp_path):
  """Its gates follow from its tensor; the types of layers are those of the target."""
  layers = (True, False, True, True, False)
  recurrence = Recurrence('delta', layers, num_heads=2, key_dim=4, value_dim=4)
  target = tiny_target(dataclasses.replace(TARGET, recurrence=recurrence))
  kinds = ['linear_attention' if is_recurrent else 'full_attention' for is_recurrent in layers]
  spec = {'model_type': 'qwen3_5_text', 'layer_types': kinds, 'head_dim': 4}
  queries = np.random.default_rng(0).normal(size=(2 * D, D)).astype(np.float32)
  path = write_head(tmp_path, 'mtp', {'mtp.layers.0.self_attn.q_proj.weight': queries}, spec)
  drafter = load_drafter(path, target)
  assert drafter.config.block.has_output_gate
  np.testing.assert_array_equal(drafter.params['attention']['q']['kernel'], queries.T)
  texts, options = (np.array([[3, 1, 4]]), np.array([3])), {'max_new_tokens': 8, 'sampling': SamplingParams(0.0)}
  plain = spectr_jax.generate(jax.random.key(0), target, None, *texts, method='autoregressive', **options)
  tree = TokenTree.chains(1, 3)
  found = spectr_jax.generate(jax.random.key(0), target, drafter, *texts, method='block', tree=tree, **options)
  np.testing.assert_array_equal(found.tokens, plain.tokens)


@pytest.mark.slow
@pytest.mark.parametrize('name', slow_but(['eagle3'], HEADS_BY_NAME))
def test_greedy_tokens_are_the_targets(tmp_path, target, name):
  drafter = load_drafter(write_head(tmp_path, name), target)
  prompts, lengths = jax.random.randint(jax.random.key(5), (2, 5), 0, V), jnp.array([5, 1])
  options = {'max_new_tokens': 6, 'sampling': SamplingParams(0.0)}
  plain = spectr_jax.generate(jax.random.key(0), target, None, prompts, lengths, method='autoregressive', **options)
  tree = TokenTree.chains(2, 2)
  found = spectr_jax.generate(
    jax.random.key(0), target, drafter, prompts, lengths, method='spectr', tree=tree, **options
  )
  np.testing.assert_array_equal(found.tokens, plain.tokens)


_AT_TOP = 'eagle_aux_hidden_state_layer_ids'


@pytest.mark.parametrize(
  ('name', 'spec', 'layers'),
  [
    ('eagle3', {_AT_TOP: None}, (2, 2, 2)),  # EAGLE's repository, of 5 blocks
    ('speculators', {_AT_TOP: [1, 3, 4]}, (1, 3, 4)),
    ('speculators', {_AT_TOP: None, 'aux_hidden_state_layer_ids': [0, 2, 5]}, (0, 2, 5)),
    ('speculators peagle', {_AT_TOP: [1, 3, 4]}, (1, 3, 4)),
    ('eagle3', {'eagle_config': {_AT_TOP: [1, 2, 4]}}, (2, 3, 5)),  # SpecForge
    ('eagle3', {'eagle_config': {_AT_TOP: [2, 3, 4]}}, (2, 3, 4)),  # exports of SGLang
    ('eagle3', {'eagle_config': {_AT_TOP: [3, 4, 5]}}, (3, 4, 5)),
    ('eagle3', {'eagle_config': {_AT_TOP: [0, 1, 2]}}, (0, 1, 2)),
    ('eagle3', {'eagle_config': {_AT_TOP: [1, 3, 5]}}, (1, 3, 5)),  # there is no block 5
    ('eagle3', {_AT_TOP: [2, 3, 4], 'eagle_config': {_AT_TOP: [1, 2, 3]}}, (2, 3, 4)),
    ('dflash', {'dflash_config': _DFLASH | {'target_layer_ids': [-1, 3]}}, (0, 4)),
    ('dspark', {'target_layer_ids': [-1, 2]}, (0, 3)),
    ('speculators dspark', {'aux_hidden_state_layer_ids': [0, 3]}, (0, 3)),
  ],
)  # fmt: skip
def test_layer_numbers_mean_what_their_writers_mean(tmp_path, target, name, spec, layers):
  assert load_drafter(write_head(tmp_path, name, {}, spec), target).feature_layers == layers


@pytest.mark.parametrize('ids', [[2, 3, 6], [1, 1, 3], [1, 6, 3]])
@pytest.mark.parametrize('nested', [True, False])
def test_layer_numbers_without_a_meaning_are_refused(tmp_path, target, ids, nested):
  named = {_AT_TOP: ids}
  folder = write_head(tmp_path, 'eagle3', {}, {'eagle_config': named} if nested else named)
  message = f'the head reads layers {", ".join(map(str, ids))} of the target; possible are different ones from 0 to 5'
  hostile.refusal(lambda: load_drafter(folder, target), folder, message)


_BACKBONE = {
  'features/kernel': 'fc.weight', 'features_norm/gain': 'hidden_norm.weight', 'final_norm/gain': 'norm.weight',
  'layer_1/attention_norm/gain': 'layers.1.input_layernorm.weight',
  'layer_1/mlp_norm/gain': 'layers.1.post_attention_layernorm.weight',
  'layer_1/attention/k/kernel': 'layers.1.self_attn.k_proj.weight',
  'layer_0/attention/q_norm/gain': 'layers.0.self_attn.q_norm.weight',
}  # fmt: skip
_DSPARK = _BACKBONE | {
  'unembedding': 'lm_head.weight', 'markov/embedding': 'markov_head.markov_w1.weight',
  'markov/unembedding': 'markov_head.markov_w2.weight', 'confidence/kernel': 'confidence_head.proj.weight',
  'confidence/bias': 'confidence_head.proj.bias',
}  # fmt: skip
_SELECTED = _BACKBONE | {
  'layer_1/attention_conv/base': 'layers.1.attention_conv.base_kernel',
  'layer_1/mlp_conv/kernel': 'layers.1.mlp_conv.kernel_projection.weight',
  'selector/before': 'candidate_selector.predecessor_codebook',
  'selector/after': 'candidate_selector.successor_codebook',
  'selector/kernel': 'candidate_selector.hidden_projection.weight',
}  # fmt: skip
_JOINT = {'markov/joint/kernel': 'markov_head.joint_proj.weight', 'markov/joint/bias': 'markov_head.joint_proj.bias'}
_PLACES = {
  'eagle3': {
    'features/kernel': 'fc.weight', 'unembedding': 'lm_head.weight', 'hidden_norm/gain': 'midlayer.hidden_norm.weight',
    'embedding_norm/gain': 'midlayer.input_layernorm.weight', 'mlp/down/kernel': 'midlayer.mlp.down_proj.weight',
  },
  'dspark gated': _DSPARK | {key.replace('joint', 'gate'): x.replace('joint', 'gate') for key, x in _JOINT.items()},
  'dspark rnn': _DSPARK | _JOINT,
  'speculators dspark': _DSPARK | _JOINT,
  'speculators peagle': {
    'mask_features': 'mask_hidden', 'attention/q/kernel': 'layers.0.self_attn.q_proj.weight',
    'layer_1/attention/q/kernel': 'layers.1.self_attn.q_proj.weight',
    'layer_1/attention_norm/gain': 'layers.1.input_layernorm.weight',
    'layer_1/mlp/down/kernel': 'layers.1.mlp.down_proj.weight',
  },
  'dflash2': _SELECTED,
  'speculators dflash2': _SELECTED,
}  # fmt: skip


@pytest.mark.parametrize('name', _PLACES)
def test_tensors_come_to_their_places(tmp_path, target, name):
  arrays, drafter = arrays_of(name), load_drafter(write_head(tmp_path, name), target)
  params = {
    jax.tree_util.keystr(keys, simple=True, separator='/'): leaf
    for keys, leaf in jax.tree_util.tree_leaves_with_path(drafter.params)
  }
  for ours, theirs in _PLACES[name].items():
    is_transposed = ours.endswith(('kernel', 'unembedding'))
    np.testing.assert_array_equal(params[ours].T if is_transposed else params[ours], arrays[theirs], err_msg=ours)
  own = [array.size for key, array in arrays.items() if key not in ('d2t', 't2d')]
  assert open_head(tmp_path).num_params == sum(own)
  if name == 'eagle3':
    config = config_of(drafter)
    assert config.feature_layers == drafter.feature_layers == (2, LAYERS // 2, LAYERS - 3)
    assert config.block.rope.frequencies == (1.0, 0.01)  # of base 10000, whatever the target's
    np.testing.assert_array_equal(params['target_ids'], IDS)
    return
  if name == 'speculators peagle':
    config = config_of(drafter)
    assert (config.mask_id, config.block.num_layers, config.is_residual_normed) == (MASK, 2, True)
    return
  config = one_pass_config_of(drafter)
  # By inputs of layers, or by outputs, [-1, 2] or [0, 3].
  assert config.feature_layers == drafter.feature_layers == ((1, 4) if name == 'dflash2' else (0, 3))
  depth = SLOTS - (name in ('speculators dspark', 'dflash2', 'speculators dflash2'))
  assert (config.num_slots, config.mask_id, drafter.max_depth) == (SLOTS, MASK, depth)
  if name.endswith('dflash2'):
    assert config.selector == Selector(RANK, V, CANDIDATES)
    assert (config.convolution, config.has_causal_windows) == (Convolution(2, GROUP), False)


def test_one_pass_formats_differ_in_windows_and_first_slots(tmp_path, target):
  configs = {
    name: one_pass_config_of(load_drafter(write_head(tmp_path / name, name, (), spec), target))
    for name, spec in (('dflash', {}), ('dspark', {}), ('speculators dflash', {}), ('speculators dspark', {}))
  }
  fields = 'guesses_at_root', 'sees_from_root', 'has_causal_windows', 'is_reduced', 'has_unembedding', 'num_embedded'
  found = {name: tuple(getattr(config, field) for field in fields) for name, config in configs.items()}
  assert found == {
    'dflash': (False, False, True, False, False, None),
    'dspark': (True, False, True, False, True, V),
    'speculators dflash': (False, True, True, True, True, None),
    'speculators dspark': (False, True, False, True, True, None),
  }
  assert [config.backbone.windows for config in configs.values()] == [(3, None), (), (3, None), (3, None)]
  assert configs['dflash'].backbone.has_qk_norm
  other = write_head(tmp_path / 'dflash', 'dflash', (), {'is_causal': False})
  assert not one_pass_config_of(load_drafter(other, target)).has_causal_windows


def test_speculators_say_what_is_normed(tmp_path, target):
  one = config_of(load_drafter(write_head(tmp_path / 'a', 'speculators'), target))
  assert (one.features_norm, one.is_residual_normed, one.is_output_normed) == ('each', True, True)
  assert (one.block.has_qk_norm, one.num_embedded, one.feature_layers) == (True, V, (1, 3, 4))
  assert one.block.rope.frequencies == (1.0, 500**-0.5)
  joint = config_of(load_drafter(write_head(tmp_path / 'b', 'speculators joint'), target))
  assert (joint.features_norm, joint.is_output_normed) == ('joint', False)


def test_a_head_without_output_head_takes_rows_of_the_target(tmp_path, target):
  drafter = load_drafter(write_head(tmp_path / 'eagle', 'eagle'), target)
  np.testing.assert_allclose(drafter.params['unembedding'], target.params['embedding'].T, rtol=1e-6)
  reduced = load_drafter(write_head(tmp_path / 'eagle3', 'eagle3', {'lm_head.weight': None}), target)
  np.testing.assert_allclose(reduced.params['unembedding'], target.params['embedding'].T[:, IDS], rtol=1e-6)
  medusa = load_drafter(write_head(tmp_path / 'medusa', 'medusa', _MEDUSA_HEADS), target)
  assert medusa.params['unembedding'].shape == (D, V)
  capped = causal_lm.causal_lm(target.params, dataclasses.replace(TARGET, logit_soft_cap=30.0))
  with pytest.raises(ValueError, match='output head, which is not linear'):
    load_drafter(tmp_path / 'eagle', capped)


@pytest.mark.slow
def test_medusa_heads_guess_one_token_further_each(tmp_path, target):
  """At depth i by head i at the token before the root, whatever the branch."""
  arrays, drafter = arrays_of('medusa'), load_drafter(write_head(tmp_path, 'medusa'), target)
  assert medusa_config_of(drafter).num_heads == 5  # configurations of published heads say less
  tree = TokenTree.from_parents((0, 0, 1, 2, 3))
  decoder = spectr_jax.Decoder.make(target, drafter, method='traversal', tree=tree, max_new_tokens=4, cache_size=12)
  prompts = jax.random.randint(jax.random.key(1), (2, 6), 0, V)
  state = spectr_jax.engine.init_decode(decoder, jax.random.key(0), prompts, jnp.array([6, 3]))
  proposal = jax.jit(propose)(decoder, state, jax.jit(noise_keys)(decoder, state)[0])
  model, apply = target.with_features((-1,)), jax.jit(spectr_jax.Model.apply)
  for row, length in enumerate((6, 3)):
    causal = jnp.tril(jnp.ones((length, length), bool))
    features = apply(
      model, prompts[row : row + 1, :length], jnp.arange(length)[None], causal, model.init_cache_fn(1, length)
    ).features
    x = np.asarray(features[0, length - 2, 0])
    for node in np.flatnonzero(tree.num_children):
      i = tree.depths[node]
      product = arrays[f'{i}.0.linear.weight'] @ x + arrays[f'{i}.0.linear.bias']
      logits = arrays[f'{i}.1.weight'] @ (x + product / (1 + np.exp(-product)))
      wanted = np.exp(logits - logits.max())
      found = proposal.probs[row, tree.parent_index[node]]
      np.testing.assert_allclose(found, wanted / wanted.sum(), rtol=1e-4, atol=1e-6)
  with pytest.raises(ValueError, match='this drafter guesses 5 tokens ahead, and the tree is 6 deep'):
    spectr_jax.generate(
      jax.random.key(0), target, drafter, prompts, jnp.array([6, 3]), method='speculative',
      tree=TokenTree.chains(1, 6), max_new_tokens=4,
    )  # fmt: skip


@pytest.mark.parametrize(
  ('name', 'changes', 'spec', 'message'),
  [
    ('eagle3', {'norm.weight': None}, {}, 'lacks 1 tensors, the first of them norm.weight'),
    ('eagle3', {'fc.weight': None}, {}, 'lacks fc.weight'),
    ('eagle3', {'fc.bias': np.ones(D, np.float32)}, {}, '1 tensors too many, the first of them fc.bias'),
    ('eagle3', {'norm.weight': np.ones(3, np.float32)}, {}, r'norm.weight must have shape \(16,\), got \(3,\)'),
    ('eagle3', {'d2t': np.zeros(VD, np.float32)}, {}, 'd2t must hold integers, got float32'),
    ('eagle3', {'d2t': np.full(VD, V)}, {}, "d2t names tokens that are not among the target's 23"),
    ('eagle3', {'fc.weight': np.ones((D, 47), np.float32)}, {}, 'reads 47 numbers of the target, whose .* have 16'),
    ('eagle3', {'fc.weight': np.ones((D, 2 * D), np.float32)}, {}, 'reads 2 hidden states .* names 3 layers: 2, 2, 2'),
    ('eagle3', {}, {'eagle_aux_hidden_state_layer_ids': [1, 2, 9]}, 'possible are different ones from 0 to 5'),
    ('eagle3', {}, {'hidden_size': None}, 'the configuration of the head has no hidden_size'),
    ('eagle3', {'d2t': None, 't2d': None}, {}, 'the head guesses 11 tokens, but the target has 23'),
    ('eagle', {}, {'bias': False}, '1 tensors too many, the first of them fc.bias'),
    ('eagle', {'embed_tokens.weight': np.ones((9, D), np.float32)}, {}, r'has shape \(9, 16\), and the target has 23'),
    ('speculators', {}, {'speculators_model_type': 'xpress'}, 'speculators of type xpress are not read; known are'),
    ('medusa', {'0.1.linear.weight': np.ones((D, D), np.float32)}, {}, 'several residual layers'),
    ('medusa', {'3.1.weight': None}, {}, 'lacks 1 tensors, the first of them 3.1.weight'),
    ('mtp', {'mtp.layers.0.mlp.experts.0.up_proj.weight': np.ones(1)}, {}, 'has a mixture of experts, which is not'),
    ('mtp', {'mtp.layers.0.self_attn.q_proj.weight': np.ones((3 * D, D))}, {}, r'must have shape \(16, 16\)'),
    ('deepseek mtp', {f'model.layers.{LAYERS}.self_attn.kv_b_proj.weight': np.ones(1)}, {}, 'has latent attention'),
    ('deepseek mtp', {'model.layers.7.eh_proj.weight': np.ones(1)}, {}, 'has 2 MTP layers; one is read'),
    ('eagle3', {'t2d': ~np.isin(np.arange(V), IDS)}, {}, 't2d and d2t contradict each other, first at token 0'),
    ('eagle3', {'t2d': np.ones(V + 1, bool)}, {}, r't2d has shape \(24,\), and the target has 23 tokens'),
    ('speculators peagle', {'other.t2d': np.ones(V, bool)}, {}, '1 tensors too many, the first of them other.t2d'),
    ('dflash', {'t2d': np.arange(V) != 4}, {}, 't2d leaves out token 4, and there is no d2t'),
    ('eagle', {'layers.0.self_attn.rotary_emb.inv_freq': np.float32([1, 0.5])}, {}, 'holds other rotary frequencies'),
    ('eagle3', {'d2t': np.full(VD, 2**63 - 1)}, {}, "d2t names tokens that are not among the target's 23"),
    ('eagle3', {}, {'eagle_config': {'use_aux_hidden_state': False}}, 'use_aux_hidden_state False is not supported'),
    ('eagle3', {}, {'use_aux_hidden_state': False}, 'use_aux_hidden_state False is not supported'),
    ('eagle3', {}, {'eagle_config': [1]}, 'config.json: eagle_config must be an object'),
    ('eagle3', {}, {'eagle_config': {'eagle_aux_hidden_state_layer_ids': ['1', 2, 3]}}, 'layer_ids must be a list of'),
    ('eagle3', {}, {'eagle_aux_hidden_state_layer_ids': [1, 2, 10**9]}, 'layer_ids must be a list of'),
    ('eagle3', {}, {'head_dim': 2 * 10**9}, 'config.json: head_dim must be a whole number from 1 to'),
    ('eagle3', {}, {'partial_rotary_factor': 10**9}, 'partial_rotary_factor must be a finite number above 0'),
    ('eagle3', {}, {'norm_before_fc': 'no'}, 'norm_before_fc must be true or false'),
    ('eagle3', {}, {'layer_types': ['chunked_attention']}, "layer_types: 'chunked_attention' is not supported"),
    ('eagle3', {}, {'attn_logit_softcapping': 30.0}, 'attn_logit_softcapping 30.0 is not supported'),
    ('eagle3', {'fc.weight': np.ones(3 * D, np.float32)}, {}, r'fc.weight has shape \(48,\), expected 2 axes'),
    ('eagle3', {'lm_head.weight': np.ones((), np.float32)}, {}, r'lm_head.weight has shape \(\), expected 2 axes'),
    ('speculators', {}, {'transformer_layer_config': 'x'}, 'transformer_layer_config must be an object'),
    ('speculators', {}, {'transformer_layer_config': {'hidden_size': -1}}, 'layer_config: hidden_size must'),
    ('speculators', {}, {'speculators_model_type': [1]}, 'speculators_model_type must be a text'),
    ('medusa', {'999999999.0.linear.weight': np.ones((D, D), np.float32)}, {}, 'names Medusa head 999999999, but has'),
    ('medusa', {}, {'torch_dtype': ['float32']}, 'torch_dtype must be a text'),
    ('dflash', {}, {'architectures': ['DFlash3DraftModel']}, 'architecture DFlash3DraftModel is unknown'),
    ('dflash', {}, {'is_causal': True}, 'is_causal True is not supported'),
    ('dspark', {}, {'num_hidden_layers': 3}, 'lacks 11 tensors, the first of them layers.2.'),
    ('dflash', {}, {'num_hidden_layers': 9999}, 'has 9999 layers, but the checkpoint 25 tensors'),
    ('dflash', {}, {'num_hidden_layers': 0}, 'has 0 layers'),
    ('dflash', {}, {'block_size': 1}, 'a block of 1 slot guesses nothing'),
    ('dflash', {}, {'block_size': 10**9}, 'block_size must be a whole number from 1 to 1024'),
    ('dflash', {}, {'block_size': None}, 'the configuration of the head has no block_size'),
    ('dflash', {}, {'dflash_config': 7}, 'dflash_config must be an object'),
    ('dflash', {}, {'dflash_config': {'mask_token_id': MASK}}, 'the configuration of the head has no target_layer_ids'),
    ('dflash', {}, {'dflash_config': _DFLASH | {'target_layer_ids': []}}, 'feature_layers must be integers, at least'),
    ('dflash', {}, {'dflash_config': _DFLASH | {'target_layer_ids': [0, 4]}}, 'enters layer 5 of the target; possible'),
    ('dflash', {}, {'dflash_config': _DFLASH | {'target_layer_ids': [3, 3]}}, 'are different ones from 0 to 5'),
    ('dflash', {}, {'dflash_config': _DFLASH | {'mask_token_id': V}}, "mask_id 23 is not among the target's 23 tokens"),
    ('dflash', {}, {'dflash_config': _DFLASH | {'output_multiplier': 0.5}}, 'output_multiplier 0.5 is not supported'),
    ('dflash', {}, {'layer_types': ['full_attention', 'chunked']}, "layer_types: 'chunked' is not supported"),
    ('dflash', {'hidden_norm.weight': np.ones(D + 1, np.float32)}, {}, r'hidden_norm.weight must have shape \(16,\)'),
    ('dflash2', {}, {'architectures': ['DFlashDraftModel']}, 'architecture DFlashDraftModel is unknown in this format'),
    ('dflash2', {}, {'dflash_config': _DFLASH2 | {'conv_group_size': 5}}, 'width of 16 does not divide into groups'),
    ('dflash2', {}, {'dflash_config': _DFLASH2 | {'conv_kernel_size': 5}}, 'a convolution of 5 taps needs as many'),
    ('dflash2', {}, {'dflash_config': _DFLASH2 | {'conv_kernel_size': 3}}, r'must have shape \(2, 3, 16\), got'),
    ('dflash2', {}, {'dflash_config': _DFLASH2 | {'selector_top_k': V + 1}}, '24 candidates were asked for among 23'),
    ('dflash2', {}, {'dflash_config': _DFLASH}, 'the configuration of the head has no conv_kernel_size'),
    ('dflash2', {'candidate_selector.successor_codebook': None}, {}, 'lacks 1 tensors, the first of them candidate_'),
    ('dflash2', {'lm_head.weight': np.ones((VD, D), np.float32), 'd2t': IDS - np.arange(VD)}, {}, 'selector stands'),
    ('speculators peagle', {'mask_hidden': None}, {}, 'lacks 1 tensors, the first of them mask_hidden'),
    ('speculators peagle', {}, {'mask_token_id': None}, 'the configuration of the head has no mask_token_id'),
    ('speculators peagle', {}, {'mask_token_id': V}, 'mask_id must be a token that is embedded, got 23'),
    ('speculators peagle', {'mask_hidden': np.ones((1, D), np.float32)}, {}, r'must have shape \(1, 1, 48\), got'),
    ('dspark', {}, {'architectures': ['Qwen9DSparkModel']}, 'architecture Qwen9DSparkModel is unknown in this format'),
    ('dspark', {}, {'layer_types': ['sliding_attention'] * 2}, 'sliding_attention is not supported in this format'),
    ('dspark', {}, {'markov_head_type': 'rnn'}, 'markov_head_type is rnn, and the tensors are those of vanilla'),
    ('dspark', {}, {'mask_token_id': V}, 'mask_id 23 is not among the 23 tokens of the embedding'),
    ('dspark', {'markov_head.markov_w1.weight': np.ones((9, RANK), np.float32)}, {}, r'shape \(9, 6\), and the target'),
    ('dspark', {'markov_head.markov_w2.weight': np.ones((V, 3), np.float32)}, {}, r'must have shape \(23, 6\)'),
    ('dspark', {'confidence_head.proj.weight': np.ones((1, 5), np.float32)}, {}, r'must have shape \(1, 22\)'),
    ('dspark', dict.fromkeys(_MARKOV), {}, 'confidence_head.proj.weight reads 22 numbers, and there are 16'),
    ('dspark', {'embed_tokens.weight': np.ones((V, 5), np.float32)}, {}, '16 wide, and reads embeddings of width 5'),
    ('speculators dspark', {}, {'aux_hidden_state_layer_ids': None}, 'the head has no aux_hidden_state_layer_ids'),
    ('speculators dspark', {}, {'aux_hidden_state_layer_ids': [-1]}, 'enters layer -1 of the target; possible'),
    ('speculators dspark', {}, {'sample_from_anchor': 1}, 'sample_from_anchor must be true or false'),
  ],
)  # fmt: skip
def test_heads_that_do_not_fit(tmp_path, target, name, changes, spec, message):
  folder = write_head(tmp_path, name, changes, spec)
  hostile.refusal(lambda: load_drafter(folder, target), folder, message)


@pytest.mark.parametrize(('name', 'rows'), [('speculators', V), ('speculators', IDS), ('speculators dflash', IDS)])
def test_a_copy_of_the_targets_output_head_is_compared(tmp_path, target, name, rows):
  head = np.asarray(target.params['embedding'])[np.arange(V) if rows is V else rows]
  changes = {'layers.0.self_attn.rotary_emb.inv_freq': 500.0 ** (-np.arange(0, 4, 2, dtype=np.float32) / 4)}
  changes = changes if name == 'speculators' else {}
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    for copy in (head, head.astype(ml_dtypes.bfloat16), head * 1.05):  # as rounded weights differ
      load_drafter(write_head(tmp_path, name, changes | {'verifier_lm_head.weight': copy.astype(np.float32)}), target)
  for other in (head[::-1], head[:, :-1]):
    copy = {'verifier_lm_head.weight': np.ascontiguousarray(other)}
    with pytest.warns(UserWarning, match="verifier_lm_head.weight is not the target's output head: this"):
      load_drafter(write_head(tmp_path, name, changes | copy), target)


def test_folders_without_a_head(tmp_path, target):
  with pytest.raises(ValueError, match='^no head at .*: expected a folder with config.json'):
    load_drafter(tmp_path, target)
  folder = write_head(tmp_path / 'x', 'eagle3')
  file = folder / 'model.safetensors'
  file.write_bytes(file.read_bytes()[:-10])
  with pytest.raises(ValueError, match='model.safetensors is damaged'):
    load_drafter(folder, target)
  file.unlink()
  with pytest.raises(ValueError, match='no weights in'):
    load_drafter(folder, target)
  narrow = tiny_target(config=dataclasses.replace(TARGET, embed_dim=12, num_heads=3, num_kv_heads=1))
  for name, message in (
    ('eagle', 'reads one hidden state of its own width; got 1 of width 12, and width 16'),
    ('medusa', r'0.0.linear.weight must have shape \(12, 12\), got \(16, 16\)'),
  ):
    with pytest.raises(ValueError, match=message):
      load_drafter(write_head(tmp_path / name, name), narrow)


@pytest.mark.parametrize(
  ('name', 'changes'),
  [
    ('eagle3', {'lm_head.weight': None}), ('speculators', {}), ('speculators joint', {}), ('medusa', {}),
    ('medusa', _MEDUSA_HEADS),
  ],
)  # fmt: skip
@pytest.mark.parametrize('param_dtype', ['float32', 'bfloat16'])
def test_a_head_that_is_written_reads_the_same(tmp_path, target, name, changes, param_dtype):
  """Rows of the target are not written, and not rounded."""
  drafter = load_drafter(write_head(tmp_path / 'a', name, changes), target)
  save_drafter(tmp_path / 'b', drafter, param_dtype=param_dtype, info={'data': 'none'})
  again = load_drafter(tmp_path / 'b', target)
  assert dataclasses.replace(again, params=None) == dataclasses.replace(drafter, params=None)

  def rounded(path, x):
    is_shared = changes and path[0].key == 'unembedding'
    return x if is_shared or x.dtype == np.int32 else x.astype(param_dtype).astype(x.dtype)

  jax.tree.map(np.testing.assert_array_equal, again.params, jax.tree_util.tree_map_with_path(rounded, drafter.params))
  spec = json.loads((tmp_path / 'b' / 'config.json').read_text())
  assert spec['info'] == {'data': 'none'}
  if name == 'medusa':
    assert (spec['medusa_num_heads'], spec['medusa_num_layers']) == (5, 1)
    wanted = set(arrays_of('medusa'))
  else:
    wanted = {'fc.weight', 'midlayer.self_attn.q_proj.weight', 'd2t', 't2d', 'lm_head.weight'}
  file_name = 'medusa_lm_head.safetensors' if name == 'medusa' else 'model.safetensors'
  with safe_open(tmp_path / 'b' / file_name, framework='numpy') as file:
    assert wanted & set(file.keys()) == wanted - changes.keys()
    kernel = file.get_tensor('0.0.linear.weight' if name == 'medusa' else 'fc.weight')
    assert kernel.dtype == (ml_dtypes.bfloat16 if param_dtype == 'bfloat16' else np.float32)


def test_a_written_head_is_replaced_wholly_or_not_at_all(tmp_path, target, monkeypatch):
  drafter, folder = load_drafter(write_head(tmp_path / 'a', 'eagle3'), target), tmp_path / 'b'
  save_drafter(folder, load_drafter(write_head(tmp_path / 'm', 'medusa'), target))
  with pytest.raises(ValueError, match='b exists and is not overwritten'):
    save_drafter(folder, drafter)
  (folder / 'notes.txt').write_text('mine')
  save_drafter(folder, drafter, overwrite=True)
  assert open_head(folder).format == 'EAGLE-3'  # a head of another kind leaves nothing of it behind
  before = {path.name: path.read_bytes() for path in folder.iterdir()}
  assert before['notes.txt'] == b'mine'

  def fail(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(heads_save, 'save', fail)
  with pytest.raises(OSError, match='No space left'):
    save_drafter(folder, drafter, overwrite=True)
  assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
  assert sorted(path.name for path in tmp_path.iterdir()) == ['a', 'b', 'm']


def test_heads_that_the_format_cannot_say(tmp_path, target):
  with pytest.raises(ValueError, match="join is 'linear'"):
    save_drafter(tmp_path / 'b', load_drafter(write_head(tmp_path / 'a', 'eagle'), target))
  with pytest.raises(ValueError, match='not a drafter made by head_drafter, one_pass_drafter or medusa_drafter'):
    save_drafter(tmp_path / 'b', lookup_drafter(V))
  drafter = load_drafter(write_head(tmp_path / 'e', 'eagle3'), target)
  config = config_of(drafter)
  for field, value in (('gain_offset', 1.0), ('rope', causal_lm.Rope((1.0, 0.1), 2.0))):
    other = dataclasses.replace(config, block=dataclasses.replace(config.block, **{field: value}))
    with pytest.raises(ValueError, match=f'the format of EAGLE-3 cannot say that {field} is'):
      save_drafter(tmp_path / 'b', head_drafter(drafter.params, other, V))
  assert not (tmp_path / 'b').exists()


@pytest.mark.parametrize(
  'name', ['dflash', 'speculators dflash', 'dspark', 'dspark gated', 'dspark rnn', 'speculators dspark']
)
def test_networks_of_one_pass_are_written_in_the_format_of_speculators(tmp_path, target, name):
  spec = {'layer_types': ['full_attention'] * 2} if name == 'dflash' else None
  drafter = load_drafter(write_head(tmp_path / 'a', name, spec=spec), target)
  save_drafter(tmp_path / 'b', drafter, info={'steps': 1}, param_dtype='float32')
  again = load_drafter(tmp_path / 'b', target)
  one, other = (one_pass_config_of(each) for each in (drafter, again))
  assert dataclasses.replace(one, sees_from_root=True) == dataclasses.replace(other, sees_from_root=True)
  jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)
  assert json.loads((tmp_path / 'b' / 'config.json').read_text())['info'] == {'steps': 1}


def test_networks_of_one_pass_that_the_format_cannot_say(tmp_path, target):
  with pytest.raises(ValueError, match='the format of speculators cannot say that sees_from_root is False'):
    save_drafter(tmp_path / 'b', load_drafter(write_head(tmp_path / 'a', 'dflash'), target))
  with pytest.raises(ValueError, match='DFlash 2 is read, but not written'):
    save_drafter(tmp_path / 'b', load_drafter(write_head(tmp_path / 'c', 'dflash2'), target))
  assert not (tmp_path / 'b').exists()
  for name in ('dspark', 'speculators dspark'):
    with pytest.raises(ValueError, match='is_causal True is not supported'):
      load_drafter(write_head(tmp_path / 'd', name, spec={'is_causal': True}), target)


def test_dtypes(tmp_path, target):
  folder = write_head(tmp_path, 'eagle3', {}, {'torch_dtype': 'bfloat16'})
  assert load_drafter(folder, target).params['features']['kernel'].dtype == jnp.bfloat16
  assert load_drafter(folder, target, dtype='float32').params['features']['kernel'].dtype == jnp.float32
  assert load_drafter(write_head(tmp_path, 'eagle3'), target).params['unembedding'].dtype == jnp.float32
