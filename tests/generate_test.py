"""The loop: what it returns, where it stops, what a row may depend on, how often it compiles."""

import dataclasses
import importlib
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spectr_jax
from spectr_jax import (
  METHODS,
  ORIGIN_BONUS,
  ORIGIN_CORRECTION,
  ORIGIN_DRAFT,
  NotFiniteError,
  TokenTree,
  with_children,
  with_epsilon,
  with_gumbel,
)
from spectr_jax.draft import ModelDrafter
from spectr_jax.engine import state as decode_state
from spectr_jax.models.table import table_model
from spectr_jax.models.transformer import config_of, transformer_model

pytestmark = pytest.mark.usefixtures('highest')

generate_module = importlib.import_module('spectr_jax.engine.loop')

# Every method, and the other versions of two: traversal on siblings that differ, sampling with keys by position.
VERSIONS = {
  **METHODS,
  'traversal_without_replacement': with_children(METHODS['traversal'], 'without_replacement'),
  'gumbel': with_gumbel(METHODS['autoregressive']),
}
TREES = {
  name: {0: TokenTree(), 1: TokenTree.chains(1, 3)}.get(method.max_drafts, TokenTree.chains(2, 3))
  for name, method in VERSIONS.items()
}
# One of each kind of verifier, proposal and state.
KINDS = (
  'autoregressive', 'speculative', 'spectr', 'gsd', 'ersd', 'greedy_block', 'race_block', 'traversal', 'race_traversal',
)  # fmt: skip
LOSSLESS = [name for name, method in VERSIONS.items() if method.is_lossless]
NEW = 12
PROMPTS = np.array([[3, 0, 0, 0, 0, 0], [1, 4, 0, 0, 0, 0], [5, 2, 0, 3, 1, 4], [2, 2, 5, 0, 0, 0]])
LENGTHS = np.array([1, 2, 6, 3])


def _keys(seed=0):
  return jax.random.split(jax.random.key(seed), 4)


def _slow_but(names, versions=tuple(VERSIONS)):
  """All versions, `names` by default and the others among the slow tests."""
  return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in versions]


# Grows whenever the target or the draft of `tables` is traced.
TARGET_TRACES, DRAFT_TRACES = [], []


def _counting(model, traces):
  def apply_fn(*args):
    traces.append(args[1].shape)
    return model.apply_fn(*args)

  return dataclasses.replace(model, apply_fn=apply_fn)


@pytest.fixture(scope='module')
def tables():
  """Two Markov chains over 6 tokens in partial agreement, with zeros in both."""
  logits = np.random.default_rng(0).normal(size=(2, 6, 6)) * 1.5
  logits[0, 1, :3] = logits[1, 2, 3:5] = -np.inf
  target, draft = (table_model(jnp.float32(x)) for x in logits)
  return _counting(target, TARGET_TRACES), _counting(draft, DRAFT_TRACES)


@pytest.fixture(scope='module')
def cycle():
  """x is followed by x + 1 modulo 5, always."""
  return table_model(jnp.where(jnp.eye(5)[:, jnp.array([4, 0, 1, 2, 3])] > 0, 0.0, -jnp.inf))


def _generate(models, method, keys, prompts=PROMPTS, lengths=LENGTHS, *, tree=None, max_new_tokens=NEW, **options):
  method, tree = VERSIONS.get(method, method), TREES[method] if tree is None else tree
  return spectr_jax.generate(
    keys, *models, prompts, lengths, method=method, tree=tree, max_new_tokens=max_new_tokens, **options
  )


def _assert_same(first, second):
  jax.tree.map(np.testing.assert_array_equal, first, second)


def _check_consistent(result, tree):
  """Everything `Generation` says, derived again from its origins; for trees of chains."""
  fields = result.tokens, result.lengths, result.num_target_calls, result.accepted_by_depth, result.origins
  assert {field.dtype.name for field in fields} == {'int32'}
  tokens, lengths, calls, accepted, origins = map(np.asarray, fields)
  assert result.statistics is None
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


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize('method', _slow_but(KINDS))
def test_result_is_consistent(tables, method):
  origins = set()
  for seed in range(3):
    result = _generate(tables, method, jax.random.key(seed))
    _check_consistent(result, TREES[method])
    assert result.tokens.shape == (4, NEW)
    np.testing.assert_array_equal(result.lengths, NEW)
    origins |= set(np.unique(result.origins).tolist())
    if TREES[method].num_nodes:
      assert (result.num_target_calls < NEW).any()
    else:
      assert result.accepted_by_depth.shape == (4, 0)
      np.testing.assert_array_equal(result.num_target_calls, result.lengths)  # block efficiency is exactly 1
  assert origins == ({ORIGIN_DRAFT, ORIGIN_CORRECTION, ORIGIN_BONUS} if TREES[method].num_nodes else {ORIGIN_BONUS})


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize('method', _slow_but(KINDS))
def test_only_what_the_target_allows_comes_out(tables, method):
  """Every pair of neighbours has positive probability, the seam between prompt and continuation included."""
  pairs = set()
  for seed in range(3):
    result = _generate(tables, method, jax.random.key(seed))
    for prompt, length, row in zip(PROMPTS, LENGTHS, np.asarray(result.tokens)):
      pairs |= set(itertools.pairwise([int(prompt[length - 1]), *row.tolist()]))
  forbidden = {pair for pair in pairs if not np.isfinite(tables[0].params[pair])}
  # What accepts too much, on purpose, lets through what the draft alone allows.
  assert not forbidden or VERSIONS[method].bias


# Ends: EOS and the limit inside an accepted run, on a chain of which every token is known.


def _cycle_tokens(cycle, method='speculative', *, draft=None, tree=None, **options):
  tree = TokenTree.chains(1, 4) if tree is None else tree
  models = (cycle, cycle if draft is None else draft)
  result = _generate(
    models, method, jax.random.key(0), np.array([[0, 0], [2, 3]]), np.array([1, 2]), tree=tree, **options
  )
  _check_consistent(result, tree)
  return result


@pytest.mark.usefixtures('quickly')
def test_a_perfect_draft_is_accepted_to_the_end(cycle):
  result = _cycle_tokens(cycle, max_new_tokens=10)
  np.testing.assert_array_equal(result.tokens, [[1, 2, 3, 4, 0] * 2, [4, 0, 1, 2, 3] * 2])
  np.testing.assert_array_equal(result.num_target_calls, [2, 2])
  np.testing.assert_array_equal(result.accepted_by_depth, np.full((2, 4), 2))
  np.testing.assert_array_equal(result.origins, [([ORIGIN_DRAFT] * 4 + [ORIGIN_BONUS]) * 2] * 2)


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize(
  'method', _slow_but(KINDS, [name for name in VERSIONS if TREES[name].num_nodes and name != 'spectr_gbv'])
)
def test_a_perfect_random_draft_is_accepted_to_the_end(tables, method):
  """... by all but SpecTr-GBV as published."""
  perfect = dataclasses.replace(tables[1], params=tables[0].params)
  result = _generate((tables[0], perfect), method, jax.random.key(5))
  np.testing.assert_array_equal(result.num_target_calls, NEW // 4)
  np.testing.assert_array_equal(result.accepted_by_depth, NEW // 4)


@pytest.mark.usefixtures('quickly')
def test_a_hopeless_draft_is_never_accepted(cycle):
  twice = table_model(cycle.params[(jnp.arange(5) + 1) % 5])  # x is followed by x + 2
  result = _cycle_tokens(cycle, draft=twice, max_new_tokens=10)
  np.testing.assert_array_equal(result.tokens, [[1, 2, 3, 4, 0] * 2, [4, 0, 1, 2, 3] * 2])
  np.testing.assert_array_equal(result.num_target_calls, [10, 10])
  np.testing.assert_array_equal(result.accepted_by_depth, 0)
  np.testing.assert_array_equal(result.origins, ORIGIN_CORRECTION)


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize(
  ('method', 'num_drafts'), [('speculative', 1), ('spectr', 2), ('gsd', 2), ('greedy_block', 1), ('traversal', 2)]
)
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


@pytest.mark.usefixtures('quickly')
def test_any_of_several_eos_ends_a_row(cycle):
  result = _cycle_tokens(cycle, max_new_tokens=10, eos_id=(3, 0))
  np.testing.assert_array_equal(result.tokens, [[1, 2, 3] + [-1] * 7, [4, 0] + [-1] * 8])


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize('method', _slow_but(['spectr', 'greedy_block']))
def test_a_finished_row_waits_for_the_others(tables, method):
  """Rows end in different rounds; up to its end each is what it is without EOS, and nothing comes after."""
  plain = _generate(tables, method, _keys(1))
  ended = _generate(tables, method, _keys(1), eos_id=2)
  _check_consistent(ended, TREES[method])
  for row in range(4):
    tokens = np.asarray(plain.tokens[row])
    length = int(np.argmax(tokens == 2)) + 1 if (tokens == 2).any() else NEW
    assert int(ended.lengths[row]) == length
    np.testing.assert_array_equal(ended.tokens[row, :length], tokens[:length])
  assert len(set(np.asarray(ended.num_target_calls).tolist())) > 1


@pytest.mark.usefixtures('quickly')
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


@pytest.mark.usefixtures('quickly')
def test_limit_inside_an_accepted_run(cycle):
  result = _cycle_tokens(cycle, max_new_tokens=7)
  np.testing.assert_array_equal(result.tokens, [[1, 2, 3, 4, 0, 1, 2], [4, 0, 1, 2, 3, 4, 0]])
  np.testing.assert_array_equal(result.num_target_calls, [2, 2])
  np.testing.assert_array_equal(result.accepted_by_depth, [[2, 2, 1, 1]] * 2)


@pytest.mark.usefixtures('quickly')
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


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize('method', _slow_but(['autoregressive', 'spectr', 'gsd', 'greedy_block', 'race_traversal']))
def test_table_rows_do_not_depend_on_their_batch(tables, method):
  _assert_rows_alone(tables, method, shapes=[((3, 1, 0, 2), 6), ((2, 0, 1), 9)], seed=0)


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize('method', _slow_but(['spectr', 'greedy_block']))
def test_a_row_alone(tables, method):
  _assert_rows_alone(tables, method, shapes=[((row,), 6) for row in range(4)], seed=1)


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize('method', _slow_but(['autoregressive', 'greedy_block', 'race_traversal']))
def test_transformer_rows_do_not_depend_on_their_batch(target, draft, method):
  """In float32 a row's sums may be ordered by the shape of its batch; a token changes only if a uniform is that close
  to a boundary, about one in 10^5 draws. With these keys there is none.
  """
  shapes = [((3, 1, 0, 2), 6)] + ([((2, 0), 9)] if method == 'spectr' else [])
  _assert_rows_alone((target, draft), method, shapes=shapes, seed=0)


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize('method', _slow_but(KINDS))
def test_one_key_is_folded_with_the_row(tables, method):
  key = jax.random.key(11)
  folded = jnp.stack([jax.random.fold_in(key, row) for row in range(4)])
  _assert_same(_generate(tables, method, key), _generate(tables, method, folded))
  assert (_generate(tables, method, jax.random.key(12)).tokens != _generate(tables, method, key).tokens).any()


@pytest.mark.usefixtures('quickly')
def test_arguments_survive(tables):
  """The loop donates its own state, nothing a caller holds: every array can be used again."""
  keys, prompts, lengths = _keys(2), jnp.int32(PROMPTS), jnp.int32(LENGTHS)
  options = {'temperature': jnp.full(4, 0.5), 'top_k': jnp.full(4, 4, jnp.int32), 'top_p': jnp.full(4, 0.9)}
  first = _generate(tables, 'speculative', keys, prompts, lengths, **options)
  _assert_same(first, _generate(tables, 'speculative', keys, prompts, lengths, **options))


@pytest.mark.parametrize('method', _slow_but(['autoregressive', 'spectr', 'greedy_block', 'race_block']))
def test_sampling_parameters_are_per_row(target, draft, method):
  """Each row of a mixed batch is the row of a batch that has its parameters everywhere."""
  temperature, top_k = np.array([1.0, 0.0, 0.6, 1.3]), np.array([0, 0, 3, 5])
  top_p = np.array([0.7, 1.0, 1.0, 0.95])
  mixed = _generate((target, draft), method, _keys(3), temperature=temperature, top_k=top_k, top_p=top_p)
  for row in range(4):
    options = {'temperature': temperature[row], 'top_k': top_k[row], 'top_p': top_p[row]}
    same = _generate((target, draft), method, _keys(3), **options)
    _assert_same(jax.tree.map(lambda x: x[row], mixed), jax.tree.map(lambda x: x[row], same))  # noqa: B023


@pytest.mark.usefixtures('quickly')
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


def _assert_greedy(models, method):
  greedy = _generate(models, 'autoregressive', jax.random.key(0), temperature=0.0)
  result = _generate(models, method, jax.random.key(1), temperature=0.0)
  np.testing.assert_array_equal(result.tokens, greedy.tokens)
  assert len(np.unique(greedy.tokens)) > 3
  if TREES[method].num_nodes:
    assert (result.num_target_calls < greedy.num_target_calls).any()


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize('method', LOSSLESS)
def test_temperature_zero_is_greedy_on_tables(tables, method):
  """A law of one token: siblings run out, ratios are 0, 1 or 0/0."""
  sharper = dataclasses.replace(tables[1], params=tables[1].params + 2 * jnp.maximum(tables[0].params, -9.0))
  _assert_greedy((tables[0], sharper), method)


@pytest.mark.parametrize('method', _slow_but(['spectr', 'greedy_block', 'race_traversal'], LOSSLESS))
def test_temperature_zero_is_greedy(target, draft, method):
  _assert_greedy((target, draft), method)


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize('method', _slow_but(['race_traversal'], [name for name in KINDS if name != 'autoregressive']))
def test_double_precision(target, draft, method):
  with jax.enable_x64(True):
    models = [
      transformer_model(model.params, dataclasses.replace(config_of(model), dtype='float64'))
      for model in (target, draft)
    ]
    assert models[0].params['embedding'].dtype == np.float64
    found = [_generate(models, name, _keys(), temperature=0.0) for name in (method, 'autoregressive')]
  np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
  assert found[0].num_target_calls.sum() < found[1].num_target_calls.sum()
  assert found[0].tokens.dtype == found[0].lengths.dtype == np.int32


def test_greedy_is_the_argmax_of_the_text(target, uncached_logits):
  result = _generate((target, None), 'autoregressive', jax.random.key(0), temperature=0.0)
  for prompt, length, row in zip(PROMPTS, LENGTHS, np.asarray(result.tokens)):
    text = [*prompt[:length].tolist(), *row.tolist()]
    logits = uncached_logits(target, [text[:end] for end in range(length, length + NEW)])
    np.testing.assert_array_equal(row, logits.argmax(-1))


_SAME_WITH_ONE_DRAFT = [
  ('spectr', 'speculative'),
  *(pytest.param(name, 'speculative', marks=pytest.mark.slow) for name in ('specinfer', 'batch', 'gsd', 'race')),
  ('race_block', 'block'),
  ('spectr_gbv', 'greedy_block'),
]


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize(('method', 'other'), _SAME_WITH_ONE_DRAFT)
def test_with_one_draft_methods_are_the_same(tables, method, other):
  """Token for token: they use the same noise for the same decisions."""
  tree = TokenTree.chains(1, 3)
  for seed in range(5):
    _assert_same(_generate(tables, method, _keys(seed), tree=tree), _generate(tables, other, _keys(seed), tree=tree))


@pytest.mark.usefixtures('quickly')
def test_no_over_acceptance_is_speculative(tables):
  method = with_epsilon(METHODS['decoding_opt'], 0.0)
  for seed in range(3):
    exact = _generate(tables, 'speculative', _keys(seed))
    _assert_same(_generate(tables, method, _keys(seed), tree=TREES['speculative']), exact)
    over = _generate(tables, 'decoding_opt', _keys(seed))
    assert (over.tokens != exact.tokens).any()
    assert int(over.num_target_calls.sum()) <= int(exact.num_target_calls.sum())


def _assert_chunks_are_one_run(models, method, chunk, **options):
  state = spectr_jax.init_decode(
    _keys(6), *models, PROMPTS, LENGTHS, method=VERSIONS[method], tree=TREES[method], max_new_tokens=NEW, **options
  )
  shown = np.asarray(state.result.tokens)
  assert (shown == -1).all()
  num_chunks, has_state = 0, False
  while not state.is_done.all():
    state = spectr_jax.decode_rounds(state, chunk)
    has_state |= any(np.any(leaf) for leaf in jax.tree.leaves(state.verifier_state))
    # What was shown stays: results can be streamed.
    now = np.asarray(state.result.tokens)
    np.testing.assert_array_equal(now[shown >= 0], shown[shown >= 0])
    shown, num_chunks = now, num_chunks + 1
  whole = _generate(models, method, _keys(6), **options)
  _assert_same(state.result, whole)
  assert num_chunks == -(-int(whole.num_target_calls.max()) // chunk)
  _assert_same(spectr_jax.decode_rounds(state, 2).result, whole)  # nothing is left to do
  assert has_state == (method in ('greedy_block', 'spectr_gbv'))


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize('method', list(VERSIONS))
@pytest.mark.parametrize('chunk', [1, 3])
def test_rounds_in_chunks_are_one_run(tables, method, chunk):
  _assert_chunks_are_one_run(tables, method, chunk)


@pytest.mark.parametrize('method', _slow_but(['spectr', 'greedy_block', 'race_block']))
def test_rounds_of_transformers_in_chunks_are_one_run(target, draft, method):
  _assert_chunks_are_one_run((target, draft), method, 1)


@pytest.mark.usefixtures('quickly')
def test_chunks_keep_a_state_where_rows_end(tables):
  """A verifier's state outlives a chunk, and rows that have ended do not disturb those that have not."""
  _assert_chunks_are_one_run(tables, 'greedy_block', 1, eos_id=2)


@pytest.mark.usefixtures('quickly')
def test_no_rounds_change_nothing(tables):
  state = spectr_jax.init_decode(
    _keys(), *tables, PROMPTS, LENGTHS, method='spectr', tree=TREES['spectr'], max_new_tokens=NEW
  )
  state = spectr_jax.decode_rounds(state, 0)
  assert (np.asarray(state.result.num_target_calls) == 0).all()
  with pytest.raises(ValueError, match='must not be negative'):
    spectr_jax.decode_rounds(state, -1)


@pytest.mark.usefixtures('quickly')
def test_under_jit(tables):
  @jax.jit
  def run(keys, temperature, prompts, lengths):
    return _generate(tables, 'speculative', keys, prompts, lengths, temperature=temperature)

  expected = _generate(tables, 'speculative', _keys(7), temperature=0.8)
  _assert_same(run(_keys(7), 0.8, PROMPTS, LENGTHS), expected)


# Logits that are no law.


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize(
  'sampling', [{}, {'temperature': 0.0}, {'top_k': 2, 'top_p': 0.9}], ids=['plain', 'greedy', 'filters']
)
@pytest.mark.parametrize(
  ('bad', 'named'),
  [((True, False), 'the target are'), ((False, True), 'the draft are'), ((True, True), 'the target and the draft are')],
)
def test_logits_that_are_not_finite_stop_the_run(sampling, bad, named):
  """x is followed by x + 1, 5 by itself, and 4, with which the second row's third round begins, by nothing."""
  good = np.full((6, 6), -np.inf)
  good[[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 0, 5]] = 0
  for no_law in (np.nan, np.inf, -np.inf):
    logits = good.copy()
    logits[4] = np.where(np.arange(6) == 2, no_law, 0) if no_law == np.inf else no_law
    models = [table_model(jnp.float32(logits if is_bad else good)) for is_bad in bad]
    options = dict(method='speculative', tree=TokenTree.chains(1, 1), max_new_tokens=12, **sampling)
    prompts = np.array([[5], [0]]), np.array([1, 1])
    with pytest.raises(NotFiniteError, match=f'row 1, round 3: logits of {named} not finite') as caught:
      spectr_jax.generate(_keys()[:2], *models, *prompts, **options)
    assert caught.value.row == 1
    state = spectr_jax.decode_rounds(spectr_jax.init_decode(_keys()[:2], *models, *prompts, **options))
    # What came before is kept.
    np.testing.assert_array_equal(state.result.tokens[1, :5], [1, 2, 3, 4, -1])


@pytest.mark.usefixtures('quickly')
def test_rows_that_are_done_may_see_anything(cycle):
  """What a finished row computes while others go on is nobody's business."""
  target = table_model(cycle.params.at[4].set(np.nan))
  result = spectr_jax.generate(
    _keys()[:2], target, cycle, np.array([[2], [0]]), np.array([1, 1]), method='speculative',
    tree=TokenTree.chains(1, 1), max_new_tokens=12, eos_id=3,
  )  # fmt: skip
  np.testing.assert_array_equal(result.lengths, [1, 3])
  np.testing.assert_array_equal(result.failures, 0)


# Statistics of the positions visited.


@pytest.mark.usefixtures('quickly')
def test_statistics_in_closed_form():
  """Ber(.25) -> Ber(.5) at every position: with two candidates K-SEQ accepts .8476 and the optimum is .9375, with one
  both are .75.
  """
  rows, num_rounds, tree = 1000, 5, TokenTree.chains(2, 2)
  target, draft = (table_model(jnp.log(jnp.tile(jnp.float32(law), (2, 1)))) for law in ([0.5, 0.5], [0.75, 0.25]))
  prompts = jnp.zeros((rows, 1), jnp.int32), jnp.ones(rows, jnp.int32)
  options = {'method': 'spectr', 'tree': tree, 'max_new_tokens': num_rounds * 3}  # so that nothing is cut off
  state = spectr_jax.init_decode(jax.random.key(0), target, draft, *prompts, statistics=True, **options)
  result = spectr_jax.decode_rounds(state, num_rounds).result
  visits, accepts, by_child, optimum = map(np.asarray, dataclasses.astuple(result.statistics))
  assert visits.shape == accepts.shape == (rows, 2, 3)
  assert by_child.shape == (rows, 2, 2)
  # The root is visited in every round and has two candidates, the next position after every acceptance.
  accepted = np.asarray(result.accepted_by_depth)
  np.testing.assert_array_equal(visits[:, 0], np.array([[0, 0, num_rounds]] * rows))
  np.testing.assert_array_equal(visits[:, 1].sum(-1), accepted[:, 0])
  assert (visits[:, 1, 0] == 0).all()
  np.testing.assert_array_equal(accepts.sum(-1), accepted)
  np.testing.assert_array_equal(by_child.sum(-1), accepted)
  assert (by_child[:, 1, 1] == 0).all()  # below the root a node has one child
  np.testing.assert_allclose(optimum, visits.sum(1) @ np.array([0, 0.75, 0.9375]), rtol=1e-5)
  for depth, count, chance in ((0, 2, 0.84759545), (1, 2, 0.84759545), (1, 1, 0.75)):
    total = visits[:, depth, count].sum()
    assert total > 500
    # Four standard deviations.
    assert abs(accepts[:, depth, count].sum() / total - chance) < 4 * np.sqrt(chance * (1 - chance) / total)
  # Whether they are counted changes no token; without a tree there is nothing to count.
  plain = spectr_jax.decode_rounds(
    spectr_jax.init_decode(jax.random.key(0), target, draft, *prompts, **options), num_rounds
  ).result
  _assert_same(plain, dataclasses.replace(result, statistics=None))


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize('method', _slow_but(['traversal', 'gsd']))
def test_statistics_are_consistent(tables, method):
  """On a tree of unequal depth, until rows have ended: rounds that come after a row's end count nothing."""
  tree = TokenTree((0, 0, 1, 1, 2, 4)) if VERSIONS[method].max_drafts is None else TREES[method]
  tree = TREES[method] if VERSIONS[method].needs_chains else tree
  keys, prompts, lengths = jax.random.split(jax.random.key(2), 8), np.tile(PROMPTS, (2, 1)), np.tile(LENGTHS, 2)
  result = _generate(tables, method, keys, prompts, lengths, tree=tree, max_new_tokens=40, statistics=True)
  if not tree.num_nodes:
    assert result.statistics is None
    return
  visits, accepts, by_child, optimum = map(np.asarray, dataclasses.astuple(result.statistics))
  assert (accepts <= visits).all()
  calls, accepted = np.asarray(result.num_target_calls), np.asarray(result.accepted_by_depth)
  assert len(set(calls.tolist())) > 1
  np.testing.assert_array_equal(visits[:, 0].sum(-1), calls)
  # Only what the limit cut off from the last round is not among the accepted tokens of the result.
  excess = accepts.sum(-1) - accepted
  assert ((excess >= 0) & (excess <= 1)).all()
  np.testing.assert_array_equal(by_child.sum(-1), accepts.sum(-1))
  assert (visits[:, 1:].sum(-1) <= accepts[:, :-1].sum(-1)).all()
  assert (optimum <= visits.sum((1, 2)) * (1 + 1e-6)).all()
  assert (optimum > 0).all()


# Compilation and memory.


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize('method', list(VERSIONS))
def test_one_compilation_per_shape_and_method(tables, method):
  def run(*args, models=tables, **options):
    _generate(models, method, *args, **options)
    return (
      len(TARGET_TRACES),
      len(DRAFT_TRACES),
      decode_state._prefill_target._cache_size(),
      generate_module._run_rounds._cache_size(),
    )

  first = run(jax.random.key(0))
  for options in (
    {'temperature': 0.0},
    {'temperature': np.array([0.1, 0.2, 0.3, 2.0])},
    {'top_k': 3},
    {'top_p': 0.5, 'top_k': np.array([1, 2, 3, 4])},
  ):
    assert run(jax.random.key(1), **options) == first
  assert run(_keys(8)) == first
  assert run(jax.random.key(2), PROMPTS[::-1].copy(), np.array([6, 5, 4, 1])) == first
  scaled = dataclasses.replace(tables[0], params=tables[0].params * 0.5)
  assert run(jax.random.key(0), models=(scaled, tables[1])) == first
  if method in ('autoregressive', 'speculative'):  # another limit is another shape: the counters do count
    is_drafting = method == 'speculative'
    again = run(jax.random.key(0), max_new_tokens=NEW + 1 + is_drafting)  # of its own, or the prefill is there already
    assert [a > b for a, b in zip(again, first)] == [True, is_drafting, True, True]


def test_methods_share_the_prefill_of_the_target(tables):
  def num_programs(method):
    _generate(tables, method, _keys(), max_new_tokens=NEW + 5)
    return decode_state._prefill_target._cache_size()

  assert num_programs('autoregressive') == num_programs('speculative') == num_programs('spectr') > 0


@pytest.mark.parametrize('is_nested', [False, True])
def test_programs_are_of_one_class_of_drafter(tables, is_nested):
  """Structures of dataclasses that differ in their class alone are equal, so the state has to tell them apart."""

  @jax.tree_util.register_dataclass
  @dataclasses.dataclass(frozen=True)
  class Other(ModelDrafter):
    """Has the fields of its parent."""

  @jax.tree_util.register_dataclass
  @dataclasses.dataclass(frozen=True)
  class Wrapped(ModelDrafter):
    inner: ModelDrafter

  def carry_of(cls):
    drafter = cls(tables[1])
    drafter = Wrapped(tables[1], drafter) if is_nested else drafter
    options = {'method': 'speculative', 'tree': TREES['speculative'], 'max_new_tokens': NEW}
    state = spectr_jax.init_decode(_keys(), tables[0], drafter, PROMPTS, LENGTHS, **options)
    return jax.tree.structure(dataclasses.replace(state, target=None, drafter=None))

  assert carry_of(ModelDrafter) == carry_of(ModelDrafter)
  assert carry_of(ModelDrafter) != carry_of(Other)


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


@pytest.mark.parametrize('name', ['autoregressive', 'speculative'])
def test_caches_are_not_copied(target, draft, name):
  """Between two rounds they stay where they are, and what is committed is written into them."""
  options = {'method': name, 'tree': TREES[name], 'max_new_tokens': NEW}
  state = spectr_jax.init_decode(_keys(), target, draft, PROMPTS, LENGTHS, **options)
  carry = dataclasses.replace(state, target=None, drafter=None)
  program = generate_module._run_rounds.lower(state.target, state.drafter, carry, np.int32(1)).compile().as_text()
  shapes = {'f32[' + ','.join(map(str, x[0].shape)) + ']' for x in (state.target_cache.keys, state.target_cache.values)}
  assert all(shape in program for shape in shapes)
  copied = re.findall(r'= (f32\[[\d,]*\])\S* copy\(', program)
  assert not shapes & set(copied), copied


# Errors at the edge.


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'method': 'guessing'}, 'unknown method .guessing.; allowed: autoregressive, speculative, spectr'),
    ({'tree': TokenTree.chains(2, 3)}, 'single draft: the tree must be a chain'),
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


@pytest.mark.usefixtures('quickly')
def test_a_method_that_drafts_nothing_ignores_draft_and_tree(tables):
  plain = _generate((tables[0], None), 'autoregressive', _keys(9))
  _assert_same(plain, _generate(tables, 'autoregressive', _keys(9), tree=TokenTree.chains(2, 3)))
  without = spectr_jax.generate(
    _keys(9), tables[0], None, PROMPTS, LENGTHS, method='autoregressive', max_new_tokens=NEW
  )
  _assert_same(plain, without)


@pytest.mark.usefixtures('quickly')
def test_methods_are_passed_by_value_too(tables):
  by_value = _generate(tables, METHODS['spectr'], _keys(9), tree=TREES['spectr'])
  by_name = spectr_jax.generate(
    _keys(9), *tables, PROMPTS, LENGTHS, method='spectr', tree=TREES['spectr'], max_new_tokens=NEW
  )
  _assert_same(by_name, by_value)
