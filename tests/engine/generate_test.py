"""The loop: what it returns, where it stops, and what it refuses."""

import dataclasses
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spectr_jax
from spectr_jax import Decoder, NotFiniteError, SamplingParams, TokenTree
from spectr_jax.draft import Confident, growing, model_drafter
from spectr_jax.draft.model_drafter import ModelDrafter
from spectr_jax.engine.result import ORIGIN_BONUS, ORIGIN_CORRECTION, ORIGIN_DRAFT
from spectr_jax.engine.trace import trace_decode
from spectr_jax.models.table import table_model
from tests.engine.runs import KINDS, LENGTHS, NEW, PROMPTS, TREES, VERSIONS, assert_same, begin, generate, make_keys
from tests.slow import slow, slow_but

pytestmark = pytest.mark.usefixtures('highest')


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


@pytest.mark.parametrize('method', slow_but(KINDS, VERSIONS))
def test_result_is_consistent(tables, method):
  """And every pair of neighbors is one that the target allows, the seam between prompt and continuation included."""
  origins, pairs = set(), set()
  for seed in range(3):
    result = generate(tables, method, jax.random.key(seed))
    _check_consistent(result, TREES[method])
    for prompt, length, row in zip(PROMPTS, LENGTHS, np.asarray(result.tokens)):
      pairs |= set(itertools.pairwise([int(prompt[length - 1]), *row.tolist()]))
    assert result.tokens.shape == (4, NEW)
    np.testing.assert_array_equal(result.lengths, NEW)
    origins |= set(np.unique(result.origins).tolist())
    if TREES[method].num_nodes:
      assert (result.num_target_calls < NEW).any()
    else:
      assert result.accepted_by_depth.shape == (4, 0)
      np.testing.assert_array_equal(result.num_target_calls, result.lengths)  # block efficiency is exactly 1
  assert origins == ({ORIGIN_DRAFT, ORIGIN_CORRECTION, ORIGIN_BONUS} if TREES[method].num_nodes else {ORIGIN_BONUS})
  forbidden = {pair for pair in pairs if not np.isfinite(tables[0].params[pair])}
  # What accepts too much, on purpose, lets through what the draft alone allows.
  assert not forbidden or VERSIONS[method].bias


# Ends: EOS and the limit inside an accepted run, on a chain of which every token is known.


def _cycle_tokens(cycle, method='speculative', *, draft=None, tree=None, **options):
  tree = TokenTree.chains(1, 4) if tree is None else tree
  models = (cycle, cycle if draft is None else draft)
  result = generate(
    models, method, jax.random.key(0), np.array([[0, 0], [2, 3]]), np.array([1, 2]), tree=tree, **options
  )
  _check_consistent(result, tree)
  return result


_GAP = [-1] * 10


@pytest.mark.parametrize(
  ('options', 'first', 'second', 'calls', 'accepted'),
  [
    ({'max_new_tokens': 10}, [1, 2, 3, 4, 0] * 2, [4, 0, 1, 2, 3] * 2, [2, 2], [[2] * 4] * 2),
    ({'max_new_tokens': 7}, [1, 2, 3, 4, 0, 1, 2], [4, 0, 1, 2, 3, 4, 0], [2, 2], [[2, 2, 1, 1]] * 2),
    ({'max_new_tokens': np.array([7, 1])}, [1, 2, 3, 4, 0, 1, 2], [4], [2, 1], [[2, 2, 1, 1], [1, 0, 0, 0]]),
    ({'max_new_tokens': 10, 'eos_id': (3, 0)}, [1, 2, 3], [4, 0], [1, 1], [[1, 1, 1, 0], [1, 1, 0, 0]]),
    ({'max_new_tokens': 2, 'eos_id': 3}, [1, 2], [4, 0], [1, 1], [[1, 1, 0, 0]] * 2),
  ],
  ids=['perfect', 'limit inside a run', 'limits of their own', 'several EOS', 'EOS behind the limit'],
)
def test_a_perfect_draft_is_accepted_to_the_end(cycle, options, first, second, calls, accepted):
  result = _cycle_tokens(cycle, **options)
  size = np.max(options['max_new_tokens'])
  np.testing.assert_array_equal(result.tokens, [(row + _GAP)[:size] for row in (first, second)])
  np.testing.assert_array_equal(result.num_target_calls, calls)
  np.testing.assert_array_equal(result.accepted_by_depth, accepted)


@pytest.mark.parametrize(
  'method', slow_but(KINDS, [name for name in VERSIONS if TREES[name].num_nodes and name != 'spectr_gbv'])
)
def test_a_perfect_random_draft_is_accepted_to_the_end(tables, method):
  """... by all but SpecTr-GBV as published."""
  perfect = dataclasses.replace(tables[1], params=tables[0].params)
  result = generate((tables[0], perfect), method, jax.random.key(5))
  np.testing.assert_array_equal(result.num_target_calls, NEW // 4)
  np.testing.assert_array_equal(result.accepted_by_depth, NEW // 4)


def test_a_hopeless_draft_is_never_accepted(cycle):
  twice = table_model(cycle.params[(jnp.arange(5) + 1) % 5])  # x is followed by x + 2
  result = _cycle_tokens(cycle, draft=twice, max_new_tokens=10)
  np.testing.assert_array_equal(result.tokens, [[1, 2, 3, 4, 0] * 2, [4, 0, 1, 2, 3] * 2])
  np.testing.assert_array_equal(result.num_target_calls, [10, 10])
  np.testing.assert_array_equal(result.accepted_by_depth, 0)
  np.testing.assert_array_equal(result.origins, ORIGIN_CORRECTION)


@pytest.mark.parametrize(
  ('method', 'num_drafts'),
  [slow('speculative', 1), slow('spectr', 2), slow('gsd', 2), ('greedy_block', 1), slow('traversal', 2)],
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


@pytest.mark.parametrize('method', slow_but(['spectr', 'greedy_block'], KINDS))
def test_a_finished_row_waits_for_the_others(tables, method):
  """Rows end in different rounds; up to its end each is what it is without EOS, and nothing comes after."""
  plain = generate(tables, method, make_keys(1))
  ended = generate(tables, method, make_keys(1), eos_id=2)
  _check_consistent(ended, TREES[method])
  for row in range(4):
    tokens = np.asarray(plain.tokens[row])
    length = int(np.argmax(tokens == 2)) + 1 if (tokens == 2).any() else NEW
    assert int(ended.lengths[row]) == length
    np.testing.assert_array_equal(ended.tokens[row, :length], tokens[:length])
  assert len(set(np.asarray(ended.num_target_calls).tolist())) > 1


def test_a_correction_below_a_duplicate_is_no_bonus(cycle):
  """The accepted node is a leaf, but its duplicate's child was a candidate and was rejected."""
  draft = table_model(cycle.params.at[1].set(cycle.params[2]))  # 1 is followed by 3
  options = {'method': 'spectr', 'tree': TokenTree((0, 0, 2)), 'max_new_tokens': 2}
  result = spectr_jax.generate(jax.random.key(0), cycle, draft, np.array([[0]]), np.array([1]), **options)
  np.testing.assert_array_equal(result.tokens, [[1, 2]])
  np.testing.assert_array_equal(result.origins, [[ORIGIN_DRAFT, ORIGIN_CORRECTION]])


# Logits that are no distribution.


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
  for value in (np.nan, np.inf, -np.inf):
    logits = good.copy()
    logits[4] = np.where(np.arange(6) == 2, value, 0) if value == np.inf else value
    models = [table_model(jnp.float32(logits if is_bad else good)) for is_bad in bad]
    options = dict(
      method='speculative', tree=TokenTree.chains(1, 1), max_new_tokens=12, sampling=SamplingParams(**sampling)
    )
    prompts = np.array([[5], [0]]), np.array([1, 1])
    with pytest.raises(NotFiniteError, match=f'row 1, round 3: logits of {named} not finite') as caught:
      spectr_jax.generate(make_keys()[:2], *models, *prompts, **options)
    assert caught.value.row == 1
    decoder, state = begin(models, keys=make_keys()[:2], prompts=prompts[0], lengths=prompts[1], **options)
    state = spectr_jax.engine.decode_rounds(decoder, state)
    # What came before is kept.
    np.testing.assert_array_equal(state.result.tokens[1, :5], [1, 2, 3, 4, -1])


def test_rows_that_are_done_may_see_anything(cycle):
  """What a finished row computes while others go on is nobody's business."""
  target = table_model(cycle.params.at[4].set(np.nan))
  result = spectr_jax.generate(
    make_keys()[:2], target, cycle, np.array([[2], [0]]), np.array([1, 1]), method='speculative',
    tree=TokenTree.chains(1, 1), max_new_tokens=12, eos_id=3,
  )  # fmt: skip
  np.testing.assert_array_equal(result.lengths, [1, 3])
  np.testing.assert_array_equal(result.failures, 0)


# Errors at the edge.


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'method': 'guessing'}, 'unknown method .guessing.; allowed: autoregressive, speculative, spectr'),
    ({'tree': TokenTree.chains(2, 3)}, 'single draft: the tree must be a chain'),
    ({'tree': TokenTree()}, 'speculative needs guesses: give it a tree'),
    ({'draft': None}, 'needs a draft model'),
    ({'draft': table_model(jnp.zeros((7, 7)))}, 'share a vocabulary: 7 and 6'),
    ({'prompt_lengths': np.array([1, 2, 0, 3])}, 'at least one token; got 0 to 3'),
    ({'prompt_lengths': np.array([1, 2, 7, 3])}, 'from 1 to 6'),
    ({'prompt_lengths': LENGTHS[:3]}, r'integers \[4\]'),
    ({'prompt_lengths': LENGTHS * 1.0}, r'integers \[4\]'),
    ({'target': PROMPTS}, 'target must be a Model, got ndarray'),
    ({'target': None}, 'target must be a Model, got NoneType'),
    ({'draft': 'pretrained/draft'}, 'draft must be a Model, a Drafter or None, got str'),
    ({'prompts': PROMPTS[0]}, r'integers \[B, P\]'),
    ({'prompts': PROMPTS * 1.0}, r'integers \[B, P\]'),
    ({'prompts': PROMPTS[:, :0]}, 'at least 1'),
    ({'prompts': PROMPTS[:0], 'prompt_lengths': LENGTHS[:0]}, 'at least 1'),
    ({'prompts': PROMPTS + 1}, 'ids from 1 to 6, the vocabulary is 0 to 5'),
    ({'prompts': PROMPTS - 1}, 'ids from -1'),
    ({'prompts': PROMPTS.astype(np.int64) + 2**32}, 'prompts must be from -2.*31 to 2.*31 - 1, got 4294967296 to'),
    ({'prompts': [[2**70]] * 4}, 'prompts must be integers, got object'),
    ({'prompts': [['x']] * 4}, 'prompts must be integers, got texts; generate_text takes texts'),
    ({'prompts': [[1, 2], [3]]}, 'prompts must be one array of integers, got lists of different lengths or depths'),
    ({'prompts': [[1, [2]], [3]], 'prompt_lengths': None}, 'prompt 0 must be one array of integers, got lists of'),
    ({'prompts': [[1, 2], 3], 'prompt_lengths': None}, 'prompts must be one array of integers, got lists of'),
    ({'prompts': [[1, 2], []], 'prompt_lengths': None}, 'prompt 1 is empty: a prompt has at least one token'),
    ({'prompts': [[1, 2], [6]], 'prompt_lengths': None}, 'ids from 1 to 6, the vocabulary is 0 to 5'),
    ({'prompts': 1, 'prompt_lengths': None}, r'integers \[B, P\]'),
    ({'prompts': 'x', 'prompt_lengths': None}, 'prompts must be integers, got texts; generate_text takes texts'),
    ({'prompt_lengths': LENGTHS.astype(np.int64) + 2**32}, 'prompt_lengths must be from'),
    ({'max_new_tokens': 0}, 'max_new_tokens must be a positive int'),
    ({'max_new_tokens': 2.0}, 'max_new_tokens must be a positive int'),
    ({'max_new_tokens': 2**32 + 5}, 'max_new_tokens must be at most'),
    ({'max_new_tokens': [[1], [1, 2]]}, 'max_new_tokens must be one array of integers'),
    ({'max_new_tokens': [1, 2]}, r'max_new_tokens must be a positive int, or \[4\] of them'),
    ({'rng_key': np.array([0, 1], np.uint32)}, 'typed key'),
    ({'rng_key': jnp.array([0, 1], jnp.uint32)}, 'typed key'),
    ({'rng_key': jax.random.key(0, impl='rbg')}, 'threefry2x32'),
    ({'rng_key': jax.random.split(jax.random.key(0), 3)}, r'\[4\], one per prompt'),
    ({'eos_id': -1}, 'eos_id must be a token, from 0 to 5, got -1'),
    ({'eos_id': (2, 10**6)}, 'eos_id must be a token, from 0 to 5, got 1000000'),
    ({'sampling': SamplingParams(-1.0)}, 'temperature must be finite and at least 0'),
    ({'sampling': SamplingParams(top_p=0.0)}, 'top_p must be above 0'),
    ({'sampling': SamplingParams(min_p=2.0)}, 'min_p must be from 0 to 1'),
    ({'sampling': SamplingParams(top_k=np.array([1, 2]))}, r'top_k must be a scalar or \[4\]'),
    ({'sampling': {'top_k': 2}}, "sampling must be SamplingParams, .*, got {'top_k': 2}"),
  ],
)
def test_bad_input_is_refused(tables, change, message):
  request = {
    'rng_key': jax.random.key(0), 'target': tables[0], 'draft': tables[1], 'prompts': PROMPTS,
    'prompt_lengths': LENGTHS, 'method': 'speculative', 'tree': TREES['speculative'], 'max_new_tokens': NEW,
  }  # fmt: skip
  with pytest.raises(ValueError, match=message):
    spectr_jax.generate(**request | change)


def test_too_long_for_the_models_is_refused(target, draft):
  short = dataclasses.replace(draft, context_length=17)
  with pytest.raises(ValueError, match='6 tokens; with 12 new ones that exceeds .* 17'):
    generate((target, short), 'speculative', jax.random.key(0))
  # It does not matter to a method that drafts nothing ...
  assert generate((target, short), 'autoregressive', jax.random.key(0)).tokens.shape == (4, NEW)
  with pytest.raises(ValueError, match='exceeds'):
    generate((target, draft), 'autoregressive', jax.random.key(0), max_new_tokens=59)


def test_a_method_that_drafts_nothing_ignores_draft_and_tree(tables):
  plain = generate((tables[0], None), 'autoregressive', make_keys(9))
  assert_same(plain, generate(tables, 'autoregressive', make_keys(9), tree=TokenTree.chains(2, 3)))
  # It is the method without a draft.
  assert_same(plain, spectr_jax.generate(make_keys(9), tables[0], None, PROMPTS, LENGTHS, max_new_tokens=NEW))


def test_the_method_that_keeps_the_most_is_the_default(tables):
  sizes = {'max_new_tokens': 2, 'cache_size': 9}
  assert Decoder.make(*tables, **sizes) == Decoder.make(*tables, method='race_traversal', **sizes)
  for function in (spectr_jax.generate, spectr_jax.generate_many, spectr_jax.generate_text, Decoder.make):
    assert inspect.signature(function).parameters['method'].default is None
  assert inspect.signature(spectr_jax.verify).parameters['method'].default == 'race_traversal'


def test_a_small_tree_is_the_default(tables):
  target, draft = tables[0], model_drafter(tables[1])

  class Short(ModelDrafter):
    max_depth = 3

  short, grown = Short(draft.model), growing(draft, Confident())
  for method, own, tree in (
    ('speculative', draft, TokenTree.chains(1, 4)),
    ('spectr', draft, TokenTree.chains(2, 4)),
    ('race_traversal', short, TokenTree.chains(2, 3)),
    ('specinfer', grown, TokenTree.slots((4, 4, 4, 4))),
    ('autoregressive', None, TokenTree()),
  ):
    assert Decoder.make(target, own, method=method, max_new_tokens=2, cache_size=9).tree == tree


def test_prompts_may_be_lists_and_without_lengths(tables):
  def run(*prompts):
    options = {'method': 'autoregressive', 'max_new_tokens': NEW}
    return spectr_jax.generate(make_keys(9), tables[0], None, *prompts, **options)

  assert_same(run(PROMPTS), run(PROMPTS, np.full(4, 6)))
  padded = run(PROMPTS, LENGTHS)
  for kind in (list, tuple, np.array, jnp.array):
    assert_same(run([kind(row[:length].tolist()) for row, length in zip(PROMPTS, LENGTHS)]), padded)


def test_ragged_lists_are_named_wherever_prompts_are_taken(tables):
  target, key, ragged, new = tables[0], jax.random.key(0), [[1, 2], [3]], {'max_new_tokens': 2}
  decoder = Decoder.make(target, None, cache_size=9, **new)
  state = spectr_jax.engine.init_decode(decoder, key, [[1], [2]], [1, 1])
  many = [spectr_jax.Request('a', ragged, key)]
  options = {'method': 'block', 'tree': TokenTree.chains(1, 2)} | new
  for take, named in (
    (lambda: spectr_jax.engine.init_decode(decoder, key, ragged, [2, 1]), 'prompts'),
    (lambda: spectr_jax.engine.init_decode(decoder, key, [[1], [2]], [[1], 1]), 'prompt_lengths'),
    (lambda: spectr_jax.engine.refill(decoder, state, [0, 1], key, ragged, [2, 1]), 'prompts'),
    (lambda: next(spectr_jax.Session(decoder).stream(key, ragged)), 'the prompt'),
    (lambda: next(spectr_jax.generate_many(target, None, many, batch_size=1, longest_prompt=4, **new)), 'prompt a'),
    (lambda: spectr_jax.log_likelihood(target, [[1], ragged]), 'text 1'),
    (lambda: spectr_jax.auto.measure_speeds(target, None, [[1], ragged], **new), 'prompt 1'),
    (lambda: trace_decode(key, target, target, ragged, **options), 'the prompt'),
  ):
    with pytest.raises(ValueError, match=f'^{named} must be one array of integers, got lists of different lengths'):
      take()
