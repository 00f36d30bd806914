"""The kernel that fits races, interpreted, against the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.couplings.race import Race
from spectr_jax.kernels.dispatch import tracing_for
from spectr_jax.kernels.tpu.recursions import fit_races
from tests.slow import slow


def _masses(num_races, num_classes):
  """Masses as those of random distributions in ascending order of q/p, some classes without any."""
  rng = np.random.default_rng(0)
  draft = rng.dirichlet(np.full(num_classes, 0.3), num_races)
  draft[rng.random(draft.shape) < 0.3] = 0
  draft /= draft.sum(1, keepdims=True)
  ratios = np.exp(np.linspace(-3, 3, num_classes))
  target = draft * ratios + (rng.random((num_races, 1)) < 0.5) * 0.02 * (np.arange(num_classes) == num_classes - 1)
  return np.float32(np.stack([draft, target / target.sum(1, keepdims=True)], axis=-1))


def _distribution(mass, log_weights, is_high, number):
  """The distribution of the class that a race with these weights picks, in float64."""
  z = np.exp(np.linspace(-32, 16, 800))
  spacing = z * np.diff(np.linspace(-32, 16, 800))[0]
  mass, weights = np.float64(mass), np.exp(np.float64(log_weights))
  decay = np.exp(-weights[:, None] * z)
  high, low = (np.where(side, mass, 0) @ decay for side in (is_high, ~is_high))
  others = np.where(is_high[:, None], high + mass[~is_high].sum(), low) ** (number - 1)
  return number * mass * weights * np.sum(others * decay * spacing, axis=1)


@pytest.mark.parametrize('num_races', [3, slow(130)])
@pytest.mark.parametrize('race', [Race(), Race(num_classes=16, num_rounds=2, log_range=4.0)])
def test_the_kernel_fits_as_well_and_its_distribution_is_that_of_its_weights(race, num_races):
  masses = _masses(num_races, race.num_classes)
  masses[0] = [[1, 1]] + [[0, 0]] * (race.num_classes - 1)
  number = np.float32(np.random.default_rng(1).integers(2, 9, num_races))
  options = race.fit_options(jnp.float32)
  found = jax.jit(lambda *x: fit_races(*x, **options))(masses, number)
  for row, (log_weights, is_high, law) in enumerate(zip(*map(np.asarray, found))):
    expected = _distribution(masses[row, :, 0], log_weights, is_high, number[row])
    np.testing.assert_allclose(law, expected, rtol=4e-6, atol=1e-7)
  # Rounding decides on which side of the cut classes are between which nothing is in excess.
  plain = jax.jit(jax.vmap(race.fit))(masses, number)
  accepted, wanted = (np.minimum(law, masses[..., 1]).sum(1) for law in (found[2], plain[2]))
  np.testing.assert_allclose(accepted, wanted, atol=2e-6)


def test_races_of_rows_and_nodes_are_fitted_as_one_by_one():
  race, masses = Race(), _masses(6, 40)
  number = np.float32([2, 3, 4, 5, 6, 7])
  with tracing_for('tpu'):  # all of them by one call, which is lowered plainly here
    of_rows = jax.jit(jax.vmap(jax.vmap(race.fit)))(masses.reshape(2, 3, 40, 2), number.reshape(2, 3))
  for found, expected in zip(of_rows, zip(*(race.fit(*one) for one in zip(masses, number)))):
    np.testing.assert_allclose(found.reshape(6, 40), np.stack(expected), rtol=1e-5, atol=1e-6)
