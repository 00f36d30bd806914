"""`verify`: the decision which guesses of a batch are kept, as one pure function, for engines of any kind."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.kernels.layouts import in_rows
from spectr_jax.methods import DEFAULT_METHOD, Method, get_method
from spectr_jax.proposal import Proposal
from spectr_jax.tree import TokenTree
from spectr_jax.verifiers import Record, Verdict, Verifier


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verification:
  """What is kept of a batch of guesses.

  Attributes:
    tokens: int32 `[B, L + 1]`, the accepted guesses and the token after them; -1 from `lengths` on.
    lengths: int32 `[B]`, the number of these tokens, from 1 to L + 1: `num_accepted + 1`; 0 for a row that the method
      is not defined for.
    path: int32 `[B, L]`, the accepted nodes from depth 1 down, whose cache entries are kept; -1 from `num_accepted` on.
    num_accepted: int32 `[B]`, the number of accepted guesses.
    state: The rows' state for their next round; `()` for methods without one.
  """

  tokens: jax.Array
  lengths: jax.Array
  path: jax.Array
  num_accepted: jax.Array
  state: Any = ()


def verify(
  key: jax.Array,
  tree: TokenTree,
  tokens: jax.Array,
  draft_probs: jax.Array | None,
  target_probs: jax.Array,
  *,
  method: str | Method = DEFAULT_METHOD,
  parents: jax.Array | None = None,
  is_given: jax.Array | None = None,
  state: Any = None,
) -> Verification:
  """Decides which guesses are kept, and draws the token after them.

  The tokens that come out, followed by ordinary sampling from the target, have exactly the target's distribution, if
  the method is lossless and three rules are kept. Children are drawn by the method's `proposal_rule`, independently of
  each other unless it says otherwise, from the very distributions in `draft_probs`. The number of a node's children is
  fixed before the first of them is drawn. And keys are new in every round: a key may derive from the row and the number
  of tokens committed so far, never from the position of the token that it decides.

  It is a pure function for `jit`, `vmap`, `scan`, `shard_map` (with `check_vma=False`) and meshes. `tree` and `method`
  are static. Programs use the forms of functions that are fastest on the default platform, and give the same results on
  every other.

  Args:
    key: A typed key for all rows, `[B]` keys of the rows, or `[B, L + 1]` keys of their depths. With keys of its own a
      row does not depend on its batch.
    tree: The tree of guesses: N nodes, R of which have children, and depth L. It may be empty.
    tokens: int32 `[B, N]`, the tokens of nodes 1..N; -1 for nodes that a row does not use, below which it uses none.
      Methods whose `takes_grown` is False are defined for whole drafts: such a row gets no token, and length 0. A node
      that is missing because its distribution has too few tokens (`ProposalRule.may_run_out`) leaves a draft whole.
    draft_probs: `[B, R, V]`, the distributions after `tree.parent_nodes` that their children were drawn from; arbitrary
      where no child was drawn. None if all guesses are given.
    target_probs: `[B, N + 1, V]`, the target's distributions after the root, node 0, and after every node; arbitrary
      after nodes that a row does not use. `spectr_jax.logits_to_probs` computes both kinds.
    method: A name of `METHODS`, or a `Method`. One that is seed-exact needs keys `[B, L + 1]`, those that its guesses
      were drawn with.
    parents: int32 `[B, N]` where rows have trees of their own within `tree`, which then is a `TokenTree.slots`: the
      parent of every node, -1 for slots that a row does not use. None if all rows have the same tree.
    is_given: bool `[B, N]`, the guesses that were not drawn but chosen by a rule, such as a matched n-gram; None if all
      were drawn, or all given where `draft_probs` is None.
    state: The state that the last round returned, for rows that go on; None for rows that begin.
      Methods with `needs_constant_draft` are lossless over rounds only if the draft's distribution after a text is the
      same in all of them, which that of a head is not.

  Raises:
    ValueError: A shape or dtype is wrong, or the method does not cover this tree or such guesses.
  """
  method = get_method(method)
  batch_size = _check(method, tree, tokens, draft_probs, target_probs, parents, is_given)
  keys = _keys_of_depths(key, batch_size, tree, method)
  return _verify_rows(keys, tokens, draft_probs, target_probs, parents, is_given, state, tree=tree, method=method)


@functools.partial(jax.jit, static_argnames=('tree', 'method'))  # operation by operation it would take far longer
def _verify_rows(keys, tokens, draft_probs, target_probs, parents, is_given, state, *, tree, method) -> Verification:
  verifier, batch_size = method.verifier, tokens.shape[0]
  if draft_probs is None:
    draft_probs = jnp.zeros((batch_size, len(tree.parent_nodes), target_probs.shape[-1]), target_probs.dtype)
    is_given = jnp.ones(tokens.shape, bool) if is_given is None else is_given
  if state is None:
    own = verifier.init_state(tree)
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch_size, *jnp.shape(x))), own)
  proposal = Proposal(tokens.astype(jnp.int32), draft_probs, is_given=is_given, parents=parents)
  verdict, _ = decide_rows(verifier, keys, tree, proposal, target_probs, state)
  places, accepted = jnp.arange(tree.max_depth + 1), verdict.num_accepted[:, None]
  lengths, path = verdict.num_accepted + 1, jnp.where(places[:-1] < accepted, verdict.path, -1)
  if not method.takes_grown and tree.num_nodes:
    # Such a method is defined for whole drafts alone; a row that gets no token shows it, in a compiled program as well.
    may_lack = _may_lack(tree, proposal) if method.proposal_rule.may_run_out else False
    lengths = jnp.where(jnp.all((proposal.tokens >= 0) | may_lack, axis=1), lengths, 0)
  kept = jnp.where(places < lengths[:, None], emitted(proposal, verdict), -1)
  return Verification(kept, lengths, path, verdict.num_accepted, verdict.state)


def _may_lack(tree: TokenTree, proposal: Proposal) -> jax.Array:
  """bool `[B, N]`: nodes whose distribution has fewer tokens than siblings up to them, or whose parent is missing."""
  place = np.arange(1, tree.num_nodes + 1) - tree.first_child[tree.parent_of[1:]]  # among its siblings
  num_tokens = jnp.sum(proposal.probs > 0, axis=-1)[:, tree.parent_index[tree.parent_of[1:]]]
  has_parent = jnp.pad(proposal.tokens >= 0, ((0, 0), (1, 0)), constant_values=True)[:, tree.parent_of[1:]]
  return ~has_parent | (num_tokens <= place)


def decide_rows(
  verifier: Verifier,
  keys: jax.Array,
  tree: TokenTree,
  proposal: Proposal,
  target_probs: jax.Array,
  state: Any,
  *,
  is_explained: bool = False,
) -> tuple[Verdict, Record | None]:
  """The verifier's decision on every row, with keys `[B, L + 1]`; the proposal's `state` is None. See `Verifier`."""
  decide = verifier.explain if is_explained else lambda *row: (verifier.verify(*row), None)
  proposal = dataclasses.replace(proposal, probs=in_rows(proposal.probs))
  return jax.vmap(lambda key, row, target, own: decide(key, tree.of_row(row.parents), row, target, own))(
    keys, proposal, target_probs, state
  )


def emitted(proposal: Proposal, verdict: Verdict) -> jax.Array:
  """A round's tokens `[B, L + 1]`: the accepted guesses, then `next_token` in all remaining places."""
  guesses = jnp.take_along_axis(proposal.tokens, jnp.maximum(verdict.path - 1, 0), axis=1)
  guesses = jnp.pad(guesses, ((0, 0), (0, 1)))
  is_accepted = jnp.arange(guesses.shape[1]) < verdict.num_accepted[:, None]
  return jnp.where(is_accepted, guesses, verdict.next_token[:, None])


def _keys_of_depths(key: jax.Array, batch_size: int, tree: TokenTree, method: Method) -> jax.Array:
  """Keys `[B, L + 1]`, of a key for all rows, keys of rows, or these themselves."""
  depths = tree.max_depth + 1
  shapes = (), (batch_size,), (batch_size, depths)
  is_typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
  if not is_typed or key.shape not in shapes:
    raise ValueError(
      f'key must be a typed key of jax.random.key, [{batch_size}] of them for the rows, or [{batch_size}, {depths}] for'
      f' their depths; got {_described(key)}'
    )
  if method.is_seed_exact and key.ndim < 2:
    raise ValueError(
      f'{method.name} shares its randomness with drafting: give it the keys [{batch_size}, {depths}] that the guesses'
      ' were drawn with'
    )
  if key.ndim == 0:
    key = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch_size))
  if key.ndim == 1:
    key = jax.vmap(lambda row: jax.vmap(lambda depth: jax.random.fold_in(row, depth))(jnp.arange(depths)))(key)
  return key


def _described(array: Any) -> str:
  shape, dtype = getattr(array, 'shape', None), getattr(array, 'dtype', None)
  return type(array).__name__ if shape is None else f'{dtype}{list(shape)}'


def _check_array(name: str, array: Any, shape: tuple[int, ...], kind: Any, words: str) -> None:
  if getattr(array, 'shape', None) != shape or not jnp.issubdtype(array.dtype, kind):
    raise ValueError(f'{name} must be {words} {list(shape)}, got {_described(array)}')


def _check(method: Method, tree: TokenTree, tokens, draft_probs, target_probs, parents, is_given) -> int:
  """The number of rows, once everything static fits."""
  if not isinstance(tree, TokenTree):
    raise ValueError(f'tree must be a TokenTree, got {type(tree).__name__}')
  if tree.num_nodes or method.max_drafts != 0:
    method.tree_for(tree)
  if getattr(target_probs, 'ndim', 0) != 3:
    raise ValueError(f'target_probs must be [B, N + 1, V], got {_described(target_probs)}')
  batch_size, _, vocab_size = target_probs.shape
  num_nodes, num_laws = tree.num_nodes, len(tree.parent_nodes)
  floats = jnp.floating, 'float32 or wider'
  _check_array('target_probs', target_probs, (batch_size, num_nodes + 1, vocab_size), *floats)
  _check_array('tokens', tokens, (batch_size, num_nodes), jnp.integer, 'whole numbers')
  if draft_probs is not None:
    _check_array('draft_probs', draft_probs, (batch_size, num_laws, vocab_size), *floats)
    if draft_probs.dtype != target_probs.dtype:
      raise ValueError(f'draft_probs are {draft_probs.dtype}, target_probs {target_probs.dtype}: they must be the same')
  if target_probs.dtype.itemsize < 4:
    raise ValueError(
      f'distributions must be float32 or wider, got {target_probs.dtype}: rounded, they are not those drawn from'
    )
  if (parents is None) == tree.is_grown:
    raise ValueError('parents belong to a tree of TokenTree.slots, and only to such a tree')
  if parents is not None:
    _check_array('parents', parents, (batch_size, num_nodes), jnp.integer, 'whole numbers')
  if is_given is not None:
    _check_array('is_given', is_given, (batch_size, num_nodes), jnp.bool_, 'bool')
  if (draft_probs is None or is_given is not None) and num_nodes and not method.takes_given:
    raise ValueError(f'{method.name} takes no given guesses: it needs the draft_probs that all of them were drawn from')
  return batch_size
