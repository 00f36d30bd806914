"""The commands of train/, as processes: what is wrong with an input is one line, and the exit code 1."""

import json
import pathlib
import re
import subprocess
import sys
import time

import commands
import pytest

from decode.experiment.options import DecodeOptions
from decode.experiment.settings import expand
from decode.experiment.workload import Workload
from spectr_jax import load_model
from spectr_jax.io.tokenizer import Tokenizer
from spectr_jax.models.transformer import config_of
from train import config_flag
from train import main as train_main
from train.evaluate import evaluate, evaluate_files
from train.input_pipeline import encode_documents
from train.step import Learner
from train.train import train

ROOT = pathlib.Path(__file__).parents[2]


def refused(module, *arguments):
  """The one line with which a command refuses its arguments."""
  line = commands.refuse(module, *arguments)
  assert len(line) < 500
  return line


@pytest.fixture(scope='module')
def trained(tmp_path_factory, make_config):
  workdir = tmp_path_factory.mktemp('trained')
  train(make_config(), workdir)
  return workdir


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--config=configs/missing.py'], r'cannot load config configs/missing\.py: .*No such file'),
    (['--config=configs/stdlib_pair.py:huge'], "size must be target or draft, got 'huge'"),
    (['--config=configs/base.py', '--config.learning_rat=1'], "config has no field 'learning_rat'; .*learning_rate"),
    (['--config=configs/base.py', '--config.seed=one'], 'config.seed'),
    (['--config=configs/base.py', '--config.warmup_steps=1000'], 'warmup_steps must be below config.num_steps'),
    (['--config=configs/base.py', '--config.tokenizer=nothing.json'], 'no tokenizer at nothing.json'),
    ([], 'config'),
  ],
)
def test_bad_arguments(tmp_path, arguments, message):
  assert re.search(message, refused('train.main', *arguments, f'--workdir={tmp_path}/run'))
  assert not (tmp_path / 'run').exists()


def test_bad_configurations_against_files(tmp_path, corpus, tokenizer_path):
  base = ('train.main', '--config=configs/base.py', f'--workdir={tmp_path}/run', f'--config.tokenizer={tokenizer_path}')
  assert 'has 300 tokens but config.vocab_size is 4096' in refused(*base)
  fitting = (*base, '--config.vocab_size=300')
  assert "unknown source 'web'; allowed: files, lm1b, stdlib" in refused(*fitting, '--config.source=web')
  assert "no file matches 'nothing.txt'" in refused(*fitting, '--config.source=files', '--config.files=nothing.txt')


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    ('def get_config():\n  return (', 'never closed'),
    ('import nothing_of_the_kind', 'nothing_of_the_kind'),
    ('', 'get_config'),
    ('def get_config():\n  return {}', 'returns dict, not a ConfigDict'),
    ('def get_config():\n  raise RuntimeError("no such luck")', 'no such luck'),
  ],
)
def test_a_file_that_is_no_configuration(tmp_path, content, message):
  path = tmp_path / 'config.py'
  path.write_text(content)
  with pytest.raises(ValueError, match=f'cannot load config .*{message}'):
    config_flag.check(['--config', str(path)])


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--config=README.md'], r'cannot load config README\.md: not a Python file'),
    (['--config=configs/base.py:argument'], 'takes 0 positional arguments'),
    (['-config=configs/base.py', '-config.model.width=1'], r"config\.model has no field 'width'; .*embed_dim"),
    (['--config', 'configs/base.py', '--config.model.mlp_dim.x', '1'], r"config\.model\.mlp_dim has no field 'x'"),
  ],
)
def test_arguments_that_name_no_configuration(monkeypatch, arguments, message):
  monkeypatch.chdir(ROOT)
  with pytest.raises(ValueError, match=message):
    config_flag.check(arguments)
  config_flag.check(['--config=configs/stdlib_pair.py:draft', '--config.model.mlp_dim=8', '--workdir=x'])
  config_flag.check(['--help'])


@pytest.mark.slow
@pytest.mark.usefixtures('own_programs')
def test_a_tokenizer_and_a_model_are_trained_and_training_goes_on_after_a_kill(tmp_path, corpus):
  settings = (
    '--config=configs/base.py', '--config.source=files', f'--config.files={corpus}', '--config.vocab_size=280',
    f'--config.tokenizer={tmp_path}/tokenizer.json', '--config.held_out_percent=10', '--config.seq_len=24',
    '--config.num_steps=6', '--config.warmup_steps=1', '--config.model.embed_dim=12', '--config.checkpoint_every=2',
  )  # fmt: skip
  out = commands.succeed('train.tokenizer', *settings)
  assert 'fingerprint ' + Tokenizer.load(tmp_path / 'tokenizer.json').fingerprint in out
  assert 'is not overwritten' in refused('train.tokenizer', *settings)

  killed = commands.start('train.main', *settings, '--config.num_steps=100000', f'--workdir={tmp_path}/run')
  try:
    while not (tmp_path / 'run' / 'checkpoints' / '4').exists():
      assert killed.poll() is None
      time.sleep(0.1)
  finally:
    killed.kill()
    killed.communicate()
  newest = max(int(path.name) for path in (tmp_path / 'run' / 'checkpoints').iterdir() if path.name.isdigit())
  out = commands.succeed('train.main', *settings, f'--config.num_steps={newest + 3}', f'--workdir={tmp_path}/run')
  assert f'at step {newest}' in out
  assert 'held-out loss' in out
  assert 'nan' not in out
  folder = tmp_path / 'run' / 'model'
  assert f'written to {folder}; try it: ' in out
  assert load_model(tmp_path / 'run' / 'model')[0].vocab_size == 280
  assert '\nautoregressive ' in commands.succeed(*commands.printed(out))
  of_draft = f'--config.distill_from={folder}', f'--workdir={tmp_path}/a draft'
  out = commands.succeed('train.main', *settings, *of_draft)
  assert '\nrace_traversal ' in commands.succeed(*commands.printed(out))

  for path in (tmp_path / 'run' / 'checkpoints' / str(newest + 3) / 'default' / 'd').iterdir():
    path.write_bytes(path.read_bytes()[:-40])
  message = refused('train.main', *settings, f'--config.num_steps={newest + 5}', f'--workdir={tmp_path}/run')
  assert re.search(rf'checkpoint .*/{newest + 3} is damaged', message)


def _decoders(arguments):
  """What `decode.main` would compile for its flags."""
  text = subprocess.run(
    [sys.executable, '-c', _READ, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
  ).stdout
  options = DecodeOptions(**{name: tuple(x) if isinstance(x, list) else x for name, x in json.loads(text).items()})
  work = Workload.load(options)
  return [work.decoder(setting) for setting in expand(options)]


_READ = """
import dataclasses, json, sys
from absl import flags
from decode.experiment.option_flags import read_options
flags.FLAGS(sys.argv)
print(json.dumps(dataclasses.asdict(read_options())))
"""


@pytest.mark.parametrize('is_distilled', [False, True])
def test_the_end_of_training_names_flags_that_take_what_was_trained(config, trained, is_distilled):
  """Beside its teacher what was distilled is a draft; alone another draft would have another tokenizer."""
  folder = trained / 'model'
  config.distill_from = str(folder) if is_distilled else ''
  decoders = _decoders(train_main.next_flags(folder, config))
  assert [decoder.method.name for decoder in decoders][-1] == ('race_traversal' if is_distilled else 'autoregressive')


@pytest.mark.slow
def test_evaluating_a_saved_model(trained, corpus, documents):
  model, tokenizer = load_model(trained / 'model')
  text = encode_documents(tokenizer, iter(documents))
  wanted = evaluate(model.params, text, Learner(config_of(model), tokenizer.bos_id), seq_len=24, batch_size=4)
  found = evaluate_files(trained / 'model', (str(corpus),))
  assert found == {**wanted, 'tokens': len(text.tokens), 'bytes': text.num_bytes}
  other = evaluate_files(trained / 'model', (str(corpus),), batch_size=5, seq_len=48)
  assert other['loss'] != found['loss']
  out = commands.finish(commands.start('train.evaluate', f'--model={trained}/model', f'--files={corpus}'))
  assert out == (
    f'{corpus}: perplexity {found["perplexity"]:.3f}, bits per byte {found["bits_per_byte"]:.4f},'
    f' loss {found["loss"]:.4f} nats per token; {found["tokens"]:,} tokens, {found["bytes"]:,} bytes\n'
  )


def test_evaluating_what_cannot_be(tmp_path, trained, corpus):
  short = tmp_path / 'short.txt'
  short.write_text('few words')
  binary = tmp_path / 'binary.txt'
  binary.write_bytes(bytes(range(128, 256)))
  model = f'--model={trained}/model'
  assert 'no model at' in refused('train.evaluate', f'--model={tmp_path}', f'--files={corpus}')
  assert "no file matches 'nothing.txt'" in refused('train.evaluate', model, '--files=nothing.txt')
  assert 'cannot read' in refused('train.evaluate', model, f'--files={binary}')
  assert 'shorter than one row' in refused('train.evaluate', model, f'--files={short}')
  assert 'files' in refused('train.evaluate', model)
