"""The registry: a method is a proposal rule, a verifier and what is known about the two."""

from __future__ import annotations

import dataclasses

from spectr_jax.couplings import KSeq, Maximal
from spectr_jax.proposal import Independent, ProposalRule
from spectr_jax.tree import TokenTree
from spectr_jax.verify import Verifier, Walk


@dataclasses.dataclass(frozen=True)
class Method:
  """A way of decoding; frozen and hashable, so that it can be a static argument.

  Attributes:
    name: Its name in `METHODS`.
    verifier: Decides which guesses are kept.
    proposal_rule: How the children of a node are drawn.
    is_lossless: Whether what comes out has exactly the target's law.
    source: Paper and algorithm.
    max_drafts: The most candidates a position may have, or None for any number; 0 drafts nothing.
  """

  name: str
  verifier: Verifier
  proposal_rule: ProposalRule
  is_lossless: bool
  source: str
  max_drafts: int | None = None

  def tree_for(self, tree: TokenTree | None) -> TokenTree:
    """The tree the method works on: `tree`, or an empty one for a method that drafts nothing, whatever it is given.

    Raises:
      ValueError: The method's theory does not cover `tree`.
    """
    if self.max_drafts == 0:
      return TokenTree()
    if tree is None or not tree.num_nodes:
      raise ValueError(f'{self.name} needs guesses: give it a tree, such as TokenTree.chains(1, 4)')
    if self.max_drafts == 1 and not tree.is_chain:
      raise ValueError(f'{self.name} verifies a single draft: num_drafts must be 1')
    return tree


_METHODS = (
  Method(
    name='autoregressive',
    verifier=Walk(Maximal()),
    proposal_rule=Independent(),
    is_lossless=True,
    source='ancestral sampling from the target',
    max_drafts=0,
  ),
  Method(
    name='speculative',
    verifier=Walk(Maximal()),
    proposal_rule=Independent(),
    is_lossless=True,
    source='Leviathan et al. 2023; Chen et al. 2023; SpecTr (Sun et al. 2023), Algorithm 1',
    max_drafts=1,
  ),
  Method(
    name='spectr',
    verifier=Walk(KSeq()),
    proposal_rule=Independent(),
    is_lossless=True,
    source='SpecTr (Sun et al. 2023), Algorithms 2 and 3',
  ),
)

METHODS: dict[str, Method] = {method.name: method for method in _METHODS}


def get_method(method: str | Method) -> Method:
  """A method by name; a `Method` passes through.

  Raises:
    ValueError: No method has that name.
  """
  if isinstance(method, Method):
    return method
  if method not in METHODS:
    raise ValueError(f'unknown method {method!r}; allowed: {", ".join(METHODS)}')
  return METHODS[method]
