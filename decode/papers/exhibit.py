"""Exhibits of the papers: what a table or figure is measured on, and what each can say, write and draw."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from decode.experiment import metrics
from decode.experiment.options import DecodeOptions, option, split_draft
from decode.experiment.prompts import without_long
from decode.experiment.settings import Setting
from decode.experiment.workload import find_head
from spectr_jax.auto.trial import Notify
from spectr_jax.io.load import open_model
from spectr_jax.io.tokenizer import check_same_tokens


@dataclasses.dataclass(frozen=True)
class Value:
  """A measured or published number, with the half width behind its ±, or an interval whose ends are not equally far."""

  number: float
  spread: float | None = None
  interval: tuple[float, float] | None = None

  def __str__(self):
    digits = 2 if abs(self.number) >= 1 or not self.number else 1 - math.floor(math.log10(abs(self.number)))
    if self.spread is not None:
      return f'{self.number:.{digits}f} ± {self.spread:.{digits}f}'
    return metrics.text_of(self.number, self.interval, digits)


# Cells by column. Tables hold `Value`s; figures hold plain numbers, with intervals in columns `low` and `high`.
Row = dict[str, int | float | str | Value | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Amounts to measure, each a flag of `decode.reproduce`; a size that an exhibit does not use is 0 or empty."""

  num_prompts: int = option('Options', 'Prompts of each set, at most.', 0)
  num_seeds: int = option('Options', 'Runs of every setting.', 0)
  max_new_tokens: int = option('Options', 'New tokens per prompt, at most.', 0)
  batch_size: int = option('Options', 'Prompts decoded together, at most.', 0)
  num_runs: int = option('Options', 'Repetitions of a timed call, or texts of a simulation.', 0)
  context: int = option('Options', 'Room of the caches of a timed call, tokens.', 0)
  num_drafts: tuple[int, ...] = option('Options', 'K, several separated by commas.', ())
  draft_length: tuple[int, ...] = option('Options', 'L, several separated by commas.', ())
  num_nodes: tuple[int, ...] = option('Options', 'Tokens drafted in a call, several separated by commas.', ())
  epsilon: tuple[float, ...] = option('Options', 'Over-acceptance, several separated by commas.', ())

  @property
  def used(self) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(self).items() if value}


# The sizes that are also options of decoding.
_DECODE_SIZES = 'num_prompts', 'num_seeds', 'max_new_tokens', 'batch_size', 'num_drafts', 'draft_length'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """Models, prompts and sizes that an exhibit is measured on."""

  target: str
  drafts: Mapping[str, str]  # by name, each as `DecodeOptions.draft`
  prompts: Mapping[str, str | None]  # files by name; None for the shipped ones
  sizes: Sizes
  dtype: str = ''
  seed: int = 0  # the first
  # further ones of decoding, those of `Exhibit.options`
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def draft(self) -> str:
    """The first draft; the only one, unless the exhibit compares several."""
    return next(iter(self.drafts.values()))

  def decode_options(self, **options) -> DecodeOptions:
    """Options of decoding with these models, prompts and sizes; keyword arguments override those of the request."""
    own = {
      'target': self.target,
      'draft': self.draft,
      'dtype': self.dtype,
      'prompts': next(iter(self.prompts.values()), None),
      'skip_long': True,
      'seed': self.seed,
    }
    sizes = {name: value for name, value in self.sizes.used.items() if name in _DECODE_SIZES}
    return DecodeOptions(**(own | sizes | dict(self.options) | options))


@dataclasses.dataclass
class Results:
  """The outcome of measuring an exhibit."""

  rows: list[Row] = dataclasses.field(default_factory=list)  # of the same columns
  runs: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # flags, versions, device and models of each run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exhibit:
  """A table or figure of a paper: `Table` or `Figure`, which say how rows are described, shown, written and drawn.

  Rows are all that is kept: pictures can be drawn again from the file of data.
  """

  kind: ClassVar[str]  # in messages
  data_format: ClassVar[str]  # extension of the file of data

  title: str  # its subject, and the paper and number
  measure: Callable[[Request, Notify], Results]  # call `run`, which checks the request first
  sizes: Sizes = Sizes()  # by default; they take minutes with the pretrained pair on two cores
  has_models: bool = True  # is about a pair of models
  compares_drafts: bool = False
  is_simulated: bool = False  # simulates texts, which a seed decides
  # of decoding that a request may change, with their defaults
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def has_prompts(self) -> bool:
    return bool(self.sizes.num_prompts)

  @property
  def is_random(self) -> bool:
    return self.has_prompts or self.is_simulated

  def choose_sizes(self, given: Mapping[str, Any]) -> Sizes:
    """The default sizes with the given ones in their place; None keeps the default."""
    given = {name: value for name, value in given.items() if value is not None}
    used = self.sizes.used
    for name in given:
      if name not in used:
        sizes = f'whose sizes are {", ".join(used)}' if used else 'which has none'
        raise ValueError(f'{name} is not for this {self.kind}, {sizes}')
    return dataclasses.replace(self.sizes, **given)

  def choose_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
    """The default options with the given ones in their place."""
    for name in given:
      if name not in self.options:
        raise ValueError(f'{name} is not for this {self.kind}, which has its own')
    return {**self.options, **given}

  def run(self, request: Request, notify: Notify) -> Results:
    """Measures the rows, after every check that needs no measuring."""
    if self.has_models:
      if len(request.drafts) > 1 and not self.compares_drafts:
        raise ValueError(f'this {self.kind} has one draft, got {", ".join(request.drafts)}')
      _check_inputs(request)
    return self.measure(request, notify)

  def files(self, name: str, request: Request, results: Results, about: Sequence[str]) -> dict[str, str | bytes]:
    """Contents of the files to write, by file name: data, Markdown, and the picture twice; `about` is of `describe`."""
    return {
      f'{name}.{self.data_format}': self.to_data(name, request, results, about),
      f'{name}.md': self.to_markdown(name, results.rows, about),
      f'{name}.png': self.to_image(results.rows, about),
      f'{name}.svg': self.to_image(results.rows, about, kind='svg'),
    }


def _check_inputs(request: Request) -> None:
  """Reads what is quickly read of all models and prompts, so that nothing is measured in vain."""
  limits, tokenizers = [], []
  drafts = (split_draft(draft)[1] for draft in request.drafts.values())
  # A head has the limit and the tokenizer of its target, and so has a draft without a model.
  models = (path for path in drafts if path and find_head(request.target, path) is None)
  for path in (request.target, *models):
    files = open_model(path)
    limits.append(files.context_length)
    tokenizers.append((path, files.tokenizer()))
  check_same_tokens(tokenizers)
  tokenizer = tokenizers[0][1]
  for path in request.prompts.values():
    prompts = DecodeOptions(prompts=path, chat=request.options.get('chat', False)).read_prompts()
    without_long(prompts, tokenizer, max_new_tokens=request.sizes.max_new_tokens, max_length=min(limits))


def method_label(setting: Setting) -> str:
  """The method's name, marked where it is not lossless."""
  method = setting.method
  return method.name if method.is_lossless_on(setting.tree) else f'{method.name} (not lossless)'


def describe_sizes(used: Mapping[str, Any]) -> list[str]:
  """Each size as `name value`, several values separated by commas."""
  texts = {
    name: ','.join(f'{number:g}' for number in value) if isinstance(value, tuple) else str(value)
    for name, value in used.items()
  }
  return [f'{name} {text}' for name, text in texts.items()]
