"""`--method=auto`: `spectr_jax.auto` on the options' grid and prompts, with a file that keeps its measurements."""

from __future__ import annotations

import dataclasses
from typing import Any

from etils import epath

from common.json_file import load_ours
from common.output_files import OutputFiles
from decode.experiment.model_options import AUTO_GRID
from decode.experiment.options import DecodeOptions
from decode.experiment.records import hash_constraint
from decode.experiment.settings import Setting, settings_of
from decode.experiment.workload import Workload
from spectr_jax import METHODS
from spectr_jax.auto.calibration import FORMAT, Calibration
from spectr_jax.auto.measurement import KeysFn, predict_settings
from spectr_jax.auto.prediction import Prediction
from spectr_jax.auto.setting import GREEDY_WIDTHS, worth_comparing
from spectr_jax.auto.trial import Notify
from spectr_jax.draft import as_drafter
from spectr_jax.sharding import is_primary

# Trees that are added at temperature 0: 8, 16, 16 and 32 of the draft's likeliest guesses.
GREEDY_TREES = tuple(f'likeliest:{",".join(map(str, widths))}' for widths in GREEDY_WIDTHS)


def grid(options: DecodeOptions, max_depth: int | None = None, *, reads_features: bool = False) -> list[Setting]:
  """Autoregressive decoding, and every lossless method on every tree of the options that it takes.

  At temperature 0 all samples of a draft are equal, so that several keep no more than one: there are trees of likeliest
  guesses, and single drafts only. Trees that the user names stay as they are, and so do the guesses of lookup, which
  differ. Settings that are equal to others are left out, and trees deeper than `max_depth`; see `worth_comparing`.
  Methods that need a constant draft are left out where the draft `reads_features`.
  """
  is_greedy = not options.temperature
  options = dataclasses.replace(options, grid='')  # a short grid may not be combined with the trees that follow
  if is_greedy and not options.has_lookup and options.tree == ('chains',):
    is_default = options.num_drafts == AUTO_GRID['num_drafts']
    num_drafts = (1,) if is_default else options.num_drafts
    options = dataclasses.replace(options, tree=('chains', *GREEDY_TREES), num_drafts=num_drafts)
  grids = [options]
  if options.draft_length == AUTO_GRID['draft_length'] and 1 in options.num_drafts and 'chains' in options.tree:
    # A single guess is worth a run where each costs the target much, several of one token are not.
    grids.insert(0, dataclasses.replace(options, tree=('chains',), num_drafts=(1,), draft_length=(1,)))
  settings = [
    setting
    for method in METHODS.values()
    if method.is_lossless and options.takes_guesses(method) and not (reads_features and method.needs_constant_draft)
    for each in grids
    for setting in settings_of(method, each, skip_unfit=True)
  ]
  is_mixed = options.has_lookup and bool(options.draft_model)
  return worth_comparing(settings, is_greedy=is_greedy, is_mixed=is_mixed, max_depth=max_depth)


def read_calibration(path: epath.PathLike) -> Calibration:
  advice = '--calibration writes one'
  calibration = load_ours(path, Calibration, 'calibration', advice)
  if calibration.format != FORMAT:
    raise ValueError(f'{path} is no calibration of this version (format {calibration.format}); {advice}')
  return calibration


def _conditions_of(workload: Workload) -> dict[str, Any]:
  options, info = workload.options, workload.info
  names = 'mesh', 'draft_mesh', 'temperature', 'top_k', 'top_p', 'min_p', 'max_new_tokens'
  return {
    'device': info['device'],
    'models': info['models'],
    'batch_size': workload.batch_size,
    'lookup': [options.lookup_max, options.lookup_min] if options.has_lookup else None,
    'constraint': hash_constraint(options),
    **{name: getattr(options, name) for name in names},
  }


def trial_of(workload: Workload) -> tuple[Workload, KeysFn]:
  """The first prompts, at least two batches, and their keys of pass after pass, of seeds that the runs do not use."""
  seeds = workload.options.seeds
  some = workload.take(max(workload.options.calibration_prompts, 2 * workload.batch_size))
  # The first unused seed is for acceptance rates.
  return some, lambda number: some.keys((seeds[-1] + 2 + number) % 2**32)


def predict_all(workload: Workload, notify: Notify) -> list[Prediction]:
  """Predictions for the options' grid, the fastest first, from new measurements or the file of an earlier run.

  The file is written after each program, and goes on where a run was interrupted. A file that is unusable, or was
  measured under other conditions, is a `ValueError`.
  """
  options, path = workload.options, workload.options.calibration
  drafter = as_drafter(workload.draft)
  known = read_calibration(path) if path and epath.Path(path).exists() else None
  # The file is opened before anything is measured, to find out whether it is writable. One process writes.
  is_written = is_primary() and not (known is not None and known.is_complete)
  inputs = dataclasses.replace(options, calibration=None).inputs()
  with OutputFiles(calibration=path if is_written else None).apart_from(inputs) as files:
    return predict_settings(
      *trial_of(workload),
      grid(options, drafter and drafter.max_depth, reads_features=bool(drafter and drafter.feature_layers)),
      _conditions_of(workload),
      notify,
      is_short=options.has_short_grid,
      known=known,
      source=str(path),
      keep=lambda measured: files.write(calibration=measured.to_json()),
    )
