#!/usr/bin/env bash
# Library: jax 0.10.2, beside jax 0.8.1, which does otherwise; on a CPU.
# Behavior: the structures of two classes that `jax.tree_util.register_dataclass` has registered compare as equal if they
#   have equally many fields of data, whatever the classes and the names; their hashes differ. `jax.jit` finds compiled
#   programs by hash and comparison. So a function that does something else for each class now and then runs the program
#   of another one: here some of 200 classes, each with a method of its own.
#   Right would be what jax 0.8.1 does: other classes are other structures, and each runs its own program.
# Output seen: jax 0.8.1: equal False, 0 of 200 wrong. jax 0.10.2: equal True, 17 to 38 of 200 wrong.
# Exits with 1 if this is no longer so.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
cat >"$work/count.py" <<'PYTHON'
import dataclasses
import sys

import jax
import jax.numpy as jnp


def numbered(number):
  """A class whose method `number` gives its number."""

  @jax.tree_util.register_dataclass
  @dataclasses.dataclass(frozen=True)
  class Node:
    value: jax.Array

    def number(self):
      return number

  return Node


@jax.jit
def number_of(node):
  return node.number() + 0 * node.value


classes = [numbered(i) for i in range(200)]
first, second = (jax.tree.structure(each(0.0)) for each in classes[:2])
wrong = sum(int(number_of(each(jnp.zeros((), jnp.int32)))) != i for i, each in enumerate(classes))
print(f'jax {jax.__version__}: structures of two classes equal {first == second}, {wrong} of {len(classes)} wrong')
is_old = jax.__version__ == '0.8.1'
sys.exit(0 if (first == second) != is_old and (wrong == 0) == is_old else 1)
PYTHON
"$work/venv/bin/pip" install --quiet jax==0.8.1 jaxlib==0.8.1
JAX_PLATFORMS=cpu "$work/venv/bin/python" "$work/count.py"
"$work/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$work/venv/bin/python" "$work/count.py"
