"""The decoding loop compiles for a TPU ahead of time and fits its memory; run with the extra `tpu`, `pytest -m tpu`."""

import dataclasses

import pytest

from benchmarks import tpu_memory
from spectr_jax import topology
from spectr_jax.tree import TokenTree

pytestmark = pytest.mark.tpu


@pytest.fixture(scope='module')
def chip():
  if not topology.is_compiler_installed():
    pytest.skip('needs the extra tpu')
  return topology.describe_topology('v5e:2x2')[0]


def test_the_pair_of_the_paper_fits_one_chip(chip):
  _, report = tpu_memory.compile_rounds(chip, 'spectr', TokenTree.chains(8, 8), batch_size=8, max_length=256)
  print('\nspectr, K = 8, L = 8, batch 8, v5e\n' + tpu_memory.describe(report, topology.chip_of(chip).memory))
  weights = 2 * (tpu_memory.TARGET.num_params + tpu_memory.DRAFT.num_params)
  assert weights < report.arguments < 2 * weights
  # All of the state that comes out stands where it went in.
  assert report.aliased == pytest.approx(report.outputs, rel=0.01)
  assert report.total < topology.chip_of(chip).memory
  # Well below the 16 GiB: a copy of the caches per draft, or of the laws per node, would show.
  assert report.temporaries < 2**30


@pytest.mark.parametrize(('method', 'tree'), [('autoregressive', TokenTree()), ('speculative', TokenTree.chains(1, 4))])
def test_single_draft_methods_compile(chip, method, tree):
  small = dict(vocab_size=1024, embed_dim=128, num_layers=2, num_heads=2, mlp_dim=256)
  _, report = tpu_memory.compile_rounds(
    chip,
    method,
    tree,
    target=dataclasses.replace(tpu_memory.TARGET, **small),
    draft=dataclasses.replace(tpu_memory.DRAFT, **{**small, 'num_layers': 1}),
    batch_size=2,
    max_length=64,
  )
  print(f'\n{method}, small\n' + tpu_memory.describe(report, topology.chip_of(chip).memory))
  assert 0 < report.total < 2**26
