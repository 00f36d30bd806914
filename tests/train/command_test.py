"""The commands of train/, as processes: what is wrong with an input is one line, and the exit code 1."""

import re

import commands
import pytest
from commands import ROOT

from spectr_jax import load_model
from spectr_jax.io.tokenizer import Tokenizer
from spectr_jax.models.causal_lm import config_of
from tests.slow import slow
from train import config_flag
from train import main as train_main
from train.evaluate import evaluate, evaluate_files
from train.input_pipeline import encode_documents
from train.step import Learner


def refused(module, *arguments):
  """The one line with which a command refuses its arguments."""
  line = commands.refuse(module, *arguments)
  assert len(line) < 500
  return line


def test_bad_arguments(tmp_path, tokenizer_path):
  """One of each reader; the other values are refused by the same functions, in train_test.py."""
  workdir = f'--workdir={tmp_path}/run'
  base = '--config=configs/base.py', f'--config.tokenizer={tokenizer_path}'
  for arguments, message in (
    (['--config=configs/missing.py'], r'cannot load config configs/missing\.py: .*No such file'),
    (['--config=configs/base.py', '--config.learning_rat=1'], "config has no field 'learning_rat'; .*learning_rate"),
    (['--config=configs/base.py', '--config.seed=one'], 'config.seed'),
    (['--config=configs/base.py', '--config.warmup_steps=1000'], 'warmup_steps must be below config.num_steps'),
    (base, 'has 300 tokens but config.vocab_size is 4096'),
    ([], 'config'),
  ):
    assert re.search(message, refused('train.main', *arguments, workdir))
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(('content', 'message'), [
  ('def get_config():\n  return (', 'never closed'),
  ('import nothing_of_the_kind', 'nothing_of_the_kind'),
  ('', 'get_config'),
  ('def get_config():\n  return {}', 'returns dict, not a ConfigDict'),
  ('def get_config():\n  raise RuntimeError("no such luck")', 'no such luck'),
])  # fmt: skip
def test_a_file_that_is_no_configuration(tmp_path, content, message):
  path = tmp_path / 'config.py'
  path.write_text(content)
  with pytest.raises(ValueError, match=f'cannot load config .*{message}'):
    config_flag.check(['--config', str(path)])


@pytest.mark.parametrize(('arguments', 'message'), [
  (['--config=README.md'], r'cannot load config README\.md: not a Python file'),
  (['--config=configs/base.py:argument'], 'takes 0 positional arguments'),
  (['--config=configs/stdlib_pair.py:huge'], "size must be target or draft, got 'huge'"),
  (['-config=configs/base.py', '-config.model.width=1'], r"config\.model has no field 'width'; .*embed_dim"),
  (['--config', 'configs/base.py', '--config.model.mlp_dim.x', '1'], r"config\.model\.mlp_dim has no field 'x'"),
])  # fmt: skip
def test_arguments_that_name_no_configuration(monkeypatch, arguments, message):
  monkeypatch.chdir(ROOT)
  with pytest.raises(ValueError, match=message):
    config_flag.check(arguments)
  config_flag.check(['--config=configs/stdlib_pair.py:draft', '--config.model.mlp_dim=8', '--workdir=x'])
  config_flag.check(['--help'])


@pytest.mark.slow
@pytest.mark.usefixtures('own_programs')
def test_a_tokenizer_a_model_and_a_draft_are_trained(tmp_path, corpus):
  """Kills in between are those of kill_test.py."""
  settings = (
    '--config=configs/base.py', '--config.source=files', f'--config.files={corpus}', '--config.vocab_size=280',
    f'--config.tokenizer={tmp_path}/tokenizer.json', '--config.held_out_percent=10', '--config.seq_len=24',
    '--config.num_steps=6', '--config.warmup_steps=1', '--config.model.embed_dim=12', '--config.checkpoint_every=2',
  )  # fmt: skip
  out = commands.succeed('train.tokenizer', *settings)
  assert 'fingerprint ' + Tokenizer.load(tmp_path / 'tokenizer.json').fingerprint in out
  assert 'is not overwritten' in refused('train.tokenizer', *settings)
  folder = tmp_path / 'run' / 'model'
  for num_steps, start in ((6, 0), (9, 6)):
    out = commands.succeed('train.main', *settings, f'--config.num_steps={num_steps}', f'--workdir={tmp_path}/run')
    assert f'at step {start}' in out
    assert 'held-out loss' in out
    assert 'nan' not in out
  assert f'written to {folder}; try it: ' in out
  assert load_model(folder)[0].vocab_size == 280
  assert '\nautoregressive ' in commands.succeed(*commands.printed(out))
  of_draft = f'--config.distill_from={folder}', f'--workdir={tmp_path}/a draft'
  out = commands.succeed('train.main', *settings, *of_draft)
  assert '\nrace_traversal ' in commands.succeed(*commands.printed(out))


@pytest.mark.parametrize('is_distilled', [slow(False), True])
def test_the_end_of_training_names_flags_that_take_what_was_trained(config, finished, is_distilled):
  """Beside its teacher what was distilled is a draft; alone another draft would have another tokenizer."""
  folder = finished / 'model'
  config.distill_from = str(folder) if is_distilled else ''
  out = commands.succeed('decode.main', *train_main.next_flags(folder, config))
  assert f'\n{"race_traversal" if is_distilled else "autoregressive"} ' in out


@pytest.mark.slow
def test_evaluating_a_saved_model(finished, corpus, documents):
  model, tokenizer = load_model(finished / 'model')
  text = encode_documents(tokenizer, iter(documents))
  wanted = evaluate(model.params, text, Learner(config_of(model), tokenizer.bos_id), seq_len=24, batch_size=4)
  metrics = evaluate_files(finished / 'model', (str(corpus),))
  assert metrics == {**wanted, 'tokens': len(text.tokens), 'bytes': text.num_bytes}
  other = evaluate_files(finished / 'model', (str(corpus),), batch_size=5, seq_len=48)
  assert other['loss'] != metrics['loss']
  out = commands.finish(commands.start('train.evaluate', f'--model={finished}/model', f'--files={corpus}'))
  assert out == (
    f'{corpus}: perplexity {metrics["perplexity"]:.3f}, bits per byte {metrics["bits_per_byte"]:.4f},'
    f' loss {metrics["loss"]:.4f} nats per token; {metrics["tokens"]:,} tokens, {metrics["bytes"]:,} bytes\n'
  )


def test_evaluating_what_cannot_be(tmp_path, finished, corpus):
  (tmp_path / 'short.txt').write_text('few words')
  (tmp_path / 'binary.txt').write_bytes(bytes(range(128, 256)))
  for model, files, message in (
    (tmp_path, str(corpus), 'no model at'),
    (finished / 'model', 'nothing.txt', "no file matches 'nothing.txt'"),
    (finished / 'model', f'{tmp_path}/binary.txt', 'cannot read'),
    (finished / 'model', f'{tmp_path}/short.txt', 'shorter than one row'),
  ):
    with pytest.raises(ValueError, match=message):
      evaluate_files(model, (files,))
  command = 'train.evaluate', f'--model={finished}/model'
  assert 'files' in refused(*command)
  assert 'shorter than one row' in refused(*command, f'--files={tmp_path}/short.txt')
