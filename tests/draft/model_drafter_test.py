"""A model as drafter: whatever was accepted, its distributions are those of a plain forward of the text."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.draft import Commitment, DraftContext, DraftRequest, model_drafter
from spectr_jax.proposal import FirstArrivals, Independent, WithoutReplacement
from spectr_jax.sampling import SamplingParams, logits_to_probs
from spectr_jax.tree import TokenTree
from tests.draft.prompts import read as read_prompts
from tests.slow import slow

pytestmark = pytest.mark.usefixtures('highest')

# 0 -> (1, 2 -> (5, 6 -> 8), 3, 4 -> 7): leaves stand before and between parents, so numbers among all nodes and among
# parents differ, and the parents of a depth are no range of numbers.
UNEQUAL = TokenTree((0, 0, 0, 0, 2, 2, 4, 6))
TREES = [TokenTree.chains(1, 3), TokenTree.chains(2, 3), UNEQUAL]
LENGTHS = np.array([1, 2, 5, 1])
# As for logits in model_test.py: float32 sums in another order, amplified by sharp attention.
TOLERANCE = 1e-4

_probs_of = jax.jit(logits_to_probs)


@jax.jit
def _init(drafter, prompts, lengths):
  return read_prompts(drafter, DraftContext(lengths, None, prompts), 32)


@functools.partial(jax.jit, static_argnames=('tree', 'rule'))
def _propose(drafter, keys, state, lengths, tree, sampling, rule=Independent()):  # noqa: B008 (frozen)
  return drafter.propose(state, DraftContext(lengths, None), DraftRequest(keys, sampling, tree, rule))


@functools.partial(jax.jit, static_argnames='tree')
def _commit(drafter, state, path, num_committed, next_token, tree):
  return drafter.commit(state, DraftContext(None, None), Commitment(path, num_committed, next_token, tree))


def _keys(seed, tree):
  return jax.random.split(jax.random.key(seed), (4, tree.max_depth + 1))


def _prompts(seed):
  prompts = np.random.default_rng(seed).integers(0, 17, (4, 5))
  return prompts, [row[:n].tolist() for row, n in zip(prompts, LENGTHS)]


def _assert_probs(uncached_logits, drafter, tree, texts, proposal, sampling):
  """Each parent node has the distribution of its row's text continued by its path alone."""
  tokens = np.pad(np.asarray(proposal.tokens), ((0, 0), (1, 0)))
  paths = [[n for n in tree.paths[parent].tolist() if n > 0] for parent in tree.parent_nodes]
  continued = [text + row[path].tolist() for text, row in zip(texts, tokens) for path in paths]
  logits = uncached_logits(drafter.model, continued).reshape(len(texts), len(paths), -1)
  np.testing.assert_allclose(proposal.probs, _probs_of(logits, sampling), atol=TOLERANCE, rtol=0)


def _choose(tree, rng, turn):
  """A node to accept down to and the committed count for one row: deepest, root, leaf, any, and a row that is done."""
  deepest, leaves = np.flatnonzero(tree.depths == tree.max_depth), np.flatnonzero(tree.num_children == 0)
  nodes = rng.choice(deepest), 0, rng.choice(leaves), *rng.integers(tree.num_nodes + 1, size=2)
  node = int(nodes[turn % 5])
  return node, 0 if turn % 5 == 4 else int(tree.depths[node]) + 1


def _rows(state):
  """Everything a row owns, as arrays with the batch in front."""
  cache = state.cache
  return [*cache.keys, *cache.values, cache.lengths, state.tail, state.has_previous]


@pytest.mark.parametrize('tree', [*map(slow, TREES[:2]), TREES[2]], ids=['chain', 'chains', 'unequal'])
def test_laws_are_those_of_the_text(draft, uncached_logits, tree):
  drafter, rng = model_drafter(draft), np.random.default_rng(0)
  prompts, texts = _prompts(1)
  sampling = SamplingParams.make(4, temperature=np.array([1.0, 0.7, 1.5, 1.0]))
  state = _init(drafter, prompts, LENGTHS)
  for turn in range(6):
    lengths = np.array([len(text) for text in texts])
    proposal = _propose(drafter, _keys(turn, tree), state, lengths, tree, sampling)
    assert proposal.probs.dtype == jnp.float32
    assert proposal.tokens.dtype == jnp.int32
    _assert_probs(uncached_logits, drafter, tree, texts, proposal, sampling)
    # The first rounds of one-token prompts see every case: rows 0 and 3 start with full and with any acceptance.
    nodes, counts = map(np.array, zip(*(_choose(tree, rng, turn + row) for row in range(4))))
    next_token = rng.integers(0, 17, 4)
    path = np.maximum(np.pad(tree.paths[nodes], ((0, 0), (1, 0))), 0)
    before = _rows(state)
    state = _commit(drafter, proposal.state, path, counts, next_token, tree)
    assert state.tokens is None
    for row, text in enumerate(texts):
      if counts[row] == 0:
        for old, new in zip(before, _rows(state)):
          np.testing.assert_array_equal(old[row], new[row])
        continue
      text += np.asarray(proposal.tokens)[row, path[row, 1 : counts[row]] - 1].tolist() + [int(next_token[row])]
    np.testing.assert_array_equal(state.cache.lengths, [max(len(text) - 2, 0) for text in texts])
    for text, tail, has_previous in zip(texts, np.asarray(state.tail), state.has_previous):
      assert tail[1] == text[-1]
      assert bool(has_previous) == (len(text) > 1)
      assert not has_previous or tail[0] == text[-2]


@pytest.mark.parametrize(
  'tree', [slow(TREES[0], id='chain'), slow(TREES[1], id='chains'), pytest.param(TREES[2], id='unequal')]
)
@pytest.mark.parametrize(
  'rule', [Independent(), slow(WithoutReplacement()), slow(FirstArrivals())], ids=lambda rule: rule.name
)
def test_laws_are_those_drawn_from(draft, tree, rule):
  """Drawing again, with the key of the parent's depth, gives the same tokens; where there are too few, some miss."""
  drafter = model_drafter(draft)
  prompts, _ = _prompts(2)
  sampling = SamplingParams.make(
    4, temperature=np.array([1.0, 0.5, 1.0, 0.0]), top_k=np.array([0, 0, 3, 0]), top_p=np.array([0.6, 1.0, 0.9, 1.0])
  )
  keys = _keys(9, tree)
  proposal = _propose(drafter, keys, _init(drafter, prompts, LENGTHS), LENGTHS, tree, sampling, rule)
  tokens, probs = np.asarray(proposal.tokens), np.asarray(proposal.probs)
  assert (probs[0] == 0).any(axis=-1).all()  # top-p has cut something everywhere
  assert ((probs[2] > 0).sum(axis=-1) <= 3).all()
  np.testing.assert_array_equal((probs[3] == 1).sum(axis=-1), 1)
  np.testing.assert_allclose(probs.sum(axis=-1), 1, rtol=1e-5)
  redraw = jax.jit(rule.__call__, static_argnums=3)
  for row in range(4):
    for parent in tree.parent_nodes.tolist():
      first, count = int(tree.first_child[parent]), int(tree.num_children[parent])
      own = probs[row, tree.parent_index[parent]]
      drawn = tokens[row, first - 1 : first - 1 + count]
      assert (own[drawn[drawn >= 0]] > 0).all()
      num_missing = max(count - int((own > 0).sum()), 0) if rule.may_run_out else 0
      assert (drawn < 0).sum() == num_missing
      np.testing.assert_array_equal(redraw(keys[row, tree.depths[parent]], own, first, count), drawn)
  if rule.may_run_out and tree is not TREES[0]:
    assert (tokens[3] < 0).any()


@pytest.mark.slow
def test_nodes_of_a_depth_share_one_race(draft):
  """First arrivals: nodes with equal distributions have equal children at one depth, others at another."""
  tree = TokenTree.prefix((1, 2, 3, 1))
  flat = dataclasses.replace(draft, params=jax.tree.map(jnp.zeros_like, draft.params))  # the same everywhere
  prompts, _ = _prompts(4)
  for rule in (FirstArrivals(), WithoutReplacement()):
    state = _init(model_drafter(flat), prompts, LENGTHS)
    proposal = _propose(model_drafter(flat), _keys(3, tree), state, LENGTHS, tree, SamplingParams.make(4), rule)
    tokens = np.asarray(proposal.tokens)
    children = tokens[:, 3:9].reshape(4, 2, 3)  # of the two nodes at depth 2
    is_shared = (children[:, 0] == children[:, 1]).all()
    assert is_shared == (rule == FirstArrivals())
    assert (tokens[:, 1] != tokens[:, 3]).any()


def test_rows_and_siblings_have_their_own_noise(draft):
  """Equal rows with unequal keys differ, with equal keys agree; siblings are not copies of each other."""
  drafter, tree = model_drafter(draft), TREES[1]
  prompts = np.tile([[3, 1, 4, 1, 5]], (4, 1))
  state = _init(drafter, prompts, np.full(4, 5))
  sampling = SamplingParams.make(4, temperature=3.0)
  keys = _keys(0, tree)[jnp.array([0, 1, 0, 2])]
  tokens = np.asarray(_propose(drafter, keys, state, np.full(4, 5), tree, sampling).tokens)
  np.testing.assert_array_equal(tokens[0], tokens[2])
  assert (tokens[0] != tokens[1]).any()
  chains = tokens.reshape(4, 3, 2)
  assert (chains[..., 0] != chains[..., 1]).any()


def test_padding_is_not_read(draft):
  drafter, tree = model_drafter(draft), TREES[1]
  prompts, _ = _prompts(3)
  is_padding = np.arange(5) >= LENGTHS[:, None]
  states = [_init(drafter, np.where(is_padding, pad, prompts), LENGTHS) for pad in (0, 10**6)]
  proposals = [_propose(drafter, _keys(1, tree), state, LENGTHS, tree, SamplingParams.make(4)) for state in states]
  for field in ('tokens', 'probs'):
    np.testing.assert_array_equal(*(getattr(each, field) for each in proposals))
