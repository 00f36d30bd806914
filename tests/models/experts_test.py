"""Routing and experts beside plain loops over experts in NumPy, in every form."""

import dataclasses
import functools
import itertools
import pathlib

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hub
from hub_specs import SPECS

from spectr_jax.io.hub.families import read_spec
from spectr_jax.kernels import expert_products, native
from spectr_jax.kernels.int8 import Int8Kernel, quantized
from spectr_jax.model import Model
from spectr_jax.models import experts, routing
from spectr_jax.models.causal_lm import causal_lm
from spectr_jax.models.causal_lm_config import ACTIVATIONS
from spectr_jax.models.param_shapes import init_params, param_shapes
from spectr_jax.models.routing import Experts
from spectr_jax.tree import TokenTree
from tests.slow import slow

pytestmark = pytest.mark.usefixtures('highest')

NUM, WIDTH, HIDDEN = 8, 16, 12
NAMES = 'mixtral', 'qwen3_moe', 'olmoe', 'gpt_oss', 'glm4_moe', 'granitemoe', 'gemma4_mixture'


def _softmax(x):
  weights = np.exp(x - x.max())
  return weights / weights.sum()


def _routed(logits, bias, rules):
  """The experts of one token and their weights, by the papers' words."""
  if rules.is_chosen_first:
    chosen = np.argsort(-logits, kind='stable')[: rules.num_chosen]
    weights = _softmax(logits[chosen])
  else:
    scores = _softmax(logits) if rules.scores == 'softmax' else 1 / (1 + np.exp(-logits))
    ranked = scores + bias if rules.has_choice_bias else scores
    if rules.num_groups > 1:
      groups = ranked.reshape(rules.num_groups, -1)
      best = np.sort(groups)[:, -2:].sum(axis=1)
      kept = np.argsort(-best, kind='stable')[: rules.num_chosen_groups]
      ranked = np.where(np.isin(np.arange(NUM) // groups.shape[1], kept), ranked, -np.inf)
    chosen = np.argsort(-ranked, kind='stable')[: rules.num_chosen]
    weights = scores[chosen]
  if rules.is_normalized:
    weights = weights / weights.sum()
  return chosen, weights * rules.scale


RULES = {
  'mixtral': Experts(NUM, 2, HIDDEN),
  'not normalized': Experts(NUM, 3, HIDDEN, is_normalized=False),
  'gpt-oss': Experts(NUM, 4, HIDDEN, is_chosen_first=True, is_normalized=False, has_bias=True, limit=0.7),
  'sigmoid': Experts(NUM, 3, HIDDEN, scores='sigmoid'),
  'deepseek': Experts(
    NUM, 3, HIDDEN, scores='sigmoid', scale=2.5, num_groups=4, num_chosen_groups=2, has_choice_bias=True
  ),
  'all': Experts(NUM, NUM, HIDDEN),
}


def _layer(rules, scale=0.5):
  config = dataclasses.replace(read_spec(SPECS['mixtral'])[1], embed_dim=WIDTH, experts=rules)
  drawn = np.random.default_rng(0).normal
  return jax.tree.map(
    lambda x: jnp.asarray(scale * drawn(size=x.shape), jnp.float32), param_shapes(config)['layer_0']['mlp']
  )


@pytest.mark.parametrize('name', RULES)
@pytest.mark.parametrize('is_native', [True, False])
def test_routing_and_experts_are_a_loop_over_experts(name, is_native, monkeypatch):
  rules, rows = RULES[name], np.random.default_rng(1).normal(size=(7, WIDTH)).astype(np.float32)
  if not is_native:
    monkeypatch.setattr(native, 'form', lambda: None)
  params = _layer(rules)
  chosen, weights = routing.route(params['router'], rules, jnp.asarray(rows))
  found = experts.mixture(params, rules, jax.nn.silu, jnp.asarray(rows)[None])[0]
  router, of_experts = jax.tree.map(np.asarray, (params['router'], params['experts']))

  def product(part, x, expert):
    return x @ part['kernel'][expert] + (part['bias'][expert] if rules.has_bias else 0)

  for row, x in enumerate(rows.astype(np.float64)):
    logits = x @ router['kernel'] + (router['bias'] if rules.has_bias else 0)
    own, own_weights = _routed(logits, router.get('choice_bias'), rules)
    np.testing.assert_array_equal(chosen[row], own)
    np.testing.assert_allclose(weights[row], own_weights, rtol=1e-5)
    expected = 0
    for expert, weight in zip(own, own_weights):
      gate, up = (product(of_experts[part], x, expert) for part in ('gate', 'up'))
      if rules.limit is None:
        hidden = gate / (1 + np.exp(-gate)) * up
      else:
        gate, up = np.minimum(gate, rules.limit), np.clip(up, -rules.limit, rules.limit)
        hidden = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
      expected = expected + weight * product(of_experts['down'], hidden, expert)
    np.testing.assert_allclose(found[row], expected, atol=2e-5 * np.abs(expected).max())


def _kernels(form):
  kernel = np.random.default_rng(2).normal(size=(NUM, WIDTH, 20)).astype(np.float32)
  made = {'float32': jnp.asarray(kernel), 'bfloat16': jnp.asarray(kernel, jnp.bfloat16)}
  return quantized({'kernel': kernel})['kernel'] if form == 'int8' else made[form]


def _dense(kernel):
  return np.asarray(kernel.dequantized(jnp.float32) if isinstance(kernel, Int8Kernel) else kernel, np.float64)


@pytest.mark.parametrize('form', ['float32', 'bfloat16', 'int8'])
@pytest.mark.parametrize('num_rows', [0, 1, 5, 40])
def test_products_of_every_form_are_those_of_single_kernels(form, num_rows):
  """Rows come in no order, one expert has most of them, and some have none."""
  kernel, rng = _kernels(form), np.random.default_rng(3)
  dtype = 'bfloat16' if form == 'bfloat16' else 'float32'
  rows = jnp.asarray(rng.normal(size=(num_rows, WIDTH)), dtype)
  chosen = jnp.asarray(np.where(rng.random(num_rows) < 0.6, 3, rng.integers(0, NUM - 2, num_rows)), jnp.int32)
  expected = np.einsum('ni,nio->no', np.asarray(rows, np.float64), _dense(kernel)[chosen])
  values = kernel.values if form == 'int8' else kernel
  found = [
    expert_products.expert_product(rows, kernel, chosen),
    *(
      make(rows, values, chosen) * (kernel.scale[chosen] if form == 'int8' else 1)
      for make in (expert_products.gathered_product, expert_products.ragged_product)
    ),
  ]
  if native.form() is not None:
    found.append(expert_products.expert_product(rows, expert_products.packed_experts(kernel), chosen))
  for each in found:
    assert each.dtype == jnp.float32
    np.testing.assert_allclose(each, expected, atol=1e-4)


@pytest.mark.skipif(native.form() is None, reason='needs products in C++')
@pytest.mark.parametrize('form', ['float32', 'bfloat16', 'int8'])
def test_a_row_does_not_depend_on_the_rows_beside_it(form):
  kernel, rng = expert_products.packed_experts(_kernels(form)), np.random.default_rng(4)
  rows, chosen = jnp.asarray(rng.normal(size=(33, WIDTH)), jnp.float32), rng.integers(0, NUM, 33)
  whole = np.asarray(expert_products.expert_product(rows, kernel, jnp.asarray(chosen)))
  for start, size in ((0, 1), (5, 2), (7, 17)):
    some = slice(start, start + size)
    found = expert_products.expert_product(rows[some], kernel, jnp.asarray(chosen[some]))
    np.testing.assert_array_equal(found, whole[some])


@pytest.mark.skipif(native.form() is None, reason='needs products in C++')
@pytest.mark.parametrize(
  ('name', 'dtype'),
  [slow('qwen3_moe', 'float32'), ('gpt_oss', 'bfloat16'), slow('olmoe', 'float32'), slow('glm4_moe', 'float32')],
)
def test_logits_depend_on_the_text_alone_to_the_bit(name, dtype, monkeypatch):
  """Of a prompt in chunks, a ragged batch, and a tree."""
  monkeypatch.setattr('spectr_jax.kernels.matrices._LEAST_PACKED', 1)
  sizes = {'hidden_size': 64, 'head_dim': 16, 'vocab_size': 48, 'num_key_value_heads': 2, 'sliding_window': None}
  sizes |= {'num_key_value_heads': 4} if name == 'olmoe' else {}
  sizes |= {'sliding_window': 4} if name == 'gpt_oss' else {}
  config = dataclasses.replace(read_spec(SPECS[name] | sizes)[1], dtype=dtype, cache_dtype='float32')
  model = causal_lm(init_params(jax.random.key(0), config), config).for_decoding()
  rng, apply = np.random.default_rng(0), jax.jit(Model.apply)
  prompts, lengths = rng.integers(0, 48, (3, 13)), np.array([13, 6, 1])
  tree = TokenTree((0, 0, 1, 1, 2, 4))
  tokens = rng.integers(0, 48, (3, 7))

  @functools.partial(jax.jit, static_argnums=3)
  def of_tree(prompts, lengths, tokens, chunk_size):
    cache, _ = model.prefill(prompts, lengths, model.init_cache_fn(len(prompts), 24), chunk_size=chunk_size)
    positions = lengths[:, None] + tree.depths
    return model.apply(tokens, positions, jnp.asarray(tree.ancestors)[None], cache).logits

  whole = np.asarray(of_tree(prompts, lengths, tokens, 16))
  np.testing.assert_array_equal(of_tree(prompts, lengths, tokens, 3), whole)
  for row in range(3):
    some = slice(row, row + 1)
    np.testing.assert_array_equal(of_tree(prompts[some], lengths[some], tokens[some], 16), whole[some])
  cache, _ = model.prefill(prompts, lengths, model.init_cache_fn(3, 24))
  for depth, node in enumerate((0, 1, 4, 6)):  # one token at a time, each committed
    output = apply(model, tokens[:, node : node + 1], lengths[:, None] + depth, jnp.ones((1, 1), bool), cache)
    np.testing.assert_array_equal(output.logits[:, 0], whole[:, node])
    cache = output.cache.commit(jnp.zeros((3, 1), jnp.int32), jnp.ones(3, jnp.int32))


def _plain(model, tokens):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
  return jax.jit(Model.apply)(model, tokens, positions, causal, model.init_cache_fn(len(tokens), 16)).logits


@pytest.mark.parametrize(
  ('name', 'weights'),
  [
    ('gpt_oss', None), ('glm4_moe', 'int8'),
    *(slow(*each) for each in itertools.product(NAMES, (None, 'int8'))
      if each not in (('gpt_oss', None), ('glm4_moe', 'int8'))),
  ],
)  # fmt: skip
def test_models_for_decoding_have_the_same_logits(name, weights):
  config = dataclasses.replace(read_spec(SPECS[name])[1], weights=weights)
  model = causal_lm(init_params(jax.random.key(0), config), config)
  of_layer = model.params['layer_1'].get('mixture') or model.params['layer_1']['mlp']
  assert isinstance(of_layer['experts']['up']['kernel'], Int8Kernel) == (weights == 'int8')
  assert isinstance(of_layer['router']['kernel'], jax.Array)
  for num_tokens in (1, 9):  # that gather experts, and that do not
    tokens = jnp.arange(2 * num_tokens).reshape(2, -1) % 32
    expected = _plain(model, tokens)
    np.testing.assert_allclose(_plain(model.for_decoding(), tokens), expected, atol=1e-4)
    with native.disabled():
      np.testing.assert_allclose(_plain(model.for_decoding(), tokens), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_meshes_decode_like_one_device(name, tmp_path):
  options = {'cwd': pathlib.Path(__file__).parent, 'num_devices': 4, 'JAX_DEFAULT_MATMUL_PRECISION': 'highest'}
  arrays = {key: x / 2 if x.ndim == 2 else x for key, x in tiny_hub.tensors_of(SPECS[name]).items()}
  folder = tiny_hub.write_model(tmp_path / name, SPECS[name], arrays)
  ran = commands.finish(commands.start('mixtures_on_meshes', folder, **options))
  assert ran.splitlines()[-1] == f'{name}: 3 meshes'


@pytest.mark.parametrize(
  ('fields', 'problem'),
  [
    ({'num': 10**9}, 'num of experts must be from 1 to 4096, got 1000000000'),
    ({'num_chosen': 9}, 'num_chosen of experts must be from 1 to 8, got 9'),
    ({'num_groups': 3}, '8 experts do not divide into 3 groups'),
    ({'num_groups': 4, 'num_chosen': 3}, '1 groups of 2 experts are too few to choose 3'),
    ({'scores': 'relu'}, "scores of experts must be softmax or sigmoid, got 'relu'"),
    ({'has_shared_gate': True}, 'experts have a gate of their shared MLP, but shared_dim is 0'),
    ({'shared_dim': -1}, 'shared_dim of experts must be from 0 to 2147483647, got -1'),
    ({'scale': float('inf')}, 'scale of experts must be finite and above 0, got inf'),
    ({'is_chosen_first': True, 'has_choice_bias': True}, 'neither groups nor a bias'),
  ],
)
def test_rules_that_are_refused(fields, problem):
  with pytest.raises(ValueError, match=problem):
    Experts(**{'num': 8, 'num_chosen': 2, 'hidden_dim': 4} | fields)


def test_activations_are_those_of_the_decoder():
  """The last two experts of a token are the same as one MLP of the two side by side."""
  rules = Experts(2, 2, HIDDEN, is_normalized=False)
  params = _layer(rules)
  params['router']['kernel'] = jnp.zeros((WIDTH, 2))
  x = jnp.asarray(np.random.default_rng(5).normal(size=(3, WIDTH)), jnp.float32)
  for name, activation in itertools.islice(ACTIVATIONS.items(), 2):
    gate, up = (jnp.concatenate(list(params['experts'][part]['kernel']), axis=1) for part in ('gate', 'up'))
    down = jnp.concatenate(list(params['experts']['down']['kernel']))
    expected = 0.5 * (activation(x @ gate) * (x @ up)) @ down
    np.testing.assert_allclose(experts.mixture(params, rules, activation, x), expected, atol=1e-5, err_msg=name)
