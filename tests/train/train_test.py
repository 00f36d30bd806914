"""Runs of `train`: what they write, how they continue, what ends them, and configurations that are refused."""

import json
import math
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import family, lm1b, pretrained_pair, public_text, stdlib_pair
from spectr_jax import load_model
from train import checkpoint
from train import train as train_module
from train.checkpoint import Checkpoints
from train.step import make_train_step
from train.train import check_config, train


def lines_of(workdir):
  """Metrics without what depends on the clock."""
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  timed = 'tokens_per_second', 'teraflops_per_device', 'seconds_per_step'
  return [{name: value for name, value in line.items() if name not in timed} for line in lines]


def train_until(step, config, workdir):
  """Interrupts a run when it takes the batch of a step."""
  batch_at = train_module.batch_at

  def interrupted(text, at, **sizes):
    if at == step:
      raise KeyboardInterrupt
    return batch_at(text, at, **sizes)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(train_module, 'batch_at', interrupted)
    with pytest.raises(KeyboardInterrupt):
      train(config, workdir)


def saved_state(workdir):
  """The newest checkpoint, and which ones there are."""
  steps = checkpoint.steps_in(workdir / 'checkpoints')[::-1]
  return Checkpoints(workdir, 2)._manager.restore(steps[-1]), steps


@pytest.fixture(scope='module')
def straight(tmp_path_factory, make_config):
  """A run from start to end: its directory and what it returned."""
  workdir = tmp_path_factory.mktemp('straight')
  return workdir, train(make_config(), workdir).held_out


def assert_same_run(workdir, straight):
  state, steps = saved_state(workdir)
  wanted, wanted_steps = saved_state(straight)
  assert steps == wanted_steps == [9, 12]  # the newest two
  jax.tree.map(np.testing.assert_array_equal, state, wanted)
  assert lines_of(workdir) == lines_of(straight)
  params, wanted = (load_model(path / 'model')[0].params for path in (workdir, straight))
  jax.tree.map(np.testing.assert_array_equal, params, wanted)


def test_a_run_ends_with_a_model_and_its_metrics(straight):
  workdir, final = straight
  lines = lines_of(workdir)
  steps = [line['step'] for line in lines]
  assert steps == sorted(steps)
  assert [line['step'] for line in lines if 'train_loss' in line] == [2, 3, 4, 6, 8, 9, 10, 12]
  assert [line['step'] for line in lines if 'held_out_loss' in line] == [6, 12]
  assert lines[-1] == {'step': 12, **{f'final_{name}': value for name, value in final.items()}}
  losses = [line['train_loss'] for line in lines if 'train_loss' in line]
  assert losses[-1] < losses[0] - 0.2
  timed = json.loads((workdir / 'metrics.jsonl').read_text().splitlines()[0])
  # Forward and back: six operations per token and each of the 6896 parameters, and attention.
  per_token = timed['teraflops_per_device'] * 1e12 / timed['tokens_per_second']
  assert 6 < per_token / 6896 < 7
  assert any('tfevents' in path.name for path in workdir.iterdir())
  info = json.loads((workdir / 'model' / 'config.json').read_text())['info']
  assert (info['steps'], info['held_out'], list(info['text'])) == (12, final, ['files/corpus.txt', 'held_out'])


def test_an_interrupted_run_ends_like_one_that_was_not(tmp_path, config, straight):
  train_until(7, config, tmp_path / 'run')
  assert saved_state(tmp_path / 'run')[1] == [3, 6]
  # Where a run was, and what a killed process left half-written, does not matter.
  moved = tmp_path / 'moved'
  shutil.move(tmp_path / 'run', moved)
  with (moved / 'metrics.jsonl').open('a') as stream:
    stream.write('{"step": 8, "train_loss": 1.0}\n{"step": 9, "tra')
  (moved / 'checkpoints' / '9.orbax-checkpoint-tmp-1' / 'default').mkdir(parents=True)
  final = train(config, moved)
  assert (final.step, final.held_out) == (12, straight[1])
  assert_same_run(moved, straight[0])
  # Nothing is left to do for a run that has ended.
  assert train(config, moved) == final
  assert_same_run(moved, straight[0])


def test_an_interruption_while_saving_loses_only_that_checkpoint(tmp_path, monkeypatch, config, straight):
  def stopped(self, state):
    if state['step'] == 9:
      raise KeyboardInterrupt
    save(self, state)

  save = Checkpoints.save
  with monkeypatch.context() as patch:
    patch.setattr(Checkpoints, 'save', stopped)
    with pytest.raises(KeyboardInterrupt):
      train(config, tmp_path)
  assert [line['step'] for line in lines_of(tmp_path)][-1] == 9
  train(config, tmp_path)
  assert_same_run(tmp_path, straight[0])


@pytest.mark.parametrize(('at', 'message', 'left'), [
  ({'loss': 8}, 'loss is nan at step 8: stopped', [3, 6]),
  ({'params': 6}, 'parameters are not finite after step 6', [3]),
])  # fmt: skip
def test_what_is_not_finite_stops_and_is_not_saved(tmp_path, monkeypatch, config, at, message, left):
  def make_step(*args, **options):
    step_fn = make_train_step(*args, **options)

    def poisoned(*args):
      state, loss = step_fn(*args)
      broken = {name: jnp.where(state['step'] == at.get(name), jnp.nan, 1.0) for name in ('loss', 'params')}
      params = jax.tree.map(lambda x: x * broken['params'], state['params'])
      return {**state, 'params': params}, loss * broken['loss']

    return poisoned

  monkeypatch.setattr(train_module, 'make_train_step', make_step)
  with pytest.raises(ValueError, match=message):
    train(config, tmp_path)
  state, steps = saved_state(tmp_path)
  assert steps == left
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
  assert all(math.isfinite(value) for line in lines_of(tmp_path) for value in line.values())


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # reads still under way
def test_a_damaged_checkpoint_is_one_clear_line(tmp_path, capfd, config, straight):
  shutil.copytree(straight[0], tmp_path, dirs_exist_ok=True)
  newest = tmp_path / 'checkpoints' / '12'
  (newest / 'default' / '_METADATA').write_text('{"tree')
  wanted = '/12 is damaged.*; with --allow_fallback, training continues from step 9'
  with pytest.raises(ValueError, match=wanted):
    train(config, tmp_path)
  assert 'Traceback' not in capfd.readouterr().err
  # Nothing was changed. On request the one before serves, and the damaged one is kept for whoever wants to look at it.
  assert newest.is_dir()
  outcome = train(config, tmp_path, allow_fallback=True)
  assert (outcome.step, outcome.held_out) == (12, straight[1])
  assert_same_run(tmp_path, straight[0])
  assert (tmp_path / 'damaged_checkpoints' / '12-0').is_dir()
  assert re.search(r'/12 is damaged.*; continuing from step 9', capfd.readouterr().err)


@pytest.mark.parametrize(('field', 'value', 'message'), [
  ('warmup_steps', 12, r'config.warmup_steps must be below config.num_steps, got 12 and 12'),
  ('warmup_steps', -1, 'config.warmup_steps must be a whole number from 0'),
  *(
    (name, 0, f'config.{name} must be a whole number from 1')
    for name in ('num_steps', 'batch_size', 'log_every', 'keep_checkpoints')
  ),
  *(('learning_rate', value, 'config.learning_rate must be a finite number above 0') for value in (math.nan, 0.0)),
  ('max_grad_norm', -1.0, 'config.max_grad_norm must be'),
  ('adam_b2', 1.0, 'config.adam_b2 must be at least 0 and below 1'),
  ('distill_weight', 0.0, 'config.distill_weight must be above 0 and at most 1'),
  ('held_out_percent', 0.0, 'config.held_out_percent must be above 0'),
  ('seq_len', 50000, 'training text of .* tokens is shorter than one row of 50000'),
  ('held_out_percent', 1e-3, 'held-out text of 0 tokens is shorter than one row'),
  ('vocab_size', 4096, 'has 300 tokens but config.vocab_size is 4096'),
  ('tokenizer', 'nothing.json', 'no tokenizer at nothing.json'),
  ('source', 'web', "unknown source 'web'; allowed: files, lm1b, stdlib"),
  ('files', 'nothing.txt', "no file matches 'nothing.txt'"),
  ('model', {'num_heads': 3}, 'config.model: embed_dim 16 must be an even multiple of num_heads 3'),
  ('model', {'width': 3}, 'config.model: .*width'),
])  # fmt: skip
def test_bad_values_are_refused_before_training(tmp_path, config, field, value, message):
  with config.unlocked():
    config[field] = value if field != 'model' else {**config.model, **value}
  with pytest.raises(ValueError, match=message):
    train(config, tmp_path)
  assert not (tmp_path / 'checkpoints').exists()


@pytest.mark.parametrize(('file', 'most'), [(stdlib_pair, 2e6), (pretrained_pair, 8e6)])
def test_the_pairs_configurations_are_sound(file, most):
  target, draft = (check_config(file.get_config(size)) for size in ('target', 'draft'))
  assert draft.num_params * 4 < target.num_params < most
  assert draft.vocab_size == target.vocab_size
  assert file.get_config() == file.get_config('target')
  with pytest.raises(ValueError, match="got 'large'"):
    file.get_config('large')
  assert 'Command' in pathlib.Path(file.__file__).read_text()[:600]


@pytest.mark.parametrize('file', [lm1b, public_text])
def test_the_family_has_the_sizes_it_says(file):
  counts = {'2m': 2_491_128, '6m': 6_102_864, '20m': 21_167_136, '97m': 97_337_088}
  assert set(counts) == set(family.SIZES)
  for size, count in counts.items():
    config = file.get_config(size)
    assert check_config(config).num_params > 0
    config.vocab_size = 32000
    assert check_config(config).num_params == count
    assert f'{count:,}' in pathlib.Path(family.__file__).read_text()
  with pytest.raises(ValueError, match="size must be one of 2m, 6m, 20m, 97m, got 'large'"):
    file.get_config('large')


def test_patience_keeps_the_best_model_and_stops(tmp_path, monkeypatch, config):
  """Held-out losses as given: the second evaluation is the best, and two worse ones end the run."""
  config.update(num_steps=60, eval_every=4, checkpoint_every=3, patience=2, log_every=4)
  fake, seen, evaluate = {4: 5.0, 8: 4.0, 12: 4.5, 16: 4.25, 20: 1.0}, {}, train_module.evaluate

  def evaluated(params, **options):
    metrics = evaluate(params, **options)
    if options.get('max_batches') is None:
      return metrics
    step = len(seen) * 4 + 4
    seen[step] = jax.tree.map(np.asarray, params)
    return {**metrics, 'loss': fake[step]}

  monkeypatch.setattr(train_module, 'evaluate', evaluated)
  outcome = train(config, tmp_path)
  assert outcome.step == 8
  assert sorted(seen) == [4, 8, 12, 16]
  assert saved_state(tmp_path)[1][-1] == 16
  info = json.loads((tmp_path / 'model' / 'config.json').read_text())['info']
  assert (info['steps'], info['held_out']) == (8, outcome.held_out)
  saved = load_model(tmp_path / 'model')[0].params
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype(jnp.bfloat16)), saved, seen[8])
  # What has ended stays so.
  assert train(config, tmp_path) == outcome
  assert sorted(seen) == [4, 8, 12, 16]


def test_dropout_is_a_function_of_seed_and_step(tmp_path, config, straight):
  config.dropout = 0.2
  final = train(config, tmp_path / 'straight')
  assert final.held_out != straight[1]
  train_until(7, config, tmp_path / 'run')
  assert train(config, tmp_path / 'run') == final
  assert_same_run(tmp_path / 'run', tmp_path / 'straight')
