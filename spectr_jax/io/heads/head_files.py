"""`load_drafter`: published heads as drafters."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from spectr_jax.draft import Drafter, head_drafter, medusa_drafter, one_pass_drafter
from spectr_jax.draft.medusa_drafter import MedusaConfig
from spectr_jax.io.heads import assistant_format
from spectr_jax.io.heads.formats import MEDUSA, READERS, checked_spec, find_format
from spectr_jax.io.heads.layout import Described, Layout, is_beside, is_transposed, names_and_shapes, target_sizes
from spectr_jax.io.hub.hub_model import read_json
from spectr_jax.io.hub.redundant import FREQUENCIES, check_buffers
from spectr_jax.io.hub.tensors import SafetensorsFolder, Tensors, check_tensors, row_ranges
from spectr_jax.io.hub.text_part import text_spec
from spectr_jax.io.hub.torch_file import TorchFile
from spectr_jax.io.model_files import hub_folder
from spectr_jax.io.untrusted import named
from spectr_jax.kernels.block_kernel import has_blocks, rounded_to_blocks
from spectr_jax.kernels.products import LARGE
from spectr_jax.model import Model
from spectr_jax.models.one_pass_config import OnePassConfig

_DOWNLOADED = ('*.json', '*.safetensors')
_TORCH_FILES = ('pytorch_model.bin', 'medusa_lm_head.pt')
_MEDUSA_NAME = r'(?:medusa_head\.)?([0-9]{1,9})\.([0-9]{1,9})\.(.+)'
_ROUNDING = 0.15  # relative error of weights of four bits, with some room
_KNOWN = (
  'EAGLE-1, 2 and 3, P-EAGLE, the speculators format, DFlash 1 and 2, DSpark, Medusa-1, MTP and assistants of Gemma 4'
)


def output_head_rows(target: Model, ids: np.ndarray | None, dtype: str) -> jax.Array:
  """The target's output head, or its rows of the tokens `ids`, as a kernel `[D, Vd]`, read off its logits of unit
  vectors.

  Raises `ValueError` if the target has no output head that others can use, or if it is more than a product.
  """
  unembed = target.unembed_fn
  if unembed is None:
    raise ValueError("this head takes rows of the target's output head, but the target has no unembed_fn")
  width, size = target_sizes(target).width, 256  # rows at a time

  @jax.jit
  def rows(params, vectors):
    logits = unembed(params, vectors)
    return logits if ids is None else jnp.take(logits, ids, axis=-1)

  with jax.default_matmul_precision('highest'):
    units = [np.eye(min(size, width - i), width, i, dtype=np.float32) for i in range(0, width, size)]
    kernel = np.concatenate([np.asarray(rows(target.params, each)) for each in units])
    # Whole multiples of a 127th of the largest of every 16, which kernels in blocks do not round.
    probe = 10 * np.random.default_rng(0).integers(-127, 128, (4, width)).astype(np.float32)
    probe[:, ::16] = 1270
    measured, expected = np.asarray(rows(target.params, probe)), probe @ kernel
  # Soft caps, biases and columns of -inf all show here.
  if not np.abs(measured - expected).max() <= 1e-3 * np.abs(expected).max():
    raise ValueError("this head takes rows of the target's output head, which is not linear")
  return jnp.asarray(kernel.astype(dtype))


def _read_whole(tensors: Tensors, name: str) -> np.ndarray:
  return tensors.read(name, tuple(slice(0, size) for size in tensors.shape(name)))


def _target_ids(tensors: Tensors, target: Model) -> np.ndarray:
  """The target's tokens that a reduced head guesses, int64 `[Vd]`; `d2t` has their distances from the head's ids."""
  distances = _read_whole(tensors, 'd2t')
  ids = distances.astype(np.int64) + np.arange(len(distances))
  size = target.vocab_size
  if not ((distances >= -len(ids)) & (distances < size) & (ids >= 0) & (ids < size)).all():
    raise ValueError(f"d2t names tokens that are not among the target's {size}")
  return ids


def _check_marks(tensors: Tensors, target: Model, ids: np.ndarray | None) -> None:
  """Checks the marks of the tokens that a head guesses, all if it has no `d2t`."""
  if tensors.shape('t2d') != (target.vocab_size,):
    raise ValueError(f't2d has shape {tensors.shape("t2d")}, and the target has {target.vocab_size} tokens')
  tokens = np.arange(target.vocab_size)
  differing = np.flatnonzero(_read_whole(tensors, 't2d') != (True if ids is None else np.isin(tokens, ids)))
  if differing.size and ids is None:
    raise ValueError(f't2d leaves out token {differing[0]}, and there is no d2t')
  if differing.size:
    raise ValueError(f't2d and d2t contradict each other, first at token {differing[0]}')


def _is_head_of(target: Model, ids: np.ndarray | None, tensors: Tensors, name: str) -> bool:
  """Whether a tensor is the target's output head, or its rows of some tokens, up to the rounding of weights.

  Both are applied to a few short random vectors, for which soft caps change nothing.
  """
  assert target.unembed_fn is not None
  shape, width = tensors.shape(name), target_sizes(target).width
  probe = np.random.default_rng(0).normal(size=(4, width)).astype(np.float32) / 100
  logits = np.asarray(target.unembed_fn(target.params, probe), np.float32)
  if ids is not None and shape[:1] != (target.vocab_size,):
    logits = logits[:, ids]
  if shape != (logits.shape[1], width):
    return False
  parts = (tensors.read(name, (rows, slice(0, width))) for rows in row_ranges(shape[0], width))
  expected = np.concatenate([probe @ part.astype(np.float32).T for part in parts], axis=1)
  where = np.isfinite(logits)  # a target may have more columns than tokens
  return bool(np.linalg.norm((logits - expected)[where]) <= _ROUNDING * np.linalg.norm(expected[where]))


def _check_beside(layout: Layout, tensors: Tensors, target: Model, ids: np.ndarray | None) -> None:
  """Compares what stands beside a head's own tensors with what it follows from, see `is_beside`."""
  names = sorted(name for name in tensors.names() if name.startswith(layout.prefix))
  rope = layout.blocks.rope
  check_buffers(tensors, [name for name in names if name.endswith(FREQUENCIES)], [] if rope is None else [rope])
  if 't2d' in names:
    _check_marks(tensors, target, ids)
  for name in names:
    if name.endswith('verifier_lm_head.weight') and target.unembed_fn and not _is_head_of(target, ids, tensors, name):
      warnings.warn(
        f"{name} is not the target's output head: this head was trained for another target, and may guess badly",
        stacklevel=2,
      )


def _load_head(layout: Layout, tensors: Tensors, target: Model) -> Drafter:
  config, sources = layout.config, names_and_shapes(layout)
  wanted = {name: leaf.shape[::-1] if is_transposed(path) else leaf.shape for path, (name, leaf) in sources.items()}
  check_tensors(tensors, wanted, lambda name: is_beside(layout.prefix, name), integers=('d2t',))
  target.with_features(config.feature_layers)  # refuses layers that the target does not have
  params: dict[str, Any] = {}
  ids: np.ndarray | None = None
  for path, (name, leaf) in sources.items():
    if path == 'target_ids':
      array = ids = _target_ids(tensors, target)
    else:
      array = _read_whole(tensors, name)
    inner: Any = params
    *modules, last = path.split('/')
    for module in modules:
      inner = inner.setdefault(module, {})
    inner[last] = jnp.asarray((array.T if is_transposed(path) else array).astype(leaf.dtype))
  _check_beside(layout, tensors, target, ids)
  if not config.has_unembedding:
    params['unembedding'] = output_head_rows(target, ids, layout.param_shapes['unembedding'].dtype)
  if has_blocks(target.params):
    params = _in_blocks(params)
  if isinstance(config, OnePassConfig):
    return one_pass_drafter(params, config, target.vocab_size)
  return head_drafter(params, config, target.vocab_size)


def _in_blocks(params: dict[str, Any]) -> dict[str, Any]:
  """The parameters of a head with its large matrices in blocks, which are multiplied as fast as its target's."""

  def convert(keys, leaf):
    is_product = keys[-1].key in ('kernel', 'unembedding') and leaf.ndim == 2 and leaf.shape[0] % 32 == 0
    return rounded_to_blocks(np.asarray(leaf, np.float32)) if is_product and leaf.size >= LARGE else leaf

  return jax.tree_util.tree_map_with_path(convert, params)


def _load_medusa(spec: Mapping[str, Any], tensors: Tensors, target: Model, dtype: str | None) -> Drafter:
  parts = {name: match.groups() for name in tensors.names() if (match := re.fullmatch(_MEDUSA_NAME, name))}
  prefix = 'medusa_head.' if any(name.startswith('medusa_head.') for name in parts) else ''
  num_heads = 1 + max(int(number) for number, _, _ in parts.values())
  if num_heads > len(parts):
    raise ValueError(f'the checkpoint names Medusa head {num_heads - 1}, but has {len(parts)} tensors')
  if any(int(layer) > 0 and rest.startswith('linear') for _, layer, rest in parts.values()):
    raise ValueError('the Medusa heads have several residual layers; one is read')
  sizes = target_sizes(target)
  has_unembedding = f'{prefix}0.1.weight' in parts
  stored = spec.get('dtype') or spec.get('torch_dtype')
  dtype = dtype or (stored if stored in ('float32', 'bfloat16') else 'float32')
  config = MedusaConfig(num_heads, sizes.width, sizes.vocab_size, dtype, has_unembedding)
  leaves = {'0.linear.weight': (sizes.width,) * 2, '0.linear.bias': (sizes.width,)}
  leaves |= {'1.weight': (sizes.vocab_size, sizes.width)} if has_unembedding else {}
  wanted = {f'{prefix}{i}.{leaf}': shape for i in range(num_heads) for leaf, shape in leaves.items()}
  check_tensors(tensors, wanted, lambda name: False)

  def stack(leaf):
    each = [_read_whole(tensors, f'{prefix}{i}.{leaf}').T for i in range(num_heads)]
    return jnp.asarray(np.stack(each).astype(dtype))

  residual = {'kernel': stack('0.linear.weight'), 'bias': stack('0.linear.bias')}
  unembedding = stack('1.weight') if has_unembedding else output_head_rows(target, None, dtype)
  return medusa_drafter({'residual': residual, 'unembedding': unembedding}, config)


@dataclasses.dataclass(frozen=True)
class HeadFiles:
  """A published head on disk, of which little is read before it is asked for."""

  path: str
  format: str  # see `formats`
  prefix: str  # of the names that belong to it
  is_part: bool  # whether it stands among the tensors of its target
  spec: Mapping[str, Any]  # the checked `config.json`
  tensors: Tensors

  @property
  def num_params(self) -> int:
    """The number of parameters that the files hold for the head, ids not counted."""
    own = [name for name in self.tensors.names() if not is_beside(self.prefix, name) and name != 'd2t']
    return sum(math.prod(self.tensors.shape(name)) for name in own)

  def load(self, target: Model, *, dtype: str | None = None) -> Drafter:
    """Reads the head."""
    with named(self.path):
      if self.format == assistant_format.FORMAT:
        return assistant_format.load_assistant(self.spec, self.tensors, target, dtype)
      if self.format == MEDUSA:
        return _load_medusa(self.spec, self.tensors, target, dtype)
      try:
        layout = READERS[self.format](Described(self.spec, self.tensors, target_sizes(target), dtype))
      except KeyError as error:
        raise ValueError(f'the configuration of the head has no {error.args[0]}') from error
      return _load_head(layout, self.tensors, target)


def _open_tensors(path: epath.PathLike, folder: epath.Path) -> Tensors:
  if not any(folder.glob('*.safetensors')):
    folder = hub_folder(path, files=_TORCH_FILES)
    for name in _TORCH_FILES:
      if (folder / name).exists():
        return TorchFile(folder / name)
  alone = 'medusa_lm_head.safetensors'
  return SafetensorsFolder(folder, alone if (folder / alone).exists() else 'model.safetensors')


def open_head(path: epath.PathLike) -> HeadFiles | None:
  """The files of a published head, or None if there is none at the path; `ValueError` if a file is damaged."""
  folder = hub_folder(path, files=_DOWNLOADED)
  if folder.suffix == '.gguf' or not (folder / 'config.json').exists():
    return None
  with named(folder):
    spec = text_spec(read_json(folder), f'{folder}/config.json')
    tensors = _open_tensors(path, folder)
    names = tensors.names()
    format_and_prefix = find_format(spec, names)
    if format_and_prefix is None:
      return None
    has_model = any(name.endswith('model.norm.weight') for name in names)
    has_model = has_model and format_and_prefix[0] != assistant_format.FORMAT  # it has a norm of that name itself
    spec = checked_spec(spec, f'{folder}/config.json')
    return HeadFiles(str(folder), *format_and_prefix, has_model, spec, tensors)


def load_drafter(path: epath.PathLike, target: Model, *, dtype: str | None = None) -> Drafter:
  """Reads a published head as a drafter.

  Known are EAGLE-1, 2 and 3, P-EAGLE, the speculators format, DFlash 1 and 2, DSpark, Medusa-1, MTP and
  assistants of Gemma 4, whose targets are Gemma 4.
  A head without an output head takes the target's rows, once. A head without an embedding reads the target's.

  Args:
    path: A folder with `config.json` and safetensors files or `pytorch_model.bin` (for Medusa `medusa_lm_head.pt` or
      `.safetensors`), or its name `ORG/NAME` on the hub. Pickled files are read without executing anything. An MTP head
      is read from the folder of its target.
    target: The target that it was trained for.
    dtype: The dtype to hold parameters and to compute in, `float32` or `bfloat16`; None for the one in `config.json`,
      or for float32 where that is another one or missing.

  Raises:
    ValueError: There is no head of a known format, a file is missing or damaged, it does something that is not
      computed here, or it does not fit the target.
  """
  files = open_head(path)
  if files is None:
    raise ValueError(f'no head at {path}: expected a folder with config.json and the weights of {_KNOWN}')
  return files.load(target, dtype=dtype)
