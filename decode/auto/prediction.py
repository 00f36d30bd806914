"""`--method=auto`: `spectr_jax.auto` on the options' grid and prompts, with a file that keeps its measurements."""

from __future__ import annotations

import dataclasses

from etils import epath

from common.output_files import OutputFiles
from decode.auto.calibration_file import check_conditions, complete_settings, conditions_of, read_calibration
from decode.auto.grid import grid
from decode.experiment.inputs import inputs_of
from decode.experiment.workload import Workload
from spectr_jax import Drafter
from spectr_jax.auto.prediction import Prediction, measure, predict
from spectr_jax.auto.trial import Notify, Trial
from spectr_jax.sharding import is_primary


def trial_of(workload: Workload) -> Trial:
  """The first prompts, with seeds that the options' runs do not use."""
  options = workload.options
  some = workload.take(max(options.calibration_prompts, 2 * workload.batch_size))
  return Trial(
    target=workload.target,
    draft=workload.draft,
    tokens=some.tokens,
    lengths=some.lengths,
    # The first unused seed is for acceptance rates.
    keys_fn=lambda number: some.keys((options.seeds[-1] + 2 + number) % 2**32),
    batch_size=some.batch_size,
    max_new_tokens=options.max_new_tokens,
    sampling=options.sampling,
    eos_ids=workload.tokenizer.eos_ids,
    logprobs=options.logprobs,
    sharding=workload.sharding,
  )


def predict_all(workload: Workload, notify: Notify) -> list[Prediction]:
  """Predictions for the options' grid, the fastest first, from new measurements or the file of an earlier run.

  The file is written after each program, and goes on where a run was interrupted.

  Args:
    workload: Models and prompts.
    notify: Called with the current activity, the steps done and the steps in total.

  Raises:
    ValueError: The file is unusable, or was measured under other conditions.
  """
  options = workload.options
  settings = grid(options, workload.draft.max_depth if isinstance(workload.draft, Drafter) else None)
  conditions = conditions_of(workload)
  known = None
  if options.calibration and epath.Path(options.calibration).exists():
    known = read_calibration(options.calibration)
    check_conditions(known, conditions, options.calibration)
    if known.is_complete:
      return predict(known, complete_settings(known, settings, options.calibration, is_short=options.has_short_grid))
  # The file is opened before anything is measured, to find out whether it is writable. One process writes.
  inputs = inputs_of(dataclasses.replace(options, calibration=None))
  with OutputFiles(calibration=options.calibration if is_primary() else None).apart_from(inputs) as files:
    calibration, settings = measure(
      trial_of(workload),
      settings,
      conditions,
      notify,
      is_short=options.has_short_grid,
      known=known,
      keep=lambda measured: files.write(calibration=measured.to_json()),
    )
  return predict(calibration, settings)
