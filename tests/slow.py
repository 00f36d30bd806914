"""Parameters of which some are tested by default and the others among the slow tests."""

import functools

import pytest

slow = functools.partial(pytest.param, marks=pytest.mark.slow)  # as `pytest.param`, for the slow tests alone


def slow_but(first, among):
  """`among` as values of one parameter: those in `first` by default, all others for the slow tests."""
  return [value if value in first else slow(value) for value in among]
