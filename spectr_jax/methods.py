"""The registry of methods: pairs of a proposal rule and a verifier, with what is known about the pair."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from spectr_jax.couplings import HighestRatio, KSeq, Maximal, MaximalAfter, OverAccept, Race, Recursive, SingleDraft
from spectr_jax.proposal import FirstArrivals, Independent, LikeliestAndOne, ProposalRule, WithoutReplacement
from spectr_jax.suggestion import did_you_mean
from spectr_jax.tree import TokenTree
from spectr_jax.verifiers import (
  Block,
  GreedyBlock,
  RaceLayers,
  RaceTraversal,
  SeedExact,
  Traversal,
  UniVer,
  Verifier,
  Walk,
)

if TYPE_CHECKING:
  from spectr_jax.draft import Drafter


@dataclasses.dataclass(frozen=True)
class Method:
  """A way of decoding; frozen and hashable, so that it can be a static argument.

  Attributes:
    name: Its name in `METHODS`.
    verifier: The algorithm that decides which guesses are kept.
    proposal_rule: The rule that draws the children of a node.
    is_lossless: Whether the output has exactly the target's distribution, whatever the tree.
    source: Paper and algorithm.
    max_drafts: The most candidates a position may have, or None for any number; 0 drafts nothing.
    needs_chains: Whether it is defined for K chains of equal length only.
    is_seed_exact: Whether randomness is keyed by a token's absolute position and shared by drafting and verification.
      Only `SeedExact` is right with it. All other verifiers need new randomness every round: a round's randomness has
      influenced where the next round begins, so keyed by position it would be used twice.
    bias: The reason why the method is not lossless, in one line; empty for lossless methods.
    is_lossless_alone: Whether a method that is biased on other trees is lossless on a single draft.

  Raises:
    ValueError: The verifier does not cover children drawn by the rule.
  """

  name: str
  verifier: Verifier
  proposal_rule: ProposalRule
  is_lossless: bool
  source: str
  max_drafts: int | None = None
  needs_chains: bool = False
  is_seed_exact: bool = False
  bias: str = ''
  is_lossless_alone: bool = False

  def __post_init__(self):
    allowed = self.verifier.proposal_rules
    if not isinstance(self.proposal_rule, allowed):
      # `name` is a property of the protocol; the rules are dataclasses, whose classes hold the default.
      names = ' or '.join(getattr(rule, 'name', rule.__name__) for rule in allowed)
      promise = "has the target's distribution" if self.is_lossless else 'is defined'
      raise ValueError(f'{self.name} {promise} only if children are drawn {names}, not {self.proposal_rule.name}')

  @property
  def takes_given(self) -> bool:
    """True if candidates may be given (`Proposal.is_given`)."""
    return self.verifier.takes_given

  @property
  def takes_mixed(self) -> bool:
    """True if given candidates may stand beside drawn ones at a position."""
    return self.verifier.takes_mixed

  @property
  def takes_grown(self) -> bool:
    """True if rows may grow trees of their own (`TokenTree.slots`)."""
    return self.verifier.takes_grown

  @property
  def needs_constant_draft(self) -> bool:
    """True if the draft's distribution after a text must be the same in every round, so that no heads will do."""
    return self.verifier.needs_constant_draft

  @property
  def tries_every_branch(self) -> bool:
    """True if the next branch is tried after one that fails."""
    return self.verifier.tries_every_branch

  def is_lossless_on(self, tree: TokenTree) -> bool:
    """Tells whether the output has exactly the target's distribution on this tree."""
    return self.is_lossless or (self.is_lossless_alone and tree.is_chain)

  def tree_for(self, tree: TokenTree | None) -> TokenTree:
    """The tree the method works on: `tree`, or an empty one if it drafts nothing. ValueError if it has none such."""
    if self.max_drafts == 0:
      return TokenTree()
    if tree is None:
      tree = TokenTree()
    check_fit(self, tree)
    return tree


@dataclasses.dataclass(frozen=True)
class Guesses:
  """The kind of a draft's guesses where there is no `Drafter` yet: declarations of one."""

  has_given_candidates: bool = False
  has_mixed_positions: bool = False
  has_grown_trees: bool = False
  feature_layers: tuple[int, ...] = ()
  max_depth: int | None = None
  kv_layers: tuple[int, ...] = ()


def why_not(method: Method, tree: TokenTree | None = None, drafter: Drafter | Guesses | None = None) -> str:
  """Says why a method cannot decode on a tree, with a draft's guesses, in one sentence; empty if it can.

  None stands for a tree or a draft that is not known yet. Whether the output is lossless is no reason.
  """
  name = method.name
  if method.max_drafts == 0:
    return ''
  if tree is not None:
    widths = np.bincount(tree.depths)[1:]
    if not tree.num_nodes:
      return f'{name} needs guesses: give it a tree, such as TokenTree.chains(1, 4)'
    if tree.is_grown and not method.takes_grown:
      return f'{name} needs one tree for all rows: it does not take trees that grow while they are drafted'
    if method.max_drafts == 1 and not tree.is_chain:
      return f'{name} verifies a single draft: the tree must be a chain (num_drafts 1)'
    if method.max_drafts is not None and widths.max() > method.max_drafts:
      return (
        f'{name} verifies at most {method.max_drafts} candidates of a position, but the tree has {widths.max()} nodes'
        ' at one depth'
      )
    if method.needs_chains and not tree.is_chains:
      return f'{name} is defined for drafts of equal length that share nothing: the tree must be chains'
  if drafter is None:
    return ''
  if tree is not None and drafter.max_depth is not None and tree.max_depth > drafter.max_depth:
    return f'this drafter guesses {drafter.max_depth} tokens ahead, and the tree is {tree.max_depth} deep'
  if tree is not None and drafter.has_grown_trees != tree.is_grown:
    if drafter.has_grown_trees:
      return (
        'this drafter grows trees of its own: give it bounds, TokenTree.slots; the tree has no rows with parents of'
        ' their own'
      )
    return 'this drafter drafts one tree for all rows; the tree has rows with parents of their own'
  if drafter.has_given_candidates and not method.takes_given:
    return f'{name} takes drawn candidates only, and this draft gives some that are not drawn'
  if drafter.has_mixed_positions and not method.takes_mixed:
    return f'{name} takes positions with given candidates or with drawn ones, and this draft mixes them'
  if (drafter.feature_layers or drafter.kv_layers) and method.needs_constant_draft:
    return (
      f"{name} needs the draft's distribution after a text to be the same in every round, and this draft's changes with"
      " the target's hidden states"
    )
  return ''


def check_fit(method: Method, tree: TokenTree | None = None, drafter: Drafter | Guesses | None = None) -> None:
  """Refuses what `why_not` has a reason against, with a ValueError that also names the methods without one."""
  if reason := why_not(method, tree, drafter):
    others = [each.name for each in METHODS.values() if each.max_drafts != 0 and not why_not(each, tree, drafter)]
    raise ValueError(reason + (f'; allowed: {", ".join(others)}' if others else ''))


_SPECTR_GBV = 'SpecTr-GBV, "Multi-Draft Block Verification Accelerating Speculative Decoding"'
_EXPONENTIAL = '"Speculative Decoding via Exponential Races"'
_THEORETICAL = '"A Theoretical Perspective for Speculative Decoding Algorithm" (Yin et al. 2024)'

_lossless = functools.partial(Method, proposal_rule=Independent(), is_lossless=True)
_biased = functools.partial(Method, proposal_rule=Independent(), is_lossless=False)

_METHODS = (
  _lossless('autoregressive', Walk(Maximal()), source='ancestral sampling from the target', max_drafts=0),
  _lossless(
    'speculative',
    Walk(Maximal()),
    source='Leviathan et al. 2023; Chen et al. 2023; SpecTr (Sun et al. 2023), Algorithm 1',
    max_drafts=1,
  ),
  _lossless('spectr', Walk(KSeq()), source='SpecTr (Sun et al. 2023), Algorithms 2 and 3'),
  _lossless('specinfer', Walk(Recursive()), source='SpecInfer (Miao et al. 2024), Algorithm 2'),
  _lossless(
    'batch', Walk(Recursive(), is_pooled=False), source=f'{_THEORETICAL}, Algorithm 4, with its two slips corrected'
  ),
  _lossless(
    'gsd',
    Walk(Recursive(with_replacement=False), is_pooled=False),
    proposal_rule=WithoutReplacement(),
    source=f'{_EXPONENTIAL}, Algorithm 4; Jeon et al. 2024',
  ),
  _lossless(
    'ersd',
    SeedExact(),
    proposal_rule=FirstArrivals(),
    source=f'{_EXPONENTIAL}, Algorithms 2 and 5, keyed by position',
    is_seed_exact=True,
  ),
  _lossless(
    'block',
    Block(SingleDraft()),
    source='Sun et al. 2024, "Block Verification Accelerates Speculative Decoding"',
    max_drafts=1,
  ),
  _lossless(
    'greedy_block', GreedyBlock(), source=f'{_SPECTR_GBV}, section 3.3, with nested modifications', max_drafts=1
  ),
  _biased(
    'spectr_gbv',
    GreedyBlock(),
    source=f'{_SPECTR_GBV}, Algorithms 1 to 3',
    needs_chains=True,
    bias='as published it treats each sub-block as if drafts did not compete for it; exact for one draft only',
    is_lossless_alone=True,
  ),
  _lossless(
    'race', Walk(MaximalAfter(Race())), source="this library: SpecTr's optimal transport by an exponential race"
  ),
  _lossless('race_block', Block(Race()), source='this library: block verification of the path that a race picks'),
  _lossless(
    'traversal', Traversal(), source='Weng et al. 2025, "Traversal Verification for Speculative Tree Decoding"'
  ),
  _lossless(
    'univer',
    UniVer(),
    proposal_rule=LikeliestAndOne(),
    source='UniVer (Weng, Hu, Yairi 2026), with the optimal plan for its candidates as derived here',
  ),
  _lossless(
    'race_traversal',
    RaceTraversal(),
    source='this library: every branch of the tree, leaves first, with the shares of races as credit',
  ),
  _biased(
    'decoding_opt',
    Walk(OverAccept(epsilon=0.1, has_best_residual=True)),
    source=f'{_THEORETICAL}, section 4, Theorem 4',
    max_drafts=1,
    bias='it accepts more than it may, on purpose; rejections saved and bias in total variation add up to TV(p, q)',
  ),
  _biased(
    'decoding_uno',
    Walk(OverAccept(epsilon=0.1, has_best_residual=False)),
    source=f'{_THEORETICAL}, section 4.2',
    max_drafts=1,
    bias="it accepts more than it may, on purpose, and redraws from the target's whole distribution",
  ),
)

METHODS: dict[str, Method] = {method.name: method for method in _METHODS}

# Proven like the others, but measured on fewer trees, and not in the tables of all methods; found by name as well.
FURTHER_METHODS: dict[str, Method] = {
  method.name: method
  for method in (
    _lossless(
      'ratio_block',
      Block(HighestRatio()),
      source='greedy multi-path block verification (Thomas and Pal 2026), as its abstract and summaries describe it',
    ),
    _lossless(
      'race_layers',
      RaceLayers(),
      source='this library: the contexts of a depth share one mass, by one race; the deepest layer first',
    ),
  )
}


# Used where none is named and there is a draft: it keeps the most of any tree.
DEFAULT_METHOD = 'race_traversal'


def get_method(method: str | Method) -> Method:
  """Looks a method up by name; a `Method` passes through. Raises ValueError for an unknown name."""
  if isinstance(method, Method):
    return method
  if method in FURTHER_METHODS:
    return FURTHER_METHODS[method]
  if method not in METHODS:
    raise ValueError(f'unknown method {method!r}{did_you_mean(method, METHODS)}; allowed: {", ".join(METHODS)}')
  return METHODS[method]


def register(method: Method) -> Method:
  """Adds a method to `METHODS`, where commands and `generate` find it by name, and returns it.

  Raises ValueError if another method has its name.
  """
  if method.name in FURTHER_METHODS or METHODS.setdefault(method.name, method) != method:
    raise ValueError(f'there is another method named {method.name!r}; choose a new name')
  return method


def with_children(method: Method, children: str) -> Method:
  """`method` with the children of a node drawn by another rule, where its theory has such a version.

  `children` is `independent`, `without_replacement`, `first_arrivals` or `likeliest_and_one`; ValueError for another,
  and where the theory does not cover it.
  """
  rules = {rule.name: rule for rule in (Independent(), WithoutReplacement(), FirstArrivals(), LikeliestAndOne())}
  if children not in rules:
    raise ValueError(f'children must be one of {", ".join(rules)}, got {children!r}')
  rule = rules[children]
  return dataclasses.replace(method, verifier=method.verifier.for_rule(rule), proposal_rule=rule)


def with_epsilon(method: Method, epsilon: float) -> Method:
  """`method` with another amount of over-acceptance; methods without over-acceptance stay as they are.

  `epsilon`, at least 0, else ValueError, is added to the target's probability of a candidate. With 0 and the best
  residual, the method is speculative decoding, which is lossless.
  """
  verifier = method.verifier.with_epsilon(epsilon)
  if verifier is method.verifier:
    return method
  method = dataclasses.replace(method, verifier=verifier)
  return method if verifier.is_biased else dataclasses.replace(method, is_lossless=True, bias='')


def with_gumbel(method: Method) -> Method:
  """The seed-exact version of a method that drafts nothing: Gumbel-max sampling, the reference of `ersd`.

  Raises ValueError if the method drafts.
  """
  if method.max_drafts != 0:
    raise ValueError(f'{method.name} drafts; Gumbel-max sampling with shared keys is autoregressive, or ersd')
  return dataclasses.replace(
    method,
    verifier=SeedExact(),
    proposal_rule=FirstArrivals(),
    source='ancestral sampling from the target by Gumbel-max, keyed by position',
    is_seed_exact=True,
  )
