"""The file in which `--method=auto` keeps what it measures."""

from __future__ import annotations

from typing import Any

from etils import epath

from common.json_file import read_json
from decode.experiment.settings import Setting
from decode.experiment.workload import Workload
from spectr_jax.auto.calibration import FORMAT, Calibration, Observation
from spectr_jax.auto.setting import source_of, tree_name_of
from spectr_jax.io.foreign import check_object, list_of, map_of, object_of, real, whole

_FIELDS = {
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
    if not all(content.values()) or any(None in vars(found).values() for found in content['observations'].values()):
      raise ValueError('something is missing')
    return Calibration(**content)
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(f'{path} is no calibration ({error!r}); --calibration writes one') from error


def check_calibration(
  calibration: Calibration, conditions: dict[str, Any], settings: list[Setting], path: epath.PathLike
) -> None:
  """Checks that the calibration is for these conditions and settings.

  Args:
    calibration: The measurements.
    conditions: The conditions of this run, from `conditions_of`.
    settings: All settings of the grid.
    path: The calibration's file, for messages.

  Raises:
    ValueError: The calibration is for something else; the message names the difference.
  """
  for name, value in conditions.items():
    if calibration.conditions.get(name) != value:
      raise ValueError(
        f'{path} was measured with {name} {calibration.conditions.get(name)}, not {value}; name a new file'
      )
  missing = [str(s) for s in settings if str(source_of(s, settings)) not in calibration.observations]
  missing += [str(s) for s in settings if tree_name_of(s) not in calibration.draft_seconds]
  missing += [str(s) for s in settings if s.tree.num_nodes not in calibration.target_seconds]
  if missing:
    raise ValueError(f'{path} was measured for another grid, without {missing[0]}; name a new file')


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
