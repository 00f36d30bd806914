"""Token-level walks: the table that accelerators follow leads where step after step does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from guesses import CHAIN, CHAINS, DISTINCT, DUPLICATES, RAN_OUT, RAN_OUT_BELOW, UNEQUAL, make_guesses

from spectr_jax.couplings.kseq import KSeq
from spectr_jax.verifiers.walk import Walk
from tests.slow import slow


@pytest.mark.parametrize(
  ('tree', 'tokens'),
  [
    (CHAIN, None), (CHAINS, None), (UNEQUAL, None), (UNEQUAL, DUPLICATES), (UNEQUAL, DISTINCT), (UNEQUAL, RAN_OUT),
    (UNEQUAL, RAN_OUT_BELOW),
  ],
)  # fmt: skip
@pytest.mark.parametrize('is_pooled', [slow(True), False])
def test_the_table_leads_where_the_steps_do(tree, tokens, is_pooled):
  walk, ends = Walk(KSeq(), is_pooled=is_pooled), set()
  with jax.enable_x64(True):

    @jax.jit
    @jax.vmap
    def both(uniforms, tokens, probs, target_probs):
      proposal = type(row)(tokens, probs)
      (node, depth, _), _ = walk._path(tree, proposal, target_probs, uniforms, is_explained=False)
      residual = walk._step(tree, proposal, target_probs, node)[1].residual
      return (node, depth, residual), walk._by_table(KSeq(), tree, proposal, target_probs, uniforms)

    for seed in range(4):
      row, target_probs = make_guesses(seed, tree, 6, tokens, zero_share=0.2, agreement=0.5)
      uniforms = np.random.default_rng(seed).random((64, tree.max_depth + 1, 2))
      rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (64, *x.shape)), (row.tokens, row.probs, target_probs))
      (node, depth, residual), (own_node, own_depth, own_residual) = both(uniforms, *rows)
      np.testing.assert_array_equal(node, own_node)
      np.testing.assert_array_equal(depth, own_depth)
      np.testing.assert_allclose(residual, own_residual, atol=1e-12)
      ends |= set(np.asarray(depth).tolist())
  assert len(ends) > 1
