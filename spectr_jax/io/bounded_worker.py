"""Answers requests in a process of its own, with bounds that hold whatever they make it do.

`bounded_process` starts this file as a script: `bounded_worker.py MEMORY SECONDS SCRIPT FOLDER...`. It imports the
standard library alone, so it starts quickly; the folders have what SCRIPT imports. It reads lines of JSON, and answers
each with one line, what the function `answer` of SCRIPT makes of it, or `{"refused": ..., "is_bound": true}` if the
memory is too little.
"""

from __future__ import annotations

import contextlib
import gc
import json
import runpy
import signal
import sys

try:
  import resource
except ImportError:  # not a POSIX system
  resource = None


def _limit_resources(memory):
  """Bounds this process's memory, and keeps it from writing files, of which a memory dump would be one."""
  if resource is None:
    return
  for name, most in (('RLIMIT_AS', memory), ('RLIMIT_FSIZE', 0), ('RLIMIT_CORE', 0)):
    with contextlib.suppress(AttributeError, OSError, ValueError):  # some systems lack limits that they name
      kind = getattr(resource, name)
      hard = resource.getrlimit(kind)[1]
      most = most if hard == resource.RLIM_INFINITY else min(most, hard)
      resource.setrlimit(kind, (most, most))


def _end_after(seconds):
  """Ends this process after some time, should the parent be gone by then; 0 lifts that."""
  if hasattr(signal, 'setitimer'):
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _main():
  memory, seconds, script, *folders = sys.argv[1:]
  sys.path += folders
  answer = runpy.run_path(script)['answer']
  if hasattr(signal, 'SIGALRM'):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
  requests, answers = sys.stdin.buffer, sys.stdout.buffer
  _limit_resources(int(memory))
  # Ends when the other end is closed, which happens at the latest when the parent ends.
  while line := requests.readline():
    _end_after(float(seconds) + 1)
    try:
      text = json.dumps(answer(json.loads(line)))
    except MemoryError:
      text = json.dumps({'refused': 'it needs too much memory', 'is_bound': True})
    answers.write(f'{text}\n'.encode())
    answers.flush()
    _end_after(0)
    # Nothing of the request stays; what it leaves behind may have references in circles.
    del line, text
    gc.collect()


if __name__ == '__main__':
  _main()
