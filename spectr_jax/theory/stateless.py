"""Bounds on the tokens that stateless lossless rules keep of a tree in one round, and the exact optimum for tiny cases.

A rule is given the guesses of a tree, whose children are independent draws from the draft's distribution. It accepts a
path of tau tokens and emits one more. Then ordinary sampling from the target continues, or another round that knows
nothing of this one. The rule is lossless if the resulting text has the target's distribution q.

Let x be a text of d tokens, and kept(x) the probability that the accepted path starts with x. The whole text starts
with x and then y with probability q(x) q(y|x). If it starts with x but fewer than d tokens were accepted, y is an
ordinary sample; this case has probability (q(x) - kept(x)) q(y|x). In the remaining case x was kept:

    P(x is kept, y comes next) = kept(x) q(y|x), of which kept(xy) is a part.

So kept(x)/q(x), the probability that the start x of a text was kept, depends on x alone and never rises along a text.
"""

from __future__ import annotations

import collections

import numpy as np

from spectr_jax.theory.arguments import TOLERANCE, as_joint_probs, prefix_probs
from spectr_jax.theory.linear_program import check_size, maximize
from spectr_jax.tree import TokenTree

# For u below it, log(-log(1 - e^u)) and its inverse are u in float64.
_SMALL = -40.0


def _log_probs(values, name: str, tree: TokenTree) -> np.ndarray:
  """The checked log probabilities, float64 `[..., L]`, at most 0."""
  values = np.asarray(values, np.float64)
  if values.ndim == 0 or values.shape[-1] != tree.max_depth:
    raise ValueError(f'{name} must have shape [..., {tree.max_depth}], as deep as the tree; got {values.shape}')
  # A NaN fails this comparison.
  if not (values <= TOLERANCE).all():
    raise ValueError(f'{name} must be logarithms of probabilities, got {values.max()}')
  return np.minimum(values, 0)


def _log_hazard(log_probs: np.ndarray) -> np.ndarray:
  """The log hazard log(-log(1 - e^u)) for any magnitude of u. The hazards of independent events add up."""
  with np.errstate(divide='ignore'):
    return np.where(log_probs < _SMALL, log_probs, np.log(-np.log1p(-np.exp(np.maximum(log_probs, _SMALL)))))


def _log_prob_of_hazard(log_hazard: np.ndarray) -> np.ndarray:
  """The inverse of `_log_hazard`: u such that `log_hazard` is log(-log(1 - e^u))."""
  return np.where(log_hazard < _SMALL, log_hazard, np.log(-np.expm1(-np.exp(np.maximum(log_hazard, _SMALL)))))


def _log_presence_at(tree: TokenTree, log_probs: np.ndarray, length: int) -> np.ndarray:
  """log D `[...]` of the first `length` tokens. Nodes with equal subtrees down to that depth are computed once."""
  kind_of = np.where(tree.depths == length, 0, -1)
  values = [np.zeros(log_probs.shape[:-1])]
  for depth in reversed(range(length)):
    hazards = [_log_hazard(log_probs[..., depth] + value) for value in values]
    kinds, values = {}, []
    for node in np.flatnonzero((tree.depths == depth) & (tree.num_children > 0)):
      first = tree.first_child[node]
      children = collections.Counter(kind_of[first : first + tree.num_children[node]].tolist())
      del children[-1]  # children with no descendant at that depth
      if not children:
        continue
      kind = tuple(sorted(children.items()))
      if kind not in kinds:
        kinds[kind] = len(values)
        together = [hazards[child] + np.log(count) for child, count in kind]
        values.append(_log_prob_of_hazard(np.logaddexp.reduce(together, axis=0)))
      kind_of[node] = kinds[kind]
  return values[kind_of[0]]


def log_presence(tree: TokenTree, draft_log_probs) -> np.ndarray:
  """The log probability log D(x^d) that some path of the tree spells the first d tokens of a text, for every d.

  With g(v) = 1 for nodes v of depth d, and g(v) = 1 - prod over children w of (1 - p(x_{depth(v)+1} | x^{depth(v)})
  g(w)) for the others, D is g of the root. For K chains it is 1 - (1 - p(x^d))^K. The computation uses logarithms
  throughout, so that D is accurate however small the probabilities are.

  It is float64 `[..., L]` for a tree of depth L whose siblings are independent draws, and `draft_log_probs` `[..., L]`:
  log p of each of a text's first L tokens given the ones before it, -inf allowed. ValueError for other arguments.
  """
  log_probs = _log_probs(draft_log_probs, 'draft_log_probs', tree)
  presence = np.empty_like(log_probs)
  for length in range(1, tree.max_depth + 1):
    presence[..., length - 1] = _log_presence_at(tree, log_probs, length)
  return presence


def stateless_kept_bound(tree: TokenTree, draft_log_probs, target_log_probs) -> np.ndarray:
  """An upper bound on the probability that a stateless lossless rule keeps the first d tokens of a text, for every d.

  The bound is min(1, min over j up to d of D(x^j)/q(x^j)). Given that the text turns out to be x, a rule keeps its
  first d tokens with a probability that depends on x^d alone and never rises with d. And it keeps x^j only if the tree
  holds it, so q(x^j) times this probability is at most D(x^j).

  For texts drawn from the target, the expectation of the bound bounds P(tau >= d). So the mean over drawn texts is an
  unbiased estimate of a bound on P(tau >= d). 1 plus the sum over d bounds the tokens per call after one context. For a
  single chain `block` attains the bound. `stateless_optimum` is the exact value, for trees of few guesses.

  Source: re-derived. For a single chain it is the optimum in "Block Verification Accelerates Speculative Decoding" (Sun
  et al. 2024).

  It is float64 `[..., L]`, never rising along a text, for `tree` and `draft_log_probs` of `log_presence` and log q of
  the same tokens; ValueError for other arguments. If q(x^d) is 0, the entry equals the previous one.
  """
  presence = log_presence(tree, draft_log_probs)
  target = _log_probs(target_log_probs, 'target_log_probs', tree)
  if presence.shape != target.shape:
    raise ValueError(f'log probabilities must have equal shapes, got {presence.shape} and {target.shape}')
  target = np.cumsum(target, axis=-1)
  is_possible = target > -np.inf
  ratio = np.where(is_possible, presence - np.where(is_possible, target, 0), np.inf)
  return np.exp(np.minimum(np.minimum.accumulate(ratio, axis=-1), 0))


def _bounds_and_log_ratios(tree: TokenTree, draft_log_probs, target_log_probs) -> tuple[np.ndarray, np.ndarray]:
  """`stateless_kept_bound`, and log p(x^d)/q(x^d) for every d, infinite for texts that cannot occur."""
  bounds = stateless_kept_bound(tree, draft_log_probs, target_log_probs)
  draft, target = (np.cumsum(np.asarray(values, np.float64), axis=-1) for values in (draft_log_probs, target_log_probs))
  is_possible = target > -np.inf
  return bounds, np.where(is_possible, draft - np.where(is_possible, target, 0), np.inf)


def stateless_mean_bound(tree: TokenTree, draft_log_probs, target_log_probs, set_probs) -> np.ndarray:
  """Terms whose mean over texts drawn from the target bounds P(tau >= d), for every d; tighter than the kept bound.

  `stateless_kept_bound` asks of each text alone whether the tree holds it. But one path is accepted, so the texts of a
  set S share what the tree holds: with N_d nodes of depth d,

      sum over x^d in S of kept(x^d) <= P(the tree holds a text of S) <= h(p(S)),  h(a) = 1 - (1 - a)^N_d.

  The second step holds since nodes that share a prefix are as likely as independent ones or less to hold a text of S.
  Let b(x) be the kept bound. As h is concave, h(p(S)) <= h(a) + h'(a) (p(S) - a) for any a, and with the best set for
  it

      P(tau >= d) <= h(a) - a h'(a) + E min(b(Y^d), h'(a) p(Y^d)/q(Y^d)),  Y drawn from the target.

  This holds for any a. With a = 0 it is the mean of the kept bound, which for a single chain is the optimum already.
  `best_set_probs` finds the best a. To estimate the bound from drawn texts without bias, choose a by other texts. For
  one token the bound with the best a is the optimum.

  Source: this library.

  Args:
    tree: A tree of depth L whose siblings are independent draws.
    draft_log_probs: `[..., L]`, log p of each of a text's first L tokens given the ones before it; -inf allowed.
    target_log_probs: `[..., L]`, log q of the same tokens.
    set_probs: `[L]`, a for every d, from 0 to 1.

  Returns:
    float64 `[..., L]`. A single term may exceed 1.

  Raises:
    ValueError: Shapes do not agree, or values are no probabilities or no logarithms of probabilities.
  """
  bounds, log_ratios = _bounds_and_log_ratios(tree, draft_log_probs, target_log_probs)
  held = np.asarray(set_probs, np.float64)
  if held.shape != (tree.max_depth,) or not ((held >= 0) & (held <= 1)).all():
    raise ValueError(f'set_probs must be {tree.max_depth} probabilities, one for every depth; got {set_probs}')
  num_nodes = np.bincount(tree.depths)[1:]
  slopes = num_nodes * (1 - held) ** (num_nodes - 1)
  with np.errstate(divide='ignore'):
    at_ratio = np.exp(np.minimum(np.log(slopes) + np.where(slopes > 0, log_ratios, 0), 0))
  # A bound is at most 1, so larger values of the other term need not be told apart.
  return np.minimum(bounds, at_ratio) + 1 - (1 - held) ** num_nodes - held * slopes


def best_set_probs(tree: TokenTree, draft_log_probs, target_log_probs, text_probs=None) -> np.ndarray:
  """The a of `stateless_mean_bound` that makes its mean over the given texts least, for every d.

  The best set holds the texts of the largest b q/p; the number of texts in it is tried out.

  Args:
    tree, draft_log_probs, target_log_probs: As for `stateless_mean_bound`.
    text_probs: `[...]`, the target's probability of each text if these are all texts; None if they were drawn from it.

  Returns:
    float64 `[L]`, from 0 to 1.

  Raises:
    ValueError: Shapes do not agree, values are no probabilities, or there is no text.
  """
  bounds, log_ratios = _bounds_and_log_ratios(tree, draft_log_probs, target_log_probs)
  shape = bounds.shape[:-1]
  weights = np.full(shape, 1 / max(1, np.prod(shape))) if text_probs is None else np.asarray(text_probs, np.float64)
  if weights.shape != shape or not weights.size or not ((weights >= 0) & (weights <= 1)).all():
    raise ValueError(f'text_probs must be probabilities of shape {shape}, one for each text')
  best, is_there = np.zeros(tree.max_depth), weights.reshape(-1) > 0
  weights, bounds, log_ratios = (each.reshape(len(is_there), -1)[is_there] for each in (weights, bounds, log_ratios))
  with np.errstate(divide='ignore', over='ignore', invalid='ignore'):
    # Texts that are never kept come last.
    order = np.argsort(np.where(bounds > 0, log_ratios - np.log(bounds), np.inf), axis=0, kind='stable')
    masses = weights * bounds, np.minimum(weights * np.exp(log_ratios), 1)
  for depth, num_nodes in enumerate(np.bincount(tree.depths)[1:]):
    kept, held = (np.concatenate([[0], np.cumsum(each[order[:, depth], depth])]) for each in masses)
    held = np.minimum(held, 1)
    best[depth] = held[np.argmin(1 - (1 - held) ** num_nodes - kept)]
  return best


def stateless_fewest_calls(kept_bounds) -> np.ndarray:
  """A lower bound on the mean number of target calls that any stateless lossless rule needs for each text.

  Given that the text turns out to be x, a call before token s keeps at least d tokens with a probability of at most
  `stateless_kept_bound`, whatever earlier calls did. So its number of kept tokens can be coupled with a tau that is
  never smaller and whose tail probabilities are the bound. Let V(s) be the fewest calls from token s on, 0 at the end
  of the text:

      V(s) = 1 + E min over j up to tau of V(s + j + 1).

  The minimum keeps the number of tokens that is best for the rest of the text, which no rule can know. Tokens beyond
  the end of a text do not count. Over texts drawn from the target, the number of all tokens divided by the sum of these
  calls bounds the tokens per call of a whole run.

  Source: this library.

  Args:
    kept_bounds: `[P, T, L]`: at `[i, t, d]` the largest probability that a call before token t of text i keeps it and
      the next d tokens; see `stateless_kept_bound`. NaN if the text does not have these tokens.

  Returns:
    float64 `[P]`, 0 for a text without tokens.

  Raises:
    ValueError: The bounds have another shape, are not probabilities, or rise with d.
  """
  bounds = np.asarray(kept_bounds, np.float64)
  if bounds.ndim != 3 or not bounds.shape[2]:
    raise ValueError(f'kept_bounds must have shape [P, T, L] with L of at least 1, got {bounds.shape}')
  is_there = ~np.isnan(bounds)[..., 0]
  bounds = np.nan_to_num(bounds)
  if not ((bounds >= 0) & (bounds <= 1 + TOLERANCE)).all() or (np.diff(bounds, axis=2) > TOLERANCE).any():
    raise ValueError('kept_bounds must be probabilities that never rise with the number of tokens')
  num_texts, num_tokens, length = bounds.shape
  calls = np.zeros((num_texts, num_tokens + length + 1))
  for start in reversed(range(num_tokens)):
    at_least = np.pad(bounds[:, start], ((0, 0), (1, 1)), constant_values=((0, 0), (1, 0)))
    after = np.minimum.accumulate(calls[:, start + 1 : start + length + 2], axis=1)
    needed = 1 - (np.diff(at_least, axis=1) * after).sum(axis=1)
    calls[:, start] = np.where(is_there[:, start], needed, 0)
  return calls[:, 0]


def _tree_of_texts(joint: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Of every text of 0 to L tokens: its probability, and that of its last token given the others, 0 where undefined.

  The text c followed by token t has the number c V + 1 + t, and the empty one is 0.
  """
  probs = np.concatenate([[1.0], *prefix_probs(joint)])
  before = probs[(np.arange(len(probs)) - 1) // joint.shape[0]]
  before[0] = 1
  return probs, np.divide(probs, before, out=np.zeros_like(probs), where=before > 0)


def stateless_optimum(tree: TokenTree, draft_law, target_law) -> float:
  """The largest mean number of tokens of a tree that a stateless lossless rule keeps in one round.

  This is a linear program. Its variables are the probabilities that the guesses are D and the accepted path spells x,
  for every x that D holds. Over x they sum to P(D). Summed over D and over all continuations of x, they are kept(x). A
  lossless rule with these probabilities exists if and only if kept(xy) <= kept(x) q(y|x) for all x of fewer than L
  tokens, where kept of the empty text is 1. The difference between the two sides is the probability that the path ends
  with x and y is emitted. After L accepted tokens the rule emits a sample from the target's distribution, so
  distributions of L tokens are enough.

  For L = 1 the value is `optimal_acceptance`, and for a single chain `block` attains it. Rules that carry state over to
  the next round may keep more. On chains they keep at most `optimal_block_acceptance`.

  It is a number of tokens from 0 to L for a tree of depth L whose siblings are independent draws, and joint
  distributions p and q of L tokens, `[V] * L`; ValueError for other arguments, and for too many combinations of
  guesses; RuntimeError if the solver fails.
  """
  from scipy import sparse

  draft, target = as_joint_probs(draft_law, target_law)
  if draft.ndim != tree.max_depth:
    raise ValueError(f'distributions must be of {tree.max_depth} tokens, as deep as the tree; got {draft.ndim}')
  vocab_size, num_nodes = draft.shape[0], tree.num_nodes
  check_size(num_nodes * vocab_size**num_nodes)
  p_given = _tree_of_texts(draft)[1]
  q, q_given = _tree_of_texts(target)

  # The value depends on the set of texts that the tree holds. Repeated texts are replaced by the empty text.
  texts = np.zeros((num_nodes + 1, vocab_size**num_nodes), np.int64)
  for node, parent in enumerate(tree.parents, start=1):
    token = np.arange(texts.shape[1]) // vocab_size ** (node - 1) % vocab_size
    texts[node] = texts[parent] * vocab_size + 1 + token
  guess_probs = p_given[texts[1:]].prod(axis=0)
  held = np.sort(texts[1:].T, axis=1)
  is_repeated = held[:, 1:] == held[:, :-1]
  held[:, 1:][is_repeated] = 0
  sets, set_of = np.unique(np.sort(held, axis=1), axis=0, return_inverse=True)
  set_probs = np.bincount(set_of.reshape(-1), guess_probs)

  set_index, place = np.nonzero((sets > 0) & (q[sets] > 0) & (set_probs[:, None] > 0))
  if not len(place):
    return 0.0
  text, variable = sets[set_index, place], np.arange(len(place))
  kept = sparse.csr_array((len(q), len(text)))
  last, num_tokens = text, np.zeros(len(text))
  while (is_text := last > 0).any():
    kept += sparse.csr_array((is_text.astype(float), (last, variable)), shape=kept.shape)
    num_tokens += is_text
    last = np.where(is_text, (last - 1) // vocab_size, 0)
  kept = kept[1:]
  # The empty text is kept with probability 1. Its terms are constants on the right side.
  above = (np.arange(1, len(q)) - 1) // vocab_size
  child = np.flatnonzero(above)
  allowed = sparse.csr_array((q_given[1:][child], (child, above[child] - 1)), shape=(len(above),) * 2)
  drawn = sparse.csr_array((np.ones(len(text)), (set_index, variable)), shape=(len(sets), len(text)))
  return maximize(
    num_tokens,
    sparse.vstack([drawn, kept - allowed @ kept]),
    np.concatenate([set_probs, np.where(above == 0, q[1:], 0)]),
  )[0]
