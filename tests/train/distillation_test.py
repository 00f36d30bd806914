"""A draft that learns the laws of its target."""

import json

import jax
import numpy as np
import pytest

from spectr_jax import load_model, save_model
from spectr_jax.io.tokenizer import Tokenizer
from spectr_jax.models.transformer import TransformerConfig, config_of, init_params, transformer_model
from spectr_jax.sharding import make_mesh
from train import step
from train.train import make_teacher, read_teacher, train

_init_params = jax.jit(init_params, static_argnames='config')
NETWORK = dict(embed_dim=16, num_layers=2, num_heads=2, mlp_dim=32)


@pytest.fixture(scope='module')
def laws(tokenizer):
  """Rows of two documents, a learner and a teacher, and the laws of both after every token."""
  config = TransformerConfig(tokenizer.vocab_size, max_length=24, **NETWORK)
  learner, teacher = (_init_params(jax.random.key(seed), config=config) for seed in (0, 1))
  teacher = jax.tree.map(lambda x: 2 * x, teacher)
  rows = np.random.default_rng(0).integers(3, tokenizer.vocab_size, (2, 13))
  rows[:, [0, 7]] = tokenizer.bos_id
  logits = jax.jit(step.packed_logits, static_argnums=2)
  probs = [
    np.asarray(jax.nn.softmax(logits(params, rows[:, :-1], step.Learner(config, tokenizer.bos_id))))
    for params in (learner, teacher)
  ]
  return config, rows, learner, teacher, *probs


def test_loss_and_overlap_in_closed_form(tokenizer, laws):
  config, rows, learner, teacher, own, other = laws
  weights = rows[:, 1:] != tokenizer.bos_id
  divergence = (other * np.log(other / own)).sum(-1)
  likelihood = -np.log(np.take_along_axis(own, rows[:, 1:, None], axis=-1)[..., 0])
  own_sizes = step.Learner(config, tokenizer.bos_id)
  token_losses, overlaps = (jax.jit(fn, static_argnums=2) for fn in (step.token_losses, step.overlaps))
  for share in (1.0, 0.25):
    losses, found = token_losses(learner, rows, own_sizes, step.Teacher(teacher, config, share))
    np.testing.assert_array_equal(found, weights)
    wanted = (share * divergence + (1 - share) * likelihood) * weights
    np.testing.assert_allclose(losses, wanted, rtol=2e-4, atol=1e-6)
  found, _ = overlaps(learner, rows, own_sizes, step.Teacher(teacher, config))
  np.testing.assert_allclose(found, np.minimum(own, other).sum(-1) * weights, rtol=1e-4)


def test_who_has_the_teachers_laws_learns_nothing(tokenizer, laws):
  config, rows, learner, _, _, _ = laws

  def loss(params):
    own_sizes = step.Learner(config, tokenizer.bos_id)
    return step.token_losses(params, rows, own_sizes, step.Teacher(learner, config))[0].sum()

  value, grads = jax.jit(jax.value_and_grad(loss))(learner)
  assert abs(value) < 1e-4
  assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(grads)) < 1e-4


def overlaps_of(workdir):
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  return [line['held_out_overlap'] for line in lines if 'held_out_overlap' in line]


@pytest.mark.slow
def test_a_distilled_draft_comes_nearer_to_its_target(tmp_path, make_config):
  config = make_config()
  config.num_steps = 60
  config.eval_every = 30
  train(config, tmp_path / 'target')
  # Sharper than what a few steps teach, so that there is something to learn.
  model, tokenizer = load_model(tmp_path / 'target' / 'model')
  params = {**model.params, 'final_norm': {'gain': 4 * model.params['final_norm']['gain']}}
  save_model(tmp_path / 'sharp', transformer_model(params, config_of(model)), tokenizer)
  config.distill_from = str(tmp_path / 'sharp')
  config.model.update(embed_dim=12, mlp_dim=24)
  outcome = train(config, tmp_path / 'draft')
  first, last = overlaps_of(tmp_path / 'draft')
  assert outcome.held_out['overlap'] == pytest.approx(last, abs=0.05)
  config.distill_weight = 1e-6
  plain = train(config, tmp_path / 'plain')
  assert outcome.held_out['overlap'] > plain.held_out['overlap'] + 0.01
  assert first <= last


def test_a_teacher_computes_in_the_type_of_the_configuration(tmp_path, make_config):
  config = make_config()
  network = TransformerConfig(config.vocab_size, max_length=24, **NETWORK)
  model = transformer_model(_init_params(jax.random.key(0), config=network), network)
  tokenizer = Tokenizer.load(config.tokenizer)
  save_model(tmp_path / 'target', model, tokenizer)
  config.distill_from = str(tmp_path / 'target')
  mesh = make_mesh({}, jax.devices()[:1])
  for dtype, expected in (('', 'float32'), ('bfloat16', 'bfloat16')):
    config.distill_dtype = dtype
    teacher = make_teacher(config, read_teacher(config, tokenizer), mesh)
    assert teacher.config.dtype == expected
    assert teacher.params['embedding'].dtype == expected
  config.distill_dtype = 'float16'
  with pytest.raises(ValueError, match="config.distill_dtype must be float32, bfloat16 or empty for the teacher's own"):
    train(config, tmp_path / 'run')


def test_teachers_that_cannot_teach(tmp_path, make_config, documents):
  config = make_config()
  config.distill_from = str(tmp_path / 'missing')
  with pytest.raises(ValueError, match='no model at .*missing'):
    train(config, tmp_path / 'run')
  network = TransformerConfig(config.vocab_size, max_length=24, **NETWORK)
  model = transformer_model(_init_params(jax.random.key(0), config=network), network)
  save_model(tmp_path / 'other', model, Tokenizer.train(documents[:200], config.vocab_size))
  config.distill_from = str(tmp_path / 'other')
  with pytest.raises(ValueError, match='other has another tokenizer than'):
    train(config, tmp_path / 'run')
  short = TransformerConfig(config.vocab_size, max_length=8, **NETWORK)
  model = transformer_model(_init_params(jax.random.key(0), config=short), short)
  save_model(tmp_path / 'short', model, Tokenizer.load(config.tokenizer))
  config.distill_from = str(tmp_path / 'short')
  with pytest.raises(ValueError, match='short was trained at 8 tokens, config.seq_len is 24'):
    train(config, tmp_path / 'run')
