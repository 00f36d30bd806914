"""Every method keeps the target's law: exactly, by sampling, and through the real engine; what is broken is caught."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coarse import coarse

from spectr_jax import METHODS, TokenTree, generate, with_children, with_gumbel
from spectr_jax.couplings import KSeq
from spectr_jax.models import table, transformer
from spectr_jax.sampling import SamplingParams
from spectr_jax.testing import (
  CONTROLS,
  chi_square,
  constant_tables,
  engine_counts,
  enumeration_error,
  expected_acceptance,
  joint_law,
  ordinary_law,
  random_tables,
  sample_counts,
)
from spectr_jax.verifiers import Walk

# (tree, vocabulary, tokens compared): several rounds each, since a round emits at most L + 1 tokens.
_SMALL = [
  (TokenTree(), 3, 4),
  (TokenTree.chains(1, 3), 3, 5),
  (TokenTree.chains(2, 2), 3, 4),
  (TokenTree.chains(3, 2), 2, 5),
  (TokenTree((0, 0, 1, 1, 2, 4)), 2, 5),
]
_LARGE = [
  (TokenTree.chains(2, 3), 3, 4),
  (TokenTree.chains(3, 3), 2, 6),
  (TokenTree.chains(3, 3), 3, 4),
]


# Every lossless method; traversal also on siblings that differ.
_LOSSLESS = {name: method for name, method in METHODS.items() if method.is_lossless}
_LOSSLESS['traversal_without_replacement'] = with_children(METHODS['traversal'], 'without_replacement')
# What a law can show: the noise of an exponential race is proven token for token, and faults of keys by sampling alone.
_WITH_LAW = {name: method for name, method in _LOSSLESS.items() if not method.is_seed_exact}
_BROKEN = {name: method for name, method in CONTROLS.items() if not method.is_seed_exact}
_BROKEN |= {name: method for name, method in METHODS.items() if not method.is_lossless}


def _cases(methods, settings, *, only=None):
  """All that a method's theory allows; where `only` names some methods, those of the others are slow tests."""
  for name, method in methods.items():
    for tree, vocab_size, num_tokens in settings:
      try:
        if method.tree_for(tree) != tree:
          continue
      except ValueError:
        continue
      if method.proposal_rule.may_run_out and (vocab_size + 1) ** tree.num_nodes > 20000:
        continue  # a child may also be missing, which makes one token more
      shape = f'{name}-N{tree.num_nodes}-L{tree.max_depth}-V{vocab_size}-T{num_tokens}'
      marks = () if only is None or name in only else pytest.mark.slow
      yield pytest.param(method, tree, vocab_size, num_tokens, id=shape, marks=marks)


def _error(method, tree, vocab_size, num_tokens, seeds):
  return max(
    enumeration_error(method, tree, random_tables(seed, vocab_size, num_tokens + tree.max_depth), num_tokens)
    for seed in range(seeds)
  )


def _rest_slow(cases):
  """The first case of each method by default, the others among the slow tests."""
  seen = set()
  for case in cases:
    name = case.id.split('-')[0]
    yield pytest.param(*case.values, id=case.id, marks=pytest.mark.slow if name in seen else case.marks)
    seen.add(name)


# One method of each kind by default.
_KINDS = (
  'speculative', 'block', 'greedy_block', 'spectr', 'gsd', 'race_block', 'traversal_without_replacement',
  'race_traversal', 'univer',
)  # fmt: skip


@pytest.mark.parametrize(
  ('method', 'tree', 'vocab_size', 'num_tokens'), list(_rest_slow(_cases(_WITH_LAW, _SMALL, only=_KINDS)))
)
def test_exact(method, tree, vocab_size, num_tokens):
  assert method.is_lossless
  method = coarse(method)
  # float64 sums of at most 3^9 terms: 1e-10 leaves four digits to spare.
  assert _error(method, tree, vocab_size, num_tokens, seeds=3) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(('method', 'tree', 'vocab_size', 'num_tokens'), list(_cases(_WITH_LAW, _LARGE)))
def test_exact_large(method, tree, vocab_size, num_tokens):
  # The largest case has 3^9 ways to fill its tree, after each of 40 prefixes.
  seeds = 1 if vocab_size**tree.num_nodes > 10_000 else 2
  assert _error(coarse(method), tree, vocab_size, num_tokens, seeds=seeds) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize('name', ['race', 'race_block', 'race_traversal'])
def test_exact_with_all_classes(name):
  assert _error(METHODS[name], TokenTree.chains(2, 2), 3, 4, seeds=1) <= 1e-10


# A threshold or a competing draft shows with two candidates; tickets with three, one of which is twice the same.
_CANDIDATES_NEEDED = {
  'spectr_gamma_too_small': 2, 'speculative_many_drafts': 2, 'spectr_gbv': 2, 'race_one_ticket': 3,
  'race_block_one_ticket': 3, 'race_traversal_one_ticket': 3, 'race_traversal_copies_have_credit': 3,
  'race_traversal_credit_not_divided': 2, 'race_traversal_likelier_kept_first': 2, 'race_traversal_second_if_first': 2,
  'univer_room_not_divided': 2, 'univer_drawn_among_given': 2,
}  # fmt: skip


def _visible(cases):
  """Cases in which a fault shows."""
  for case in cases:
    method, tree = case.values[:2]
    if tree.num_nodes and tree.num_children[0] >= _CANDIDATES_NEEDED.get(method.name, 1):
      yield case


# One fault of each kind by default.
_FAULTS = (
  'speculative_many_drafts', 'speculative_residual_left_out', 'speculative_law_before_top_p', 'spectr_gamma_too_small',
  'spectr_gbv', 'decoding_opt', 'race_one_ticket', 'race_traversal_credit_not_divided', 'race_traversal_reranked',
)  # fmt: skip
# Three candidates for one token are enough for tickets to show, and few for an enumeration.
_BROKEN_CASES = list(_rest_slow(_visible(_cases(_BROKEN, [(TokenTree.chains(3, 1), 3, 2), *_SMALL[:3]], only=_FAULTS))))


@pytest.mark.parametrize(('method', 'tree', 'vocab_size', 'num_tokens'), _BROKEN_CASES)
def test_exact_catches_what_is_broken(method, tree, vocab_size, num_tokens):
  assert not method.is_lossless
  method = coarse(method)
  assert _error(method, tree, vocab_size, num_tokens, seeds=2) > 1e-3


def test_every_control_is_caught_somewhere():
  exact = {case.values[0].name for case in _BROKEN_CASES}
  keyed = {name for name, method in CONTROLS.items() if method.is_seed_exact}
  assert exact | keyed == set(CONTROLS) | {'spectr_gbv', 'decoding_opt', 'decoding_uno'}
  assert keyed == {'block_keyed_by_position', 'race_block_keyed_by_position'}


@pytest.mark.slow
def test_acceptance_in_closed_form():
  tables = constant_tables([0.75, 0.25], [0.5, 0.5], max_length=3)
  # Ber(.25) -> Ber(.5), two candidates. The optimum is 1 + .5 - .75^2 = .9375, K-SEQ has .8476, recursive rejection
  # .75 + .25 * .25.
  np.testing.assert_allclose(
    expected_acceptance(METHODS['spectr'], TokenTree.chains(2, 1), tables), [0.8476], rtol=0, atol=5e-5
  )
  # Its threshold solves gamma^2 - 7/4 gamma + 1/2 = 0.
  gamma = (7 + np.sqrt(17)) / 8
  converged = dataclasses.replace(METHODS['spectr'], verifier=Walk(KSeq(num_rounds=60)))
  for method, accepted in (
    (converged, 0.5 + gamma / 4),
    (METHODS['race'], 0.9375),
    (METHODS['race_block'], 0.9375),
    (METHODS['race_traversal'], 0.9375),
    (METHODS['specinfer'], 0.8125),
  ):
    found = expected_acceptance(method, TokenTree.chains(2, 1), tables)
    np.testing.assert_allclose(found, [accepted], rtol=0, atol=1e-7, err_msg=method.name)
  # One candidate: 1 - TV at each depth.
  np.testing.assert_allclose(
    expected_acceptance(METHODS['speculative'], TokenTree.chains(1, 3), tables), [0.75, 0.75**2, 0.75**3], rtol=1e-12
  )


def test_spectr_gbv_is_biased_as_enumerated():
  tables = constant_tables([0.75, 0.25], [0.5, 0.5], max_length=2)
  law = joint_law(METHODS['spectr_gbv'], TokenTree.chains(2, 1), tables, 1)
  assert np.abs(law - 0.5).sum() / 2 == pytest.approx(3 / 35, abs=1e-12)  # .0857
  accepted = expected_acceptance(METHODS['spectr_gbv'], TokenTree.chains(2, 1), tables)
  assert accepted[0] == pytest.approx(0.70357142857142857, abs=1e-12)


@pytest.mark.parametrize('name', [name for name, method in METHODS.items() if method.is_lossless_alone])
def test_what_is_lossless_on_one_draft_alone(name):
  method = METHODS[name]
  assert not method.is_lossless_on(TokenTree.chains(2, 3))
  assert method.is_lossless_on(TokenTree.chains(1, 3))
  assert _error(method, TokenTree.chains(1, 3), 3, 5, seeds=2) <= 1e-10


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_block_lies_between_token_level_and_the_optimum_of_one_draft(seed):
  tables, tree = random_tables(seed, 3, 4), TokenTree.chains(1, 3)
  speculative, block, greedy = (
    expected_acceptance(METHODS[name], tree, tables).sum() for name in ('speculative', 'block', 'greedy_block')
  )
  # The most a single draft allows in one round: the overlap of the laws of the first tokens, for each length.
  best, draft, target = 0.0, np.ones(1), np.ones(1)
  for length in range(3):
    first = (3**length - 1) // 2
    draft = (draft[:, None] * tables.draft_probs[first : first + 3**length]).reshape(-1)
    target = (target[:, None] * tables.target_probs[first : first + 3**length]).reshape(-1)
    best += np.minimum(draft, target).sum()
  assert greedy == pytest.approx(best, abs=1e-12)
  assert speculative <= block + 1e-12
  assert block <= best + 1e-12


def _chain_counts(method, tree, num_samples):
  """Counts of the first L + 2 tokens from Markov chains over 3 tokens, and their law."""
  rng = np.random.default_rng(7)
  draft, target = rng.dirichlet(np.ones(3), 3), rng.dirichlet(np.ones(3), 3)
  draft[0, 1], target[1, 2] = 0, 0
  draft /= draft.sum(1, keepdims=True)
  target /= target.sum(1, keepdims=True)
  num_tokens = tree.max_depth + 2
  law = target[0]
  for _ in range(num_tokens - 1):
    law = law[..., None] * target
  with np.errstate(divide='ignore'):
    models = [table.table_model(jnp.asarray(np.log(probs), jnp.float32)) for probs in (target, draft)]
  batch_size = 2048 if method.name.startswith('race') else 8192  # a CPU's cache holds races of no more rows
  counts = sample_counts(
    jax.random.key(3), *models, np.array([0]), method=method, tree=tree, num_tokens=num_tokens, num_samples=num_samples,
    batch_size=batch_size,
  )  # fmt: skip
  return counts, law


_IRREGULAR = TokenTree((0, 0, 1, 1, 2, 4))
_SAMPLED = [
  ('autoregressive', TokenTree()),
  ('speculative', TokenTree.chains(1, 3)),
  ('spectr', TokenTree.chains(3, 2)),
  ('spectr', _IRREGULAR),
  ('specinfer', _IRREGULAR),
  ('batch', TokenTree.chains(3, 2)),
  ('gsd', _IRREGULAR),
  ('ersd', TokenTree.chains(3, 2)),
  ('ersd', _IRREGULAR),
  ('block', TokenTree.chains(1, 3)),
  ('greedy_block', TokenTree.chains(1, 3)),
  ('race', TokenTree.chains(2, 2)),
  ('race_block', TokenTree.chains(2, 2)),
  ('race_traversal', TokenTree.chains(2, 2)),
  ('traversal', _IRREGULAR),
  ('traversal_without_replacement', _IRREGULAR),
  ('univer', _IRREGULAR),
]


def _id(x):
  return f'N{x.num_nodes}L{x.max_depth}' if isinstance(x, TokenTree) else str(x)


def test_every_lossless_method_is_sampled():
  assert {name for name, _ in _SAMPLED} == set(_LOSSLESS)


def _only(names, cases):
  """The first case of each of `names` by default, all others among the slow tests."""
  firsts = [next(case for case in cases if case[0] == name) for name in names]
  return [
    pytest.param(*case, id='-'.join(map(_id, case)), marks=() if case in firsts else pytest.mark.slow) for case in cases
  ]


@pytest.mark.slow
@pytest.mark.usefixtures('optimized')
@pytest.mark.parametrize(('name', 'tree'), _only(('greedy_block', 'ersd'), _SAMPLED))
def test_joint_law_by_sampling(name, tree):
  result = chi_square(*_chain_counts(coarse(_LOSSLESS[name]), tree, 1_000_000))
  assert result.num_samples >= 1_000_000
  assert result.p_value > 1e-3, result


_CAUGHT_BY_SAMPLING = [
  ('spectr_residual_left_out', TokenTree.chains(3, 2)),
  ('spectr_gamma_too_small', TokenTree.chains(3, 2)),
  ('spectr_law_before_top_p', TokenTree.chains(3, 2)),
  ('greedy_block_level_too_few', TokenTree.chains(1, 3)),
  ('block_keyed_by_position', TokenTree.chains(1, 3)),
  ('race_one_ticket', TokenTree.chains(3, 1)),
  ('race_traversal_credit_not_divided', TokenTree.chains(3, 2)),
  ('race_traversal_residual_of_parent', TokenTree.chains(3, 2)),
  ('race_traversal_second_if_first', TokenTree.chains(2, 2)),
  ('spectr_gbv', TokenTree.chains(3, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'tree'), _only(('block_keyed_by_position',), _CAUGHT_BY_SAMPLING))
def test_sampling_catches_what_is_broken(name, tree):
  method = coarse((CONTROLS | METHODS)[name])
  result = chi_square(*_chain_counts(method, tree, 250_000))
  assert result.p_value < 1e-9, result


@pytest.mark.slow
def test_sampling_catches_a_race_keyed_by_position():
  method = coarse(CONTROLS['race_block_keyed_by_position'])
  assert chi_square(*_chain_counts(method, TokenTree.chains(2, 3), 250_000)).p_value < 1e-9


_VOCAB = 7
_PROMPTS = [[3], [1, 4, 2, 6, 0], [5, 5, 1]]
_SAMPLING = {'temperature': 0.8, 'top_k': 6, 'top_p': 0.9}


def _tiny_transformer(seed, width):
  config = transformer.TransformerConfig(_VOCAB, width, 2, 2, 2 * width, 16)
  params = jax.jit(transformer.init_params, static_argnames='config')(jax.random.key(seed), config=config)
  # Sharper than at initialization, so that laws differ between contexts and top-p has something to cut.
  params['final_norm']['gain'] *= 2.0
  return transformer.transformer_model(params, config)


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'tree'), _only(('spectr',), _SAMPLED[1:]))
def test_engine_against_ordinary_sampling(name, tree):
  """Cache, tree attention, rollback, a ragged batch, temperature, top-k and top-p on transformers."""
  _compare_engine(name, tree, _SAMPLING)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['spectr', 'race_traversal'])
def test_engine_with_min_p_against_ordinary_sampling(name):
  _compare_engine(name, TokenTree.chains(3, 2), {'temperature': 1.2, 'min_p': 0.2})


def _compare_engine(name, tree, sampling):
  target, draft = _tiny_transformer(0, 32), _tiny_transformer(1, 16)
  num_tokens = 4
  counts = engine_counts(
    jax.random.key(5),
    target,
    draft,
    _PROMPTS,
    method=coarse(_LOSSLESS[name]),
    tree=tree,
    num_tokens=num_tokens,
    num_samples=25_000,
    batch_size=2500,
    **sampling,
  )
  for prompt, found in zip(_PROMPTS, counts):
    # By uncached forwards of every context.
    result = chi_square(found, ordinary_law(target, prompt, num_tokens, **sampling))
    assert result.num_samples >= 25_000
    assert result.p_value > 1e-3, (prompt, result)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('draft_seed', 'tree'),
  _only((1,), list(itertools.product([1, 2], [_IRREGULAR, TokenTree.chains(3, 2), TokenTree.chains(1, 3)]))),
)
def test_ersd_is_gumbel_max_sampling_token_for_token(tree, draft_seed):
  """Whatever the draft and the tree; in float32 a tie of two arrivals could differ, and none does here."""
  target, draft = _tiny_transformer(0, 32), _tiny_transformer(draft_seed, 16)
  prompts = np.zeros((len(_PROMPTS), 6), np.int32)
  for row, prompt in enumerate(_PROMPTS):
    prompts[row, : len(prompt)] = prompt
  lengths = np.array([len(prompt) for prompt in _PROMPTS])
  keys = jax.random.split(jax.random.key(11), 300)
  common = {'max_new_tokens': 10, 'sampling': SamplingParams(**_SAMPLING)}
  found = generate(
    keys, target, draft, np.tile(prompts, (100, 1)), np.tile(lengths, 100), method='ersd', tree=tree, **common
  )
  reference = generate(
    keys, target, None, np.tile(prompts, (100, 1)), np.tile(lengths, 100),
    method=with_gumbel(METHODS['autoregressive']), **common,
  )  # fmt: skip
  np.testing.assert_array_equal(found.tokens, reference.tokens)
  assert float(np.sum(found.num_target_calls)) < 0.9 * float(np.sum(reference.num_target_calls))


def test_gumbel_max_sampling_is_what_its_name_says():
  """Against the textbook's argmax of log q plus Gumbel noise, with the keys written out."""
  logits = np.random.default_rng(1).normal(size=(6, 6)).astype(np.float32)
  row_keys = jax.random.split(jax.random.key(2), 40)
  tokens = generate(
    row_keys,
    table.table_model(jnp.asarray(logits)),
    None,
    np.zeros((40, 2), np.int32),
    np.full(40, 2),
    method=with_gumbel(METHODS['autoregressive']),
    max_new_tokens=8,
  ).tokens
  for row_key, row in zip(row_keys, np.asarray(tokens)):
    last = 0
    for position, token in enumerate(row, start=2):
      key = jax.random.fold_in(jax.random.fold_in(row_key, 2), position)
      bits = np.asarray(jax.random.bits(key, (6,), jnp.uint32))
      gumbel = -np.log(-np.log1p(-(bits + 0.5) / 2.0**32))
      assert token == np.argmax(logits[last] + gumbel)
      last = token
