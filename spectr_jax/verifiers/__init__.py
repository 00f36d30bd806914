"""Verifiers: algorithms that decide which tokens of a tree of guesses are kept."""

from spectr_jax.tree import Tree
from spectr_jax.verifiers.block import Block
from spectr_jax.verifiers.greedy_block import GreedyBlock
from spectr_jax.verifiers.race_layers import RaceLayers
from spectr_jax.verifiers.race_traversal import RaceTraversal
from spectr_jax.verifiers.seed_exact import SeedExact
from spectr_jax.verifiers.traversal import Traversal
from spectr_jax.verifiers.univer import UniVer
from spectr_jax.verifiers.verifier import Decisions, Record, RecordedVerifier, Verdict, Verifier
from spectr_jax.verifiers.walk import Walk

__all__ = [
  'Block',
  'Decisions',
  'GreedyBlock',
  'RaceLayers',
  'RaceTraversal',
  'Record',
  'RecordedVerifier',
  'SeedExact',
  'Traversal',
  'Tree',
  'UniVer',
  'Verdict',
  'Verifier',
  'Walk',
]
