#!/usr/bin/env bash
# Library: jax 0.10.2 with jaxlib 0.10.2.
# Behavior: on a CPU with fused multiply-add, `x * y + z` in float32 under `jit` is rounded once where both are in one loop,
#   and twice where they are not, so that a number depends on what XLA puts together. Neither `optimization_barrier`
#   around the product nor `reduce_precision` to the bits of float32 keeps both apart; a select does.
# Output seen: 1,066 of 4,608 numbers differ from NumPy's, which rounds twice, in all forms but the select, where none do.
# Only packages are downloaded.
# Exits with 1 if this is no longer so, or if the processor has no fused multiply-add.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
import numpy as np

FORMS = {
  'plain': lambda product: product,
  'optimization_barrier': jax.lax.optimization_barrier,
  'reduce_precision': lambda product: jax.lax.reduce_precision(product, 8, 23),
  'select': lambda product: jnp.where(jnp.isnan(product), jnp.nan, product),
}
print(f'jax {jax.__version__}')
random = np.random.default_rng(0)
x, y, z = (random.normal(size=(8, 576)).astype(np.float32) for _ in range(3))
twice = x * y + z  # NumPy rounds the product
once = (x.astype(np.float64) * y + z).astype(np.float32)
differ = {}
for name, form in FORMS.items():
  found = np.asarray(jax.jit(lambda x, y, z, form=form: form(x * y) + z)(x, y, z))
  differ[name] = int((found != twice).sum())
  print(f'{name}: {differ[name]} of {x.size} differ from the rounded product, {int((found != once).sum())} from one rounding')
sys.exit(0 if differ.pop('select') == 0 and min(differ.values()) > 0 else 1)
PYTHON
