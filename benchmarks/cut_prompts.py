"""Cuts prompts from a text: the first words of passages, evenly spaced.

Command   python -m benchmarks.cut_prompts --text=FILE --output=PROMPTS.jsonl --num_prompts=96 --num_words=24
Text      .txt, .gz or .bz2; a passage begins at a line after a blank one, and may span lines

The output is JSON lines that `decode.main --prompts` reads.
"""

from __future__ import annotations

import json

import numpy as np
from absl import flags
from etils import epath

from common import command_line
from common.output_files import OutputFiles
from common.text_files import read_text


def cut(text: str, num_prompts: int, num_words: int) -> list[str]:
  """Prompts of `num_words` words each, line ends replaced by spaces; a `ValueError` if too few passages have
  that many.
  """
  lines = text.split('\n')
  starts = [i for i in range(1, len(lines)) if lines[i].strip() and not lines[i - 1].strip()]
  passages = []
  for start in starts:
    words, line = [], start
    while len(words) < num_words and line < len(lines):
      words += lines[line].split()
      line += 1
    if len(words) >= num_words:
      passages.append(' '.join(words[:num_words]))
  if len(passages) < num_prompts:
    raise ValueError(f'the text has {len(passages)} passages of {num_words} words, fewer than {num_prompts}')
  return [passages[i] for i in np.linspace(0, len(passages) - 1, num_prompts).astype(int)]


if __name__ == '__main__':
  _TEXT = flags.DEFINE_string('text', None, 'Text to cut from.', required=True)
  _OUTPUT = flags.DEFINE_string('output', None, 'JSONL file to write.', required=True)
  _NUM_PROMPTS = flags.DEFINE_integer('num_prompts', 96, 'Prompts.', lower_bound=1)
  _NUM_WORDS = flags.DEFINE_integer('num_words', 24, 'Words of each.', lower_bound=1)

  def main():
    with OutputFiles(output=_OUTPUT.value).apart_from({'text': [_TEXT.value]}) as files:
      prompts = cut(read_text(epath.Path(_TEXT.value)), _NUM_PROMPTS.value, _NUM_WORDS.value)
      lines = [json.dumps({'id': i, 'prompt': prompt}, ensure_ascii=False) for i, prompt in enumerate(prompts)]
      files.write(output='\n'.join(lines) + '\n')

  command_line.run(main)
