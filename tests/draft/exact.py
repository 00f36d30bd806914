"""The chi-square test of the whole loop with a drafter, on tiny transformers."""

import jax
from coarse import coarse

from spectr_jax import METHODS
from spectr_jax.testing import chi_square, engine_counts, ordinary_law, tiny_transformers

_SAMPLING = {'temperature': 0.9, 'top_k': 4, 'top_p': 0.95}


def p_values(drafter, method, tree, *, prompts=([1, 2, 1], [3]), num_tokens=3, num_samples=5_000, seed=5):
  """Those of the first tokens after each prompt, jointly, over rounds that keep none, some or all guesses."""
  target, _ = tiny_transformers()
  counts = engine_counts(
    jax.random.key(seed), target, drafter, prompts, method=coarse(METHODS[method]), tree=tree, num_tokens=num_tokens,
    num_samples=num_samples, batch_size=2500, **_SAMPLING,
  )  # fmt: skip
  laws = [ordinary_law(target, prompt, num_tokens, **_SAMPLING) for prompt in prompts]
  return [chi_square(found, law).p_value for found, law in zip(counts, laws, strict=True)]


def assert_engine_is_exact(drafter, method, tree, **options):
  """The tokens have the distribution of ordinary sampling; options as for `p_values`."""
  values = p_values(drafter, method, tree, **options)
  assert min(values) > 1e-3, values
