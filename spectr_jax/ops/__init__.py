"""The former name of `spectr_jax.kernels`, for one release."""
