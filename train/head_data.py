"""Training data for heads: conversations that the target holds with itself, and its hidden states of every token.

A shard is made in two steps. Behind the mark with which the chat template opens a user's message the target writes the
message itself; then it answers. So no text of others is needed, and every token has the target's own distribution. Or
the messages are given, and the answers alone are the target's. The hidden states are those of the same run, so the
target sees each token once.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import struct
import zipfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import decode_rounds
from spectr_jax.engine.state import DecodeState, init_decode
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.model import Model

_PROBES = 'red', 'blue'  # two messages that begin and end with different tokens


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
    part = path.with_suffix('.part')
    with part.open('wb') as file:
      arrays = {name: getattr(self, name) for name in ('tokens', 'lengths', 'starts')}
      np.savez(file, **arrays, features=self.features.view(np.uint16))
    os.replace(part, path)

  @classmethod
  def load(cls, path: pathlib.Path) -> Shard:
    """Opens a shard. Hidden states stay on disk until rows of them are taken: a batch takes few of them.

    Args:
      path: The file.

    Raises:
      ValueError: It is no shard.
    """
    features = _mapped_features(path).view(ml_dtypes.bfloat16)
    with np.load(path, allow_pickle=False) as arrays:
      return cls(arrays['tokens'], arrays['lengths'], arrays['starts'], features)


def _mapped_features(path: os.PathLike) -> np.ndarray:
  """The hidden states of a file as they lie there, uncompressed."""
  try:
    with zipfile.ZipFile(path) as archive:
      start = archive.getinfo('features.npy').header_offset
    with open(path, 'rb') as file:
      # A member's header: 26 bytes, then the lengths of its name and of another field, then both of these.
      file.seek(start + 26)
      file.seek(sum(struct.unpack('<HH', file.read(4))), os.SEEK_CUR)
      np.lib.format.read_magic(file)
      shape, _, dtype = np.lib.format.read_array_header_1_0(file)
      return np.memmap(file, dtype, mode='r', offset=file.tell(), shape=shape)
  except (zipfile.BadZipFile, KeyError, ValueError, struct.error) as error:
    raise ValueError(f'{path} is damaged: {error}') from error


def checked_features_shape(path: os.PathLike) -> tuple[int, ...]:
  """The shape of a shard's features. The whole file is compared with its checksums, as `Shard.load` does not.

  Args:
    path: The file.

  Raises:
    ValueError: It is no shard, or it has changed since it was written.
  """
  shape = _mapped_features(path).shape
  with zipfile.ZipFile(path) as archive:
    changed = archive.testzip()
  if changed is not None:
    raise ValueError(f'{path} is damaged: {changed} has another checksum')
  return shape


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


def _decode(model: Model, prompts, lengths, key, eos_ids, max_new_tokens, layers, **sampling) -> DecodeState:
  """The state after autoregressive decoding, with features of `layers` if there are any."""
  cache_size = prompts.shape[1] + max_new_tokens
  decoder = Decoder.make(
    model, None, method='autoregressive', max_new_tokens=max_new_tokens, cache_size=cache_size, eos_id=eos_ids
  )
  # The loop keeps the features that the target returns.
  decoder = dataclasses.replace(decoder, target=model.with_features(layers))
  return decode_rounds(decoder, init_decode(decoder, key, prompts, lengths, **sampling))


def _written_messages(model: Model, frame, sizes: Sizes, key: jax.Array) -> list[list[int]]:
  """Messages of the user that the target writes."""
  before, after = frame
  opened = np.tile(np.array(before, np.int32), (sizes.num_rows, 1))
  state = _decode(
    model, opened, np.full(sizes.num_rows, len(before)), key, [after[0]], sizes.max_user_tokens, (),
    temperature=sizes.user_temperature,
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
    model, prompts, lengths, answer_key, tokenizer.eos_ids, sizes.max_new_tokens, tuple(layers),
    temperature=temperatures,
  )  # fmt: skip
  answers, counts = np.asarray(state.result.tokens), np.asarray(state.result.lengths)
  tokens = np.zeros((num_rows, width + sizes.max_new_tokens), np.int32)
  tokens[:, :width] = prompts
  for row, count in enumerate(counts):
    tokens[row, lengths[row] : lengths[row] + count] = answers[row, :count]
  features = np.array(state.features.astype(jnp.bfloat16))
  starts = np.full(num_rows, len(before)) if texts is None else lengths
  return Shard(tokens, lengths + counts, starts, features)
