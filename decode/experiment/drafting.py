"""Defaults of drafting for the commands that answer users: by the device and the kind of draft."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
from absl import flags

from common import help_text
from decode.experiment.model_options import SHIPPED_TARGET, choose_draft, split_draft
from decode.experiment.workload import find_head
from spectr_jax import METHODS
from spectr_jax.engine import Budget


@dataclasses.dataclass(frozen=True)
class Drafting:
  """A method on K chains of L tokens."""

  method: str
  num_drafts: int
  draft_length: int


# On a CPU every guess makes the target's call dearer: single short drafts gain where trees of many guesses lose.
ON_CPU = {
  'a model': Drafting('block', 1, 4),
  'a head': Drafting('block', 1, 2),
  'lookup': Drafting('speculative', 1, 3),
  'lookup+DRAFT': Drafting('race_traversal', 1, 2),
}
ELSEWHERE = Drafting('race_traversal', 2, 8)


def kind_of(target: str, draft: str) -> str:
  """The kind of a draft, one of `ON_CPU`."""
  has_lookup, path = split_draft(draft)
  if has_lookup:
    return 'lookup+DRAFT' if path else 'lookup'
  return 'a head' if find_head(target, path) else 'a model'


def default_drafting(target: str, draft: str, platform: str | None = None) -> Drafting:
  """The default use of a draft on a platform, as JAX names it; None for JAX's default."""
  on_cpu = (platform or jax.default_backend()) == 'cpu'
  return ON_CPU[kind_of(target, draft)] if on_cpu else ELSEWHERE


def with_default_drafting(values: Mapping[str, Any], platform: str | None = None) -> dict[str, Any]:
  """Fields of `DecodeOptions` with the defaults of those of `Drafting` that are missing; as they are without a draft.

  A method that takes several drafts stands in for the table's where K or the tree is given.
  """
  target = values.get('target', SHIPPED_TARGET)
  draft = choose_draft(target, values.get('draft'))
  if draft is None:
    return dict(values)
  default = default_drafting(target, draft, platform)
  if 'num_drafts' in values or values.get('tree', ('chains',)) != ('chains',):
    default = dataclasses.replace(default, method=ELSEWHERE.method)
  defaults = {'method': (default.method,), 'num_drafts': (default.num_drafts,), 'draft_length': (default.draft_length,)}
  return defaults | values


def define_row_flags(budget: str) -> tuple[flags.FlagHolder, flags.FlagHolder]:
  """Defines flags of rows that take new prompts: `--budget`, which `budget_of` reads, and `--prefix_cache_bytes`."""
  text = 'Guesses of all rows of a call together: auto for the fastest, a number for the most, off for the tree'
  kept = 'Bytes of texts that are kept, so that prompts that begin like them read the rest; with 0 prompts are read'
  cache = flags.DEFINE_integer('prefix_cache_bytes', 2**30, f'{kept} whole.', lower_bound=0)
  return flags.DEFINE_string('budget', budget, f'{text} in every round.'), cache


def budget_of(value: str, *, is_resized: bool = False) -> Budget | None:
  """The budget that `--budget` names; ValueError for another word."""
  if value == 'off':
    return None
  if value != 'auto' and not re.fullmatch(r'[0-9]{1,9}', value):
    raise ValueError(f'budget must be auto, off or a number of guesses from 0 on, got {value}')
  return Budget('auto' if value == 'auto' else int(value), is_resized=is_resized)


def _in_words(name: str) -> str:
  """The defaults of a field, by device and kind of draft."""
  kinds: dict[Any, list[str]] = {}
  for kind, drafting in ON_CPU.items():
    kinds.setdefault(getattr(drafting, name), []).append(kind)
  on_cpu = ', '.join(f'{value} with {" or ".join(members)}' for value, members in kinds.items())
  return f'on CPUs {on_cpu if len(kinds) > 1 else next(iter(kinds))}, elsewhere {getattr(ELSEWHERE, name)}'


def describe_in_help(*, takes_auto: bool = False) -> None:
  """Lets `--help` say which defaults the flags of `Drafting` get."""
  auto = ', or auto, the fastest of some that it times' if takes_auto else ''
  texts = {
    'method': f'The method, of {", ".join(METHODS)}{auto} [autoregressive without --draft, else ',
    'num_drafts': 'K, drafts per round [',
    'draft_length': 'L, tokens per draft [',
  }
  help_text.take_one(method='NAME', num_drafts='N', draft_length='N')
  for name, text in texts.items():
    flags.FLAGS[name].help = f'{text}{_in_words(name)}]'
