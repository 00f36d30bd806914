"""The adapters for Levanter and sglang-jax under the conformance kit, with the engines' arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from integrations import levanter, sglang_jax
from spectr_jax import TokenTree
from spectr_jax.testing import check_verifier


def _levanter(has_probs):
  verify = jax.jit(levanter.verify_proposals, static_argnames=('logprobs_mode', 'stop_token_ids'))

  def verify_proposals(key, tokens, lengths, draft_probs, target_probs):
    full, none = jnp.full(len(tokens), 99), jnp.zeros(len(tokens), bool)
    logits = jnp.log(jnp.asarray(target_probs))
    probs = draft_probs if has_probs else None
    return verify(logits, tokens, lengths, jnp.ones(len(tokens)), full, none, key=key, draft_probs=probs).token_ids

  return verify_proposals


@pytest.mark.slow
@pytest.mark.usefixtures('optimized')
@pytest.mark.parametrize('children', ['independent', 'given'])
def test_levanter_is_exact(children):
  tree = TokenTree.chains(1, 2)
  report = check_verifier(_levanter(children != 'given'), tree=tree, children=children, num_samples=10_000)
  assert report.is_passed, report


def test_levanter_cuts_at_limits_and_stop_tokens():
  logits = jnp.log(jax.nn.one_hot(jnp.array([[1, 2, 3]] * 4), 5))
  verify = jax.jit(levanter.verify_proposals, static_argnames=('logprobs_mode', 'stop_token_ids'))
  verified = verify(
    logits, jnp.array([[1, 2]] * 4), jnp.array([2, 2, 2, 1]), jnp.array([0.0, 1.0, 0.5, 1.0]), jnp.array([9, 2, 9, 9]),
    jnp.array([False, False, True, False]), key=jax.random.key(0), stop_token_ids=(2,),
  )  # fmt: skip
  assert verified.token_ids.tolist() == [[1, 2, -1], [1, 2, -1], [-1, -1, -1], [1, 2, -1]]
  assert verified.lengths.tolist() == [2, 2, 0, 2]
  assert verified.accepted_draft_tokens.tolist() == [2, 2, 0, 1]
  np.testing.assert_allclose(verified.logprobs, 0)
  with pytest.raises(ValueError, match='logprobs_mode must be'):
    levanter.verify_proposals(logits, *[jnp.zeros((4, 2), int)] * 5, key=jax.random.key(0), logprobs_mode='raw')


# 0 -> 1, 2; 1 -> 3, 4; 2 -> 5; 4 -> 6, and a row that is a chain with nodes that hang nowhere.
_PARENTS = np.array([[-1, 0, 0, 1, 1, 2, 4], [-1, 0, 1, 2, -1, -1, -1]])
_FIRST = np.array([[1, 3, 5, -1, 6, -1, -1], [1, 2, 3, -1, -1, -1, -1]])
_SIBLING = np.array([[-1, 2, -1, 4, -1, -1, -1], [-1, -1, -1, -1, -1, -1, -1]])


def test_trees_of_sglang_and_back():
  np.testing.assert_array_equal(sglang_jax.parents_of(jnp.asarray(_FIRST), jnp.asarray(_SIBLING)), _PARENTS)
  first, sibling = sglang_jax.pointers_of(jnp.asarray(_PARENTS))
  np.testing.assert_array_equal(first, _FIRST)
  np.testing.assert_array_equal(sibling, _SIBLING)


def test_a_tree_of_sglang_is_followed_as_far_as_the_target_goes():
  tokens = jnp.array([[9, 1, 2, 3, 4, 5, 6], [9, 1, 2, 3, 0, 0, 0]])
  probs = np.zeros((2, 7, 10), np.float32)
  for row, nodes in enumerate(({0: 1, 1: 4, 4: 6, 6: 8}, {0: 1, 1: 2, 2: 7})):
    probs[row, :, 0] = 1
    for node, token in nodes.items():
      probs[row, node] = np.eye(10)[token]
  path, emitted, accepted = sglang_jax.verify_tree(
    jax.random.key(0), tokens, jnp.asarray(_FIRST), jnp.asarray(_SIBLING), probs, widths=(2, 3, 2)
  )
  assert path.tolist() == [[0, 1, 4, 6], [0, 1, 2, -1]]
  assert emitted.tolist() == [[1, 4, 6, 8], [1, 2, 7, -1]]
  assert accepted.tolist() == [3, 2]


def test_nodes_beyond_the_widths_are_left_out_with_all_below_them():
  # 0 -> 1, 2; 1 -> 3; 2 -> 4: node 2 has no slot, so neither has 4. Node 6 hangs below 5, which hangs nowhere.
  slots = sglang_jax._slots_of(jnp.array([-1, 0, 0, 1, 2, -1, 5]), (1, 2))
  assert slots.tolist() == [0, 1, -1, 2, -1, -1, -1]


@pytest.mark.slow
@pytest.mark.usefixtures('optimized')
def test_trees_of_sglang_are_exact():
  tree = TokenTree((0, 0, 1, 1, 2))
  first, sibling = sglang_jax.pointers_of(jnp.array([(-1, *tree.parents)]))

  @jax.jit
  def verify_tree(key, tokens, target_probs):
    num = len(tokens)
    rows = [jnp.broadcast_to(x, (num, x.shape[1])) for x in (first, sibling)]
    with_root = jnp.pad(jnp.asarray(tokens), ((0, 0), (1, 0)))
    return sglang_jax.verify_tree(key, with_root, *rows, target_probs, widths=(2, 3))[1]

  report = check_verifier(
    lambda key, tokens, target_probs: verify_tree(key, tokens, target_probs),
    tree=tree, children='given', is_ragged=False, num_samples=3_000,
  )  # fmt: skip
  assert report.is_passed, report
