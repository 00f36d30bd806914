"""`made_for` under the name that it had, for one release."""

import warnings

from spectr_jax.kernels.dispatch import made_for

__all__ = ['made_for']

warnings.warn('spectr_jax.ops.platforms is spectr_jax.kernels.dispatch', DeprecationWarning, stacklevel=2)
