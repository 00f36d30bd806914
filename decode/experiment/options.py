"""The checked options of `decode.main`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from etils import epath

from common.text_files import Files
from decode.experiment.model_options import (
  AUTO,
  DRAFT_MESHES,
  LOOKUP,
  PRETRAINED,
  ROOT,
  MethodOptions,
  ModelOptions,
  split_draft,
)
from decode.experiment.option_fields import option
from decode.experiment.prompt_options import SHIPPED_PROMPTS, PromptOptions, SamplingOptions
from decode.experiment.prompt_sets import split_set
from spectr_jax.io.load import files_of
from spectr_jax.methods import check_fit, get_method, why_not

__all__ = [
  'AUTO', 'DRAFT_MESHES', 'LOOKUP', 'PRETRAINED', 'ROOT', 'SHIPPED_PROMPTS', 'DecodeOptions', 'fitting', 'option',
  'split_draft',
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOptions(PromptOptions, SamplingOptions, MethodOptions, ModelOptions):
  """Options of a run: four records as one. Every field is a flag of `decode.main`; its help says what it is.

  Raises:
    ValueError: A value is out of range, or two do not go together; the message says what is allowed.
  """

  def __post_init__(self):
    super().__post_init__()
    if self.draft is None and self.needs_draft:
      name = next(name for name in self.method if name == AUTO or get_method(name).max_drafts != 0)
      raise ValueError(f'{name} needs a draft of the target: --draft=DRAFT, or --method=autoregressive')
    # Refused here, before models are read.
    for method in self.methods:
      check_fit(method, drafter=self.guesses)
    for tree in self.tree:
      if not self.takes_tree(tree):
        raise ValueError(f'lookup guesses chains, and the tree is {tree}')

  def _default_methods(self) -> tuple[str, ...]:
    if self.draft is not None:
      return super()._default_methods()
    for name in ('num_drafts', 'draft_length', 'tree'):
      if getattr(self, name) not in (None, ('chains',)):
        raise ValueError(f'{name} is for a draft of the target, and none is given: --draft=DRAFT')
    return ('autoregressive',)

  def check_unused(self, names: Sequence[str], where: str) -> None:
    """Refuses options that a command has no use for, where they are not their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(self)}
    for name in names:
      if getattr(self, name) != defaults[name]:
        raise ValueError(f'{name} is not for {where}')

  def inputs(self) -> dict[str, list[epath.Path]]:
    """Files and folders that a run reads, by option, whether or not they exist; none of models on the hub."""
    inputs = {'target': files_of(self.target)}
    if self.draft_model:
      inputs['draft'] = files_of(self.draft_model)
    if self.prompt is None:
      inputs['prompts'] = [split_set(SHIPPED_PROMPTS if self.prompts is None else self.prompts)[1]]
    if self.lookup_corpus:
      inputs['lookup_corpus'] = list(Files(self.lookup_corpus).paths)
    for name in ('acceptance', 'calibration', 'json_schema'):
      if getattr(self, name) is not None:
        inputs[name] = [epath.Path(getattr(self, name))]
    return inputs


def fitting(draft: str, methods: Sequence[str], trees: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """The methods and the trees that take a draft's guesses, each as in `DecodeOptions`; a `ValueError` if none does."""
  own = ModelOptions(draft=draft)
  taken = tuple(each for each in methods if each == AUTO or not why_not(get_method(each), drafter=own.guesses))
  kept = tuple(tree for tree in trees if own.takes_tree(tree))
  if not kept or all(each != AUTO and get_method(each).max_drafts == 0 for each in taken):
    raise ValueError(f'{draft} takes none of these methods on none of these trees: {", ".join((*methods, *trees))}')
  return taken, kept
