"""The shapes of what a method returns, by tracing alone: seconds before any proof compiles or runs."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import checked_result
from spectr_jax.methods import Method
from spectr_jax.proposal import Proposal
from spectr_jax.tree import TokenTree
from spectr_jax.verifiers import Verdict

_VOCAB_SIZE = 11  # the size of no other axis


def _check_array(what: str, found: Any, shape: tuple[int, ...]) -> None:
  if not isinstance(found, jax.Array) or found.shape != shape:
    own = list(found.shape) if isinstance(found, jax.Array) else type(found).__name__
    raise ValueError(f'{what} must return an array {list(shape)}, got {own}')


def _trace(method: Method, tree: TokenTree) -> None:
  """Calls a method's rule and verifier on one row of a tree."""
  rule, verifier = method.proposal_rule, method.verifier
  keys = jax.random.split(jax.random.key(0), tree.max_depth + 1)
  laws = jnp.full((tree.num_nodes + 1, _VOCAB_SIZE), 1 / _VOCAB_SIZE, jnp.float32)
  tokens = jnp.zeros(tree.num_nodes, jnp.int32)
  for node in tree.parent_nodes:
    count, first = int(tree.num_children[node]), int(tree.first_child[node])
    drawn = rule(keys[0], laws[0], jnp.int32(first), count)
    _check_array(f'{type(rule).__name__}', drawn, (count,))
    _check_array(f'{type(rule).__name__}.probability', rule.probability(laws[0], drawn), ())
    tokens = tokens.at[first - 1 : first - 1 + count].set(drawn)
  row = tree, Proposal(tokens, laws[: len(tree.parent_nodes)]), laws, verifier.init_state(tree)
  verdict = verifier.verify(keys, *row)
  checked_result(verifier, verdict, Verdict, path=(tree.max_depth,), num_accepted=(), next_token=())
  for what, state in (('verify', verdict.state), ('advance', verifier.advance(*row, *2 * [jnp.int32(0)]))):
    own, begun = (jax.tree.map(jnp.shape, each) for each in (state, row[-1]))
    if own != begun:
      raise ValueError(f'{type(verifier).__name__}.{what} must return a state of the shapes {begun}, got {own}')
  if not method.is_seed_exact:  # whose law is no finite sum
    _check_array(f'{type(verifier).__name__}.law', verifier.law(*row), laws.shape)


def check_shapes(method: Method, trees: Iterable[TokenTree]) -> None:
  """Compares the shapes of what a method's rule and verifier return with what they must return.

  Args:
    method: The method.
    trees: Trees that it is defined for.

  Raises:
    ValueError: A type or a shape differs.
  """
  for tree in trees:
    jax.eval_shape(functools.partial(_trace, method, tree))
