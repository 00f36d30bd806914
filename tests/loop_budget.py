"""A budget for compilations of the loop: they take most of a run's time, and each further shape is one more."""

import collections

import pytest

# Of a process: what all processes of a run compile together (248), and a tenth. A default test that needs another shape
# than those of canon.py is to be marked slow.
MOST = 273


class LoopBudget:
  """Counts by file how often a process compiles `run_rounds` of the engine; too many fail the run.

  A plugin of pytest. Programs that are taken from a cache count as well: most of a compilation is tracing.
  """

  def __init__(self, most: int = MOST):
    self._most, self._file = most, ''
    self._counts: collections.Counter[str] = collections.Counter()
    self._workers: list[dict[str, int]] = []

  def note(self, event: str, seconds: float, *, fun_name: str = '', **_) -> None:
    """Counts a compilation, as a listener of `jax.monitoring` for durations of events."""
    del seconds
    if event.endswith('/backend_compile_duration') and 'run_rounds' in fun_name:
      self._counts[self._file] += 1

  @property
  def summary(self) -> str:
    """How often each process has compiled the loop, and the files with most compilations."""
    numbers = ', '.join(str(sum(counts.values())) for counts in self._workers)
    files = sum(map(collections.Counter, self._workers), collections.Counter()).most_common()
    return f'loops compiled by each process: {numbers}, at most {self._most}: ' + ', '.join(
      f'{name} {count}' for name, count in files
    )

  @pytest.hookimpl(tryfirst=True)
  def pytest_runtest_setup(self, item):
    self._file = item.path.relative_to(item.config.rootpath).as_posix()

  @pytest.hookimpl(optionalhook=True)
  def pytest_testnodedown(self, node, error):
    """Takes the counts of a worker, in the process that started it."""
    del error
    self._workers.append(getattr(node, 'workeroutput', {}).get('loops', {}))

  @pytest.hookimpl(tryfirst=True)
  def pytest_sessionfinish(self, session):
    output = getattr(session.config, 'workeroutput', None)
    if output is not None:
      output['loops'] = dict(self._counts)
      return
    self._workers.append(dict(self._counts))
    if self.is_exceeded and not session.exitstatus:
      session.exitstatus = pytest.ExitCode.TESTS_FAILED

  @property
  def is_exceeded(self) -> bool:
    return any(sum(counts.values()) > self._most for counts in self._workers)

  def pytest_terminal_summary(self, terminalreporter):
    if self.is_exceeded or terminalreporter.verbosity > 0:
      terminalreporter.write_line(self.summary, red=self.is_exceeded)
