"""Budgets across rows: the same text or distribution whatever is drafted when, and the choice by what calls cost."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coarse import coarse

import spectr_jax
from spectr_jax import METHODS, Decoder, Request, SamplingParams, TokenTree, generate_many, lookup_drafter
from spectr_jax.draft import Confident, growing, model_drafter
from spectr_jax.engine import Budget, Rows, reading
from spectr_jax.engine.budget import ladder, name_of, with_tree
from spectr_jax.engine.loop import noise_keys, propose, run_rounds
from spectr_jax.models.table import table_model
from spectr_jax.testing import chi_square, enumeration, random_tables
from tests.draft.tiny_heads import tiny_head
from tests.slow import slow, slow_but

pytestmark = pytest.mark.usefixtures('highest')
_TREE, _NEW, _SIZE, _VOCAB = TokenTree.chains(2, 3), 24, 48, 17


def _make(target, draft, *, batch_size=3, budget=None, **options):
  own = {'method': 'race_traversal', 'tree': _TREE, 'max_new_tokens': _NEW} | options
  return Rows(Decoder.make(target, draft, cache_size=_SIZE, **own), batch_size=batch_size, budget=budget)


class Script(Budget):
  """A budget that takes sizes and trees in turn, whatever they cost."""

  def __init__(self, *calls):
    super().__init__(is_resized=True)
    self._calls = itertools.cycle(calls)

  def choose(self, num_rows, *, has_tables=False):
    least, self.place = next(self._calls)
    self.size = next(size for size in self.sizes if size >= max(num_rows, least))
    return self.size, self.tree


def _requests(lengths, *, temperature=0.0):
  rng = np.random.default_rng(0)
  return [
    Request(i, rng.integers(3, _VOCAB, size).tolist(), jax.random.key(i), SamplingParams(temperature), _NEW - 3 * i)
    for i, size in enumerate(lengths)
  ]


def _finish(rows, requests):
  """The continuations of requests that come one by one, a round apart: tokens, and calls of the target."""
  waiting, found = list(requests), {}
  while waiting or rows.owners:
    if waiting and rows.free:
      rows.put([waiting.pop(0)])
    for piece in rows.step():
      if piece.is_done:
        result, row = rows.result, piece.row
        found[piece.request.name] = result.tokens[row, : piece.end].tolist(), int(result.num_target_calls[row])
        rows.end([row])
  return found


def test_a_ladder_has_fewer_guesses_step_by_step():
  assert [*map(name_of, ladder(TokenTree.chains(2, 4)))] == ['0', '1x1', '1x2', '1x4', '2x4']
  assert [*map(name_of, ladder(TokenTree.chains(1, 3)))] == ['0', '1x1', '1x2', '1x3']
  assert ladder(TokenTree.slots((2, 3, 2)))[1:] == [TokenTree.slots((2, 3, 2)[:depth]) for depth in (1, 2, 3)]
  assert ladder(TokenTree()) == [TokenTree()]


_DRAFTERS = {
  'model': lambda draft: draft,
  'head': lambda draft: tiny_head(_VOCAB, width=32),
  'growing': lambda draft: growing(model_drafter(draft), Confident()),
  'lookup': lambda draft: lookup_drafter(_VOCAB, lookup_min=1),
}


@pytest.mark.parametrize('name', slow_but(['model', 'head'], _DRAFTERS))
def test_greedy_text_is_that_without_a_draft(monkeypatch, target, draft, name):
  """Rows come and go, calls grow and shrink, and the drafter pauses, some of the time longer than it reads at once."""
  monkeypatch.setattr(reading, '_FEW', 4)
  tree = TokenTree.slots((2, 2)) if name == 'growing' else TokenTree.chains(1, 3) if name == 'lookup' else _TREE
  requests = _requests([1, 9, 4, 13, 2])
  plain = _finish(_make(target, None, method='autoregressive', tree=None), requests)
  calls = [(1, 0)] * 7 + [(3, 2), (1, 1), (2, -1)] + [(1, 0)] * 2 + [(3, -1)]
  rows = _make(target, _DRAFTERS[name](draft), tree=tree, budget=Script(*calls))
  assert {i: tokens for i, (tokens, _) in _finish(rows, requests).items()} == {
    i: tokens for i, (tokens, _) in plain.items()
  }
  assert {guesses for _, guesses in rows.budget.rounds} >= {'0', name_of(tree)}
