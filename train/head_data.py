"""Training data for heads: conversations that the target holds with itself, and its hidden states of every token.

Behind the mark with which the chat template opens a user's message the target writes the message itself, or it is
given; then the target answers. The hidden states are those of the same run, so the target sees each token once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
import struct
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import decode_rounds
from spectr_jax.engine.reading import init_decode
from spectr_jax.engine.state import DecodeState
from spectr_jax.io.new_files import NewFile
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.io.untrusted import one_line, open_file
from spectr_jax.model import Model
from spectr_jax.sampling import SamplingParams

_PROBES = 'red', 'blue'  # two messages that begin and end with different tokens
# Types that each array of a shard may have, and its number of dimensions.
_ARRAYS = {
  'tokens': (('<i4',), 2), 'lengths': (('<i4', '<i8'), 1), 'starts': (('<i4', '<i8'), 1), 'features': (('<u2',), 4),
}  # fmt: skip
_MAX_HEADER = 200  # bytes of the description of an array
_MAX_TOKENS = 2**26


@dataclasses.dataclass(frozen=True)
class Shard:
  """Conversations with the target's hidden states."""

  tokens: np.ndarray  # int32 `[R, S]`, 0 behind their ends
  lengths: np.ndarray  # int32 `[R]`
  starts: np.ndarray  # int32 `[R]`, the first token that the target wrote: what comes before is the template's
  # bfloat16 `[R, S, F, D]`, of all tokens but each row's last; the last layer is the input of the output head
  features: np.ndarray

  def save(self, path: pathlib.Path) -> None:
    """Writes the shard to a `.npz` file, which is complete or absent."""
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
    """Opens a shard; a `ValueError` if it is none. Hidden states stay on disk until rows of them are taken."""
    arrays = _mapped(path)
    features = arrays.pop('features').view(ml_dtypes.bfloat16)
    return cls(**{name: np.array(array) for name, array in arrays.items()}, features=features)


@contextlib.contextmanager
def _open_archive(path: os.PathLike) -> Iterator[tuple[BinaryIO, zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
  """A shard's file, its archive, and the arrays in it by name, stored as they are; a `ValueError` if it is no shard, or
  if what is read within the context is damaged.
  """
  try:
    with open_file(path) as file, zipfile.ZipFile(file) as archive:
      infos = archive.infolist()
      members = {info.filename.removesuffix('.npy'): info for info in infos}
      if members.keys() != _ARRAYS.keys() or len(infos) != len(members):
        raise ValueError('it holds other arrays')
      if any(info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 for info in infos):
        raise ValueError('an array is compressed')
      yield file, archive, members
  except Exception as error:  # zipfile and NumPy raise many types
    raise ValueError(f'{path} is damaged: {one_line(error)}') from error


def _mapped(path: os.PathLike) -> dict[str, np.ndarray]:
  """The arrays of a shard as they lie in the file, `features` as uint16; a `ValueError` if it is no shard."""
  arrays = {}
  with _open_archive(path) as (file, _, members):
    size = os.fstat(file.fileno()).st_size
    for name, (types, num_dimensions) in _ARRAYS.items():
      # A member's header: 26 bytes, then the lengths of its name and of another field, then both of these.
      file.seek(members[name].header_offset + 26)
      file.seek(sum(struct.unpack('<HH', file.read(4))), os.SEEK_CUR)
      start = file.tell()
      if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError(f'{name} is no array')
      shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=_MAX_HEADER)
      if dtype.str not in types or is_fortran:
        raise ValueError(f'{name} has another type than {" or ".join(types)}')
      if len(shape) != num_dimensions or min(shape) < 1:
        raise ValueError(f'{name} is empty or has {len(shape)} dimensions, not {num_dimensions}')
      num_bytes = file.tell() - start + dtype.itemsize * math.prod(shape)
      if num_bytes != members[name].file_size or start + num_bytes > size:
        raise ValueError(f'{name} has another size')
      arrays[name] = np.memmap(cast(Any, file), dtype, mode='r', offset=file.tell(), shape=shape)
    tokens, lengths, starts, features = (arrays[name] for name in _ARRAYS)
    if math.prod(features.shape[:2]) > _MAX_TOKENS:
      raise ValueError(f'it has more than {_MAX_TOKENS:,} tokens')
    if tokens.shape != features.shape[:2] or not lengths.shape == starts.shape == features.shape[:1]:
      raise ValueError('its arrays have different sizes')
    if tokens.min() < 0 or not ((starts >= 0) & (starts <= lengths) & (lengths <= tokens.shape[1])).all():
      raise ValueError('a token, a length or a start is not valid')
  return arrays


def check_shard(path: os.PathLike, vocab_size: int) -> tuple[int, ...]:
  """The shape of a shard's features. A `ValueError` if it is no shard, has changed since it was written (`Shard.load`
  does not compare checksums), or has tokens that a target with `vocab_size` tokens has not.
  """
  arrays = _mapped(path)
  if (largest := arrays['tokens'].max()) >= vocab_size:
    raise ValueError(f'{path} has token {largest}, and the target has {vocab_size}')
  with _open_archive(path) as (_, archive, _):
    if changed := archive.testzip():
      raise ValueError(f'{changed} has another checksum')
  return arrays['features'].shape


def shard_checksums(path: os.PathLike) -> list[int]:
  """The checksums of a shard's arrays, as its archive has them; a `ValueError` if it is no shard."""
  with _open_archive(path) as (_, _, members):
    return [members[name].CRC for name in _ARRAYS]


def chat_frame(tokenizer: TokenizerBase) -> tuple[list[int], list[int]]:
  """The ids that the chat template puts before and after the first message of a user; `ValueError` without one."""
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


def _written_messages(model: Model, frame, config, key: jax.Array) -> list[list[int]]:
  before, after = frame
  opened = np.tile(np.array(before, np.int32), (config.rows_per_shard, 1))
  state = _decode(
    model, opened, np.full(config.rows_per_shard, len(before)), key, [after[0]], config.max_user_tokens, (),
    config.user_temperature,
  )  # fmt: skip
  written, counts = np.asarray(state.result.tokens), np.asarray(state.result.lengths)
  return [row[: count - (row[count - 1] == after[0])].tolist() for row, count in zip(written, counts)]


def _given_messages(tokenizer: TokenizerBase, frame, config, texts: Sequence[str]) -> list[list[int]]:
  """Texts as messages of the user, cut to the longest one."""
  before, after = map(len, frame)
  rendered = (tokenizer.encode_chat([{'role': 'user', 'content': text}]) for text in texts)
  return [ids[before : len(ids) - after][: config.max_user_tokens] for ids in rendered]


def generate_shard(
  model: Model, tokenizer: TokenizerBase, config, layers: Sequence[int], key: jax.Array,
  texts: Sequence[str] | None = None,
) -> Shard:  # fmt: skip
  """Generates a shard of conversations by an experiment as of `configs/head.py`: `texts` are the messages of the user,
  one for each row; None for messages that the target writes. `layers` are numbered as in `Model.features_fn`.
  """
  before, after = frame = chat_frame(tokenizer)
  num_rows = config.rows_per_shard
  user_key, answer_key = jax.random.split(key)
  if texts is None:
    messages = _written_messages(model, frame, config, user_key)
  else:
    messages = _given_messages(tokenizer, frame, config, texts)
  width = len(before) + config.max_user_tokens + len(after)
  prompts, lengths = np.zeros((num_rows, width), np.int32), np.zeros(num_rows, np.int32)
  for row, message in enumerate(messages):
    prompt = [*before, *message, *after]
    prompts[row, : len(prompt)], lengths[row] = prompt, len(prompt)
  temperatures = np.resize(np.array(config.temperatures, np.float32), num_rows)
  state = _decode(
    model, prompts, lengths, answer_key, tokenizer.eos_ids, config.max_new_tokens, tuple(layers), temperatures,
  )  # fmt: skip
  answers, counts = np.asarray(state.result.tokens), np.asarray(state.result.lengths)
  tokens = np.zeros((num_rows, width + config.max_new_tokens), np.int32)
  tokens[:, :width] = prompts
  for row, count in enumerate(counts):
    tokens[row, lengths[row] : lengths[row] + count] = answers[row, :count]
  features = np.array(state.features.astype(jnp.bfloat16))
  starts = np.full(num_rows, len(before)) if texts is None else lengths
  return Shard(tokens, lengths + counts, starts, features)
