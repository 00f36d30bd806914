"""Training of heads: the text that the target writes, the loss, and runs that continue."""

import dataclasses
import json

import hub_specs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny_hub
from etils import epath

import spectr_jax
from configs import head as head_experiment
from spectr_jax.models import causal_lm, head
from train import head_data, head_step
from train.head_training import HeadTraining, feature_layers, init_params
from train.head_training import head_config as make_head_config

_SIZES = head_data.Sizes(6, 9, 12, 1.0, (1.0, 0.0))
_LAYERS = (2, 3, 3, -1)


@pytest.fixture(scope='session')
def target_folder(tmp_path_factory):
  spec = hub_specs.SPECS['llama'] | {
    'vocab_size': 310, 'num_hidden_layers': 6, 'max_position_embeddings': 128, 'tie_word_embeddings': True,
    'eos_token_id': tiny_hub.SPECIAL['<|im_end|>'],
  }  # fmt: skip
  folder = tiny_hub.write(tmp_path_factory.mktemp('target') / 'hub', config=spec, chat_template=tiny_hub.CHAT)
  safetensors.numpy.save_file(
    {name: 0.5 * x for name, x in tiny_hub.tensors_of(spec).items()}, folder / 'model.safetensors'
  )
  return folder


@pytest.fixture(scope='session')
def target(target_folder):
  return spectr_jax.load_model(target_folder)


@pytest.fixture(scope='session')
def shard(target):
  return head_data.generate_shard(*target, _SIZES, _LAYERS, jax.random.key(0))


def test_a_shard_holds_conversations_and_their_hidden_states(target, shard, tmp_path):
  model, tokenizer = target
  before, after = head_data.chat_frame(tokenizer)
  assert tokenizer.encode_chat([{'role': 'user', 'content': 'owl'}]) == [*before, *tokenizer.encode('owl'), *after]
  features_of = model.with_features(_LAYERS)
  for row in range(_SIZES.num_rows):
    length = shard.lengths[row]
    tokens = shard.tokens[row, :length].tolist()
    assert tokens[: len(before)] == before
    assert shard.starts[row] == len(before)
    assert any(tokens[i : i + len(after)] == after for i in range(len(before), length))
    output = features_of.apply(
      jnp.array([tokens]), jnp.arange(length)[None], jnp.tril(jnp.ones((length, length), bool)),
      model.init_cache_fn(1, length),
    )  # fmt: skip
    wanted = output.features[0, : length - 1]
    np.testing.assert_allclose(shard.features[row, : length - 1].astype(np.float32), wanted, rtol=2e-2, atol=2e-2)
    if row % 2:  # greedy rows
      answer = next(i for i in range(len(before), length) if tokens[i : i + len(after)] == after) + len(after)
      assert tokens[answer:] == output.logits[0, answer - 1 : length - 1].argmax(-1).tolist()
  shard.save(tmp_path / 'shard.npz')
  again = head_data.Shard.load(tmp_path / 'shard.npz')
  for field in dataclasses.fields(shard):
    np.testing.assert_array_equal(getattr(again, field.name), getattr(shard, field.name))


def test_training_sees_what_drafting_sees(target):
  """Entry i of step s is the head's guess after a chain of s guesses that equal the text."""
  model = target[0]
  block = dataclasses.replace(causal_lm.config_of(model), num_layers=1, vocab_size=30)
  config = head.HeadConfig(block, block.embed_dim, block.embed_dim, (2, 3, 3))
  params = head.init_params(jax.random.key(1), config)
  size = 6
  embedded = jax.random.normal(jax.random.key(2), (2, size, block.embed_dim))
  features = jax.random.normal(jax.random.key(3), (2, size, 3, block.embed_dim))
  outputs = head_step.unrolled_outputs(params, config, embedded, features, 3)
  hidden = head.hidden_of_features(params, config, features)

  @jax.jit
  def run(embedded, hidden):
    size = embedded.shape[1]
    positions, causal = jnp.broadcast_to(jnp.arange(size), (2, size)), jnp.tril(jnp.ones((size, size), bool))
    return head.apply(params, config, embedded, hidden, positions, causal, head.init_cache(config, 2, 1))[:2]

  for step, found in enumerate(outputs):
    for place in range(step, size):
      known = place - step + 1
      own = hidden[:, :known]
      for i in range(known, place + 2):
        after, output = run(embedded[:, :i], own)
        own = jnp.concatenate([own, after[:, -1:]], axis=1)
      np.testing.assert_allclose(found[:, place], output[:, -1], rtol=1e-4, atol=1e-5)


def test_the_loss_counts_what_the_target_wrote(target, shard):
  model = target[0]
  config = head_experiment.get_config()
  config.update(vocab_size=64, dtype='float32')
  sizes = make_head_config(config, causal_lm.config_of(model))
  params = init_params(jax.random.key(0), sizes, model, from_target=True)
  unembedding = model.params['embedding'][:64].T
  frozen = {'embedding': model.params['embedding'], 'target_unembedding': unembedding, 'unembedding': unembedding}
  batch = head_step.HeadBatch(shard.tokens, shard.lengths, shard.starts, shard.features)
  options = {'num_steps': 2, 'decay': 0.5, 'tv_weight': 1.0}
  loss, means = head_step.head_loss(params, frozen, sizes, batch, **options)
  # A guess needs the hidden state of the token before the one that it reads.
  wanted = [sum(n - max(s, 2 + step) for n, s in zip(shard.lengths, shard.starts)) for step in range(2)]
  np.testing.assert_array_equal(means['count'], wanted)
  assert 0 < means['acceptance'].min() <= means['acceptance'].max() < 1
  cross_entropy = means['cross_entropy'] + (1 - means['acceptance'])
  np.testing.assert_allclose(loss, (cross_entropy[0] + 0.5 * cross_entropy[1]) / 1.5, rtol=1e-5)
  # What is behind the ends does not matter.
  garbage = dataclasses.replace(batch, tokens=np.where(batch.tokens == 0, 5, batch.tokens))
  is_end = np.arange(batch.tokens.shape[1]) >= batch.lengths[:, None] - 1
  garbage = dataclasses.replace(garbage, features=np.where(is_end[..., None, None], 3, batch.features))
  np.testing.assert_allclose(head_step.head_loss(params, frozen, sizes, garbage, **options)[0], loss, rtol=1e-5)


def _config():
  config = head_experiment.get_config()
  config.update(
    num_shards=3, rows_per_shard=8, max_user_tokens=8, max_new_tokens=12, vocab_size=64, dtype='float32',
    data_dtype='float32', batch_size=4, num_steps=12, warmup_steps=2, learning_rate=3e-3, log_every=2, eval_every=6,
    checkpoint_every=4, mesh='data:1,model:1',
  )  # fmt: skip
  return config


@pytest.fixture(scope='session')
def trained(tmp_path_factory, target_folder):
  workdir = epath.Path(tmp_path_factory.mktemp('head') / 'run')
  training = HeadTraining(_config(), target_folder, workdir, allow_fallback=False)
  return training, training.run(), workdir


@pytest.mark.slow
def test_a_run_learns_and_logs(trained, target):
  training, outcome, workdir = trained
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  held_out = [line for line in lines if 'held_out_loss' in line]
  assert [line['step'] for line in held_out] == [6, 12]
  assert held_out[1]['held_out_loss'] < held_out[0]['held_out_loss']
  assert outcome.step == 12
  assert 0 < outcome.held_out['acceptance_1'] < 1
  assert (np.diff(training.target_ids) > 0).all()
  drafter = spectr_jax.load_drafter(workdir / 'head', target[0], dtype='float32')
  trained_params = training.drafter().params
  assert jax.tree.structure(drafter.params) == jax.tree.structure(trained_params)
  for one, other in zip(jax.tree.leaves(drafter.params), jax.tree.leaves(trained_params), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-6)


@pytest.mark.slow
def test_a_run_continues_exactly(trained, target_folder, tmp_path):
  whole, _, workdir = trained
  path = epath.Path(tmp_path / 'run')
  path.mkdir()
  (tmp_path / 'run' / 'data').symlink_to(workdir / 'data')
  config = _config()
  config.num_steps = 12
  first = HeadTraining(config, target_folder, path, allow_fallback=False)
  first.config.num_steps = 8
  first.run()
  second = HeadTraining(_config(), target_folder, path, allow_fallback=False)
  assert second.step == 8
  second.run()
  for one, other in zip(jax.tree.leaves(second.state), jax.tree.leaves(whole.state), strict=True):
    np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_run_begins_with_a_saved_head(trained, target_folder, tmp_path):
  whole, outcome, workdir = trained
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / 'data').symlink_to(workdir / 'data')
  config = _config()
  config.update(init_from=str(workdir / 'head'), seed=1)

  def start(**changes):
    config.update(changes)
    return HeadTraining(config, target_folder, epath.Path(tmp_path / 'run'), allow_fallback=False)

  training = start()
  assert training.step == 0
  np.testing.assert_array_equal(training.target_ids, whole.target_ids)
  found = training.evaluate()
  for name, value in outcome.held_out.items():
    np.testing.assert_allclose(found[name], value, rtol=3e-3, atol=6e-3, err_msg=name)  # the head is stored in bfloat16
  assert all((x == 0).all() for x in jax.tree.leaves(training.state['opt_state']))
  training.run()
  assert training.evaluate()['loss'] < found['loss']
  with pytest.raises(ValueError, match='guesses 64 tokens, but config.vocab_size is 65'):
    start(vocab_size=65)
  with pytest.raises(ValueError, match=r'config.init_from: .* has mlp_dim \d+, the head of this run 20'):
    start(vocab_size=64, mlp_dim=20)
  with pytest.raises(ValueError, match='config.init_from: .*no head at'):
    start(init_from=str(tmp_path))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'num_shards': 1}, 'config.num_shards must be at least 2, got 1'),
    ({'vocab_size': 400}, 'config.vocab_size must be at most 310, got 400'),
    ({'temperatures': (-1.0,)}, 'config.temperatures must be numbers of at least 0'),
    ({'warmup_steps': 12}, 'warmup_steps must be below'),
    ({'mesh': 'data:3'}, 'mesh'),
  ],
)
def test_bad_configurations(target_folder, tmp_path, changes, message):
  config = _config()
  config.update(changes)
  with pytest.raises(ValueError, match=message):
    HeadTraining(config, target_folder, epath.Path(tmp_path / 'run'), allow_fallback=False)
  assert not (tmp_path / 'run').exists()


def test_a_target_without_enough_layers():
  assert feature_layers(30) == (2, 15, 27)
  with pytest.raises(ValueError, match='at least 6'):
    feature_layers(4)
