"""Training data for heads: conversations that the target holds with itself, and its hidden states of every token.

Behind the mark with which the chat template opens a user's message the target writes the message itself, or it is
given; then the target answers. The hidden states are those of the same run, so the target sees each token once.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import zipfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from spectr_jax import Decoder, Model, SamplingParams
from spectr_jax.engine import DecodeState, decode_rounds, init_decode
from spectr_jax.io.new_files import new_file
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.io.untrusted import one_line

_PROBES = 'red', 'blue'  # two messages that begin and end with different tokens
_ARRAYS = 'tokens', 'lengths', 'starts', 'features'  # of a shard


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
    with new_file(path) as file:
      np.savez(file, **vars(self) | {'features': self.features.view(np.uint16)})

  @classmethod
  def load(cls, path: os.PathLike) -> Shard:
    """Reads a shard; a `ValueError` if it is none, or an array differs from its checksum."""
    try:
      with np.load(path) as archive:
        if changed := archive.zip.testzip():
          raise ValueError(f'{changed} has another checksum')
        arrays = {name: archive[name] for name in _ARRAYS}
    except Exception as error:  # zipfile and NumPy raise many types
      raise ValueError(f'{path} is damaged: {one_line(error)}') from error
    return cls(**arrays | {'features': arrays['features'].view(ml_dtypes.bfloat16)})


def shard_checksums(path: os.PathLike) -> list[int]:
  """The checksums of a shard's arrays, as its archive has them."""
  with zipfile.ZipFile(path) as archive:
    return [archive.getinfo(f'{name}.npy').CRC for name in _ARRAYS]


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
