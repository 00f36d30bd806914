"""The options of decoding: four records, and what holds across them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from common.text_files import Files
from decode.experiment.model_options import AUTO, AUTO_GRID, SHIPPED_TARGET, MethodOptions, ModelOptions, choose_draft
from decode.experiment.prompt_options import SHIPPED_PROMPTS, PromptOptions, SamplingOptions
from decode.experiment.prompt_sets import split_set
from spectr_jax.io.model_files import files_of
from spectr_jax.methods import check_fit, get_method, why_not

RECORDS = ModelOptions, MethodOptions, SamplingOptions, PromptOptions
FIELDS = {field.name: field for record in RECORDS for field in dataclasses.fields(record)}


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
  """Options of a run, in four records. Every field of them is a flag of `decode.main`; its help says what it is.

  Raises:
    ValueError: A value is out of range, or two do not go together; the message says what is allowed.
  """

  models: ModelOptions
  methods: MethodOptions
  sampling: SamplingOptions
  prompts: PromptOptions

  @classmethod
  def of(cls, **fields: Any) -> DecodeOptions:
    """The options with these fields of the records; one that is left out, or None, has its default."""
    values = _with_defaults(fields)
    parts = [{field.name for field in dataclasses.fields(record)} & values.keys() for record in RECORDS]
    if unknown := values.keys() - FIELDS.keys():
      raise TypeError(f'there is no option {", ".join(sorted(unknown))}')
    return cls(*(record(**{name: values[name] for name in part}) for record, part in zip(RECORDS, parts)))

  def replace(self, **changes: Any) -> DecodeOptions:
    """The same options but for some fields."""
    return self.of(**self.flags | changes)

  def __post_init__(self):
    """Checks across records, before models are read."""
    models, methods = self.models, self.methods
    if models.draft is None and methods.needs_draft:
      name = next(name for name in methods.method if name == AUTO or get_method(name).max_drafts != 0)
      raise ValueError(f'{name} needs a draft of the target: --draft=DRAFT, or --method=autoregressive')
    for method in methods.make():
      check_fit(method, drafter=models.guesses)
    for tree in methods.tree:
      if not models.takes_tree(tree):
        raise ValueError(f'lookup guesses chains, and the tree is {tree}')

  @property
  def flags(self) -> dict[str, Any]:
    """The fields of all records by name."""
    return {name: value for record in dataclasses.asdict(self).values() for name, value in record.items()}

  def check_unused(self, names: Sequence[str], where: str) -> None:
    """Refuses options that a command has no use for, where they are not their defaults."""
    flags = self.flags
    for name in names:
      if flags[name] != FIELDS[name].default:
        raise ValueError(f'{name} is not for {where}')

  def inputs(self) -> dict[str, list[epath.Path]]:
    """Files and folders that a run reads, by option, whether or not they exist; none of models on the hub."""
    models, prompts = self.models, self.prompts
    inputs = {'target': files_of(models.target)}
    if models.draft_model:
      inputs['draft'] = files_of(models.draft_model)
    if prompts.prompt is None:
      inputs['prompts'] = [split_set(SHIPPED_PROMPTS if prompts.prompts is None else prompts.prompts)[1]]
    if models.lookup_corpus:
      inputs['lookup_corpus'] = list(Files(models.lookup_corpus).paths)
    files = {name: self.flags[name] for name in ('acceptance', 'calibration', 'json_schema')}
    return inputs | {name: [epath.Path(path)] for name, path in files.items() if path is not None}


def _with_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Fields of the records that are given, and those whose defaults depend on others: the draft, methods, K and L."""
  given = {name: value for name, value in fields.items() if value is not None}
  draft = choose_draft(given.get('target', SHIPPED_TARGET), given.get('draft'))
  if draft is None and 'method' not in given:
    for name in ('num_drafts', 'draft_length', 'tree'):
      if given.get(name, ('chains',)) != ('chains',):
        raise ValueError(f'{name} is for a draft of the target, and none is given: --draft=DRAFT')
    given['method'] = ('autoregressive',)
  return {'draft': draft} | (AUTO_GRID if AUTO in given.get('method', ()) else {}) | given


def fitting(draft: str, methods: Sequence[str], trees: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """The methods and the trees that take a draft's guesses, each as in `DecodeOptions`; a `ValueError` if none does."""
  own = ModelOptions(draft=draft)
  taken = tuple(each for each in methods if each == AUTO or not why_not(get_method(each), drafter=own.guesses))
  kept = tuple(tree for tree in trees if own.takes_tree(tree))
  if not kept or all(each != AUTO and get_method(each).max_drafts == 0 for each in taken):
    raise ValueError(f'{draft} takes none of these methods on none of these trees: {", ".join((*methods, *trees))}')
  return taken, kept
