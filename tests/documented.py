"""Commands and code that the project shows, on its pages and elsewhere, parsed or run."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import pathlib
import re
import runpy
import shlex
import sys

import commands as commands_of_project

ROOT = pathlib.Path(__file__).parents[1]
_READMES = 'README.md', 'pretrained/README.md', 'benchmarks/README.md'
_FOLDERS = 'docs', 'benchmarks/log'
PAGES = (*(ROOT / name for name in _READMES), *(p for name in _FOLDERS for p in sorted((ROOT / name).rglob('*.md'))))
_PACKAGES = 'decode', 'train', 'benchmarks'
_WITH_TEXTS = 'common', 'configs', 'examples', 'spectr_jax', *_PACKAGES
SOURCES = [path for name in _WITH_TEXTS for path in sorted((ROOT / name).rglob('*.py'))]


@dataclasses.dataclass(frozen=True)
class Command:
  """A documented command, `python -m module arguments`, with the environment variables set before it."""

  page: str
  module: str
  arguments: tuple[str, ...]
  env: tuple[tuple[str, str], ...] = ()

  def __str__(self):
    return f'{self.page}: {self.module} {shlex.join(self.arguments)}'


def code_blocks(text: str, language: str) -> list[str]:
  """The fenced blocks of a language, without their fences."""
  return re.findall(rf'^```{language}\n(.*?)^```', text, re.DOTALL | re.MULTILINE)


def _inline(text: str) -> list[str]:
  """Code between single backticks, which may continue on the next line."""
  text = re.sub(r'^```.*?^```', '', text, flags=re.DOTALL | re.MULTILINE)
  return [' '.join(code.split()) for code in re.findall(r'`([^`]+)`', text)]


def _of_line(page: str, line: str) -> list[Command]:
  shown, words = [], shlex.split(line, comments=True)
  while words:
    end = words.index('&&') if '&&' in words else len(words)
    part, words = words[:end], words[end + 1 :]
    env = []
    while part and re.match(r'[A-Z_]\w*=', part[0]):
      env.append(tuple(part.pop(0).split('=', 1)))
    for word in part:  # a command for another machine
      if word.startswith('--command='):
        shown += _of_line(page, word.removeprefix('--command='))
    is_python = part and pathlib.PurePosixPath(part[0]).name in ('python', 'python3')
    if is_python and part[1:2] == ['-m'] and part[2].split('.')[0] in _PACKAGES:
      shown.append(Command(page, part[2], tuple(part[3:]), tuple(env)))
  return shown


def commands(page: pathlib.Path) -> list[Command]:
  """The commands of this project on a page, in blocks and within lines."""
  text = page.read_text(encoding='utf-8')
  # What a block checks out before its commands is a former commit, whose commands are not those of this one.
  blocks = [re.split(r'^git checkout [0-9a-f]{7}$', block, flags=re.M)[0] for block in code_blocks(text, 'bash')]
  blocks = '\n'.join(blocks).replace('\\\n', ' ')
  inline = [code for code in _inline(text) if re.search(r'python -m \S+ \S', code)]  # not just a command's name
  name = str(page.relative_to(ROOT))
  return [command for line in [*blocks.splitlines(), *inline] for command in _of_line(name, line)]


def modules() -> list[str]:
  """The modules that are commands."""
  files = [path for name in _PACKAGES for path in sorted((ROOT / name).glob('*.py'))]
  return [f'{path.parent.name}.{path.stem}' for path in files if "__name__ == '__main__'" in path.read_text('utf-8')]


def texts(path: pathlib.Path) -> list[str]:
  """The texts in a source file, docstrings among them, with VALUE for each part that is known only when it runs."""
  tree, strings, seen = ast.parse(path.read_text('utf-8')), [], set()
  for node in ast.walk(tree):
    if isinstance(node, ast.JoinedStr):
      seen |= {id(part) for part in ast.walk(node)}
      strings.append(''.join(part.value if isinstance(part, ast.Constant) else 'VALUE' for part in node.values))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in seen:
      strings.append(node.value)
  return strings


_SHOWN = re.compile(r'`(python -m [^`]+)`|(?:^|[ (])(python -m [^`\n]+)', re.MULTILINE)


def source_commands() -> list[Command]:
  """The commands in the texts of all sources: docstrings, messages, and what programs print."""
  shown = []
  for path in SOURCES:
    for text in texts(path):
      for match in _SHOWN.finditer(re.sub(r'\\\n\s*', '', text)):
        # A message goes on behind a command, with a comma, a bracket or a semicolon.
        line = ' '.join((match[1] or re.split(r'[,;)](?= |$)|\.\.\.|  (?! *--)|\[', match[2])[0]).split())
        with contextlib.suppress(ValueError):  # no words of a shell
          shown += _of_line(str(path.relative_to(ROOT)), line)
  arguments = [tuple(word for word in command.arguments if word[0] not in '.[') for command in shown]
  return [dataclasses.replace(command, arguments=own) for command, own in zip(shown, arguments) if own]


def help_commands() -> list[Command]:
  """The examples in the help of all commands."""
  every = modules()
  results = attempt([{'module': module, 'arguments': ['--help'], 'env': {}, 'is_run': False} for module in every])
  return [
    Command(f'{module} --help', module, tuple(shlex.split(example)))
    for module, result in zip(every, results)
    for example in result['examples']
  ]


def inline_flags(page: pathlib.Path) -> set[str]:
  """Names of the flags that a page mentions within its lines, outside commands."""
  codes = [code for code in _inline(page.read_text(encoding='utf-8')) if code.startswith('--')]
  return {match for code in codes for match in re.findall(r'(?:^| )--(\w+)', code)}


def attempt(tasks: list[dict], timeout: float = 600) -> list[dict]:
  """Parses or runs commands in processes forked from one that has imported what takes long, for so many seconds each.

  Tasks have `module`, `arguments`, `env` and `is_run`. Results have `error`, which is '' for success, and for a command
  that was only parsed its `flags` and the `examples` of its help.
  """
  results = []
  for task in tasks:
    reader, writer = commands_of_project._fork_server().Pipe(duplex=False)
    process = commands_of_project._fork_server().Process(target=_child, args=(task, writer))
    process.start()
    writer.close()
    try:
      results.append(reader.recv() if reader.poll(timeout) else {'error': f'it did not end within {timeout} s'})
    except EOFError:
      results.append({'error': 'crashed'})
    process.kill()
    process.join()
  return results


def _parse(module: str) -> dict:
  """Lets a command define and read its flags, and stops it there."""
  from absl import flags

  from common import command_line, extras

  def parse(main, examples=(), *, files='', **_):
    shown.extend(examples)
    if extras.is_help_asked_for(sys.argv[1:]):
      return
    rest = flags.FLAGS(sys.argv)
    assert files or len(rest) == 1, f'unexpected argument {rest[1]!r}'
    options = sys.modules.get('decode.experiment.option_flags')
    if 'drafters' in flags.FLAGS:
      from benchmarks import drafters

      drafters.options_of(options.read_values(), flags.FLAGS.drafters)
    elif options is not None:
      options.read_options()

  shown: list[str] = []
  command_line.run = parse
  runpy.run_module(module, run_name='__main__')
  return {'error': '', 'flags': list(flags.FLAGS), 'examples': shown}


def _run(module: str) -> dict:
  with open(os.devnull, 'w') as nowhere, contextlib.redirect_stdout(nowhere):
    runpy.run_module(module, run_name='__main__', alter_sys=True)  # so that its functions can be pickled
  return {'error': ''}


def _child(task: dict, writer) -> None:
  env = {'JAX_PLATFORMS': 'cpu', 'COLUMNS': '120', **task['env']}
  try:
    commands_of_project.become(task['module'], task['arguments'], ROOT, env)
    result = _run(task['module']) if task['is_run'] else _parse(task['module'])
  except SystemExit as stop:
    result = {'error': '' if not stop.code else f'exit code {stop.code}'}
  except BaseException as error:  # every failure is a result
    result = {'error': f'{type(error).__name__}: {error}'}
  writer.send(result)
