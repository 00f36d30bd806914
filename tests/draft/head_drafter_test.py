"""Heads as drafters: their guesses beside a plain computation, and decoding with them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_greedy_is_exact
from tiny_heads import TARGET, D, V, all_features, padded, three_layers

import spectr_jax
from spectr_jax import SamplingParams, TokenTree
from spectr_jax.draft import Likeliest, growing, lookup_beside, new_features
from spectr_jax.draft.head_drafter import head_drafter
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import noise_keys, propose, run_round
from spectr_jax.engine.reading import init_decode
from spectr_jax.kernels import matrices, products
from spectr_jax.models import head
from tests.draft.prompts import read as read_prompts
from tests.slow import slow_but

VD = 11
_BLOCK = dataclasses.replace(TARGET, num_layers=1, vocab_size=VD)
_WIDE = head.HeadConfig(_BLOCK, D, D, (0, 1, 3))
_CONFIGS = {
  'eagle3': _WIDE,
  'eagle3 normed': dataclasses.replace(
    _WIDE, features_norm='each', is_residual_normed=True, is_output_normed=True, num_embedded=V
  ),
  'eagle3 normed jointly': dataclasses.replace(_WIDE, features_norm='joint'),
  'p-eagle': dataclasses.replace(
    _WIDE, block=dataclasses.replace(_BLOCK, num_layers=2), features_norm='joint', mask_id=20
  ),
  'eagle': head.HeadConfig(
    dataclasses.replace(_BLOCK, vocab_size=V), D, D, (-1,), join='linear', has_features_kernel=False,
    has_input_norms=False, has_join_bias=True, has_output_norm=False, is_reduced=False,
  ),
  'mtp': head.HeadConfig(
    dataclasses.replace(_BLOCK, vocab_size=V), D, D, (-1,), join='linear', has_features_kernel=False,
    has_attention_norm=True, is_output_normed=True, is_reduced=False,
  ),
}  # fmt: skip


@pytest.fixture(scope='module')
def target():
  return three_layers()


def _drafter(config, seed=1):
  params = head.init_params(jax.random.key(seed), config)
  if config.is_reduced:
    params['target_ids'] = jnp.arange(0, 2 * VD, 2)
  return head_drafter(params, config, V)


_SIZE = 40  # of every text
_CAUSAL = np.tril(np.ones((_SIZE, _SIZE), bool))
_PLACES = np.arange(_SIZE)[None]


@functools.partial(jax.jit, static_argnames='config')
def _hidden(params, features, *, config):
  return jnp.stack([head.hidden_of_features(params, config, features[i]) for i in range(_SIZE)])


@functools.partial(jax.jit, static_argnames='config')
def _after(params, embedding, tokens, hidden, last, *, config):
  """The hidden state and the logits after token number `last`."""
  cache = config.block.empty_cache(1, 1)
  after, output, _ = head.apply(params, config, embedding[tokens][None], hidden[None], _PLACES, _CAUSAL, cache)
  return after[0, last], head.unembed(params, output[0, last])


def _reference(target, drafter, config, text, guesses):
  """Logits `[V]` after the text and each guess of a chain, pair by pair without any cache."""
  features = all_features(target, padded(text), layers=config.feature_layers)
  hidden = _hidden(drafter.params, features, config=config)
  tokens, logits_after = list(text[1:]), []
  own = drafter.params['embedding'] if config.num_embedded else target.params['embedding']
  for guess in [*guesses, None]:
    size = len(tokens)
    after, logits = _after(drafter.params, own, padded(tokens), hidden, size - 1, config=config)
    full = np.full(V, -np.inf)
    full[np.asarray(drafter.params['target_ids']) if config.is_reduced else np.arange(V)] = logits
    logits_after.append(full)
    if config.mask_id is not None:  # whatever was guessed
      own_features = drafter.params['mask_features'].reshape(len(config.feature_layers), D)
      guess, after = config.mask_id, head.hidden_of_features(drafter.params, config, own_features)
    hidden = hidden.at[size].set(after)
    tokens.append(guess)
  return np.array(logits_after)


@pytest.mark.slow
@pytest.mark.parametrize('name', _CONFIGS)
def test_guesses_of_three_rounds_are_those_of_a_plain_computation(target, name, monkeypatch):
  monkeypatch.setattr(products, 'LARGE', 1)
  config = _CONFIGS[name]
  drafter = _drafter(config)
  tree = TokenTree.from_parents((0, 0, 1, 1, 2, 3, 6))
  fast = drafter.for_decoding()
  decoder = Decoder.make(target, fast, method='traversal', tree=tree, max_new_tokens=20, cache_size=40)
  prompts = jax.random.randint(jax.random.key(3), (3, 7), 0, V)
  lengths = jnp.array([7, 2, 4])
  state = init_decode(decoder, jax.random.key(2), prompts, lengths)
  total = 0
  for _ in range(3):
    proposal = jax.jit(propose)(decoder, state, noise_keys(decoder, state)[0])
    for row in range(3):
      length = int(state.root_position[row]) + 1
      text = np.asarray(state.text[row, :length]).tolist()
      for node in np.flatnonzero(tree.num_children):
        path = [n for n in range(1, node + 1) if tree.ancestors[node, n]]
        guesses = np.asarray(proposal.tokens[row])[np.array(path, int) - 1].tolist()
        if -1 in guesses:
          continue
        wanted = jax.nn.softmax(_reference(target, drafter, config, text, guesses)[-1])
        np.testing.assert_allclose(proposal.probs[row, tree.parent_index[node]], wanted, rtol=1e-4, atol=1e-6)
        total += 1
    state, _ = jax.jit(run_round)(decoder, state)
  assert total > 20
  assert int(state.result.lengths.max()) > 3  # some guesses were kept, so caches moved by more than one token


def test_lookup_beside_a_head_has_it_in_the_form_for_decoding(monkeypatch):
  monkeypatch.setattr(products, 'LARGE', 1)
  drafter = _drafter(_WIDE)
  beside = lookup_beside(drafter).for_decoding()
  assert beside.drafter.params.keys() == drafter.for_decoding().params.keys()
  forms = matrices.TransposedKernel | matrices.PackedKernel
  assert isinstance(beside.drafter.params['unembedding'], forms)


@pytest.mark.parametrize('method', slow_but(['race_traversal'], ['speculative', 'race_traversal', 'ersd']))
def test_greedy_tokens_are_the_target_s(target, method):
  prompts, lengths = jax.random.randint(jax.random.key(5), (3, 5), 0, V), jnp.array([5, 1, 3])
  tree = TokenTree.chains(1 if method == 'speculative' else 2, 3)
  assert_greedy_is_exact(target, _drafter(_WIDE), prompts, lengths, method=method, tree=tree)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['eagle3', 'mtp', 'p-eagle'])
def test_a_head_grows_trees(target, name):
  """Its distributions are those of a plain computation, and greedy tokens the target's."""
  config = _CONFIGS[name]
  drafter, tree = growing(_drafter(config), Likeliest()), TokenTree.slots((3, 4, 2))
  prompts, lengths = jax.random.randint(jax.random.key(5), (3, 5), 0, V), jnp.array([5, 1, 3])
  decoder = Decoder.make(target, drafter, method='specinfer', tree=tree, max_new_tokens=12, cache_size=17)
  state = init_decode(decoder, jax.random.key(2), prompts, lengths, sampling=SamplingParams(0.8))
  proposal = jax.jit(propose)(decoder, state, noise_keys(decoder, state)[0])
  for row in (0, 2):
    text = np.asarray(prompts[row, : lengths[row]]).tolist()
    for node in range(1, 8):  # those of the first two depths
      parents, tokens = np.asarray(proposal.parents[row]), np.asarray(proposal.tokens[row])
      guesses, at = [], node
      while at > 0:
        guesses, at = [int(tokens[at - 1]), *guesses], parents[at - 1]
      wanted = jax.nn.softmax(_reference(target, drafter, config, text, guesses)[-1] / 0.8)
      np.testing.assert_allclose(proposal.probs[row, node], wanted, rtol=1e-4, atol=1e-6)
  assert_greedy_is_exact(target, drafter, prompts, lengths, method='specinfer', tree=tree)


@pytest.mark.slow
def test_a_long_prompt_is_read_in_chunks(target, monkeypatch):
  drafter = _drafter(_WIDE)
  prompts, lengths = jax.random.randint(jax.random.key(5), (2, 30), 0, V), jnp.array([30, 11])
  features = jnp.stack([all_features(target, row, layers=drafter.feature_layers) for row in prompts])
  context = spectr_jax.draft.DraftContext(lengths, target, prompts, features)
  whole = read_prompts(drafter, context, 40)
  monkeypatch.setattr(new_features, 'PREFILL_CHUNK', 8)
  parts = read_prompts(drafter, context, 40)
  np.testing.assert_array_equal(parts.cache.lengths, lengths - 1)
  np.testing.assert_allclose(parts.hidden, whole.hidden, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(parts.output, whole.output, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused():
  params, eagle = (head.init_params(jax.random.key(0), _CONFIGS[name]) for name in ('eagle3', 'eagle'))
  for arguments, message in (
    (({k: v for k, v in params.items() if k != 'features'}, _WIDE, V), 'features/kernel must be .* got nothing'),
    ((params, _WIDE, 10), 'target_ids must be from 0 to 9'),
    ((eagle, _CONFIGS['eagle'], 24), 'the head guesses 23 tokens, but the target has 24'),
  ):
    with pytest.raises(ValueError, match=message):
      head_drafter(*arguments)
  for options, message in (
    ({'block': TARGET}, 'one layer'),
    ({'mask_id': -1}, 'mask_id must be a token that is embedded'),
    ({'mask_id': V, 'num_embedded': V}, 'mask_id must be a token that is embedded, got 23'),
    ({'mask_id': 1, 'block': dataclasses.replace(_BLOCK, windows=(3,))}, 'without windows'),
  ):
    with pytest.raises(ValueError, match=message):
      dataclasses.replace(_WIDE, **options)
