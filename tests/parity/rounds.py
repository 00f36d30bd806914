"""Rounds of a drafter that are compared with a reference: ragged prompts, before and after a partial acceptance."""

import jax
import jax.numpy as jnp
import numpy as np
from published_heads import V

import spectr_jax
from spectr_jax import SamplingParams, TokenTree
from spectr_jax.engine.loop import noise_keys, propose, run_round
from spectr_jax.engine.reading import init_decode

TEMPERATURE = 4.0  # so that no probability vanishes in float32
_SIZE = 48


def features_of(target, layers):
  """A function that gives the target's hidden states `[S - 1, F, D]` of all tokens of a text but the last."""
  read, apply = target.with_features(layers), jax.jit(spectr_jax.Model.apply)
  causal = jnp.tril(jnp.ones((_SIZE, _SIZE), bool))

  def features(text):
    padded = jnp.zeros((1, _SIZE), jnp.int32).at[0, : len(text)].set(jnp.asarray(text))
    output = apply(read, padded, jnp.arange(_SIZE)[None], causal, read.init_cache_fn(1, 1))
    return output.features[0, : len(text) - 1]

  return features


def played(target, drafter, depth, lengths):
  """Of four rounds on chains: the state, and for each row its text, its guesses and their distributions `[L, V]`."""
  tree = TokenTree.chains(1, depth)
  decoder = spectr_jax.Decoder.make(target, drafter, method='block', tree=tree, max_new_tokens=30, cache_size=_SIZE)
  prompts = jax.random.randint(jax.random.key(3), (4, 9), 0, V)
  sampling = SamplingParams(TEMPERATURE)
  state = init_decode(decoder, jax.random.key(2), prompts, jnp.array(lengths), sampling=sampling)
  draw_keys, draft, advance, num_partial = jax.jit(noise_keys), jax.jit(propose), jax.jit(run_round), 0
  for _ in range(4):
    proposal = draft(decoder, state, draw_keys(decoder, state)[0])
    sizes = np.asarray(state.root_position) + 1
    yield (
      state,
      [
        (
          [*prompts[row, :length].tolist(), *state.result.tokens[row, : state.result.lengths[row]].tolist()],
          np.asarray(proposal.tokens[row]).tolist(),
          np.asarray(proposal.probs[row], np.float64),
        )
        for row, length in enumerate(lengths)
      ],
    )
    state, _ = advance(decoder, state)
    moved = np.asarray(state.root_position) + 1 - sizes
    num_partial += ((moved > 1) & (moved <= depth)).sum()
  assert num_partial > 0
