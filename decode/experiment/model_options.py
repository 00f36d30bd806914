"""Options of what decodes: the records of models, and of methods with their trees, which check their own fields."""

from __future__ import annotations

import dataclasses
import os

import jax
from etils import epath

from common.command_line import parse_sizes
from decode.experiment.option_fields import AT_LEAST_0, AT_LEAST_1, check_fields, one_of, option
from spectr_jax import METHODS, DecodeSharding
from spectr_jax.auto.setting import DRAFT_LENGTHS, NUM_DRAFTS
from spectr_jax.draft import Confident, Estimated, Likeliest
from spectr_jax.draft.lookup import LOOKUP_MAX, LOOKUP_MIN, Lookup
from spectr_jax.kernels.int8 import BLOCKS, INT8
from spectr_jax.methods import Guesses, Method, get_method, with_children, with_epsilon, with_gumbel
from spectr_jax.sharding import DATA, make_mesh
from spectr_jax.suggestion import did_you_mean

ROOT = epath.Path(__file__).resolve().parents[2]
PRETRAINED = ROOT / 'pretrained'
SHIPPED_TARGET, SHIPPED_DRAFT = str(PRETRAINED / 'target'), str(PRETRAINED / 'draft')
AUTO = 'auto'
LOOKUP = 'lookup'
DEFAULT_METHODS = 'autoregressive', 'speculative', 'block', 'spectr', 'race_traversal'
# Default K and L for `auto`.
AUTO_GRID = {'num_drafts': NUM_DRAFTS, 'draft_length': DRAFT_LENGTHS}
DRAFT_MESHES = 'whole', 'divided'
# Rules of trees that every row grows for itself, by name.
GROWTHS = {'likeliest': Likeliest, 'confident': Confident, 'estimated': Estimated}


def split_draft(draft: str) -> tuple[bool, str]:
  """True if a draft as `--draft` names it guesses from the text, and its model or head; empty for `lookup` alone."""
  has_lookup = draft == LOOKUP or draft.startswith(f'{LOOKUP}+')
  return has_lookup, draft.removeprefix(LOOKUP).removeprefix('+') if has_lookup else draft


def choose_draft(target: str, draft: str | None) -> str | None:
  """The draft of a target: the one that is named, else the shipped one of the shipped target, else None."""
  is_shipped = draft is None and os.path.realpath(target) == os.path.realpath(SHIPPED_TARGET)
  return SHIPPED_DRAFT if is_shipped else draft


def has_epsilon(name: str) -> bool:
  """Tells whether the method over-accepts by an amount that can be chosen."""
  method = get_method(name)
  return with_epsilon(method, 0.5) != with_epsilon(method, 0.25)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
  """The target, its draft, and the devices that they are on. See `DecodeSharding` about `mesh`."""

  target: str = option('Models', 'The target: a directory, a .gguf file, or ORG/NAME on the hub.', SHIPPED_TARGET)
  draft: str | None = option(
    'Models',
    'The draft: as the target, of any tokenizer, or the folder of a head on it (EAGLE, DFlash, DSpark, Medusa, MTP), or'
    ' lookup, or lookup+DRAFT. lookup guesses what followed in the text before, without a model; lookup+DRAFT does so'
    ' beside the samples of a draft. Default: that of the shipped target; others decode without one.',
    None,
  )
  lookup_max: int = option(
    'Models', 'Tokens at the end of the text that lookup compares with earlier ones, at most.', LOOKUP_MAX
  )
  lookup_min: int = option('Models', 'Tokens that must agree for lookup to guess, at least.', LOOKUP_MIN)
  lookup_corpus: tuple[str, ...] = option(
    'Models',
    'Text files that lookup searches besides the text, separated by commas: paths or globs of .txt, .gz or .bz2 files.'
    ' A blank line ends a document.',
    (),
  )
  dtype: str = option(
    'Models',
    "Type to compute in, float32 or bfloat16; '' for each model's own.",
    '',
    rule=one_of("float32 or bfloat16, or '' for the model's own", '', 'float32', 'bfloat16'),
  )
  weights: str = option(
    'Models',
    "int8 to hold both models' matrices as 8-bit integers with a scale per output channel; blocks for those of .gguf"
    " files in the files' own blocks of 4 to 8 bits, with inputs rounded to 8 bits; '' for those of the files. Lossless"
    ' methods then give the distribution of the quantized target.',
    '',
    rule=one_of(f"{INT8}, {BLOCKS}, or '' for those of the files", '', INT8, BLOCKS),
  )
  mesh: str = option(
    'Machine',
    "Devices to divide the work over, as data:8,model:2: rows over data, the target over model; '' for one device.",
    '',
  )
  draft_mesh: str = option(
    'Machine',
    'The draft is whole on every device along model, or divided over it.',
    'whole',
    rule=one_of(' or '.join(DRAFT_MESHES), *DRAFT_MESHES),
  )

  def __post_init__(self):
    check_fields(self)
    Lookup(self.lookup_max, self.lookup_min)
    if not self.has_lookup:
      if (self.lookup_max, self.lookup_min) != (LOOKUP_MAX, LOOKUP_MIN):
        raise ValueError('lookup_max and lookup_min are for --draft=lookup or --draft=lookup+DRAFT')
      if self.lookup_corpus:
        raise ValueError('lookup_corpus is for --draft=lookup or --draft=lookup+DRAFT')
      name = self.draft_model
      if (hint := did_you_mean(name, [LOOKUP])) and not epath.Path(name).exists():
        raise ValueError(f'no draft at {name}{hint}')
    if self.draft_mesh != 'whole' and not self.mesh:
      raise ValueError('draft_mesh is for a mesh, and none is given')

  @property
  def has_lookup(self) -> bool:
    return split_draft(self.draft or '')[0]

  @property
  def draft_model(self) -> str:
    """The directory of the draft model or head; empty for `lookup` alone, and where there is no draft."""
    return split_draft(self.draft or '')[1]

  @property
  def guesses(self) -> Guesses:
    """The kind of the draft's guesses, as far as it is known before it is read."""
    return Guesses(has_given_candidates=self.has_lookup, has_mixed_positions=self.has_lookup and bool(self.draft_model))

  def takes_tree(self, tree: str) -> bool:
    """Tells whether the draft can guess on a tree, as `--tree` names it."""
    return tree == 'chains' or not self.has_lookup

  def make_sharding(self, batch_size: int, *, is_local: bool = False) -> DecodeSharding | None:
    """The sharding of batches of so many rows over the devices; None for one device.

    With `is_local` each process decodes by itself, on its own devices. Several that work together need a mesh.
    """
    if not self.mesh:
      if jax.process_count() > 1 and not is_local:
        raise ValueError('several processes need a mesh, such as data:-1')
      return None
    mesh = make_mesh(parse_sizes(self.mesh), jax.local_devices() if is_local else None)
    if batch_size % mesh.shape[DATA]:
      raise ValueError(f'batch_size must be a multiple of {DATA}:{mesh.shape[DATA]} of the mesh, got {batch_size}')
    return DecodeSharding(mesh, is_draft_divided=self.draft_mesh == 'divided')


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodOptions:
  """Methods and their trees.

  The method `auto` stands alone or beside `autoregressive`. Every pair of `num_drafts` and `draft_length` is run, or
  compared by `auto`. None for `epsilon` leaves each method its own. See `decode.experiment.settings.TreeSpec` about
  `tree`.
  """

  method: tuple[str, ...] = option(
    'Method and tree',
    f'Methods, separated by commas, of {", ".join(METHODS)}, or auto, the fastest of some that it times. Default'
    f' {", ".join(DEFAULT_METHODS)}; without a draft autoregressive.',
    DEFAULT_METHODS,
    is_derived=True,
  )
  num_drafts: tuple[int, ...] = option(
    'Method and tree',
    'K, drafts per round; several, separated by commas, run the grid. Default 2, for auto 1,2,4,8.',
    (2,),
    is_derived=True,
  )
  draft_length: tuple[int, ...] = option(
    'Method and tree',
    'L, tokens per draft; several, separated by commas, run the grid. Default 8, for auto 2,4,8.',
    (8,),
    is_derived=True,
  )
  tree: tuple[str, ...] = option(
    'Method and tree',
    'Tree of guesses: chains, prefix:FACTORS, specinfer, optimal:BUDGET, likeliest:WIDTHS, confident:WIDTHS or'
    ' estimated:WIDTHS; repeat the flag for several. chains is K drafts of L tokens, prefix:4,2,2,1 a prefix tree,'
    ' specinfer three chains of L tokens that share two, and optimal the best tree of at most so many nodes. likeliest'
    " is for greedy decoding: the draft's likeliest paths, so many at each depth; confident has so many samples where"
    ' the draft is confident, and estimated where its confidence head says so.',
    ('chains',),
    is_repeated=True,
  )
  growth_threshold: float = option(
    'Method and tree',
    'Trees of likeliest, confident and estimated have no guess whose estimated chance is below this; drafting ends'
    ' where none is left. With auto 0 stands for the best of some.',
    0.0,
    rule=('from 0 to 1', lambda x: 0 <= x <= 1),
  )
  acceptance: str | None = option(
    'Method and tree',
    'JSON that --output wrote in a run with optimal:BUDGET; its rates are used instead of measuring them again.',
    None,
  )
  grid: str = option(
    'Method and tree',
    'How many settings --method=auto times: short, at most 6, or full, at most 12. Default: short on CPUs unless K, L'
    ' or a tree is given.',
    '',
    rule=one_of("short or full, or '' for short on CPUs", '', 'short', 'full'),
  )
  calibration: str | None = option(
    'Method and tree',
    'JSON file in which --method=auto keeps what it measures after each setting, finds it again and goes on.',
    None,
  )
  calibration_prompts: int = option(
    'Method and tree', 'Prompts that auto decodes to measure; at least two batches.', 8, rule=AT_LEAST_1
  )
  children: str = option(
    'Method and tree',
    'How siblings are drawn: independent, without_replacement, first_arrivals or likeliest_and_one;'
    " '' for each method's own.",
    '',
  )
  epsilon: float | None = option(
    'Method and tree',
    'What decoding_opt and decoding_uno accept too much; they are not lossless.',
    None,
    rule=AT_LEAST_0,
  )
  gumbel: bool = option(
    'Method and tree', 'Sample autoregressively by Gumbel-max, keyed by position: what ersd gives.', False
  )

  def __post_init__(self):
    check_fields(self)
    if not self.method:
      raise ValueError(f'no method given; allowed: {", ".join((*METHODS, AUTO))}')
    self._check_auto()
    named = [get_method(name) for name in self.method if name != AUTO]
    if self.epsilon is not None and not any(has_epsilon(method.name) for method in named):
      allowed = ', '.join(filter(has_epsilon, METHODS))
      raise ValueError(f'epsilon is for {allowed}, one of which must be among the methods')
    if self.gumbel and not any(method.max_drafts == 0 for method in named):
      raise ValueError('gumbel is for autoregressive decoding, which must be among the methods')
    self.make()
    for name in ('num_drafts', 'draft_length'):
      values = getattr(self, name)
      if not values or min(values) < 1:
        raise ValueError(f'{name} must be whole numbers of at least 1, got {", ".join(map(str, values)) or "none"}')
    if not self.tree:
      raise ValueError('no tree given; chains is the default')
    if self.growth_threshold and not any(tree.partition(':')[0] in GROWTHS for tree in self.tree):
      known = ', '.join(f'--tree={name}:WIDTHS' for name in GROWTHS)
      raise ValueError(f'growth_threshold is for {known}')

  def _check_auto(self):
    if not self.is_auto:
      for name in ('calibration', 'grid'):
        if getattr(self, name):
          raise ValueError(f'{name} is for --method=auto')
      return
    if others := set(self.method) - {AUTO, 'autoregressive'}:
      raise ValueError(
        'auto compares all methods that are lossless; only autoregressive can stand beside it, not'
        f' {", ".join(sorted(others))}'
      )
    if self.children:
      raise ValueError('auto takes every method with its own children')
    if any(tree.startswith('optimal') for tree in self.tree):
      raise ValueError('auto compares trees that are given, and chooses no optimal ones: name shapes')

  @property
  def is_auto(self) -> bool:
    return AUTO in self.method

  @property
  def has_short_grid(self) -> bool:
    """True if `auto` times few settings: on CPUs, where each takes seconds to compile, unless the grid is given."""
    is_default = self.tree == ('chains',) and all(getattr(self, name) == values for name, values in AUTO_GRID.items())
    return self.grid == 'short' or (not self.grid and is_default and jax.default_backend() == 'cpu')

  def make(self) -> list[Method]:
    """The named methods, modified by `children`, `epsilon` and `gumbel`."""
    methods = []
    for name in self.method:
      if name == AUTO:
        continue
      method = get_method(name)
      if method.max_drafts == 0:
        method = with_gumbel(method) if self.gumbel else method
      elif self.children:
        method = with_children(method, self.children)
      methods.append(method if self.epsilon is None else with_epsilon(method, self.epsilon))
    return methods

  @property
  def needs_draft(self) -> bool:
    return self.is_auto or any(method.max_drafts != 0 for method in self.make())
