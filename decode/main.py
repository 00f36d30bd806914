"""Decodes prompts with several methods and compares them: `python -m decode.main`.

With several processes each runs this command: those of a TPU pod find each other, others are told with
`--coordinator_address`, `--num_processes` and `--process_id`. The first one prints and writes.
"""

from absl import flags

from common import command_line, help_text, processes
from common.output_files import OutputFiles
from decode.experiment import records, report
from decode.experiment.console import show_progress
from decode.experiment.drafting import default_drafting
from decode.experiment.model_options import choose_draft
from decode.experiment.option_flags import read_values
from decode.experiment.options import DecodeOptions
from decode.experiment.run import run_decode
from spectr_jax.sharding import is_primary

_OUTPUT = flags.DEFINE_string('output', None, 'File for the results: JSON, or a table if it ends in .csv.')
_GENERATIONS = flags.DEFINE_string('generations', None, 'JSONL file for the continuations.')
help_text.in_group('Measurements and output', _OUTPUT, _GENERATIONS)


# What ends a run without a named method, whose types and tree are those of `_options`.
_MORE = (
  'This run shows what gains here. Others are a flag away: --method=autoregressive,speculative,spectr,race_traversal'
  ' --num_drafts=2 --draft_length=8 --dtype=bfloat16 for other methods and trees, --num_prompts=32 for narrower ranges,'
  ' --method=auto,autoregressive --dtype=bfloat16 for the fastest of all.'
)


def main(argv):
  del argv
  processes.run_together(decode)


def _options() -> DecodeOptions:
  """The options of the flags; without a named method, K and L of the device, and the shipped pair in its bfloat16."""
  values = read_values()
  if not flags.FLAGS['method'].using_default_value:
    return DecodeOptions(**values)
  draft = choose_draft(values['target'], values.get('draft'))
  if draft is None:
    return DecodeOptions(**values | {'method': None})
  drafting = default_drafting(values['target'], draft)
  if values['tree'] == ('chains',):
    values = {'num_drafts': (drafting.num_drafts,), 'draft_length': (drafting.draft_length,)} | values
  if all(flags.FLAGS[name].using_default_value for name in ('target', 'draft', 'dtype', 'weights')):
    values |= {'dtype': 'bfloat16'}
  return DecodeOptions(**values)


def decode():
  options = _options()
  if not is_primary():
    run_decode(options)
    return
  outputs = OutputFiles(output=_OUTPUT.value, generations=_GENERATIONS.value).apart_from(options.inputs())
  with outputs:
    with show_progress() as notify:
      run = run_decode(options, notify)
    is_table = (_OUTPUT.value or '').endswith('.csv')
    contents = {'output': (records.to_csv if is_table else records.to_json)(run), 'generations': records.to_jsonl(run)}
    more = _MORE if flags.FLAGS['method'].using_default_value and options.needs_draft else ''
    outputs.write_after(lambda: report.print_report(run, more=more), **contents)


if __name__ == '__main__':
  flags.FLAGS.set_default('method', ['autoregressive', 'block', 'race_traversal'])
  flags.FLAGS.set_default('num_prompts', 16)
  for name, text in (
    ('num_drafts', 'K, drafts per round; several run the grid [2; without --method 1 on CPUs]'),
    ('draft_length', 'L, tokens per draft; several run the grid [8; without --method 4 on CPUs]'),
    ('dtype', "float32 or bfloat16 [each model's own; of the pretrained pair without --method bfloat16]"),
  ):
    flags.FLAGS[name].help = text
  command_line.run(
    main,
    [
      '',
      '--method=autoregressive,block,race_traversal --num_drafts=4 --draft_length=8 --temperature=0.7',
      "--prompt='Mr. Speaker, I rise today to' --method=auto,autoregressive",
      '--target=ORG/NAME --draft=lookup --method=autoregressive,speculative --chat --prompts=prompts.txt',
    ],
  )
