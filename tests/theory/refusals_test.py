"""Whatever does not fit is refused, by every function of the theory."""

import functools
import math

import numpy as np
import pytest

from spectr_jax import TokenTree
from spectr_jax.theory import (
  MarkovChains,
  acceptance_entropy,
  best_set_probs,
  conditional_coupling_error,
  emitted_law,
  expected_chain_tokens,
  expected_rejections,
  expected_tokens,
  few_children_bound,
  given_optimum,
  independent_block_acceptance,
  kseq_acceptance,
  log_presence,
  minimal_bias,
  optimal_acceptance,
  optimal_block_acceptance,
  optimal_transport,
  over_acceptance,
  pareto_bias,
  published_block_bound,
  race_acceptance,
  race_match_bound,
  race_match_prob,
  random_chains,
  recursive_acceptance,
  rejection_prob,
  speed_up,
  stateless_fewest_calls,
  stateless_kept_bound,
  stateless_mean_bound,
  stateless_optimum,
  total_variation,
  tunstall_bound,
)

BERNOULLI = np.array([0.75, 0.25]), np.array([0.5, 0.5])
P, Q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1])


def _accept(shapes, num_drafts):
  return optimal_acceptance(*(np.ones(shape) / 3 for shape in shapes), num_drafts)


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: log_presence(TokenTree.chains(2, 3), np.zeros((5, 2))), r'draft_log_probs must have shape \[..., 3\]'),
    (lambda: log_presence(TokenTree.chains(2, 3), -1.0), r'got \(\)'),
    (lambda: log_presence(TokenTree.chains(2, 2), [-1, 0.5]), 'logarithms of probabilities, got 0.5'),
    (lambda: log_presence(TokenTree.chains(2, 2), [-1, np.nan]), 'got nan'),
    (lambda: stateless_kept_bound(TokenTree.chains(2, 2), [-1, -1], [-1]), 'target_log_probs must have shape'),
    (lambda: stateless_kept_bound(TokenTree.chains(2, 2), [-1, -1], [np.nan, -1]), 'target_log_probs must be'),
    (lambda: stateless_kept_bound(TokenTree.chains(1, 2), np.zeros((3, 2)), np.zeros((4, 2))), 'equal shapes'),
    (lambda: stateless_mean_bound(TokenTree.chains(2, 2), [-1, -1], [-1, -1], [0.5]), 'set_probs must be 2 prob'),
    (lambda: stateless_mean_bound(TokenTree.chains(2, 2), [-1, -1], [-1, -1], [0.5, np.nan]), 'set_probs must be'),
    (lambda: best_set_probs(TokenTree.chains(2, 2), np.zeros((3, 2)), np.zeros((3, 2)), [1]), r'shape \(3,\)'),
    (lambda: best_set_probs(TokenTree.chains(2, 2), np.zeros((0, 2)), np.zeros((0, 2))), 'text_probs must be'),
    (lambda: stateless_fewest_calls(np.ones((3, 4))), r'shape \[P, T, L\]'),
    (lambda: stateless_fewest_calls(np.ones((3, 4, 0))), 'L of at least 1'),
    (lambda: stateless_fewest_calls([[[0.5, 0.6]]]), 'never rise'),
    (lambda: stateless_fewest_calls([[[1.5, 0.5]]]), 'must be probabilities'),
    (lambda: stateless_fewest_calls([[[0.5, -0.5]]]), 'must be probabilities'),
    (lambda: stateless_optimum(TokenTree.chains(2, 2), [0.5, 0.5], [0.5, 0.5]), 'must be of 2 tokens'),
    (lambda: stateless_optimum(TokenTree.chains(2, 2), np.ones((2, 2)) / 4, [0.5, 0.5]), r'\[V\] \* L'),
    (lambda: stateless_optimum(TokenTree.chains(1, 1), [0.5, 0.5], [0.5, 0.6]), 'target_law must sum to 1'),
    (lambda: stateless_optimum(TokenTree(), 1.0, 1.0), r'\[V\] \* L'),
    (lambda: stateless_optimum(TokenTree.chains(8, 1), np.ones(4) / 4, np.ones(4) / 4), 'at most 100000'),
    (lambda: expected_tokens(TokenTree.chains(1, 2), []), r'\[W\] or \[D, W\]'),
    (lambda: expected_tokens(TokenTree.chains(1, 2), [[0.5, 0.6]]), 'sum to at most 1, got 1.1'),
    (lambda: acceptance_entropy([[0.5]]), r'shape \[W\] with entries, got \[1, 1\]'),
    (lambda: tunstall_bound([0.5, -0.1], 3), 'from 0 to 1, got -0.1 to 0.5'),
    (lambda: tunstall_bound([0.5], [3, 0]), 'integers from 1 on'),
    (lambda: tunstall_bound([0.5], 2.5), 'integers from 1 on'),
    (lambda: few_children_bound([0.5], 3, 0), 'num_rest must be at least 1, got 0'),
    (lambda: few_children_bound([0.0], 3), 'nothing is ever accepted'),
    (lambda: published_block_bound(np.ones((2, 3)) / 6, np.ones((2, 3)) / 6, 1), r'\[V\] \* L'),
    (lambda: published_block_bound([0.5, 0.5], np.ones((2, 2)) / 4, 1), r'\(2,\) and \(2, 2\)'),
    (lambda: independent_block_acceptance([0.5, 0.5], [0.5, 0.6], 1), 'target_law must sum to 1'),
    (lambda: published_block_bound(*BERNOULLI, [1, 0]), 'integers from 1 on'),
    (lambda: optimal_block_acceptance(np.ones((3,) * 4) / 81, np.ones((3,) * 4) / 81, 2), 'at most 100000'),
    (lambda: conditional_coupling_error(np.ones(400) / 400, np.ones(400) / 400, 1), 'got 160000'),
    (lambda: expected_chain_tokens(1.1, 3), 'acceptance_rate must be from 0 to 1, got 1.1'),
    (lambda: expected_chain_tokens(0.5, -1), 'draft_length must be at least 0, got -1'),
    (lambda: speed_up(0.9, 3, draft_cost=0.1), 'tokens_per_call must be at least 1, got 0.9'),
    (lambda: speed_up(2, 3, draft_cost=-0.1), 'at least 0'),
    (lambda: speed_up(2, 3, draft_cost=0.1, call_cost=0), 'call_cost above 0'),
    (lambda: over_acceptance(P, Q, -0.1), 'epsilon must be at least 0, got -0.1'),
    (lambda: over_acceptance(P, Q[:3] / Q[:3].sum(), 0), 'same length, got 4 and 3'),
    (lambda: minimal_bias(P, Q, np.full(4, 1.1)), 'from 0 to 1, got 1.1 to 1.1'),
    (lambda: rejection_prob(P, np.full(4, -0.5)), 'from 0 to 1, got -0.5'),
    (lambda: emitted_law(P, np.ones(4), 2 * Q), 'rejection_law must sum to 1'),
    (lambda: pareto_bias(P, Q, [0.1, 1.5]), 'rejection must be from 0 to 1, got 0.1 to 1.5'),
    (lambda: race_match_prob([0.5, 0.5], np.ones(3) / 3), 'same length, got 2 and 3'),
    (lambda: race_match_bound([0.5, 0.5], [0.5, 0.6]), 'target_probs must sum to 1'),
    (lambda: total_variation([0.5, 0.6], [0.5, 0.5]), 'draft_probs must sum to 1 .* got 1.1'),
    (lambda: total_variation([0.5, 0.5], [[0.5, 0.5], [0.5, 0.4]]), 'target_probs must sum to 1 .* got 0.9'),
    (lambda: total_variation([1.5, -0.5], [0.5, 0.5]), 'draft_probs must not be negative, got -0.5'),
    (lambda: total_variation([np.nan, 1], [0.5, 0.5]), 'draft_probs'),
    (lambda: total_variation(1.0, [0.5, 0.5]), r'draft_probs must have shape \[..., V\]'),
    (lambda: total_variation([0.5, 0.5], [1.0]), 'got 2 and 1'),
    (lambda: total_variation(np.full((2, 2), 0.5), np.full((3, 2), 0.5)), 'shape mismatch'),
    (
      lambda: MarkovChains(np.ones(2) / 2, np.ones((3, 2, 2)) / 2, np.ones((4, 2, 2)) / 2),
      r'\(2,\), \(3, 2, 2\) and \(4, 2, 2\)',
    ),
    (lambda: MarkovChains(np.ones(2) / 2, np.ones((3, 3, 2)) / 2, np.ones((3, 3, 2)) / 2), r'\[T, V, V\]'),
    (lambda: MarkovChains(np.ones(3) / 3, np.ones((2, 2)) / 2, np.ones((2, 2)) / 2), r'\[T, V, V\]'),
    (lambda: MarkovChains(np.ones(2), np.ones((3, 2, 2)) / 2, np.ones((3, 2, 2)) / 2), 'prompt_probs must sum to 1'),
    (lambda: MarkovChains(np.ones(2) / 2, np.ones((3, 2, 2)) / 2, np.ones((3, 2, 2))), 'target_probs must sum to 1'),
    (lambda: random_chains(0, num_tokens=0), 'at least 1, got 0 and 7'),
    *(
      (functools.partial(expected_rejections, random_chains(0, num_tokens=2), number), 'whole numbers from 1 on')
      for number in (0, 1.5, math.nan, [1, -2], -math.inf)
    ),
    (lambda: optimal_transport([0.5, 0.5], [0.5, 0.5], 16), r'at most 100000 are allowed; got V = 2 and n = 16'),
    (lambda: optimal_transport(np.full(317, 1 / 317), np.full(317, 1 / 317), 1), 'got V = 317 and n = 1'),
    (lambda: optimal_transport([1.1, -0.1], [0.5, 0.5], 1), 'draft_probs must not be negative, got -0.1'),
    (lambda: optimal_transport([0.5, 0.5], [0.5, 0.5 + 1e-8], 1), 'target_probs must sum to 1'),
    (lambda: optimal_transport([0.5, np.nan], [0.5, 0.5], 1), 'draft_probs'),
    (lambda: optimal_transport([[0.5, 0.5]], [0.5, 0.5], 1), r'draft_probs must have shape \[V\].*\(1, 2\)'),
    (lambda: optimal_transport([0.5, 0.5], 1.0, 1), r'target_probs must have shape \[V\]'),
    (lambda: optimal_transport([], [], 1), r'draft_probs must have shape \[V\]'),
    (lambda: optimal_transport([0.5, 0.5], [0.2, 0.3, 0.5], 1), 'got 2 and 3'),
    (lambda: optimal_transport([0.5, 0.5], [0.5, 0.5], 0), 'num_drafts must be integers from 1 on, got 0'),
    (lambda: _accept(((3,), (4,)), 1), r'\(3,\) and \(4,\)'),
    (lambda: _accept(((2, 3), (3,)), 1), r'\(2, 3\) and \(3,\)'),
    (lambda: _accept(((), ()), 1), r'\(\) and \(\)'),
    (lambda: _accept(((3,), (3,)), -1), '-1'),
    (lambda: _accept(((2, 3), (2, 3)), np.array([1, -2])), '-2'),
    (lambda: _accept(((3,), (3,)), 1.5), 'float'),
    (lambda: _accept(((2, 3), (2, 3)), np.array([1, 2, 3])), r'\(3,\)'),
    *(
      (functools.partial(function, np.ones(3) / 3, np.ones(size) / size, number), message)
      for function in (kseq_acceptance, recursive_acceptance, race_acceptance)
      for size, number, message in ((4, 1, r'\(3,\) and \(4,\)'), (3, 0, 'integers from 1 on, got 0'))
    ),
    *(
      (functools.partial(given_optimum, P[:2], Q[:2], 1, is_given), 'is_given must be bool')
      for is_given in (np.zeros(3, bool), np.zeros(2, int))
    ),
  ],
)
def test_refuses(call, message):
  with pytest.raises(ValueError, match=message):
    call()
