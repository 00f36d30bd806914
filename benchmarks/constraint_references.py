"""What tables of formats and patterns accept, beside `jsonschema` with its extra `format` and beside Node.js.

Command   python -m benchmarks.constraint_references   (needs `jsonschema[format]` and `node`)

For each format, random values that are near to valid ones, and for random patterns random texts: how many values the
reference accepts, how many of these the table accepts, and how many the table accepts alone, which must be none.
"""

from __future__ import annotations

import json
import random
import subprocess
from typing import Any

from absl import flags

from common import command_line
from spectr_jax.io.constraints import _automaton, _of_schema

_SEEDS = {
  'date': '2024-02-29 1900-02-28 0004-02-29 9999-12-31 0001-01-01',
  'time': '23:59:59Z 00:00:00.123456789+23:59 12:30:45z 08:30:06-08:00',
  'date-time': '2000-02-29T23:59:59Z 1937-01-01t12:00:27.87+00:20 2023-04-30T00:00:00z',
  'email': "joe@example.com a.b+c@X.Y.org o'neil@host x_y@a-b.c",
  'hostname': 'example.com A.B-c.D a1.2b ' + '.'.join(['a' * 62] * 2) + ' ' + '.'.join(['bc' * 14] * 4),
  'ipv4': '127.0.0.1 255.255.255.255 9.10.199.249',
  'ipv6': '::1 2001:DB8::8:800:200C:417A ::ffff:129.144.52.38 1:2:3:4:5:6:7:8 fe80:: 1::2:3',
  'uri': 'http://a.B:80/c%20d?e=f#g urn:isbn:045 mailto:a@b.c ftp://u:p@[::1]/ x+y://h?q HTTPS://A/~b;c',
  'uuid': '123e4567-e89b-12d3-a456-426614174000 ABCDEF01-2345-6789-abcd-ef0123456789',
}
_LETTERS = 'abzAZ09_-.:/@%#?[]+ ~,é٣\u2028\xa0"\\\n\t'
_ATOMS = [
  *'abc1_,é.', r'\d', r'\w', r'\s', r'\D', r'\W', r'\S', '[abc]', '[^abc]', r'[^\W_]', r'[^\D]', r'[\d-x]', r'[^\s\d]',
  r'[a\-z]', '[^]', r'[\]b]', r'\.', r'\/', r'\t', r'\n', r'\u0061', r'\x62',
]  # fmt: skip
_NODE = """
const given = JSON.parse(require('fs').readFileSync(0, 'utf8'))
console.log(JSON.stringify(given.map(([p, texts]) => texts.map(t => new RegExp(p).test(t)))))
"""


def _accepts(schema: Any):
  table, is_final = _automaton(_of_schema(schema)[0])

  def accepts(value: str) -> bool:
    state = 0
    for byte in json.dumps(value, ensure_ascii=False).encode():
      state = table[state, byte]
      if state < 0:
        return False
    return bool(is_final[state])

  return accepts


def _mutated(rng: random.Random, text: str) -> str:
  for _ in range(rng.choice((0, 1, 1, 2, 3))):
    place = rng.randrange(len(text) + 1)
    text = (
      text[:place] + rng.choice(('', rng.choice(_LETTERS), rng.choice(text or 'a'))) + text[place + rng.randrange(2) :]
    )
  return text


def _pattern(rng: random.Random, depth: int = 2) -> str:
  parts = []
  for _ in range(rng.randint(1, 4)):
    part = rng.choice(_ATOMS)
    if depth and rng.random() < 0.4:
      part = f'({rng.choice(("", "?:"))}{_pattern(rng, depth - 1)})'
    parts.append(part + rng.choice(('', '', '', '*', '+', '?', '{2}', '{1,2}', '*?')))
    if rng.random() < 0.15:
      parts.append(rng.choice('^$'))
  text = rng.choice(('', '', '^', '(^|,)')) + ''.join(parts) + rng.choice(('', '', '$'))
  return f'{text}|{_pattern(rng, depth - 1)}' if depth and rng.random() < 0.3 else text


def compare(count: int, num_patterns: int) -> None:
  """Prints a table of so many values of each format, and of patterns."""
  import jsonschema

  rng = random.Random(0)
  print('| | reference accepts | of these the table | the table alone |\n|---|---|---|---|')
  checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
  for name, seeds in _SEEDS.items():
    if name not in checker.checkers:
      raise ValueError(f'jsonschema cannot check {name}: install jsonschema[format]')
    accepts = _accepts({'type': 'string', 'format': name})
    values = [_mutated(rng, rng.choice(seeds.split())) for _ in range(count)]
    pairs = [(checker.conforms(value, name), accepts(value)) for value in values]
    alone = [value for value, pair in zip(values, pairs) if pair == (False, True)]
    print(f'| {name} | {sum(a for a, _ in pairs)} | {pairs.count((True, True))} | {len(alone)} {alone[:3] or ""}|')
  given, tables = [], []
  while len(given) < num_patterns:
    pattern = _pattern(rng)
    try:
      accepts = _accepts({'type': 'string', 'pattern': pattern})
    except ValueError as error:
      accepts = lambda text: False  # noqa: E731
      if 'matches nothing' not in str(error) and 'no text' not in str(error):
        raise
    texts = [''.join(rng.choices(_LETTERS + 'abc1,', k=rng.randrange(7))) for _ in range(40)]
    given.append((pattern, texts))
    tables.append([accepts(text) for text in texts])
  ran = subprocess.run(['node', '-e', _NODE], input=json.dumps(given), capture_output=True, text=True, check=True)
  pairs, alone, short = [], [], []
  for (pattern, texts), right, own in zip(given, json.loads(ran.stdout), tables):
    pairs += zip(right, own)
    alone += [(pattern, text) for text, a, b in zip(texts, right, own) if b and not a]
    short += [(pattern, text) for text, a, b in zip(texts, right, own) if a and not b]
  print(f'| patterns | {sum(a for a, _ in pairs)} | {pairs.count((True, True))} | {len(alone)} |')
  for each in (*alone[:5], *short[:5]):
    print(each)


if __name__ == '__main__':
  _COUNT = flags.DEFINE_integer('count', 400, 'Values of each format.', lower_bound=1)
  _NUM_PATTERNS = flags.DEFINE_integer('num_patterns', 300, 'Patterns.', lower_bound=1)

  def main():
    compare(_COUNT.value, _NUM_PATTERNS.value)

  command_line.run(main)
