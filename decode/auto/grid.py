"""The settings that `--method=auto` compares, and which of them are decoded to predict the others."""

from __future__ import annotations

import dataclasses

from decode.experiment.options import AUTO_GRID, AUTO_TREES, DecodeOptions
from decode.experiment.settings import Setting, settings_of
from spectr_jax import METHODS

# Tried with the fastest growing tree, besides 0. A threshold is data: none of them is compiled.
_THRESHOLDS = 0.02, 0.05, 0.1


def _with_trees(options: DecodeOptions) -> DecodeOptions:
  """The options with the trees to compare: at temperature 0 also trees of likeliest guesses, and single drafts only.

  There all samples of a draft are equal, so that several keep no more than one. Trees that the user names stay as they
  are, and so do the guesses of lookup, which differ.
  """
  if options.temperature or options.has_lookup or options.tree != ('chains',):
    return options
  is_default = options.num_drafts == AUTO_GRID['num_drafts']
  return dataclasses.replace(
    options, tree=('chains', *AUTO_TREES), num_drafts=(1,) if is_default else options.num_drafts
  )


def grid(options: DecodeOptions, max_depth: int | None = None) -> list[Setting]:
  """Autoregressive decoding, and every lossless method on every tree of the options that it takes.

  With one draft, methods for several drafts equal `speculative` or `block` and are left out, except for seed-exact
  ones. They stay where lookup stands beside a model, since those two do not take its guesses. At temperature 0 every
  method keeps the same of a tree of likeliest guesses, the longest path that the target takes, so the first method
  stands for all.

  Args:
    options: The options.
    max_depth: The deepest tree that the draft guesses for; None for no limit. Deeper ones are left out.

  Raises:
    ValueError: All trees are too deep.
  """
  settings, is_mixed = [], options.has_lookup and bool(options.draft_model)
  options, given = _with_trees(options), set()
  for method in METHODS.values():
    if not method.is_lossless or not options.takes_guesses(method):
      continue
    for setting in settings_of(method, options, skip_unfit=True):
      if not options.temperature and setting.growth is not None and setting.growth.gives:
        if setting.spec in given:
          continue
        given.add(setting.spec)
      is_single = setting.tree.num_nodes > 0 and setting.tree.is_chain
      if is_mixed or not (is_single and method.max_drafts is None and not method.is_seed_exact):
        settings.append(setting)
  fitting = [each for each in settings if max_depth is None or each.tree.max_depth <= max_depth]
  if len(settings) > len(fitting) and not any(each.tree.num_nodes for each in fitting):
    raise ValueError(f'the draft guesses {max_depth} tokens ahead, and all trees are deeper')
  return list(dict.fromkeys(fitting))


def tuned(settings: list[Setting]) -> list[Setting]:
  """The fastest setting whose trees grow with further thresholds; nothing if no trees grow, or not from 0.

  Args:
    settings: All settings of the grid, the fastest first.
  """
  growing = [setting for setting in settings if setting.growth is not None]
  return with_thresholds(growing[:1])


def with_thresholds(settings: list[Setting]) -> list[Setting]:
  """The settings whose trees grow from 0, with each of the other thresholds."""
  growing = [each for each in settings if each.growth is not None and not each.growth.threshold]
  return [setting.with_threshold(threshold) for setting in growing for threshold in _THRESHOLDS]


def _is_chains(setting: Setting) -> bool:
  return setting.spec is not None and setting.spec.name == 'chains'


def _decides_by_token(setting: Setting) -> bool:
  return _is_chains(setting) and setting.method.is_token_level


def tree_name_of(setting: Setting) -> str:
  """The name of a setting's tree among the costs of drafting, with the numbers of chains."""
  return setting.tree_name if not _is_chains(setting) else f'chains {setting.num_drafts}x{setting.draft_length}'


def reference_of(setting: Setting, settings: list[Setting]) -> Setting:
  """The reference setting on the same chains: the first setting that decides token by token.

  Args:
    setting: A setting that decides token by token.
    settings: All settings of the grid.
  """
  return next(other for other in settings if _decides_by_token(other) and tree_name_of(other) == tree_name_of(setting))


def source_of(setting: Setting, settings: list[Setting]) -> Setting:
  """The setting whose run gives the tokens of `setting`: itself, or the one with the longest drafts.

  Args:
    setting: A setting.
    settings: All settings of the grid.
  """
  if not _decides_by_token(setting) or reference_of(setting, settings) == setting:
    return setting
  alike = [
    other
    for other in settings
    if _is_chains(other) and (other.method, other.num_drafts) == (setting.method, setting.num_drafts)
  ]
  return max(alike, key=lambda other: other.draft_length)
