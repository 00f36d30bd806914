"""The proofs themselves: what they promise to find they find, and nothing else."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from spectr_jax import METHODS, SamplingParams, TokenTree, verify
from spectr_jax.couplings import Coupling, Maximal, MaximalAfter, Outcome, Selection, SingleDraft
from spectr_jax.methods import Method, register
from spectr_jax.proposal import Independent
from spectr_jax.sampling import logits_to_probs
from spectr_jax.testing import (
  CONTROLS,
  Check,
  Proof,
  chi_square,
  constant_tables,
  detectable_bias,
  engine_counts,
  enumeration_error,
  joint_law,
  ordinary_law,
  prove,
  random_tables,
  sample_counts,
  tiny_transformers,
)
from spectr_jax.verifiers import Block, Verdict, Walk


def test_chi_square_is_pearsons():
  counts, law = np.array([[30, 25], [20, 45]]), np.array([[0.3, 0.2], [0.2, 0.3]])
  result = chi_square(counts, law)
  wanted = scipy.stats.chisquare(counts.reshape(-1), 120 * law.reshape(-1))
  assert result.statistic == pytest.approx(wanted.statistic)
  assert result.p_value == pytest.approx(wanted.pvalue)
  assert (result.num_cells, result.num_samples, result.pooled_mass) == (4, 120, 0)


def test_chi_square_of_rare_and_impossible_cells():
  result = chi_square([490, 495, 15, 0], [0.5, 0.49, 0.006, 0.004])
  assert (result.num_cells, result.pooled_mass) == (3, pytest.approx(0.01))
  # What is pooled cannot be told apart, and is added to what cannot be seen.
  assert result.detectable_bias() == pytest.approx(0.01 + detectable_bias(3, 1000))
  assert chi_square([500, 499, 1], [0.5, 0.5, 0]).p_value == 0
  assert chi_square([500, 500, 0], [0.5, 0.5, 0]).p_value == pytest.approx(1)


def test_chi_square_p_values_are_uniform():
  rng = np.random.default_rng(0)
  law = rng.dirichlet(np.ones(40))
  p_values = [chi_square(counts, law).p_value for counts in rng.multinomial(20_000, law, 2000)]
  assert scipy.stats.kstest(p_values, 'uniform').pvalue > 1e-3


@pytest.mark.parametrize(('counts', 'law'), [([1, 2], [0.2, 0.3, 0.5]), ([0, 0], [0.5, 0.5])])
def test_chi_square_needs_samples_and_a_law(counts, law):
  with pytest.raises(ValueError, match='need samples'):
    chi_square(counts, law)


@pytest.mark.parametrize('num_cells', [2, 30, 250])
@pytest.mark.parametrize('level', [1e-3, 1e-4])
def test_smallest_bias_is_detected_as_often_as_promised(num_cells, level):
  rng = np.random.default_rng(num_cells)
  num_samples, runs = 100_000, 4000
  bias = detectable_bias(num_cells, num_samples, level=level)
  # In proportion to the law, up in one half and down in the other: nothing of this total variation is harder to see.
  law = np.repeat(rng.dirichlet(5 * np.ones(num_cells // 2)) / 2, 2)
  law += 5 / num_samples
  law /= law.sum()
  hardest = law * (1 + 2 * bias * np.tile([1, -1], num_cells // 2))
  # All of it in two cells is easier.
  easier = law + np.r_[bias, -bias, np.zeros(num_cells - 2)] if law[1] > bias else hardest
  powers = []
  for actual in (hardest, easier):
    assert np.abs(actual - law).sum() / 2 == pytest.approx(bias)
    counts = rng.multinomial(num_samples, actual, runs)
    statistics = ((counts - num_samples * law) ** 2 / (num_samples * law)).sum(axis=1)
    powers.append(np.mean(scipy.stats.chi2.sf(statistics, num_cells - 1) < level))
  assert powers[0] == pytest.approx(0.95, abs=0.015)  # four standard errors
  assert powers[1] > powers[0] - 0.015


def test_smallest_bias_shrinks_with_the_sample():
  assert detectable_bias(81, 4_000_000) == pytest.approx(detectable_bias(81, 1_000_000) / 2)
  assert detectable_bias(81, 1_000_000) < detectable_bias(243, 1_000_000) < 0.01
  assert detectable_bias(81, 10) == 1
  assert detectable_bias(1, 1_000_000) == 1  # a single cell shows nothing
  for wrong in ({'level': 0.0}, {'level': 0.97}, {'power': 1.0}):
    with pytest.raises(ValueError, match='level < power'):
      detectable_bias(81, 1000, **wrong)


@dataclasses.dataclass(frozen=True)
class EveryOther:
  """Judges every other round only; `after` is the law, target or draft, of what the others emit instead."""

  after: str = 'target'
  proposal_rules = (Independent,)

  def init_state(self, tree):
    return {'round': jnp.zeros((), jnp.int32), 'half': jnp.zeros(2)}

  def advance(self, tree, proposal, target_probs, state, node, token):
    return {'round': 1 - state['round'], 'half': state['half'] + 0.5}

  def law(self, tree, proposal, target_probs, state):
    judged = Walk(Maximal()).law(tree, proposal, target_probs, ())
    skipped = jnp.zeros_like(judged).at[0].set(target_probs[0] if self.after == 'target' else proposal.probs[0])
    return jnp.where(state['round'] == 0, judged, skipped)

  def verify(self, keys, tree, proposal, target_probs, state) -> Verdict:
    raise NotImplementedError


def _method(verifier: Any, **options) -> Method:
  options = {'is_lossless': True, 'source': 'test', 'max_drafts': 1} | options
  return Method('tested', verifier, Independent(), **options)


def test_enumeration_follows_a_state():
  tree, tables = TokenTree.chains(1, 2), random_tables(0, 3, 7)
  assert enumeration_error(_method(EveryOther()), tree, tables, 5) <= 1e-12
  broken = _method(EveryOther(after='draft'))
  assert enumeration_error(broken, tree, tables, 1) <= 1e-12  # the first round is right
  assert enumeration_error(broken, tree, tables, 5) > 1e-2
  assert joint_law(broken, tree, tables, 5).sum() == pytest.approx(1, abs=1e-12)


@dataclasses.dataclass(frozen=True)
class NotClipped(Coupling):
  """Accepts with probability q/p, above 1 as it may be, and otherwise draws from the target."""

  proposal_rules = (Independent,)

  def __call__(self, draft_probs, target_probs, candidates, is_valid):
    return Outcome(jnp.where(is_valid, target_probs[candidates] / draft_probs[candidates], 0), target_probs)


def test_enumeration_wants_probabilities():
  tree = TokenTree.chains(1, 1)
  tables = random_tables(0, 3, 3, zero_share=0.0, equal_share=0.0)
  method = _method(Walk(NotClipped()))
  # Averaged over what is drafted the negative weights cancel, and the law looks right.
  np.testing.assert_allclose(joint_law(method, tree, tables, 2), tables.joint_target_law(2), atol=1e-12)
  assert enumeration_error(method, tree, tables, 2) > 0.1


def test_enumeration_needs_large_enough_tables():
  with pytest.raises(ValueError, match='contexts of 6 tokens, got 5'):
    enumeration_error(METHODS['speculative'], TokenTree.chains(1, 3), random_tables(0, 2, 5), 4)


@pytest.mark.parametrize('vocab_size', [2, 3])
def test_random_tables(vocab_size):
  tables = random_tables(5, vocab_size, 6)
  count = sum(vocab_size**length for length in range(7))
  assert tables.draft_probs.shape == tables.target_probs.shape == (count, vocab_size)
  assert (tables.vocab_size, tables.max_length) == (vocab_size, 6)
  for laws in (tables.draft_probs, tables.target_probs):
    assert laws.min() >= 0
    np.testing.assert_allclose(laws.sum(1), 1, atol=1e-15)
    assert 0.05 < np.mean(laws == 0) < 0.35
  is_equal = (tables.draft_probs == tables.target_probs).all(1)
  assert 0.05 < is_equal.mean() < 0.4
  assert np.any((tables.draft_probs == 0) & (tables.target_probs > 0))
  assert np.any((tables.draft_probs > 0) & (tables.target_probs == 0))
  law = tables.joint_target_law(4)
  assert law.shape == (vocab_size,) * 4
  assert law.sum() == pytest.approx(1)
  # The first token's law is that of the empty context, the second's of the contexts that follow it.
  np.testing.assert_allclose(law.sum((2, 3)), tables.target_probs[0][:, None] * tables.target_probs[1 : 1 + vocab_size])
  np.testing.assert_array_equal(random_tables(5, vocab_size, 6).target_probs, tables.target_probs)
  assert np.any(random_tables(6, vocab_size, 6).target_probs != tables.target_probs)


def test_other_tables():
  tables = constant_tables([0.75, 0.25], [0.5, 0.5], max_length=3)
  assert tables.draft_probs.shape == (15, 2)
  np.testing.assert_allclose(tables.joint_target_law(3), np.full((2, 2, 2), 1 / 8))
  tables = random_tables(0, 3, 4, zero_share=0.0, equal_share=0.0)
  assert min(tables.draft_probs.min(), tables.target_probs.min()) > 0
  assert not np.any((tables.draft_probs == tables.target_probs).all(1))


_SAMPLING = {'temperature': 0.8, 'top_k': 3, 'top_p': 0.95}


@pytest.fixture(scope='module')
def pair():
  return tiny_transformers(vocab_size=4)


def test_tiny_transformers_give_something_to_test(pair):
  for prompt in ([3], [0, 3, 1]):
    law, other = (ordinary_law(model, prompt, 4, **_SAMPLING) for model in pair)
    assert law.sum() == pytest.approx(1, abs=1e-6)
    assert 30 < np.count_nonzero(law) <= 3**4  # top-k cuts, and top-p where it may
    assert law.max() < 0.3
    assert 0.1 < np.abs(law - other).sum((1, 2, 3)).sum() / 2 < 0.9


def test_ordinary_law_is_the_product_of_uncached_laws(pair, uncached_logits):
  law = ordinary_law(pair[0], [0, 3, 1], 4, **_SAMPLING)
  for text in ([0, 0, 0, 0], [1, 3, 2, 1], [3, 2, 2, 0]):
    logits = uncached_logits(pair[0], [[0, 3, 1, *text[:i]] for i in range(4)])
    probs = logits_to_probs(jnp.asarray(logits)[:, None], SamplingParams.make(4, **_SAMPLING))[:, 0]
    assert law[tuple(text)] == pytest.approx(
      float(np.prod([probs[i, token] for i, token in enumerate(text)])), rel=1e-4
    )


def test_engine_counts_tell_prompts_apart(pair):
  target, prompts = pair[0], [[3], [0, 3, 1]]
  options = {'method': 'autoregressive', 'tree': TokenTree(), 'num_tokens': 4, 'num_samples': 900, 'batch_size': 300}
  counts = engine_counts(jax.random.key(0), target, None, prompts, **options, **_SAMPLING)
  laws = [ordinary_law(target, prompt, 4, **_SAMPLING) for prompt in prompts]
  assert counts.shape == (2, 4, 4, 4, 4)
  assert counts.sum((1, 2, 3, 4)).tolist() == [900, 900]
  for index in range(2):
    assert chi_square(counts[index], laws[index]).p_value > 1e-3
    assert chi_square(counts[index], laws[1 - index]).p_value < 1e-6


def test_sample_counts_are_those_of_one_prompt(pair):
  options = {'method': 'autoregressive', 'tree': TokenTree(), 'num_tokens': 2, 'num_samples': 250, 'batch_size': 100}
  counts = sample_counts(jax.random.key(4), pair[0], None, np.array([3]), **options)
  assert counts.sum() == 300  # whole batches
  np.testing.assert_array_equal(counts, engine_counts(jax.random.key(4), pair[0], None, [[3]], **options)[0])


@dataclasses.dataclass(frozen=True)
class OutOfVocabulary(Walk):
  """Emits what is no token."""

  def verify(self, keys, tree, proposal, target_probs, state):
    verdict = super().verify(keys, tree, proposal, target_probs, state)
    return dataclasses.replace(verdict, next_token=verdict.next_token + 2)


def test_what_is_no_token_is_not_counted(pair):
  with pytest.raises(ValueError, match='emitted ids from 2 to 5, the vocabulary is 0 to 3'):
    sample_counts(
      jax.random.key(0), pair[0], None, np.array([3]),
      method=_method(OutOfVocabulary(Maximal()), max_drafts=0), tree=TokenTree(), num_tokens=1, num_samples=100,
      batch_size=100,
    )  # fmt: skip


@pytest.mark.slow
def test_prove_reports_what_it_found():
  seen = []
  proof = prove('autoregressive', num_samples=50_000, notify=lambda *step: seen.append(step))
  assert proof.is_passed
  assert [check.part for check in proof.checks] == ['exact', 'sampling', 'engine']
  exact, sampling, engine = proof.checks
  assert exact.value < exact.limit == 1e-10
  assert (sampling.num_samples, engine.num_samples) == (50_000, 7500)
  assert (sampling.limit, engine.limit) == (5e-4, pytest.approx(1e-3 / 6))
  # Nine texts of two tokens, one of which is impossible.
  assert sampling.detectable_bias == pytest.approx(detectable_bias(8, 50_000, level=5e-4))
  assert str(proof).endswith('autoregressive passed: lossless in all that was compared')
  assert [what for what, done, total in seen if done == 0] == ['autoregressive: exact, no drafts']
  assert seen[-1] == ('autoregressive: engine, no drafts', 8, 8)
  assert {total for _, _, total in seen} == {8}


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'num_samples': 9_999}, 'num_samples must be from 10,000 to 10\\*\\*9, got 9,999'),
    ({'num_samples': 10**9 + 1}, 'num_samples must be'),
    ({'seed': -1}, 'seed must be from 0 to 2\\*\\*31 - 1, got -1'),
  ],
)
def test_prove_refuses(options, message):
  with pytest.raises(ValueError, match=message):
    prove('spectr', **options)


@dataclasses.dataclass(frozen=True)
class _Reshaping:
  """Changes one field of what a rule returns."""

  field: str
  change: Any

  def __call__(self, *position):
    found = self.rule(*position)
    return dataclasses.replace(found, **{self.field: self.change(getattr(found, self.field))})


class Reshaped(_Reshaping, Coupling):
  rule = Maximal()
  proposal_rules = (Independent,)


class ReshapedPick(_Reshaping, Selection):
  rule = SingleDraft()


class ReturnsTuple(Maximal):
  def __call__(self, *position):
    outcome = super().__call__(*position)
    return outcome.accept_probs, outcome.residual


@dataclasses.dataclass(frozen=True)
class ReshapedVerifier(Walk):
  what: str = ''

  def verify(self, *row):
    verdict = super().verify(*row)
    changes = {'path': verdict.path[None], 'next_token': verdict.next_token[None], 'state': verdict.path}
    return dataclasses.replace(verdict, **{k: v for k, v in changes.items() if k == self.what})

  def law(self, *row):
    law = super().law(*row)
    return law[0] if self.what == 'law' else law

  def advance(self, tree, proposal, target_probs, state, node, token):
    return {} if self.what == 'advance' else state


@dataclasses.dataclass(frozen=True)
class ReshapedRule(Independent):
  name: str = 'reshaped'

  def __call__(self, key, probs, first_child, num_children):
    return super().__call__(key, probs, first_child, num_children + 1)


@pytest.mark.parametrize(
  ('part', 'message'),
  [
    (Walk(Reshaped('accept_probs', jnp.sum)), r'Reshaped must return Outcome with accept_probs \[1\], got \[\]'),
    (Walk(Reshaped('accept_probs', jnp.mean)), r'accept_probs \[1\], got \[\]'),
    (Walk(Reshaped('residual', jnp.sum)), r'residual \[11\], got \[\]'),
    (Walk(Reshaped('residual', lambda x: x[None])), r'residual \[11\], got \[1, 11\]'),
    (Walk(ReturnsTuple()), 'ReturnsTuple must return Outcome, got tuple'),
    (Block(ReshapedPick('probs', jnp.sum)), r'ReshapedPick must return Pick with probs \[11\], got \[\]'),
    (Walk(MaximalAfter(ReshapedPick('pick_probs', jnp.sum))), r'pick_probs \[1\], got \[\]'),
    (Walk(MaximalAfter(ReshapedPick('candidate_probs', lambda x: x[0]))), r'candidate_probs \[1\], got \[\]'),
    (ReshapedVerifier(Maximal(), what='path'), r'ReshapedVerifier must return Verdict with path \[3\], got \[1, 3\]'),
    (ReshapedVerifier(Maximal(), what='next_token'), r'next_token \[\], got \[1\]'),
    (ReshapedVerifier(Maximal(), what='state'), r'ReshapedVerifier.verify must return a state of the shapes \(\)'),
    (ReshapedVerifier(Maximal(), what='advance'), r'ReshapedVerifier.advance must return a state of the shapes \(\)'),
    (ReshapedVerifier(Maximal(), what='law'), r'ReshapedVerifier.law must return an array \[4, 11\], got \[11\]'),
    (ReshapedRule(), r'ReshapedRule must return an array \[1\], got \[2'),
  ],
)
def test_shapes_are_refused_before_any_proof(part, message, monkeypatch):
  for name in ('enumeration_error', 'sample_counts', 'engine_counts'):
    monkeypatch.setattr(f'spectr_jax.testing.proof.{name}', None)  # never called
  is_rule = isinstance(part, ReshapedRule)
  method = dataclasses.replace(_method(Walk(Maximal())), proposal_rule=part) if is_rule else _method(part)
  with pytest.raises(ValueError, match=f'^tested raised in part shapes: ValueError: .*{message}'):
    prove(method)
  if not isinstance(part, (ReshapedVerifier, ReshapedRule)):  # a coupling or selection: also where it decides
    probs = jnp.full((1, 4, 11), 1 / 11)
    row = jax.random.key(0), TokenTree.chains(1, 3), jnp.zeros((1, 3), int), probs[:, :3], probs
    with pytest.raises(ValueError, match=message):
      verify(*row, method=method)


def test_prove_refuses_a_method_without_a_tree():
  class Nowhere(Method):
    def tree_for(self, tree):
      raise ValueError('never')

  nowhere = Nowhere('nowhere', Walk(Maximal()), Independent(), is_lossless=True, source='test')
  with pytest.raises(ValueError, match='nowhere allows none of the trees of the proof: chains 1x3, chains 2x2'):
    prove(nowhere)


def _check(**changes):
  return Check(**({
    'part': 'exact', 'compared': 'x', 'measure': 'error', 'value': 0.0, 'limit': 1e-10, 'num_samples': 0,
    'detectable_bias': 1e-10,
  } | changes))  # fmt: skip


def test_what_passes_and_what_is_said():
  p_value = {'part': 'sampling', 'measure': 'p-value', 'limit': 5e-4, 'num_samples': 10_000}
  assert _check().is_passed
  assert not _check(value=2e-10).is_passed
  assert not _check(value=float('nan')).is_passed
  assert _check(**p_value, value=0.3).is_passed
  assert not _check(**p_value, value=1e-5).is_passed
  assert not _check(**p_value, value=float('nan')).is_passed

  def conclude(method, *checks):
    proof = Proof(method, checks)
    assert str(proof).splitlines()[-1] == proof.conclusion
    assert str(proof).count('FAIL ') + str(proof).count('FAIL\n') == sum(not check.is_passed for check in checks)
    return proof.conclusion

  spectr, broken = METHODS['spectr'], METHODS['decoding_opt']
  failed = _check(**p_value, value=0.0)
  assert conclude(spectr, _check(), failed) == 'spectr FAILED (sampling): not lossless, though registered as lossless'
  assert 'rounded to float32' in conclude(spectr, _check(value=1e-7))
  assert conclude(broken, _check(value=0.1), failed).endswith(broken.bias)
  assert 'FAILED (exact and sampling), as registered: not lossless' in conclude(broken, _check(value=0.1), failed)
  assert conclude(broken, _check()).endswith('registered as not lossless, but nothing here shows it')


def test_register():
  method = dataclasses.replace(METHODS['spectr'], name='registered_by_a_test')
  try:
    assert register(method) is method
    assert register(method) is METHODS['registered_by_a_test'] is method  # once more is fine
    with pytest.raises(ValueError, match="another method named 'registered_by_a_test'"):
      register(dataclasses.replace(METHODS['race'], name='registered_by_a_test'))
  finally:
    del METHODS['registered_by_a_test']
  with pytest.raises(ValueError, match="another method named 'spectr'"):
    register(dataclasses.replace(CONTROLS['spectr_gamma_too_small'], name='spectr'))
