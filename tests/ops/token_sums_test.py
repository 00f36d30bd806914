"""Sums over tokens: the kernel, run operation by operation, against the plain form that other platforms run."""

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.couplings import kseq
from spectr_jax.ops import class_sums, gamma_sections, token_sums


@pytest.fixture
def kernels(monkeypatch):
  """The kernel in the place of the plain form; also the shapes that it was called with."""
  seen = []

  def launch(plain, kernel, *arrays):
    seen.append([x.shape for x in arrays])
    return kernel(*arrays, interpret=True)

  def by_platform(*arguments, tpu, default):
    return tpu(*arguments)

  monkeypatch.setattr(token_sums, 'launch', launch)
  monkeypatch.setattr(token_sums, 'by_platform', by_platform)
  return seen


def _laws(num_rows, vocab_size):
  rng = np.random.default_rng(vocab_size)
  return np.float32(rng.dirichlet(np.full(vocab_size, 0.1), (2, num_rows)))


# A register and parts of a turn, turns and a rest of one, and whole turns.
@pytest.mark.parametrize('vocab_size', [128, 1408, 1280])
def test_the_kernel_adds_up_classes(kernels, vocab_size):
  p, q = _laws(1, vocab_size)[:, 0]
  classes = np.int32(np.random.default_rng(1).integers(0, 19, vocab_size))  # 8 at a time and a rest
  found = class_sums._compare(p, q, classes, num_classes=19)
  expected = [np.bincount(classes, own.astype(np.float64), 19) for own in (p, q)]
  np.testing.assert_allclose(found, np.transpose(expected), rtol=2e-6)
  assert kernels == [[(1, vocab_size)] * 3 + [(1, 1)]]


def test_the_kernel_finds_the_thresholds_of_k_seq(kernels):
  p, q = _laws(1, 1280)[:, 0]
  number = jnp.asarray(4)
  found = kseq._by_sections(p, q, number, num_rounds=16)
  assert len(kernels) == 1  # traced once for all passes
  np.testing.assert_allclose(found, kseq._by_chords(p, q, number, num_rounds=16), atol=3 / 2**15)


@pytest.mark.parametrize('num_rows', [1, 8, 11])  # fewer rows than a register has, as many, and a rest
def test_rows_have_sums_of_their_own(num_rows):
  p, q = _laws(num_rows, 640)
  gammas = np.float32(np.linspace(1, 3, num_rows * 5).reshape(num_rows, 5))
  (found,) = token_sums.token_sums_kernel(p, q, gammas, token_fns=[kseq._overlaps_of_token], interpret=True)
  expected = [[np.minimum(a, b / gamma).sum() for gamma in own] for a, b, own in zip(p, q, gammas)]
  assert found.shape == (num_rows, 5)
  np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_what_does_not_fit_is_computed_by_the_plain_form(kernels):
  p, q = _laws(1, 130)[:, 0]
  classes = np.int32(np.arange(130) % 3)
  found = class_sums._compare(p, q, classes, num_classes=3)
  np.testing.assert_allclose(found[:, 0], np.bincount(classes, p, 3), rtol=2e-6)
  with jax.enable_x64(True):
    found = class_sums._compare(*jnp.float64(_laws(1, 128)[:, 0]), jnp.zeros(128, jnp.int32), num_classes=1)
  assert found.dtype == np.float64
  assert not kernels


@pytest.mark.slow
def test_devices_add_up_their_parts():
  assert commands.succeed('tests.ops.divided_sums', num_devices=2).strip() == 'equal'


@pytest.mark.parametrize('num_rows', [1, 8, 11])
def test_a_kernel_narrows_the_brackets_of_k_seq(num_rows):
  rng = np.random.default_rng(num_rows)
  number = np.float32(rng.integers(1, 9, (num_rows, 1)))
  points = np.asarray(gamma_sections.sections(jnp.ones((num_rows, 1)), jnp.asarray(number), 16))
  assert (points[:, -1:] == number).all()
  betas = np.float32(rng.random((num_rows, 1)) / points)
  (found,) = gamma_sections.narrow_kernel(betas, points, number, interpret=True)
  expected = jax.vmap(gamma_sections.narrow_sections)(betas, points, number[:, 0])
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  excess = 1 - (1 - betas) ** number - points * betas
  for row, own, gammas in zip(found, excess, points):
    first = np.argmax((own <= 0) | (np.arange(17) == 16))
    np.testing.assert_allclose([row[0], row[-1]], [gammas[max(first - 1, 0)], gammas[first]], rtol=1e-6)
