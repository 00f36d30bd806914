"""What a verification is made of, read off its program."""

import jax
import jax.numpy as jnp
import pytest

from spectr_jax import METHODS, Proposal, SamplingParams, TokenTree
from spectr_jax.sampling import logits_to_probs

_TREES = {'autoregressive': TokenTree(), 'speculative': TokenTree.chains(1, 4)}


def _primitives(jaxpr):
  """Names of all primitives, those inside loops, branches and calls included."""
  for equation in jaxpr.eqns:
    yield equation.primitive.name
    for inner in jax.tree.leaves(
      list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr')
    ):
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        yield from _primitives(inner)


def _verification(method):
  tree, vocab_size = _TREES.get(method.name, TokenTree.chains(4, 4)), 2048
  logits = jnp.zeros((1, tree.num_nodes + 1, vocab_size))
  proposal = Proposal(
    jnp.zeros(tree.num_nodes, jnp.int32), jnp.full((len(tree.parent_nodes), vocab_size), 1 / vocab_size)
  )

  def verify(key, proposal, logits):
    target_probs = logits_to_probs(logits, SamplingParams.make(1, top_k=50, top_p=0.9))[0]
    return method.verifier.verify(key, tree, proposal, target_probs, method.verifier.init_state(tree))

  return set(_primitives(jax.make_jaxpr(verify)(jax.random.key(0), proposal, logits).jaxpr))


@pytest.mark.parametrize('name', list(METHODS))
def test_no_product_in_low_precision_and_no_sort(name):
  """Matrix units round float32 to bfloat16 unless told otherwise; sorts over the vocabulary are slow everywhere."""
  primitives = _verification(METHODS[name])
  assert {'exp', 'cumsum', 'reduce_sum'} <= primitives  # loops and calls have been entered
  assert not primitives & {'dot_general', 'conv_general_dilated', 'sort', 'top_k', 'approx_top_k'}


def test_a_product_would_be_seen():
  nested = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jax.jit(jnp.dot)(y, y), x))(jnp.eye(2))
  assert 'dot_general' in set(_primitives(nested.jaxpr))
