"""The settings that are compared, and which of them are decoded to predict the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np

from spectr_jax.draft import Confident, Drafter, Estimated, Likeliest, as_drafter, growing
from spectr_jax.methods import METHODS, Method
from spectr_jax.model import Model
from spectr_jax.tree import TokenTree

# K and L that are compared, and at temperature 0 the likeliest guesses: 8, 16, 16 and 32 of them.
NUM_DRAFTS, DRAFT_LENGTHS = (1, 2, 4, 8), (2, 4, 8)
GREEDY_WIDTHS = (2,) * 4, (4,) * 4, (2,) * 8, (4,) * 8
# Tried with the fastest growing tree, besides 0. A threshold is data: none of them is compiled.
_THRESHOLDS = 0.02, 0.05, 0.1


@dataclasses.dataclass(frozen=True)
class Setting:
  """A method with its tree.

  Attributes:
    method: The method.
    num_drafts: K for chains, else 0.
    draft_length: L, the depth of the tree.
    tree: The tree; empty for a method that drafts nothing.
    growth: The rule by which the draft grows its trees; None for one tree for all rows.
  """

  method: Method
  num_drafts: int = 0
  draft_length: int = 0
  tree: TokenTree = TokenTree()
  growth: Likeliest | Confident | Estimated | None = None

  @classmethod
  def of_chains(cls, method: Method, num_drafts: int, draft_length: int) -> Setting:
    """The method on K chains of L tokens."""
    return cls(method, num_drafts, draft_length, TokenTree.chains(num_drafts, draft_length))

  @property
  def tree_name(self) -> str:
    """The tree as text, the same for equal trees of other methods."""
    if self.num_drafts:
      return 'chains'
    if not self.tree.num_nodes:
      return 'none'
    if self.growth is None:
      return f'parents:{",".join(map(str, self.tree.parents))}'
    widths = np.bincount(self.tree.depths)[1:]
    return f'{type(self.growth).__name__.lower()}:{",".join(map(str, widths))}{self.threshold_name}'

  @property
  def threshold_name(self) -> str:
    """The threshold of a growing tree as text; empty for none."""
    return f' from {self.growth.threshold:g}' if self.growth is not None and self.growth.threshold else ''

  def __str__(self):
    if self.num_drafts:
      return f'{self.method.name} K={self.num_drafts} L={self.draft_length}'
    return f'{self.method.name} {self.tree_name}' if self.tree.num_nodes else self.method.name

  def drafter(self, draft: Model | Drafter | None) -> Model | Drafter | None:
    """The draft as the setting uses it: one that grows trees, or the draft itself."""
    drafter = None if self.growth is None else as_drafter(draft)
    return draft if self.growth is None or drafter is None else growing(drafter, self.growth)

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


def worth_comparing(
  settings: Sequence[Setting], *, is_greedy: bool, is_mixed: bool, max_depth: int | None = None
) -> list[Setting]:
  """The settings of lossless methods, at most `max_depth` deep, without those that are equal to others.

  With one draft, methods for several drafts equal `speculative` or `block` and are left out, except for seed-exact
  ones. They stay where lookup stands beside a model, since those two do not take its guesses. At temperature 0 every
  method keeps the same of a tree of likeliest guesses, the longest path that the target takes, so the first method
  stands for all. ValueError if all trees are too deep.
  """
  kept, given = [], set()
  for setting in settings:
    method = setting.method
    if not method.is_lossless:
      continue
    if is_greedy and setting.growth is not None and setting.growth.gives:
      if (setting.tree, setting.growth) in given:
        continue
      given.add((setting.tree, setting.growth))
    is_single = setting.tree.num_nodes > 0 and setting.tree.is_chain
    if is_mixed or not (is_single and method.max_drafts is None and not method.is_seed_exact):
      kept.append(setting)
  fitting = [each for each in kept if max_depth is None or each.tree.max_depth <= max_depth]
  if len(kept) > len(fitting) and not any(each.tree.num_nodes for each in fitting):
    raise ValueError(f'the draft guesses {max_depth} tokens ahead, and all trees are deeper')
  return list(dict.fromkeys(fitting))


def default_settings(draft: Model | Drafter | None, *, is_greedy: bool = False) -> list[Setting]:
  """Autoregressive decoding, and every lossless method that takes the draft's guesses, on chains of several sizes.

  At temperature 0 all samples of a draft are equal: there are single chains, and trees of likeliest guesses.
  """
  drafter = as_drafter(draft)
  if drafter is None:
    return [Setting(METHODS['autoregressive'])]
  may_grow = is_greedy and not drafter.gives and not drafter.mixes
  settings = [Setting(METHODS['autoregressive'])]
  for method in METHODS.values():
    takes = method.takes_mixed if drafter.mixes else method.takes_given or not drafter.gives
    if method.max_drafts == 0 or not takes or (drafter.feature_layers and method.needs_constant_draft):
      continue
    counts = (1,) if may_grow else NUM_DRAFTS
    most = max(counts) if method.max_drafts is None else method.max_drafts
    sizes = [(1, 1), *((min(k, most), length) for length in DRAFT_LENGTHS for k in counts)]
    settings += [Setting.of_chains(method, *size) for size in sizes]
    if may_grow and method.takes_grown and method.takes_given and method.max_drafts is None:
      trees = map(TokenTree.slots, GREEDY_WIDTHS)
      settings += [Setting(method, 0, tree.max_depth, tree, Likeliest()) for tree in trees]
  return worth_comparing(settings, is_greedy=is_greedy, is_mixed=drafter.mixes, max_depth=drafter.max_depth)


def tuned(settings: Sequence[Setting]) -> list[Setting]:
  """The fastest setting whose trees grow with further thresholds; nothing if no trees grow, or not from 0."""
  growing = [setting for setting in settings if setting.growth is not None]
  return with_thresholds(growing[:1])


def with_thresholds(settings: Sequence[Setting]) -> list[Setting]:
  """The settings whose trees grow from 0, with each of the other thresholds."""
  growing = [each for each in settings if each.growth is not None and not each.growth.threshold]
  return [setting.with_threshold(threshold) for setting in growing for threshold in _THRESHOLDS]


def _decides_by_token(setting: Setting) -> bool:
  return setting.num_drafts > 0 and setting.method.is_token_level


def tree_name_of(setting: Setting) -> str:
  """The name of a setting's tree among the costs of drafting, with the numbers of chains."""
  return f'chains {setting.num_drafts}x{setting.draft_length}' if setting.num_drafts else setting.tree_name


def reference_of(setting: Setting, settings: Sequence[Setting]) -> Setting:
  """The reference setting on the same chains: the first setting that decides token by token."""
  return next(other for other in settings if _decides_by_token(other) and tree_name_of(other) == tree_name_of(setting))


def source_of(setting: Setting, settings: Sequence[Setting]) -> Setting:
  """The setting whose run gives the tokens of `setting`: itself, or the one with the longest drafts."""
  if not _decides_by_token(setting) or reference_of(setting, settings) == setting:
    return setting
  alike = [
    other
    for other in settings
    if other.num_drafts and (other.method, other.num_drafts) == (setting.method, setting.num_drafts)
  ]
  return max(alike, key=lambda other: other.draft_length)
