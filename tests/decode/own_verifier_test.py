"""A verifier that a user registers is traced, explained and timed like those of the library."""

import dataclasses

import jax
import pytest

from decode import trace
from decode.experiment.auto_choice import grid
from decode.experiment.options import DecodeOptions
from spectr_jax import METHODS
from spectr_jax.couplings import Explanation, Maximal
from spectr_jax.methods import Method
from spectr_jax.proposal import Independent
from spectr_jax.verifiers import Verifier, Walk


@dataclasses.dataclass(frozen=True)
class OneOrNothing(Verifier):
  """Token-level verification of the first draft alone: an algorithm of one's own, by what a user would write."""

  inner: Walk = Walk(Maximal())
  proposal_rules = (Independent,)
  explanation = Explanation('A rule of my own.', 'what I leave')

  def verify(self, *row):
    return self.inner.verify(*row)

  def explain(self, *row):
    return self.inner.explain(*row)

  def law(self, *row):
    return self.inner.law(*row)


@dataclasses.dataclass(frozen=True)
class Silent(OneOrNothing):
  """Says nothing of itself and records nothing."""

  explanation = Explanation()

  def explain(self, *row):
    return Verifier.explain(self, *row)


@pytest.fixture
def registered(monkeypatch):
  for name, verifier in (('own', OneOrNothing()), ('silent', Silent())):
    method = Method(name, verifier, Independent(), is_lossless=True, source='a test', max_drafts=1)
    monkeypatch.setitem(METHODS, name, method)


@pytest.mark.slow
@pytest.mark.usefixtures('registered')
def test_the_trace_page_shows_it(pair):
  options = DecodeOptions.of(
    **pair, method=('own',), num_drafts=(1,), draft_length=(2,), max_new_tokens=6, prompt='the quick'
  )
  with jax.default_matmul_precision('highest'):
    data = trace.record_trace(options, ('speculative', 'silent'))
  own, known, silent = data['methods']
  assert (own['name'], own['rule'], own['residual']) == ('own', 'A rule of my own.', 'what I leave')
  assert (silent['rule'], silent['residual']) == ('', '')
  for played in data['rounds']:
    mine, theirs, quiet = played['judgements']
    assert mine == theirs  # the same steps with the same keys
    assert 'decisions' in mine
    assert quiet == {name: mine[name] for name in ('path', 'next', 'origin')}
  assert known['rule']


@pytest.mark.usefixtures('registered')
def test_auto_may_choose_it():
  settings, left_out = grid(DecodeOptions.of(method=('auto',), num_drafts=(1, 2), draft_length=(2, 4)))
  assert [setting.draft_length for setting in settings if setting.method.name == 'own'] == [2, 4]
  assert 'own' not in left_out
