"""The compiled programs of verifications: precision, memory, and rows that do not depend on their batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from guesses import ALL

from spectr_jax import SamplingParams, TokenTree
from spectr_jax.couplings import Race
from spectr_jax.kernels import native
from spectr_jax.proposal import Proposal
from spectr_jax.sampling import logits_to_probs
from spectr_jax.verifiers.race_traversal import RACES_AT_ONCE
from tests.slow import slow_but


def _tree(method, num_drafts, draft_length):
  return {0: TokenTree()}.get(method.max_drafts, TokenTree.chains(method.max_drafts or num_drafts, draft_length))


def _equations(jaxpr):
  """All equations, those inside loops, branches and calls included."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.tree.leaves(
      list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr')
    ):
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        yield from _equations(inner)


def _is_in_low_precision(equation):
  """Whether it is a product that may round its factors: anything but the highest precision, for both of them."""
  if equation.primitive.name not in ('dot_general', 'conv_general_dilated'):
    return False
  return equation.params['precision'] != (jax.lax.Precision.HIGHEST,) * 2


def _arguments(method, tree, vocab_size, batch_size):
  """Shapes of a batch of rows to verify: keys, proposal, the target's laws, state."""
  keys = jax.random.split(jax.random.key(0), (batch_size, tree.max_depth + 1))
  proposal = Proposal(
    jax.ShapeDtypeStruct((batch_size, tree.num_nodes), jnp.int32),
    jax.ShapeDtypeStruct((batch_size, len(tree.parent_nodes), vocab_size), jnp.float32),
  )
  targets = jax.ShapeDtypeStruct((batch_size, tree.num_nodes + 1, vocab_size), jnp.float32)
  state = jax.tree.map(lambda x: jnp.tile(x, (batch_size, *[1] * x.ndim)), method.verifier.init_state(tree))
  return keys, proposal, targets, state


def _verification(method, tree):
  return jax.vmap(lambda keys, *row: method.verifier.verify(keys, tree, *row))


# Values that are sorted together: the classes of a depth's contexts; the vocabulary, which the docs tell.
_MOST_SORTED = {'race_layers': 8 * Race().num_classes, 'ratio_block': 4096}

_QUICK = ['speculative', 'spectr', 'gsd', 'ersd', 'greedy_block', 'race_traversal']


@pytest.mark.parametrize('name', slow_but(_QUICK, ALL))
def test_no_product_in_low_precision_no_sort_and_no_large_array(name):
  """Matrix units round float32 to bfloat16 unless told otherwise; memory must grow neither with V^2 nor with K^L."""
  method, vocab_size, batch_size = ALL[name], 4096, 2
  tree = _tree(method, 8, 8)

  def verify(keys, proposal, logits, state):
    target_probs = logits_to_probs(logits, SamplingParams.make(batch_size, top_k=50, top_p=0.9))
    return _verification(method, tree)(keys, proposal, target_probs, state)

  with native.disabled():  # a call in C++ has no equations
    program = jax.make_jaxpr(verify)(*_arguments(method, tree, vocab_size, batch_size))
  equations = list(_equations(program.jaxpr))
  primitives = {equation.primitive.name for equation in equations}
  assert {'exp', 'reduce_sum', 'while', 'reduce_min'} <= primitives  # loops are entered
  sorts = [each for each in equations if each.primitive.name in ('sort', 'top_k', 'approx_top_k')]
  assert max((max(each.invars[0].aval.shape) for each in sorts), default=0) <= _MOST_SORTED.get(name, 0)
  assert not any(map(_is_in_low_precision, equations))
  largest = max(np.prod(out.aval.shape) for equation in equations for out in equation.outvars)
  # The laws themselves, or for a race what tells classes apart, [C, V], on an accelerator of several races at once; it
  # is part of a sum and never stored. V^2 and K^L would be 16 million per row.
  num_races = RACES_AT_ONCE if name == 'race_traversal' else 1
  assert largest <= batch_size * vocab_size * max(tree.num_nodes + 1, 64, num_races * Race().num_classes)


def test_what_must_not_be_there_would_be_seen():
  def products(x, precision=None):
    return jax.lax.fori_loop(0, 3, lambda _, y: jax.jit(lambda z: jnp.dot(z, z, precision=precision))(y), x)

  for precision, is_low in ((None, True), ('high', True), ('highest', False)):
    program = jax.make_jaxpr(functools.partial(products, precision=precision))(jnp.eye(2))
    equations = list(_equations(program.jaxpr))
    assert 'dot_general' in {equation.primitive.name for equation in equations}
    assert any(map(_is_in_low_precision, equations)) == is_low
  for sort in (jnp.sort, jax.jit(functools.partial(jax.lax.top_k, k=3))):
    names = {equation.primitive.name for equation in _equations(jax.make_jaxpr(sort)(jnp.zeros(8)).jaxpr)}
    assert names & {'sort', 'top_k'}


@functools.cache
def _compiled(name, batch_size):
  """The verification of rows with eight drafts of eight tokens from a vocabulary of 4096, compiled."""
  method = ALL[name]
  tree = _tree(method, 8, 8)
  return tree, jax.jit(_verification(method, tree)).lower(*_arguments(method, tree, 4096, batch_size)).compile()


@pytest.mark.slow
@pytest.mark.parametrize('name', list(ALL))
def test_no_second_copy_of_the_laws(name):
  """All that is made on the way takes less memory than the target's laws, which are there anyway."""
  batch_size = 4
  tree, compiled = _compiled(name, batch_size)
  analysis = compiled.memory_analysis()
  if analysis is None:
    pytest.skip('this backend does not say how much memory a program takes')
  assert analysis.temp_size_in_bytes < batch_size * (tree.num_nodes + 1) * 4096 * 4


@pytest.mark.slow
@pytest.mark.parametrize('name', list(ALL))
def test_rows_do_not_depend_on_their_batch(name):
  """On a vocabulary large enough for work that goes row by row; rows stop at different depths."""
  rng = np.random.default_rng(0)
  (tree, together), (_, alone) = _compiled(name, 4), _compiled(name, 1)
  # A draft that agrees with the target more and more from row to row.
  logits = rng.normal(size=(4, tree.num_nodes + 1, 4096)) * 2 - 1.1 * np.log1p(np.arange(4096))
  noise = rng.normal(size=(4, len(tree.parent_nodes), 4096)) * np.array([2.0, 1.0, 0.5, 0.1])[:, None, None]
  # Of chains each node has its own law; only the children of the root share a context.
  targets = np.float32(jax.nn.softmax(logits, axis=-1))
  drafts = np.float32(jax.nn.softmax(logits[:, tree.parent_nodes] + noise, axis=-1))
  tokens = np.zeros((4, tree.num_nodes), np.int32)
  for row, law in zip(tokens, drafts):
    for node in range(1, tree.num_nodes + 1):
      p = law[tree.parent_index[tree.parent_of[node]]].astype(np.float64)
      row[node - 1] = rng.choice(4096, p=p / p.sum())
  keys = jax.random.split(jax.random.key(5), (4, tree.max_depth + 1))
  state = jax.tree.map(lambda x: jnp.tile(x, (4, *[1] * x.ndim)), ALL[name].verifier.init_state(tree))
  arguments = keys, Proposal(jnp.asarray(tokens), jnp.asarray(drafts)), jnp.asarray(targets), state
  batched = together(*arguments)
  for row in range(4):
    single = alone(*jax.tree.map(lambda x: x[row : row + 1], arguments))  # noqa: B023
    # With these keys no uniform is within a float32 rounding of where a decision changes.
    assert int(single.next_token[0]) == int(batched.next_token[row])
    assert int(single.num_accepted[0]) == int(batched.num_accepted[row])
    np.testing.assert_array_equal(single.path[0], batched.path[row])
  if tree.num_nodes:
    assert len(np.unique(batched.num_accepted)) > 1
