"""Statistics of the positions visited."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spectr_jax
from spectr_jax import TokenTree
from spectr_jax.models.table import table_model
from tests.engine.runs import KINDS, LENGTHS, PROMPTS, TREES, VERSIONS, assert_same, begin, generate
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures('highest')


@pytest.mark.slow
def test_statistics_in_closed_form():
  """Ber(.25) -> Ber(.5): with two candidates K-SEQ accepts .8476, the optimum is .9375; with one both are .75."""
  rows, num_rounds, tree = 1000, 5, TokenTree.chains(2, 2)
  target, draft = (table_model(jnp.log(jnp.tile(jnp.float32(probs), (2, 1)))) for probs in ([0.5, 0.5], [0.75, 0.25]))
  prompts = jnp.zeros((rows, 1), jnp.int32), jnp.ones(rows, jnp.int32)
  options = {'tree': tree, 'max_new_tokens': num_rounds * 3}  # so that nothing is cut off

  def run(**more):
    decoder, state = begin((target, draft), 'spectr', jax.random.key(0), *prompts, **options, **more)
    return spectr_jax.engine.decode_rounds(decoder, state, num_rounds).result

  result = run(statistics=True)
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
  assert_same(run(), dataclasses.replace(result, statistics=None))


@pytest.mark.parametrize('method', slow_but(['traversal'], KINDS))
def test_statistics_are_consistent(tables, method):
  """On a tree of unequal depth, until rows have ended: rounds that come after a row's end count nothing."""
  tree = TokenTree((0, 0, 1, 1, 2, 4)) if VERSIONS[method].max_drafts is None else TREES[method]
  tree = TREES[method] if VERSIONS[method].needs_chains else tree
  keys, prompts, lengths = jax.random.split(jax.random.key(2), 8), np.tile(PROMPTS, (2, 1)), np.tile(LENGTHS, 2)
  result = generate(tables, method, keys, prompts, lengths, tree=tree, max_new_tokens=40, statistics=True)
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
