"""A tiny pair behind the endpoint."""

import jax
import pytest

from spectr_jax.models import causal_lm, transformer
from tests.serving.stub import LONGEST, NEW, client_of, make_stub, make_tokenizer, make_worker, patch, running


@pytest.fixture(scope='session')
def tokenizer():
  return make_tokenizer()


@pytest.fixture(scope='session')
def models(tokenizer):
  config = causal_lm.lm1b_config(
    tokenizer.vocab_size, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=16, context_length=LONGEST + NEW
  )
  params = [transformer.init_params(jax.random.key(seed), config) for seed in (0, 1)]
  # On a device of their own choice, as those of files are.
  return [causal_lm.causal_lm(jax.device_put(each, jax.devices()[0]), config) for each in params]


@pytest.fixture(scope='session')
def worker(models, tokenizer):
  with running(make_worker(models, tokenizer)) as worker:
    yield worker


@pytest.fixture(scope='session')
def client(worker, tokenizer):
  with client_of(worker, tokenizer) as client:
    yield client


@pytest.fixture
def stub(monkeypatch, tokenizer):
  """A worker that has not started, with rows that need no model."""
  patch(monkeypatch)
  worker = make_stub(tokenizer)
  yield worker
  worker.stop()
