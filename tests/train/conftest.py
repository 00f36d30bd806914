"""A small text, a tokenizer for it, and a configuration that trains on it in seconds."""

import random

import hub_specs
import pytest
import safetensors.numpy
import tiny_hub

from configs import base
from spectr_jax.io.tokenizer import Tokenizer
from train.train import train

VOCAB_SIZE = 300


@pytest.fixture(scope='session')
def documents():
  """400 documents of 4 to 12 lower-case words."""
  rng = random.Random(0)
  words = [''.join(rng.choices('etaoinshrdlu', k=rng.randint(2, 6))) for _ in range(80)]
  return [' '.join(rng.choices(words, k=rng.randint(4, 12))) for _ in range(400)]


@pytest.fixture(scope='session')
def corpus(tmp_path_factory, documents):
  """The documents as a file, blank lines between them."""
  path = tmp_path_factory.mktemp('corpus') / 'corpus.txt'
  path.write_text('\n\n'.join(documents) + '\n')
  return path


@pytest.fixture(scope='session')
def tokenizer(documents):
  return Tokenizer.train(documents, VOCAB_SIZE)


@pytest.fixture(scope='session')
def tokenizer_path(tmp_path_factory, tokenizer):
  path = tmp_path_factory.mktemp('tokenizer') / 'tokenizer.json'
  tokenizer.save(path)
  return path


@pytest.fixture(scope='session')
def make_config(corpus, tokenizer_path):
  """Makes a configuration: 12 steps of a network of some thousand parameters, a checkpoint every 3."""

  def make():
    config = base.get_config()
    config.update(
      source='files', files=str(corpus), held_out_percent=10.0, tokenizer=str(tokenizer_path), vocab_size=VOCAB_SIZE,
      seq_len=24, batch_size=4, num_steps=12, warmup_steps=2, learning_rate=1e-2, log_every=2, eval_every=6,
      eval_batches=2, checkpoint_every=3, keep_checkpoints=2,
    )  # fmt: skip
    config.model.update(embed_dim=16, num_layers=1, num_heads=2, mlp_dim=32)
    return config

  return make


@pytest.fixture(scope='session')
def make_flags(make_config):
  """Makes arguments of `train.main` that say the same, with other values for some fields by dotted name."""

  def make(**changes):
    flat = make_config().to_dict()
    flat |= {f'model.{name}': value for name, value in flat.pop('model').items()}
    return ['--config=configs/base.py', *(f'--config.{name}={value}' for name, value in (flat | changes).items())]

  return make


@pytest.fixture
def config(make_config):
  return make_config()


@pytest.fixture(scope='session')
def finished(tmp_path_factory, make_config):
  """A run of 12 steps, with checkpoints of steps 9 and 12."""
  workdir = tmp_path_factory.mktemp('finished') / 'run'
  train(make_config(), workdir)
  return workdir


@pytest.fixture(scope='session')
def target_folder(tmp_path_factory):
  """A public model of 6 layers and 310 tokens, with a chat template."""
  spec = hub_specs.SPECS['llama'] | {
    'vocab_size': 310, 'num_hidden_layers': 6, 'max_position_embeddings': 128, 'tie_word_embeddings': True,
    'eos_token_id': tiny_hub.SPECIAL['<|im_end|>'],
  }  # fmt: skip
  folder = tiny_hub.write(tmp_path_factory.mktemp('target') / 'hub', config=spec, chat_template=tiny_hub.CHAT)
  safetensors.numpy.save_file(
    {name: 0.5 * x for name, x in tiny_hub.tensors_of(spec).items()}, folder / 'model.safetensors'
  )
  return folder
