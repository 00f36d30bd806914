"""Says which form of products this processor takes."""

import sys

from spectr_jax.kernels import native

if __name__ == '__main__':
  form = native.form()
  print(f'products: {form}' if form else f'products: those of XLA, since {native.why_not()}')
  sys.exit(0 if form else 1)
