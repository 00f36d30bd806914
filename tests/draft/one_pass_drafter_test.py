"""Drafters of one pass: their distributions beside a plain computation, and decoding with them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_engine_is_exact, assert_greedy_is_exact, p_values
from tiny_heads import TARGET, D, V, all_features, padded, three_layers, tiny_head, tiny_one_pass

from spectr_jax import SamplingParams, TokenTree
from spectr_jax.draft import (
  Confident,
  DraftContext,
  DraftRequest,
  Estimated,
  Likeliest,
  growing,
  lookup_beside,
  new_features,
)
from spectr_jax.draft.one_pass_drafter import OnePassDrafter, config_of, one_pass_drafter
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import noise_keys, propose, run_round
from spectr_jax.engine.reading import init_decode
from spectr_jax.kernels import products
from spectr_jax.models import head, one_pass
from spectr_jax.models.one_pass_config import Convolution, Markov, OnePassConfig, Selector
from tests.draft.prompts import read as read_prompts
from tests.slow import slow_but

VD, SLOTS, MASK = 11, 4, 20
_BACKBONE = dataclasses.replace(TARGET, num_layers=2, is_tied=False, has_qk_norm=True)
_WINDOWS = dataclasses.replace(_BACKBONE, windows=(3, None))
_REDUCED = {'backbone': dataclasses.replace(_WINDOWS, vocab_size=VD), 'is_reduced': True}
_DFLASH = OnePassConfig(_BACKBONE, D, (0, 2), SLOTS, MASK)
_DSPARK = dataclasses.replace(
  _DFLASH, guesses_at_root=True, markov=Markov(5, V), confidence='markov', num_embedded=V
)  # fmt: skip
_DFLASH2 = dataclasses.replace(
  _DFLASH, backbone=_WINDOWS, has_causal_windows=False, selector=Selector(5, V, 6), convolution=Convolution(2, 4)
)  # fmt: skip
_RNN = Markov(5, V, 'rnn')
_CONFIGS = {
  'dflash': _DFLASH,
  'dflash with windows': dataclasses.replace(_DFLASH, backbone=_WINDOWS),
  'dflash with windows to both sides': dataclasses.replace(_DFLASH, backbone=_WINDOWS, has_causal_windows=False),
  'dflash2': _DFLASH2,
  'dspark': _DSPARK,
  'dspark gated': dataclasses.replace(_DSPARK, markov=Markov(5, V, 'gated'), confidence=None),
  'dspark rnn': dataclasses.replace(_DSPARK, markov=_RNN, confidence='hidden'),
  'dspark rnn from slot 1': dataclasses.replace(_DSPARK, markov=_RNN, guesses_at_root=False, sees_from_root=True),
  'dspark reduced': dataclasses.replace(_DSPARK, sees_from_root=True, num_embedded=None, **_REDUCED),
}


@pytest.fixture(scope='module')
def target():
  return three_layers()


def _drafter(config, seed=1):
  params = head.random_params(jax.random.key(seed), one_pass.param_shapes(config))
  if config.is_reduced:
    params['target_ids'] = jnp.arange(0, 2 * VD, 2)
  return one_pass_drafter(params, config, V)


# The plain computation, in float64 and without a cache.


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def _rms(x, gain):
  return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + _BACKBONE.norm_epsilon) * gain


def _rotated(x, positions):
  angles = positions[:, None, None] * np.array(_BACKBONE.rope.frequencies)
  first, second = np.split(x, 2, axis=-1)
  sin, cos = np.sin(angles), np.cos(angles)
  return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _is_seen(config, window, root):
  """bool `[W, root + W]`, what each slot attends to; by position, the context first."""
  own, other = root + np.arange(SLOTS)[:, None], np.arange(root + SLOTS)
  if window is None:
    return np.ones((SLOTS, root + SLOTS), bool)
  is_slot = other >= root
  seen = is_slot | (other >= root - window) if config.sees_from_root else np.abs(own - other) < window
  return seen & ~(is_slot & (other > own)) if config.has_causal_windows else seen


def _convolved(x, base, dynamic):
  """`[W, D]`, by taps: the slot itself, then the one before it."""
  coefficients = base + np.repeat(dynamic, D // dynamic.shape[-1], axis=-1)
  before = np.concatenate([np.zeros((1, D)), x[:-1]])
  return coefficients[:, 0] * x + coefficients[:, 1] * before


def _between(config, own, x, transform):
  """What attention or MLP makes of slots, which DFlash 2 mixes before and after it."""
  if config.convolution is None:
    return transform(x)
  dynamic = (x @ own['kernel']).reshape(SLOTS, 2, 2, -1)
  return _convolved(transform(_convolved(x, own['base'][0], dynamic[:, 0])), own['base'][1], dynamic[:, 1])


def _outputs(params, config, features, embedded):
  """`[W, D]`, after the features `[S - 1, F, D]` of a text and with the embedded slots."""
  root, backbone = len(features), config.backbone
  read = features.reshape(root, len(config.feature_layers) * config.target_dim) @ params['features']['kernel']
  context = _rms(read, params['features_norm']['gain'])
  x = embedded
  for layer in range(backbone.num_layers):
    own = params[f'layer_{layer}']
    attention = own['attention']

    def attend(normed, attention=attention, layer=layer):
      def heads(name, rows):
        return (rows @ attention[name]['kernel']).reshape(len(rows), -1, backbone.head_dim)

      rows = np.concatenate([context, normed])
      query = _rotated(_rms(heads('q', normed), attention['q_norm']['gain']), root + np.arange(SLOTS))
      key = _rotated(_rms(heads('k', rows), attention['k_norm']['gain']), np.arange(root + SLOTS))
      group = backbone.num_heads // backbone.num_kv_heads
      key, value = (np.repeat(y, group, axis=1) for y in (key, heads('v', rows)))
      scores = np.einsum('qhd,khd->hqk', query, key) / backbone.head_dim**0.5
      scores = np.where(_is_seen(config, backbone.window(layer), root), scores, -np.inf)
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      mixed = np.einsum('hqk,khd->qhd', weights / weights.sum(-1, keepdims=True), value).reshape(SLOTS, -1)
      return mixed @ attention['out']['kernel']

    def transform(normed, mlp=own['mlp']):
      gate = normed @ mlp['gate']['kernel']
      return (gate * _sigmoid(gate) * (normed @ mlp['up']['kernel'])) @ mlp['down']['kernel']

    x = x + _between(config, own.get('attention_conv'), _rms(x, own['attention_norm']['gain']), attend)
    x = x + _between(config, own.get('mlp_conv'), _rms(x, own['mlp_norm']['gain']), transform)
  return _rms(x, params['final_norm']['gain'])


def _reference(target, drafter, text, features, guesses):
  """The logits `[V]` after a text and guesses, and the estimated chance that the next guess is accepted."""
  config = config_of(drafter)
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), drafter.params)
  own = params.get('embedding', np.asarray(target.params['embedding'], np.float64))
  outputs = _outputs(params, config, features, own[np.array([text[-1], *[MASK] * (SLOTS - 1)])])
  tokens = [text[-1], *guesses]  # what is read at each slot from the first that guesses on
  if not config.guesses_at_root:
    tokens = [text[-1], *tokens]
  slot = len(tokens) - 1
  logits, before = outputs[slot] @ params['unembedding'], None
  if config.markov is not None:
    markov, state = params['markov'], np.zeros(config.markov.rank)
    for output, token in zip(outputs, tokens):
      before = mixed = markov['embedding'][token]
      if config.markov.kind == 'gated':
        read = np.concatenate([output, before])
        mixed = _sigmoid(read @ markov['gate']['kernel'] + markov['gate']['bias']) * before
      elif config.markov.kind == 'rnn':
        read = np.concatenate([state, before, output])
        gate, new, out = np.split(read @ markov['joint']['kernel'] + markov['joint']['bias'], 3)
        state = _sigmoid(gate) * state + (1 - _sigmoid(gate)) * np.tanh(new)
        mixed = np.tanh(out)
    logits = logits + mixed @ markov['unembedding']
  if config.selector is not None:
    own, unary = params['selector'], logits
    candidates = np.argsort(-unary)[: config.selector.num_candidates]
    scores = (own['before'][tokens[slot]] * (outputs[slot] @ own['kernel'])) @ own['after'][candidates].T
    logits = np.full(V, -np.inf)
    logits[candidates] = unary[candidates] + scores
  chance = None
  if config.confidence is not None:
    read = outputs[slot] if config.confidence == 'hidden' else np.concatenate([outputs[slot], before])
    chance = _sigmoid(read @ params['confidence']['kernel'][:, 0] + params['confidence']['bias'][0])
  full = np.full(V, -np.inf)
  full[params['target_ids'].astype(int) if config.is_reduced else np.arange(V)] = logits
  return full, chance


def _softmax(logits):
  weights = np.exp(logits - logits.max())
  return weights / weights.sum()


def _features_of(target, drafter, text):
  features = all_features(target, padded(text), layers=drafter.feature_layers)
  return np.asarray(features[: len(text) - 1], np.float64)


def _context(target, drafter, rows, lengths):
  features = jnp.stack([all_features(target, row, layers=drafter.feature_layers) for row in rows])
  return DraftContext(jnp.asarray(lengths), target, rows, features)


def _path(proposal, row, tree, node):
  """The guesses down to a node."""
  nodes = [n for n in range(1, node + 1) if tree.ancestors[node, n]]
  return np.asarray(proposal.tokens[row])[np.array(nodes, int) - 1].tolist()


@pytest.mark.slow
@pytest.mark.parametrize('name', slow_but(['dspark rnn from slot 1'], _CONFIGS))
def test_laws_of_three_rounds_are_those_of_a_plain_computation(target, name, monkeypatch):
  """On a tree with branches: rows of unequal length, before and after some guesses were kept."""
  monkeypatch.setattr(products, 'LARGE', 1)
  drafter = _drafter(_CONFIGS[name])
  tree = TokenTree.from_parents((0, 0, 1, 1, 2, 3))
  decoder = Decoder.make(
    target, drafter.for_decoding(), method='traversal', tree=tree, max_new_tokens=20, cache_size=40
  )  # fmt: skip
  prompts, lengths = jax.random.randint(jax.random.key(3), (3, 7), 0, V), jnp.array([7, 1, 4])
  temperature = 4.0  # so that guesses are kept
  state = init_decode(decoder, jax.random.key(2), prompts, lengths, sampling=SamplingParams(temperature))
  total = 0
  for _ in range(3):
    proposal = jax.jit(propose)(decoder, state, noise_keys(decoder, state)[0])
    for row in range(3):
      text = np.asarray(state.text[row, : int(state.root_position[row]) + 1]).tolist()
      features = _features_of(target, drafter, text)
      for node in np.flatnonzero(tree.num_children):
        guesses = _path(proposal, row, tree, node)
        wanted = _softmax(_reference(target, drafter, text, features, guesses)[0] / temperature)
        np.testing.assert_allclose(proposal.probs[row, tree.parent_index[node]], wanted, rtol=1e-4, atol=1e-6)
        total += 1
    np.testing.assert_array_equal(state.draft_state.lengths, state.root_position)
    state, _ = jax.jit(run_round)(decoder, state)
  assert total == 3 * 3 * np.count_nonzero(tree.num_children)
  assert int(state.result.lengths.max()) > 3  # some guesses were kept, so caches moved by more than one token


@functools.partial(jax.jit, static_argnames='config')
def _outputs_of_block(params, features, root, *, config):
  """`[1, W, D]`, after a text of which all tokens but the last have the features `[1, S - 1, F, D]`."""
  num_read = features.shape[1]
  positions = jnp.arange(num_read)[None]
  cache = one_pass.read_context(params, config, features, positions, config.backbone.empty_cache(1, 8))
  cache = cache.commit(positions, jnp.array([num_read]))
  slots = jnp.concatenate([root, jnp.full(config.num_slots - 1, config.mask_id)])[None]
  return one_pass.run_block(params, config, params['embedding'][slots], cache)


def test_estimates_are_those_of_a_plain_computation(target):
  text = [3, 1, 4, 1, 5]
  for name in ('dspark', 'dspark rnn'):
    drafter = _drafter(_CONFIGS[name])
    config, params = config_of(drafter), drafter.params
    features = _features_of(target, drafter, text)
    guesses = [2, 7, 1]
    outputs = _outputs_of_block(params, jnp.asarray(features[None], jnp.float32), jnp.array([text[-1]]), config=config)
    before = one_pass.embed_before(params, config, jnp.array([[text[-1], *guesses]]))
    estimates = jax.nn.sigmoid(one_pass.confidence_logits(params, config, outputs, before))[0]
    for depth in range(SLOTS):
      wanted = _reference(target, drafter, text, features, guesses[:depth])[1]
      np.testing.assert_allclose(estimates[depth], wanted, rtol=1e-4)


def test_the_network_runs_once_whatever_the_tree(target, monkeypatch):
  num_calls, run_block = [], one_pass.run_block
  monkeypatch.setattr(one_pass, 'run_block', lambda *args: num_calls.append(1) or run_block(*args))
  drafter = _drafter(_DSPARK)
  for tree in (TokenTree.chains(4, 4), TokenTree.prefix((3, 2, 1)), TokenTree.specinfer(4)):
    decoder = Decoder.make(target, drafter, method='race_traversal', tree=tree, max_new_tokens=5, cache_size=20)
    keys = jax.random.split(jax.random.key(2), (1, tree.max_depth + 1))
    context = DraftContext(jnp.array([3]), target, jnp.zeros((1, 8), jnp.int32))
    request = DraftRequest(keys, SamplingParams.make(1), tree, decoder.method.proposal_rule)
    num_calls.clear()
    jax.eval_shape(drafter.propose, _DSPARK.backbone.empty_cache(1, 8), context, request)
    assert len(num_calls) == 1


@pytest.mark.slow
def test_a_long_prompt_is_read_in_chunks(target, monkeypatch):
  drafter = _drafter(_DFLASH)
  prompts, lengths = jax.random.randint(jax.random.key(5), (2, 30), 0, V), jnp.array([30, 11])
  context = _context(target, drafter, prompts, lengths)
  whole = read_prompts(drafter, context, 40)
  monkeypatch.setattr(new_features, 'PREFILL_CHUNK', 8)
  parts = read_prompts(drafter, context, 40)
  for cache in (whole, parts):
    np.testing.assert_array_equal(cache.lengths, lengths - 1)
  for row, length in enumerate(lengths.tolist()):
    keys = [cache.keys[1][row, ..., : length - 1] for cache in (parts, whole)]
    np.testing.assert_allclose(*keys, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('num_kept', [(9, 4), (6, 2), (12, 3)])
def test_another_prompt_keeps_what_the_text_has_of_it(target, num_kept):
  """Also a prompt that the text begins with, and one that goes on after it."""
  drafter, num_kept = _drafter(_DFLASH), jnp.array(num_kept)
  text = jax.random.randint(jax.random.key(5), (2, 12), 0, V)
  other = jnp.where(jnp.arange(12) < num_kept[:, None], text, (text + 1) % V)
  lengths = [12, 4]
  before, after = (_context(target, drafter, rows, lengths) for rows in (text, other))
  extended, wanted = (
    drafter.read(read_prompts(drafter, before, 16), after, num_kept, 6),
    read_prompts(drafter, after, 16),
  )
  np.testing.assert_array_equal(extended.lengths, wanted.lengths)
  for row, length in enumerate(lengths):
    kept = [cache.values[1][row, :, : length - 1] for cache in (extended, wanted)]
    np.testing.assert_allclose(*kept, rtol=1e-5, atol=1e-5)


_TREES = {
  'chains': TokenTree.chains(2, 3),
  'prefix': TokenTree.prefix((2, 2, 1)),
  'likeliest': TokenTree.slots((3, 4, 2)),
  'confident': TokenTree.slots((2, 3, 2)),
  'estimated': TokenTree.slots((2, 3, 2)),
}
_GROWTHS = {'likeliest': Likeliest(), 'confident': Confident(0.3), 'estimated': Estimated(0.2)}


@pytest.mark.slow
@pytest.mark.parametrize('name', slow_but(['dspark'], ['dflash', 'dspark', 'dspark rnn']))
@pytest.mark.parametrize('shape', _TREES)
def test_greedy_tokens_are_the_targets(target, name, shape):
  drafter = _drafter(_CONFIGS[name])
  if shape == 'estimated' and not drafter.estimates:
    with pytest.raises(ValueError, match='this draft makes none'):
      growing(drafter, _GROWTHS[shape])
    return
  drafter = growing(drafter, _GROWTHS[shape]) if shape in _GROWTHS else drafter
  prompts, lengths = jax.random.randint(jax.random.key(5), (3, 5), 0, V), jnp.array([5, 1, 3])
  assert_greedy_is_exact(target, drafter, prompts, lengths, method='specinfer', tree=_TREES[shape])


@pytest.mark.slow
def test_a_chain_ends_with_the_first_guess_that_its_estimates_reject(target):
  """For each row by itself, left to right, by the products of estimates that read the guesses before."""
  tree, prompts, lengths = TokenTree.slots((1, 1, 1, 1)), jax.random.randint(jax.random.key(5), (6, 5), 0, V), 5
  plain = _drafter(_DSPARK)
  texts = [prompt.tolist() for prompt in prompts]
  thresholds, sizes = (0.0, 0.1, 0.25, 0.5), []
  for threshold in thresholds:
    drafter = growing(plain, Estimated(threshold))
    decoder = Decoder.make(target, drafter, method='race_traversal', tree=tree, max_new_tokens=4, cache_size=12)
    state = init_decode(decoder, jax.random.key(2), prompts, jnp.full(6, lengths))
    proposal = jax.jit(propose)(decoder, state, noise_keys(decoder, state)[0])
    for row, text in enumerate(texts):
      features, worth, guesses = _features_of(target, plain, text), 1.0, []
      for depth in range(4):
        worth *= _reference(target, plain, text, features, guesses)[1]
        assert (proposal.tokens[row, depth] >= 0) == (worth >= threshold)
        assert proposal.parents[row, depth] == (depth if worth >= threshold else -1)
        if worth < threshold:
          assert (proposal.tokens[row, depth:] < 0).all()
          break
        guesses.append(int(proposal.tokens[row, depth]))
      sizes.append(len(guesses))
  assert len(set(sizes)) > 2


_FLASH = {'guesses_at_root': False, 'markov': None, 'confidence': None, 'num_slots': 4}
_FLASH2 = _FLASH | {'selector': Selector(4, 5, 3), 'convolution': Convolution(2, 4)}
_TINY_RNN = {'markov': Markov(4, 5, 'rnn')}
_METHODS = 'spectr', 'specinfer', 'batch', 'race', 'race_block', 'traversal', 'race_traversal', 'ersd', 'gsd'
_CHAINS, _PREFIX = TokenTree.chains(2, 3), TokenTree.prefix((2, 2, 1))


def _growing(growth):
  return growing(tiny_one_pass(), growth)


_LOOPS = [
  *((tiny_one_pass, {}, method, _CHAINS) for method in _METHODS),
  *(
    (tiny_one_pass, own, method, tree)
    for own, tree, methods in (
      (_FLASH, _CHAINS, ('spectr', 'race_traversal')), (_FLASH2, _CHAINS, ('spectr', 'race_traversal')),
      (_TINY_RNN, _CHAINS, ('spectr', 'race_traversal')), (_FLASH2, _PREFIX, ('race_traversal', 'traversal')),
      (_TINY_RNN, _PREFIX, ('race_traversal', 'traversal')),
    )
    for method in methods
  ),
  *(
    (_growing, {'growth': growth}, 'specinfer', TokenTree.slots((2, 3)))
    for growth in (Likeliest(), Confident(0.3, threshold=0.1), Estimated(0.2))
  ),
  # The guesses of P-EAGLE are independent, and are sampled so.
  (tiny_head, {'num_layers': 2, 'mask_id': 1}, 'race_traversal', _CHAINS),
  (lambda: lookup_beside(tiny_one_pass()), {}, 'race_traversal', _CHAINS),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures('highest')
@pytest.mark.parametrize(('make', 'options', 'method', 'tree'), _LOOPS)
def test_the_loop_is_exact(make, options, method, tree):
  assert_engine_is_exact(make(**options), method, tree)


@pytest.mark.slow
@pytest.mark.usefixtures('highest')
def test_a_law_of_other_draws_is_caught():
  """Guesses of a Markov chain with the distributions of independent ones."""
  drafter = tiny_one_pass(scale=4.0)

  @jax.tree_util.register_dataclass
  @dataclasses.dataclass(frozen=True)
  class Claimed(OnePassDrafter):
    def propose(self, *rest):
      unbiased = self.params | {'markov': jax.tree.map(jnp.zeros_like, self.params['markov'])}
      claims = dataclasses.replace(drafter, params=unbiased).propose(*rest).probs
      return dataclasses.replace(super().propose(*rest), probs=claims)

  assert min(p_values(Claimed(**vars(drafter)), 'specinfer', TokenTree.chains(2, 3))) < 1e-6


def test_trees_are_no_deeper_than_the_block(target):
  for config, depth in ((_DFLASH, SLOTS - 1), (_DSPARK, SLOTS)):
    drafter = _drafter(config)
    assert drafter.max_depth == depth
    tree = TokenTree.chains(1, depth + 1)
    with pytest.raises(ValueError, match=f'guesses {depth} tokens ahead, and the tree is {depth + 1} deep'):
      Decoder.make(target, drafter, method='block', tree=tree, max_new_tokens=4, cache_size=8)


def test_what_does_not_fit_is_refused():
  few = dataclasses.replace(_DSPARK, markov=Markov(5, V - 1))
  params, fewer = (head.random_params(jax.random.key(0), one_pass.param_shapes(each)) for each in (_DSPARK, few))
  for arguments, message in (
    (({k: v for k, v in params.items() if k != 'features'}, _DSPARK, V), 'features/kernel must be .* got nothing'),
    ((params, _DSPARK, V + 1), 'the head guesses 23 tokens, but the target has 24'),
    ((fewer, few, V), 'the sequential part reads 22 tokens, but the target has 23'),
  ):
    with pytest.raises(ValueError, match=message):
      one_pass_drafter(*arguments)
  for field, value, message in (
    ('num_slots', 0, 'num_slots must be a positive integer'),
    ('mask_id', V, 'mask_id 23 is not among the 23 tokens of the embedding'),
    ('mask_id', -1, 'mask_id must be a token'),
    ('feature_layers', (), 'feature_layers must be integers, at least one'),
    ('markov', None, 'confidence markov reads the embedding of the sequential part'),
    ('confidence', 'both', 'confidence must be hidden, markov or None'),
    ('backbone', dataclasses.replace(_BACKBONE, rope=None), 'rotary positions'),
    ('selector', Selector(5, V, 6), 'a selector stands alone'),
    ('convolution', Convolution(2, 3), 'a width of 8 does not divide into groups of 3'),
    ('convolution', Convolution(5, 4), 'a convolution of 5 taps needs as many slots, got 4'),
  ):
    with pytest.raises(ValueError, match=message):
      dataclasses.replace(_DSPARK, **{field: value})
  with pytest.raises(ValueError, match='a block of 1 slot guesses nothing'):
    dataclasses.replace(_DFLASH, num_slots=1)
  with pytest.raises(ValueError, match='kind must be one of'):
    Markov(5, V, 'lstm')
