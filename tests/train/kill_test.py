"""Training that is killed at random moments, again and again, ends like training that is not."""

import random
import time

import commands
import jax
import numpy as np
import pytest
import safetensors.numpy

from spectr_jax import load_model
from tests.train.train_test import lines_of
from train.checkpoint import steps_in

_NUM_KILLS = 10

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('own_programs')]


def kill_once(module, arguments, workdir, rng, from_start):
  """Kills a command some time after its start, or after a line of metrics; returns whether that was before its end."""
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
  assert steps_in(killed / 'checkpoints') == steps_in(straight / 'checkpoints')
  assert lines_of(killed) == lines_of(straight)
  jax.tree.map(np.testing.assert_array_equal, params_of(killed), params_of(straight))
  assert (killed / 'run.json').read_bytes() == (straight / 'run.json').read_bytes()


def test_a_model(tmp_path, make_flags):
  arguments = make_flags(num_steps=900, log_every=3, eval_every=20, checkpoint_every=10, patience=100)
  assert_kills_change_nothing('train.main', arguments, tmp_path, lambda path: load_model(path / 'model')[0].params)


def test_a_head(tmp_path, target_folder):
  fields = {
    'num_shards': 4, 'rows_per_shard': 8, 'max_user_tokens': 8, 'max_new_tokens': 12, 'dtype': 'float32',
    'data_dtype': 'float32', 'batch_size': 4, 'num_steps': 300, 'warmup_steps': 2, 'log_every': 2, 'eval_every': 50,
    'checkpoint_every': 5, 'mesh': 'data:1,model:1',
  }  # fmt: skip
  fields = (f'--config.{name}={value}' for name, value in fields.items())
  arguments = ['--config=configs/head.py:medusa', f'--target={target_folder}', *fields]

  def params_of(workdir):
    return safetensors.numpy.load_file(workdir / 'head' / 'medusa_lm_head.safetensors')

  assert_kills_change_nothing('train.head', arguments, tmp_path, params_of)
