"""Fixtures of the loop's tests: a pair of Markov chains that counts its traces, and a chain of which all is known."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.models.table import table_model


def _counting(model, traces):
  def apply_fn(*args):
    traces.append(args[1].shape)
    return model.apply_fn(*args)

  return dataclasses.replace(model, apply_fn=apply_fn)


@pytest.fixture(scope='session')
def traces():
  """Lists that grow whenever the target or the draft of `tables` is traced."""
  return {'target': [], 'draft': []}


@pytest.fixture(scope='session')
def tables(traces):
  """Two Markov chains over 6 tokens in partial agreement, with zeros in both."""
  logits = np.random.default_rng(0).normal(size=(2, 6, 6)) * 1.5
  logits[0, 1, :3] = logits[1, 2, 3:5] = -np.inf
  target, draft = (table_model(jnp.float32(x)) for x in logits)
  return _counting(target, traces['target']), _counting(draft, traces['draft'])


@pytest.fixture(scope='session')
def cycle():
  """x is followed by x + 1 modulo 5, always."""
  return table_model(jnp.where(jnp.eye(5)[:, jnp.array([4, 0, 1, 2, 3])] > 0, 0.0, -jnp.inf))
