"""Times of calls: in turns, a model's forward pass by shape, and drafting."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import numpy as np

from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import noise_keys, propose
from spectr_jax.engine.sharding import DecodeSharding, tracing_with
from spectr_jax.engine.state import DecodeState
from spectr_jax.model import Model
from spectr_jax.proposal import Proposal
from spectr_jax.sharding import put
from spectr_jax.tree import TokenTree


def time_in_turns(calls: Mapping[Hashable, Callable[[], Any]], num_runs: int) -> dict[Hashable, np.ndarray]:
  """Seconds `[num_runs]` of each call, after one that is not counted, in turns: other load affects all alike."""
  times = {name: [] for name in calls}
  for call in calls.values():
    jax.block_until_ready(call())
  for _ in range(num_runs):
    for name, call in calls.items():
      start = time.perf_counter()
      jax.block_until_ready(call())
      times[name].append(time.perf_counter() - start)
  return {name: np.array(seconds) for name, seconds in times.items()}


@functools.partial(jax.jit, static_argnames='sharding')
def _logits(model: Model, tokens, positions, mask, cache, *, sharding: DecodeSharding | None) -> jax.Array:
  with tracing_with(sharding):
    return model.apply(tokens, positions, mask, cache).logits


def forward_calls(
  model: Model,
  shapes: Mapping[Hashable, tuple[TokenTree, int]],
  *,
  cache_size: int,
  sharding: DecodeSharding | None = None,
) -> dict[Hashable, Callable[[], jax.Array]]:
  """Forward calls for `time_in_turns`, by name, each on a tree with its root for so many rows."""
  calls = {}
  for name, (tree, batch_size) in shapes.items():
    positions = np.broadcast_to(np.asarray(tree.depths, np.int32), (batch_size, tree.num_nodes + 1))
    cache = jax.jit(model.init_cache_fn, static_argnums=(0, 1))(batch_size, cache_size)
    if sharding is not None:
      positions, cache = sharding.put_rows(positions), put(cache, sharding.of_cache(cache, model))
    arguments = np.zeros(positions.shape, np.int32), positions, tree.ancestors, cache
    calls[name] = functools.partial(_logits, model, *arguments, sharding=sharding)
  return calls


@jax.jit
def draft(decoder: Decoder, state: DecodeState) -> Proposal:
  """A round's guesses, without the drafter's state; the loop's state is not donated."""
  with tracing_with(decoder.sharding):
    return dataclasses.replace(propose(decoder, state, noise_keys(decoder, state)[0]), state=None)
