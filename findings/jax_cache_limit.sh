#!/usr/bin/env bash
# Library: jax 0.10.2 with jaxlib 0.10.2 and filelock 4.3.1, which the limit needs.
# Behavior: two processes share a directory for compiled programs, one without `jax_compilation_cache_max_size` and one
#   with it. The first writes no file of access times beside its programs; after that the second cannot write any of its
#   own: each write ends with a warning of a missing `-atime` file, and every run compiles all anew.
# Output seen: the process with a limit writes 1 program to an empty directory, and 0 beside programs of the other.
# Only packages are downloaded.
# Exits with 1 if this is no longer so, or if a limit alone keeps a process from writing.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 filelock==4.3.1
cat >"$work/compile.py" <<'PYTHON'
import sys

import jax

jax.config.update('jax_compilation_cache_dir', sys.argv[1])
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
jax.config.update('jax_compilation_cache_max_size', int(sys.argv[2]))
jax.jit(lambda x: x * float(sys.argv[3]))(1.0)
PYTHON
JAX_PLATFORMS=cpu "$work/venv/bin/python" - "$work" <<'PYTHON'
import pathlib
import subprocess
import sys

import jax

work = pathlib.Path(sys.argv[1])


def programs(folder):
  return {path.name for path in folder.glob('*-cache')}


def written(folder, limit, factor):
  """The programs that a process with a limit in bytes, -1 for none, adds to a directory, and what it warns of."""
  before = programs(folder)
  command = [sys.executable, work / 'compile.py', folder, str(limit), str(factor)]
  warned = subprocess.run(command, check=True, capture_output=True, text=True).stderr
  return len(programs(folder) - before), '-atime' in warned


print(f'jax {jax.__version__}')
limit = 2**30
alone, _ = written(work / 'alone', limit, 2)
written(work / 'shared', -1, 3)
beside, is_warned = written(work / 'shared', limit, 2)
print(f'programs written with a limit: {alone} to an empty directory, {beside} beside those of a process without one')
print('a missing -atime file is named' if is_warned else 'nothing is warned of')
sys.exit(0 if alone > 0 and beside == 0 and is_warned else 1)
PYTHON
