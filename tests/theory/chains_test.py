"""Laws and chains that theory starts from: what is refused, and marginals by going through all texts."""

import itertools

import numpy as np
import pytest

from spectr_jax.theory import random_chains, total_variation


def test_total_variation_is_the_largest_difference_of_a_set():
  rng = np.random.default_rng(0)
  p, q = rng.dirichlet(np.ones(5), 3), rng.dirichlet(np.ones(5), 3)
  sets = np.array(list(itertools.product((0, 1), repeat=5)))
  np.testing.assert_allclose(total_variation(p, q), ((p - q) @ sets.T).max(axis=1), rtol=0, atol=1e-15)
  assert total_variation([1, 0], [0, 1]) == 1
  # Leading axes broadcast.
  np.testing.assert_allclose(total_variation(p[0], q), [total_variation(p[0], law) for law in q], rtol=0, atol=1e-15)
  # Distributions out of float32 are normalized again.
  narrow = np.array([0.1, 0.2, 0.7], np.float32)
  assert total_variation(narrow, narrow * np.float32(1 + 4e-6)) < 1e-7


def test_context_laws_are_sums_over_texts():
  chains = random_chains(3, num_tokens=4, vocab_size=3)
  expected = np.zeros((4, 3))
  for text in itertools.product(range(3), repeat=4):  # the prompt's last token and three more
    reach = chains.prompt_probs[text[0]]
    for n, token in enumerate(text):
      expected[n, token] += reach / 3 ** (3 - n)  # once for every continuation
      reach *= chains.target_probs[n, token, text[n + 1]] if n < 3 else 1
  np.testing.assert_allclose(chains.context_probs, expected, rtol=0, atol=1e-15)


def test_random_chains():
  chains = random_chains(10, num_tokens=50)
  assert (chains.num_tokens, chains.vocab_size) == (50, 7)
  np.testing.assert_allclose(chains.prompt_probs, 1 / 7, rtol=1e-15)
  again, other = random_chains(10, num_tokens=50), random_chains(11, num_tokens=50)
  assert (chains.target_probs == again.target_probs).all()
  assert (chains.target_probs != other.target_probs).any()
  # As far apart as the paper's: 16.4 rejections in 50 tokens.
  assert total_variation(chains.draft_probs, chains.target_probs).mean() == pytest.approx(16.4 / 50, abs=0.02)
