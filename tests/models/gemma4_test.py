"""The parts that only Gemma 4 has, beside its formulas written out in NumPy for one token at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hub_specs import SPECS
from tiny_hub import Recorded, tensors_of

from spectr_jax.io.hub.families import read_spec
from spectr_jax.io.hub.hub_model import make_model
from spectr_jax.model import Model
from spectr_jax.models.param_shapes import param_shapes
from tests.slow import slow

pytestmark = pytest.mark.usefixtures('highest')


def _norm(x, gain=1.0):
  return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain


def _gelu(x):
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _turn(x, position, base, num_turned):
  """Heads `[H, width]` whose numbers i and width / 2 + i turn by position / base^(2 i / width), the first of them."""
  half = x.shape[-1] // 2
  angles = position / base ** (np.arange(half) / half) * (np.arange(half) < num_turned)
  first, second = x[:, :half], x[:, half:]
  turned = first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)
  return np.concatenate(turned, axis=1)


class _Written:
  """Gemma 4 as its configuration and its tensors say, with a list of keys and values for every layer that has some."""

  def __init__(self, spec, tensors):
    self.spec, self.tensors = spec, {name: array.astype(np.float64) for name, array in tensors.items()}
    self.kept = [[] for _ in range(spec['num_hidden_layers'])]
    self.kinds = spec['layer_types']

  def product(self, name, x):
    return self.tensors[f'model.{name}.weight'] @ x

  def gain(self, name, x):
    return _norm(x, self.tensors[f'model.{name}.weight'])

  def attend(self, layer, x, position):
    spec, kind, name = self.spec, self.kinds[layer], f'layers.{layer}.self_attn'
    is_full = kind == 'full_attention'
    width = spec['global_head_dim'] if is_full else spec['head_dim']
    base, num_turned = (1e6, int(0.25 * width) // 2) if is_full else (1e4, width // 2)
    query = self.gain(f'{name}.q_norm', self.product(f'{name}.q_proj', x).reshape(-1, width))
    query = _turn(query, position, base, num_turned)
    num_own = spec['num_hidden_layers'] - spec.get('num_kv_shared_layers', 0)
    source = layer
    if layer >= num_own:
      source = max(i for i in range(num_own) if self.kinds[i] == kind)
    else:
      key = self.product(f'{name}.k_proj', x).reshape(-1, width)
      is_key = is_full and spec.get('attention_k_eq_v', False)
      value = _norm(key if is_key else self.product(f'{name}.v_proj', x).reshape(-1, width))
      self.kept[layer].append((_turn(self.gain(f'{name}.k_norm', key), position, base, num_turned), value))
    seen = self.kept[source] if is_full else self.kept[source][-spec['sliding_window'] :]
    group, mixed = len(query) // len(seen[0][0]), []
    for head, own in enumerate(query):
      scores = np.array([own @ key[head // group] for key, _ in seen])
      weights = np.exp(scores - scores.max())
      mixed.append(weights @ np.stack([value[head // group] for _, value in seen]) / weights.sum())
    return self.product(f'{name}.o_proj', np.concatenate(mixed))

  def mixed(self, layer, x):
    """The experts' output, beside the MLP's."""
    name, tensors, spec = f'layers.{layer}', self.tensors, self.spec
    routed_by = _norm(x) * tensors[f'model.{name}.router.scale'] / spec['hidden_size'] ** 0.5
    scores = np.exp(self.product(f'{name}.router.proj', routed_by))
    chosen = np.argsort(-scores)[: spec['top_k_experts']]
    weights = scores[chosen] / scores[chosen].sum() * tensors[f'model.{name}.router.per_expert_scale'][chosen]
    normed, out = self.gain(f'{name}.pre_feedforward_layernorm_2', x), 0
    for expert, weight in zip(chosen, weights):
      gate, up = (self.product(f'{name}.experts.{expert}.{part}_proj', normed) for part in ('gate', 'up'))
      out = out + weight * self.product(f'{name}.experts.{expert}.down_proj', _gelu(gate) * up)
    return self.gain(f'{name}.post_feedforward_layernorm_2', out)

  def logits(self, token, position):
    spec = self.spec
    width, size = spec['hidden_size'], spec['hidden_size_per_layer_input']
    x = self.tensors['model.embed_tokens.weight'][token] * width**0.5
    inputs = None
    if size:
      row = self.tensors['model.embed_tokens_per_layer.weight'][token].reshape(-1, size) * size**0.5
      product = self.product('per_layer_model_projection', x).reshape(-1, size) / width**0.5
      inputs = (self.gain('per_layer_projection_norm', product) + row) / 2**0.5
    for layer in range(spec['num_hidden_layers']):
      name = f'layers.{layer}'
      attended = self.attend(layer, self.gain(f'{name}.input_layernorm', x), position)
      x = x + self.gain(f'{name}.post_attention_layernorm', attended)
      normed = self.gain(f'{name}.pre_feedforward_layernorm', x)
      hidden = _gelu(self.product(f'{name}.mlp.gate_proj', normed)) * self.product(f'{name}.mlp.up_proj', normed)
      out = self.product(f'{name}.mlp.down_proj', hidden)
      if spec.get('enable_moe_block'):
        out = self.gain(f'{name}.post_feedforward_layernorm_1', out) + self.mixed(layer, x)
      x = x + self.gain(f'{name}.post_feedforward_layernorm', out)
      if inputs is not None:
        gated = _gelu(self.product(f'{name}.per_layer_input_gate', x)) * inputs[layer]
        x = x + self.gain(f'{name}.post_per_layer_input_norm', self.product(f'{name}.per_layer_projection', gated))
      x = x * self.tensors[f'model.{name}.layer_scalar']
    cap = spec['final_logit_softcapping']
    return cap * np.tanh(self.tensors['model.embed_tokens.weight'] @ self.gain('norm', x) / cap)


@pytest.mark.parametrize('name', ['gemma4', slow('gemma4_keys'), 'gemma4_mixture'])
def test_logits_are_those_of_the_formulas(name):
  """Of a text longer than the window, read by a prefill and by steps."""
  spec, rng = SPECS[name], np.random.default_rng(1)
  tensors = {
    name: (rng.normal(size=array.shape) * 0.3 + (array.ndim == 1)).astype(np.float32)
    for name, array in tensors_of(spec).items()
  }
  text, written = np.random.default_rng(0).integers(0, 32, 11), _Written(spec, tensors)
  expected = np.stack([written.logits(token, position) for position, token in enumerate(text)])
  model = make_model(spec, Recorded(tensors))
  apply = jax.jit(Model.apply)
  cache = model.init_cache_fn(1, 16)
  output = apply(model, text[None, :8], np.arange(8)[None], jnp.tril(jnp.ones((8, 8), bool)), cache)
  found = [*output.logits[0]]
  cache = output.cache.commit(jnp.arange(8)[None], jnp.array([8]))
  for position in range(8, 11):
    output = apply(model, text[None, position : position + 1], np.array([[position]]), jnp.ones((1, 1), bool), cache)
    found.append(output.logits[0, 0])
    cache = output.cache.commit(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
  assert np.std(expected) > 0.5
  np.testing.assert_allclose(np.stack(found), expected, atol=1e-4)


def test_layers_that_share_have_no_cache_and_others_their_own_shapes():
  config = read_spec(SPECS['gemma4'])[1]
  cache = config.empty_cache(3, 16)
  assert [keys.shape for keys in cache.keys] == [(3, 2, 6, 16), (3, 2, 8, 16)]
  assert [config.kv_layer(layer) for layer in range(4)] == [0, 1, 0, 1]
  shapes = param_shapes(config)
  assert shapes['layer_0']['mlp']['up']['kernel'].shape == (16, 24)
  assert shapes['layer_2']['mlp']['up']['kernel'].shape == (16, 48)
  assert shapes['layer_3']['attention'].keys() == {'q', 'q_norm', 'out'}
  keys = read_spec(SPECS['gemma4_keys'])[1]
  assert [values.shape for values in keys.empty_cache(1, 4).values] == [(1, 2, 4, 6), (1, 1, 4, 8)] * 2
  assert param_shapes(keys)['layer_1']['attention'].keys() == {'q', 'k', 'q_norm', 'k_norm', 'out'}


def test_tensors_of_shared_keys_are_passed_over():
  """Files hold keys and values also of layers that read those of others."""
  spec, tensors = SPECS['gemma4'], tensors_of(SPECS['gemma4'])
  for name in ('k_proj', 'v_proj', 'k_norm'):
    tensors[f'model.layers.2.self_attn.{name}.weight'] = np.zeros((3, 2), np.float32)
  make_model(spec, Recorded(tensors))
  tensors['model.layers.1.self_attn.v_norm.weight'] = np.zeros(6, np.float32)
  with pytest.raises(ValueError, match='1 tensors too many, the first of them model.layers.1.self_attn.v_norm.weight'):
    make_model(spec, Recorded(tensors))


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'num_shared_layers': 4}, 'num_shared_layers must be a whole number from 0 to 3, got 4'),
    ({'num_shared_layers': 3}, 'the last 3 layers share keys and values, but none before is of their kind'),
    ({'full_head_dim': 0}, 'full_head_dim must be a positive integer'),
    ({'full_kv_heads': 3}, 'num_heads 4 must be a multiple of the 3 heads'),
    ({'full_head_dim': 2}, 'rotary frequencies need heads of twice that; got 2'),
    ({'full_projections': 'kv'}, 'projections must be qkv, qk or q'),
    ({'layer_vocab_size': 31}, 'layer_vocab_size 31 must be at least vocab_size 32'),
  ],
)
def test_sizes_that_do_not_fit(fields, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(read_spec(SPECS['gemma4'])[1], **fields)
