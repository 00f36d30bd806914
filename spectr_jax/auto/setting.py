"""The settings that are compared: methods with their trees."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np

from spectr_jax.draft import Confident, Drafter, Estimated, Likeliest, as_drafter, growing
from spectr_jax.methods import METHODS, Guesses, Method, why_not
from spectr_jax.model import Model
from spectr_jax.tree import TokenTree

# K and L that are compared, and at temperature 0 the likeliest guesses: 8, 16, 16 and 32 of them.
NUM_DRAFTS, DRAFT_LENGTHS = (1, 2, 4, 8), (2, 4, 8)
GREEDY_WIDTHS = (2,) * 4, (4,) * 4, (2,) * 8, (4,) * 8


@dataclasses.dataclass(frozen=True)
class Setting:
  """A method with its tree.

  Attributes:
    method: The method.
    num_drafts: K for chains, else 0.
    draft_length: L, the depth of the tree.
    tree: The tree; empty for a method that drafts nothing, and while one of `budget` nodes is still to be chosen.
    growth: The rule by which the draft grows its trees; None for one tree for all rows.
    label: The tree as it was named; empty for a name that follows from the tree.
    budget: The most nodes of a tree that is to be chosen; None of others.
  """

  method: Method
  num_drafts: int = 0
  draft_length: int = 0
  tree: TokenTree = TokenTree()
  growth: Likeliest | Confident | Estimated | None = None
  label: str = ''
  budget: int | None = None

  @classmethod
  def of_chains(cls, method: Method, num_drafts: int, draft_length: int) -> Setting:
    """The method on K chains of L tokens."""
    return cls(method, num_drafts, draft_length, TokenTree.chains(num_drafts, draft_length))

  @property
  def tree_name(self) -> str:
    """The tree as text, the same for equal trees of other methods."""
    if self.num_drafts:
      return 'chains'
    name = self.label or 'none'
    if not self.label and self.growth is not None:
      widths = np.bincount(self.tree.depths)[1:]
      name = f'{type(self.growth).__name__.lower()}:{",".join(map(str, widths))}'
    elif not self.label and self.tree.num_nodes:
      name = f'parents:{",".join(map(str, self.tree.parents))}'
    return name + (f' from {self.growth.threshold:g}' if self.growth is not None and self.growth.threshold else '')

  def __str__(self):
    if self.num_drafts:
      return f'{self.method.name} K={self.num_drafts} L={self.draft_length}'
    return self.method.name if self.tree_name == 'none' else f'{self.method.name} {self.tree_name}'

  def drafter(self, draft: Model | Drafter | None) -> Model | Drafter | None:
    """The draft as the setting uses it: one that grows trees, or the draft itself."""
    drafter = None if self.growth is None else as_drafter(draft)
    return draft if self.growth is None or drafter is None else growing(drafter, self.growth)

  def guesses(self, draft: Drafter | Guesses) -> Guesses:
    """The kind of guesses that a draft makes on the tree."""
    has_given = draft.has_given_candidates or (self.growth is not None and self.growth.has_given_candidates)
    has_grown = draft.has_grown_trees or self.growth is not None
    return Guesses(
      has_given, draft.has_mixed_positions, has_grown, draft.feature_layers, draft.max_depth, draft.kv_layers
    )

  def with_threshold(self, threshold: float) -> Self:
    """The setting with another threshold of its growing trees; ValueError if they do not grow."""
    if self.growth is None:
      raise ValueError(f'{self} grows no trees, so it has no threshold')
    return dataclasses.replace(self, growth=dataclasses.replace(self.growth, threshold=threshold))


def baseline_of(settings: Sequence[Setting]) -> Setting | None:
  """The setting that speeds are relative to: the first that drafts nothing; None if all draft."""
  return next((setting for setting in settings if setting.method.max_drafts == 0), None)


def baseline_among(settings: Sequence[Setting]) -> Setting:
  """`baseline_of` settings that have one; ValueError if all draft."""
  baseline = baseline_of(settings)
  if baseline is None:
    raise ValueError('settings need one that drafts nothing, to which the others are compared')
  return baseline


def fitting(
  settings: Sequence[Setting], draft: Drafter | Guesses, *, is_greedy: bool
) -> tuple[list[Setting], dict[str, str]]:
  """The settings that may be chosen, without those that are equal to others; and why methods have none, by name.

  They are lossless, and take the draft's guesses. With one draft, methods for several drafts equal `speculative` or
  `block` and are left out, except for seed-exact ones, and where lookup stands beside a model, whose guesses those two
  do not take. At temperature 0 every method keeps the same of a tree of likeliest guesses, the longest path that the
  target takes, so the first method stands for all. ValueError if no setting that drafts fits, though there are some.
  """
  fit, given, reasons = [], set(), {}
  for setting in dict.fromkeys(settings):
    method, tree = setting.method, setting.tree
    reason = why_not(method, tree, setting.guesses(draft)) if method.is_lossless else f'{method.name} is not lossless'
    if reason:
      reasons.setdefault(method.name, reason)
      continue
    if is_greedy and setting.growth is not None and setting.growth.has_given_candidates:
      if (tree, setting.growth) in given:
        continue
      given.add((tree, setting.growth))
    is_single = tree.num_nodes > 0 and tree.is_chain
    if draft.has_mixed_positions or not (is_single and method.max_drafts is None and not method.is_seed_exact):
      fit.append(setting)
  if reasons and not any(each.tree.num_nodes for each in fit):
    raise ValueError(collections.Counter(reasons.values()).most_common(1)[0][0])
  taken = {setting.method.name for setting in fit}
  return fit, {name: reason for name, reason in reasons.items() if name not in taken}


def default_settings(draft: Model | Drafter | None, *, is_greedy: bool = False) -> list[Setting]:
  """Autoregressive decoding, and every lossless method that takes the draft's guesses, on chains of several sizes.

  At temperature 0 all samples of a draft are equal: there are single chains, and trees of likeliest guesses.
  """
  drafter, settings = as_drafter(draft), [Setting(METHODS['autoregressive'])]
  if drafter is None:
    return settings
  may_grow = is_greedy and not drafter.has_given_candidates and not drafter.has_mixed_positions
  sizes = [(1, 1), *((k, length) for length in DRAFT_LENGTHS for k in ((1,) if may_grow else NUM_DRAFTS))]
  for method in METHODS.values():
    if method.max_drafts != 0:
      settings += [Setting.of_chains(method, *size) for size in sizes]
      trees = map(TokenTree.slots, GREEDY_WIDTHS if may_grow and method.max_drafts is None else ())
      settings += [Setting(method, 0, tree.max_depth, tree, Likeliest()) for tree in trees]
  return fitting(settings, drafter, is_greedy=is_greedy)[0]
