"""Models in Hugging Face's transformers, for `benchmarks.speed` and `benchmarks.drafters`.

They need `pip install torch transformers`. Llama has the same parts as the project's transformer (RMSNorm, rotary
positions, tied embeddings) and a gate in the MLP. With 2/3 of the MLP's hidden width it has as many weights.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from spectr_jax.models.causal_lm_config import CausalLMConfig

_DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16}


def check_device(device: str) -> None:
  """Raises `ImportError` if this torch finds no such device, `cuda` or `cpu`."""
  if device == 'cuda' and not torch.cuda.is_available():
    raise ImportError('this torch finds no CUDA device')


def make_model(config: CausalLMConfig, dtype: str) -> LlamaForCausalLM:
  """A model of the shape of a configuration of the project's transformer, with random weights of a type."""
  torch.set_num_threads(os.cpu_count())
  sizes = LlamaConfig(
    vocab_size=config.vocab_size, hidden_size=config.embed_dim, intermediate_size=2 * config.mlp_dim // 3,
    num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
    max_position_embeddings=config.context_length, hidden_act='gelu', tie_word_embeddings=True, bos_token_id=None,
    eos_token_id=None, pad_token_id=None,
  )  # fmt: skip
  return LlamaForCausalLM(sizes).to(_DTYPES[dtype]).eval()


def make_public(folder: str, dtype: str, device: str):
  """A model of the sizes in a folder's `config.json`, random and made on the device, which never ends by itself."""
  torch.set_num_threads(os.cpu_count())
  torch.manual_seed(0)
  architecture = json.loads((pathlib.Path(folder) / 'config.json').read_text())['architectures'][0]
  made = getattr(transformers, architecture)
  config = made.config_class.from_pretrained(folder)
  config.bos_token_id = config.eos_token_id = config.pad_token_id = None
  before = torch.get_default_dtype()
  torch.set_default_dtype(_DTYPES[dtype])
  try:
    with torch.device(device):
      return made(config).eval()
  finally:
    torch.set_default_dtype(before)


def load_gguf(path: str, dtype: str, device: str = 'cpu'):
  """The model of a GGUF file, dequantized, which never ends by itself; needs `pip install gguf` as well."""
  torch.set_num_threads(os.cpu_count())
  logging.disable_progress_bar()
  file = pathlib.Path(path)
  model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=_DTYPES[dtype])
  model.generation_config.eos_token_id = None
  return model.to(device).eval()


def count_calls(model: LlamaForCausalLM) -> list[int]:
  """A list with one number, which every call of the model increments."""
  counter = [0]

  def add_one(*_):
    counter[0] += 1

  model.register_forward_pre_hook(add_one)
  return counter


def counted(model: LlamaForCausalLM, sample: Callable[[], None]) -> Callable[[], int]:
  """A function that samples, and returns how often it called the model."""
  counter = count_calls(model)

  def call():
    before = counter[0]
    sample()
    return counter[0] - before

  return call


def sampler(model, prompts: np.ndarray, max_new_tokens: int, **options) -> Callable[[], None]:
  """A function that samples so many tokens for every prompt, int `[B, P]`, with further options of `generate`."""
  tokens = torch.tensor(np.asarray(prompts), dtype=torch.long, device=model.device)
  mask = torch.ones_like(tokens)

  def sample():
    with torch.inference_mode():
      generated = model.generate(
        tokens, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=max_new_tokens, **options
      )
    num_new = generated.cpu().shape[1] - tokens.shape[1]  # a GPU has been waited for
    if num_new != max_new_tokens:
      raise RuntimeError(f'{max_new_tokens} tokens were asked for, {num_new} came')

  return sample


def answer(
  model, rows: Sequence[Sequence[int]], max_new_tokens: int, eos_ids: Sequence[int], temperature: float, **options
) -> list[list[int]]:
  """The new tokens of each of B prompts, `[P]` each, with the one of `eos_ids` that may end them. Temperature 0 decodes
  greedily; `options` are further ones of `generate`.
  """
  longest = max(map(len, rows))
  tokens = np.full((len(rows), longest), eos_ids[0])
  mask = np.zeros_like(tokens)
  for number, row in enumerate(rows):
    tokens[number, longest - len(row) :] = row
    mask[number, longest - len(row) :] = 1
  inputs = {'input_ids': tokens, 'attention_mask': mask}
  on_device = {name: torch.tensor(array, dtype=torch.long, device=model.device) for name, array in inputs.items()}
  sampling = {'do_sample': True, 'temperature': temperature, 'top_k': 0} if temperature else {'do_sample': False}
  ends = {'eos_token_id': list(eos_ids), 'pad_token_id': eos_ids[0]}
  with torch.inference_mode():
    generated = model.generate(**on_device, max_new_tokens=max_new_tokens, **sampling, **ends, **options)
  new = generated[:, longest:].cpu().numpy()
  is_end = np.isin(new, eos_ids)
  lengths = np.where(is_end.any(axis=1), is_end.argmax(axis=1) + 1, new.shape[1])
  return [row[:length].tolist() for row, length in zip(new, lengths)]


def compiled_sampler(model, prompts: np.ndarray, max_new_tokens: int) -> Callable[[], None]:
  """`sampler` with a static cache. The model is compiled from now on."""
  model.forward = torch.compile(model.forward)
  return sampler(model, prompts, max_new_tokens, cache_implementation='static')


def assisted_sampler(model, draft, prompts: np.ndarray, max_new_tokens: int, draft_length: int):
  """`sampler` with an assistant model that always guesses the same number of tokens, at temperature 1.

  At another one the assistant would be another draft: transformers 5.24.0 applies the temperature to it twice
  (findings/transformers_assistant_temperature.sh).
  """
  draft.generation_config.num_assistant_tokens = draft_length
  draft.generation_config.num_assistant_tokens_schedule = 'constant'
  draft.generation_config.assistant_confidence_threshold = 0.0
  return sampler(model, prompts, max_new_tokens, assistant_model=draft, temperature=1.0)
