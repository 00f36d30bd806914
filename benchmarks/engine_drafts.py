"""Tokens per call of tpu-inference with its argmax chains, and with sampled ones that our adapter verifies.

Needs     tpu-inference==0.32.0, installed with --no-deps
Command   python -m benchmarks.engine_drafts --temperature=1,0.6,0 --draft_length=3,5,8
Models    the pretrained pair, or --target and --draft
Prompts   the shipped ones, continued by --max_new_tokens tokens each

The engine drafts the likeliest tokens, whatever the temperature, and passes no distributions to its sampler. A sampled
chain is drawn at the request's temperature. Every line decodes whole texts, round by round: the draft writes a chain,
one call of the target scores it, and the sampler decides. Ratios are paired by prompt. At temperature 0 all are equal.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import command, engine_stubs
from common import command_line
from decode.experiment import metrics
from decode.experiment.workload import Workload
from spectr_jax import Model, SamplingParams
from spectr_jax.sampling import logits_to_probs

# Whose sampler decides on which chain; the first is the engine as it is.
VARIANTS = ('argmax', 'engine'), ('argmax', 'adapter'), ('sampled', 'engine'), ('sampled', 'adapter')


def _flat(rows):
  """The rows `[B * L, V]` of `[B, L, V]`."""
  return rows.reshape(-1, rows.shape[-1])


def _drawn(key, probs):
  return jax.random.categorical(key, jnp.log(probs), mode='high').astype(jnp.int32)


@functools.partial(jax.jit, static_argnames='size')
def _prefill(model, tokens, lengths, *, size: int):
  return model.prefill(tokens, lengths, model.init_cache_fn(len(tokens), size))[0]


@functools.partial(jax.jit, static_argnames=('depth', 'is_sampled'))
def _round(key, draft, target, caches, last, lengths, sampling, *, depth: int, is_sampled: bool):
  """A chain `[B, L]` after the `last` tokens, its distributions, the target's logits, the token that follows a whole
  chain, and both caches with all of these pending."""
  keys, token, chain, probs = jax.random.split(key, depth + 1), last, [], []
  (draft_cache, target_cache), causal = caches, np.tri(depth + 1, dtype=bool)
  for i in range(depth + 1):  # the last call is for the cache alone
    output = draft.apply(token[:, None], (lengths - 1 + i)[:, None], causal[i : i + 1], draft_cache)
    draft_cache = output.cache
    if i < depth:
      probs.append(logits_to_probs(output.logits, sampling)[:, 0])
      token = _drawn(keys[i], probs[-1]) if is_sampled else jnp.argmax(output.logits[:, 0], axis=-1).astype(jnp.int32)
      chain.append(token)
  called = jnp.stack([last, *chain], axis=1)
  places = jnp.arange(depth + 1)
  output = target.apply(called, lengths[:, None] - 1 + places, causal, target_cache)
  bonus = _drawn(keys[depth], logits_to_probs(output.logits[:, -1:], sampling)[:, 0])
  return called[:, 1:], jnp.stack(probs, axis=1), output.logits[:, :-1], bonus, (draft_cache, output.cache)


@functools.partial(jax.jit, static_argnames='depth')
def _commit(models, caches, chain, out, last, is_running, *, depth: int):
  """What a round has added: caches, the last tokens, and numbers of tokens, 0 for rows at their end."""
  emitted = jnp.concatenate([out[: chain.size].reshape(chain.shape), out[chain.size :, None]], axis=1)
  num_new = jnp.where(is_running, (emitted >= 0).sum(axis=1), 0)
  # The token after the accepted ones stands behind them, whether it is the sampler's or the one drawn before.
  newest = jnp.take_along_axis(emitted, jnp.maximum(num_new - 1, 0)[:, None], axis=1)[:, 0]
  path = jnp.broadcast_to(jnp.arange(depth + 1, dtype=jnp.int32), emitted.shape)
  caches = tuple(model.commit_fn(cache, path, num_new) for model, cache in zip(models, caches))
  return caches, jnp.where(num_new > 0, newest, last), num_new


def decode(samplers, metadata_class, target: Model, draft: Model, tokens, lengths, temperature: float, *, variant,
           depth: int, max_new_tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
  """Tokens and calls of the target, `[B]` each, until every row has `max_new_tokens`, behind prompts `[B, P]` of
  `lengths` `[B]`. `samplers` are the engine's and the adapter's by name, `metadata_class` is the engine's
  `TPUSupportedSamplingMetadata`, `variant` is one of `VARIANTS`, `depth` is L.
  """
  chain_kind, sampler = variant
  num_rows, size = len(tokens), tokens.shape[1] + max_new_tokens + depth + 1
  sampling = SamplingParams(jnp.full(num_rows, temperature))
  ones = jnp.ones(num_rows)
  metadata = metadata_class(do_sampling=False)
  if temperature:
    none = jnp.zeros(num_rows, jnp.int32)
    metadata = metadata_class(temperature=temperature * ones, top_k=none, top_p=ones, do_sampling=True)
  models, lengths = (draft, target), jnp.asarray(lengths, jnp.int32)
  caches = tuple(_prefill(model, tokens, lengths - 1, size=size) for model in models)
  last = jnp.take_along_axis(jnp.asarray(tokens), lengths[:, None] - 1, axis=1)[:, 0].astype(jnp.int32)
  num_tokens, num_calls = np.zeros(num_rows, int), np.zeros(num_rows, int)
  key = jax.random.key(seed)
  while (is_running := num_tokens < max_new_tokens).any():
    key, draft_key, verify_key = jax.random.split(key, 3)
    chain, probs, logits, bonus, caches = _round(
      draft_key, draft, target, caches, last, lengths + num_tokens, sampling, depth=depth,
      is_sampled=chain_kind == 'sampled',
    )  # fmt: skip
    out = samplers[sampler](
      chain.reshape(-1), jnp.full(num_rows, depth), _flat(probs) if chain_kind == 'sampled' else None,
      _flat(logits), bonus, metadata, verify_key,
    )  # fmt: skip
    caches, last, num_new = _commit(models, caches, chain, out, last, is_running, depth=depth)
    num_tokens, num_calls = num_tokens + np.asarray(num_new), num_calls + is_running
  return np.minimum(num_tokens, max_new_tokens), num_calls


def line(temperature: float, depth: int, counts: list[tuple[np.ndarray, np.ndarray]]) -> str:
  """A line of the table: tokens per call of each variant; all but the first with their ratio to it."""
  cells = []
  for number, own in enumerate(counts):
    cells.append(metrics.ratio_text(*own) + (f', {metrics.comparison_text(own, counts[0])}' if number else ''))
  return f'| {temperature:g} | {depth} | {" | ".join(cells)} |'


def load_samplers(depths):
  """By number of drafted tokens the engine's sampler and the adapter's, and the class of their metadata."""
  engine_stubs.install_tpu_inference()
  from tpu_inference.layers.jax.sample.rejection_sampler import RejectionSampler
  from tpu_inference.layers.jax.sample.sampling_metadata import TPUSupportedSamplingMetadata

  from integrations import tpu_inference

  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('data', 'model'))
  engine = RejectionSampler(mesh)
  samplers = {
    depth: {'engine': engine, 'adapter': tpu_inference.RejectionSampler(mesh, depth, method='block')}
    for depth in depths
  }
  return samplers, TPUSupportedSamplingMetadata


if __name__ == '__main__':
  _OPTIONS = command.define_options('target', 'draft')
  _TEMPERATURES = command.define_numbers('temperature', '1,0.6,0', 'Temperatures.', float, least=0)
  _DEPTHS = command.define_numbers('draft_length', '3,5,8', 'L, drafted tokens.')
  _NUM_PROMPTS = flags.DEFINE_integer('num_prompts', 96, 'Prompts, all in one batch.', lower_bound=3)
  _MAX_NEW_TOKENS = flags.DEFINE_integer('max_new_tokens', 64, 'Tokens of a continuation.', lower_bound=1)
  _SEED = flags.DEFINE_integer('seed', 0, 'Seed.', lower_bound=0)

  def main(argv):
    del argv
    temperatures, depths = _TEMPERATURES(), _DEPTHS()
    samplers, metadata_class = load_samplers(depths)
    room = _MAX_NEW_TOKENS.value + max(depths) + 1
    options = _OPTIONS(num_prompts=_NUM_PROMPTS.value, skip_long=True, max_new_tokens=room)
    workload = Workload.load(options)
    if not isinstance(workload.draft, Model):
      raise ValueError(f'draft: chains are drafted by a model, and {options.draft} is not a model')
    print('| temperature | L | ' + ' | '.join(f'{chain}, {sampler}' for chain, sampler in VARIANTS) + ' |')
    print('|---' * (2 + len(VARIANTS)) + '|')
    for temperature in temperatures:
      for depth in depths:
        counts = [
          decode(
            samplers[depth], metadata_class, workload.target, workload.draft, workload.tokens, workload.lengths,
            temperature, variant=variant, depth=depth, max_new_tokens=_MAX_NEW_TOKENS.value, seed=_SEED.value,
          )
          for variant in VARIANTS
        ]  # fmt: skip
        print(line(temperature, depth, counts), flush=True)

  command_line.run(main)
