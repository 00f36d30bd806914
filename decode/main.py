"""Decodes prompts with several methods and compares them: `python -m decode.main`.

With several processes each runs this command: those of a TPU pod find each other, others are told with
`--coordinator_address`, `--num_processes` and `--process_id`. The first one prints and writes.
"""

from collections.abc import Mapping
from typing import Any

from absl import flags

from common import command_line, help_text, processes
from common.output_files import OutputFiles
from decode.experiment import exports, report
from decode.experiment.console import show_progress
from decode.experiment.drafting import default_drafting
from decode.experiment.model_options import SHIPPED_TARGET, choose_draft
from decode.experiment.option_flags import read_values
from decode.experiment.options import DecodeOptions
from decode.experiment.run import run_decode
from spectr_jax import METHODS
from spectr_jax.sharding import is_primary

_OUTPUT = flags.DEFINE_string('output', None, 'File for the results: JSON, or a table if it ends in .csv.')
_GENERATIONS = flags.DEFINE_string('generations', None, 'JSONL file for the continuations.')
help_text.in_group('Measurements and output', _OUTPUT, _GENERATIONS)

_METHODS = 'autoregressive', 'block', 'race_traversal'  # by default
# What ends a run without a named method, whose types and tree are those of `_options`.
_MORE = (
  'This run shows what gains here. Others are a flag away: --method=autoregressive,speculative,spectr,race_traversal'
  ' --num_drafts=2 --draft_length=8 --dtype=bfloat16 for other methods and trees, --num_prompts=32 for narrower ranges,'
  ' --method=auto,autoregressive --dtype=bfloat16 for the fastest of all.'
)


def main():
  processes.run_together(decode)


def _options(values: Mapping[str, Any]) -> DecodeOptions:
  """The options of what was typed; without a method three, K and L of the device, and the shipped pair in bfloat16."""
  target = values.get('target', SHIPPED_TARGET)
  draft, defaults = choose_draft(target, values.get('draft')), {}
  if 'method' not in values and draft is not None:
    defaults['method'] = _METHODS
    if values.get('tree', ('chains',)) == ('chains',):
      drafting = default_drafting(target, draft)
      defaults |= {'num_drafts': (drafting.num_drafts,), 'draft_length': (drafting.draft_length,)}
    if not values.keys() & {'target', 'draft', 'dtype', 'weights'}:
      defaults['dtype'] = 'bfloat16'
  return DecodeOptions.of(**defaults | values)


def decode():
  values = read_values()
  options = _options(values)
  if not is_primary():
    run_decode(options)
    return
  outputs = OutputFiles(output=_OUTPUT.value, generations=_GENERATIONS.value).apart_from(options.inputs())
  with outputs:
    with show_progress() as notify:
      run = run_decode(options, notify)
    is_table = (_OUTPUT.value or '').endswith('.csv')
    contents = {'output': (exports.to_csv if is_table else exports.to_json)(run), 'generations': exports.to_jsonl(run)}
    more = _MORE if 'method' not in values and any(each.tree.num_nodes for each in run.settings) else ''
    outputs.write_after(lambda: report.print_report(run, more=more), **contents)


if __name__ == '__main__':
  flags.FLAGS.set_default('num_prompts', 16)
  methods, auto = ', '.join(METHODS), 'auto, the fastest of some that it times'
  for name, text in (
    ('method', f'Methods, separated by commas, of {methods}, or {auto} [{",".join(_METHODS)}]'),
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
