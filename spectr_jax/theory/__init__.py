"""Theory: what methods attain and what the best possible rule could attain, as functions."""

from spectr_jax.couplings.optimum import given_optimum, optimal_acceptance
from spectr_jax.theory.acceptance import kseq_acceptance, kseq_gamma, race_acceptance, recursive_acceptance
from spectr_jax.theory.arguments import total_variation
from spectr_jax.theory.blocks import (
  conditional_coupling_error,
  independent_block_acceptance,
  optimal_block_acceptance,
  published_block_bound,
)
from spectr_jax.theory.chains import MarkovChains, random_chains
from spectr_jax.theory.over_acceptance import (
  best_rejection_law,
  emitted_law,
  minimal_bias,
  over_acceptance,
  pareto_bias,
  rejection_prob,
)
from spectr_jax.theory.rejections import (
  batch_improvement,
  expected_rejections,
  expected_target_calls,
  rejection_probs,
)
from spectr_jax.theory.shared_race import race_match_bound, race_match_prob
from spectr_jax.theory.speed_up import expected_chain_tokens, speed_up
from spectr_jax.theory.stateless import (
  best_set_probs,
  log_presence,
  stateless_fewest_calls,
  stateless_kept_bound,
  stateless_mean_bound,
  stateless_optimum,
)
from spectr_jax.theory.stateless_chains import stateless_chains_optimum
from spectr_jax.theory.transport import TransportCoupling, TransportPlan, optimal_transport, transport_bound
from spectr_jax.theory.tree_tokens import acceptance_entropy, expected_tokens, few_children_bound, tunstall_bound

__all__ = [
  'MarkovChains',
  'TransportCoupling',
  'TransportPlan',
  'acceptance_entropy',
  'batch_improvement',
  'best_rejection_law',
  'best_set_probs',
  'conditional_coupling_error',
  'emitted_law',
  'expected_chain_tokens',
  'expected_rejections',
  'expected_target_calls',
  'expected_tokens',
  'few_children_bound',
  'given_optimum',
  'independent_block_acceptance',
  'kseq_acceptance',
  'kseq_gamma',
  'log_presence',
  'minimal_bias',
  'optimal_acceptance',
  'optimal_block_acceptance',
  'optimal_transport',
  'over_acceptance',
  'pareto_bias',
  'published_block_bound',
  'race_acceptance',
  'race_match_bound',
  'race_match_prob',
  'random_chains',
  'recursive_acceptance',
  'rejection_prob',
  'rejection_probs',
  'speed_up',
  'stateless_chains_optimum',
  'stateless_fewest_calls',
  'stateless_kept_bound',
  'stateless_mean_bound',
  'stateless_optimum',
  'total_variation',
  'transport_bound',
  'tunstall_bound',
]
