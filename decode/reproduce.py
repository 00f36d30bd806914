"""Measures a table of the papers beside the published figures: `python -m decode.reproduce --table=NAME`."""

from absl import flags
from etils import epath

from decode import figures, report, table_report
from decode.options import DecodeOptions
from decode.output_files import OutputFiles
from decode.table import Request
from decode.tables import TABLES
from spectr_jax.io import command_line

_SHIPPED = 'shipped'

_TABLE = flags.DEFINE_string('table', None, f'What to measure: {", ".join(TABLES)}.')
_TARGET = flags.DEFINE_string('target', DecodeOptions.target, 'Directory of the target model.')
_DRAFT = flags.DEFINE_list(
  'draft', [DecodeOptions.draft], 'Directory of the draft model, or NAME=DIRECTORY; several for spectr_table2 and 4.'
)
_PROMPTS = flags.DEFINE_list(
  'prompts',
  None,
  'Files of prompts, or NAME=FILE, separated by commas; one named as a published set (HumanEval, GSM8K, MGSM, LM1B,'
  ' Alpaca) is compared with that. Default: the shipped prompts.',
)
_OUTPUT = flags.DEFINE_string('output', None, 'Directory for NAME.json, NAME.md and NAME.png.')
_DTYPE = flags.DEFINE_string('dtype', '', "Type to compute in, float32 or bfloat16; '' for each model's own.")
_SEED = flags.DEFINE_integer('seed', None, 'The first seed; default 0.', lower_bound=0)
_SIZES = {
  'num_prompts': flags.DEFINE_integer('num_prompts', None, 'Prompts of each set, at most.', lower_bound=1),
  'num_seeds': flags.DEFINE_integer('num_seeds', None, 'Runs of every setting.', lower_bound=1),
  'max_new_tokens': flags.DEFINE_integer('max_new_tokens', None, 'New tokens per prompt, at most.', lower_bound=1),
  'batch_size': flags.DEFINE_integer('batch_size', None, 'Prompts decoded together, at most.', lower_bound=1),
  'num_runs': flags.DEFINE_integer('num_runs', None, 'Repetitions of a timed call.', lower_bound=1),
  'context': flags.DEFINE_integer('context', None, 'Room of the caches of a timed call, tokens.', lower_bound=1),
  'num_drafts': flags.DEFINE_list('num_drafts', None, 'K, several separated by commas.'),
  'draft_length': flags.DEFINE_list('draft_length', None, 'L, several separated by commas.'),
}  # fmt: skip


def _given(name: str):
  value = _SIZES[name].value
  return command_line.parse_numbers(name, value) if isinstance(value, list) else value


def main(argv):
  del argv
  name = _TABLE.value
  if name not in TABLES:
    raise ValueError(f'table must be one of {", ".join(TABLES)}, got {name or "none"}')
  table = TABLES[name]
  if not table.has_prompts and not (_PROMPTS.value is None and _SEED.value is None):
    raise ValueError(f'{name} decodes nothing: prompts and seed are not for it')
  prompts = {_SHIPPED: None} if _PROMPTS.value is None else command_line.parse_paths('prompts', _PROMPTS.value)
  request = Request(
    target=_TARGET.value,
    drafts=command_line.parse_paths('draft', _DRAFT.value),
    prompts=prompts if table.has_prompts else {},
    sizes=table.choose_sizes({size: _given(size) for size in _SIZES}),
    dtype=_DTYPE.value,
    seed=_SEED.value or 0,
  )
  paths = {}
  if _OUTPUT.value is not None:
    figures.check_available()
    directory = epath.Path(_OUTPUT.value)
    directory.mkdir(parents=True, exist_ok=True)
    paths = {kind: directory / f'{name}.{kind}' for kind in ('json', 'md', 'png')}
  with OutputFiles(**paths) as outputs:
    with report.show_progress() as notify:
      found = table.run(request, notify)
    lines = table_report.describe(table, request, found)
    table_report.print_table(table, found.rows, lines)
    if paths:
      outputs.write(
        json=table_report.to_json(name, table, request, found, lines),
        md=table_report.to_markdown(table, found.rows, lines),
        png=figures.draw(table, found.rows, '; '.join(lines[:2])),
      )


if __name__ == '__main__':
  command_line.run(main)
