"""The values that fields of experiments may have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

# A field, the values that it may have in words, and the test. NaN fails every test.
Rule = tuple[str, str, Callable[[Any], bool]]


def at_least(least: int, *names: str) -> tuple[Rule, ...]:
  """Rules of fields that are numbers of at least `least`."""
  return tuple((name, f'at least {least}', lambda x: x >= least) for name in names)


def finite_at_least_0(*names: str) -> tuple[Rule, ...]:
  """Rules of fields that are finite numbers of at least 0."""
  return tuple((name, 'finite and at least 0', lambda x: 0 <= x < math.inf) for name in names)


# Of the optimizer, the logs and the checkpoints, which all experiments have.
RULES_OF_RUNS: tuple[Rule, ...] = (
  *at_least(1, 'batch_size', 'num_steps', 'log_every', 'eval_every', 'checkpoint_every', 'keep_checkpoints'),
  *finite_at_least_0('seed', 'warmup_steps', 'weight_decay'),
  *((name, 'finite and above 0', lambda x: 0 < x < math.inf) for name in ('learning_rate', 'max_grad_norm')),
  ('adam_b2', 'at least 0 and below 1', lambda x: 0 <= x < 1),
)


def check_fields(config, rules: Iterable[Rule]) -> None:
  """Checks the fields of an experiment, those of `RULES_OF_RUNS` and its own.

  Args:
    config: The experiment.
    rules: The rules of its own fields.

  Raises:
    ValueError: A field is missing or has an invalid value.
  """
  for name, allowed, is_valid in (*RULES_OF_RUNS, *rules):
    if name not in config:
      raise ValueError(f'config.{name} is missing')
    if not is_valid(config[name]):
      raise ValueError(f'config.{name} must be {allowed}, got {config[name]}')
  if config.warmup_steps >= config.num_steps:
    raise ValueError(
      f'config.warmup_steps must be below config.num_steps, got {config.warmup_steps} and {config.num_steps}'
    )
