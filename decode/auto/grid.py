"""The settings that `--method=auto` compares."""

from __future__ import annotations

import dataclasses

from decode.experiment.options import AUTO_GRID, AUTO_TREES, DecodeOptions
from decode.experiment.settings import Setting, settings_of
from spectr_jax import METHODS
from spectr_jax.auto.setting import worth_comparing


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

  Settings that are equal to others are left out, see `worth_comparing`.

  Args:
    options: The options.
    max_depth: The deepest tree that the draft guesses for; None for no limit. Deeper ones are left out.

  Raises:
    ValueError: All trees are too deep.
  """
  is_mixed = options.has_lookup and bool(options.draft_model)
  options = _with_trees(options)
  every = [
    setting
    for method in METHODS.values()
    if method.is_lossless and options.takes_guesses(method)
    for setting in settings_of(method, options, skip_unfit=True)
  ]
  return worth_comparing(every, is_greedy=not options.temperature, is_mixed=is_mixed, max_depth=max_depth)
