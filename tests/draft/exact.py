"""The chi-square test of the whole loop with a drafter, on tiny transformers; and controls for enumerations."""

import contextlib

import jax
import numpy as np
import pytest
from coarse import coarse

import spectr_jax
from spectr_jax import METHODS, SamplingParams
from spectr_jax.testing import chi_square, engine_counts, enumeration, ordinary_law, tiny_transformers

_SAMPLING = {'temperature': 0.9, 'top_k': 4, 'top_p': 0.95}


def p_values(drafter, method, tree, *, prompts=([1, 2, 1], [3]), num_tokens=3, num_samples=5_000, seed=5, target=None):
  """Those of the first tokens after each prompt, jointly, over rounds that keep none, some or all guesses."""
  target = target or tiny_transformers()[0]
  counts = engine_counts(
    jax.random.key(seed), target, drafter, prompts, method=coarse(METHODS[method]), tree=tree, num_tokens=num_tokens,
    num_samples=num_samples, batch_size=2500, **_SAMPLING,
  )  # fmt: skip
  expected = [ordinary_law(target, prompt, num_tokens, **_SAMPLING) for prompt in prompts]
  return [chi_square(*pair).p_value for pair in zip(counts, expected, strict=True)]


@contextlib.contextmanager
def changed_proposals(change):
  """Enumerations in which proposals have the fields that `change` gives for theirs."""
  proposal = enumeration.Proposal
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(enumeration, 'Proposal', lambda *fields: proposal(*change(*fields)))
    yield


def assert_greedy_is_exact(target, drafter, prompts, lengths, **options):
  """Greedy tokens are those without a draft; options as for `generate`."""
  shared = {'max_new_tokens': 12, 'sampling': SamplingParams(0.0)}
  plain = spectr_jax.generate(jax.random.key(0), target, None, prompts, lengths, **shared)
  found = spectr_jax.generate(jax.random.key(0), target, drafter, prompts, lengths, **options, **shared)
  np.testing.assert_array_equal(found.tokens, plain.tokens)


def assert_engine_is_exact(drafter, method, tree, **options):
  """The tokens have the distribution of ordinary sampling; options as for `p_values`."""
  values = p_values(drafter, method, tree, **options)
  assert min(values) > 1e-3, values
