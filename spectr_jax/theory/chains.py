"""Nonstationary Markov chains as draft and target, for computing and simulating expected rejections."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from spectr_jax.theory.arguments import as_probs


@dataclasses.dataclass(frozen=True, eq=False)
class MarkovChains:
  """A draft and a target whose distribution of the n-th token depends on n and on the previous token.

  A chain that starts with a distribution of its own instead of a prompt has equal rows in its first matrix.

  Attributes:
    prompt_probs: float64 `[V]`, the distribution of the prompt's last token x_0, from which both chains start.
    draft_probs: float64 `[T, V, V]`, p_n(. | x) at `[n - 1, x]`.
    target_probs: float64 `[T, V, V]`, q_n likewise.

  Raises:
    ValueError: A shape does not fit, or a row is not a distribution.
  """

  prompt_probs: np.ndarray
  draft_probs: np.ndarray
  target_probs: np.ndarray

  def __post_init__(self):
    for field in dataclasses.fields(self):
      object.__setattr__(self, field.name, as_probs(getattr(self, field.name), field.name))
    prompt, draft, target = (getattr(self, field.name).shape for field in dataclasses.fields(self))
    if len(prompt) != 1 or len(draft) != 3 or draft != target or draft[1:] != prompt * 2:
      raise ValueError(
        'prompt_probs must be [V], and draft_probs and target_probs must be [T, V, V]; got shapes'
        f' {prompt}, {draft} and {target}'
      )

  @property
  def num_tokens(self) -> int:
    """T, the horizon."""
    return self.draft_probs.shape[0]

  @property
  def vocab_size(self) -> int:
    """V."""
    return self.draft_probs.shape[1]

  @functools.cached_property
  def context_probs(self) -> np.ndarray:
    """float64 `[T, V]`: at `[n - 1]` the target's distribution of x_{n-1}, the token before the n-th."""
    contexts = [self.prompt_probs]
    for transition in self.target_probs[:-1]:
      contexts.append(contexts[-1] @ transition)
    return np.stack(contexts)


def random_chains(seed: int, *, num_tokens: int, vocab_size: int = 7) -> MarkovChains:
  """Two nonstationary chains with random transitions: rows of uniform numbers in [0, 1), normalized.

  They follow the simulations of "A Theoretical Perspective for Speculative Decoding Algorithm" (Yin et al. 2024,
  Appendix F): 7 states, a uniform prompt, T = 50 or 100. The paper does not say how it draws rows. The rows here are
  about 1/3 apart in total variation, which gives the paper's 16.4 rejections in 50 tokens.

  `num_tokens` is T and `vocab_size` V, both at least 1, else ValueError.
  """
  if num_tokens < 1 or vocab_size < 1:
    raise ValueError(f'num_tokens and vocab_size must be at least 1, got {num_tokens} and {vocab_size}')
  rows = np.random.default_rng(seed).random((2, num_tokens, vocab_size, vocab_size))
  return MarkovChains(np.full(vocab_size, 1 / vocab_size), *rows / rows.sum(axis=-1, keepdims=True))
