"""Training sharded over devices and processes: the same run as on one device, and what survives of it."""

import functools
import json
import re
import shutil
import signal
import time

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import finish

from spectr_jax import load_model
from spectr_jax.io.tokenizer import Tokenizer
from spectr_jax.sharding import make_mesh, shardings
from tests.slow import slow
from train import plan, step
from train.run import make_config_mesh
from train.train import check_config

start = functools.partial(commands.start, 'train.main')
succeed = functools.partial(commands.succeed, 'train.main')
start_two = functools.partial(commands.start_two, 'train.main', num_devices=2)


def losses(workdir):
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  return np.array([line['train_loss'] for line in lines if 'train_loss' in line])


def params(workdir):
  return load_model(workdir / 'model')[0].params


def assert_near(workdir, other):
  """The same run up to the order of sums, which Adam's first steps enlarge."""
  np.testing.assert_allclose(losses(workdir), losses(other), rtol=2e-4)
  assert len(losses(workdir)) == len(losses(other)) == 12


@pytest.fixture(scope='module')
def base(tmp_path_factory, documents, make_flags):
  """Arguments of `train.main`: 12 steps of a network whose dimensions 8 devices can divide."""
  path = tmp_path_factory.mktemp('wide') / 'tokenizer.json'
  Tokenizer.train(documents, 304).save(path)
  sizes = {'model.embed_dim': 32, 'model.num_heads': 4, 'model.mlp_dim': 64}
  return functools.partial(make_flags, tokenizer=path, vocab_size=304, batch_size=8, log_every=1, **sizes)


@pytest.fixture(scope='module')
def on_one_device(tmp_path_factory, base):
  workdir = tmp_path_factory.mktemp('one')
  succeed(*base(), f'--workdir={workdir}')
  return workdir


@pytest.mark.parametrize('fields', [
  slow({'mesh': 'data:8'}, id='data'),
  slow({'mesh': 'data:2,model:4'}, id='data and model'),
  pytest.param({'mesh': 'data:-1,model:2', 'num_microbatches': 2, 'remat': True}, id='microbatches and remat'),
])  # fmt: skip
def test_eight_devices_train_like_one(tmp_path, base, on_one_device, fields):
  out = succeed(*base(**fields), f'--workdir={tmp_path}', num_devices=8)
  assert 'on 8 devices' in out
  assert_near(tmp_path, on_one_device)
  for name, leaf in jax.tree_util.tree_leaves_with_path(params(tmp_path)):
    assert np.isfinite(leaf).all(), name


@pytest.mark.slow
def test_a_checkpoint_continues_on_another_mesh(tmp_path, base, on_one_device):
  succeed(*base(mesh='data:4,model:2'), f'--workdir={tmp_path}', num_devices=8)
  shutil.rmtree(tmp_path / 'checkpoints' / '12')
  assert 'at step 9' in succeed(*base(), f'--workdir={tmp_path}')
  assert_near(tmp_path, on_one_device)


def terminate_early(processes, workdir, number=signal.SIGTERM):
  """Sends a signal once training is under way, and returns what the first process printed."""
  metrics = workdir / 'metrics.jsonl'
  while not (metrics.exists() and metrics.read_text()):
    assert all(process.poll() is None for process in processes), [process.communicate() for process in processes]
    time.sleep(0.01)
  for process in processes:
    process.send_signal(number)
  return [finish(process) for process in processes][0]


def assert_saved_where_it_stopped(workdir, out, num_steps):
  (saved,) = (int(path.name) for path in (workdir / 'checkpoints').iterdir() if path.name.isdigit())
  assert f'terminated: saved at step {saved}' in out
  assert 0 < saved < num_steps
  assert not (workdir / 'model').exists()
  return saved


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_and_the_run_continues_exactly(tmp_path, base, number):
  arguments = base(num_steps=300, checkpoint_every=1000, eval_every=1000)
  succeed(*arguments, f'--workdir={tmp_path}/straight')
  workdir = tmp_path / 'run'
  # A shell may have told this process to ignore interrupts, and so its children.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  process = start(*arguments, f'--workdir={workdir}')
  signal.signal(signal.SIGINT, before)
  out = terminate_early([process], workdir, number)
  saved = assert_saved_where_it_stopped(workdir, out, 300)
  assert f'at step {saved}' in succeed(*arguments, f'--workdir={workdir}')
  np.testing.assert_array_equal(losses(workdir), losses(tmp_path / 'straight'))
  jax.tree.map(np.testing.assert_array_equal, params(workdir), params(tmp_path / 'straight'))


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, base, on_one_device):
  arguments = (*base(cache_dir=on_one_device / 'data'), f'--workdir={tmp_path}')
  succeed(*arguments, '--config.num_steps=6')
  # No file may grow beyond what metrics need.
  limited = start(*arguments, wrapper=('bash', '-c', 'ulimit -f 8; exec "$@"', 'limited'), JAX_COMPILATION_CACHE_DIR='')
  _, err = limited.communicate(timeout=120)
  assert limited.returncode == 1
  assert re.fullmatch(
    r'error: a checkpoint under .* could not be written \(.*\); the last good one is of step 6.*\n', err
  )
  assert 'at step 6' in succeed(*arguments)


@pytest.mark.slow
def test_sigterm_stops_two_processes_at_one_step(tmp_path, base):
  arguments = base(mesh='data:4', num_steps=2000, checkpoint_every=10000, eval_every=10000, log_every=3)
  out = terminate_early(start_two(*arguments, f'--workdir={tmp_path}'), tmp_path)
  saved = assert_saved_where_it_stopped(tmp_path, out, 2000)
  assert saved % 3 == 0


@pytest.mark.slow
@pytest.mark.usefixtures('own_programs')
def test_two_processes_survive_being_killed(tmp_path, base, on_one_device):
  """With a teacher, and with the best model so far written by one of them in between."""
  alone, killed = tmp_path / 'alone', tmp_path / 'killed'
  fields = {
    'mesh': 'data:2,model:2', 'num_steps': 30, 'checkpoint_every': 5, 'eval_every': 4, 'patience': 50,
    'distill_from': on_one_device / 'model',
  }  # fmt: skip
  outputs = [finish(process) for process in start_two(*base(**fields), f'--workdir={alone}')]
  # Process 0 speaks for all, though the library that connects them prints in each.
  assert re.search('(?s)on 4 devices.*held-out', outputs[0])
  assert not re.search('held-out|parameters on', outputs[1])
  processes = start_two(*base(**fields), f'--workdir={killed}')
  while not (killed / 'checkpoints' / '5').exists():
    assert all(process.poll() is None for process in processes), [process.communicate() for process in processes]
    time.sleep(0.01)
  for process in processes:
    process.send_signal(signal.SIGKILL)
  for process in processes:
    process.communicate()
  outputs = [finish(process) for process in start_two(*base(**fields), f'--workdir={killed}')]
  assert 'at step 0' not in outputs[0]
  np.testing.assert_array_equal(losses(killed), losses(alone))
  jax.tree.map(np.testing.assert_array_equal, params(killed), params(alone))


def _entries(config):
  model_config, mesh = check_config(config), make_config_mesh(config, [jax.devices()[0]] * 8)
  return {entry.path: entry for entry in plan.state_entries(config, model_config, mesh)}


def test_the_plan_counts_what_devices_hold(config):
  config.update(vocab_size=304, mesh='data:4,model:2', batch_size=8)
  config.model.update(embed_dim=20, num_heads=2, mlp_dim=64)
  held = _entries(config)
  params = [entry.bytes for path, entry in held.items() if path.startswith('params/')]
  assert sum(params) == 4 * check_config(config).num_params
  for copy in ('params', 'opt_state/1/0/mu', 'opt_state/1/0/nu'):
    assert held[f'{copy}/embedding'].axes == ('model', 'data')
    assert held[f'{copy}/embedding'].device_bytes == 4 * 304 * 20 / 8
    assert held[f'{copy}/layer_0/mlp/down/kernel'].axes == ('model', 'data')
    assert held[f'{copy}/final_norm/gain'].device_bytes == 4 * 20
  # A width that data:8 does not divide stays whole.
  config.mesh = 'data:8'
  assert _entries(config)['params/embedding'].device_bytes == 4 * 304 * 20
  with pytest.raises(ValueError, match='no rule says how extra'):
    shardings(make_mesh({}), {'extra': jnp.zeros(3)})


def test_operations_are_those_the_compiler_counts(config):
  """The closed form against XLA's count of one forward pass; what is no matrix product is 10% here."""
  config.model.update(embed_dim=64, num_heads=2, mlp_dim=256, num_layers=3)
  config.seq_len = 128
  model_config = check_config(config)
  weights = jax.eval_shape(lambda: step.init_state(0, step.make_optimizer(config), model_config))['params']
  inputs = jax.ShapeDtypeStruct((4, 128), jnp.int32)
  forward = jax.jit(lambda weights, inputs: step.packed_logits(weights, inputs, step.Learner(model_config, 1)))
  counted = forward.lower(weights, inputs).compile().cost_analysis()['flops']
  expected = plan.forward_flops(model_config, 4, 128)
  assert expected < counted < 1.15 * expected


def test_the_dry_run_prints_the_plan_and_trains_nothing(tmp_path, base):
  out = succeed(*base(mesh='data:4,model:2'), '--dry_run', f'--workdir={tmp_path}/run', num_devices=8)
  assert all(part in out for part in ('mesh data 4 x model 2: 8 devices', 'layer_0/attention/q/kernel', 'per device'))
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(('fields', 'message'), [
  ({'mesh': 'data:3'}, 'mesh data:3 needs 3 devices, and there are 8'),
  ({'mesh': 'data:-1,model:3'}, 'needs a multiple of 3 devices'),
  ({'mesh': 'rows:8'}, 'a mesh is like data:8,model:2'),
  ({'mesh': 'data'}, 'names with one number each'),
  ({'mesh': 'data:-1,model:-1'}, 'only one axis'),
  ({'batch_size': 4}, 'a microbatch of 4 rows cannot be sharded over data:8'),
  ({'num_microbatches': 3}, 'must be a multiple of config.num_microbatches 3'),
  ({'mesh': 'model:8'}, r'embedding \(300, 32\) cannot be sharded over model:8'),
])  # fmt: skip
def test_what_cannot_be_divided_is_refused(config, fields, message):
  config.update({'batch_size': 8, 'mesh': 'data:-1,model:1', **fields})
  config.model.update(embed_dim=32, num_heads=4)
  with pytest.raises(ValueError, match=message):
    _entries(config)


@pytest.mark.slow
@pytest.mark.parametrize(('arguments', 'message'), [
  (['--process_id=1'], 'missing: coordinator_address, num_processes'),
  (['--coordinator_address=localhost:1', '--num_processes=2', '--process_id=2'], 'process_id must be below'),
])  # fmt: skip
def test_processes_that_cannot_come_together(tmp_path, base, arguments, message):
  process = start(*base(), f'--workdir={tmp_path}/run', *arguments)
  _, err = process.communicate(timeout=100)
  assert process.returncode == 1
  (line,) = err.splitlines()
  assert re.match(f'error: .*{message}', line)
