"""Prompt lookup as a drafter: guesses are given, copied from where the text has had its last token before."""

import jax
import jax.numpy as jnp

from spectr_jax import Drafter
from spectr_jax.proposal import Proposal


def guess(text, length, tree):
  """What followed the latest earlier places of a row's last token, one chain of guesses per place; int32 `[N]`.

  Args:
    text: int32 `[T]`.
    length: Committed tokens.
    tree: `TokenTree.chains(K, L)`.
  """
  num_drafts, draft_length = tree.num_nodes // tree.max_depth, tree.max_depth
  places = jnp.arange(len(text))
  is_match = (places < length - 1) & (text == text[length - 1])
  found = jax.lax.top_k(jnp.where(is_match, places, -1), num_drafts)[0]
  source = found[None] + 1 + jnp.arange(draft_length)[:, None]  # [L, K], as nodes are numbered
  is_there = (found >= 0) & (source < length)
  return jnp.where(is_there, text[jnp.minimum(source, len(text) - 1)], -1).reshape(-1).astype(jnp.int32)


def _no_state(*_):
  return ()


def _propose(params, state, context, request):
  del params
  tree, vocab_size = request.tree, context.target.vocab_size
  tokens = jax.vmap(lambda text, length: guess(text, length, tree))(context.tokens, context.lengths)
  probs = jnp.zeros((len(tokens), len(tree.parent_nodes), vocab_size))  # not read: nothing is drawn
  return Proposal(tokens, probs, state, is_given=tokens >= 0)


def lookup_drafter(vocab_size):
  """A drafter without parameters and state that reads the committed text."""
  return Drafter((), _no_state, _propose, _no_state, vocab_size, reads_tokens=True, gives=True)
