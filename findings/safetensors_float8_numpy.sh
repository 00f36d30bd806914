#!/usr/bin/env bash
# Library: safetensors 0.8.0 with numpy 2.3.5 and ml_dtypes 0.5.4.
# Behavior: `safetensors.numpy.save_file` writes arrays of `ml_dtypes.float8_e4m3fn`, and `safe_open` for NumPy gives
#   their shape and type. To read a part of one raises AttributeError, since the library looks for the type in NumPy's
#   own names. bfloat16 of the same package is read. FP8 checkpoints so need other ways to their bytes.
# Output seen: F8_E4M3 [2, 4]; bfloat16 read; float8 AttributeError: module 'numpy' has no attribute 'float8_e4m3fn'.
# Only packages are downloaded.
# Exits with 1 if this is no longer so.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet safetensors==0.8.0 numpy==2.3.5 ml_dtypes==0.5.4
"$work/venv/bin/python" - "$work" <<'PYTHON'
import sys

import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import save_file

path = f'{sys.argv[1]}/model.safetensors'
values = np.arange(8, dtype=np.float32).reshape(2, 4)
types = {'float8': ml_dtypes.float8_e4m3fn, 'bfloat16': ml_dtypes.bfloat16}
save_file({name: values.astype(kind) for name, kind in types.items()}, path)
print(f'safetensors {safetensors.__version__}')
with safetensors.safe_open(path, 'numpy') as file:
  stored = file.get_slice('float8')
  print(stored.get_dtype(), stored.get_shape())
  assert np.array_equal(file.get_slice('bfloat16')[:].astype(np.float32), values)
  print('bfloat16 read')
  try:
    found = f'float8 read: {stored[:].dtype}'
  except AttributeError as error:
    found = f'float8 AttributeError: {error}'
print(found)
sys.exit(0 if 'AttributeError' in found and 'float8_e4m3fn' in found else 1)
PYTHON
