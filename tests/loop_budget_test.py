"""The budget for compilations of the loop counts them, and fails a run that takes more."""

import types

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from loop_budget import LoopBudget

from spectr_jax import generate
from spectr_jax.models import table


def _exit_status(budget):
  session = types.SimpleNamespace(config=types.SimpleNamespace(), exitstatus=0)
  budget.pytest_sessionfinish(session)
  return session.exitstatus


def test_a_run_over_the_budget_fails():
  counting, ample = LoopBudget(most=1), LoopBudget(most=2)
  model = table.table_model(jnp.zeros((11, 11)))  # a vocabulary that no other test has
  for budget in (counting, ample):
    jax.monitoring.register_event_duration_secs_listener(budget.note)
  for batch_size in (1, 2, 1):  # two programs
    generate(jax.random.key(0), model, None, np.zeros((batch_size, 1), int), method='autoregressive', max_new_tokens=2)
  assert _exit_status(counting) == 1
  assert 'each process: 2, at most 1' in counting.summary
  assert _exit_status(ample) == 0
