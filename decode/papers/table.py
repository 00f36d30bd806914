"""What a measured table is: what it asks for, its rows, and how they are drawn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from decode.experiment.options import DecodeOptions
from decode.experiment.prompts import without_long
from decode.experiment.workload import Notify
from spectr_jax import Tokenizer
from spectr_jax.io.model_files import read_config


@dataclasses.dataclass(frozen=True)
class Value:
  """A measured or published number.

  Attributes:
    number: The number.
    spread: What stands behind its ±, or None.
    interval: Low and high end, where they are not equally far away; instead of a spread.
  """

  number: float
  spread: float | None = None
  interval: tuple[float, float] | None = None

  def __str__(self):
    digits = 2 if abs(self.number) >= 1 or not self.number else 1 - math.floor(math.log10(abs(self.number)))
    text = f'{self.number:.{digits}f}'
    if self.spread is not None:
      return f'{text} ± {self.spread:.{digits}f}'
    return text if self.interval is None else f'{text} ({self.interval[0]:.{digits}f} to {self.interval[1]:.{digits}f})'


Row = dict[str, int | float | str | Value | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """How much is measured; what a table does not use is 0 or empty.

  Attributes:
    num_prompts: Of each set, from its beginning, at most.
    num_seeds: Runs of every setting.
    max_new_tokens: Tokens of each continuation, at most.
    batch_size: Prompts decoded together.
    num_runs: Repetitions of a timed call, or texts of a simulation.
    context: Tokens that the caches of a timed call have room for.
    num_drafts: K, several.
    draft_length: L, several.
    num_nodes: N, tokens drafted in a call, several.
    epsilon: Over-acceptance, several.
  """

  num_prompts: int = 0
  num_seeds: int = 0
  max_new_tokens: int = 0
  batch_size: int = 0
  num_runs: int = 0
  context: int = 0
  num_drafts: tuple[int, ...] = ()
  draft_length: tuple[int, ...] = ()
  num_nodes: tuple[int, ...] = ()
  epsilon: tuple[float, ...] = ()

  @property
  def used(self) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(self).items() if value}

  def choose(self, given: Mapping[str, Any], what: str) -> Sizes:
    """These sizes, those that are given (not None) in their place.

    Args:
      given: Sizes by name.
      what: What they are the sizes of.

    Raises:
      ValueError: One is given that is not used.
    """
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
      if name not in self.used:
        sizes = ', '.join(self.used)
        raise ValueError(
          f'{name} is not for this {what}, ' + (f'whose sizes are {sizes}' if sizes else 'which has none')
        )
    return dataclasses.replace(self, **given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """What to measure a table on.

  Attributes:
    target: Directory of the target.
    drafts: Directories of drafts by name.
    prompts: Files of prompts by name; None for the shipped ones. Empty for tables that decode none.
    sizes: How much.
    dtype: As in `DecodeOptions`.
    seed: The first seed.
  """

  target: str
  drafts: Mapping[str, str]
  prompts: Mapping[str, str | None]
  sizes: Sizes
  dtype: str = ''
  seed: int = 0

  @property
  def draft(self) -> str:
    """The only draft.

    Raises:
      ValueError: There are several.
    """
    if len(self.drafts) > 1:
      raise ValueError(f'this table has one draft, got {", ".join(self.drafts)}')
    return next(iter(self.drafts.values()))


@dataclasses.dataclass
class Found:
  """What measuring gives.

  Attributes:
    rows: The table.
    info: Description of each run: flags, versions, device, models.
  """

  rows: list[Row] = dataclasses.field(default_factory=list)
  info: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
  """A part of the figure.

  Attributes:
    x: Column of the horizontal axis.
    y: Columns that are drawn; several are stacked, if `kind` is `stack`.
    by: Columns that tell lines or bars apart; `method` by colour, the others by what is left.
    paper: Column of what is published, or None.
    where: Values that a row must have.
    kind: `line`, `bar` or `stack`.
  """

  x: str
  y: tuple[str, ...]
  by: tuple[str, ...] = ()
  paper: str | None = None
  where: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  kind: str = 'line'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
  """A table or figure of a paper.

  Attributes:
    title: Paper and number.
    setup: What the paper measured it on.
    spreads: What stands behind ±, here and in the paper.
    sizes: What is measured by default: minutes with the pretrained pair on two cores.
    full: Sizes of the paper, as far as it gives them or its tables imply them.
    measure: Measures it; call `run`.
    panels: Its figure.
    notes: What else a reader must know.
  """

  title: str
  setup: str
  spreads: str
  sizes: Sizes
  full: Mapping[str, int]
  measure: Callable[[Request, Notify], Found]
  panels: tuple[Panel, ...]
  notes: tuple[str, ...] = ()

  @property
  def has_prompts(self) -> bool:
    return bool(self.sizes.num_prompts)

  def run(self, request: Request, notify: Notify) -> Found:
    """Measures the table, after checking whatever can be checked before.

    Raises:
      ValueError: A model or a set of prompts is no good.
    """
    check(request)
    return self.measure(request, notify)


def check(request: Request) -> None:
  """Reads what is quickly read of all models and prompts, so that nothing is measured in vain.

  Raises:
    ValueError: Something is missing, does not belong together, or holds no prompt that fits.
  """
  limits, fingerprints = [], {}
  for path in (request.target, *request.drafts.values()):
    limits.append(read_config(path).max_length)
    tokenizer = Tokenizer.load(epath.Path(path) / 'tokenizer.json')
    fingerprints[path] = tokenizer.fingerprint
  if len(set(fingerprints.values())) > 1:
    each = ', '.join(f'{fingerprint} in {path}' for path, fingerprint in fingerprints.items())
    raise ValueError(f'target and drafts must share a tokenizer, but their fingerprints differ: {each}')
  for path in request.prompts.values():
    prompts = DecodeOptions(prompts=path).read_prompts()
    without_long(prompts, tokenizer, max_new_tokens=request.sizes.max_new_tokens, max_length=min(limits))
