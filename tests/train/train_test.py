import contextlib
import functools
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
from spectr_jax.models.transformer import Transformer, TransformerConfig, init_params
from spectr_jax.sharding import make_mesh
from tests.slow import slow
from train import checkpoint as checkpoint_module
from train import step as step_module
from train import train as train_module
from train.evaluate import evaluate
from train.input_pipeline import PackedText, encode_documents
from train.step import Learner, init_state, make_optimizer, make_train_step, packed_logits, token_losses
from train.train import check_config

_init_params = jax.jit(init_params, static_argnames='config')
SIZES = dict(embed_dim=16, num_layers=2, num_heads=2, mlp_dim=32)


@pytest.fixture(scope='module')
def network(tokenizer):
  network = TransformerConfig(tokenizer.vocab_size, max_length=24, **SIZES)
  return _init_params(jax.random.key(3), config=network), network


@functools.partial(jax.jit, static_argnums=1)
def causal_logits(params, network, tokens):
  length = tokens.shape[0]
  return Transformer(network).apply(
    {'params': params}, tokens[None], jnp.arange(length)[None], jnp.tril(jnp.ones((length, length), bool))
  )[0][0]


def own_losses(params, network, tokens):
  """-log p of tokens[1:], by a plain causal forward of one document of up to 25 tokens."""
  length = len(tokens) - 1
  padded = np.pad(np.asarray(tokens), (0, 25 - len(tokens)))  # one shape, one compilation
  log_probs = jax.nn.log_softmax(causal_logits(params, network, padded))
  return -np.asarray(log_probs)[np.arange(length), np.asarray(tokens)[1:]]


def test_attention_stays_within_documents(network, tokenizer):
  params, network = network
  bos = tokenizer.bos_id
  first, second = [bos, 270, 271, 272, 2], [bos, 280, 281, 282, 283]
  other = [bos, 290, 291, 292, 2]
  rows = jnp.array([first + second, other + second])
  losses, weights = jax.jit(token_losses, static_argnums=2)(params, rows, Learner(network, bos))
  np.testing.assert_array_equal(losses[0, 5:], losses[1, 5:])
  # A document's first token is no target; its own position counts from the row's start, which rotary embeddings do
  # not see but by rounding.
  np.testing.assert_array_equal(weights, [[1, 1, 1, 1, 0, 1, 1, 1, 1]] * 2)
  np.testing.assert_array_equal(losses[:, 4], 0)
  np.testing.assert_allclose(losses[0, :4], own_losses(params, network, first), rtol=1e-4)
  np.testing.assert_allclose(losses[0, 5:], own_losses(params, network, second), rtol=1e-4)


def test_evaluation_equals_a_direct_computation(network, tokenizer, documents):
  params, network = network
  text = encode_documents(tokenizer, iter(documents[:30]))
  num_rows = text.num_rows(24)
  assert num_rows % 4, 'the last batch should be padded'
  found = evaluate(params, text, Learner(network, tokenizer.bos_id), seq_len=24, batch_size=4)
  losses = []
  for row in text.rows(np.arange(num_rows), 24):
    starts = [0, *(i for i in range(1, 25) if row[i] == tokenizer.bos_id), 25]
    for begin, end in zip(starts, starts[1:]):
      if end - begin > 1:  # a row may begin within a document, whose earlier tokens it does not see
        losses.extend(own_losses(params, network, row[begin:end]))
  assert found['loss'] == pytest.approx(np.mean(losses), rel=1e-5)
  assert found['perplexity'] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
  num_tokens = sum(len(tokenizer.encode(document)) + 1 for document in documents[:30])
  bits = np.mean(losses) / math.log(2) * num_tokens
  assert found['bits_per_byte'] == pytest.approx(bits / sum(len(d.encode()) for d in documents[:30]), rel=1e-5)
  in_other_batches = evaluate(params, text, Learner(network, tokenizer.bos_id), seq_len=24, batch_size=7)
  assert in_other_batches['loss'] == pytest.approx(found['loss'], rel=1e-5)
  some = evaluate(params, text, Learner(network, tokenizer.bos_id), seq_len=24, batch_size=4, max_batches=2)
  assert some['loss'] != found['loss']
  with pytest.raises(ValueError, match='held-out text of 3 tokens'):
    evaluate(params, PackedText(text.tokens[:3], 9), Learner(network, tokenizer.bos_id), seq_len=24, batch_size=4)


def lines_of(workdir):
  """Metrics without what depends on the clock."""
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  timed = 'tokens_per_second', 'teraflops_per_device'
  return [{name: value for name, value in line.items() if name not in timed} for line in lines]


@contextlib.contextmanager
def replaced(monkeypatch, module, name, value):
  with monkeypatch.context() as patch:
    patch.setattr(module, name, value)
    yield


def interrupt_at(step):
  batch_at = train_module.batch_at

  def interrupted(text, at, **sizes):
    if at == step:
      raise KeyboardInterrupt
    return batch_at(text, at, **sizes)

  return interrupted


def saved_state(workdir):
  """The newest checkpoint, and which ones there are."""
  steps = sorted(int(path.name) for path in (workdir / 'checkpoints').iterdir() if path.name.isdigit())
  manager = checkpoint_module.Checkpoints(workdir, 2)._manager
  return manager.restore(steps[-1]), steps


@pytest.fixture(scope='module')
def straight(tmp_path_factory, make_config):
  """A run from start to end: its directory and what it returned."""
  workdir = tmp_path_factory.mktemp('straight')
  return workdir, train_module.train(make_config(), workdir).held_out


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
  timed = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()][0]
  # Forward and back: six operations per token and each of the 6896 parameters, and attention.
  per_token = timed['teraflops_per_device'] * 1e12 / timed['tokens_per_second']
  assert 6 < per_token / 6896 < 7
  assert any('tfevents' in path.name for path in workdir.iterdir())
  spec = json.loads((workdir / 'model' / 'model.json').read_text())
  assert spec['info']['steps'] == 12
  assert spec['info']['held_out'] == final
  assert list(spec['info']['text']) == ['files/corpus.txt', 'held_out']


def test_an_interrupted_run_ends_like_one_that_was_not(tmp_path, monkeypatch, config, straight):
  with replaced(monkeypatch, train_module, 'batch_at', interrupt_at(7)), pytest.raises(KeyboardInterrupt):
    train_module.train(config, tmp_path / 'run')
  assert saved_state(tmp_path / 'run')[1] == [3, 6]
  # Where a run was, and what a killed process left half-written, does not matter.
  moved = tmp_path / 'moved'
  shutil.move(tmp_path / 'run', moved)
  with (moved / 'metrics.jsonl').open('a') as stream:
    stream.write('{"step": 8, "train_loss": 1.0}\n{"step": 9, "tra')
  (moved / 'checkpoints' / '9.orbax-checkpoint-tmp-1' / 'default').mkdir(parents=True)
  final = train_module.train(config, moved)
  assert (final.step, final.held_out) == (12, straight[1])
  assert_same_run(moved, straight[0])
  # Nothing is left to do for a run that has ended.
  assert train_module.train(config, moved) == final
  assert_same_run(moved, straight[0])


def test_an_interruption_while_saving_loses_only_that_checkpoint(tmp_path, monkeypatch, config, straight):
  def stopped(self, state):
    if state['step'] == 9:
      raise KeyboardInterrupt
    save(self, state)

  save = checkpoint_module.Checkpoints.save
  with (
    replaced(monkeypatch, checkpoint_module.Checkpoints, 'save', stopped),
    pytest.raises(KeyboardInterrupt),
  ):
    train_module.train(config, tmp_path)
  assert [line['step'] for line in lines_of(tmp_path)][-1] == 9
  train_module.train(config, tmp_path)
  assert_same_run(tmp_path, straight[0])


def test_a_loss_that_is_not_finite_stops_and_leaves_no_such_checkpoint(tmp_path, monkeypatch, config):
  def poisoned(*args, **options):
    step_fn = make_train_step(*args, **options)

    def step(state, rows, teacher):
      at = int(state['step'])
      state, loss = step_fn(state, rows, teacher)
      return state, jnp.where(at == 7, jnp.nan, loss)

    return step

  with (
    replaced(monkeypatch, train_module, 'make_train_step', poisoned),
    pytest.raises(ValueError, match='loss is nan at step 8: stopped'),
  ):
    train_module.train(config, tmp_path)
  assert saved_state(tmp_path)[1] == [3, 6]
  assert all(math.isfinite(value) for line in lines_of(tmp_path) for value in line.values())


def test_a_step_that_breaks_the_parameters_is_not_saved(tmp_path, monkeypatch, config):
  def poisoned(*args, **options):
    step_fn = make_train_step(*args, **options)

    def step(state, rows, teacher):
      state, loss = step_fn(state, rows, teacher)
      broken = jnp.where(state['step'] == 6, jnp.inf, 1.0)
      return {**state, 'params': jax.tree.map(lambda x: x * broken, state['params'])}, loss

    return step

  with (
    replaced(monkeypatch, train_module, 'make_train_step', poisoned),
    pytest.raises(ValueError, match='parameters are not finite after step 6'),
  ):
    train_module.train(config, tmp_path)
  state, steps = saved_state(tmp_path)
  assert steps == [3]
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def damage_data(directory):
  for path in (directory / 'default' / 'd').iterdir():
    path.write_bytes(path.read_bytes()[:-40])


def damage_metadata(directory):
  (directory / 'default' / '_METADATA').write_text('{"tree')


def remove_data(directory):
  shutil.rmtree(directory / 'default')


def test_a_checkpoint_of_an_earlier_layout_is_refused(tmp_path, monkeypatch, config):
  """Without `layout_in_out`: some of its kernels are transposed and have the same shape."""

  def earlier(*args):
    state = init_state(*args)
    del state['layout_in_out']
    return state

  with monkeypatch.context() as patch:
    patch.setattr(train_module, 'init_state', earlier)
    patch.setattr(step_module, 'init_state', earlier)
    train_module.train(config, tmp_path)
  with pytest.raises(ValueError, match='/12 has all of its files, but is of another configuration or version'):
    train_module.train(config, tmp_path)


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # reads still under way
@pytest.mark.parametrize('damage', [slow(damage_data), damage_metadata, slow(remove_data)])
def test_a_damaged_checkpoint_is_one_clear_line(tmp_path, capfd, config, straight, damage):
  shutil.copytree(straight[0], tmp_path, dirs_exist_ok=True)
  newest = tmp_path / 'checkpoints' / '12'
  damage(newest)
  with pytest.raises(
    ValueError, match=r'/12 is damaged .*; with --allow_fallback, training continues from step 9'
  ) as info:
    train_module.train(config, tmp_path)
  message = str(info.value)
  assert '\n' not in message
  assert len(message) < 600
  assert 'Traceback' not in capfd.readouterr().err
  # Nothing was changed. On request the one before serves, and the damaged one is kept for whoever wants to look at it.
  assert newest.is_dir()
  outcome = train_module.train(config, tmp_path, allow_fallback=True)
  assert (outcome.step, outcome.held_out) == (12, straight[1])
  assert_same_run(tmp_path, straight[0])
  assert (tmp_path / 'damaged_checkpoints' / '12-0').is_dir()
  assert re.search(r'/12 is damaged .*; continuing from step 9', capfd.readouterr().err)


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # reads still under way
def test_without_any_good_checkpoint_nothing_is_moved(tmp_path, config, straight):
  shutil.copytree(straight[0], tmp_path, dirs_exist_ok=True)
  for step in ('9', '12'):
    damage_data(tmp_path / 'checkpoints' / step)
  with pytest.raises(ValueError, match='/9 is damaged'):
    train_module.train(config, tmp_path, allow_fallback=True)
  assert sorted(path.name for path in (tmp_path / 'checkpoints').iterdir() if path.name.isdigit()) == ['12', '9']


def test_the_schedule_warms_up_and_decays(config):
  config.update(weight_decay=0.0, max_grad_norm=1e9)
  optimizer = make_optimizer(config)
  params = {'kernel': jnp.ones((2, 2))}
  state, sizes = optimizer.init(params), []
  for _ in range(12):
    updates, state = optimizer.update({'kernel': jnp.ones((2, 2))}, state, params)
    sizes.append(float(jnp.abs(updates['kernel']).max()))
  # With a constant gradient Adam's update is the learning rate.
  assert sizes[0] == 0
  assert sizes[1] == pytest.approx(5e-3, rel=1e-3)
  assert sizes[2] == pytest.approx(1e-2, rel=1e-3)
  assert all(a > b for a, b in zip(sizes[2:], sizes[3:]))
  assert sizes[-1] == pytest.approx(1e-3 + 9e-3 * (1 + math.cos(math.pi * 9 / 10)) / 2, rel=1e-3)


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('warmup_steps', 12, r'config.warmup_steps must be below config.num_steps, got 12 and 12'),
    ('warmup_steps', -1, 'config.warmup_steps must be a whole number from 0'),
    ('num_steps', 0, 'config.num_steps must be a whole number from 1'),
    ('batch_size', 0, 'config.batch_size must be a whole number from 1'),
    ('log_every', 0, 'config.log_every must be a whole number from 1'),
    ('keep_checkpoints', 0, 'config.keep_checkpoints must be a whole number from 1'),
    ('learning_rate', math.nan, 'config.learning_rate must be a finite number above 0'),
    ('learning_rate', 0.0, 'config.learning_rate must be a finite number above 0'),
    ('max_grad_norm', -1.0, 'config.max_grad_norm must be'),
    ('adam_b2', 1.0, 'config.adam_b2 must be at least 0 and below 1'),
    ('held_out_percent', 0.0, 'config.held_out_percent must be above 0'),
    ('seq_len', 50000, 'training text of .* tokens is shorter than one row of 50000'),
    ('held_out_percent', 1e-3, 'held-out text of 0 tokens is shorter than one row'),
    ('vocab_size', 4096, 'has 300 tokens but config.vocab_size is 4096'),
    ('tokenizer', 'nothing.json', 'no tokenizer at nothing.json'),
    ('source', 'web', "unknown source 'web'; allowed: files, lm1b, stdlib"),
    ('files', 'nothing.txt', "no file matches 'nothing.txt'"),
  ],
)
def test_bad_values_are_refused_before_training(tmp_path, config, field, value, message):
  config[field] = value
  with pytest.raises(ValueError, match=message):
    train_module.train(config, tmp_path)
  assert not (tmp_path / 'checkpoints').exists()


def test_bad_sizes_are_refused(config):
  config.model.num_heads = 3
  with pytest.raises(ValueError, match=r'config.model: embed_dim 16 must be an even multiple of num_heads 3'):
    check_config(config)
  with config.unlocked():
    config.model = {**SIZES, 'width': 3}
  with pytest.raises(ValueError, match='config.model: .*width'):
    check_config(config)


@pytest.mark.parametrize(('file', 'most'), [(stdlib_pair, 2e6), (pretrained_pair, 8e6)])
def test_the_pairs_configurations_are_sound(file, most):
  target, draft = (check_config(file.get_config(size)) for size in ('target', 'draft'))
  assert draft.num_params * 4 < target.num_params < most
  assert draft.vocab_size == target.vocab_size
  assert file.get_config() == file.get_config('target')
  with pytest.raises(ValueError, match="got 'large'"):
    file.get_config('large')
  assert 'Command' in pathlib.Path(file.__file__).read_text()[:600]


def test_patience_keeps_the_best_model_and_stops(tmp_path, monkeypatch, config):
  """Held-out losses as given: the second evaluation is the best, and two worse ones end the run."""
  config.update(num_steps=60, eval_every=4, checkpoint_every=3, patience=2, log_every=4)
  fake = {4: 5.0, 8: 4.0, 12: 4.5, 16: 4.25, 20: 1.0}
  seen = {}

  def evaluated(params, **options):
    found = evaluate(params, **options)
    if options.get('max_batches') is None:
      return found
    step = len(seen) * 4 + 4
    seen[step] = jax.tree.map(np.asarray, params)
    return {**found, 'loss': fake[step]}

  monkeypatch.setattr(train_module, 'evaluate', evaluated)
  outcome = train_module.train(config, tmp_path)
  assert outcome.step == 8
  assert sorted(seen) == [4, 8, 12, 16]
  assert saved_state(tmp_path)[1][-1] == 16
  spec = json.loads((tmp_path / 'model' / 'model.json').read_text())
  assert spec['info']['steps'] == 8
  assert spec['info']['held_out'] == outcome.held_out
  saved = load_model(tmp_path / 'model')[0].params
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype(jnp.bfloat16)), saved, seen[8])
  # What has ended stays so.
  assert train_module.train(config, tmp_path) == outcome
  assert sorted(seen) == [4, 8, 12, 16]


def test_dropout_is_a_function_of_seed_and_step(tmp_path, monkeypatch, config, straight):
  config.dropout = 0.2
  final = train_module.train(config, tmp_path / 'straight')
  assert final.held_out != straight[1]
  with replaced(monkeypatch, train_module, 'batch_at', interrupt_at(7)), pytest.raises(KeyboardInterrupt):
    train_module.train(config, tmp_path / 'run')
  assert train_module.train(config, tmp_path / 'run') == final
  assert_same_run(tmp_path / 'run', tmp_path / 'straight')


def test_dropout_leaves_out_what_blocks_add(network, tokenizer):
  params, network = network
  rows = jnp.asarray(np.random.default_rng(0).integers(3, tokenizer.vocab_size, (2, 12)))
  forward = jax.jit(packed_logits, static_argnums=2)

  def logits(dropout=0.0, dropout_key=None):
    return forward(params, rows, Learner(network, tokenizer.bos_id, dropout=dropout), dropout_key)

  np.testing.assert_array_equal(logits(dropout=0.5), logits())  # not without a key
  one, other = (logits(dropout=0.5, dropout_key=jax.random.key(seed)) for seed in (0, 1))
  assert (np.abs(one - other).max(axis=-1) > 1e-3).all()
  # Without anything from the blocks, only the token itself is left.
  everything = logits(dropout=1.0, dropout_key=jax.random.key(0))
  embedding = params['embedding']
  x = embedding[rows] * embedding.shape[1] ** 0.5
  x = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6)
  np.testing.assert_allclose(everything, x @ embedding.T, rtol=1e-4, atol=1e-5)


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


def test_dropout_differs_between_steps_and_seeds(config, tokenizer):
  model_config, optimizer, mesh = check_config(config), make_optimizer(config), make_mesh({})
  rows = jnp.asarray(np.random.default_rng(0).integers(3, config.vocab_size, (1, 4, 25)), jnp.int32)

  steps = [
    make_train_step(optimizer, Learner(model_config, tokenizer.bos_id, mesh, dropout=0.5), seed=seed)
    for seed in range(2)
  ]

  initial = init_state(0, optimizer, model_config)

  def loss(at, seed):
    state = jax.tree.map(jnp.copy, {**initial, 'step': jnp.asarray(at, jnp.int32)})  # it is donated
    return float(steps[seed](state, rows, None)[1])

  assert loss(3, 0) == loss(3, 0)
  assert len({loss(3, 0), loss(4, 0), loss(3, 1)}) == 3
