"""The file in which `--method=auto` keeps what it measures."""

from __future__ import annotations

from typing import Any

from etils import epath

from common.json_file import read_json
from decode.experiment.settings import Setting
from decode.experiment.workload import Workload
from spectr_jax.auto.calibration import FORMAT, Calibration, Observation
from spectr_jax.auto.plan import Program, plan, programs_of
from spectr_jax.auto.setting import baseline_among, tuned, with_thresholds
from spectr_jax.io.foreign import FLAG, check_object, list_of, map_of, object_of, real, whole

_FIELDS = {
  'is_complete': FLAG,
  'conditions': object_of({}),
  'draft_seconds': map_of(real(0)),
  'target_seconds': map_of(real(above=0)),
  'observations': map_of(
    object_of(
      {
        'num_batches': whole(1),
        'num_tokens': whole(1),
        'row_calls': list_of(whole(1)),
        'kept': list_of(whole()),
        'prefill_seconds': real(0),
        'round_seconds': real(above=0),
      }
    )
  ),
}


def read_calibration(path: epath.PathLike) -> Calibration:
  """Reads a file that `--calibration` wrote.

  Raises:
    ValueError: The file cannot be read or is not a calibration.
  """
  content = read_json(path, 'calibration', '--calibration writes one')
  try:
    content = check_object(content, _FIELDS, 'it')
    if content.pop('format') != FORMAT:
      raise ValueError(f'format {FORMAT} is read')
    content['target_seconds'] = {int(size): seconds for size, seconds in content['target_seconds'].items()}
    content['observations'] = {name: Observation(**found) for name, found in content['observations'].items()}
    found = Calibration(**content)  # without `is_complete` it is of a version that wrote complete ones only
    if None in vars(found).values() or not found.conditions or not found.target_seconds:
      raise ValueError('something is missing')
    if any(None in vars(each).values() or not each.row_calls for each in found.observations.values()):
      raise ValueError('something is missing in an observation')
    return found
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(f'{path} is no calibration ({error!r}); --calibration writes one') from error


def check_conditions(calibration: Calibration, conditions: dict[str, Any], path: epath.PathLike) -> None:
  """Checks that the calibration is for these conditions.

  Args:
    calibration: The measurements.
    conditions: The conditions of this run, from `conditions_of`.
    path: The calibration's file, for messages.

  Raises:
    ValueError: The calibration is for something else; the message names the difference.
  """
  for name, value in conditions.items():
    if calibration.conditions.get(name) != value:
      raise ValueError(
        f'{path} was measured with {name} {calibration.conditions.get(name)}, not {value}; name a new file'
      )


def _missing(calibration: Calibration, settings: list[Setting], *, is_short: bool) -> list[Program]:
  return [each for each in plan(calibration, settings, is_short=is_short)[1] if not each.is_in(calibration)]


def complete_settings(
  calibration: Calibration, settings: list[Setting], path: epath.PathLike, *, is_short: bool
) -> list[Setting]:
  """The settings that a complete calibration compares: the grid, or few of it, and the thresholds that were tried.

  Args:
    calibration: The measurements.
    settings: All settings of the grid.
    path: The calibration's file, for messages.
    is_short: Whether a short grid will do.

  Raises:
    ValueError: The calibration lacks some; the message names the first.
  """
  is_short = is_short and bool(_missing(calibration, settings, is_short=False))
  compared = plan(calibration, settings, is_short=is_short)[0]
  # Those that were measured: the finalists' second run may have made another tree the fastest that grows.
  further = [setting for setting in with_thresholds(compared) if str(setting) in calibration.observations]
  missing = _missing(calibration, settings, is_short=is_short)
  if not missing:
    tried = programs_of([baseline_among(compared), *(further or tuned(compared))])
    missing = [each for each in tried if not each.is_in(calibration)]
  if missing:
    of_missing = [each.setting for each in missing]
    first = next((each for each in compared if each in of_missing), of_missing[0])
    raise ValueError(f'{path} was measured for another grid, without {first}; name a new file')
  return compared + further


def conditions_of(workload: Workload) -> dict[str, Any]:
  """The conditions that a calibration depends on, as JSON values."""
  options, info = workload.options, workload.info
  names = 'mesh', 'draft_mesh', 'temperature', 'top_k', 'top_p', 'min_p', 'max_new_tokens'
  return {
    'device': info['device'],
    'models': info['models'],
    'batch_size': workload.batch_size,
    'lookup': [options.lookup_max, options.lookup_min] if options.has_lookup else None,
    **{name: getattr(options, name) for name in names},
  }
