"""Descriptions of verification rules, displayed beside the rules' decisions. They have no effect on decisions."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Explanation:
  """A description of how a verifier or a coupling decides, for readers of its decisions.

  The symbols are p for the draft's distribution, q for the target's, and u for a uniform number. Empty strings are not
  displayed.

  Attributes:
    rule: Sentences that say how candidates are judged.
    residual: The distribution of the next token if no candidate is accepted, up to normalization.
    plain: Two sentences without symbols that say what the rule does, displayed before it.
  """

  rule: str = ''
  residual: str = ''
  plain: str = ''


@dataclasses.dataclass(frozen=True)
class SelectionExplanation:
  """A description of how a selection picks, for the verifiers and couplings that are built on it.

  Attributes:
    path: A sentence that says how one candidate per position is picked.
    token: A sentence that says how a position is judged if the picked token is coupled maximally with the target.
    law: The symbol of the picked token's distribution.
    plain_path: A sentence without symbols in place of `path`.
    plain_token: Two sentences without symbols in place of `token`.
  """

  path: str = ''
  token: str = ''
  law: str = ''
  plain_path: str = ''
  plain_token: str = ''
