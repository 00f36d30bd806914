"""The loop: what it returns, where it stops, what a row may depend on, how often it compiles."""

import dataclasses
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spectr_jax
from spectr_jax import METHODS, ORIGIN_BONUS, ORIGIN_CORRECTION, ORIGIN_DRAFT, TokenTree
from spectr_jax.models.table import table_model

pytestmark = pytest.mark.usefixtures('highest')

generate_module = importlib.import_module('spectr_jax.generate')  # the package re-exports the function by this name

TREES = {
  name: {0: TokenTree(), 1: TokenTree.chains(1, 3)}.get(method.max_drafts, TokenTree.chains(2, 3))
  for name, method in METHODS.items()
}
NEW = 12
PROMPTS = np.array([[3, 0, 0, 0, 0, 0], [1, 4, 0, 0, 0, 0], [5, 2, 0, 3, 1, 4], [2, 2, 5, 0, 0, 0]])
LENGTHS = np.array([1, 2, 6, 3])


def _keys(seed=0):
  return jax.random.split(jax.random.key(seed), 4)


@pytest.fixture(scope='module')
def tables():
  """Two Markov chains over 6 tokens in partial agreement, with zeros in both."""
  logits = np.random.default_rng(0).normal(size=(2, 6, 6)) * 1.5
  logits[0, 1, :3] = logits[1, 2, 3:5] = -np.inf
  return table_model(jnp.float32(logits[0])), table_model(jnp.float32(logits[1]))


@pytest.fixture(scope='module')
def cycle():
  """x is followed by x + 1 modulo 5, always."""
  return table_model(jnp.where(jnp.eye(5)[:, jnp.array([4, 0, 1, 2, 3])] > 0, 0.0, -jnp.inf))


def _generate(models, method, keys, prompts=PROMPTS, lengths=LENGTHS, *, tree=None, max_new_tokens=NEW, **options):
  tree = TREES[method] if tree is None else tree
  return spectr_jax.generate(
    keys, *models, prompts, lengths, method=method, tree=tree, max_new_tokens=max_new_tokens, **options
  )


def _assert_same(first, second):
  jax.tree.map(np.testing.assert_array_equal, first, second)


def _check_consistent(result, tree):
  """Everything `Generation` says, derived again from its origins; for trees of chains."""
  tokens, lengths, calls, accepted, origins = (np.asarray(x) for x in dataclasses.astuple(result))
  for field in dataclasses.fields(result):
    assert getattr(result, field.name).dtype == jnp.int32
  assert tokens.shape == origins.shape
  assert accepted.shape == (len(tokens), tree.max_depth)
  for row, length in enumerate(lengths):
    assert (tokens[row, :length] >= 0).all()
    assert (tokens[row, length:] == -1).all()
    assert (origins[row, length:] == -1).all()
    # A round is a run of accepted guesses and the target's own token; the last one may have been cut short.
    rounds, run = [], 0
    for origin in origins[row, :length]:
      if origin == ORIGIN_DRAFT:
        run += 1
        continue
      assert origin == (ORIGIN_BONUS if run == tree.max_depth else ORIGIN_CORRECTION)
      rounds.append(run)
      run = 0
    rounds += [run] if run else []
    assert calls[row] == len(rounds)
    assert lengths[row] == sum(rounds) + np.sum(origins[row] > ORIGIN_DRAFT)
    assert accepted[row].sum() == np.sum(origins[row] == ORIGIN_DRAFT)
    np.testing.assert_array_equal(accepted[row], [sum(r > d for r in rounds) for d in range(tree.max_depth)])


@pytest.mark.parametrize('method', list(TREES))
def test_result_is_consistent(tables, method):
  result = _generate(tables, method, jax.random.key(3))
  _check_consistent(result, TREES[method])
  assert result.tokens.shape == (4, NEW)
  np.testing.assert_array_equal(result.lengths, NEW)
  origins = set(np.unique(result.origins).tolist())
  if method == 'autoregressive':
    assert result.accepted_by_depth.shape == (4, 0)
    np.testing.assert_array_equal(result.num_target_calls, result.lengths)  # block efficiency is exactly 1
    assert origins == {ORIGIN_BONUS}
  else:
    assert origins == {ORIGIN_DRAFT, ORIGIN_CORRECTION, ORIGIN_BONUS}
    assert (result.num_target_calls < NEW).any()


@pytest.mark.parametrize('method', list(TREES))
def test_only_what_the_target_allows_comes_out(tables, method):
  """Every pair of neighbours has positive probability, the seam between prompt and continuation included."""
  for seed in range(3):
    result = _generate(tables, method, jax.random.key(seed))
    for prompt, length, row in zip(PROMPTS, LENGTHS, np.asarray(result.tokens)):
      for before, after in itertools.pairwise([prompt[length - 1], *row]):
        assert np.isfinite(tables[0].params[before, after])


# Ends: EOS and the limit inside an accepted run, on a chain of which every token is known.


def _cycle_tokens(cycle, method='speculative', *, draft=None, tree=None, **options):
  tree = TokenTree.chains(1, 4) if tree is None else tree
  models = (cycle, cycle if draft is None else draft)
  result = _generate(
    models, method, jax.random.key(0), np.array([[0, 0], [2, 3]]), np.array([1, 2]), tree=tree, **options
  )
  _check_consistent(result, tree)
  return result


def test_a_perfect_draft_is_accepted_to_the_end(cycle):
  result = _cycle_tokens(cycle, max_new_tokens=10)
  np.testing.assert_array_equal(result.tokens, [[1, 2, 3, 4, 0] * 2, [4, 0, 1, 2, 3] * 2])
  np.testing.assert_array_equal(result.num_target_calls, [2, 2])
  np.testing.assert_array_equal(result.accepted_by_depth, np.full((2, 4), 2))
  np.testing.assert_array_equal(result.origins, [([ORIGIN_DRAFT] * 4 + [ORIGIN_BONUS]) * 2] * 2)


def test_a_perfect_random_draft_is_accepted_to_the_end(tables):
  result = _generate((tables[0], tables[0]), 'speculative', jax.random.key(5))
  np.testing.assert_array_equal(result.num_target_calls, NEW // 4)
  np.testing.assert_array_equal(result.accepted_by_depth, NEW // 4)


def test_a_hopeless_draft_is_never_accepted(cycle):
  twice = table_model(cycle.params[(jnp.arange(5) + 1) % 5])  # x is followed by x + 2
  result = _cycle_tokens(cycle, draft=twice, max_new_tokens=10)
  np.testing.assert_array_equal(result.tokens, [[1, 2, 3, 4, 0] * 2, [4, 0, 1, 2, 3] * 2])
  np.testing.assert_array_equal(result.num_target_calls, [10, 10])
  np.testing.assert_array_equal(result.accepted_by_depth, 0)
  np.testing.assert_array_equal(result.origins, ORIGIN_CORRECTION)


@pytest.mark.parametrize(('method', 'num_drafts'), [('speculative', 1), ('spectr', 2)])
def test_eos_ends_a_row_inside_an_accepted_run(cycle, method, num_drafts):
  """... and an EOS that ends the prompt, as in the second row, does not."""
  tree = TokenTree.chains(num_drafts, 4)
  result = _cycle_tokens(cycle, method, tree=tree, max_new_tokens=10, eos_id=3)
  np.testing.assert_array_equal(result.tokens, [[1, 2, 3] + [-1] * 7, [4, 0, 1, 2, 3] + [-1] * 5])
  np.testing.assert_array_equal(result.lengths, [3, 5])
  np.testing.assert_array_equal(result.num_target_calls, [1, 1])
  # What EOS cut off is not counted.
  np.testing.assert_array_equal(result.accepted_by_depth, [[1, 1, 1, 0], [1, 1, 1, 1]])
  np.testing.assert_array_equal(result.origins, [[0, 0, 0] + [-1] * 7, [0, 0, 0, 0, ORIGIN_BONUS] + [-1] * 5])


def test_any_of_several_eos_ends_a_row(cycle):
  result = _cycle_tokens(cycle, max_new_tokens=10, eos_id=(3, 0))
  np.testing.assert_array_equal(result.tokens, [[1, 2, 3] + [-1] * 7, [4, 0] + [-1] * 8])


def test_a_finished_row_waits_for_the_others(tables):
  """Rows end in different rounds; up to its end each is what it is without EOS, and nothing comes after."""
  plain = _generate(tables, 'spectr', _keys(1))
  ended = _generate(tables, 'spectr', _keys(1), eos_id=2)
  _check_consistent(ended, TREES['spectr'])
  for row in range(4):
    tokens = np.asarray(plain.tokens[row])
    length = int(np.argmax(tokens == 2)) + 1 if (tokens == 2).any() else NEW
    assert int(ended.lengths[row]) == length
    np.testing.assert_array_equal(ended.tokens[row, :length], tokens[:length])
  assert len(set(np.asarray(ended.num_target_calls).tolist())) > 1


def test_a_correction_below_a_duplicate_is_no_bonus(cycle):
  """The accepted node is a leaf, but its duplicate's child was a candidate and was rejected."""
  draft = table_model(cycle.params.at[1].set(cycle.params[2]))  # 1 is followed by 3
  result = spectr_jax.generate(
    jax.random.key(0),
    cycle,
    draft,
    np.array([[0]]),
    np.array([1]),
    method='spectr',
    tree=TokenTree((0, 0, 2)),
    max_new_tokens=2,
  )
  np.testing.assert_array_equal(result.tokens, [[1, 2]])
  np.testing.assert_array_equal(result.origins, [[ORIGIN_DRAFT, ORIGIN_CORRECTION]])


def test_limit_inside_an_accepted_run(cycle):
  result = _cycle_tokens(cycle, max_new_tokens=7)
  np.testing.assert_array_equal(result.tokens, [[1, 2, 3, 4, 0, 1, 2], [4, 0, 1, 2, 3, 4, 0]])
  np.testing.assert_array_equal(result.num_target_calls, [2, 2])
  np.testing.assert_array_equal(result.accepted_by_depth, [[2, 2, 1, 1]] * 2)


def test_eos_behind_the_limit_is_not_seen(cycle):
  result = _cycle_tokens(cycle, max_new_tokens=2, eos_id=3)
  np.testing.assert_array_equal(result.tokens, [[1, 2], [4, 0]])


# What a row may depend on: its key and its prompt.


def _assert_rows_alone(models, method, *, shapes, seed, **options):
  """Row by row the same tokens, whatever the mates, their order and the padding.

  Args:
    shapes: (rows to take, in this order; padded size) of further runs.
  """
  keys = _keys(seed)
  whole = _generate(models, method, keys, **options)
  for rows, size in shapes:
    rows = np.array(rows)
    prompts = np.full((len(rows), size), 10**6)  # padding need not even be an id
    for to, row in enumerate(rows):
      prompts[to, : LENGTHS[row]] = PROMPTS[row, : LENGTHS[row]]
    part = _generate(models, method, keys[rows], prompts, LENGTHS[rows], **options)
    _assert_same(part, jax.tree.map(lambda x: x[rows], whole))  # noqa: B023
  # Other mates: rows 0 and 1 keep key and prompt, the others change both.
  mates = keys.at[2:].set(_keys(seed + 100)[2:])
  prompts = PROMPTS.copy()
  prompts[2:] = 1 + (PROMPTS[2:] + 1) % 5
  other = _generate(models, method, mates, prompts, np.array([1, 2, 3, 6]), **options)
  _assert_same(jax.tree.map(lambda x: x[:2], other), jax.tree.map(lambda x: x[:2], whole))
  assert (other.tokens[2:] != whole.tokens[2:]).any()


@pytest.mark.parametrize('method', list(TREES))
def test_table_rows_do_not_depend_on_their_batch(tables, method):
  _assert_rows_alone(tables, method, shapes=[((3, 1, 0, 2), 6), ((2, 0, 1), 9)], seed=0)


def test_a_row_alone(tables):
  _assert_rows_alone(tables, 'spectr', shapes=[((row,), 6) for row in range(4)], seed=1)


@pytest.mark.parametrize('method', list(TREES))
def test_transformer_rows_do_not_depend_on_their_batch(target, draft, method):
  """In float32 a row's sums may be ordered by the shape of its batch; a token changes only if a uniform is that close
  to a boundary, about one in 10^5 draws. With these keys there is none.
  """
  shapes = [((3, 1, 0, 2), 6)] + ([((2, 0), 9)] if method == 'spectr' else [])
  _assert_rows_alone((target, draft), method, shapes=shapes, seed=0)


@pytest.mark.parametrize('method', list(TREES))
def test_one_key_is_folded_with_the_row(tables, method):
  key = jax.random.key(11)
  folded = jnp.stack([jax.random.fold_in(key, row) for row in range(4)])
  _assert_same(_generate(tables, method, key), _generate(tables, method, folded))
  assert (_generate(tables, method, jax.random.key(12)).tokens != _generate(tables, method, key).tokens).any()


def test_arguments_survive(tables):
  """The loop donates its own state, nothing a caller holds: every array can be used again."""
  keys, prompts, lengths = _keys(2), jnp.int32(PROMPTS), jnp.int32(LENGTHS)
  options = {'temperature': jnp.full(4, 0.5), 'top_k': jnp.full(4, 4, jnp.int32), 'top_p': jnp.full(4, 0.9)}
  first = _generate(tables, 'speculative', keys, prompts, lengths, **options)
  _assert_same(first, _generate(tables, 'speculative', keys, prompts, lengths, **options))


@pytest.mark.parametrize('method', list(TREES))
def test_sampling_parameters_are_per_row(target, draft, method):
  """Each row of a mixed batch is the row of a batch that has its parameters everywhere."""
  temperature, top_k = np.array([1.0, 0.0, 0.6, 1.3]), np.array([0, 0, 3, 5])
  top_p = np.array([0.7, 1.0, 1.0, 0.95])
  mixed = _generate((target, draft), method, _keys(3), temperature=temperature, top_k=top_k, top_p=top_p)
  for row in range(4):
    options = {'temperature': temperature[row], 'top_k': top_k[row], 'top_p': top_p[row]}
    same = _generate((target, draft), method, _keys(3), **options)
    _assert_same(jax.tree.map(lambda x: x[row], mixed), jax.tree.map(lambda x: x[row], same))  # noqa: B023


def test_sampling_parameters_of_a_row_alone(tables):
  temperature, top_p = np.array([1.0, 0.0, 0.6, 1.3]), np.array([0.7, 1.0, 1.0, 0.95])
  mixed = _generate(tables, 'spectr', _keys(4), temperature=temperature, top_p=top_p)
  for row in range(4):
    one = slice(row, row + 1)
    alone = _generate(
      tables, 'spectr', _keys(4)[one], PROMPTS[one], LENGTHS[one], temperature=temperature[row], top_p=top_p[row]
    )
    _assert_same(alone, jax.tree.map(lambda x: x[one], mixed))  # noqa: B023


# Equivalences.


@pytest.mark.parametrize('method', [name for name, method in METHODS.items() if method.is_lossless])
def test_temperature_zero_is_greedy(target, draft, method):
  greedy = _generate((target, draft), 'autoregressive', jax.random.key(0), temperature=0.0)
  result = _generate((target, draft), method, jax.random.key(1), temperature=0.0)
  np.testing.assert_array_equal(result.tokens, greedy.tokens)
  assert len(np.unique(greedy.tokens)) > 3
  if method != 'autoregressive':
    assert (result.num_target_calls < greedy.num_target_calls).any()


def test_greedy_is_the_argmax_of_the_text(target, uncached_logits):
  result = _generate((target, None), 'autoregressive', jax.random.key(0), temperature=0.0)
  for prompt, length, row in zip(PROMPTS, LENGTHS, np.asarray(result.tokens)):
    text = [*prompt[:length].tolist(), *row.tolist()]
    logits = uncached_logits(target, [text[:end] for end in range(length, length + NEW)])
    np.testing.assert_array_equal(row, logits.argmax(-1))


def test_spectr_with_one_draft_is_speculative(tables):
  tree = TokenTree.chains(1, 3)
  for seed in range(5):
    _assert_same(
      _generate(tables, 'spectr', _keys(seed), tree=tree), _generate(tables, 'speculative', _keys(seed), tree=tree)
    )


@pytest.mark.parametrize('method', list(TREES))
@pytest.mark.parametrize('chunk', [1, 3])
def test_rounds_in_chunks_are_one_run(target, draft, method, chunk):
  state = spectr_jax.init_decode(
    _keys(6), target, draft, PROMPTS, LENGTHS, method=method, tree=TREES[method], max_new_tokens=NEW
  )
  shown = np.asarray(state.result.tokens)
  assert (shown == -1).all()
  num_chunks = 0
  while not state.is_done.all():
    state = spectr_jax.decode_rounds(state, chunk)
    # What was shown stays: results can be streamed.
    now = np.asarray(state.result.tokens)
    np.testing.assert_array_equal(now[shown >= 0], shown[shown >= 0])
    shown, num_chunks = now, num_chunks + 1
  whole = _generate((target, draft), method, _keys(6))
  _assert_same(state.result, whole)
  assert num_chunks == -(-int(whole.num_target_calls.max()) // chunk)
  _assert_same(spectr_jax.decode_rounds(state, 2).result, whole)  # nothing is left to do


def test_no_rounds_change_nothing(tables):
  state = spectr_jax.init_decode(
    _keys(), *tables, PROMPTS, LENGTHS, method='spectr', tree=TREES['spectr'], max_new_tokens=NEW
  )
  state = spectr_jax.decode_rounds(state, 0)
  assert (np.asarray(state.result.num_target_calls) == 0).all()
  with pytest.raises(ValueError, match='must not be negative'):
    spectr_jax.decode_rounds(state, -1)


def test_under_jit(tables):
  @jax.jit
  def run(keys, temperature, prompts, lengths):
    return _generate(tables, 'speculative', keys, prompts, lengths, temperature=temperature)

  expected = _generate(tables, 'speculative', _keys(7), temperature=0.8)
  _assert_same(run(_keys(7), 0.8, PROMPTS, LENGTHS), expected)


# Compilation and memory.


def _counting(model):
  """The model, and a list that grows whenever it is traced."""
  traces = []

  def apply_fn(*args):
    traces.append(args[1].shape)
    return model.apply_fn(*args)

  return dataclasses.replace(model, apply_fn=apply_fn), traces


@pytest.mark.parametrize('method', list(TREES))
def test_one_compilation_per_shape_and_method(tables, method):
  target, target_traces = _counting(tables[0])
  draft, draft_traces = _counting(tables[1])

  def run(*args, **options):
    _generate((target, draft), method, *args, **options)
    return (
      len(target_traces),
      len(draft_traces),
      generate_module._prefill_target._cache_size(),
      generate_module._run_rounds._cache_size(),
    )

  first = run(jax.random.key(0))
  assert first[0] > 0
  assert (first[1] > 0) == (method != 'autoregressive')
  for options in (
    {'temperature': 0.0},
    {'temperature': np.array([0.1, 0.2, 0.3, 2.0])},
    {'top_k': 3},
    {'top_p': 0.5, 'top_k': np.array([1, 2, 3, 4])},
  ):
    assert run(jax.random.key(1), **options) == first
  assert run(_keys(8)) == first
  assert run(jax.random.key(2), PROMPTS[::-1].copy(), np.array([6, 5, 4, 1])) == first
  scaled = dataclasses.replace(target, params=target.params * 0.5)
  _generate((scaled, draft), method, jax.random.key(0))
  assert run(jax.random.key(0)) == first
  if method == 'autoregressive':  # another limit is another shape: the counters do count
    again = run(jax.random.key(0), max_new_tokens=NEW + 1)
    assert [a > b for a, b in zip(again, first)] == [True, False, True, True]


def test_state_is_donated_and_models_are_not(target, draft):
  options = {'method': 'speculative', 'tree': TREES['speculative'], 'max_new_tokens': NEW}
  state = spectr_jax.init_decode(_keys(), target, draft, PROMPTS, LENGTHS, **options)
  old = state
  state = spectr_jax.decode_rounds(state, 1)
  for cache in (old.target_cache, old.draft_state.cache):
    assert all(array.is_deleted() for array in (*cache.keys, *cache.values))
  assert not any(array.is_deleted() for array in jax.tree.leaves((target, draft)))
  assert state.target is target
  assert state.drafter.model is draft
  spectr_jax.decode_rounds(state, 1)


# Errors at the edge.


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'method': 'guessing'}, 'unknown method .guessing.; allowed: autoregressive, speculative, spectr'),
    ({'tree': TokenTree.chains(2, 3)}, 'single draft: num_drafts must be 1'),
    ({'tree': TokenTree()}, 'speculative needs guesses: give it a tree'),
    ({'tree': None}, 'speculative needs guesses: give it a tree'),
    ({'draft': None}, 'needs a draft model'),
    ({'draft': table_model(jnp.zeros((7, 7)))}, 'share a vocabulary: 7 and 6'),
    ({'prompt_lengths': np.array([1, 2, 0, 3])}, 'at least one token; got 0 to 3'),
    ({'prompt_lengths': np.array([1, 2, 7, 3])}, 'from 1 to 6'),
    ({'prompt_lengths': LENGTHS[:3]}, r'integers \[4\]'),
    ({'prompt_lengths': LENGTHS * 1.0}, r'integers \[4\]'),
    ({'prompts': PROMPTS[0]}, r'integers \[B, P\]'),
    ({'prompts': PROMPTS * 1.0}, r'integers \[B, P\]'),
    ({'prompts': PROMPTS[:, :0]}, 'at least 1'),
    ({'prompts': PROMPTS[:0], 'prompt_lengths': LENGTHS[:0]}, 'at least 1'),
    ({'prompts': PROMPTS + 1}, 'ids from 1 to 6, the vocabulary is 0 to 5'),
    ({'prompts': PROMPTS - 1}, 'ids from -1'),
    ({'max_new_tokens': 0}, 'max_new_tokens must be a positive int'),
    ({'max_new_tokens': 2.0}, 'max_new_tokens must be a positive int'),
    ({'rng_key': np.array([0, 1], np.uint32)}, 'typed key'),
    ({'rng_key': jnp.array([0, 1], jnp.uint32)}, 'typed key'),
    ({'rng_key': jax.random.key(0, impl='rbg')}, 'threefry2x32'),
    ({'rng_key': jax.random.split(jax.random.key(0), 3)}, r'\[4\], one per prompt'),
    ({'temperature': -1.0}, 'temperature must be finite and at least 0'),
    ({'top_p': 0.0}, 'top_p must be above 0'),
    ({'top_k': np.array([1, 2])}, r'top_k must be a scalar or \[4\]'),
  ],
)
def test_bad_input_is_refused(tables, change, message):
  request = {
    'rng_key': jax.random.key(0),
    'target': tables[0],
    'draft': tables[1],
    'prompts': PROMPTS,
    'prompt_lengths': LENGTHS,
    'method': 'speculative',
    'tree': TREES['speculative'],
    'max_new_tokens': NEW,
  }
  with pytest.raises(ValueError, match=message):
    spectr_jax.generate(**{**request, **change})


def test_too_long_for_the_models_is_refused(target, draft):
  short = dataclasses.replace(draft, max_length=17)
  with pytest.raises(ValueError, match='6 tokens; with 12 new ones that exceeds .* 17'):
    _generate((target, short), 'speculative', jax.random.key(0))
  # It does not matter to a method that drafts nothing ...
  assert _generate((target, short), 'autoregressive', jax.random.key(0)).tokens.shape == (4, NEW)
  with pytest.raises(ValueError, match='exceeds'):
    _generate((target, draft), 'autoregressive', jax.random.key(0), max_new_tokens=59)


def test_a_method_that_drafts_nothing_ignores_draft_and_tree(tables):
  plain = _generate((tables[0], None), 'autoregressive', _keys(9))
  _assert_same(plain, _generate(tables, 'autoregressive', _keys(9), tree=TokenTree.chains(2, 3)))
  without = spectr_jax.generate(
    _keys(9), tables[0], None, PROMPTS, LENGTHS, method='autoregressive', max_new_tokens=NEW
  )
  _assert_same(plain, without)


def test_methods_are_passed_by_value_too(tables):
  by_name = _generate(tables, 'spectr', _keys(9))
  by_value = spectr_jax.generate(
    _keys(9), *tables, PROMPTS, LENGTHS, method=METHODS['spectr'], tree=TREES['spectr'], max_new_tokens=NEW
  )
  _assert_same(by_name, by_value)
