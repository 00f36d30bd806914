"""The files that a run reads, which its outputs must not overwrite."""

from __future__ import annotations

from etils import epath

from common.text_files import Files
from decode.experiment.options import SHIPPED_PROMPTS, DecodeOptions
from decode.experiment.prompt_sets import split_set
from spectr_jax.io.load import files_of


def inputs_of(options: DecodeOptions) -> dict[str, list[epath.Path]]:
  """Files and folders by the option that names them, whether they exist or not. Models on the hub are not looked for.

  Args:
    options: The options.

  Raises:
    ValueError: No file matches a pattern, or the index of a model's files is damaged.
  """
  inputs = {'target': files_of(options.target)}
  if options.draft_model:
    inputs['draft'] = files_of(options.draft_model)
  if options.prompt is None:
    inputs['prompts'] = [split_set(SHIPPED_PROMPTS if options.prompts is None else options.prompts)[1]]
  if options.lookup_corpus:
    inputs['lookup_corpus'] = list(Files(options.lookup_corpus).paths)
  for name in ('acceptance', 'calibration'):
    if getattr(options, name) is not None:
      inputs[name] = [epath.Path(getattr(options, name))]
  return inputs
