"""The checked options of `decode.main`."""

from __future__ import annotations

import dataclasses
import math

import jax
from etils import epath

from common.command_line import parse_sizes
from decode.experiment.prompts import Prompt, read_prompts
from spectr_jax import METHODS, Method, get_method, with_children, with_epsilon, with_gumbel
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.sharding import DATA, make_mesh

ROOT = epath.Path(__file__).resolve().parents[2]
PRETRAINED = ROOT / 'pretrained'
AUTO = 'auto'
# Default K and L, for named methods and for `auto`.
DEFAULT_GRID = {'num_drafts': (2,), 'draft_length': (8,)}
AUTO_GRID = {'num_drafts': (1, 2, 4, 8), 'draft_length': (2, 4, 8)}
_DTYPES = ('', 'float32', 'bfloat16')
DRAFT_MESHES = 'whole', 'divided'


def has_epsilon(name: str) -> bool:
  """Returns whether the method over-accepts by an amount that can be chosen."""
  method = get_method(name)
  return with_epsilon(method, 0.5) != with_epsilon(method, 0.25)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOptions:
  """Options of a run. Every field is a flag of `decode.main`.

  Attributes:
    target, draft: Directories of models.
    dtype: Type to compute in, '' for each model's own.
    method: Names of methods. `auto`, alone or beside `autoregressive`, takes the lossless method that is predicted to
      be the fastest; see `decode.auto.prediction`.
    num_drafts, draft_length: Values of K and L. Every pair is run, or compared by `auto`. The defaults are 2 and 8, and
      for `auto` 1, 2, 4, 8 and 2, 4, 8.
    tree: Trees of guesses; see `decode.experiment.settings.TreeSpec`.
    acceptance: File of measured acceptance rates for `optimal` trees, or None to measure them on the prompts.
    calibration: File for the measurements of `auto`. If it exists, they are read from it.
    calibration_prompts: Number of prompts, from the first, that `auto` decodes for its measurements; at least two
      batches are decoded.
    children: Rule by which the children of a node are drawn, '' for each method's own.
    epsilon: Over-acceptance of the methods that have one, or None for their own.
    gumbel: Whether methods that draft nothing sample by Gumbel-max with keys per position, as `ersd` does.
    share_of_optimum: Whether to compare acceptance with the most that any token-level verification could reach.
    breakdown: Whether to time the parts of a round one by one.
    profile_dir: Directory for JAX profiles of some rounds of each setting, or None.
    temperature, top_k, top_p: The sampling parameters.
    prompt: One text to continue, or None.
    prompts: File of prompts, or None for the shipped ones; see `read_prompts`.
    num_prompts: The largest number of prompts to take from the beginning of the file.
    skip_long: Whether to leave out prompts that are too long instead of refusing them.
    batch_size: The largest number of prompts decoded together.
    max_new_tokens: The largest number of new tokens per continuation.
    num_seeds, seed: Seeds `seed` to `seed + num_seeds - 1` are run.
    mesh: Sizes of a mesh `data:D,model:M` to shard the work over, '' for one device; see `DecodeSharding`.
    draft_mesh: `whole` for a full copy of the draft on every device along `model`, `divided` to shard it like the
      target.

  Raises:
    ValueError: A value is out of range; the message says what is allowed.
  """

  target: str = str(PRETRAINED / 'target')
  draft: str = str(PRETRAINED / 'draft')
  dtype: str = ''
  method: tuple[str, ...] = ('autoregressive', 'speculative', 'block', 'spectr', 'race_traversal')
  num_drafts: tuple[int, ...] | None = None
  draft_length: tuple[int, ...] | None = None
  tree: tuple[str, ...] = ('chains',)
  acceptance: str | None = None
  calibration: str | None = None
  calibration_prompts: int = 8
  children: str = ''
  epsilon: float | None = None
  gumbel: bool = False
  share_of_optimum: bool = False
  breakdown: bool = False
  profile_dir: str | None = None
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  prompt: str | None = None
  prompts: str | None = None
  num_prompts: int = 32
  skip_long: bool = False
  batch_size: int = 1
  max_new_tokens: int = 64
  num_seeds: int = 1
  seed: int = 0
  mesh: str = ''
  draft_mesh: str = 'whole'

  def __post_init__(self):
    if not self.method:
      raise ValueError(f'no method given; allowed: {", ".join((*METHODS, AUTO))}')
    for name, values in (AUTO_GRID if self.is_auto else DEFAULT_GRID).items():
      if getattr(self, name) is None:
        object.__setattr__(self, name, values)
    self._check_auto()
    if self.epsilon is not None and not (math.isfinite(self.epsilon) and self.epsilon >= 0):
      raise ValueError(f'epsilon must be finite and at least 0, got {self.epsilon}')
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
    if not (math.isfinite(self.temperature) and self.temperature >= 0):
      raise ValueError(f'temperature must be finite and at least 0, got {self.temperature}')
    if not 0 <= self.top_k < 2**31:
      raise ValueError(f'top_k must be at least 0 (0 keeps all) and below 2**31, got {self.top_k}')
    if not 0 < self.top_p <= 1:
      raise ValueError(f'top_p must be above 0 and at most 1, got {self.top_p}')
    for name in ('num_prompts', 'calibration_prompts', 'batch_size', 'max_new_tokens', 'num_seeds'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} must be at least 1, got {getattr(self, name)}')
    if self.seed < 0 or self.seed + self.num_seeds > 2**32:
      raise ValueError(f'seeds must be from 0 to 2**32 - 1, got {self.num_seeds} from {self.seed} on')
    if self.dtype not in _DTYPES:
      raise ValueError(f"dtype must be float32 or bfloat16, or '' for the model's own, got {self.dtype!r}")
    if self.draft_mesh not in DRAFT_MESHES:
      raise ValueError(f'draft_mesh must be {" or ".join(DRAFT_MESHES)}, got {self.draft_mesh!r}')
    if self.draft_mesh != 'whole' and not self.mesh:
      raise ValueError('draft_mesh is for a mesh, and none is given')
    if self.prompt is not None and self.prompts is not None:
      raise ValueError('prompt and prompts are both given; choose one: a text, or a file of texts')

  def _check_auto(self):
    if not self.is_auto:
      if self.calibration is not None:
        raise ValueError('calibration is for --method=auto')
      return
    if others := set(self.method) - {AUTO, 'autoregressive'}:
      raise ValueError(
        'auto compares all methods that are lossless; only autoregressive can stand beside it, not'
        f' {", ".join(sorted(others))}'
      )
    if self.children:
      raise ValueError('auto takes every method with its own children')
    if any(tree.startswith('optimal') for tree in self.tree):
      raise ValueError('auto compares trees that are given: chains, prefix:FACTORS, specinfer')

  @property
  def is_auto(self) -> bool:
    """True if `auto` chooses the method."""
    return AUTO in self.method

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

  def read_prompts(self) -> list[Prompt]:
    """All prompts of the file, or the one text."""
    if self.prompt is not None:
      return [Prompt(self.prompt)]
    path = PRETRAINED / 'prompts.jsonl' if self.prompts is None else self.prompts
    return read_prompts(path)
