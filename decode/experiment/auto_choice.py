"""`--method=auto`: `spectr_jax.auto` on the options' grid and prompts, with a file that keeps what it measured."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

from etils import epath

from common.json_file import load_ours
from common.output_files import OutputFiles
from decode.experiment.exports import hash_constraint
from decode.experiment.model_options import AUTO_GRID
from decode.experiment.options import DecodeOptions
from decode.experiment.settings import settings_of
from decode.experiment.workload import Workload
from spectr_jax import METHODS, Drafter
from spectr_jax.auto import Setting, Speed
from spectr_jax.auto.measurement import KeysFn, time_settings
from spectr_jax.auto.observation import Observation
from spectr_jax.auto.setting import GREEDY_WIDTHS, fitting
from spectr_jax.auto.trial import Notify
from spectr_jax.draft import as_drafter
from spectr_jax.sharding import is_primary

FORMAT = 3  # of the file
# Trees that are added at temperature 0: 8, 16, 16 and 32 of the draft's likeliest guesses.
GREEDY_TREES = tuple(f'likeliest:{",".join(map(str, widths))}' for widths in GREEDY_WIDTHS)


@dataclasses.dataclass(frozen=True)
class Calibration:
  """The file of what was measured."""

  conditions: dict[str, Any]  # JSON values: device, models, sampling, batch size, new tokens
  observations: dict[str, Observation]  # by setting
  format: int = FORMAT

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self), indent=2) + '\n'


def grid(options: DecodeOptions, drafter: Drafter | None = None) -> tuple[list[Setting], dict[str, str]]:
  """Every method on every tree of the options, as far as they fit, and why methods do not fit; see `fitting`.

  At temperature 0 all samples of a draft are equal, so that several keep no more than one: there are trees of likeliest
  guesses, and single drafts only. Trees that the user names stay as they are, and so do the guesses of lookup, which
  differ.
  """
  is_greedy, methods = not options.sampling.temperature, options.methods
  if is_greedy and not options.models.has_lookup and methods.tree == ('chains',):
    is_default = methods.num_drafts == AUTO_GRID['num_drafts']
    num_drafts = (1,) if is_default else methods.num_drafts
    methods = dataclasses.replace(methods, tree=('chains', *GREEDY_TREES), num_drafts=num_drafts)
  grids = [methods]
  if methods.draft_length == AUTO_GRID['draft_length'] and 1 in methods.num_drafts and 'chains' in methods.tree:
    # A single guess is worth a run where each costs the target much, several of one token are not.
    grids.insert(0, dataclasses.replace(methods, tree=('chains',), num_drafts=(1,), draft_length=(1,)))
  settings = [each for method in METHODS.values() for some in grids for each in settings_of(method, some)]
  return fitting(settings, drafter or options.models.guesses, is_greedy=is_greedy)


def read_calibration(path: epath.PathLike) -> Calibration:
  advice = '--calibration writes one'
  calibration = load_ours(path, Calibration, 'calibration', advice)
  if calibration.format != FORMAT:
    raise ValueError(f'{path} is no calibration of this version (format {calibration.format}); {advice}')
  return calibration


def _conditions_of(workload: Workload) -> dict[str, Any]:
  options, info = workload.options, workload.info
  models = options.models
  names = 'mesh', 'draft_mesh', 'temperature', 'top_k', 'top_p', 'min_p', 'max_new_tokens'
  return {
    'device': info['device'],
    'models': info['models'],
    'batch_size': workload.batch_size,
    'lookup': [models.lookup_max, models.lookup_min] if models.has_lookup else None,
    'constraint': hash_constraint(options.sampling),
    'penalties': options.sampling.penalties or None,
    **{name: options.flags[name] for name in names},
  }


def trial_of(workload: Workload) -> tuple[Workload, KeysFn]:
  """The first prompts, at least two batches, and their keys of pass after pass, of seeds that the runs do not use."""
  seeds = workload.seeds
  some = workload.take(max(workload.options.methods.calibration_prompts, 2 * workload.batch_size))
  # The first unused seed is for acceptance rates.
  return some, lambda number: some.keys((seeds[-1] + 2 + number) % 2**32)


def speeds_of(workload: Workload, notify: Notify) -> tuple[list[Speed], dict[str, str]]:
  """The speeds of the settings of the options' grid that are timed, the fastest first; and why methods are not in it.

  The file of an earlier run is continued, and written after each setting. One that is unusable, or was measured under
  other conditions, is a `ValueError`.
  """
  options, path, conditions = workload.options, workload.options.methods.calibration, _conditions_of(workload)
  settings, left_out = grid(options, as_drafter(workload.draft))
  is_new = not (path and epath.Path(path).exists())
  known = Calibration(conditions, {}) if is_new else read_calibration(path)
  for name, value in conditions.items():
    if known.conditions.get(name) != value:
      raise ValueError(f'{path} was measured with {name} {known.conditions.get(name)}, not {value}; name a new file')
  inputs = options.replace(calibration=None).inputs()
  # A new file is opened before anything is measured, to find out whether it is writable. One process writes.
  files = OutputFiles(calibration=path if is_primary() else None).apart_from(inputs)
  with files if is_new else contextlib.nullcontext():
    speeds = time_settings(
      *trial_of(workload),
      settings,
      notify,
      is_short=options.methods.has_short_grid,
      known=known.observations,
      keep=lambda seen: files.write(calibration=Calibration(conditions, seen).to_json()),
    )
  return speeds, left_out
