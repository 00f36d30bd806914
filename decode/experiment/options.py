"""The checked options of `decode.main`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from etils import epath

from common.command_line import parse_sizes
from decode.experiment.prompt_sets import PROMPT_SETS
from decode.experiment.prompts import Prompt, as_conversations, read_prompts
from spectr_jax import (
  METHODS,
  Confident,
  Estimated,
  Likeliest,
  Method,
  StopStrings,
  get_method,
  with_children,
  with_epsilon,
  with_gumbel,
)
from spectr_jax.auto.setting import DRAFT_LENGTHS, GREEDY_WIDTHS, NUM_DRAFTS
from spectr_jax.draft.lookup import LOOKUP_MAX, LOOKUP_MIN, Lookup
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.engine.stop import check_stop_texts
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.kernels.int8 import INT8
from spectr_jax.sampling import SAMPLING_NAMES, SamplingParams
from spectr_jax.sharding import DATA, make_mesh
from spectr_jax.suggestion import did_you_mean
from spectr_jax.unicode import check_unicode

ROOT = epath.Path(__file__).resolve().parents[2]
PRETRAINED = ROOT / 'pretrained'
SHIPPED_PROMPTS = PRETRAINED / 'prompts.jsonl'
AUTO = 'auto'
LOOKUP = 'lookup'
# Default K and L, for named methods and for `auto`.
DEFAULT_GRID = {'num_drafts': (2,), 'draft_length': (8,)}
AUTO_GRID = {'num_drafts': NUM_DRAFTS, 'draft_length': DRAFT_LENGTHS}
# Trees that `auto` adds at temperature 0: 8, 16, 16 and 32 of the draft's likeliest guesses.
AUTO_TREES = tuple(f'likeliest:{",".join(map(str, widths))}' for widths in GREEDY_WIDTHS)
# Rules of trees that every row grows for itself, by name.
GROWTHS = {'likeliest': Likeliest, 'confident': Confident, 'estimated': Estimated}
DRAFT_MESHES = 'whole', 'divided'
# Groups of the options in `--help`.
_MODELS, _METHOD, _SAMPLING, _PROMPTS = 'Models', 'Method and tree', 'Sampling', 'Prompts'
_MEASURED, _MACHINE = 'Measurements and output', 'Machine'
# An option, the values that it may have in words, and the test. NaN fails every test.
_RULES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
  ('temperature', 'finite and at least 0', lambda x: 0 <= x < math.inf),
  ('epsilon', 'finite and at least 0', lambda x: x is None or 0 <= x < math.inf),
  ('growth_threshold', 'from 0 to 1', lambda x: 0 <= x <= 1),
  ('top_k', 'at least 0 (0 keeps all) and below 2**31', lambda x: 0 <= x < 2**31),
  ('top_p', 'above 0 and at most 1', lambda x: 0 < x <= 1),
  ('min_p', 'from 0 to 1 (0 keeps all)', lambda x: 0 <= x <= 1),
  *(
    (name, 'at least 1', lambda x: x >= 1)
    for name in ('num_prompts', 'calibration_prompts', 'batch_size', 'max_new_tokens', 'num_samples', 'num_seeds')
  ),
  ('grid', "short or full, or '' for short on CPUs", lambda x: x in ('', 'short', 'full')),
  ('dtype', "float32 or bfloat16, or '' for the model's own", lambda x: x in ('', 'float32', 'bfloat16')),
  ('weights', f"{INT8}, or '' for those of the files", lambda x: x in ('', INT8)),
  ('draft_mesh', ' or '.join(DRAFT_MESHES), lambda x: x in DRAFT_MESHES),
)


def fitting(draft: str, methods: Sequence[str], trees: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """The methods and the trees that take a draft's guesses.

  Args:
    draft: The draft, as `DecodeOptions.draft`.
    methods: Methods, as `DecodeOptions.method`.
    trees: Trees, as `DecodeOptions.tree`.

  Raises:
    ValueError: None of the trees does, or no method that drafts.
  """
  own = DecodeOptions(draft=draft, method=('autoregressive',))
  taken = tuple(each for each in methods if each == AUTO or own.takes_guesses(get_method(each)))
  kept = tuple(tree for tree in trees if own.takes_tree(tree))
  if not kept or all(each != AUTO and get_method(each).max_drafts == 0 for each in taken):
    raise ValueError(f'{draft} takes none of these methods on none of these trees: {", ".join((*methods, *trees))}')
  return taken, kept


def split_draft(draft: str) -> tuple[bool, str]:
  """Whether a draft as `--draft` names it guesses from the text, and its model or head; empty for `lookup` alone."""
  has_lookup = draft == LOOKUP or draft.startswith(f'{LOOKUP}+')
  return has_lookup, draft.removeprefix(LOOKUP).removeprefix('+') if has_lookup else draft


def has_epsilon(name: str) -> bool:
  """Returns whether the method over-accepts by an amount that can be chosen."""
  method = get_method(name)
  return with_epsilon(method, 0.5) != with_epsilon(method, 0.25)


def option(group: str, text: str, default: Any, *, is_repeated: bool = False) -> Any:
  """A field that the command line has as a flag.

  Args:
    group: The group of the flag in `--help`.
    text: Help of the flag.
    default: Default of the field and the flag.
    is_repeated: Whether several values are given by repeating the flag; else they are separated by commas.
  """
  return dataclasses.field(default=default, metadata={'group': group, 'help': text, 'is_repeated': is_repeated})


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOptions:
  """Options of a run. Every field is a flag of `decode.main`, made by `option_flags`; its help says what it is.

  The method `auto` stands alone or beside `autoregressive`. Every pair of `num_drafts` and `draft_length` is run, or
  compared by `auto`. None for `epsilon` leaves each method its own. The seeds are `seed` to `seed + num_seeds - 1`.
  See `decode.auto.prediction` about `auto`, `decode.experiment.settings.TreeSpec` about `tree`, `read_prompts` about
  `prompts` and `DecodeSharding` about `mesh`.

  Raises:
    ValueError: A value is out of range; the message says what is allowed.
  """

  target: str = option(
    _MODELS, 'The target: a directory, a .gguf file, or ORG/NAME on the hub.', str(PRETRAINED / 'target')
  )
  draft: str = option(
    _MODELS,
    'The draft: as the target, or the folder of a head on it (EAGLE, DFlash, DSpark, Medusa, MTP), or lookup, or'
    ' lookup+DRAFT. lookup guesses what followed in the text before, without a model; lookup+DRAFT does so beside the'
    ' samples of a draft.',
    str(PRETRAINED / 'draft'),
  )
  lookup_max: int = option(
    _MODELS, 'Tokens at the end of the text that lookup compares with earlier ones, at most.', LOOKUP_MAX
  )
  lookup_min: int = option(_MODELS, 'Tokens that must agree for lookup to guess, at least.', LOOKUP_MIN)
  lookup_corpus: tuple[str, ...] = option(
    _MODELS,
    'Text files that lookup searches besides the text, separated by commas: paths or globs of .txt, .gz or .bz2 files.'
    ' A blank line ends a document.',
    (),
  )
  dtype: str = option(_MODELS, "Type to compute in, float32 or bfloat16; '' for each model's own.", '')
  weights: str = option(
    _MODELS,
    "int8 to hold both models' matrices as 8-bit integers with a scale per output channel; '' for those of the files."
    ' Lossless methods then give the distribution of the quantized target.',
    '',
  )
  method: tuple[str, ...] = option(
    _METHOD,
    f'Methods, separated by commas, of {", ".join(METHODS)}, or auto, the one predicted to be the fastest.',
    ('autoregressive', 'speculative', 'block', 'spectr', 'race_traversal'),
  )
  num_drafts: tuple[int, ...] | None = option(
    _METHOD, 'K, drafts per round; several, separated by commas, run the grid. Default 2, for auto 1,2,4,8.', None
  )
  draft_length: tuple[int, ...] | None = option(
    _METHOD, 'L, tokens per draft; several, separated by commas, run the grid. Default 8, for auto 2,4,8.', None
  )
  tree: tuple[str, ...] = option(
    _METHOD,
    'Tree of guesses: chains, prefix:FACTORS, specinfer, optimal:BUDGET, likeliest:WIDTHS, confident:WIDTHS or'
    ' estimated:WIDTHS; repeat the flag for several. chains is K drafts of L tokens, prefix:4,2,2,1 a prefix tree,'
    ' specinfer three chains of L tokens that share two, and optimal the best tree of at most so many nodes. likeliest'
    " is for greedy decoding: the draft's likeliest paths, so many at each depth; confident has so many samples where"
    ' the draft is confident, and estimated where its confidence head says so.',
    ('chains',),
    is_repeated=True,
  )
  growth_threshold: float = option(
    _METHOD,
    'Trees of likeliest, confident and estimated have no guess whose estimated chance is below this; drafting ends'
    ' where none is left. With auto 0 stands for the best of some.',
    0.0,
  )
  acceptance: str | None = option(
    _METHOD,
    'JSON that --output wrote in a run with optimal:BUDGET; its rates are used instead of measuring them again.',
    None,
  )
  grid: str = option(
    _METHOD,
    'What --method=auto compares: short, a few trees, or full, every method on every tree. Default: short on CPUs'
    ' unless K, L or a tree is given.',
    '',
  )
  calibration: str | None = option(
    _METHOD,
    'JSON file in which --method=auto keeps what it measures after each program, finds it again and goes on.',
    None,
  )
  calibration_prompts: int = option(_METHOD, 'Prompts that auto decodes to measure; at least two batches.', 8)
  children: str = option(
    _METHOD,
    'How siblings are drawn: independent, without_replacement, first_arrivals or likeliest_and_one;'
    " '' for each method's own.",
    '',
  )
  epsilon: float | None = option(
    _METHOD, 'What decoding_opt and decoding_uno accept too much; they are not lossless.', None
  )
  gumbel: bool = option(_METHOD, 'Sample autoregressively by Gumbel-max, keyed by position: what ersd gives.', False)
  share_of_optimum: bool = option(
    _MEASURED,
    'Compare acceptance with the most that token-level verification of the same candidates could reach; takes time.',
    False,
  )
  breakdown: bool = option(_MEASURED, 'Time the parts of a round: draft, target, verification, and the rest.', False)
  profile_dir: str | None = option(
    _MEASURED,
    "Directory for what JAX's profiler records of some rounds of every setting; for TensorBoard or Perfetto.",
    None,
  )
  temperature: float = option(_SAMPLING, 'Sampling temperature; 0 decodes greedily.', 1.0)
  top_k: int = option(_SAMPLING, 'Sample from the k likeliest tokens; 0 for all.', 0)
  top_p: float = option(_SAMPLING, 'Sample from the fewest likeliest tokens of this mass.', 1.0)
  min_p: float = option(
    _SAMPLING, 'Sample from tokens at least this many times as likely as the likeliest; 0 for all.', 0.0
  )
  stop: tuple[str, ...] = option(
    _PROMPTS,
    'Text or special token that ends a continuation, and is no part of it; repeat for several.',
    (),
    is_repeated=True,
  )
  logprobs: bool = option(_MEASURED, "Write the target's log probability of every token to --generations.", False)
  prompt: str | None = option(_PROMPTS, 'One text to continue.', None)
  prompts: str | None = option(
    _PROMPTS,
    'File of texts to continue: .jsonl with a "prompt" field, else a text per line; .json, .tsv and .gz are read too.'
    f' SET:FILE reads a published set: {", ".join(PROMPT_SETS)}. Default: the shipped prompts.',
    None,
  )
  num_prompts: int = option(_PROMPTS, 'Prompts to take from the beginning of the file, at most.', 32)
  chat: bool = option(
    _PROMPTS,
    "Let the model answer: render prompts as turns of the user, and conversations, by the model's chat template.",
    False,
  )
  system: str | None = option(_PROMPTS, 'System message of conversations that have none of their own.', None)
  skip_long: bool = option(_PROMPTS, 'Leave out prompts that are too long instead of refusing them.', False)
  batch_size: int = option(_PROMPTS, 'Prompts decoded together, at most.', 1)
  max_new_tokens: int = option(_PROMPTS, 'New tokens per prompt, at most.', 64)
  num_samples: int = option(_SAMPLING, 'Continuations of each prompt with each seed.', 1)
  num_seeds: int = option(_SAMPLING, 'Runs of every setting, each with its own seed.', 1)
  seed: int = option(_SAMPLING, 'The first seed.', 0)
  mesh: str = option(
    _MACHINE,
    "Devices to divide the work over, as data:8,model:2: rows over data, the target over model; '' for one device.",
    '',
  )
  draft_mesh: str = option(_MACHINE, 'The draft is whole on every device along model, or divided over it.', 'whole')

  def __post_init__(self):
    if not self.method:
      raise ValueError(f'no method given; allowed: {", ".join((*METHODS, AUTO))}')
    for name, values in (AUTO_GRID if self.is_auto else DEFAULT_GRID).items():
      if getattr(self, name) is None:
        object.__setattr__(self, name, values)
    for name, allowed, is_valid in _RULES:
      if not is_valid(value := getattr(self, name)):
        raise ValueError(f'{name} must be {allowed}, got {value!r}')
    self._check_auto()
    self._check_lookup()
    if self.epsilon is not None and not any(has_epsilon(name) for name in self.method if name != AUTO):
      allowed = ', '.join(filter(has_epsilon, METHODS))
      raise ValueError(f'epsilon is for {allowed}, one of which must be among the methods')
    if self.gumbel and not any(get_method(name).max_drafts == 0 for name in self.method if name != AUTO):
      raise ValueError('gumbel is for autoregressive decoding, which must be among the methods')
    _ = self.methods
    for name in ('num_drafts', 'draft_length'):
      values = getattr(self, name)
      if not values or min(values) < 1:
        raise ValueError(f'{name} must be whole numbers of at least 1, got {", ".join(map(str, values)) or "none"}')
    if not self.tree:
      raise ValueError('no tree given; chains is the default')
    if self.growth_threshold and not any(tree.partition(':')[0] in GROWTHS for tree in self.tree):
      known = ', '.join(f'--tree={name}:WIDTHS' for name in GROWTHS)
      raise ValueError(f'growth_threshold is for {known}')
    check_stop_texts(self.stop)
    for name in ('prompt', 'system'):
      if (text := getattr(self, name)) is not None:
        check_unicode(text, name)
    if self.stop and self.share_of_optimum:
      raise ValueError('share_of_optimum counts whole rounds, and stop may end a row within one; choose one')
    if self.seed < 0 or self.seed + self.num_seeds > 2**32:
      raise ValueError(f'seeds must be from 0 to 2**32 - 1, got {self.num_seeds} from {self.seed} on')
    if self.draft_mesh != 'whole' and not self.mesh:
      raise ValueError('draft_mesh is for a mesh, and none is given')
    if self.prompt is not None and self.prompts is not None:
      raise ValueError('prompt and prompts are both given; choose one: a text, or a file of texts')
    if self.system is not None and not self.chat:
      raise ValueError('system is for --chat, which renders conversations')

  def _check_auto(self):
    if not self.is_auto:
      for name in ('calibration', 'grid'):
        if getattr(self, name):
          raise ValueError(f'{name} is for --method=auto')
      return
    if self.grid == 'short' and not self._has_default_grid:
      raise ValueError('the short grid chooses K, L and trees: leave out num_drafts, draft_length and tree')
    if others := set(self.method) - {AUTO, 'autoregressive'}:
      raise ValueError(
        'auto compares all methods that are lossless; only autoregressive can stand beside it, not'
        f' {", ".join(sorted(others))}'
      )
    if self.children:
      raise ValueError('auto takes every method with its own children')
    if any(tree.startswith('optimal') for tree in self.tree):
      raise ValueError('auto compares trees that are given, and chooses no optimal ones: name shapes')

  def _check_lookup(self):
    Lookup(self.lookup_max, self.lookup_min)
    if not self.has_lookup:
      if (self.lookup_max, self.lookup_min) != (LOOKUP_MAX, LOOKUP_MIN):
        raise ValueError('lookup_max and lookup_min are for --draft=lookup or --draft=lookup+DRAFT')
      if self.lookup_corpus:
        raise ValueError('lookup_corpus is for --draft=lookup or --draft=lookup+DRAFT')
      if (hint := did_you_mean(self.draft, [LOOKUP])) and not epath.Path(self.draft).exists():
        raise ValueError(f'no draft at {self.draft}{hint}')
      return
    # Others are refused here, before models are read.
    for method in self.methods:
      if not self.takes_guesses(method):
        allowed = ', '.join(n for n, each in METHODS.items() if each.max_drafts != 0 and self.takes_guesses(each))
        raise ValueError(f'{method.name} does not take guesses of --draft={self.draft}; allowed: {allowed}')
    for tree in self.tree:
      if not self.takes_tree(tree):
        raise ValueError(f'lookup guesses chains, and the tree is {tree}')

  def check_unused(self, names: Sequence[str], where: str) -> None:
    """Refuses options that a command has no use for, where they are not their defaults.

    Args:
      names: The fields.
      where: The command, and why it does not take them.

    Raises:
      ValueError: The message names the first one.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(self)}
    for name in names:
      if getattr(self, name) != defaults[name]:
        raise ValueError(f'{name} is not for {where}')

  @property
  def has_lookup(self) -> bool:
    """True if guesses come from the text."""
    return split_draft(self.draft)[0]

  def takes_guesses(self, method: Method) -> bool:
    """Returns whether a method takes guesses of this draft, which lookup gives and models draw, or drafts nothing."""
    if not self.has_lookup or method.max_drafts == 0:
      return True
    return method.takes_mixed if self.draft_model else method.takes_given

  def takes_tree(self, tree: str) -> bool:
    """Returns whether the draft can guess on a tree, as `tree` names it."""
    return tree == 'chains' or not self.has_lookup

  @property
  def draft_model(self) -> str:
    """The directory of the draft model or head; empty for `lookup` alone."""
    return split_draft(self.draft)[1]

  @property
  def is_auto(self) -> bool:
    """True if `auto` chooses the method."""
    return AUTO in self.method

  @property
  def _has_default_grid(self) -> bool:
    return self.tree == ('chains',) and all(getattr(self, name) == values for name, values in AUTO_GRID.items())

  @property
  def has_short_grid(self) -> bool:
    """True if `auto` compares few settings: on CPUs, where each takes seconds to compile, unless the grid is given."""
    return self.grid == 'short' or (not self.grid and self._has_default_grid and jax.default_backend() == 'cpu')

  @property
  def methods(self) -> list[Method]:
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
    """True if any method drafts."""
    return self.is_auto or any(method.max_drafts != 0 for method in self.methods)

  @property
  def seeds(self) -> range:
    return range(self.seed, self.seed + self.num_seeds)

  def make_sharding(self, *, is_local: bool = False) -> DecodeSharding | None:
    """The sharding of decoding over the available devices; None for one device.

    Args:
      is_local: Whether each process decodes by itself, on its own devices.

    Raises:
      ValueError: There is no such mesh here, rows cannot be sharded over it, or several processes work together without
        a mesh.
    """
    if not self.mesh:
      if jax.process_count() > 1 and not is_local:
        raise ValueError('several processes need a mesh, such as data:-1')
      return None
    mesh = make_mesh(parse_sizes(self.mesh), jax.local_devices() if is_local else None)
    if self.batch_size % mesh.shape[DATA]:
      raise ValueError(f'batch_size must be a multiple of {DATA}:{mesh.shape[DATA]} of the mesh, got {self.batch_size}')
    return DecodeSharding(mesh, is_draft_divided=self.draft_mesh == 'divided')

  @property
  def sampling(self) -> SamplingParams:
    """The sampling parameters, the same for all rows."""
    return SamplingParams(**{name: getattr(self, name) for name in SAMPLING_NAMES})

  def make_stop(self, tokenizer: TokenizerBase) -> StopStrings | None:
    """The stop texts as the library takes them, or None if there are none."""
    return StopStrings(tokenizer, self.stop) if self.stop else None

  def read_prompts(self) -> list[Prompt]:
    """All prompts of the file, or the one text; conversations with `chat`.

    Raises:
      ValueError: The file is unusable, or has conversations without `chat`.
    """
    path = SHIPPED_PROMPTS if self.prompts is None else self.prompts
    prompts = read_prompts(path) if self.prompt is None else [Prompt(self.prompt)]
    if self.chat:
      return as_conversations(prompts, self.system)
    if conversation := next((prompt for prompt in prompts if prompt.messages), None):
      raise ValueError(f"{conversation.origin}: a conversation, which --chat renders by the model's template")
    return prompts
