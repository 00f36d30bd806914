"""Training that is killed at random moments, again and again, ends like training that is not."""

import json
import random
import time

import commands
import hub_specs
import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny_hub

from spectr_jax import load_model

_NUM_KILLS = 10
_TIMED = 'tokens_per_second', 'teraflops_per_device', 'seconds_per_step'

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('own_programs')]


def lines_of(workdir):
  """Metrics without what depends on the clock."""
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  return [{name: value for name, value in line.items() if name not in _TIMED} for line in lines]


def steps_of(workdir):
  return sorted(path.name for path in (workdir / 'checkpoints').iterdir() if path.name.isdigit())


def kill_once(module, arguments, workdir, rng, from_start):
  """Starts a command and kills it: some time after its start, or some time after a line of metrics.

  Returns:
    Whether it was killed before its end.
  """
  process = commands.start(module, *arguments, f'--workdir={workdir}')
  log = workdir / 'metrics.jsonl'

  def changed():
    return log.stat().st_mtime_ns if log.exists() else 0

  try:
    before = changed()
    while not from_start and changed() == before and process.poll() is None:
      time.sleep(0.002)
    time.sleep(rng.uniform(0, 6) if from_start else rng.uniform(0, 0.5))
    return process.poll() is None
  finally:
    process.kill()
    process.communicate()


def assert_kills_change_nothing(module, arguments, tmp_path, params_of):
  straight, killed, rng, num_killed = tmp_path / 'straight', tmp_path / 'killed', random.Random(0), 0
  commands.finish(commands.start(module, *arguments, f'--workdir={straight}'))
  for i in range(_NUM_KILLS):
    num_killed += kill_once(module, arguments, killed, rng, from_start=i % 3 == 2)
  out = commands.finish(commands.start(module, *arguments, f'--workdir={killed}'))
  assert 'held-out' in out
  print(f'killed {num_killed} times')
  assert num_killed >= _NUM_KILLS // 2
  assert steps_of(killed) == steps_of(straight)
  assert lines_of(killed) == lines_of(straight)
  jax.tree.map(np.testing.assert_array_equal, params_of(killed), params_of(straight))
  states = ((workdir / 'run.json').read_bytes() for workdir in (killed, straight))
  assert len(set(states)) == 1


def test_a_model(tmp_path, corpus, tokenizer_path):
  fields = {
    'source': 'files', 'files': corpus, 'held_out_percent': 10.0, 'tokenizer': tokenizer_path, 'vocab_size': 300,
    'seq_len': 24, 'batch_size': 4, 'num_steps': 900, 'warmup_steps': 2, 'log_every': 3, 'eval_every': 20,
    'eval_batches': 2, 'checkpoint_every': 10, 'patience': 100, 'model.embed_dim': 16, 'model.num_layers': 1,
    'model.num_heads': 2, 'model.mlp_dim': 32,
  }  # fmt: skip
  arguments = ['--config=configs/base.py', *(f'--config.{name}={value}' for name, value in fields.items())]
  assert_kills_change_nothing('train.main', arguments, tmp_path, lambda path: load_model(path / 'model')[0].params)


def test_a_head(tmp_path):
  spec = hub_specs.SPECS['llama'] | {
    'vocab_size': 310, 'num_hidden_layers': 2, 'max_position_embeddings': 128, 'tie_word_embeddings': True,
    'eos_token_id': tiny_hub.SPECIAL['<|im_end|>'],
  }  # fmt: skip
  target = tiny_hub.write(tmp_path / 'hub', config=spec, chat_template=tiny_hub.CHAT)
  safetensors.numpy.save_file(
    {name: 0.5 * x for name, x in tiny_hub.tensors_of(spec).items()}, target / 'model.safetensors'
  )
  fields = {
    'num_shards': 4, 'rows_per_shard': 8, 'max_user_tokens': 8, 'max_new_tokens': 12, 'dtype': 'float32',
    'data_dtype': 'float32', 'batch_size': 4, 'num_steps': 300, 'warmup_steps': 2, 'log_every': 2, 'eval_every': 50,
    'checkpoint_every': 5, 'mesh': 'data:1,model:1',
  }  # fmt: skip
  fields = (f'--config.{name}={value}' for name, value in fields.items())
  arguments = ['--config=configs/head.py:medusa', f'--target={target}', *fields]

  def params_of(workdir):
    return safetensors.numpy.load_file(workdir / 'head' / 'medusa_lm_head.safetensors')

  assert_kills_change_nothing('train.head', arguments, tmp_path, params_of)
