"""Verifiers: algorithms that decide which tokens of a tree of guesses are kept."""

from spectr_jax.verify.block import Block
from spectr_jax.verify.greedy_block import GreedyBlock
from spectr_jax.verify.race_traversal import RaceTraversal
from spectr_jax.verify.record import Decisions, Record
from spectr_jax.verify.seed_exact import SeedExact
from spectr_jax.verify.traversal import Traversal
from spectr_jax.verify.verifier import RecordedVerifier, Tree, Verdict, Verifier
from spectr_jax.verify.walk import Walk

__all__ = [
  'Block',
  'Decisions',
  'GreedyBlock',
  'RaceTraversal',
  'Record',
  'RecordedVerifier',
  'SeedExact',
  'Traversal',
  'Tree',
  'Verdict',
  'Verifier',
  'Walk',
]
