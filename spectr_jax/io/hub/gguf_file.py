"""GGUF, the files of llama.cpp: a model, its configuration and its tokenizer in one file."""

from __future__ import annotations

import os
from typing import Any

from spectr_jax.io.backend import Backend
from spectr_jax.io.hub import gguf_config, gguf_header, gguf_tensors, gguf_tokenizer


class GgufFile:
  """A model in a GGUF file, with the names, shapes and layout that it has on the hub."""

  def __init__(self, path: str | os.PathLike[str]):
    self._header = header = gguf_header.read_header(path)
    metadata = header.metadata
    self.path = header.path
    self.config: dict[str, Any] = gguf_config.hub_config(header)
    self.tensors = gguf_tensors.GgufTensors(header, self.config, gguf_config.architecture_of(header))
    self.chat_template: str | None = metadata.get('tokenizer.chat_template')
    self.bos_id: int | None = metadata.get('tokenizer.ggml.bos_token_id')
    self.eos_ids: tuple[int, ...] = gguf_config.stop_ids(header)
    self.pad_id: int | None = metadata.get('tokenizer.ggml.padding_token_id')
    self.add_bos: bool = self.bos_id is not None and gguf_tokenizer.adds_bos(header)

  def tokenizer(self) -> Backend:
    """The tokenizer, which adds no beginning of a document by itself."""
    return gguf_tokenizer.build_tokenizer(self._header)
