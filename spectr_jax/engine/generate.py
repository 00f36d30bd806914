"""`generate`: prompts in, continuations out, in one call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from spectr_jax.draft import Drafter
from spectr_jax.engine import checks
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import decode_rounds
from spectr_jax.engine.result import Generation
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.engine.state import init_decode
from spectr_jax.methods import Method
from spectr_jax.model import Model
from spectr_jax.tree import TokenTree


def generate(
  rng_key: jax.Array,
  target: Model,
  draft: Model | Drafter | None,
  prompts: ArrayLike,
  prompt_lengths: ArrayLike,
  *,
  method: str | Method,
  tree: TokenTree | None = None,
  max_new_tokens: int,
  temperature: ArrayLike = 1.0,
  top_k: ArrayLike = 0,
  top_p: ArrayLike = 1.0,
  eos_id: int | tuple[int, ...] | None = None,
  statistics: bool = False,
  sharding: DecodeSharding | None = None,
) -> Generation:
  """Continues prompts with the target's distribution, guessing ahead with a draft.

  The loop is one program, compiled once per shape, method and tree; sampling parameters, keys and prompt lengths may
  change without compiling again.

  Args:
    rng_key: One typed key, from which row i takes `fold_in(rng_key, i)`, or a key array `[B]`. With a key array a row's
      tokens depend on its key and prompt alone; up to rounding, its batch and padding have no effect.
    target: The model whose distribution the output has.
    draft: A model or drafter with the same vocabulary, or None for methods that draft nothing.
    prompts: Integers `[B, P]`, right-padded; padding is not read.
    prompt_lengths: Integers `[B]`, from 1 to P.
    method: A name of `METHODS`, or a `Method`.
    tree: The guesses of a round, such as `TokenTree.chains(K, L)`; methods that draft nothing need none and ignore it.
    max_new_tokens: Limit of new tokens per row, static.
    temperature: Scalar or `[B]`; 0 decodes greedily.
    top_k: Scalar or `[B]`; 0 keeps all.
    top_p: Scalar or `[B]`, in (0, 1].
    eos_id: Id or ids that end a row, or None.
    statistics: Whether to count `Statistics`; this sorts the distributions of the positions visited and takes time.
    sharding: The sharding of rows, models and caches over the devices of a mesh, or None for one device. Models that
      `DecodeSharding.put_models` has sharded already are not moved. Tokens are the same up to rounding.

  Returns:
    The new tokens and how they came about.

  Raises:
    ValueError: A shape, range, vocabulary, method or tree does not fit; the message names what would fit.
    NotFiniteError: A model's logits are not finite; raised outside of a trace only.
  """
  prompts, prompt_lengths = jnp.asarray(prompts), jnp.asarray(prompt_lengths)
  checks.check_shapes(prompts, prompt_lengths)
  checks.check_max_new_tokens(max_new_tokens)
  decoder = Decoder.make(
    target,
    draft,
    method=method,
    tree=tree,
    max_new_tokens=max_new_tokens,
    cache_size=prompts.shape[1] + max_new_tokens,
    eos_id=eos_id,
    statistics=statistics,
    sharding=sharding,
  )
  sampling = {'temperature': temperature, 'top_k': top_k, 'top_p': top_p}
  state = init_decode(decoder, rng_key, prompts, prompt_lengths, **sampling)
  result = decode_rounds(decoder, state).result
  if not isinstance(result.failures, Tracer):
    result.check()
  return result
