"""The grid of settings: each method with its trees."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from common.command_line import parse_name_and_ints
from decode.experiment.model_options import GROWTHS, MethodOptions
from decode.experiment.options import DecodeOptions
from spectr_jax import TokenTree
from spectr_jax.auto import Setting
from spectr_jax.methods import Method, check_fit
from spectr_jax.suggestion import did_you_mean

MAX_NODES = 1024
_FORMS = (
  'chains, prefix:FACTORS (such as prefix:4,2,2,1), specinfer, optimal:BUDGET, likeliest:WIDTHS, confident:WIDTHS or'
  ' estimated:WIDTHS (such as estimated:4,4,4,4)'
)


@dataclasses.dataclass(frozen=True)
class TreeSpec:
  """A tree as given on the command line.

  `chains` is every pair of K drafts and L tokens; `prefix:4,2,2,1` has four nodes at depth 1, two below each of them,
  and so on; `specinfer` is three chains of L tokens that share their first two; `optimal:BUDGET` is a method's best
  tree of at most that many nodes, by measured acceptance or, for `race_traversal`, by a bound on the tokens kept;
  `likeliest:4,4,3,2` grows a tree of its own for every row, with the draft's likeliest paths in 4, 4, 3 and 2 nodes of
  the first depths; `confident:4,4,3,2` draws so many samples, where the draft is confident, and `estimated:4,4,3,2`
  where a confidence head says so.
  """

  name: str
  numbers: tuple[int, ...] = ()

  @classmethod
  def parse(cls, text: str) -> TreeSpec:
    """Reads a specification; a `ValueError` says what is allowed."""
    try:
      spec = cls(*parse_name_and_ints(text))
    except ValueError:
      raise ValueError(f'tree must be {_FORMS}, got {text!r}') from None
    counts = {'chains': (0, 0), 'prefix': (1, MAX_NODES), 'specinfer': (0, 0), 'optimal': (1, 1)}
    counts |= dict.fromkeys(GROWTHS, (1, MAX_NODES))
    if spec.name not in counts or not counts[spec.name][0] <= len(spec.numbers) <= counts[spec.name][1]:
      raise ValueError(f'tree must be {_FORMS}, got {text!r}{did_you_mean(spec.name, counts.keys() - {spec.name})}')
    if any(number < 1 for number in spec.numbers):
      raise ValueError(f'tree: the numbers of {text!r} must be at least 1')
    return spec

  def __str__(self):
    return self.name + (':' + ','.join(map(str, self.numbers)) if self.numbers else '')


def shape_name(factors: Sequence[int]) -> str:
  """The name of a prefix tree with so many children by depth: `4 x 16` of chains, `prefix:2,2,1` of others."""
  is_chains = set(factors[1:]) <= {1}
  return f'{factors[0]} x {len(factors)}' if is_chains else str(TreeSpec('prefix', tuple(factors)))


def parse_shape(text: str) -> tuple[int, ...]:
  """The numbers of children by depth of a tree that `shape_name` names; a `ValueError` for another text."""
  if chains := re.fullmatch(r'([1-9]\d*) x ([1-9]\d*)', text):
    return (int(chains[1]),) + (1,) * (int(chains[2]) - 1)
  if not re.fullmatch(r'prefix:[1-9]\d*(,[1-9]\d*)*', text):
    raise ValueError(f'a shape is written as "4 x 16" or "prefix:2,2,1", got {text!r}')
  return TreeSpec.parse(text).numbers


def _num_prefix_nodes(factors: tuple[int, ...]) -> int:
  return sum(math.prod(factors[: depth + 1]) for depth in range(len(factors)))


def _on_tree(method: Method, spec: TreeSpec, options: MethodOptions) -> Iterator[Setting]:
  if spec.name == 'chains':
    most = math.inf if method.max_drafts is None else method.max_drafts
    for length in options.draft_length:
      for num_drafts in (min(number, most) for number in options.num_drafts):
        _check_size(num_drafts * length, f'num_drafts times draft_length, {num_drafts} times {length},')
        yield Setting.of_chains(method, num_drafts, length)
  elif spec.name == 'prefix':
    _check_size(_num_prefix_nodes(spec.numbers), f'the nodes of {spec}')
    tree = TokenTree.prefix(spec.numbers)
    yield Setting(method, 0, tree.max_depth, tree, label=str(spec))
  elif spec.name == 'specinfer':
    for length in options.draft_length:
      yield Setting(method, 0, length, TokenTree.specinfer(length), label=str(spec))
  elif spec.name in GROWTHS:
    _check_size(sum(spec.numbers), f'the nodes of {spec}')
    tree = TokenTree.slots(spec.numbers)
    growth = GROWTHS[spec.name](threshold=options.growth_threshold)
    yield Setting(method, 0, tree.max_depth, tree, growth, str(spec))
  else:
    _check_size(spec.numbers[0], f'the nodes of {spec}')
    yield Setting(method, label=str(spec), budget=spec.numbers[0])


def _check_size(num_nodes: int, what: str) -> None:
  if num_nodes > MAX_NODES:
    raise ValueError(f'{what} must be at most {MAX_NODES}, got {num_nodes}')


def settings_of(method: Method, options: MethodOptions) -> list[Setting]:
  """The settings of a method, one for every tree of the options, whether or not it can use them."""
  if method.max_drafts == 0:
    return [Setting(method)]
  return [setting for text in options.tree for setting in _on_tree(method, TreeSpec.parse(text), options)]


def expand(options: DecodeOptions) -> list[Setting]:
  """The grid in the order given, without duplicates, which arise if a method ignores K or L.

  The trees of `optimal` are still empty, since they depend on measurements. ValueError where a method cannot decode on
  a tree.
  """
  methods = options.methods
  settings = list(dict.fromkeys(each for method in methods.make() for each in settings_of(method, methods)))
  for setting in settings:
    if setting.budget is None:
      check_fit(setting.method, setting.tree, setting.guesses(options.models.guesses))
    elif setting.method.needs_chains:
      raise ValueError(f'{setting.method.name} is defined for chains only, not for {setting.label}')
  return settings


def only_setting(options: DecodeOptions) -> Setting:
  """The only setting of the options, for commands that run no grid and measure nothing first."""
  if options.methods.is_auto:
    raise ValueError('auto is not for this command; name a method')
  settings = expand(options)
  if len(settings) != 1:
    raise ValueError(f'one method, K, L and tree at a time, got {len(settings)}: {", ".join(map(str, settings))}')
  if settings[0].budget is not None:
    raise ValueError('optimal trees are chosen by decode.main; name the shape that it printed, such as prefix:4,2,1')
  return settings[0]


def describe_setting(options: DecodeOptions, setting: Setting) -> dict[str, Any]:
  """The setting as JSON values."""
  return {
    'method': setting.method.name,
    'is_lossless': setting.method.is_lossless,
    'num_drafts': setting.num_drafts,
    'draft_length': setting.draft_length,
    'tree': setting.tree_name,
    'children': setting.method.proposal_rule.name,
    'epsilon': options.methods.epsilon,
    'temperature': options.sampling.temperature,
  }
