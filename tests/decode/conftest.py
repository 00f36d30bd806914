"""Tiny models and prompts on disk."""

import functools

import jax
import pytest
import small_head

from decode.experiment.options import DecodeOptions
from spectr_jax import Tokenizer, save_model
from spectr_jax.models import causal_lm, transformer

_TEXT = 'the quick brown fox jumps over the lazy dog while seven wise owls watch from the old oak tree ' * 4


@pytest.fixture(scope='session')
def tokenizer():
  return Tokenizer.train(['an old oak tree and an old owl in the old oak tree, while a quick fox runs by'] * 3, 275)


@pytest.fixture(scope='session')
def save_tiny_model():
  """`(path, seed, text) -> path`: writes a fresh model of 320 tokens with a tokenizer of `text`."""
  # Enough tokens for every letter of a text: the trainer picks among rare letters at random, and tests would as well.
  init_params = jax.jit(transformer.init_params, static_argnames='config')
  train = functools.cache(lambda text: Tokenizer.train([text], 320))

  def save_tiny_model(path, seed, text=_TEXT):
    tokenizer = train(text)
    config = causal_lm.lm1b_config(320, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=16, context_length=64)
    params = init_params(jax.random.key(seed), config=config)
    save_model(path, causal_lm.causal_lm(params, config), tokenizer)
    return str(path)

  return save_tiny_model


@pytest.fixture(scope='session')
def pair(tmp_path_factory, save_tiny_model):
  """Paths of a tiny target and draft, as keyword arguments."""
  directory = tmp_path_factory.mktemp('models')
  return {role: save_tiny_model(directory / role, seed) for seed, role in enumerate(('target', 'draft'))}


@pytest.fixture(scope='session')
def tiny_head_file(tmp_path_factory):
  """The path of a head for the tiny target."""
  return small_head.save_head(tmp_path_factory.mktemp('heads') / 'head')


@pytest.fixture(scope='session')
def prompt_file(tmp_path_factory):
  """Three prompts, two of which have an id."""
  path = tmp_path_factory.mktemp('prompts') / 'prompts.jsonl'
  path.write_text('{"prompt": "the quick", "id": "a"}\n{"prompt": "seven wise owls"}\n{"prompt": "old", "id": 7}\n')
  return path


@pytest.fixture(scope='session')
def small_options(pair, prompt_file):
  """`(*methods, **changes) -> DecodeOptions`: the tiny pair on three prompts in batches of two, K = L = 2."""
  sizes = {'num_drafts': (2,), 'draft_length': (2,), 'batch_size': 2, 'max_new_tokens': 6}

  def small_options(*methods, **changes):
    return DecodeOptions.of(**{**pair, 'prompts': str(prompt_file), 'method': methods, **sizes, **changes})

  return small_options
