"""What a WORKDIR knows of the run that made it, files in it that are not the run's, and full disks."""

import contextlib
import json
import os
import re
import shutil

import jax
import numpy as np
import pytest
from etils import epath

from configs import base
from spectr_jax import load_model
from spectr_jax.io.new_files import only_writer
from spectr_jax.io.tokenizer import Tokenizer
from train.metric_writer import MetricWriter
from train.run_record import RunRecord, determining_fields
from train.train import train


@pytest.fixture
def half(tmp_path, finished):
  """A copy of the finished run as it was at step 9."""
  run = tmp_path / 'run'
  shutil.copytree(finished, run, symlinks=True)
  shutil.rmtree(run / 'checkpoints' / '12')
  shutil.rmtree(run / 'model')
  return run


def content_of(folder):
  return {str(path): path.read_bytes() for path in sorted(folder.rglob('*')) if path.is_file()}


def notes_of(capfd):
  """Lines that a run has printed beside its size, its progress and its metrics."""
  out, err = capfd.readouterr()
  assert not err
  return [line for line in out.splitlines() if not re.match(r'\S+ parameters on|step \d+: |training |\s*$', line)]


def refuse(config, workdir, message):
  """Training is refused in one line that matches, and nothing is changed."""
  before = content_of(workdir)
  with pytest.raises(ValueError, match=message) as info:
    train(config, workdir)
  assert '\n' not in str(info.value)
  assert len(str(info.value)) < 1500
  assert content_of(workdir) == before


_DETERMINES = {
  'seed': 1, 'batch_size': 8, 'learning_rate': 2e-2, 'warmup_steps': 3, 'weight_decay': 0.0, 'adam_b2': 0.9,
  'max_grad_norm': 2.0, 'dropout': 0.1, 'seq_len': 12, 'held_out_percent': 20.0, 'patience': 2, 'distill_weight': 0.5,
  'distill_dtype': 'bfloat16', 'model.mlp_dim': 64, 'model.num_layers': 2, 'model.num_heads': 1, 'model.embed_dim': 8,
  'model.dtype': 'bfloat16',
}  # fmt: skip


def test_what_determines_the_result_is_refused_by_name(half, make_config):
  assert set(_DETERMINES) | {'vocab_size'} == determining_fields(base.get_config()).keys() | {'held_out_percent'}
  for name, value in _DETERMINES.items():
    config = make_config()
    place, field = (config.model if '.' in name else config), name.removeprefix('model.')
    by_name = f'config.{name} is {value!r} and was {place[field]!r}'
    place[field] = value
    if name == 'held_out_percent':
      by_name = 'the content of the text is .*20% of documents.* and was .*10% of documents'
    refuse(config, half, f'run was begun with other settings: {by_name}')
  config = make_config()
  config.update(seed=1, learning_rate=3.0)
  refuse(config, half, r'config.learning_rate is 3.0 and was 0.01; .*config.seed is 1 and was 0')


def test_other_content_is_refused_and_other_paths_are_not(half, tmp_path, make_config, documents):
  config = make_config()
  corpus = tmp_path / 'moved.txt'
  shutil.copy(config.files, corpus)
  shutil.copy(config.tokenizer, tmp_path / 'moved.json')
  config.update(files=str(corpus), tokenizer=str(tmp_path / 'moved.json'), cache_dir=str(tmp_path / 'cache'))
  assert train(config, half).step == 12
  corpus.write_text(corpus.read_text() + '\n\none more document\n')
  refuse(config, half, 'the content of the text is .* and was ')
  config = make_config()
  Tokenizer.train(documents[:200], config.vocab_size).save(tmp_path / 'moved.json')
  config.tokenizer = str(tmp_path / 'moved.json')
  refuse(config, half, "the content of config.tokenizer is '[0-9a-f]{16}' and was '[0-9a-f]{16}'")


def test_another_teacher_in_the_same_place_is_refused(tmp_path, finished, make_config):
  config = make_config()
  teacher, moved = tmp_path / 'teacher', tmp_path / 'moved'
  shutil.copytree(finished / 'model', teacher)
  config.update(distill_from=str(teacher), num_steps=4)
  train(config, tmp_path / 'run')
  teacher.rename(moved)
  config.distill_from = str(moved)
  assert train(config, tmp_path / 'run').step == 4
  other = make_config()
  other.update(seed=1, num_steps=3)
  train(other, tmp_path / 'other')
  for path, now in ((str(tmp_path / 'other' / 'model'), '[0-9a-f]+'), ('', '')):
    config.distill_from = path
    refuse(config, tmp_path / 'run', f"the content of config.distill_from is '{now}' and was '[0-9a-f]+'")


def test_a_run_begins_with_the_parameters_of_a_model(tmp_path, finished, make_config):
  """With a rate too small to change a number, the model that is written is the one that was read."""
  config = make_config()
  config.update(init_from=str(finished / 'model'), num_steps=2, warmup_steps=1, learning_rate=1e-30, weight_decay=0.0)
  outcome = train(config, tmp_path / 'run')
  before, after = (load_model(path / 'model')[0].params for path in (finished, tmp_path / 'run'))
  jax.tree.map(np.testing.assert_array_equal, after, before)
  random = make_config()
  random.update(num_steps=2, warmup_steps=1, learning_rate=1e-30, weight_decay=0.0)
  assert outcome.held_out['loss'] < train(random, tmp_path / 'random').held_out['loss'] - 0.1


def test_another_beginning_in_the_same_place_is_refused(tmp_path, finished, make_config):
  config, moved = make_config(), tmp_path / 'moved'
  config.update(init_from=str(finished / 'model'), num_steps=4)
  train(config, tmp_path / 'run')
  shutil.copytree(finished / 'model', moved)
  config.init_from = str(moved)
  assert train(config, tmp_path / 'run').step == 4
  for path, now in ((str(tmp_path / 'run' / 'model'), '[0-9a-f]+'), ('', '')):
    config.init_from = path
    refuse(config, tmp_path / 'run', f"the content of config.init_from is '{now}' and was '[0-9a-f]+'")


def test_a_beginning_that_does_not_fit_is_one_line(tmp_path, finished, make_config, documents):
  def check(message, **sizes):
    config = make_config()
    config.init_from = str(finished / 'model')
    config.model.update(sizes)
    refuse(config, tmp_path / 'run', f'^config.init_from: {re.escape(config.init_from)}: {message}')

  check('.* has shape .*32.*, and in this configuration .*64', mlp_dim=64)
  check('.* has shape None, and in this configuration', num_layers=2)
  check('.* has shape .*2, 8.*, and in this configuration .*1, 16', num_heads=1)
  config = make_config()
  Tokenizer.train(documents[:200], config.vocab_size).save(tmp_path / 'other.json')
  config.update(init_from=str(finished / 'model'), tokenizer=str(tmp_path / 'other.json'))
  refuse(config, tmp_path / 'run', '^config.init_from: .*it has another tokenizer than .*other.json$')
  config = make_config()
  config.init_from = str(tmp_path / 'nowhere')
  refuse(config, tmp_path / 'run', '^config.init_from: .*: no model at')


def test_what_may_change_changes_nothing(half, finished, config, capfd):
  changes = dict(log_every=5, checkpoint_every=2, keep_checkpoints=5, eval_every=4, eval_batches=1, remat=True)
  config.update(changes, mesh='data:1')
  train(config, half)
  params, wanted = (load_model(path / 'model')[0].params for path in (half, finished))
  jax.tree.map(np.testing.assert_array_equal, params, wanted)
  config.num_microbatches = 2  # another order of sums
  train(config, half)
  assert not notes_of(capfd)


def test_what_only_matters_with_dropout_or_patience(config):
  fields = determining_fields(config).keys()
  for name, value, matters in (('dropout', 0.1, {'num_microbatches'}), ('patience', 2, {'eval_every', 'eval_batches'})):
    changed = config.copy_and_resolve_references()
    changed[name] = value
    assert determining_fields(changed).keys() - fields == matters


def test_another_number_of_steps_is_recorded_and_said(half, config, capfd):
  config.num_steps = 15
  train(config, half)
  line = 'config.num_steps was 12 up to step 9 and is 15 from here on, and so is the schedule of the learning rate'
  assert notes_of(capfd) == [line]
  assert json.loads((half / 'run.json').read_text())['num_steps'] == [[0, 12], [9, 15]]
  config.num_steps = 12
  refuse(config, half, 'run is at step 15, beyond config.num_steps 12')
  config.num_steps = 15
  train(config, half)
  assert not notes_of(capfd)


def test_nothing_is_left_of_a_run_that_has_saved_nothing(half, config):
  shutil.rmtree(half / 'checkpoints')
  config.seed = 1
  assert train(config, half).step == 12
  assert json.loads((half / 'run.json').read_text())['settings']['config.seed'] == 1
  # A model is something that is left.
  shutil.rmtree(half / 'checkpoints')
  config.seed = 0
  refuse(config, half, 'config.seed is 0 and was 1')


def test_a_head_is_not_trained_where_a_model_was(half, config):
  with pytest.raises(ValueError, match='was begun by train.main, not by train.head: take another one'):
    RunRecord(epath.Path(half), config, 'train.head', {}).check()


def test_a_record_of_an_earlier_version_is_continued(half, config, capfd):
  """It has an entry for fields of other kinds of experiments as well, and lists fields in another order."""
  record = json.loads((half / 'run.json').read_text())
  record['settings'] = {'config.num_unrolled': None, **dict(reversed(record['settings'].items()))}
  (half / 'run.json').write_text(json.dumps(record))
  train(config, half)
  assert not notes_of(capfd)


@pytest.mark.parametrize(('content', 'message'), [
  ('{"mine": 1}', 'run.json is no record of a training run'),
  ('[1]', 'run.json is no record of a training run'),
  ('', 'run.json is not JSON'),
])  # fmt: skip
def test_a_record_that_is_none(half, config, content, message):
  (half / 'run.json').write_text(content)
  refuse(config, half, message + '.*; move it away to train here')


# Files of users.


def link_to_a_file(path):
  (path.parent / 'elsewhere').write_text('mine')
  path.symlink_to(path.parent / 'elsewhere')


def file(path):
  path.write_text('mine')


@pytest.mark.parametrize(('put', 'message'), [
  (file, 'exists and is not a folder that can be replaced'),
  (link_to_a_file, 'elsewhere exists and is not a folder that can be replaced'),
])  # fmt: skip
def test_a_model_that_could_not_be_written_is_said_at_once(half, config, put, message):
  put(half / 'model')
  refuse(config, half, message)


def test_links_to_folders_are_followed_and_files_of_users_stay(half, tmp_path, config):
  (tmp_path / 'elsewhere').mkdir()
  (tmp_path / 'elsewhere' / 'notes.txt').write_text('mine')
  (half / 'model').symlink_to(tmp_path / 'elsewhere')
  (half / 'metrics.jsonl').rename(tmp_path / 'log')
  (half / 'metrics.jsonl').symlink_to(tmp_path / 'log')
  train(config, half)
  assert (half / 'model').is_symlink()
  assert (tmp_path / 'elsewhere' / 'notes.txt').read_text() == 'mine'
  load_model(half / 'model')
  assert (half / 'metrics.jsonl').is_symlink()
  assert 'final_loss' in (tmp_path / 'log').read_text()
  (half / 'model').unlink()
  (half / 'model').symlink_to(tmp_path / 'nothing')
  train(config, half)
  load_model(tmp_path / 'nothing')


def test_what_no_run_wrote_there_stays(tmp_path, half, finished, config):
  (half / 'run.json').unlink()
  refuse(config, half, 'run/checkpoints is there, and no training has written it: take another --workdir')
  for name in ('one', 'two', 'three'):
    (tmp_path / name).mkdir()
  shutil.copytree(finished / 'model', tmp_path / 'one' / 'model')
  refuse(config, tmp_path / 'one', 'one/model is there, and no training has written it: take another --workdir')
  (tmp_path / 'two' / 'metrics.jsonl').write_text('{"step": 3, "loss": 1}\n')
  refuse(config, tmp_path / 'two', 'two/metrics.jsonl is there, and no training has written it')
  (tmp_path / 'three' / 'model').mkdir()
  (tmp_path / 'three' / 'model' / 'tokenizer.json').write_text('mine')
  refuse(config, tmp_path / 'three', 'three/model is there, and no training has written it')


def test_a_directory_is_of_one_run_which_gives_it_free(half, make_config):
  with only_writer(half):
    refuse(make_config(), half, 'run is being written by another process')
  config, manifest = make_config(), half / 'checkpoints' / '9' / 'default' / 'manifest.ocdbt'
  config.seq_len = 12
  for _ in range(2):
    refuse(config, half, 'config.seq_len is 12')
  content = manifest.read_bytes()
  manifest.write_bytes(b'')
  for _ in range(2):
    refuse(make_config(), half, 'is damaged')
  manifest.write_bytes(content)
  train(make_config(), half)


@pytest.mark.parametrize('name', ['metrics.jsonl', 'checkpoints', 'data'])
def test_other_things_with_the_names_of_files_of_a_run(tmp_path, config, name):
  for put in (file, *([os.mkdir] if name == 'metrics.jsonl' else [])):
    workdir = tmp_path / put.__name__
    workdir.mkdir()
    put(workdir / name)
    refuse(config, workdir, f'{workdir}/{name}')
    assert os.listdir(workdir) == [name]


def test_a_log_that_is_none_is_not_cut(half, config):
  log = (half / 'metrics.jsonl').read_text()
  for content in (
    'hello\n', '{"step": 3}\nhello\n', '{"step": "3"}\n', '{"step": 1}\n\n[]\n',
  ):  # fmt: skip
    (half / 'metrics.jsonl').write_text(content)
    refuse(config, half, 'metrics.jsonl is not the log of a training: move it to another place')
  (half / 'metrics.jsonl').write_text(log + '{"step": 13, "train_l')  # the line that a killed process leaves
  train(config, half)
  assert all(json.loads(line) for line in (half / 'metrics.jsonl').read_text().splitlines())


def test_events_of_two_runs_within_a_second_are_two_files(tmp_path):
  for step in range(3):
    writer = MetricWriter(epath.Path(tmp_path), step)
    writer.write(step + 1, {'loss': 1.0})
    writer.close()
  sizes = [path.stat().st_size for path in tmp_path.iterdir() if 'tfevents' in path.name]
  assert (len(sizes), min(sizes) > 60) == (3, True)


# Disks that are full or cannot be written, at the start of training and where one file of a run lies.


@pytest.fixture
def disk(tmp_path):
  """A small file system of its own."""
  path = tmp_path / 'disk'
  path.mkdir()
  if os.system(f'mount -t tmpfs -o size=8m tmpfs {path} 2>/dev/null'):
    pytest.skip('needs the right to mount')
  yield path
  os.system(f'umount -l {path}')


@contextlib.contextmanager
def full(disk):
  with (disk / 'filling').open('wb', buffering=0) as filling, contextlib.suppress(OSError):
    while True:
      filling.write(bytes(4096))
  yield
  (disk / 'filling').unlink()


@pytest.mark.slow
def test_a_full_disk_at_the_start_changes_nothing(disk, half, config):
  workdir = disk / 'run'
  shutil.copytree(half, workdir)
  with full(disk):
    refuse(config, workdir, f'{workdir}.*No space left on device')
  assert train(config, workdir).step == 12


@pytest.mark.slow
@pytest.mark.parametrize('name', ['metrics.jsonl', 'model', 'checkpoints', 'data'])
def test_a_disk_that_is_full_where_one_file_lies(disk, tmp_path, make_config, name):
  """It ends the run in one line that names the file; what was written before stays, and the run continues."""
  workdir, config = tmp_path / 'run', make_config()
  workdir.mkdir()
  if name in ('checkpoints', 'data'):
    (disk / name).mkdir()
  if name == 'metrics.jsonl':
    config.num_steps = 6
    train(config, workdir)
    shutil.move(workdir / name, disk / name)
  (workdir / name).symlink_to(disk / name)
  with full(disk), pytest.raises(ValueError, match=f'/(run|disk)/{name}.*No space left on device') as info:
    train(make_config(), workdir)
  assert len(str(info.value)) < 1000
  assert '\n' not in str(info.value)
  assert train(make_config(), workdir).step == 12
  load_model(workdir / 'model')


@pytest.mark.slow
def test_a_read_only_directory(disk, finished, config):
  workdir = disk / 'run'
  shutil.copytree(finished, workdir)
  os.system(f'mount -o remount,ro {disk}')
  refuse(config, workdir, 'run.*Read-only file system')
