"""Ahead-of-time compilation of the loop, for devices that need not be present."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp

from spectr_jax.aot.hlo_report import out_of_memory
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import run_rounds
from spectr_jax.engine.reading import init_decode
from spectr_jax.engine.state import state_shardings
from spectr_jax.sampling import SamplingParams


def compile_decode(
  decoder: Decoder, *, batch_size: int, prompt_length: int, filters: Collection[str] = ()
) -> jax.stages.Compiled:
  """Compiles the loop from shapes alone.

  Args:
    decoder: The decoder, with a sharding; its parameters may be shapes, and its mesh may have described devices.
    batch_size: B, rows.
    prompt_length: P, tokens of the longest prompt.
    filters: Those that rows may use, of `top_k`, `top_p` and `min_p`.

  Raises:
    ValueError: The decoder has no sharding; rows, heads or parameters cannot be sharded; or the program needs more
      memory than the devices have.
  """
  sharding = decoder.sharding
  if sharding is None:
    raise ValueError('compile_decode needs a decoder with a sharding, over a mesh of the devices to compile for')
  sharding.check_rows(batch_size)
  # Values that are not known may be any.
  unknown = dict.fromkeys(('temperature', *filters), jax.ShapeDtypeStruct((batch_size,), jnp.float32))
  limits = {'max_new_tokens': decoder.max_new_tokens, 'eos_ids': decoder.eos_ids}
  state = jax.eval_shape(
    lambda decoder, *rows, **options: init_decode(dataclasses.replace(decoder, **limits), *rows, **options),
    decoder,
    jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl='threefry2x32'), batch_size)),
    jax.ShapeDtypeStruct((batch_size, prompt_length), jnp.int32),
    jax.ShapeDtypeStruct((batch_size,), jnp.int32),
    sampling=SamplingParams(**unknown),
  )
  places = sharding.of_decoder(decoder), state_shardings(decoder, state)
  arguments = jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (decoder, state), places
  )
  lowered = run_rounds.lower(*arguments, jax.ShapeDtypeStruct((), jnp.int32))
  try:
    return lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    raise out_of_memory(error, 'fewer rows, shorter texts or more devices need less') or error from error
