"""Training data for heads: conversations that the target holds with itself, and its hidden states of every token.

A shard is made in two steps. Behind the mark with which the chat template opens a user's message the target writes the
message itself; then it answers. So no text of others is needed, and every token has the target's own distribution. Or
the messages are given, and the answers alone are the target's. The hidden states are those of the same run, so the
target sees each token once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pathlib
import re
import struct
import zipfile
from collections.abc import Sequence
from typing import IO, Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import decode_rounds
from spectr_jax.engine.state import DecodeState, init_decode
from spectr_jax.io.foreign import open_file
from spectr_jax.io.new_files import NewFile
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.model import Model
from spectr_jax.sampling import SamplingParams

_PROBES = 'red', 'blue'  # two messages that begin and end with different tokens
# What reading an archive or an array in it may raise.
_DAMAGE = (zipfile.BadZipFile, ValueError, struct.error, OSError, EOFError, NotImplementedError, RuntimeError)


@dataclasses.dataclass(frozen=True)
class Sizes:
  """What a shard holds.

  Attributes:
    num_rows: Conversations.
    max_user_tokens: The longest message of the user; longer ones are cut.
    max_new_tokens: The longest answer; longer ones are cut.
    user_temperature: Temperature of the messages.
    temperatures: Temperatures of the answers, row by row in turn.
  """

  num_rows: int
  max_user_tokens: int
  max_new_tokens: int
  user_temperature: float
  temperatures: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Shard:
  """Conversations with the target's hidden states.

  Attributes:
    tokens: int32 `[R, S]`, the rendered conversations, 0 behind their ends.
    lengths: int32 `[R]`, their tokens.
    starts: int32 `[R]`, the first token that the target wrote: what comes before is the template's.
    features: bfloat16 `[R, S, F, D]`, hidden states of all tokens but the last of each row; the last layer is the input
      of the output head.
  """

  tokens: np.ndarray
  lengths: np.ndarray
  starts: np.ndarray
  features: np.ndarray

  def save(self, path: pathlib.Path) -> None:
    """Writes the shard; a file of this name is complete.

    Args:
      path: The file, `.npz`.
    """
    file = NewFile(path)
    try:
      arrays = {name: getattr(self, name) for name in ('tokens', 'lengths', 'starts')}
      try:
        np.savez(file.file, **arrays, features=self.features.view(np.uint16))
      except OSError as error:
        raise ValueError(f'cannot write {path}: {error.strerror or error}') from error
      file.commit()
    finally:
      file.discard()

  @classmethod
  def load(cls, path: pathlib.Path) -> Shard:
    """Opens a shard. Hidden states stay on disk until rows of them are taken: a batch takes few of them.

    Args:
      path: The file.

    Raises:
      ValueError: It is no shard.
    """
    features = _mapped_features(path).view(ml_dtypes.bfloat16)
    return cls(**_small_arrays(path, features.shape), features=features)


def _damaged(path: os.PathLike, error: Exception) -> ValueError:
  text = str(error)  # may have names of the archive in it
  return ValueError(f'{path} is damaged: {text if text.isprintable() and len(text) <= 200 else ascii(text[:100])}')


# Types that each array of a shard may have, and its number of dimensions.
_ARRAYS = {
  'tokens': (('<i4',), 2), 'lengths': (('<i4', '<i8'), 1), 'starts': (('<i4', '<i8'), 1), 'features': (('<u2',), 4),
}  # fmt: skip
_NPY_1 = b'\x93NUMPY\1\0'
_NPY_HEADER = re.compile(r"\{'descr': '([^']*)', 'fortran_order': False, 'shape': \(([0-9, ]*)\), \} *\n")
_MAX_ENTRIES = 16
_MAX_TOKENS = 2**26


def _members(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
  """The arrays of a shard as its archive lists them. All are stored as they are, one behind the other.

  Raises:
    ValueError: It is no shard.
  """
  found = archive.infolist()[:_MAX_ENTRIES]
  members = {info.filename.removesuffix('.npy'): info for info in found}
  if members.keys() != _ARRAYS.keys() or len(found) != len(members):
    raise ValueError('it holds other arrays')
  if any(info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 for info in found):
    raise ValueError('an array is compressed')
  if sum(max(info.file_size, info.compress_size) for info in found) > size:
    raise ValueError('its arrays are larger than the file')
  return members


def _read_header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], np.dtype]:
  """The shape and type of an array at whose beginning a file is.

  Raises:
    ValueError: It has another type or number of dimensions.
  """
  start = file.read(10)
  if len(start) < 10 or not start.startswith(_NPY_1):
    raise ValueError(f'{name} is no array')
  text = file.read(int.from_bytes(start[8:], 'little')).decode('latin1')
  types, num_dimensions = _ARRAYS[name]
  found = _NPY_HEADER.fullmatch(text)
  if found is None or found[1] not in types:
    raise ValueError(f'{name} has another type than {" or ".join(types)}')
  shape = tuple(int(size[:20]) for size in found[2].split(',') if size.strip())
  if len(shape) != num_dimensions:
    raise ValueError(f'{name} has {len(shape)} dimensions')
  if min(shape) < 1:
    raise ValueError(f'{name} is empty')
  return shape, np.dtype(found[1])


def _mapped_features(path: os.PathLike) -> np.ndarray:
  """The hidden states of a file as they lie there, uncompressed."""
  try:
    with open_file(path) as file:
      size = os.fstat(file.fileno()).st_size
      with zipfile.ZipFile(file) as archive:
        info = _members(archive, size)['features']
      # A member's header: 26 bytes, then the lengths of its name and of another field, then both of these.
      file.seek(info.header_offset + 26)
      file.seek(sum(struct.unpack('<HH', file.read(4))), os.SEEK_CUR)
      start = file.tell()
      shape, _ = _read_header(file, 'features')
      if file.tell() - start + 2 * math.prod(shape) != info.file_size or start + info.file_size > size:
        raise ValueError('features have another size')
      return np.memmap(cast(Any, file), np.uint16, mode='r', offset=file.tell(), shape=shape)
  except _DAMAGE as error:
    raise _damaged(path, error) from error


def _small_arrays(path: os.PathLike, features: tuple[int, ...]) -> dict[str, np.ndarray]:
  """The arrays of a shard without the hidden states, compared with these."""
  shapes = {'tokens': features[:2], 'lengths': features[:1], 'starts': features[:1]}
  arrays = {}
  try:
    if math.prod(features[:2]) > _MAX_TOKENS:
      raise ValueError(f'it has more than {_MAX_TOKENS:,} tokens')
    with open_file(path) as file, zipfile.ZipFile(file) as archive:
      members = _members(archive, os.fstat(file.fileno()).st_size)
      for name in shapes:
        with archive.open(members[name]) as member:
          shape, dtype = _read_header(member, name)
          if shape != shapes[name]:
            raise ValueError(f'{name} and features have different sizes')
          arrays[name] = np.frombuffer(member.read(dtype.itemsize * math.prod(shape)), dtype).reshape(shape)
    lengths, starts, tokens = arrays['lengths'], arrays['starts'], arrays['tokens']
    if tokens.min() < 0 or not ((starts >= 0) & (starts <= lengths) & (lengths <= tokens.shape[1])).all():
      raise ValueError('a token, a length or a start is not valid')
  except _DAMAGE as error:
    raise _damaged(path, error) from error
  return arrays


def check_shard(path: os.PathLike, vocab_size: int) -> tuple[int, ...]:
  """The shape of a shard's features. The whole file is compared with its checksums, as `Shard.load` does not.

  Args:
    path: The file.
    vocab_size: V, the target's.

  Raises:
    ValueError: It is no shard, it has changed since it was written, or it has tokens that the target has not.
  """
  shape = _mapped_features(path).shape
  largest = _small_arrays(path, shape)['tokens'].max()
  if largest >= vocab_size:
    raise ValueError(f'{path} has token {largest}, and the target has {vocab_size}')
  try:
    with open_file(path) as file, zipfile.ZipFile(file) as archive:
      changed = archive.testzip()
  except _DAMAGE as error:
    raise _damaged(path, error) from error
  if changed is not None:
    raise ValueError(f'{path} is damaged: {changed} has another checksum')
  return shape


def shard_checksums(path: os.PathLike) -> list[int]:
  """The checksums of a shard's arrays, as its archive has them.

  Args:
    path: The file.

  Raises:
    ValueError: It is no shard.
  """
  try:
    with open_file(path) as file, zipfile.ZipFile(file) as archive:
      members = _members(archive, os.fstat(file.fileno()).st_size)
  except _DAMAGE as error:
    raise _damaged(path, error) from error
  return [members[name].CRC for name in _ARRAYS]


def chat_frame(tokenizer: TokenizerBase) -> tuple[list[int], list[int]]:
  """The ids that the chat template puts before and after the first message of a user.

  Args:
    tokenizer: The target's tokenizer.

  Raises:
    ValueError: The target has no chat template.
  """
  one, other = (tokenizer.encode_chat([{'role': 'user', 'content': text}]) for text in _PROBES)

  def shared(one, other):
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]

  before, after = shared(one, other), shared(one[::-1], other[::-1])[::-1]
  if not before or not after:
    raise ValueError("the chat template puts nothing around a user's message, so the target cannot write one")
  return before, after


def _decode(model: Model, prompts, lengths, key, eos_ids, max_new_tokens, layers, temperature) -> DecodeState:
  """The state after autoregressive decoding, with features of `layers` if there are any."""
  cache_size = prompts.shape[1] + max_new_tokens
  decoder = Decoder.make(
    model, None, method='autoregressive', max_new_tokens=max_new_tokens, cache_size=cache_size, eos_id=eos_ids
  )
  # The loop keeps the features that the target returns.
  decoder = dataclasses.replace(decoder, target=model.with_features(layers))
  return decode_rounds(decoder, init_decode(decoder, key, prompts, lengths, sampling=SamplingParams(temperature)))


def _written_messages(model: Model, frame, sizes: Sizes, key: jax.Array) -> list[list[int]]:
  """Messages of the user that the target writes."""
  before, after = frame
  opened = np.tile(np.array(before, np.int32), (sizes.num_rows, 1))
  state = _decode(
    model, opened, np.full(sizes.num_rows, len(before)), key, [after[0]], sizes.max_user_tokens, (),
    sizes.user_temperature,
  )  # fmt: skip
  written, counts = np.asarray(state.result.tokens), np.asarray(state.result.lengths)
  return [row[: count - (row[count - 1] == after[0])].tolist() for row, count in zip(written, counts)]


def _given_messages(tokenizer: TokenizerBase, frame, sizes: Sizes, texts: Sequence[str]) -> list[list[int]]:
  """Texts as messages of the user, cut to the longest one."""
  before, after = map(len, frame)
  rendered = (tokenizer.encode_chat([{'role': 'user', 'content': text}]) for text in texts)
  return [ids[before : len(ids) - after][: sizes.max_user_tokens] for ids in rendered]


def generate_shard(
  model: Model,
  tokenizer: TokenizerBase,
  sizes: Sizes,
  layers: Sequence[int],
  key: jax.Array,
  texts: Sequence[str] | None = None,
) -> Shard:
  """Generates a shard.

  Args:
    model: The target.
    tokenizer: The target's tokenizer, with a chat template.
    sizes: What the shard holds.
    layers: Layers whose hidden states are kept, numbered as in `Model.features_fn`.
    key: A typed key.
    texts: The messages of the user, one for each row; None for messages that the target writes.
  """
  before, after = frame = chat_frame(tokenizer)
  num_rows = sizes.num_rows
  user_key, answer_key = jax.random.split(key)
  if texts is None:
    messages = _written_messages(model, frame, sizes, user_key)
  else:
    messages = _given_messages(tokenizer, frame, sizes, texts)
  width = len(before) + sizes.max_user_tokens + len(after)
  prompts, lengths = np.zeros((num_rows, width), np.int32), np.zeros(num_rows, np.int32)
  for row, message in enumerate(messages):
    prompt = [*before, *message, *after]
    prompts[row, : len(prompt)], lengths[row] = prompt, len(prompt)
  temperatures = np.resize(np.array(sizes.temperatures, np.float32), num_rows)
  state = _decode(
    model, prompts, lengths, answer_key, tokenizer.eos_ids, sizes.max_new_tokens, tuple(layers), temperatures,
  )  # fmt: skip
  answers, counts = np.asarray(state.result.tokens), np.asarray(state.result.lengths)
  tokens = np.zeros((num_rows, width + sizes.max_new_tokens), np.int32)
  tokens[:, :width] = prompts
  for row, count in enumerate(counts):
    tokens[row, lengths[row] : lengths[row] + count] = answers[row, :count]
  features = np.array(state.features.astype(jnp.bfloat16))
  starts = np.full(num_rows, len(before)) if texts is None else lengths
  return Shard(tokens, lengths + counts, starts, features)
