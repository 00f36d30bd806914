"""Words for a rule of verification: shown beside its decisions, without effect on them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Explanation:
  """How a verifier or a coupling decides, in words and symbols for a reader of its decisions.

  The symbols are p for the draft's distribution, q for the target's, and u for a uniform number. Empty strings say
  nothing.

  Attributes:
    rule: How candidates are judged, in sentences.
    residual: The distribution of the next token where no candidate is accepted, up to its norm.
  """

  rule: str = ''
  residual: str = ''


@dataclasses.dataclass(frozen=True)
class SelectionExplanation:
  """How a selection picks, in words for the verifiers and couplings that are built on it.

  Attributes:
    path: How one candidate of each position is picked; a sentence.
    token: How one position is judged if what is picked there is coupled maximally with the target; a sentence.
    law: The symbol of the picked token's distribution.
  """

  path: str = ''
  token: str = ''
  law: str = ''
