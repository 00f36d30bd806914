"""Race traversal: races give candidates credit, and every branch of the tree is tried, leaves first."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.couplings.coupling import ratio
from spectr_jax.couplings.explanation import Explanation
from spectr_jax.couplings.given import with_given
from spectr_jax.couplings.race import Race
from spectr_jax.kernels.on_demand import map_needed
from spectr_jax.kernels.token_sums import sums_of_rows
from spectr_jax.kernels.tree_steps import first_kept, race_credits
from spectr_jax.proposal import Independent, Proposal
from spectr_jax.sampling import draw, positive_part
from spectr_jax.tree import Tree
from spectr_jax.verifiers.contexts import Contexts, contexts_of, slots_of
from spectr_jax.verifiers.record import Decisions, Record
from spectr_jax.verifiers.verifier import RecordedVerifier, Verdict, stop_at

# The number of races that an accelerator solves together; chains rarely have more contexts with several candidates.
RACES_AT_ONCE = 8
# Shares are compared in steps of 1 over this. Finer steps keep no more tokens; the bounds between two steps, such as
# 1.5/256, are no shares k/n of fewer than 512 candidates, so rounding never decides between two of these.
_ORDER_STEPS = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _GivenRows:
  """The given candidates by row of `Proposal.probs`; their shares are in units of q.

  Attributes:
    tokens: int32 `[R, W]`, the given candidates of each row; V elsewhere.
    scale: `[R]`, pt(x) / q(x) of each of them.
    is_alone: bool `[R]`, rows whose candidates are all given.
  """

  tokens: jax.Array
  scale: jax.Array
  is_alone: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Races:
  """The results of the races, before any acceptance; entries of slots that stand for no context are arbitrary.

  Attributes:
    shares: `[L, W]`, s of the contexts from depth 1 on: the probability that the race above picks their token.
    log_ratios: `[L, W]`, log of q(x) / pt(x) of that token.
    scale: `[R, C]`, the distributions pt by row of `Proposal.probs`, as `Race.picked_probs` takes them.
    num_contestants: int32 `[R]`, the drawn candidates after the contexts that the nodes of these rows stand for, and
      one more if any is given; 0 for nodes that stand for none.
    given: The given candidates, or None if no row has any.
    is_before: bool `[L, W, W]`, at `[d, j, k]` whether context k of depth d + 1 is visited before its sibling j.
    is_sibling: bool `[L, W, W]`, whether k and j follow the same context; each is its own sibling.
  """

  shares: jax.Array
  log_ratios: jax.Array
  scale: jax.Array
  num_contestants: jax.Array
  is_before: jax.Array
  is_sibling: jax.Array
  given: _GivenRows | None


@dataclasses.dataclass(frozen=True)
class RaceTraversal(RecordedVerifier):
  """Race traversal verification: lossless on any tree with i.i.d. children; beyond the papers.

  Nodes that spell the same are one *context*, whose n candidates are the children of all of them. At a context c with
  distributions p and q, a race gives each token x the share s(x), the probability that it would pick x, and pt is the
  distribution of the picked token. Every context has a credit P, 1 at the root. Below c, for the distinct candidates in
  ascending order of s, rounded to 1/256,

      m(x) = s(x) min(1, P(c) q(x) / pt(x)),
      P(cx) = m(x) / (1 - sum of m over the candidates before x).

  Contexts are visited in this order, children before parents, and the first with u < h is kept, where

      S(c) = sum over y of [P(c) q(y) - pt(y)]+,    h(c) = S(c) / (S(c) + 1 - P(c)).

  The next token comes from [P(c) q - pt]+. A context without candidates has h = P and the residual q; the root has
  h = 1.

  It is lossless because a visit of c with credit P keeps a context from c on with probability P, and then emits tokens
  that follow q. The proof is by induction. Candidate x is reached with probability 1 - sum of earlier m, so the mass
  through x is m(x), which averages to min(pt, P q) over the candidates. Nothing below c is kept with probability
  1 - sum of min(pt, P q) = S + 1 - P, so c itself adds S times the residual. The sum of both is P q. The order enters
  nowhere: it may be any function of the candidates of c and of the distributions up to there. It must not depend on the
  uniforms or on deeper tokens, since then P would depend on what it decides about.

  Where p and q are equal, all candidates have equal shares up to rounding. In steps of 1/256 rounding decides no order,
  so a row's order does not depend on its batch.

  Given candidates stand beside the drawn ones as in `Race`: pt is then the distribution of what that race picks, given
  candidates included, and the proof is the same. Where all candidates are given, pt is q on them, divided by its mass.

  With one draft it is block verification; with drafts of one token it is the race with the maximal coupling.

  A record has the decisions context by context as visited; they are named `keep`, and the first that is kept is the
  last.

  Attributes:
    race: The race at contexts with several candidates.
  """

  race: Race = Race()
  proposal_rules = (Independent,)
  takes_given = True
  takes_mixed = True
  takes_grown = True
  tries_every_branch = True
  explanation = Explanation(
    'Nodes that spell the same are one. A weighted race would pick each candidate with probability s; p̃ is the'
    ' distribution of what it picks. The root has credit P = 1. A candidate takes m = s · min(1, P · q/p̃) of the credit'
    ' above it, and its own is P = m/(1 − Σ m of its siblings before it), in ascending order of s. Every branch is'
    ' tried, leaves first, and the first node with u < h is kept. At a leaf h = P, at the root h = 1, elsewhere'
    ' h = S/(S + 1 − P) with S = Σ [Pq − p̃]₊ at the next position.',
    '[Pq − p̃]₊',
    'The candidates of a position share a credit, the chance that one of them is kept; those that would win a weighted'
    ' race more often get more of it. Every branch is tried from its leaf up, and the first node whose random'
    ' number falls below its chance is kept with the path to it.',
  )

  # The contexts and their races depend on the guesses and distributions alone.

  def _contexts(self, tree: Tree, proposal: Proposal) -> Contexts:
    return contexts_of(tree, proposal)

  def _order(self, shares, is_sibling):
    """bool `[L, W, W]`: whether k comes before j: the smaller rounded share first, of equal ones the lower slot."""
    place, shares = jnp.arange(shares.shape[-1]), jnp.round(_ORDER_STEPS * shares)
    mine, other = shares[..., :, None], shares[..., None, :]
    return is_sibling & ((other < mine) | ((other == mine) & (place < place[:, None])))

  def _races(self, tree: Tree, proposal: Proposal, target_probs, contexts: Contexts) -> _Races:
    slots, dtype = slots_of(tree), target_probs.dtype
    guesses = jnp.where(slots.is_node, proposal.tokens[slots.nodes - 1], 0)
    is_valid = contexts.is_candidate[slots.of_laws]
    by_row = guesses[slots.of_laws[0] + 1]
    given, is_given, of_rows, candidates = None, None, None, (by_row, is_valid)
    race = self.race if proposal.is_given is None else self.race.beside_given()
    # A single candidate is always picked, so the picked token has the draft's distribution.
    alone = is_valid.astype(dtype), jnp.ones((len(is_valid), race.num_classes), dtype)
    number = contexts.num_candidates
    if proposal.is_given is not None:
      is_given = jnp.where(slots.is_node, proposal.is_given[slots.nodes - 1], False)
      of_rows = is_valid & is_given[slots.of_laws[0] + 1]
      candidates = (*candidates, of_rows)
      own_probs = jax.vmap(lambda node, tokens: target_probs[node, tokens])(tree.parent_nodes, jnp.maximum(by_row, 0))
      alone = jax.vmap(race.without_race)(own_probs, by_row, is_valid, of_rows)
      is_there = contexts.is_candidate & is_given[1:, None, :]
      number += jnp.any(is_there, axis=-1) - jnp.sum(is_there, axis=-1)
    own = jnp.where(contexts.stands[slots.of_laws], number[slots.of_laws], 0)
    laws = _law_rows(tree, proposal, target_probs)
    with jax.named_scope('races'):
      picks, scale = map_needed(race.select, own > 1, alone, laws, candidates, at_once=RACES_AT_ONCE, is_heavy=True)
    if of_rows is not None:
      tokens = jnp.where(of_rows, by_row, target_probs.shape[1])
      given = _GivenRows(tokens, scale[:, 0], (own == 1) & jnp.any(of_rows, axis=-1))
      scale = scale[:, 1:]
    # By the slot of the candidate: the row of the context above, its own share, and the share of its token.
    above, stands = contexts.above[1:], contexts.stands[1:]
    rows = jnp.take_along_axis(jnp.asarray(slots.laws[:-1]), above, axis=1)
    width = above.shape[1]
    own_share = picks[rows, jnp.arange(width)]
    shares = jnp.sum(jnp.where(contexts.is_same[1:], own_share[:, None, :], 0), axis=-1)
    shares = jnp.where(stands, shares, 0)
    tokens = jnp.maximum(guesses[1:], 0)
    p = proposal.probs[rows, tokens]
    q = target_probs[jnp.take_along_axis(jnp.asarray(slots.nodes[:-1]), above, axis=1), tokens]
    picked = jax.vmap(jax.vmap(race.picked_probs))(p, q, scale[rows])
    if given is not None and is_given is not None:
      is_member = jnp.any(contexts.is_same[1:] & is_given[1:, None, :], axis=-1)
      picked = jnp.where(is_member, q * given.scale[rows], picked)
    # Bounded above, so that a credit of 0, whose logarithm is -inf, stays 0.
    log_ratios = jnp.log(jnp.minimum(ratio(q, picked), jnp.finfo(dtype).max))
    is_sibling = (above[:, :, None] == above[:, None, :]) & stands[:, :, None] & stands[:, None, :]
    return _Races(shares, log_ratios, scale, own, self._order(shares, is_sibling), is_sibling, given)

  def _picked_probs(self, p, q, scale, given):
    """pt `[V]` of a row, with its entries at given candidates; `given` is the row's, or None."""
    if given is None:
      return self.race.picked_probs(p, q, scale)
    picked = self.race.beside_given().picked_probs(p, q, scale)
    return with_given(picked, q, given.tokens, given.scale)

  # The credits, and the acceptances that follow from them.

  def _log_credits(self, contexts: Contexts, races: _Races):
    """log P by slot, `[L + 1, W]`; in logarithms, since products of many ratios underflow."""
    return race_credits(contexts.is_candidate, races.is_before, races.is_sibling, races.shares, races.log_ratios)

  def _excess(self, tree: Tree, proposal: Proposal, target_probs, races: _Races, log_credits, is_open):
    """S by row of `Proposal.probs`, `[R]`; 0 where no candidate follows, or where `is_open` `[R]` is False."""
    laws = _law_rows(tree, proposal, target_probs)
    credits = jnp.exp(log_credits)
    nothing = jnp.zeros_like(credits)

    def of_one(p, q, credit):
      (excess,) = _excess_of_token([credit])([p, q])
      return jnp.sum(excess)

    def of_all(probs, target_probs, credits):
      rows = [places for _, places in laws]
      return sums_of_rows(_excess_of_token, (probs, target_probs), rows, credits[:, None])

    def of_several(p, q, credit, scale, *given):
      given = _GivenRows(*given) if given else None
      return jnp.sum(positive_part(credit * q - self._picked_probs(p, q, scale, given)))

    number, given, items = races.num_contestants, races.given, (credits, races.scale)
    is_single = is_open & (number == 1)
    if given is not None:
      items += given.tokens, given.scale, given.is_alone
      # Where all candidates are given, pt is q / q(D) on them, and 0 elsewhere.
      excess = credits * (1 - ratio(jnp.ones_like(credits), given.scale))
      nothing = jnp.where(is_open & given.is_alone, excess, nothing)
      is_single &= ~given.is_alone
    with jax.named_scope('excess'):
      alone = map_needed(of_one, is_single, nothing, laws, (credits,), all_fn=of_all)
      return map_needed(of_several, is_open & (number > 1), alone, laws, items, at_once=RACES_AT_ONCE)

  def _keep_probs(self, tree: Tree, proposal: Proposal, target_probs, contexts, races, log_credits, uniforms=None):
    """h by slot, `[L + 1, W]`; given uniforms, 0 for contexts with u >= P, which cannot be kept since h <= P."""
    slots = slots_of(tree)
    is_open = contexts.stands
    if uniforms is not None:
      is_open &= (uniforms < jnp.exp(log_credits)) | (jnp.arange(len(log_credits)) == 0)[:, None]
    own = log_credits[slots.of_laws]
    is_needed = is_open[slots.of_laws] & (slots.of_laws[0] > 0)
    excess = self._excess(tree, proposal, target_probs, races, own, is_needed)
    total = excess - jnp.expm1(own)
    # With P = 1 and no excess, draft and target agree.
    is_agreed = total <= 0
    inner = jnp.where(is_agreed, 1, excess / jnp.where(is_agreed, 1, total))
    rows = jnp.asarray(slots.laws)
    is_leaf = (rows < 0) | (races.num_contestants[rows] == 0)
    probs = jnp.where(is_leaf, jnp.exp(log_credits), jnp.minimum(inner[rows], jnp.exp(log_credits)))
    probs = probs.at[0, 0].set(1)
    return jnp.where(is_open, probs, 0)

  def _weights(self, tree: Tree, proposal: Proposal, target_probs, races: _Races, log_credit, node):
    """Weights `[V]` of the next token after the context that `node` stands for."""
    row = jnp.asarray(tree.law_index)[node]
    q = target_probs[node]
    given = jax.tree.map(lambda x: x[row], races.given)
    picked = self._picked_probs(proposal.probs[row], q, races.scale[row], given)
    residual = positive_part(jnp.exp(log_credit) * q - picked)
    is_left = (row >= 0) & (races.num_contestants[row] > 0) & (jnp.sum(residual) > 0)
    return jnp.where(is_left, residual, q)

  def _first_kept(self, tree: Tree, contexts: Contexts, races: _Races, is_kept):
    """The node of the first context in the order of visits that is kept; int32 scalar."""
    return first_kept(contexts.is_child, races.is_before, is_kept, jnp.asarray(slots_of(tree).nodes, jnp.int32))

  def _arrivals(self, contexts: Contexts, races: _Races, keep_probs):
    """The probability that each context is visited, that is, that all before it are rejected, by slot `[L + 1, W]`."""

    def shallower(nothing_from, depth):
      """The probability that nothing is kept from each context on, given that all before were rejected."""
      is_child, keep_probs = depth
      below = jnp.prod(jnp.where(is_child, nothing_from, 1), axis=-1)
      nothing_from = (1 - keep_probs) * below
      return nothing_from, (nothing_from, below)

    ones = jnp.ones_like(keep_probs[-1])
    leaves = 1 - keep_probs[-1]
    _, (nothing_from, below) = jax.lax.scan(shallower, leaves, (contexts.is_child, keep_probs[:-1]), reverse=True)
    nothing_from = jnp.concatenate([nothing_from, leaves[None]])

    def deeper(arrive, depth):
      above, is_before, nothing_from = depth
      arrive = arrive[above] * jnp.prod(jnp.where(is_before, nothing_from, 1), axis=-1)
      return arrive, arrive

    _, arrive = jax.lax.scan(deeper, ones, (contexts.above[1:], races.is_before, nothing_from[1:]))
    return jnp.concatenate([ones[None], arrive]) * jnp.concatenate([below, ones[None]])

  def _steps(self, tree: Tree, proposal: Proposal, target_probs):
    contexts = self._contexts(tree, proposal)
    races = self._races(tree, proposal, target_probs, contexts)
    return contexts, races, self._log_credits(contexts, races)

  def _credit_of(self, tree: Tree, log_credits, node):
    """log P of the context that `node` stands for."""
    return log_credits[jnp.asarray(tree.depths)[node], jnp.asarray(slots_of(tree).of_nodes)[node]]

  def _uniforms(self, keys, tree: Tree, dtype):
    """Uniforms `[N + 2]`: one for every node, and one for the next token."""
    return jax.random.uniform(keys[0], (tree.num_nodes + 2,), dtype)

  def without_candidates(self, keys, tree: Tree, target_probs, state) -> Verdict:
    return Verdict.at(
      tree, jnp.zeros((), jnp.int32), draw(self._uniforms(keys, tree, target_probs.dtype)[-1], target_probs), state
    )

  def decide(
    self, keys, tree: Tree, proposal: Proposal, target_probs, state, *, is_explained: bool
  ) -> tuple[Verdict, Record]:
    uniforms = self._uniforms(keys, tree, target_probs.dtype)
    if tree.num_nodes == 0:
      return stop_at(tree, 0, target_probs[0], uniforms[-1], state, {})
    contexts, races, log_credits = self._steps(tree, proposal, target_probs)
    own = uniforms[slots_of(tree).nodes]
    # An explanation shows every h; a verdict needs only those that its uniforms do not exclude.
    laws = tree, proposal, target_probs
    keep_probs = self._keep_probs(*laws, contexts, races, log_credits, None if is_explained else own)
    node = self._first_kept(tree, contexts, races, own < keep_probs)
    weights = self._weights(*laws, races, self._credit_of(tree, log_credits, node), node)
    decisions = {}
    if is_explained:
      decisions['keep'] = self._decisions(tree, contexts, races, log_credits, keep_probs, own, node)
    return stop_at(tree, node, weights, uniforms[-1], state, decisions)

  def _decisions(self, tree: Tree, contexts: Contexts, races: _Races, log_credits, keep_probs, own, node) -> Decisions:
    """The contexts in the order of visits, up to the first that is kept, for display; `own` holds uniforms by slot."""
    slots = slots_of(tree)
    visit = jnp.where(contexts.stands, _visits(contexts, races), tree.num_nodes + 1)

    def in_order(values, fill):
      """Values by slot, `[L + 1, W]`, in the order of visits, `[N + 1]`."""
      empty = jnp.full(tree.num_nodes + 1, fill, values.dtype)
      return empty.at[visit].set(values, mode='drop')

    nodes = in_order(jnp.asarray(slots.nodes), 0)
    is_visited = jnp.arange(tree.num_nodes + 1) <= jnp.argmax(nodes == node)
    shares = jnp.pad(races.shares, ((1, 0), (0, 0)))
    return jax.vmap(Decisions.of_one)(
      is_made=is_visited & (nodes > 0),
      node=nodes,
      share=in_order(keep_probs, 0),
      uniform=in_order(own, 0),
      is_chosen=nodes == node,
      numbers={'log_kept': in_order(log_credits, 0), 'picked_share': in_order(shares, 0)},
    )

  def law(self, tree, proposal, target_probs, state):
    del state
    if tree.num_nodes == 0:
      return target_probs
    slots = slots_of(tree)
    contexts, races, log_credits = self._steps(tree, proposal, target_probs)
    keep_probs = self._keep_probs(tree, proposal, target_probs, contexts, races, log_credits)
    stops = self._arrivals(contexts, races, keep_probs) * keep_probs
    stop = jnp.zeros(tree.num_nodes + 1, stops.dtype).at[slots.nodes].add(jnp.where(slots.is_node, stops, 0))

    def weights(node):
      own = self._credit_of(tree, log_credits, node)
      found = self._weights(tree, proposal, target_probs, races, own, node)
      return found / jnp.sum(found)

    return stop[:, None] * jax.vmap(weights)(jnp.arange(tree.num_nodes + 1))


def _visits(contexts: Contexts, races: _Races) -> jax.Array:
  """The number of each context in the order of visits, by slot; int32 `[L + 1, W]`."""
  stands = contexts.stands.astype(jnp.int32)

  def shallower(size, depth):
    is_child, stands = depth
    size = stands + jnp.sum(jnp.where(is_child, size, 0), axis=-1, dtype=jnp.int32)
    return size, size

  _, sizes = jax.lax.scan(shallower, stands[-1], (contexts.is_child, stands[:-1]), reverse=True)
  sizes = jnp.concatenate([sizes, stands[-1:]])

  def deeper(begin, depth):
    above, is_before, size = depth
    begin = begin[above] + jnp.sum(jnp.where(is_before, size, 0), axis=-1, dtype=jnp.int32)
    return begin, begin

  _, begins = jax.lax.scan(deeper, jnp.zeros_like(sizes[0]), (contexts.above[1:], races.is_before, sizes[1:]))
  # A context comes after all contexts below it.
  return jnp.concatenate([jnp.zeros_like(sizes[:1]), begins]) + sizes - 1


def _excess_of_token(params):
  """[P q - p]+ of a token with the credit P as the parameter, as `sums_of_rows` takes it."""
  (credit,) = params
  return lambda token: [positive_part(credit * token[1] - token[0])]


def _law_rows(tree: Tree, proposal: Proposal, target_probs):
  """The draft's and the target's distributions after nodes that may have children, as `map_needed` takes them."""
  nodes = tree.parent_nodes
  return (proposal.probs, np.arange(len(nodes))), (target_probs, nodes)
