"""Texts with a draft beside those without: how many differ, by weights, drafter, method and tree.

Command   python -m benchmarks.equality --target=MODEL.gguf --drafters=lookup,pretrained/smollm2_head --temperature=0 \
            --forms=bfloat16 --forms=blocks --prompts=spec_bench:question.jsonl --chat --num_prompts=200 \
            --batch_size=4 --method=autoregressive,block,race_traversal --output=equality.json
          Every flag of `decode.main` counts, but --draft, --dtype and --weights. At a temperature:
          --temperature=1 --gumbel --method=autoregressive,ersd
Texts     without a draft from one prompt at a time; all others, that of `autoregressive` too, --batch_size at a time

On a CPU with products in C++ no text may differ.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from benchmarks import command, drafters
from common import command_line
from common.output_files import OutputFiles
from decode.experiment.settings import Setting
from decode.experiment.workload import Workload
from spectr_jax.kernels.int8 import BLOCKS
from spectr_jax.sharding import fetch

_FORMS = {
  'float32': {'dtype': 'float32', 'weights': ''}, 'bfloat16': {'dtype': 'bfloat16', 'weights': ''},
  'int8': {'dtype': '', 'weights': 'int8'}, BLOCKS: {'dtype': '', 'weights': BLOCKS},
}  # fmt: skip


def _texts(workload: Workload, setting: Setting) -> list[list[int]]:
  """The new tokens of every prompt."""
  keys, texts = workload.keys(workload.seeds[0]), []
  for batch in workload.batches:
    result = fetch(workload.generate(setting, keys, batch))
    texts += [row[:length].tolist() for row, length in zip(np.asarray(result.tokens), result.lengths)]
  return texts[: len(workload.tokens)]  # copies fill the last batch


def compare(workloads: Mapping[str, Workload]) -> Iterator[dict[str, Any]]:
  """For every drafter and setting: prompts, those whose texts differ from the text without a draft, and of these the
  first token that differs, on average.

  Raises:
    ValueError: A method gives other texts than decoding without a draft by the same seed, or `autoregressive` is not
      among the methods.
  """
  seen, expected = set(), None
  for drafter, workload in workloads.items():
    methods = workload.options.methods.make()
    plain = [method for method in methods if method.max_drafts == 0]
    others = [method.name for method in methods if not method.is_seed_exact]
    if not plain or (workload.sampling.temperature > 0 and others):
      raise ValueError(
        'texts are compared with those of autoregressive, which must be among the methods; at a temperature above 0'
        f' with --gumbel, beside ersd alone; got {", ".join(method.name for method in methods)}'
      )
    if expected is None:
      expected = _texts(dataclasses.replace(workload, batch_size=1), Setting(plain[0]))
    for setting in drafters.fitting_settings(workload.options):
      name = (drafter if setting.tree.num_nodes else '', str(setting))
      if name in seen:
        continue
      seen.add(name)
      pairs = zip(_texts(workload, setting), expected, strict=True)
      firsts = [_first_difference(*pair) for pair in pairs if pair[0] != pair[1]]
      first = sum(firsts) / len(firsts) if firsts else None
      row = {'drafter': name[0], 'setting': name[1], 'texts': len(expected), 'differ': len(firsts), 'first': first}
      yield row


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
  same = [x == y for x, y in zip(one, other)]
  return same.index(False) if False in same else len(same)


if __name__ == '__main__':
  from decode.experiment.option_flags import read_values

  _DRAFTERS = flags.DEFINE_list('drafters', ['lookup'], 'Drafters, each as for --draft of decode.main.')
  _FORMS_FLAG = flags.DEFINE_multi_enum('forms', ['float32'], list(_FORMS), 'Weights, more than one by repeating it.')
  _OUTPUT = command.define_output()

  def main():
    rows, info = [], {}
    with OutputFiles(output=_OUTPUT.value) as files:
      for form in _FORMS_FLAG.value:
        workloads = drafters.load(dict(read_values()) | _FORMS[form], _DRAFTERS.value)
        info[form] = next(iter(workloads.values())).info
        for row in compare(workloads):
          rows.append({'form': form, **row})
          print('{form:9} {drafter:24} {setting:36} {differ} of {texts} differ'.format(**rows[-1]), flush=True)
      files.write_after(lambda: None, output=json.dumps({'runs': info, 'rows': rows}, indent=2) + '\n')

  command_line.run(main)
