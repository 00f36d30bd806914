"""Constraints: masked distributions in every method, exactly and in the loop; states after rollback and refill."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coarse import coarse

import spectr_jax
from spectr_jax import (
  METHODS,
  Constraint,
  Request,
  SamplingParams,
  TokenTree,
  generate_many,
  lookup_beside,
  lookup_drafter,
)
from spectr_jax.constraint import ConstraintTables, masked
from spectr_jax.draft import Confident, Likeliest, growing, model_drafter
from spectr_jax.engine import loop
from spectr_jax.engine.state import DecodeState
from spectr_jax.sampling import logits_to_probs
from spectr_jax.testing import chi_square, joint_law, random_tables
from spectr_jax.testing.tables import first_context
from tests.engine.runs import KINDS, LENGTHS, NEW, PROMPTS, VERSIONS, begin, generate, make_keys
from tests.slow import slow_but

EOS = 5
LOSSLESS = [name for name, method in METHODS.items() if method.is_lossless]
WITH_LAW = [name for name in LOSSLESS if not METHODS[name].is_seed_exact]  # the others are proven token for token
# Over tokens 0 to 4 and an end, two and three states.
ONE = Constraint(np.array([0, 1, 2, 1, 0, 3]), [[1, 0, -1, -1], [2, -1, 1, -1], [-1, 1, -1, -1]], [False, True, True])
TWO = Constraint(np.array([0, 0, 1, 1, 2, 2]), [[-1, 1, -1], [0, -1, 1]], [False, True])
CHAIN = Constraint(
  np.arange(6), [[i + 1 if i == token < 5 else -1 for token in range(6)] for i in range(6)], np.arange(6) == 5
)


def allowed(constraint, state, eos_id=EOS):
  """bool `[V]`, by the table alone; a state of None is behind an end, where everything is allowed."""
  tokens = range(constraint.vocab_size)
  if state is None:
    return np.ones(len(tokens), bool)
  after = constraint.next_state[state, constraint.class_of] >= 0
  return np.where(np.arange(len(tokens)) == eos_id, constraint.is_final[state], after)


def step(constraint, state, token, eos_id=EOS):
  if state is None or token == eos_id:
    return None
  after = constraint.next_state[state, constraint.class_of[token]]
  return None if after < 0 else int(after)


def law_of(logits, constraint, prompt, num_tokens, temperature=1.0):
  """The probabilities of continuations of a Markov chain with the mask at every step, by texts that may end early."""
  law = {}

  def extend(text, state, last, chance):
    if len(text) == num_tokens or text[-1:] == (EOS,):
      law[text] = chance
      return
    own = np.where(allowed(constraint, state), np.float64(logits[last]) / temperature, -np.inf)
    probs = np.exp(own - own.max())
    for token, share in enumerate(probs / probs.sum()):
      if share:
        extend((*text, token), step(constraint, state, token), token, chance * share)

  extend((), 0, prompt, 1.0)
  return law


@pytest.fixture(scope='module')
def chains():
  """The logits of target and draft, `[V, V]` each, and their models."""
  logits = np.random.default_rng(0).normal(size=(2, 6, 6)).astype(np.float32) * 1.2
  return logits, [spectr_jax.models.table.table_model(jnp.asarray(each)) for each in logits]


def assert_valid(constraint, result):
  """Every continuation follows the constraint, and ends only where it is complete or at the limit."""
  for tokens, length in zip(np.asarray(result.tokens), np.asarray(result.lengths)):
    state = 0
    for token in tokens[:length]:
      assert allowed(constraint, state)[token], tokens
      state = step(constraint, state, token)
    assert state is None or length == tokens.size


# Exactly: the distributions that the library masks, in float64, with every draft and decision enumerated.


def masked_tables(tables, constraint, eos_id, masks_target=True):
  """Tables of contexts with the library's masks, and the same law by the constraint's own table."""
  states = [0]
  for length in range(tables.max_length):
    above = states[first_context(tables.vocab_size, length) :]
    states += [step(constraint, state, token, eos_id) for state in above for token in range(tables.vocab_size)]
  with jax.enable_x64(True):
    joined = ConstraintTables.join([constraint], tables.vocab_size, [eos_id])
    own = jnp.array([0 if state is None else int(joined.starts[0]) + state for state in states])[None]
    with np.errstate(divide='ignore'):
      probs = [
        np.asarray(logits_to_probs(masked(joined, jnp.log(each)[None], own), SamplingParams.make(1)))[0]
        for each in (tables.draft_probs, tables.target_probs)
      ]
  is_allowed = np.array([allowed(constraint, state, eos_id) for state in states])
  wanted = np.where(is_allowed, tables.target_probs, 0)
  wanted = np.where(wanted.sum(axis=1, keepdims=True) > 0, wanted, is_allowed)
  wanted /= wanted.sum(axis=1, keepdims=True)
  found = dataclasses.replace(
    tables, draft_probs=probs[0], target_probs=probs[1] if masks_target else tables.target_probs
  )
  return found, dataclasses.replace(tables, target_probs=wanted)


TINY = Constraint(np.array([0, 1, 2]), [[1, 0, -1], [0, -1, -1]], [False, True])
CASES = (TokenTree.chains(1, 2), 4), (TokenTree.chains(2, 2), 3)


@pytest.mark.parametrize('name', slow_but(('race_traversal', 'spectr', 'block', 'univer'), WITH_LAW))
def test_the_masked_distribution_comes_out_exactly(name):
  method = METHODS[name]
  for tree, num_tokens in CASES:
    tree = TokenTree() if method.max_drafts == 0 else tree
    if method.max_drafts == 1 and not tree.is_chain:
      continue
    found, wanted = masked_tables(random_tables(3, 3, num_tokens + tree.max_depth), TINY, 2)
    law = joint_law(method, tree, found, num_tokens)
    np.testing.assert_allclose(law, wanted.joint_target_law(num_tokens), atol=1e-9)


def test_a_mask_on_the_draft_alone_is_caught():
  tree, num_tokens = CASES[1]
  found, wanted = masked_tables(random_tables(3, 3, num_tokens + tree.max_depth), TINY, 2, masks_target=False)
  law = joint_law(METHODS['race_traversal'], tree, found, num_tokens)
  assert np.abs(law - wanted.joint_target_law(num_tokens)).max() > 0.01


# In the loop.

DRAFTERS = {
  'model': lambda draft: draft,
  'lookup': lambda draft: lookup_drafter(6, lookup_min=1),
  'beside': lambda draft: lookup_beside(draft, lookup_min=1),
  'likeliest': lambda draft: growing(model_drafter(draft), Likeliest()),
  'confident': lambda draft: growing(model_drafter(draft), Confident()),
}
_PAIRS = [('model', name) for name in LOSSLESS] + [
  (kind, 'race_traversal') for kind in DRAFTERS if kind not in ('model', 'lookup')
] + [('lookup', 'speculative')]  # fmt: skip


@pytest.mark.parametrize('pair', slow_but([('model', 'race_traversal')], _PAIRS), ids='-'.join)
def test_the_loop_samples_the_masked_distribution(chains, pair):
  (kind, name), (logits, (target, draft)) = pair, chains
  method, num_rows, num_tokens = coarse(METHODS[name]), 8192, 5
  tree = TokenTree.slots((2, 2, 2)) if kind in ('likeliest', 'confident') else TokenTree.chains(2, 3)
  tree = TokenTree.chains(1, 3) if method.max_drafts == 1 else tree
  result = spectr_jax.generate(
    jax.random.key(4), target, None if method.max_drafts == 0 else DRAFTERS[kind](draft),
    np.zeros((num_rows, 1), np.int32), method=method, tree=tree, max_new_tokens=num_tokens, eos_id=EOS, constraint=ONE,
    sampling=SamplingParams(temperature=0.8),
  )  # fmt: skip
  law = law_of(logits[0], ONE, 0, num_tokens, 0.8)
  pairs = zip(np.asarray(result.tokens).tolist(), np.asarray(result.lengths))
  counts = collections.Counter(tuple(tokens[:length]) for tokens, length in pairs)
  assert set(counts) <= set(law)
  found, wanted = (np.array([each.get(text, 0) for text in law]) for each in (counts, law))
  assert chi_square(found, wanted).p_value > 1e-4


def play(decoder, state):
  """All rounds, by a program of its own, so that parts of the loop can be broken."""
  run = jax.jit(lambda decoder, state: loop.run_round(decoder, state)[0])
  while not np.asarray(state.is_done).all():
    state = run(decoder, state)
  return state.result


def begun(models, constraints, numbers, **options):
  decoder, _ = begin(models, 'race_traversal', make_keys(), constraints=constraints, eos_id=EOS, **options)
  state = spectr_jax.engine.init_decode(decoder, make_keys(), PROMPTS, LENGTHS, constraint=numbers)
  return decoder, state


def test_a_state_that_is_not_rolled_back_is_caught(chains, monkeypatch):
  decoder, state = begun(chains[1], [ONE], 0)
  assert_valid(ONE, play(decoder, state))

  def after_all_guesses(state, decoder, proposal, verdict):
    return decoder.constraints.after(state.node_states(decoder, proposal)[:, -1], verdict.next_token)

  monkeypatch.setattr(DecodeState, 'states_after', after_all_guesses)
  with pytest.raises(AssertionError):
    assert_valid(ONE, play(*begun(chains[1], [ONE], 0)))


def test_a_target_without_its_mask_is_caught(chains, monkeypatch):
  monkeypatch.setattr(loop, 'masked', lambda constraints, logits, states: logits)
  with pytest.raises(AssertionError):
    assert_valid(ONE, play(*begun(chains[1], [ONE], 0)))


@pytest.mark.parametrize('name', slow_but(('race_traversal', 'ersd'), KINDS))
def test_greedy_text_does_not_depend_on_the_draft(chains, name):
  rows = {'constraint': [ONE, TWO, None, CHAIN], 'eos_id': EOS, 'temperature': 0.0}
  plain, drafted = (generate(chains[1], method, make_keys(), **rows) for method in ('autoregressive', name))
  np.testing.assert_array_equal(plain.tokens, drafted.tokens)
  assert np.asarray(drafted.tokens)[3, :6].tolist() == [0, 1, 2, 3, 4, EOS]  # all that it allows


@pytest.mark.slow
def test_seed_exact_rows_have_the_tokens_of_gumbel_sampling(chains):
  rows = {'constraint': [ONE, TWO, None, ONE], 'eos_id': EOS}
  first, second = (generate(chains[1], name, make_keys(7), **rows) for name in ('gumbel', 'ersd'))
  np.testing.assert_array_equal(first.tokens, second.tokens)


def test_each_row_follows_its_own_and_ends_where_it_is_complete(chains):
  constraints = [ONE, TWO, None, CHAIN]
  result = generate(chains[1], 'race_traversal', make_keys(), constraint=constraints, eos_id=EOS)
  for row, constraint in enumerate(constraints):
    if constraint is not None:
      assert_valid(constraint, jax.tree.map(lambda x, row=row: x[row : row + 1], result))
  free = generate(chains[1], 'race_traversal', make_keys(), eos_id=EOS)
  np.testing.assert_array_equal(free.tokens[2], result.tokens[2])


@pytest.mark.slow
def test_refilled_rows_follow_theirs(chains):
  """Whatever constraints come beside them, and those of rows that are in progress."""
  target, draft = chains[1]
  rng = np.random.default_rng(0)
  kinds = [None, ONE, TWO, CHAIN, ONE, None, Constraint(ONE.class_of, ONE.next_state, ONE.is_final), TWO]
  requests = [
    Request(i, rng.integers(0, 5, rng.integers(1, 6)).tolist(), jax.random.key(i), constraint=kind)
    for i, kind in enumerate(kinds)
  ]
  method, tree = VERSIONS['spectr'], TokenTree.chains(2, 3)
  options = {'method': method, 'tree': tree, 'max_new_tokens': NEW, 'eos_id': EOS, 'logprobs': True}
  found = generate_many(target, draft, requests, batch_size=2, longest_prompt=6, rounds_at_a_time=1, **options)
  for each in found:
    own = requests[each.name]
    alone = spectr_jax.generate(own.key[None], target, draft, [own.tokens], constraint=own.constraint, **options)
    assert each.tokens.tolist() == alone.tokens[0, : alone.lengths[0]].tolist()
    np.testing.assert_allclose(each.logprobs, alone.logprobs[0, : alone.lengths[0]], rtol=1e-5)


def test_log_probabilities_are_those_among_allowed_tokens(chains):
  logits, models = chains
  result = generate(models, 'race_traversal', make_keys(), constraint=ONE, eos_id=EOS, logprobs=True)
  for row, length in enumerate(np.asarray(result.lengths)):
    state, last = 0, PROMPTS[row, LENGTHS[row] - 1]
    for place in range(length):
      token = int(result.tokens[row, place])
      own = np.where(allowed(ONE, state), np.float64(logits[0][last]), -np.inf)
      np.testing.assert_allclose(result.logprobs[row, place], own[token] - np.log(np.exp(own).sum()), rtol=1e-4)
      state, last = step(ONE, state, token), token


@pytest.mark.parametrize(
  ('fields', 'words'),
  [
    ({'class_of': [0, 9]}, 'class_of must be from 0 to 0'),
    ({'next_state': [[3]]}, 'next_state must be from -1 to 0'),
    ({'next_state': [[2**32]]}, 'next_state of a constraint must be integers of 2 axes below'),
    ({'class_of': [2**32, 0]}, 'class_of of a constraint must be integers of 1 axes below'),
    ({'next_state': [0]}, 'must be integers of 2 axes'),
    ({'is_final': [True, False]}, r'is_final must be \[1\]'),
    ({'next_state': [[-1]]}, 'state 0 of a constraint is not final'),
  ],
)
def test_tables_that_do_not_fit_are_refused(fields, words):
  with pytest.raises(ValueError, match=words):
    Constraint(**{'class_of': np.array([0, 0]), 'next_state': np.array([[0]]), 'is_final': np.array([False])} | fields)


def test_wrong_constraints_are_refused(chains):
  with pytest.raises(ValueError, match='a constraint is of 3 tokens, and the vocabulary has 6'):
    generate(chains[1], 'race_traversal', make_keys(), constraint=TINY, eos_id=EOS)
  with pytest.raises(ValueError, match='needs eos_id'):
    generate(chains[1], 'race_traversal', make_keys(), constraint=CHAIN)
  with pytest.raises(ValueError, match='a list of 4, one per prompt; got 1'):
    generate(chains[1], 'race_traversal', make_keys(), constraint=[ONE])
  with pytest.raises(ValueError, match='must be a Constraint, as compile_constraint makes, got 5'):
    generate(chains[1], 'race_traversal', make_keys(), constraint=5)
  assert not ONE.accepts([0, 6])
  assert not ONE.accepts([0, -1])
  with pytest.raises(ValueError, match='constraint must be from -1 to 0'):
    begun(chains[1], [ONE], 1)
