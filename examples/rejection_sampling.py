"""An example of a verifier without this library: rejection sampling of a chain in NumPy, for the conformance kit.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", Algorithm 1. Check it with
`python -m decode.prove --callable=examples.rejection_sampling:verify --tree=chains:1,2`.
"""

import numpy as np


def verify(seed, tokens, lengths, draft_probs, target_probs):
  """The tokens of a round, `[B, L + 1]`, -1 behind each row's.

  Args:
    seed: Of the round's noise.
    tokens: int `[B, L]`, the guesses.
    lengths: int `[B]`, the number of guesses of each row.
    draft_probs: `[B, L, V]`, the distributions that they were drawn from.
    target_probs: `[B, L + 1, V]`.
  """
  rng = np.random.default_rng(seed)
  rows, places = np.arange(len(tokens)), np.arange(tokens.shape[1])
  guesses = np.maximum(tokens, 0)[..., None]
  p = np.take_along_axis(draft_probs, guesses, axis=2)[..., 0]
  q = np.take_along_axis(target_probs[:, :-1], guesses, axis=2)[..., 0]
  is_kept = (rng.random(tokens.shape) * p < q) & (places < lengths[:, None])
  num_kept = np.cumprod(is_kept, axis=1).sum(axis=1)
  # After a rejection what the draft has not covered, after the last guess all of the target's distribution.
  covered = np.where((num_kept < lengths)[:, None], draft_probs[rows, np.minimum(num_kept, len(places) - 1)], 0)
  left = np.maximum(target_probs[rows, num_kept] - covered, 0)
  sums = np.cumsum(left, axis=1, dtype=np.float64)
  drawn = (rng.random((len(rows), 1)) * sums[:, -1:] >= sums).sum(axis=1)
  found = np.where(places < num_kept[:, None], tokens, -1)
  found = np.concatenate([found, np.full((len(rows), 1), -1)], axis=1)
  found[rows, num_kept] = drawn
  return found
