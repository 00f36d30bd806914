"""Writes a page that steps through a run: `python -m decode.trace --prompt=TEXT --output=trace.html`.

The page is one file and needs no network. It says how to read it, and shows the drafts of every round, their
probabilities under both models, the tokens that the method kept and why, and the decisions of other methods on the same
drafts. What does not depend on the run is in `trace_page/guide.html`: when speculation pays, common bugs, and the code
of `trace_page/reference.py`.
"""

from __future__ import annotations

import html
import json
import os
import pathlib
import re
from typing import Any

from absl import flags

import spectr_jax
from common import command_line
from common.output_files import OutputFiles
from common.printable import printable
from decode.experiment.options import DecodeOptions
from decode.experiment.settings import Setting, only_setting
from decode.experiment.workload import Workload, model_title
from decode.trace_page.data import describe_trace
from spectr_jax import METHODS, TokenTree
from spectr_jax.auto.trial import Notify
from spectr_jax.engine import make_judge, trace_decode
from spectr_jax.methods import Guesses, Method, get_method

MAX_BYTES = 1_000_000
_PAGE = pathlib.Path(__file__).parent / 'trace_page'
# Compared by default, if they can judge the drafts.
_USUAL = (
  'speculative', 'block', 'specinfer', 'spectr', 'race', 'race_block', 'race_traversal', 'traversal', 'gsd'
)  # fmt: skip


def choose_others(names: tuple[str, ...], method: Method, tree: TokenTree, guesses: Guesses | None = None) -> list[str]:
  """The named methods, or of a default list all, that can judge the drafts of a run.

  `guesses` is the kind of the drafts, as for `make_judge`. A named method that does not exist or cannot judge these
  drafts is a `ValueError`.
  """
  for name in names:
    make_judge(get_method(name), method, tree, guesses)
  others = []
  for name in names or _USUAL:
    try:
      make_judge(METHODS[name], method, tree, guesses)
    except ValueError:
      continue
    if name != method.name and name not in others:
      others.append(name)
  return others


def _name_of(path: str) -> str:
  """A model's path for a page that others read: without the folders of this machine."""
  return pathlib.PurePath(path).name if os.path.isabs(path) else path


def _describe_run(options: DecodeOptions, setting: Setting, models: dict[str, Any], prompt: str) -> dict[str, Any]:
  return {
    'prompt': prompt,
    'models': {role: model_title(info | {'path': _name_of(info['path'])}) for role, info in models.items()},
    'has_lookup': options.models.has_lookup,
    'tree': setting.tree_name,
    'num_drafts': setting.num_drafts,
    'draft_length': setting.draft_length,
    **{name: options.flags[name] for name in ('temperature', 'top_k', 'top_p', 'min_p', 'seed')},
    'version': spectr_jax.__version__,
  }


def record_trace(options: DecodeOptions, compare: tuple[str, ...] = (), notify: Notify | None = None) -> dict[str, Any]:
  """Decodes the first prompt and records every round: JSON values `run`, and those of `describe_trace`.

  The options name one method, K, L and tree; `compare` names methods that judge the same drafts, by default all that
  can. A `ValueError` says what is unusable, or which method cannot judge the drafts.
  """
  notify = notify or (lambda what, done, total: None)
  setting = only_setting(options)
  if not setting.tree.num_nodes:
    raise ValueError(f'{setting.method.name} drafts nothing: there is nothing to trace')
  others = choose_others(compare, setting.method, setting.tree, options.models.guesses)
  unused = 'mesh', 'num_seeds', 'num_samples', 'stop', 'logprobs'
  options.check_unused(unused, 'decode.trace, which shows whole rounds of one seed and sample on one device')
  notify('loading', 0, 1)
  work = Workload.load(options.replace(num_prompts=1))
  trace = trace_decode(
    work.keys(options.sampling.seed),
    work.target,
    work.draft,
    work.tokens[0, : work.lengths[0]],
    method=setting.method,
    tree=setting.tree,
    others=others,
    max_new_tokens=work.max_new_tokens,
    sampling=work.sampling,
    constraint=work.constraint,
    eos_id=work.tokenizer.eos_ids,
    notify=notify,
  )
  text = work.prompts[0].text
  if options.prompts.chat:
    text += '\n\n'  # an answer does not continue its question
  run = _describe_run(options, setting, work.info['models'], text)
  return {'run': run} | describe_trace(trace, work.tokenizer)


def _embed(data: Any) -> str:
  """JSON that is safe in a script element: nothing in it ends the element or begins a comment."""
  text = json.dumps(data, ensure_ascii=False, separators=(',', ':'), allow_nan=False)
  for character in '<>&\u2028\u2029':
    text = text.replace(character, f'\\u{ord(character):04x}')
  return text


def make_page(data: dict[str, Any]) -> str:
  """The page of `record_trace` as HTML with style, scripts and data inline; refused above `MAX_BYTES`."""

  def part(name: str) -> str:
    return (_PAGE / name).read_text(encoding='utf-8')

  def inline(name: str, element: str) -> str:
    return f'<{element}>\n{part(name)}</{element}>'

  page = part('page.html').replace('{{guide.html}}', part('guide.html'))
  page = page.replace('{{reference.py}}', html.escape(part('reference.py'), quote=False))
  page = re.sub(r'<link rel="stylesheet" href="(.+?)">', lambda match: inline(match[1], 'style'), page)
  page = re.sub(r'<script src="(.+?)"></script>', lambda match: inline(match[1], 'script'), page)
  page = page.replace('{{data}}', _embed(data))
  size = len(page.encode())
  if size > MAX_BYTES:
    raise ValueError(
      f'the page would have {size / 1e6:.1f} MB, more than {MAX_BYTES / 1e6:g}: lower max_new_tokens or the number of'
      ' guesses, or name fewer methods with --compare'
    )
  return page


if __name__ == '__main__':
  from decode.experiment.console import show_progress
  from decode.experiment.option_flags import read_options  # defines flags

  _COMPARE = flags.DEFINE_list(
    'compare', [], 'Methods that judge the same drafts, separated by commas; default: all usual ones that can.'
  )
  _OUTPUT = flags.DEFINE_string('output', None, 'HTML file for the page.', required=True)
  flags.FLAGS.set_default('method', ['race_block'])
  flags.FLAGS.set_default('draft_length', ['6'])

  def main():
    options = read_options()
    with OutputFiles(output=_OUTPUT.value).apart_from(options.inputs()) as outputs:
      with show_progress() as notify:
        data = record_trace(options, tuple(name.strip() for name in _COMPARE.value), notify)
      num_tokens = sum(len(played['origins']) for played in data['rounds'])
      line = (
        f'{num_tokens} tokens in {len(data["rounds"])} rounds, {num_tokens / len(data["rounds"]):.2f} per target call;'
        f' {printable(_OUTPUT.value)}'
      )
      outputs.write_after(lambda: print(line), output=make_page(data))

  command_line.run(
    main,
    [
      "--prompt='Mr. Speaker, I rise today to' --output=trace.html",
      "--prompt='Mr. Speaker, I rise today to' --method=race_block --num_drafts=4 --draft_length=6 --output=trace.html",
      "--prompt='Mr. Speaker, I rise today to' --compare=spectr,block --output=trace.html",
    ],
  )
