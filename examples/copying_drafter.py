"""An example of a drafter whose guesses are given, not drawn: it copies what followed a token earlier in the text.

`python -m examples.copying_drafter` decodes with it, and proves its guesses with two methods.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from spectr_jax import METHODS, Drafter, TokenTree, generate
from spectr_jax.models import table
from spectr_jax.proposal import Proposal
from spectr_jax.testing import enumeration_error, random_tables


def copied(text, length, num_guesses):
  """What followed the latest earlier place of a row's last token, int32 `[num_guesses]`; -1 where nothing did."""
  places = jnp.arange(len(text))
  found = jnp.max(jnp.where((places < length - 1) & (text == text[length - 1]), places, -1))
  source = found + 1 + jnp.arange(num_guesses)
  is_there = (found >= 0) & (source < length)
  return jnp.where(is_there, text[jnp.minimum(source, len(text) - 1)], -1).astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CopyingDrafter(Drafter):
  """A drafter for chains, with the text as its only source."""

  vocab_size: int = dataclasses.field(metadata={'static': True})
  reads_tokens = True
  has_given_candidates = True

  def propose(self, state, context, request):
    """A chain of copied tokens for every row."""
    tree = request.tree
    guess = functools.partial(copied, num_guesses=tree.num_nodes)
    tokens = jax.vmap(guess)(context.tokens, context.lengths)
    probs = jnp.zeros((len(tokens), len(tree.parent_nodes), self.vocab_size))
    return Proposal(tokens, probs, state, is_given=tokens >= 0)


def main():
  """Decodes with a target that repeats itself, and compares exact distributions."""
  target = table.table_model(6.0 * jnp.roll(jnp.eye(8), 1, axis=1))  # after x mostly x + 1
  copies = generate(
    jax.random.key(0), target, CopyingDrafter(8), [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1]], method='speculative',
    tree=TokenTree.chains(1, 4), max_new_tokens=32,
  )  # fmt: skip
  print('tokens per target call:', float(copies.lengths[0] / copies.num_target_calls[0]))
  guess_fn = functools.partial(copied, num_guesses=2)
  tables = random_tables(seed=0, vocab_size=2, max_length=5)
  for name in ('speculative', 'race_traversal'):
    error = enumeration_error(METHODS[name], TokenTree.chains(1, 2), tables, 4, guess_fn=guess_fn)
    print(f'{name}: error of the joint distribution {error:.0e}')


if __name__ == '__main__':
  main()
