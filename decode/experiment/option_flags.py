"""The fields of `DecodeOptions` as flags, for the commands that take them."""

import dataclasses

from absl import flags

from common import command_line
from decode.experiment.options import DecodeOptions
from spectr_jax import METHODS

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(DecodeOptions)}


def _define(define, name, text):
  default = _DEFAULTS[name]
  return define(name, list(map(str, default)) if isinstance(default, tuple) else default, text)


_FLAGS = (
  _define(flags.DEFINE_string, 'target', 'Directory of the target model.'),
  _define(flags.DEFINE_string, 'draft', 'Directory of the draft model.'),
  _define(flags.DEFINE_string, 'dtype', "Type to compute in, float32 or bfloat16; '' for each model's own."),
  _define(
    flags.DEFINE_list,
    'method',
    f'Methods, separated by commas, of {", ".join(METHODS)}; or auto, the one predicted to be the fastest.',
  ),
  _define(
    flags.DEFINE_list,
    'num_drafts',
    'K, drafts per round; several, separated by commas, run the grid. Default 2, for auto 1,2,4,8.',
  ),
  _define(
    flags.DEFINE_list,
    'draft_length',
    'L, tokens per draft; several, separated by commas, run the grid. Default 8, for auto 2,4,8.',
  ),
  _define(
    flags.DEFINE_multi_string,
    'tree',
    'Tree of guesses: chains (K drafts of L tokens), prefix:FACTORS (prefix:4,2,2,1), specinfer (three chains of L'
    ' tokens that share two) or optimal:BUDGET (the best of at most so many nodes); repeat the flag for several.',
  ),
  _define(
    flags.DEFINE_string,
    'acceptance',
    'JSON that --output wrote in a run with optimal:BUDGET; its rates are used instead of measuring them again.',
  ),
  _define(
    flags.DEFINE_string, 'calibration', 'JSON file in which --method=auto keeps what it measures, and finds it again.'
  ),
  _define(flags.DEFINE_integer, 'calibration_prompts', 'Prompts that auto decodes to measure; at least two batches.'),
  _define(
    flags.DEFINE_string,
    'children',
    "How siblings are drawn: independent, without_replacement or first_arrivals; '' for each method's own.",
  ),
  _define(flags.DEFINE_float, 'epsilon', 'What decoding_opt and decoding_uno accept too much; they are not lossless.'),
  _define(flags.DEFINE_bool, 'gumbel', 'Sample autoregressively by Gumbel-max, keyed by position: what ersd gives.'),
  _define(
    flags.DEFINE_bool,
    'share_of_optimum',
    'Compare acceptance with the most that token-level verification of the same candidates could reach; takes time.',
  ),
  _define(flags.DEFINE_bool, 'breakdown', 'Time the parts of a round: draft, target, verification, and the rest.'),
  _define(
    flags.DEFINE_string,
    'profile_dir',
    "Directory for what JAX's profiler records of some rounds of every setting; for TensorBoard or Perfetto.",
  ),
  _define(flags.DEFINE_float, 'temperature', 'Sampling temperature; 0 decodes greedily.'),
  _define(flags.DEFINE_integer, 'top_k', 'Sample from the k likeliest tokens; 0 for all.'),
  _define(flags.DEFINE_float, 'top_p', 'Sample from the fewest likeliest tokens of this mass.'),
  _define(flags.DEFINE_string, 'prompt', 'One text to continue.'),
  _define(
    flags.DEFINE_string,
    'prompts',
    'File of texts to continue: .jsonl with a "prompt" field, else a text per line; .json, .tsv and .gz are read too.'
    ' Default: the shipped prompts.',
  ),
  _define(flags.DEFINE_integer, 'num_prompts', 'Prompts to take from the beginning of the file, at most.'),
  _define(flags.DEFINE_bool, 'skip_long', 'Leave out prompts that are too long instead of refusing them.'),
  _define(flags.DEFINE_integer, 'batch_size', 'Prompts decoded together, at most.'),
  _define(flags.DEFINE_integer, 'max_new_tokens', 'New tokens per prompt, at most.'),
  _define(flags.DEFINE_integer, 'num_seeds', 'Runs of every setting, each with its own seed.'),
  _define(flags.DEFINE_integer, 'seed', 'The first seed.'),
  _define(
    flags.DEFINE_string,
    'mesh',
    "Devices to divide the work over, as data:8,model:2: rows over data, the target over model; '' for one device.",
  ),
  _define(flags.DEFINE_string, 'draft_mesh', 'The draft is whole on every device along model, or divided over it.'),
)


def _value(flag):
  value = flag.value
  if not isinstance(value, list):
    return value
  values = tuple(entry.strip() for entry in value)
  if flag.name in ('method', 'tree'):
    return values
  return command_line.parse_numbers(flag.name, values)


def read_options(**fixed) -> DecodeOptions:
  """The options that the flags give. Keyword arguments override flags.

  Raises:
    ValueError: A value is out of range.
  """
  return DecodeOptions(**{flag.name: _value(flag) for flag in _FLAGS} | fixed)
