"""Losslessness shown exactly: every draft and every decision, over several rounds in a row, in float64.

The functions enumerated are the library's own: `ProposalRule.probability` for what is drafted and `Verifier.law`,
built from the steps that the sampler takes, for what is kept.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.methods import Method
from spectr_jax.proposal import Proposal
from spectr_jax.testing.tables import ContextTables
from spectr_jax.tree import TokenTree


@functools.partial(jax.jit, static_argnames=('method', 'tree'))
def _round_law(draft_table, target_table, prefix, length, *, method: Method, tree: TokenTree):
  """Law of what one round emits after a committed prefix.

  Args:
    draft_table: `[C, V]`.
    target_table: `[C, V]`.
    prefix: The prefix as a number in base V.
    length: Its length.
    method: Static.
    tree: Static.

  Returns:
    For each depth d, `[V^d, V]`: probability of accepting exactly d tokens, these, and emitting the next one.
  """
  vocab_size = draft_table.shape[1]
  guesses = np.array(list(itertools.product(range(vocab_size), repeat=tree.num_nodes)), np.int32)
  state = method.verifier.init_state(tree)

  def one(tokens):
    spelled = [jnp.zeros((), jnp.int32)]  # tokens from the root to each node as a number in base V
    for node, parent in enumerate(tree.parents, start=1):
      spelled.append(spelled[parent] * vocab_size + tokens[node - 1])
    spelled = jnp.stack(spelled)
    depths = jnp.asarray(tree.depths)
    powers = vocab_size ** jnp.asarray(tree.depths)
    contexts = (vocab_size ** (length + depths) - 1) // (vocab_size - 1) + prefix * powers + spelled
    draft_probs, target_probs = draft_table[contexts[tree.parent_nodes]], target_table[contexts]
    drafted = jnp.ones((), draft_table.dtype)
    for law, parent in zip(draft_probs, tree.parent_nodes):
      first = tree.first_child[parent] - 1
      drafted *= method.proposal_rule.probability(law, tokens[first : first + tree.num_children[parent]])
    law = method.verifier.law(tree, Proposal(tokens, draft_probs), target_probs, state)
    # What cannot be drafted weighs nothing, whatever its law is.
    return spelled, jnp.where(drafted > 0, drafted * law, 0)

  spelled, weights = jax.vmap(one)(jnp.asarray(guesses))
  emitted = []
  for depth in range(tree.max_depth + 1):
    nodes = np.flatnonzero(tree.depths == depth)
    table = jnp.zeros((vocab_size**depth, vocab_size), weights.dtype)
    emitted.append(table.at[spelled[:, nodes]].add(weights[:, nodes]))
  return emitted


def joint_law(method: Method, tree: TokenTree, tables: ContextTables, num_tokens: int) -> np.ndarray:
  """The exact joint law of the first tokens a method emits, over as many rounds as they take.

  Args:
    method: A method whose verifier keeps no state between rounds.
    tree: The tree of every round; `V^N` drafts are enumerated.
    tables: Laws for contexts up to `num_tokens + L - 1` tokens.
    num_tokens: T.

  Returns:
    float64 `[V] * num_tokens`.

  Raises:
    ValueError: The tables are too small.
  """
  needed = num_tokens + tree.max_depth - 1
  if tables.max_length < needed:
    raise ValueError(f'tables must cover contexts of {needed} tokens, got {tables.max_length}')
  vocab_size = tables.vocab_size
  with jax.enable_x64(True):
    draft_table, target_table = jnp.asarray(tables.draft_probs), jnp.asarray(tables.target_probs)
    committed = [np.zeros(vocab_size**length) for length in range(num_tokens + 1)]
    committed[0][0] = 1
    for length in range(num_tokens):
      for prefix in np.flatnonzero(committed[length]):
        emitted = _round_law(draft_table, target_table, int(prefix), length, method=method, tree=tree)
        for depth, law in enumerate(emitted):
          law = committed[length][prefix] * np.asarray(law).reshape(-1)
          if length + depth + 1 > num_tokens:  # tokens beyond the last are summed out
            law = law.reshape(vocab_size ** (num_tokens - length), -1).sum(1)
          into = committed[min(length + depth + 1, num_tokens)]
          into[prefix * len(law) : (prefix + 1) * len(law)] += law
  return committed[num_tokens].reshape((vocab_size,) * num_tokens)


def enumeration_error(method: Method, tree: TokenTree, tables: ContextTables, num_tokens: int) -> float:
  """Largest difference between a method's joint law of the first tokens and the target's."""
  return float(np.abs(joint_law(method, tree, tables, num_tokens) - tables.joint_target_law(num_tokens)).max())


def expected_acceptance(method: Method, tree: TokenTree, tables: ContextTables) -> np.ndarray:
  """Probability that the first round accepts at least d tokens, exactly; float64 `[L]`."""
  with jax.enable_x64(True):
    emitted = _round_law(
      jnp.asarray(tables.draft_probs), jnp.asarray(tables.target_probs), 0, 0, method=method, tree=tree
    )
    stopped = np.array([float(law.sum()) for law in emitted])
  return 1 - np.cumsum(stopped)[:-1]
