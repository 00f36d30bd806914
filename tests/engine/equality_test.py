"""On a CPU with products in C++ an output is a function of the text before it, to the bit."""

import dataclasses
import functools
import json
import pathlib

import gguf_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from spectr_jax import METHODS, SamplingParams, TokenTree, load_model, lookup_drafter
from spectr_jax.draft import head_drafter
from spectr_jax.engine import Decoder, decode_rounds, init_decode, refill
from spectr_jax.engine.likelihood import log_likelihood
from spectr_jax.kernels import native
from spectr_jax.methods import with_gumbel
from spectr_jax.models.causal_lm import causal_lm, config_of
from spectr_jax.models.causal_lm_config import CausalLMConfig, Rope
from spectr_jax.models.head import HeadConfig, init_params
from spectr_jax.models.param_shapes import init_params as init_decoder
from tests.slow import slow

pytestmark = [
  pytest.mark.skipif(native.form() is None, reason=f'no products in C++: {native.why_not()}'),
  pytest.mark.usefixtures('optimized'),
]

_PRETRAINED = pathlib.Path(__file__).parents[2] / 'pretrained'
_NEW, _CACHE = 24, 96
_TEXTS = [json.loads(line)['prompt'] for line in (_PRETRAINED / 'prompts.jsonl').read_text().splitlines()[:3]]
_SAMPLING = SamplingParams(np.array([0, 1, 0.7], np.float32), top_p=np.array([1, 1, 0.9], np.float32))


@functools.cache
def _load(name, **options):
  model, tokenizer = load_model(str(_PRETRAINED / name), **options)
  return model.for_decoding(), tokenizer


def _prompts():
  lengths, tokenizer = (9, 25, 17), _load('target')[1]
  return [tokenizer.encode(text)[:length] for text, length in zip(_TEXTS, lengths)]


def _held(cache, row, size):
  """The keys and values of the first tokens of a row."""
  slots = [(keys[row, :, :, :size], values[row, :, :size]) for keys, values in zip(cache.keys, cache.values)]
  return jax.tree.leaves(jax.device_get(slots))


@functools.partial(jax.jit, static_argnames=('chunk', 'cache_size'))
def _read(model, tokens, lengths, last, *, chunk, cache_size):
  """The logits after each row's token `last`, and the caches of the tokens before."""
  cache, _ = model.prefill(tokens, lengths, model.init_cache_fn(len(tokens), cache_size), chunk_size=chunk)
  return model.apply(last[:, None], lengths[:, None], jnp.ones((1, 1), bool), cache).logits[:, 0], cache


@jax.jit
def _read_tree(model, cache, lengths, nodes, mask, depths):
  """The logits of pending `nodes` `[1, N]` after the first tokens of a cache."""
  return model.apply(nodes, lengths[:, None] + depths, mask, model.truncate_fn(cache, lengths)).logits


def _gemma4(dtype):
  """Layers that differ and share, with heads of the greatest width, and matrices that are large enough."""
  rope = Rope(tuple(10000.0 ** (-i / 8) for i in range(32)))
  config = CausalLMConfig(
    256, 128, 5, 2, 1, 64, 128, 128, dtype=dtype, rope=Rope((*rope.frequencies, *[0.0] * 224)), window_rope=rope,
    windows=(5, None, 5, 5, None), has_qk_norm=True, has_value_norm=True, has_post_norms=True, query_scale=1.0,
    logit_soft_cap=30.0, is_tied=True, full_head_dim=512, full_projections='qk', num_shared_layers=2,
    shared_mlp_dim=256, layer_input_dim=64, layer_vocab_size=256, has_layer_scale=True,
  )  # fmt: skip
  config = dataclasses.replace(config, cache_dtype='float32')
  return causal_lm(jax.tree.map(lambda x: 2 * x, init_decoder(jax.random.key(0), config)), config).for_decoding()


@pytest.mark.parametrize(
  'weights', ['float32', slow('bfloat16'), 'int8', 'blocks', slow('gemma4 float32'), 'gemma4 bfloat16']
)
def test_logits_are_a_function_of_the_text(weights, tmp_path):
  """Whatever the chunks in which it is read, the rows beside it, the cache's size, or the tree that it is part of."""
  if weights.startswith('gemma4'):
    model = _gemma4(weights.split()[1])
  elif weights == 'blocks':
    path = gguf_files.write_model(tmp_path / 'model.gguf', 'gemma2', Type.Q4_1)  # with both soft caps and a window
    model = load_model(str(path), weights='blocks')[0].for_decoding()
  else:
    model, _ = _load('draft', **({'weights': weights} if weights == 'int8' else {'dtype': weights}))
  rng = np.random.default_rng(0)
  text = rng.integers(0, min(model.vocab_size, 4096), 45)
  expected = None
  for chunk, batch_size, cache_size in ((64, 3, 128), (1, 1, 64)):
    tokens = rng.integers(0, model.vocab_size, (batch_size, 48))
    lengths = rng.integers(1, 48, batch_size)
    tokens[-1, :45], lengths[-1] = text, 44
    last = tokens[range(batch_size), lengths]
    logits, cache = _read(model, tokens, lengths, last, chunk=chunk, cache_size=cache_size)
    found = [np.asarray(logits[-1]), *_held(cache, -1, 44)]
    expected = found if expected is None else expected
    assert np.isfinite(expected[0]).all()
    assert expected[0].std() > 0.1
    for one, other in zip(found, expected, strict=True):
      np.testing.assert_array_equal(one, other, err_msg=str((chunk, batch_size, cache_size)))

  tree = TokenTree.from_parents((0, 0, 1, 2, 3, 4, 5))
  nodes = rng.integers(0, model.vocab_size, (1, 8))
  path = [0, 2, 4, 6]  # the tree's second chain has the end of the text
  assert [tree.parent_of[node] for node in path[1:]] == path[:-1]
  nodes[0, path] = text[41:]
  logits = _read_tree(model, cache, np.array([41]), nodes, tree.ancestors, tree.depths[None])
  np.testing.assert_array_equal(logits[0, path[-1]], expected[0])


def _decode(target, drafter, method, tree, *, constraint=None, rows=(0, 1, 2), refilled=False):
  """Tokens, log probabilities and cached texts of prompts that are greedy, sampled, and sampled with a filter."""
  prompts = _prompts()
  own = [prompts[row] for row in rows]
  padded = np.array([np.pad(prompt, (0, 32 - len(prompt))) for prompt in own])
  lengths = np.array([len(prompt) for prompt in own])
  decoder = Decoder.make(
    target, drafter, method=method, tree=tree, max_new_tokens=_NEW, cache_size=_CACHE, logprobs=True
  )
  sampling = jax.tree.map(lambda values: values[list(rows)], _SAMPLING)
  keys = jax.random.split(jax.random.key(7), 3)[np.array(rows)]
  state = init_decode(decoder, keys, padded, lengths, sampling=sampling)
  if refilled:  # all rows hold other texts, of which they keep some tokens
    state = decode_rounds(decoder, state)
    kept = {'num_kept': np.minimum(lengths, 5), 'sampling': sampling}
    state = refill(decoder, state, np.arange(len(rows)), keys, padded, lengths, **kept)
  state = decode_rounds(decoder, state)
  result = jax.device_get(state.result)
  assert (result.lengths[0] == _NEW).all()
  texts = [_held(state.target_cache, i, len(prompt) + _NEW - 1) for i, prompt in enumerate(own)]
  return result, texts


@functools.cache
def _without_draft(weights):
  target = _load('target', dtype=weights)[0]
  return _decode(target, None, with_gumbel(METHODS['autoregressive']), None)


def _check_row(found, expected, row=0):
  np.testing.assert_array_equal(found[0].tokens[row, :_NEW], expected[0].tokens[row, :_NEW])
  np.testing.assert_array_equal(found[0].logprobs[row, :_NEW], expected[0].logprobs[row, :_NEW])
  for one, other in zip(found[1][row], expected[1][row], strict=True):
    np.testing.assert_array_equal(one, other)


def test_seed_exact_text_is_that_without_a_draft():
  """Greedy, sampled, and with a filter; so are what the caches hold, and what a call on the whole text finds."""
  target, expected = _load('target', dtype='bfloat16')[0], _without_draft('bfloat16')
  found = _decode(target, _load('draft')[0], 'ersd', TokenTree.chains(2, 3))
  assert (found[0].num_target_calls < expected[0].num_target_calls).all()
  for row in range(3):
    _check_row(found, expected, row)
  prompts = _prompts()
  text = np.array([*prompts[1], *expected[0].tokens[1, :_NEW]])
  read = log_likelihood(target, [text])
  np.testing.assert_array_equal(read.logprobs[0, len(prompts[1]) : len(text)], expected[0].logprobs[1, :_NEW])


def _drafter(name, target):
  if name == 'lookup':
    return lookup_drafter(target.vocab_size)
  if name == 'head':
    block = dataclasses.replace(config_of(_load('draft')[0]), num_layers=1)
    width = config_of(target).embed_dim
    config = HeadConfig(block, width, width, (0, 2, -1), num_embedded=None, is_reduced=False)
    return head_drafter(init_params(jax.random.key(0), config), config, target.vocab_size).for_decoding()
  return _load('draft')[0]


@pytest.mark.parametrize(
  ('name', 'method', 'tree'),
  [
    ('model', 'block', TokenTree.chains(1, 4)),
    pytest.param('lookup', 'race_traversal', TokenTree.chains(2, 3), marks=pytest.mark.slow),
    pytest.param('model', 'spectr', TokenTree.chains(4, 2), marks=pytest.mark.slow),
    pytest.param('head', 'race_traversal', TokenTree.chains(2, 3), marks=pytest.mark.slow),
  ],
)
def test_greedy_text_is_that_without_a_draft(name, method, tree):
  """In a batch of another size, too, and after a refill that keeps the beginning of what a row held."""
  target = _load('target', dtype='bfloat16')[0]
  found = _decode(target, _drafter(name, target), method, tree, rows=(0, 2), refilled=method != 'block')
  _check_row(found, _without_draft('bfloat16'))
