"""The loss of training: closed forms, sums block by block, teachers, dropout, and evaluation by the same sums."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import load_model, save_model
from spectr_jax.io.tokenizer import Tokenizer
from spectr_jax.models.causal_lm import causal_lm, config_of, lm1b_config
from spectr_jax.models.transformer import Transformer, init_params
from spectr_jax.sharding import make_mesh
from tests.slow import slow
from train import step
from train.block_sums import sum_over_blocks
from train.evaluate import evaluate
from train.input_pipeline import PackedText, encode_documents
from train.step import Learner, Teacher, init_state, make_optimizer, make_train_step, packed_logits
from train.train import check_config, make_teacher, read_teacher, train

_init_params = jax.jit(init_params, static_argnames='config')
_SIZES = dict(embed_dim=16, num_layers=2, num_heads=2, mlp_dim=32)
_sum_of_losses, _sum_of_overlaps, _packed_logits = (
  jax.jit(fn, static_argnames='learner') for fn in (step.summed_losses, step.summed_overlaps, packed_logits)
)


def _close(tree, expected, **tolerance):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), tree, expected)


@pytest.fixture(scope='module')
def network(tokenizer):
  network = lm1b_config(tokenizer.vocab_size, context_length=24, **_SIZES)
  return _init_params(jax.random.key(3), config=network), network


@functools.partial(jax.jit, static_argnums=1)
def _causal_logits(params, network, tokens):
  length = tokens.shape[0]
  return Transformer(network).apply(
    {'params': params}, tokens[None], jnp.arange(length)[None], jnp.tril(jnp.ones((length, length), bool))
  )[0][0]


def _own_losses(params, network, tokens):
  """-log p of tokens[1:], by a plain causal forward of one document of up to 25 tokens."""
  length = len(tokens) - 1
  padded = np.pad(np.asarray(tokens), (0, 25 - len(tokens)))  # one shape, one compilation
  log_probs = jax.nn.log_softmax(_causal_logits(params, network, padded))
  return -np.asarray(log_probs)[np.arange(length), np.asarray(tokens)[1:]]


def _token_losses(params, rows, learner, teacher=None):
  """The losses `[B, T]` from all logits at once, 0 where there is no target."""
  inputs, targets = rows[:, :-1], rows[:, 1:]
  log_p = jax.nn.log_softmax(packed_logits(params, inputs, learner))
  losses = -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
  if teacher is not None:
    log_q = jax.nn.log_softmax(packed_logits(teacher.params, inputs, Learner(teacher.config, learner.bos_id)))
    losses = teacher.weight * (jnp.exp(log_q) * (log_q - log_p)).sum(-1) + (1 - teacher.weight) * losses
  return losses * (targets != learner.bos_id)


def test_attention_stays_within_documents(network, tokenizer):
  params, network = network
  bos = tokenizer.bos_id
  first, second = [bos, 270, 271, 272, 2], [bos, 280, 281, 282, 283]
  other = [bos, 290, 291, 292, 2]
  rows = jnp.array([first + second, other + second])
  learner = Learner(network, bos)
  losses = jax.jit(_token_losses, static_argnums=2)(params, rows, learner)
  np.testing.assert_array_equal(losses[0, 5:], losses[1, 5:])
  # A document's first token is no target; its own position counts from the row's start, which rotary embeddings do
  # not see but by rounding.
  np.testing.assert_array_equal(losses[:, 4], 0)
  np.testing.assert_allclose(losses[0, :4], _own_losses(params, network, first), rtol=1e-4)
  np.testing.assert_allclose(losses[0, 5:], _own_losses(params, network, second), rtol=1e-4)
  total, count = _sum_of_losses(params, rows, learner=learner)
  np.testing.assert_allclose(total, losses.sum(), rtol=1e-5)
  assert count == 16


def test_evaluation_equals_a_direct_computation(network, tokenizer, documents):
  params, network = network
  learner, text = Learner(network, tokenizer.bos_id), encode_documents(tokenizer, iter(documents[:30]))
  num_rows = text.num_rows(24)
  assert num_rows % 4, 'the last batch should be padded'
  metrics = evaluate(params, text, learner, seq_len=24, batch_size=4)
  losses = []
  for row in text.rows(np.arange(num_rows), 24):
    starts = [0, *(i for i in range(1, 25) if row[i] == tokenizer.bos_id), 25]
    for begin, end in zip(starts, starts[1:]):
      if end - begin > 1:  # a row may begin within a document, whose earlier tokens it does not see
        losses.extend(_own_losses(params, network, row[begin:end]))
  num_tokens = sum(len(tokenizer.encode(document)) + 1 for document in documents[:30])
  bits = np.mean(losses) / math.log(2) * num_tokens / sum(len(d.encode()) for d in documents[:30])
  wanted = {'loss': np.mean(losses), 'perplexity': math.exp(np.mean(losses)), 'bits_per_byte': bits}
  assert metrics == pytest.approx(wanted, rel=1e-5)
  assert evaluate(params, text, learner, seq_len=24, batch_size=7)['loss'] == pytest.approx(metrics['loss'], rel=1e-5)
  assert evaluate(params, text, learner, seq_len=24, batch_size=4, max_batches=2)['loss'] != metrics['loss']
  with pytest.raises(ValueError, match='held-out text of 3 tokens'):
    evaluate(params, PackedText(text.tokens[:3], 9), learner, seq_len=24, batch_size=4)


# Sums block by block.


@pytest.mark.parametrize('size', [1, 3, 4, 7, 20])
def test_sums_and_gradients_are_those_of_all_tokens(size):
  keys = jax.random.split(jax.random.key(0), 3)
  kernel, inputs, shift = (jax.random.normal(key, shape) for key, shape in zip(keys, [(5, 6), (2, 7, 5), (6,)]))
  weights = jnp.arange(14.0).reshape(2, 7)

  def sums(kernel, inputs, shift, weights):
    values = jax.nn.logsumexp(inputs @ kernel + shift, axis=-1)
    return jnp.sum(values * weights), {'squares': jnp.sum(values**2 * weights)}

  def loss(kernel, inputs, size):
    total, others = sum_over_blocks(sums, kernel, inputs, shift, weights, size=size)
    return 3 * total, others

  differentiate = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
  expected = differentiate(kernel, inputs, 7)
  _close(differentiate(kernel, inputs, size), expected, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(jax.jit(loss, static_argnums=2)(kernel, inputs, size)[0], expected[0][0], rtol=1e-5)


@pytest.mark.parametrize(('by', 'num_products'), [((0,), 2), ((1,), 2), ((0, 1), 3)])
def test_gradients_are_taken_by_what_they_are_asked_for_alone(by, num_products):
  """A frozen output head costs no product of its own."""
  kernel, inputs = jnp.ones((5, 6)) / 3, jnp.arange(70.0).reshape(2, 7, 5) / 35
  weights = jnp.arange(14.0).reshape(2, 7)

  def sums(kernel, inputs, _, weights):
    return jnp.sum(jax.nn.logsumexp(inputs @ kernel, axis=-1) * weights), ()

  def loss(kernel, inputs, size):
    return sum_over_blocks(sums, kernel, inputs, (), weights, size=size)[0]

  grad = jax.grad(loss, by)
  _close(grad(kernel, inputs, 3), grad(kernel, inputs, 7), rtol=1e-5)
  assert str(jax.make_jaxpr(grad, static_argnums=2)(kernel, inputs, 3)).count('dot_general') == num_products


def test_totals_of_logits_of_any_size():
  """Beyond 88 an exponential of float32 overflows, below -103 it is 0."""
  log_total = jax.jit(step.log_total)
  for scale in (1.0, 30.0, 1e4):
    for shift in (0.0, 70.0, -70.0, 1e4, -1e4):
      logits = np.float32(scale * np.random.default_rng(0).normal(size=(3, 50)) + shift)
      exact = np.float64(logits)
      top = exact.max(-1)
      wanted = top + np.log(np.exp(exact - top[:, None]).sum(-1))
      np.testing.assert_allclose(log_total(logits), wanted, rtol=3e-6, atol=3e-6, err_msg=f'{scale}, {shift}')


@pytest.mark.parametrize('share', [None, slow(1.0), 0.25])
def test_the_loss_of_training_is_the_sum_of_the_losses_of_tokens(share, monkeypatch):
  config, bos = lm1b_config(40, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=32, context_length=24), 1
  params, other = (jax.tree.map(lambda x: 2 * x, _init_params(jax.random.key(i), config=config)) for i in (0, 1))
  learner = Learner(config, bos)
  rows = np.random.default_rng(0).integers(2, 40, (2, 14))
  rows[:, [0, 6]] = bos
  teacher = None if share is None else Teacher(other, config, share)
  monkeypatch.setattr(step, '_BLOCK_LOGITS', 2 * 4 * 40)  # 13 tokens in blocks of 4

  def in_blocks(params):
    return step.summed_losses(params, rows, learner, teacher)

  whole = jax.value_and_grad(lambda params: _token_losses(params, rows, learner, teacher).sum())
  expected, wanted = jax.jit(whole)(params)
  (total, count), grads = jax.jit(jax.value_and_grad(in_blocks, has_aux=True))(params)
  assert count == 24
  np.testing.assert_allclose(total, expected, rtol=1e-5)
  _close(grads, wanted, rtol=1e-4, atol=1e-5)
  if teacher is not None:
    p, q = (
      jax.nn.softmax(_packed_logits(each, rows[:, :-1], learner=learner)) * (rows[:, 1:, None] != bos)
      for each in (params, other)
    )
    overlap, count = _sum_of_overlaps(params, rows, learner=learner, teacher=teacher)
    np.testing.assert_allclose(overlap, np.minimum(p, q).sum(), rtol=1e-4)
    assert count == 24


def test_no_array_of_all_logits_is_made(monkeypatch):
  config = lm1b_config(1000, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=32, context_length=64)
  params = _init_params(jax.random.key(0), config=config)
  rows = np.full((2, 65), 5)
  monkeypatch.setattr(step, '_BLOCK_LOGITS', 2 * 8 * 1000)
  grad = jax.jit(jax.grad(lambda params: step.summed_losses(params, rows, Learner(config, 1))[0]))
  text = grad.lower(params).compile().as_text()
  assert 'f32[2,8,1000]' in text
  assert 'f32[2,64,1000]' not in text


@pytest.mark.slow
def test_microbatches_give_the_gradient_of_the_whole_batch(config):
  """In float64 up to rounding, though the parts hold different numbers of targets."""
  with jax.enable_x64(True):
    config.model.dtype = 'float64'
    model_config, optimizer = check_config(config), make_optimizer(config)
    rows = np.random.default_rng(0).integers(3, config.vocab_size, (4, 25))
    rows[0, 5::3] = 1  # many documents, few targets
    results = []
    for shape in ((1, 4), (2, 2), (4, 1)):
      state = init_state(0, optimizer, model_config)
      state = jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, state)
      run = make_train_step(optimizer, Learner(model_config, 1, make_mesh({})))
      for _ in range(3):
        state, loss = run(state, jnp.asarray(rows.reshape(*shape, 25), jnp.int32), None)
      results.append((state['params'], loss))
  for other in results[1:]:
    _close(other, results[0], rtol=1e-6, atol=1e-9)


# Teachers.


def test_who_has_the_teachers_distributions_learns_nothing(network, tokenizer):
  params, config = network
  rows = np.random.default_rng(0).integers(3, tokenizer.vocab_size, (2, 14))
  learner, teacher = Learner(config, tokenizer.bos_id), Teacher(params, config)
  differentiate = jax.jit(jax.value_and_grad(lambda params: step.summed_losses(params, rows, learner, teacher)[0]))
  value, grads = differentiate(params)
  assert abs(value) < 1e-4
  assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(grads)) < 1e-4


@pytest.mark.slow
def test_a_distilled_draft_comes_nearer_to_its_target(tmp_path, config):
  config.update(num_steps=60, eval_every=30)
  train(config, tmp_path / 'target')
  # Sharper than what a few steps teach, so that there is something to learn.
  model, tokenizer = load_model(tmp_path / 'target' / 'model')
  params = {**model.params, 'final_norm': {'gain': 4 * model.params['final_norm']['gain']}}
  save_model(tmp_path / 'sharp', causal_lm(params, config_of(model)), tokenizer)
  config.distill_from = str(tmp_path / 'sharp')
  config.model.update(embed_dim=12, mlp_dim=24)
  outcome = train(config, tmp_path / 'draft')
  lines = [json.loads(line) for line in (tmp_path / 'draft' / 'metrics.jsonl').read_text().splitlines()]
  first, last = [line['held_out_overlap'] for line in lines if 'held_out_overlap' in line]
  assert outcome.held_out['overlap'] == pytest.approx(last, abs=0.05)
  config.distill_weight = 1e-6
  plain = train(config, tmp_path / 'plain')
  assert outcome.held_out['overlap'] > plain.held_out['overlap'] + 0.01
  assert first <= last


def test_teachers_in_the_type_of_the_configuration_and_those_that_cannot_teach(tmp_path, config, documents, tokenizer):
  def save(name, tokenizer, max_length=24):
    network = lm1b_config(config.vocab_size, context_length=max_length, **_SIZES)
    model = causal_lm(_init_params(jax.random.key(0), config=network), network)
    save_model(tmp_path / name, model, tokenizer)

  save('target', tokenizer)
  save('other', Tokenizer.train(documents[:200], config.vocab_size))
  save('short', tokenizer, max_length=8)
  config.distill_from = str(tmp_path / 'target')
  mesh = make_mesh({}, jax.devices()[:1])
  for dtype, expected in (('', 'float32'), ('bfloat16', 'bfloat16')):
    config.distill_dtype = dtype
    teacher = make_teacher(config, read_teacher(config, tokenizer), mesh)
    assert teacher.config.dtype == expected
    assert teacher.params['embedding'].dtype == expected
  for name, dtype, message in (
    ('target', 'float16', "config.distill_dtype must be float32, bfloat16 or empty for the teacher's own"),
    ('missing', '', 'no model at .*missing'),
    ('other', '', 'other has another tokenizer than'),
    ('short', '', 'short was trained at 8 tokens, config.seq_len is 24'),
  ):
    config.update(distill_from=str(tmp_path / name), distill_dtype=dtype)
    with pytest.raises(ValueError, match=message):
      train(config, tmp_path / 'run')


# Dropout and the optimizer.


def test_dropout_leaves_out_what_blocks_add(network, tokenizer):
  params, network = network
  rows = jnp.asarray(np.random.default_rng(0).integers(3, tokenizer.vocab_size, (2, 12)))

  def logits(dropout=0.0, dropout_key=None):
    return _packed_logits(
      params, rows, learner=Learner(network, tokenizer.bos_id, dropout=dropout), dropout_key=dropout_key
    )

  np.testing.assert_array_equal(logits(dropout=0.5), logits())  # not without a key
  one, other = (logits(dropout=0.5, dropout_key=jax.random.key(seed)) for seed in (0, 1))
  assert (np.abs(one - other).max(axis=-1) > 1e-3).all()
  # Without anything from the blocks, only the token itself is left.
  everything = logits(dropout=1.0, dropout_key=jax.random.key(0))
  embedding = params['embedding']
  x = embedding[rows] * embedding.shape[1] ** 0.5
  x = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6)
  np.testing.assert_allclose(everything, x @ embedding.T, rtol=1e-4, atol=1e-5)


def test_dropout_differs_between_steps_and_seeds(config, tokenizer):
  model_config, optimizer, mesh = check_config(config), make_optimizer(config), make_mesh({})
  rows = jnp.asarray(np.random.default_rng(0).integers(3, config.vocab_size, (1, 4, 25)), jnp.int32)
  learner = Learner(model_config, tokenizer.bos_id, mesh, dropout=0.5)
  steps = [make_train_step(optimizer, learner, seed=seed) for seed in range(2)]
  initial = init_state(0, optimizer, model_config)

  def loss(at, seed):
    state = jax.tree.map(jnp.copy, {**initial, 'step': jnp.asarray(at, jnp.int32)})  # it is donated
    return float(steps[seed](state, rows, None)[1])

  assert loss(3, 0) == loss(3, 0)
  assert len({loss(3, 0), loss(4, 0), loss(3, 1)}) == 3


def test_the_schedule_warms_up_and_decays(config):
  config.update(weight_decay=0.0, max_grad_norm=1e9)
  optimizer = make_optimizer(config)
  params = {'kernel': jnp.ones((2, 2))}
  state, sizes = optimizer.init(params), []
  for _ in range(12):
    updates, state = optimizer.update({'kernel': jnp.ones((2, 2))}, state, params)
    sizes.append(float(jnp.abs(updates['kernel']).max()))
  # With a constant gradient Adam's update is the learning rate.
  assert sizes[:3] == pytest.approx([0, 5e-3, 1e-2], rel=1e-3)
  assert all(a > b for a, b in zip(sizes[2:], sizes[3:]))
  assert sizes[-1] == pytest.approx(1e-3 + 9e-3 * (1 + math.cos(math.pi * 9 / 10)) / 2, rel=1e-3)
