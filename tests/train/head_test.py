"""Training of heads: the text that the target writes, the loss, and runs that continue."""

import dataclasses
import functools
import json
import re
import shutil

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny_hub
from etils import epath

import spectr_jax
from configs import head as head_experiment
from spectr_jax import TokenTree
from spectr_jax.draft import DraftContext, DraftRequest, model_drafter
from spectr_jax.draft.model_drafter import ModelDrafter
from spectr_jax.io.heads.head_sizes import feature_layers
from spectr_jax.io.model_files import open_model
from spectr_jax.models import causal_lm, head, one_pass
from spectr_jax.proposal import Independent
from spectr_jax.sampling import SamplingParams
from tests.draft.prompts import read as read_prompts
from tests.slow import slow
from tests.train.train_test import lines_of
from train import head_data, head_step
from train.eagle3_head import head_config, unrolled_outputs
from train.head_training import HeadTraining, check_config
from train.run_record import determining_fields

_LAYERS = (2, 3, 3, -1)
_OF_KIND = {
  'eagle3': {'vocab_size': 64}, 'medusa': {}, 'dspark': {'vocab_size': 64, 'block_size': 3, 'markov_rank': 4},
  'dflash': {'vocab_size': 64, 'block_size': 3}, 'model': {'num_layers': 3},
}  # fmt: skip


def _config(kind='eagle3', **changes):
  config = head_experiment.get_config(kind)
  config.update(
    num_shards=3, rows_per_shard=8, max_user_tokens=8, max_new_tokens=12, dtype='float32', data_dtype='float32',
    batch_size=4, num_steps=12, warmup_steps=2, learning_rate=3e-3, log_every=2, eval_every=6, checkpoint_every=4,
    mesh='data:1,model:1',
  )  # fmt: skip
  config.update(_OF_KIND[kind] | changes)
  return config


@pytest.fixture(scope='session')
def target(target_folder):
  return spectr_jax.load_model(target_folder)


@pytest.fixture(scope='session')
def make_draft(target, target_folder):
  """Makes a draft of a kind, its parameters at the beginning, also with noise, and what it reads of the target."""
  model = target[0]

  def make(kind, noise=0.0, **changes):
    config = _config(kind, **changes)
    draft = check_config(config).of(config, causal_lm.config_of(model), open_model(target_folder))
    unembedding = model.params['embedding'].T[:, : draft.num_ids]
    params = draft.init_params(jax.random.key(0), model, unembedding)
    params = jax.tree.map(lambda x: x + noise * jax.random.normal(jax.random.key(x.size), x.shape), params)
    return draft, params, draft.frozen_params(model) | {'unembedding': unembedding}

  return make


@pytest.fixture(scope='session')
def shard(target):
  config = _config(rows_per_shard=6, max_user_tokens=9, user_temperature=1.0, temperatures=(1.0, 0.0))
  return head_data.generate_shard(*target, config, _LAYERS, jax.random.key(0))


@pytest.fixture(scope='session')
def batch(shard):
  return head_step.HeadBatch(
    shard.tokens, shard.lengths, shard.starts, jnp.asarray(shard.features), np.arange(len(shard.lengths))
  )


@pytest.mark.slow
def test_a_shard_holds_conversations_and_their_hidden_states(target, shard):
  model, tokenizer = target
  before, after = head_data.chat_frame(tokenizer)
  assert tokenizer.encode_chat([{'role': 'user', 'content': 'owl'}]) == [*before, *tokenizer.encode('owl'), *after]
  features_of = model.with_features(_LAYERS)
  for row in range(len(shard.lengths)):
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


def test_training_sees_what_drafting_sees(target):
  """Entry i of step s is the head's guess after a chain of s guesses that equal the text."""
  model = target[0]
  block = dataclasses.replace(causal_lm.config_of(model), num_layers=1, vocab_size=30)
  config = head.HeadConfig(block, block.embed_dim, block.embed_dim, (2, 3, 3))
  params = head.init_params(jax.random.key(1), config)
  size = 6
  embedded = jax.random.normal(jax.random.key(2), (2, size, block.embed_dim))
  features = jax.random.normal(jax.random.key(3), (2, size, 3, block.embed_dim))
  outputs = unrolled_outputs(params, config, embedded, features, 3)
  hidden = head.hidden_of_features(params, config, features)

  @jax.jit
  def run(embedded, hidden):
    size = embedded.shape[1]
    positions, causal = jnp.broadcast_to(jnp.arange(size), (2, size)), jnp.tril(jnp.ones((size, size), bool))
    return head.apply(params, config, embedded, hidden, positions, causal, config.block.empty_cache(2, 1))[:2]

  for step, guesses in enumerate(outputs):
    for place in range(step, size):
      known = place - step + 1
      own = hidden[:, :known]
      for i in range(known, place + 2):
        after, output = run(embedded[:, :i], own)
        own = jnp.concatenate([own, after[:, -1:]], axis=1)
      np.testing.assert_allclose(guesses[:, place], output[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_loss_counts_what_the_target_wrote(shard, batch, make_draft):
  kind, params, frozen = make_draft('eagle3')

  @jax.jit
  def loss_of(batch):
    guesses, weights = kind.guesses(params, frozen, batch), head_step.LossWeights(0.5)
    return head_step.head_loss(guesses, frozen['unembedding'], batch, num_depths=2, weights=weights)

  loss, means = loss_of(batch)
  # A guess needs the hidden state of the token before the one that it reads.
  wanted = [sum(n - max(s, 2 + step) for n, s in zip(shard.lengths, shard.starts)) for step in range(2)]
  np.testing.assert_array_equal(means['count'], wanted)
  assert 0 < means['acceptance'].min() <= means['acceptance'].max() < 1
  cross_entropy = means['cross_entropy'] + (1 - means['acceptance'])
  np.testing.assert_allclose(loss, (cross_entropy[0] + 0.5 * cross_entropy[1]) / 1.5, rtol=1e-5)
  # What is behind the ends does not matter.
  is_end = (np.arange(batch.tokens.shape[1]) >= batch.lengths[:, None] - 1)[..., None, None]
  garbage = {'tokens': np.where(batch.tokens == 0, 5, batch.tokens), 'features': np.where(is_end, 3, batch.features)}
  np.testing.assert_allclose(loss_of(dataclasses.replace(batch, **garbage))[0], loss, rtol=1e-5)


@pytest.mark.slow
def test_medusa_training_sees_what_drafting_sees(target, shard, batch, make_draft):
  """Entry i of step s is the guess of head s for the token after a root at token i - s + 1."""
  model = target[0]
  kind, params, frozen = make_draft('medusa', noise=0.1, num_unrolled=3)
  guesses = kind.guesses(params, frozen, batch)
  drafter = kind.drafter(params, frozen, None, model.vocab_size)
  rows, propose = np.arange(len(shard.tokens)), jax.jit(type(drafter).propose)
  keys = jax.random.split(jax.random.key(1), (len(rows), 4))
  request = DraftRequest(keys, SamplingParams.make(len(rows)), TokenTree.chains(1, 3), Independent())
  for lengths in (shard.lengths - 4, shard.lengths - 5):
    context = DraftContext(jnp.asarray(lengths), model, features=jnp.asarray(shard.features[:, :, -1:]))
    proposal = propose(drafter, (), context, request)
    for step, each in enumerate(guesses):
      ((output, kernel),) = each.products
      assert (each.depths[lengths - 2 + step] == step).all()
      guess = output[rows, lengths - 2 + step] @ kernel
      np.testing.assert_allclose(proposal.probs[:, step], jax.nn.softmax(guess), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(('kind', 'markov_kind', 'rank'), [
  slow('dspark', 'vanilla', 4), slow('dspark', 'gated', 4), ('dspark', 'rnn', 4), ('dflash', 'vanilla', 0),
  slow('dflash', 'rnn', 4),
])  # fmt: skip
def test_one_pass_training_sees_what_drafting_sees(target, shard, batch, make_draft, kind, markov_kind, rank):
  """A block's guesses after tokens of the text are those of the drafter after the text up to the block's anchor."""
  own, params, frozen = make_draft(kind, noise=0.3, markov_rank=rank, markov_kind=markov_kind)
  (guesses,) = jax.jit(lambda batch: own.guesses(params, frozen, batch))(batch)
  logits = sum(x @ kernel for x, kernel in guesses.products)

  def loss_of(params):
    guesses, weights = own.guesses(params, frozen, batch), head_step.LossWeights(0.8, lk_weight=1.0)
    return head_step.head_loss(guesses, frozen['unembedding'], batch, num_depths=3, weights=weights)[0]

  for path, gradient in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss_of))(params)):
    assert 0 < np.abs(gradient).max() < np.inf, jax.tree_util.keystr(path)
  drafter = own.drafter(params, frozen, np.arange(64), target[0].vocab_size)
  one = own.config

  @jax.jit
  def drafted(text, features, anchor):
    """The logits and estimates of a block's guesses, each after the tokens of the text."""
    context = DraftContext(anchor[None] + 1, target[0], tokens=text, features=features)
    cache = read_prompts(drafter, context, text.shape[1])
    last = [jax.lax.dynamic_slice_in_dim(text, anchor + depth, 1, axis=1) for depth in range(3)]
    slots = jnp.pad(last[0], ((0, 0), (0, one.num_slots - 1)), constant_values=one.mask_id)
    outputs = one_pass.run_block(drafter.params, one, frozen['embedding'][slots], cache)
    block = one_pass.begin(drafter.params, one, outputs, last[0], 3)
    found, estimates, states = [], [], block.state
    for depth in range(3):
      wanted, states = one_pass.logits_after(drafter.params, one, block, jnp.int32(depth), last[depth], states)
      found.append(wanted[0, 0])
      if kind == 'dspark':
        estimates.append(one_pass.confidence_after(drafter.params, one, block, jnp.int32(depth), last[depth])[0, 0])
    return found, estimates

  num_checked = 0
  for row in (1, 2):
    for anchor in range(row, int(shard.lengths[row]) - 4, 3):
      text, features = shard.tokens[row : row + 1], shard.features[row : row + 1, :, :-1]
      found, estimates = drafted(jnp.asarray(text), jnp.asarray(features), jnp.int32(anchor))
      for depth in range(3):
        entry = anchor + 1 + depth - 2
        if entry < 0:
          continue
        assert guesses.depths[row, entry] == depth
        np.testing.assert_allclose(logits[row, entry], found[depth], rtol=1e-3, atol=1e-3)
        if kind == 'dspark':
          np.testing.assert_allclose(jax.nn.sigmoid(guesses.confidence[row, entry]), estimates[depth], rtol=1e-3)
        num_checked += 1
  assert num_checked > 10


@pytest.mark.parametrize('has_unembedding', [True, False])
def test_medusa_heads_begin_as_the_targets_output_head(shard, batch, make_draft, has_unembedding):
  kind, params, frozen = make_draft('medusa', has_unembedding=has_unembedding, dtype='bfloat16')
  assert ('unembedding' in params) == has_unembedding
  for step, each in enumerate(kind.guesses(params, frozen, batch)):
    ((output, kernel),) = each.products
    np.testing.assert_array_equal(output[:, step:], shard.features[:, : -2 - step, -1])
    np.testing.assert_array_equal(kernel, frozen['unembedding'])


def test_logits_in_parts_change_nothing(monkeypatch):
  keys = iter(jax.random.split(jax.random.key(0), 9))
  tokens = jax.random.randint(next(keys), (3, 13), 0, 9)
  batch = head_step.HeadBatch(
    tokens, jnp.array([13, 4, 9]), jnp.array([2, 2, 3]), jax.random.normal(next(keys), (3, 13, 1, 5)), jnp.arange(3)
  )
  outputs, kernels = jax.random.normal(next(keys), (3, 3, 11, 5)), jax.random.normal(next(keys), (3, 5, 9))
  depths = jnp.array([jnp.arange(11) % 4 - 1] * 3) + jnp.arange(3)[:, None] % 2
  weights = head_step.LossWeights(0.8, tv_weight=0.5, lk_weight=0.3)

  @jax.jit
  def run(outputs, kernels):
    sequential = ((outputs[1], kernels[1]), (outputs[2], kernels[2]))
    guesses = [
      head_step.guesses_ahead(outputs[0], kernels[0], 1),
      head_step.Guesses(sequential, depths, confidence=outputs[0, :, :, 0]),
    ]
    return head_step.head_loss(guesses, kernels[0] + 1, batch, num_depths=4, weights=weights)

  loss_of = jax.value_and_grad(run, (0, 1), has_aux=True)
  whole = loss_of(outputs, kernels)
  assert {len(each) for each in whole[0][1].values()} == {4}
  monkeypatch.setattr(head_step, '_MAX_LOGITS', 3 * 9 * 4)  # parts of 4, 4 and 3 places
  run.clear_cache()
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), loss_of(outputs, kernels), whole)


@pytest.fixture(scope='session', params=['eagle3', 'medusa', 'dspark', 'dflash', 'model'])
def trained(tmp_path_factory, target_folder, request):
  workdir = epath.Path(tmp_path_factory.mktemp('head') / 'run')
  training = HeadTraining(_config(request.param), target_folder, workdir, allow_fallback=False)
  return training, training.run(), workdir


@pytest.fixture
def continued(trained, target_folder, tmp_path):
  """Makes a run on the data of `trained`, in a directory by name."""

  def make(name='run', **changes):
    path = epath.Path(tmp_path / name)
    path.mkdir(exist_ok=True)
    if not (path / 'data').exists():
      (tmp_path / name / 'data').symlink_to(trained[2] / 'data')
    return HeadTraining(_config(trained[0].config.kind, **changes), target_folder, path, allow_fallback=False)

  return make


def _check_begun(training, outcome):
  """A run begins with what another one wrote, in bfloat16, and improves it."""
  assert training.step == 0
  held_out = training.evaluate()
  for name, value in outcome.held_out.items():
    np.testing.assert_allclose(held_out[name], value, rtol=3e-3, atol=6e-3, err_msg=name)
  assert all((x == 0).all() for x in jax.tree.leaves(training.state['opt_state']))
  assert training.run().held_out['loss'] < held_out['loss']


# Of `trained`.
_heads = pytest.mark.parametrize('trained', ['eagle3', 'medusa', 'dspark'], indirect=True)
_model = pytest.mark.parametrize('trained', ['model'], indirect=True)


def _params_of(drafter):
  return drafter.model.params if isinstance(drafter, ModelDrafter) else drafter.params


@pytest.mark.slow
def test_a_run_learns_and_logs(trained, target):
  training, outcome, workdir = trained
  held_out = [line for line in lines_of(workdir) if 'held_out_loss' in line]
  assert [line['step'] for line in held_out] == [6, 12]
  assert held_out[1]['held_out_loss'] < held_out[0]['held_out_loss']
  assert outcome.step == 12
  for depth in range(1, 1 + training.draft.num_depths):
    assert 0 < outcome.held_out[f'acceptance_{depth}'] < 1
  if training.target_ids is not None:
    assert (np.diff(training.target_ids) > 0).all()
  model = target[0]
  if training.config.kind == 'model':
    drafter = model_drafter(spectr_jax.load_model(training.result, dtype='float32')[0])
  else:
    drafter = spectr_jax.load_drafter(training.result, model, dtype='float32')
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-2, atol=1e-6), _params_of(drafter),
    _params_of(training.drafter()),
  )  # fmt: skip
  prompts, lengths = jax.random.randint(jax.random.key(5), (2, 5), 0, 300), jnp.array([5, 2])
  options = {'max_new_tokens': 6, 'sampling': SamplingParams(0.0)}
  plain = spectr_jax.generate(jax.random.key(0), model, None, prompts, lengths, method='autoregressive', **options)
  drafted = spectr_jax.generate(
    jax.random.key(0), model, drafter, prompts, lengths, method='spectr', tree=TokenTree.chains(2, 2), **options
  )
  np.testing.assert_array_equal(drafted.tokens, plain.tokens)


@pytest.mark.slow
def test_a_run_continues_exactly(trained, continued):
  first = continued()
  first.config.num_steps = 8
  first.run()
  second = continued()
  assert second.step == 8
  second.run()
  jax.tree.map(np.testing.assert_array_equal, second.state, trained[0].state)


@pytest.mark.slow
@_model
def test_what_is_logged_of_a_model_is_how_often_it_is_accepted(trained, target):
  """1 - TV of the written model's and the target's distributions, by forwards of the held-out conversations."""
  training, outcome, workdir = trained
  draft, tokenizer = spectr_jax.load_model(workdir / 'model', dtype='float32')
  assert causal_lm.config_of(draft).num_layers == 3
  assert tokenizer.fingerprint == target[1].fingerprint
  held_out = training.data.shard(0)
  positions = jnp.broadcast_to(jnp.arange(held_out.tokens.shape[1]), held_out.tokens.shape)
  causal = jnp.tril(jnp.ones((positions.shape[1],) * 2, bool))
  p, q = (
    jax.nn.softmax(model.apply(held_out.tokens, positions, causal, model.init_cache_fn(len(positions), 1)).logits)
    for model in (draft, target[0])
  )
  places = np.arange(positions.shape[1]) + 1  # the token that is guessed
  counts = (places >= np.maximum(held_out.starts[:, None], 2)) & (places < held_out.lengths[:, None])
  overlap = np.minimum(p, q).sum(-1)
  np.testing.assert_allclose(outcome.held_out['acceptance_1'], overlap[counts].mean(), atol=0.01)
  assert overlap[counts].std() > 0.01


@pytest.mark.slow
@_model
def test_a_run_begins_with_another_model(trained, target, continued, tmp_path):
  """All of it is trained; its vocabulary may be padded otherwise than the target's."""
  whole, outcome, workdir = trained
  training = continued(init_from=str(workdir / 'model'), seed=1)
  shapes = jax.tree.map(jnp.shape, causal_lm.param_shapes(training.draft.config))
  assert jax.tree.map(jnp.shape, training.state['params']) == shapes
  before = jax.device_get(training.state['params'])
  _check_begun(training, outcome)
  moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before, jax.device_get(training.state['params']))
  assert min(jax.tree.leaves(moved)) > 0
  for size in (305, 320):
    spec = json.loads((workdir / 'model' / 'config.json').read_text()) | {'vocab_size': size}
    tensors = safetensors.numpy.load_file(workdir / 'model' / 'model.safetensors')
    embedding = np.resize(tensors['model.embed_tokens.weight'], (size, tensors['model.embed_tokens.weight'].shape[1]))
    folder = tiny_hub.write(tmp_path / str(size), config=spec)
    safetensors.numpy.save_file(tensors | {'model.embed_tokens.weight': embedding}, folder / 'model.safetensors')
    padded = continued(f'run_{size}', init_from=str(folder))
    assert padded.frozen['unembedding'].shape[1] == min(size, target[0].vocab_size)
    assert np.isfinite(padded.run().held_out['loss'])
    written, _ = spectr_jax.load_model(tmp_path / f'run_{size}' / 'model')
    assert written.vocab_size == size
  folder = tiny_hub.write(tmp_path / 'other', tiny_hub.spaced_backend(), config=spec)
  shutil.copy(tmp_path / '320' / 'model.safetensors', folder)
  for message, changes in {
    'config.init_from: .*other: .*token': {'init_from': str(folder)},
    'config.init_from: .*no model at': {'init_from': str(tmp_path)},
    'config.num_layers must be at most 6, got 7': {'num_layers': 7},
  }.items():
    with pytest.raises(ValueError, match=message):
      continued(**changes)


@pytest.mark.slow
@_heads
def test_a_run_begins_with_a_saved_head(trained, continued, tmp_path):
  whole, outcome, workdir = trained
  head = {'init_from': str(workdir / 'head')}
  training = continued(**head, seed=1)
  np.testing.assert_array_equal(training.target_ids, whole.target_ids)
  _check_begun(training, outcome)
  for message, changes in {
    'no head at': {'init_from': str(tmp_path)},
    ': has_unembedding is': {'has_unembedding': not whole.config.has_unembedding},
    **{
      'eagle3': {
        ': vocab_size is 64, but 65 in this run': {'vocab_size': 65},
        r': mlp_dim is \d+, but 20 in this run': {'mlp_dim': 20},
      },
      'dspark': {': num_slots is 3, but 4 in this run': {'block_size': 4}},
      'medusa': {': num_heads is 2, but 3 in this run': {'num_unrolled': 3}},
    }[whole.config.kind],
  }.items():  # fmt: skip
    with pytest.raises(ValueError, match=f'config.init_from: .*{message}'):
      continued(**(head | changes))


@pytest.mark.slow
@_heads
def test_the_other_choice_of_an_output_head(trained, target, continued, tmp_path):
  own = not trained[0].config.has_unembedding
  training = continued(has_unembedding=own, num_steps=4)
  before = training.evaluate()
  assert training.run().held_out['loss'] < before['loss']
  params = spectr_jax.load_drafter(tmp_path / 'run' / 'head', target[0], dtype='float32').params
  moved = np.abs(params['unembedding'] - training.frozen['unembedding']).max()
  assert (moved > 1e-3) == own


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['eagle3', 'medusa', 'dspark', 'model'])
def test_two_processes_train_like_one(target_folder, tmp_path, kind):
  """They share the writing of the text and the rows of a batch."""
  config = _config(kind, mesh='data:-1,model:1', log_every=1)
  fields = [f'--config.{name}={value}' for name, value in config.items() if name != 'kind']
  arguments = [f'--config=configs/head.py:{kind}', f'--target={target_folder}', *fields]
  alone, together = tmp_path / 'alone', tmp_path / 'together'
  out = commands.succeed('train.head', *arguments, f'--workdir={alone}')
  assert 'on 1 devices' in out
  assert '\nrace_traversal ' in commands.succeed(*commands.printed(out), '--prompt=owl', '--max_new_tokens=2')
  processes = commands.start_two('train.head', *arguments, f'--workdir={together}', num_devices=2)
  outputs = [commands.finish(process) for process in processes]
  assert re.search('(?s)on 4 devices.*held-out', outputs[0])
  assert 'held-out' not in outputs[1]
  for number in range(3):
    assert f'shard {number} of 3' in outputs[number % 2]
    name = f'data/shard_{number:05d}.npz'
    one, other = (head_data.Shard.load(workdir / name) for workdir in (alone, together))
    for field in dataclasses.fields(one):
      np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))
  for one, other in zip(lines_of(alone), lines_of(together), strict=True):
    assert one.keys() == other.keys()
    for name, value in one.items():
      is_share = 'greedy' in name  # of equal likeliest tokens, which near ties change
      np.testing.assert_allclose(other[name], value, rtol=5e-4, atol=0.02 * is_share, err_msg=name)


@pytest.mark.parametrize(('changes', 'message'), [
  ({'num_shards': 1}, 'config.num_shards must be a whole number from 2 to .*, got 1'),
  ({'kind': 'hydra'}, 'config.kind must be one of eagle3, medusa, dspark, dflash, model, got hydra'),
  ({'vocab_size': 400}, 'config.vocab_size must be at most 310, got 400'),
  ({'temperatures': (-1.0,)}, 'config.temperatures must be numbers of at least 0'),
  ({'warmup_steps': 12}, 'warmup_steps must be below'),
  ({'mesh': 'data:3'}, 'mesh'),
  ({'user_files': 'missing.txt'}, "no file matches 'missing.txt'"),
])  # fmt: skip
def test_bad_configurations(target_folder, tmp_path, changes, message):
  config = _config()
  config.update(changes)  # the kind as well
  with pytest.raises(ValueError, match=message):
    HeadTraining(config, target_folder, epath.Path(tmp_path / 'run'), allow_fallback=False)
  assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_messages_of_the_user_may_be_given(target, target_folder, tmp_path):
  before, after = head_data.chat_frame(target[1])
  path = tmp_path / 'messages.txt'
  texts = [f'owl {number}\nand the {number}' for number in range(9)]
  path.write_text('\n\n'.join(texts))
  config = _config(num_shards=4, rows_per_shard=3, user_files=str(path))
  shards = HeadTraining(config, target_folder, epath.Path(tmp_path / 'run'), allow_fallback=False).data
  messages = []
  for number in range(4):
    shard = shards.shard(number)
    messages.append(set())
    for row, (tokens, start) in enumerate(zip(shard.tokens, shard.starts)):
      assert tokens[: len(before)].tolist() == before
      assert tokens[start - len(after) : start].tolist() == after
      assert shard.lengths[row] > start  # the answer alone counts
      messages[-1].add(tuple(tokens[len(before) : start - len(after)].tolist()))
  assert {message for each in messages for message in each} == {
    tuple(target[1].encode(text)[: config.max_user_tokens]) for text in texts
  }
  assert all(messages[0].isdisjoint(each) for each in messages[1:])
  assert messages[1] == messages[3] != messages[2]  # there are no more
  config.rows_per_shard = 5
  with pytest.raises(ValueError, match='config.user_files has 9 messages, and two shards take 10'):
    HeadTraining(config, target_folder, epath.Path(tmp_path / 'other'), allow_fallback=False)


def test_text_of_another_experiment(target_folder, shard, tmp_path):
  """Medusa heads learn from text that was written for a head of EAGLE-3's kind, but not the other way round."""
  last = dataclasses.replace(shard, features=shard.features[:, :, -1:])

  def start(config, shard):
    workdir = tmp_path / str(len(list(tmp_path.iterdir())))
    (workdir / 'data').mkdir(parents=True)
    for number in range(2):
      shard.save(workdir / 'data' / f'shard_{number:05d}.npz')
    return HeadTraining(config, target_folder, epath.Path(workdir), allow_fallback=False)

  config = _config('medusa', num_shards=2, rows_per_shard=6)
  losses = [start(config, each).evaluate()['loss'] for each in (shard, last)]
  assert losses[0] == losses[1]
  with pytest.raises(ValueError, match='holds 6 conversations with 1 hidden states a token; this run needs 8 with 1'):
    start(_config('medusa'), last)
  with pytest.raises(ValueError, match='holds 6 conversations with 1 hidden states a token; this run needs 6 with 4'):
    start(_config(num_shards=2, rows_per_shard=6), last)


@pytest.mark.slow
@pytest.mark.parametrize('trained', ['medusa'], indirect=True)
def test_a_run_is_continued_with_what_it_was_begun_with(trained, target_folder, tmp_path):
  whole, _, finished = trained
  run, config = tmp_path / 'run', _config('medusa')
  free = {
    'mesh', 'num_steps', 'log_every', 'eval_every', 'checkpoint_every', 'keep_checkpoints', 'user_files', 'init_from',
  }  # fmt: skip
  assert determining_fields(config).keys() == set(config) - free
  shutil.copytree(finished, run)
  shutil.rmtree(run / 'checkpoints' / '12')
  shutil.rmtree(run / 'head')
  other = tmp_path / 'other'
  shutil.copytree(target_folder, other)
  weights = safetensors.numpy.load_file(other / 'model.safetensors')
  safetensors.numpy.save_file({name: 0.9 * x for name, x in weights.items()}, other / 'model.safetensors')
  (tmp_path / 'texts.txt').write_text('\n\n'.join(f'owl {i}' for i in range(40)))

  def refuse(message, target=target_folder, **changes):
    with pytest.raises(ValueError, match=message) as info:
      HeadTraining(_config('medusa', **changes), target, epath.Path(run), allow_fallback=False)
    assert '\n' not in str(info.value)

  for name, value in {'num_shards': 4, 'tv_weight': 0.5, 'dtype': 'bfloat16', 'has_unembedding': False}.items():
    refuse(f'config.{name} is {value!r} and was {config[name]!r}', **{name: value})
  refuse(r'config.temperatures is \[0.5\] and was \[1.0, 1.0, 0.6, 0.0\]', temperatures=(0.5,))
  refuse("the content of --target is '[0-9a-f]+' and was '[0-9a-f]+'", target=other)
  refuse(r"the content of config.user_files is \['.*'\] and was \[\]", user_files=str(tmp_path / 'texts.txt'))
  refuse("the content of config.init_from is '[0-9a-f]+' and was ''", init_from=str(finished / 'head'))
  # A shard that is whole, and another one.
  shard = run / 'data' / 'shard_00001.npz'
  before = shard.read_bytes()
  written = head_data.Shard.load(shard)
  dataclasses.replace(written, starts=written.starts + 1).save(shard)
  refuse("the content of WORKDIR/data is '[0-9a-f]+' and was '[0-9a-f]+'")
  shard.write_bytes(before)
  # Where the files lie and what is logged is free.
  moved = tmp_path / 'moved'
  shutil.copytree(target_folder, moved)
  config.update(log_every=3, eval_every=5, checkpoint_every=5, keep_checkpoints=1)
  training = HeadTraining(config, moved, epath.Path(run), allow_fallback=False)
  assert training.step == 8
  training.run()
  jax.tree.map(np.testing.assert_array_equal, training.state, whole.state)
  shutil.rmtree(run / 'head')
  (run / 'head').write_text('mine')
  refuse('head exists and is not a folder that can be replaced')


def test_targets_without_enough_layers_or_whose_heads_could_not_be_written(target):
  assert feature_layers(30) == (2, 15, 27)
  with pytest.raises(ValueError, match='at least 6'):
    feature_layers(4)
  sizes = causal_lm.config_of(target[0])
  for field, value in (('gain_offset', 1.0), ('norm', 'layer'), ('has_post_norms', True)):
    with pytest.raises(ValueError, match=f'the format of EAGLE-3 cannot say that {field} is'):
      head_config(_config(), dataclasses.replace(sizes, **{field: value}))
  with pytest.raises(ValueError, match='this one has learned ones'):
    head_config(_config(), dataclasses.replace(sizes, rope=None))
