"""Every method, and rows of guesses with distributions for it to verify."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax import METHODS, TokenTree
from spectr_jax.methods import FURTHER_METHODS, with_children
from spectr_jax.proposal import Proposal

# Every method, traversal verification in both its versions.
ALL = {
  **METHODS,
  **FURTHER_METHODS,
  'traversal_without_replacement': with_children(METHODS['traversal'], 'without_replacement'),
}
CHAIN, CHAINS = TokenTree.chains(1, 3), TokenTree.chains(2, 3)
# 0 -> (1 -> (3, 4 -> 6), 2 -> 5): leaves at depths 2 and 3, nodes of a depth with 2, 1 and no children.
UNEQUAL = TokenTree((0, 0, 1, 1, 2, 4))
# 0 -> (1 -> 3, 2).
SMALL = TokenTree((0, 0, 1))
# A few sums of float64 products.
EXACT = 1e-12
DUPLICATES = [2, 2, 0, 1, 0, 3]  # nodes 1 and 2, and below them 3 and 5, spell the same
DISTINCT = [2, 4, 0, 1, 0, 3]
RAN_OUT = [2, -1, 0, 1, 4, 3]  # the root's law has one token ...
RAN_OUT_BELOW = [2, 4, 0, -1, 0, 3]  # ... or that after it; what stands below a missing node means nothing


def random_law(rng, vocab_size, zero_share=0.0):
  law = rng.dirichlet(np.ones(vocab_size)) * (rng.random(vocab_size) >= zero_share)
  return law / law.sum() if law.any() else np.eye(vocab_size)[rng.integers(vocab_size)]


def make_guesses(seed, tree, vocab_size, tokens=None, *, zero_share=0.0, equal_share=0.0, agreement=0.0, laws=None):
  """A proposal and the target's probabilities for one row, float64; nodes that spell the same have the same ones.

  Tokens are drawn if None. A probability is 0 with chance `zero_share`; a target is the draft with `equal_share`, else
  for `agreement` of it. `laws` are draft distributions of some contexts, by their tokens.
  """
  rng = np.random.default_rng(seed)
  drafts, targets = dict(laws or {}), {}
  spelled, chosen = [()], []
  for node in range(tree.num_nodes + 1):
    if node:
      parent = spelled[tree.parent_of[node]]
      token = rng.choice(vocab_size, p=drafts[parent]) if tokens is None else tokens[node - 1]
      chosen.append(token)
      spelled.append((*parent, token))
    context = spelled[node]
    if context not in targets:
      drafts.setdefault(context, random_law(rng, vocab_size, zero_share))
      share = 1.0 if rng.random() < equal_share else agreement
      targets[context] = share * drafts[context] + (1 - share) * random_law(rng, vocab_size, zero_share)
  proposal = Proposal(
    np.array(chosen, np.int32).reshape(tree.num_nodes),
    np.array([drafts[spelled[node]] for node in tree.parent_nodes]).reshape(-1, vocab_size),
  )
  return proposal, np.array([targets[context] for context in spelled])


def stack(rows):
  return jax.tree.map(lambda *x: np.stack(x), *rows)


# Laws are long programs that run once: compiling them well would take longer than running them does.
law_jit = functools.partial(
  jax.jit,
  static_argnames=('verifier', 'tree'),
  compiler_options={'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True},
)


@law_jit
def laws_of(proposals, target_probs, *, verifier, tree):
  return jax.vmap(lambda proposal, targets: verifier.law(tree, proposal, targets, verifier.init_state(tree)))(
    proposals, target_probs
  )


def as_float32(tree):
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else x.dtype), tree)
