"""Exact proofs of losslessness: every draft and every decision of several consecutive rounds is enumerated in float64.

The enumeration calls the library's own functions: `ProposalRule.probability` gives the probability of the drafts,
`Verifier.law`, built from the sampler's own steps, that of the decisions, and `Verifier.advance` the state between
rounds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.methods import Method
from spectr_jax.proposal import Proposal
from spectr_jax.testing.tables import ContextTables
from spectr_jax.tree import TokenTree

# The rule by which a row shapes its own tree: `(tokens [N], parents [N], probs [R, V], depth) -> parents [N]`. Only the
# parents of the slots at `depth + 1` are used; -1 marks an unused slot. The rule sees what is drawn down to `depth`:
# deeper tokens and parents are -1, and the distributions of deeper nodes are 0.
GrowFn = Callable[[jax.Array, jax.Array, jax.Array, int], jax.Array]

# The rule that gives tokens: `(text [T], length) -> tokens [N]`, -1 for nodes that do not exist. Its tokens at nodes
# that are drawn are not used. For the bounds of grown trees it returns `(tokens [N], parents [N])`.
GuessFn = Callable[[jax.Array, jax.Array], jax.Array | tuple[jax.Array, jax.Array]]

_LONGEST_TEXT = 8  # tokens that a `GuessFn` sees


def grown_parents(tree: TokenTree, grow_fn: GrowFn, tokens: jax.Array, probs_at: Callable) -> jax.Array:
  """The parents `[N]` that a growth rule assigns, depth by depth, if the slots hold these tokens `[N]`.

  `probs_at`, `parents [N] -> [R, V]`, gives the draft's distributions, which depend on the parents above them only.
  """
  depths, of_laws = jnp.asarray(tree.depths), jnp.asarray(tree.depths[tree.parent_nodes])
  parents = jnp.full(tree.num_nodes, -1, jnp.int32)
  for depth in range(tree.max_depth):
    seen = jnp.where(depths[1:] <= depth, tokens, -1)
    probs = jnp.where((of_laws <= depth)[:, None], probs_at(parents), 0)
    parents = jnp.where(depths[1:] == depth + 1, grow_fn(seen, parents, probs, depth), parents)
  return parents


def _text(prefix, length, vocab_size: int):
  """The tokens `[_LONGEST_TEXT]` of a prefix given as a number in base V; entries from `length` on are arbitrary."""
  places = jnp.maximum(length - 1 - jnp.arange(_LONGEST_TEXT), 0)
  return (prefix // vocab_size**places) % vocab_size


@functools.partial(jax.jit, static_argnames=('method', 'tree', 'grow_fn', 'guess_fn', 'drawn_nodes'))
def _all_rounds(
  draft_table,
  target_table,
  prefix,
  length,
  state,
  *,
  method: Method,
  tree: TokenTree,
  grow_fn=None,
  guess_fn=None,
  drawn_nodes=(),
):
  """All outcomes of one round after a committed prefix, for each of the G ways to fill the tree.

  Tables are `[C, V]`; `prefix` is a number in base V. Returns the tokens down to each node, such numbers `[G, N + 1]`;
  the joint probability of these guesses, of stopping at a node and emitting a token, `[G, N + 1, V]`; the states
  afterwards, `[G, N + 1, V, ...]`; and the most by which the verifier's law fails to be a distribution.
  """
  vocab_size = draft_table.shape[1]
  lowest = -1 if method.proposal_rule.may_run_out or tree.is_grown else 0
  drawn_places = np.arange(tree.num_nodes) if guess_fn is None else np.asarray(drawn_nodes, np.int32) - 1
  drawn = np.array(list(itertools.product(range(lowest, vocab_size), repeat=len(drawn_places))), np.int32)
  is_drawn = np.isin(np.arange(tree.num_nodes), drawn_places)
  given = 0 if guess_fn is None else guess_fn(_text(prefix, length, vocab_size), length)
  given, given_parents = given if isinstance(given, tuple) else (given, None)
  guesses = jnp.broadcast_to(jnp.asarray(given, jnp.int32), (len(drawn), tree.num_nodes)).at[:, drawn_places].set(drawn)

  def contexts_of(tokens, parents):
    """The tokens down to each node as a number, and the number of the node's context; `[N + 1]` each."""
    spelled = jnp.zeros(tree.num_nodes + 1, jnp.int32)
    for node in range(1, tree.num_nodes + 1):
      above = spelled[parents[node - 1]]
      spelled = spelled.at[node].set(above * vocab_size + jnp.maximum(tokens[node - 1], 0))
    depths = jnp.asarray(tree.depths)
    first = (vocab_size ** (length + depths) - 1) // (vocab_size - 1)
    return spelled, first + prefix * vocab_size**depths + spelled

  def chance(tokens, parents, draft_probs):
    """The probability that these tokens are drafted."""
    drafted = jnp.ones((), draft_table.dtype)
    if guess_fn is not None:  # only independent children are drawn beside given ones
      own = draft_probs[jnp.asarray(tree.parent_index)[parents], tokens]
      return jnp.prod(jnp.where(is_drawn, own, 1))
    if grow_fn is not None:  # children are drawn independently; an unused slot holds -1
      own = draft_probs[jnp.asarray(tree.parent_index)[parents], tokens]
      return jnp.prod(jnp.where(parents < 0, tokens < 0, jnp.where(tokens < 0, 0, own)))
    for law, parent in zip(draft_probs, tree.parent_nodes):
      first = tree.first_child[parent] - 1
      drafted *= method.proposal_rule.probability(law, tokens[first : first + tree.num_children[parent]])
    return drafted

  def one(tokens):
    def probs_at(parents):
      return draft_table[contexts_of(tokens, parents)[1][tree.parent_nodes]]

    parents = given_parents if grow_fn is None else grown_parents(tree, grow_fn, tokens, probs_at)
    is_given = None if guess_fn is None else (tokens >= 0) & ~is_drawn
    row_tree, own_parents = tree.of_row(parents), parents
    parents = jnp.asarray(tree.parents, jnp.int32) if parents is None else parents
    spelled, contexts = contexts_of(tokens, row_tree.parent_of[1:])
    draft_probs, target_probs = draft_table[contexts[tree.parent_nodes]], target_table[contexts]
    drafted = chance(tokens, parents, draft_probs)
    proposal = Proposal(tokens, draft_probs, None, own_parents, is_given)
    law = method.verifier.law(row_tree, proposal, target_probs, state)

    def advance(node, token):
      return method.verifier.advance(row_tree, proposal, target_probs, state, node, token)

    after = jax.vmap(jax.vmap(advance, (None, 0)), (0, None))(jnp.arange(tree.num_nodes + 1), jnp.arange(vocab_size))
    # Guesses that cannot be drafted have weight 0, whatever the verifier's law is for them.
    is_possible = drafted > 0
    flaw = jnp.maximum(-jnp.min(law), jnp.abs(jnp.sum(law) - 1))
    return spelled, jnp.where(is_possible, drafted * law, 0), after, jnp.where(is_possible, flaw, 0)

  # The guesses are split into equal parts that fit into a CPU's cache.
  num_choices = vocab_size - lowest
  at_a_time = max(num_choices**count for count in range(tree.num_nodes + 1) if num_choices**count <= 1024)
  spelled, weights, after, flaws = jax.lax.map(one, guesses, batch_size=min(at_a_time, len(guesses)))
  return spelled, weights, after, jnp.max(flaws)


@functools.partial(jax.jit, static_argnames=('method', 'tree', 'grow_fn', 'guess_fn', 'drawn_nodes'))
def _round_law(draft_table, target_table, prefix, length, state, *, tree: TokenTree, **static):
  """The distribution of a round's output: per depth d `[V^d, V]`, of d accepted tokens and the next; and its flaw."""
  vocab_size = draft_table.shape[1]
  spelled, weights, _, flaw = _all_rounds(draft_table, target_table, prefix, length, state, tree=tree, **static)
  emitted = []
  for depth in range(tree.max_depth + 1):
    nodes = np.flatnonzero(tree.depths == depth)
    table = jnp.zeros((vocab_size**depth, vocab_size), weights.dtype)
    emitted.append(table.at[spelled[:, nodes]].add(weights[:, nodes]))
  return emitted, flaw


def _outcomes(draft_table, target_table, prefix, length, state, *, tree: TokenTree, **static):
  """A round's outcomes: number of tokens, the tokens as a number in base V, probability, next state; and the flaw."""
  vocab_size = draft_table.shape[1]
  arguments = draft_table, target_table, prefix, length, state
  if not jax.tree.leaves(state):
    laws, flaw = jax.device_get(_round_law(*arguments, tree=tree, **static))
    outcomes = []
    for depth, law in enumerate(laws):
      law = law.reshape(-1)
      outcomes += [(depth + 1, int(emitted), law[emitted], state) for emitted in np.flatnonzero(law)]
    return outcomes, float(flaw)
  spelled, weights, after, flaw = jax.device_get(_all_rounds(*arguments, tree=tree, **static))
  emitted = spelled[:, :, None] * vocab_size + np.arange(vocab_size)
  depths = np.broadcast_to(tree.depths[:, None], emitted.shape)
  leaves, structure = jax.tree.flatten(after)
  is_possible = weights > 0
  weights = weights[is_possible]
  columns = [depths[is_possible] + 1, emitted[is_possible]]
  states = [leaf[is_possible] for leaf in leaves]
  # Equal states can come from sums in different orders, so states that agree to ten digits count as equal.
  columns += [np.round(state.reshape(len(weights), -1), 10).T.astype(np.float64) for state in states]
  _, first, group = np.unique(np.vstack(columns), axis=1, return_index=True, return_inverse=True)
  totals = np.bincount(group.reshape(-1), weights)
  outcomes = [
    (
      int(columns[0][index]),
      int(columns[1][index]),
      total,
      jax.tree.unflatten(structure, [state[index] for state in states]),
    )
    for index, total in zip(first, totals)
  ]
  return outcomes, float(flaw)


def joint_law(
  method: Method,
  tree: TokenTree,
  tables: ContextTables,
  num_tokens: int,
  *,
  grow_fn: GrowFn | None = None,
  guess_fn: GuessFn | None = None,
  drawn_nodes: tuple[int, ...] = (),
) -> np.ndarray:
  """The exact joint distribution of the first tokens that a method emits, over as many rounds as they take.

  Args:
    tree: The tree of every round, or the bounds of grown trees. `V^N` drafts are enumerated.
    tables: Distributions for contexts up to `num_tokens + L - 1` tokens, else ValueError.
    grow_fn: The rule by which a row shapes its own tree, if the tree is grown.
    guess_fn: The rule that gives tokens, for texts of up to 8 tokens; None for drawn tokens.
    drawn_nodes: Nodes whose tokens are drawn, independently, where `guess_fn` gives the others.

  Returns:
    float64 `[V] * num_tokens`.
  """
  shape = {'grow_fn': grow_fn, 'guess_fn': guess_fn, 'drawn_nodes': drawn_nodes}
  return _joint_law(method, tree, tables, num_tokens, **shape)[0]


def _joint_law(
  method: Method, tree: TokenTree, tables: ContextTables, num_tokens: int, **shape
) -> tuple[np.ndarray, float]:
  """`joint_law`, and the largest amount by which the verifier's law failed to be a distribution in any round."""
  needed = num_tokens + tree.max_depth - 1
  if tables.max_length < needed:
    raise ValueError(f'tables must cover contexts of {needed} tokens, got {tables.max_length}')
  vocab_size = tables.vocab_size
  finished, flaws = np.zeros(vocab_size**num_tokens), [0.0]
  with jax.enable_x64(True):
    draft_table, target_table = jnp.asarray(tables.draft_probs), jnp.asarray(tables.target_probs)
    start = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype.kind == 'f' else x, _start(method, tree))
    # Texts are grouped by length, prefix and state, since nothing else influences what follows.
    waiting = [{} for _ in range(num_tokens)]
    waiting[0][0, _fingerprint(start)] = 1.0, start
    for length in range(num_tokens):
      for (prefix, _), (probability, state) in waiting[length].items():
        arguments = draft_table, target_table, prefix, length, state
        outcomes, flaw = _outcomes(*arguments, method=method, tree=tree, **shape)
        flaws.append(flaw)
        for count, emitted, share, after in outcomes:
          end = length + count
          text = prefix * vocab_size**count + emitted
          if end >= num_tokens:  # tokens beyond the last are summed out
            finished[text // vocab_size ** (end - num_tokens)] += probability * share
            continue
          key = text, _fingerprint(after)
          so_far, _ = waiting[end].get(key, (0.0, after))
          waiting[end][key] = so_far + probability * share, after
  # numpy's maximum, unlike Python's, keeps a NaN.
  return finished.reshape((vocab_size,) * num_tokens), float(np.max(flaws))


def _start(method: Method, tree: TokenTree):
  return jax.tree.map(np.asarray, method.verifier.init_state(tree))


def _fingerprint(state) -> bytes:
  return b''.join(np.round(leaf, 10).tobytes() for leaf in jax.tree.leaves(state))


def enumeration_error(
  method: Method,
  tree: TokenTree,
  tables: ContextTables,
  num_tokens: int,
  *,
  grow_fn: GrowFn | None = None,
  guess_fn: GuessFn | None = None,
  drawn_nodes: tuple[int, ...] = (),
) -> float:
  """The largest difference between a method's joint distribution of the first tokens and the target's.

  A verifier's law of a round, given the guesses, must be a distribution. So negative entries and a deviation of its
  sum from 1 count as a difference as well. Otherwise negative weights, which no draw can have, could hide an acceptance
  probability above 1 in the average over the guesses. Arguments are those of `joint_law`.
  """
  shape = {'grow_fn': grow_fn, 'guess_fn': guess_fn, 'drawn_nodes': drawn_nodes}
  law, flaw = _joint_law(method, tree, tables, num_tokens, **shape)
  return float(np.maximum(np.abs(law - tables.joint_target_law(num_tokens)).max(), flaw))


def expected_acceptance(method: Method, tree: TokenTree, tables: ContextTables) -> np.ndarray:
  """The exact probability that the first round accepts at least d tokens.

  It is float64 `[L]`, for a tree of depth L and tables of contexts up to L tokens; entry d - 1 is that of d tokens.
  """
  with jax.enable_x64(True):
    start = _start(method, tree)
    emitted, _ = _round_law(
      jnp.asarray(tables.draft_probs), jnp.asarray(tables.target_probs), 0, 0, start, method=method, tree=tree
    )
    stopped = np.array([float(law.sum()) for law in emitted])
  return 1 - np.cumsum(stopped)[:-1]


def enumerated_rejections(method: Method, num_drafts: int, tables: ContextTables, num_tokens: int) -> float:
  """The exact expected number of rejections in the first T tokens, with lookahead to the horizon.

  A round rejects a token of the text if it accepts fewer tokens than the text has left.

  Args:
    method: One that keeps no state between rounds, else ValueError.
    num_drafts: M, drafts of T tokens per round. `V^(M T)` combinations are enumerated.
    tables: Distributions for contexts up to `2 T - 1` tokens, else ValueError.
    num_tokens: T.
  """
  tree = TokenTree.chains(num_drafts, num_tokens)
  needed = 2 * num_tokens - 1
  if tables.max_length < needed:
    raise ValueError(f'tables must cover contexts of {needed} tokens, got {tables.max_length}')
  start = _start(method, tree)
  if jax.tree.leaves(start):
    raise ValueError(f'{method.name} keeps state between rounds; only methods without are enumerated here')
  vocab_size = tables.vocab_size
  with jax.enable_x64(True):
    draft_table, target_table = jnp.asarray(tables.draft_probs), jnp.asarray(tables.target_probs)
    # The probability that a round starts after each text. Every round except the first starts after a correction.
    starts = [np.zeros(vocab_size**length) for length in range(num_tokens + 1)]
    starts[0][0] = 1
    for length in range(num_tokens):
      for prefix in np.flatnonzero(starts[length]):
        emitted, _ = _round_law(draft_table, target_table, prefix, length, start, method=method, tree=tree)
        for depth, law in enumerate(emitted[: num_tokens - length]):
          first = prefix * vocab_size ** (depth + 1)
          starts[length + depth + 1][first : first + law.size] += starts[length][prefix] * np.asarray(law).reshape(-1)
  return float(sum(reached.sum() for reached in starts[1:]))
