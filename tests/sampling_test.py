"""From logits to laws against sorting in numpy; draws against exact inverse cumulative laws and a chi-square test."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from spectr_jax.kernels import blocks, native
from spectr_jax.kernels.dispatch import tracing_for
from spectr_jax.kernels.draws import draw_several
from spectr_jax.proposal import Independent
from spectr_jax.sampling import SamplingParams, arrivals, draw, first_arrival, logits_to_probs, positive_part_or
from spectr_jax.sharding import shards_in_program
from tests.slow import slow

LARGEST_UNIFORM = np.float32(1 - 2.0**-24)

_to_probs = jax.jit(logits_to_probs)
_draws = jax.jit(jax.vmap(draw, (0, None)))
_draw_rows = jax.jit(jax.vmap(draw))


def _reference(logits, temperature, top_k, top_p, min_p=0.0):
  """One law by sorting, in float64."""
  logits = np.asarray(logits, np.float64)
  if temperature == 0:
    return np.eye(len(logits))[np.argmax(logits)]
  weights = np.exp((logits - logits.max()) / temperature)
  probs = weights / weights.sum()
  if top_k:
    smallest = np.sort(probs)[::-1][min(top_k, len(probs)) - 1]
    probs = np.where(probs >= smallest, probs, 0)
    probs /= probs.sum()
  if top_p < 1:
    descending = np.sort(probs)[::-1]
    last = np.argmax(np.cumsum(descending) >= top_p)
    probs = np.where(probs >= descending[last], probs, 0)
    probs /= probs.sum()
  if min_p > 0:
    kept = probs > 0
    # By logits, which need no division by a sum.
    kept &= (logits - logits.max()) / temperature >= np.log(min_p) - 1e-6
    probs = np.where(kept, probs, 0)
    probs /= probs.sum()
  return probs


def _probs(logits, **sampling):
  """Laws `[B, V]` of logits `[B, V]`."""
  logits = jnp.asarray(logits, jnp.float32)
  return np.asarray(_to_probs(logits[:, None], SamplingParams.make(len(logits), **sampling)))[:, 0]


def _logits(seed, rows=6, vocab_size=300, *, ties):
  logits = 2 * np.random.default_rng(seed).normal(size=(rows, vocab_size))
  return np.round(2 * logits) / 2 if ties else logits


@pytest.mark.parametrize('ties', [False, True])
@pytest.mark.parametrize(
  ('temperature', 'top_k', 'top_p', 'min_p'),
  [
    (1.0, 0, 1.0, 0.0),
    (0.5, 0, 1.0, 0.0),
    (2.0, 0, 0.9, 0.0),
    (1.0, 0, 0.5, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 7, 1.0, 0.0),
    (0.7, 40, 0.8, 0.0),
    (1.0, 300, 1.0, 0.0),
    (1.0, 10**6, 0.95, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.0, 5, 0.3, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.5, 0, 1.0, 0.3),
    (2.0, 20, 0.8, 0.4),
    (1.0, 3, 1.0, 1e-3),
    (0.7, 0, 0.6, 1.0),
    (0.0, 0, 1.0, 0.5),
  ],
)
def test_matches_sorting(temperature, top_k, top_p, min_p, ties):
  logits = _logits(0, ties=ties)
  probs = _probs(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
  expected = np.stack([_reference(row, temperature, top_k, top_p, min_p) for row in np.float32(logits)])
  np.testing.assert_array_equal(probs > 0, expected > 0)
  # Float32 exponentials and a sum of 300.
  np.testing.assert_allclose(probs, expected, rtol=1e-5, atol=1e-12)
  if ties and top_k == 7:
    assert (np.sum(probs > 0, axis=1) > 7).any()  # ties are kept


def test_rows_have_their_own_parameters():
  logits = _logits(1, ties=False)
  temperature, top_k = np.array([1.0, 0.0, 0.5, 1.0, 2.0, 0.0]), np.array([0, 3, 5, 1, 0, 0])
  top_p, min_p = np.array([1.0, 0.5, 1.0, 0.9, 0.7, 1.0]), np.array([0.0, 0.2, 0.0, 1.0, 0.05, 0.0])
  own = {'temperature': temperature, 'top_k': top_k, 'top_p': top_p, 'min_p': min_p}
  probs = _probs(logits, **own)
  expected = np.stack([_reference(*row) for row in zip(np.float32(logits), *own.values())])
  np.testing.assert_array_equal(probs > 0, expected > 0)
  np.testing.assert_allclose(probs, expected, rtol=1e-5, atol=1e-12)
  # Bit for bit what the row gets alone: a filter that another row asks for changes nothing.
  for row in range(6):
    alone = _probs(logits[row : row + 1], **{name: values[row] for name, values in own.items()})
    np.testing.assert_array_equal(alone[0], probs[row])


def test_top_p_of_a_row_is_the_same_beside_top_k_of_another():
  # Also where the mass is that of some tokens to the last bit, which a sum of all that is not quite 1 would miss.
  logits = jnp.asarray(np.random.default_rng(4).normal(size=(300, 1, 100)), jnp.float32)
  laws = np.sort(np.asarray(_to_probs(logits, SamplingParams.make(300))), axis=-1)[:, 0, ::-1]
  assert np.mean(laws.sum(-1) != 1) > 0.3
  top_p = np.cumsum(laws, axis=-1)[:, 10]
  alone = _to_probs(logits, SamplingParams.make(300, top_p=top_p))
  top_k = np.append(np.zeros(299, int), 3)
  np.testing.assert_array_equal(
    _to_probs(logits, SamplingParams.make(300, top_k=top_k, top_p=top_p))[:299], alone[:299]
  )


def test_nodes_share_the_parameters_of_their_row_among_many_rows():
  logits = jnp.asarray(np.random.default_rng(3).normal(scale=3, size=(20, 5, 300)), jnp.float32)
  own = {'temperature': np.linspace(0.5, 1, 20), 'top_k': np.arange(20) * 7, 'top_p': np.linspace(0.05, 1, 20)}
  together = _to_probs(logits, SamplingParams.make(20, **own))  # 100 filters
  for row in range(20):
    alone = _probs(logits[row], **{name: values[row] for name, values in own.items()})
    np.testing.assert_array_equal(together[row] > 0, alone > 0)
    np.testing.assert_allclose(together[row], alone, rtol=1e-6)


@pytest.mark.parametrize(
  'sampling',
  [{}, {'top_k': 5}, {'top_k': 299}, {'top_p': 0.999999}, {'temperature': 0.0}, {'temperature': 50.0, 'top_p': 0.99}],
)
def test_padded_columns_get_nothing(sampling):
  logits = _logits(4, ties=False)
  logits[:, 200:] = -np.inf
  laws = _probs(logits, **sampling)
  np.testing.assert_array_equal(laws[:, 200:], 0)
  np.testing.assert_allclose(laws.sum(1), 1, rtol=1e-5)
  # ... and change nothing for the others.
  np.testing.assert_allclose(laws[:, :200], _probs(logits[:, :200], **sampling), rtol=1e-5)


@pytest.mark.parametrize('temperature', [1e-3, 1e-20, 1e-30, 1e-37, 2e-38, 1e-40, 0.0])
def test_temperatures_at_zero_are_greedy(temperature):
  probs = _probs(np.array([[50.0, 3.0, -np.inf], [-200.0, -100.0, -100.5]]), temperature=temperature)
  np.testing.assert_array_equal(probs, np.eye(3)[[0, 1]])


def test_temperature_zero_is_the_first_largest():
  logits = np.array([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-np.inf, -2.0, -3.0, -np.inf]])
  np.testing.assert_array_equal(_probs(logits, temperature=0.0), np.eye(4)[[1, 0, 1]])


@pytest.mark.parametrize('vocab_size', [300, 512])
def test_greedy_takes_the_first_of_the_likeliest_of_many(vocab_size):
  """Also where equal logits are in several blocks of tokens, and beside a filter."""
  logits = np.random.default_rng(0).integers(-9, 9, (20, vocab_size)).astype(np.float64)
  expected = np.eye(vocab_size)[logits.argmax(axis=1)]
  for more in ({}, {'top_k': 5}):
    np.testing.assert_array_equal(_probs(logits, temperature=0.0, **more), expected)


@pytest.mark.parametrize(
  ('weights', 'sampling', 'expected'),
  [
    # Top-p keeps the fewest with enough mass, and ties.
    ([4, 2, 1, 1], {'top_p': 0.4}, [1, 0, 0, 0]),
    ([4, 2, 1, 1], {'top_p': 0.6}, [4, 2, 0, 0]),
    ([4, 2, 1, 1], {'top_p': 0.7}, [4, 2, 0, 0]),
    ([4, 2, 1, 1], {'top_p': 0.8}, [4, 2, 1, 1]),
    ([4, 2, 1, 1], {'top_p': 0.9}, [4, 2, 1, 1]),
    ([1] * 300, {'top_k': 3, 'top_p': 0.01}, [1] * 300),
    # After top-2 the masses are 4/7, 3/7: .55 needs one token, where .4 alone would not be enough.
    ([4, 3, 2, 1], {'top_k': 2, 'top_p': 0.55}, [1, 0, 0, 0]),
    # Top-p keeps three, and so does min-p. Of what min-p would keep first, two have a mass of .8 / .95 = .842.
    ([50, 30, 15, 5], {'top_p': 0.83, 'min_p': 0.2}, [50, 30, 15, 0]),
    ([50, 30, 15, 5], {'top_p': 0.83, 'min_p': 0.5}, [5, 3, 0, 0]),
  ],
)
def test_filters_by_hand(weights, sampling, expected):
  probs = _probs(np.log([weights]), **sampling)
  np.testing.assert_array_equal(probs[0] > 0, np.array(expected) > 0)
  np.testing.assert_allclose(probs[0], np.array(expected) / sum(expected), rtol=1e-5)


def test_float64_stays_float64():
  with jax.enable_x64(True):
    logits = jnp.asarray(_logits(5, ties=False), jnp.float64)
    laws = logits_to_probs(logits[:, None], SamplingParams.make(6, temperature=0.5, top_k=20, top_p=0.75))[:, 0]
    assert laws.dtype == jnp.float64
    np.testing.assert_allclose(laws, [_reference(row, 0.5, 20, 0.75) for row in logits], rtol=1e-12)


def test_changed_parameters_do_not_recompile():
  """There is a program for each set of filters that rows use, whatever their values."""
  traces = []

  @jax.jit
  def laws(logits, sampling):
    traces.append(1)
    return logits_to_probs(logits, sampling)

  logits = jnp.zeros((2, 1, 7))
  for num_programs, *values in (
    (1, {}, {'temperature': 0.0}, {'top_k': 0, 'top_p': 1, 'min_p': np.zeros(2)}),
    (2, {'top_k': 3}, {'top_k': np.array([0, 1]), 'temperature': 0.3}),
    (3, {'top_p': np.array([0.5, 1.0])}, {'top_p': 0.1}),
    (4, {'top_p': 0.5, 'min_p': 0.1}, {'top_p': 0.9, 'min_p': np.array([0.5, 0.0])}),
  ):
    for sampling in values:
      laws(logits, SamplingParams.make(2, **sampling))
    assert len(traces) == num_programs


@pytest.mark.parametrize('name', ['top_k', 'top_p', 'min_p'])
def test_a_filter_that_no_row_uses_is_not_there(name):
  """Nor does it change a bit of rows without it: `with_filters_of` lets them stand in one batch."""
  logits = jnp.asarray(_logits(8, ties=False), jnp.float32)[:, None]
  used = SamplingParams.make(6, **{name: 0.5 if name != 'top_k' else 2})
  plain = SamplingParams.make(6, temperature=np.array([1, 0.5, 0, 1, 2, 1]))
  assert getattr(plain, name) is None
  both = plain.with_filters_of(used)
  assert getattr(both, name).shape == (6,)
  assert jax.tree.structure(both) == jax.tree.structure(used)
  sizes = [len(str(jax.make_jaxpr(logits_to_probs)(logits, sampling))) for sampling in (plain, both)]
  assert sizes[0] < 0.9 * sizes[1]
  np.testing.assert_array_equal(_to_probs(logits, plain), _to_probs(logits, both))
  np.testing.assert_array_equal(_to_probs(logits, used), _to_probs(logits, used.with_filters_of(both)))


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
@pytest.mark.parametrize('temperature', [[1.0, 0.0, 0.5, 0.0, 0.0, 1.0], 1.0])
def test_greedy_rows_are_the_same_in_the_forms_for_accelerators(temperature, platform):
  """On a TPU the choice comes after the softmax, and takes whole distributions; on a GPU there is none."""
  logits = jnp.asarray(_logits(10, vocab_size=640, ties=True), jnp.float32)[:, None]
  logits = logits.at[4, 0, 7].set(jnp.nan).at[5, 0, 8].set(jnp.inf)
  sampling = SamplingParams.make(6, temperature=np.array(temperature))
  with tracing_for(platform):
    found = jax.jit(logits_to_probs)(logits, sampling)
    program = str(jax.make_jaxpr(logits_to_probs)(logits, sampling))
  assert ('cond[' in program) == (platform == 'tpu')
  np.testing.assert_allclose(found, _to_probs(logits, sampling), rtol=1e-6)  # sums have another order
  assert np.isnan(found[4:]).all()
  if np.ndim(temperature):
    np.testing.assert_array_equal(found[1, 0], np.arange(640) == np.argmax(logits[1, 0]))


def test_a_filter_of_unknown_values_is_there():
  """Within a compiled function, or given one by one: what is not known may be any value."""
  logits = jnp.asarray(_logits(9, ties=False), jnp.float32)
  made_within = jax.jit(lambda top_k: logits_to_probs(logits[:, None], SamplingParams.make(6, top_k=top_k)))
  alone = SamplingParams(temperature=jnp.ones(6), top_k=jnp.full(6, 3))
  for found in (made_within(3), logits_to_probs(logits[:, None], alone)):
    np.testing.assert_allclose(found[:, 0], _probs(logits, top_k=3), rtol=1e-6)
  np.testing.assert_allclose(made_within(0)[:, 0], _probs(logits), rtol=1e-6)


@pytest.mark.parametrize('form', [contextlib.nullcontext, native.disabled], ids=['native', 'plain'])
@pytest.mark.parametrize('vocab_size', [8, 512, 513, 1000])
def test_draw_inverts_the_cumulative_law_exactly(vocab_size, form):
  """Integer weights that sum to 4096 make every sum exact: the uniforms j / 4096 must give each token its weight."""
  draws = jax.jit(jax.vmap(draw, (0, None)))
  rng = np.random.default_rng(vocab_size)
  weights = rng.multinomial(4096, rng.dirichlet(np.full(vocab_size, 0.3))).astype(np.float32)
  assert vocab_size == 8 or (weights == 0).any()
  with form():
    tokens = np.asarray(draws(np.arange(4096, dtype=np.float32) / 4096, weights))
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, np.repeat(np.arange(vocab_size), weights.astype(int)))
    # Only proportions count.
    np.testing.assert_array_equal(tokens, draws(np.arange(4096, dtype=np.float32) / 4096, weights / 2**15))


def _weight_rows(vocab_size):
  """Weights with zeros at the ends, inside and nearly everywhere, with sums at, below and far from 1."""
  rng = np.random.default_rng(vocab_size)
  rows = rng.exponential(size=(300, vocab_size)) ** 4
  rows *= rng.random((300, vocab_size)) < rng.choice([0.01, 0.1, 0.5, 1], (300, 1))
  ends = rng.integers(0, vocab_size // 3, (300, 2))
  places = np.arange(vocab_size)
  rows[(places < ends[:, :1]) | (places >= vocab_size - ends[:, 1:])] = 0
  rows[np.arange(300), rng.integers(0, vocab_size, 300)] += 0.1
  rows /= rows.sum(1, keepdims=True)
  rows *= rng.choice([1, 0.99999, 1e-6, 37.0], (300, 1))
  return rows.astype(np.float32)


@pytest.mark.parametrize('vocab_size', [5, 40, 512, 600, 1000])
def test_no_token_of_weight_zero_is_drawn(vocab_size):
  rows = _weight_rows(vocab_size)
  rng = np.random.default_rng(1)
  boundaries = np.cumsum(rows, axis=1, dtype=np.float32)
  boundaries = boundaries[np.arange(300), rng.integers(0, vocab_size, 300)] / boundaries[:, -1]
  for uniforms in (np.zeros(300), np.full(300, LARGEST_UNIFORM), rng.random(300), boundaries):
    tokens = np.asarray(_draw_rows(np.minimum(uniforms, LARGEST_UNIFORM).astype(np.float32), rows))
    assert (rows[np.arange(300), tokens] > 0).all()
  first, last = (rows > 0).argmax(1), vocab_size - 1 - (rows > 0)[:, ::-1].argmax(1)
  np.testing.assert_array_equal(_draw_rows(np.zeros(300, np.float32), rows), first)
  # The largest uniform leaves 6e-8 above it: it gives the last token, unless that one is smaller than the rounding.
  tokens = np.asarray(_draw_rows(np.full(300, LARGEST_UNIFORM), rows))
  left = np.array([row[token + 1 :].sum() for row, token in zip(rows, tokens)]) / rows.sum(1)
  assert (left < 1e-5).all()
  assert (tokens == last).any()


def _categorical(key, logits, num_draws):
  """Draws by `jax.random.categorical`, which adds noise to all logits in their own type: 100 of them at a time."""
  keys = jax.random.split(key, num_draws // 100)
  return jax.lax.map(lambda key: jax.random.categorical(key, logits, shape=(100,)), keys).reshape(-1)


def _own_draws(key, logits, num_draws):
  probs = logits_to_probs(logits[None, None], SamplingParams().for_rows(1))[0, 0]
  return draw_several(jax.random.uniform(key, (num_draws,)), probs)


def _own_candidates(key, logits, num_draws):
  probs = logits_to_probs(logits[None, None], SamplingParams().for_rows(1))[0, 0]
  return Independent()(key, probs, 1, num_draws)


# Two distributions that `jax.random.categorical` of jax 0.10.2 misses (findings/jax_categorical.sh): in float32 its
# noise ends near 16, too early for tokens of 4e-8; in bfloat16 it takes few values, so that equal logits
# tie, and the first of those that tie wins. Each with the tokens that are counted and their probability.
_LONG_TAIL = np.log(np.append(np.full(262_143, 0.01 / 262_143), 0.99)).astype(np.float32)[::-1], (lambda x: x > 0), 0.01
_EQUAL_TOKENS = np.zeros(4096, jnp.bfloat16), (lambda x: x < 64), 64 / 4096


@pytest.mark.usefixtures('optimized')
@pytest.mark.parametrize(
  ('sample', 'law', 'num_draws', 'lowest', 'highest'),
  [
    (_own_draws, _LONG_TAIL, 50_000, -4, 4),
    (_own_draws, _EQUAL_TOKENS, 200_000, -4, 4),
    (_own_candidates, _LONG_TAIL, 50_000, -4, 4),
    (_own_candidates, _EQUAL_TOKENS, 200_000, -4, 4),
    # What would be wrong.
    (_categorical, _EQUAL_TOKENS, 1000, 20, 1000),
    slow(_categorical, _LONG_TAIL, 3000, -10, -4),
  ],
)
def test_long_tails_and_equal_tokens_have_their_mass(sample, law, num_draws, lowest, highest):
  logits, is_counted, probability = law
  tokens = np.asarray(jax.jit(sample, static_argnums=2)(jax.random.key(5), jnp.asarray(logits), num_draws))
  expected = num_draws * probability
  deviation = (is_counted(tokens).sum() - expected) / np.sqrt(expected * (1 - probability))
  assert lowest < deviation < highest


@pytest.mark.usefixtures('optimized')
def test_rare_tokens_win_races_as_rarely_as_they_should():
  """Of 32768 tokens all but one have 1e-4 of the mass together: 0.8 of 8192 draws."""
  probs = jnp.full(32768, 1e-4 / 32767, jnp.float32).at[0].set(1 - 1e-4)
  keys = jax.random.split(jax.random.key(4), (64, 128))
  winners = jax.jit(lambda keys: jax.lax.map(jax.vmap(lambda key: first_arrival(arrivals(key, probs))), keys))(keys)
  assert int(jnp.sum(winners > 0)) <= 6  # a Poisson number exceeds 6 once in 3e5 seeds


@pytest.mark.parametrize('num_shards', [1, 4])
def test_shards_are_drawn_from_as_one_vocabulary(monkeypatch, num_shards):
  """A mesh may hold a vocabulary in shards, here with padding at the end of each; sums are exact, as above."""
  monkeypatch.setattr(blocks, 'shards_in_program', lambda vocab_size: num_shards)
  rng = np.random.default_rng(5)
  vocab_size = 1300
  weights = rng.multinomial(4096, rng.dirichlet(np.full(vocab_size, 0.3))).astype(np.float32)
  uniforms = np.arange(4096, dtype=np.float32) / 4096
  draw_rows = jax.jit(jax.vmap(lambda *row: draw(*row), (0, None)))
  np.testing.assert_array_equal(draw_rows(uniforms, weights), np.repeat(np.arange(vocab_size), weights.astype(int)))
  times = rng.integers(1, vocab_size // 2, (40, vocab_size)).astype(np.float32)  # with ties
  first_of_rows = jax.jit(jax.vmap(lambda row: first_arrival(row)))
  np.testing.assert_array_equal(first_of_rows(times), times.argmin(axis=1))


@pytest.mark.parametrize(
  ('kinds', 'vocab_size', 'num_shards'),
  [
    ([AxisType.Manual, AxisType.Auto], 64, 4),
    ([AxisType.Manual, AxisType.Manual], 64, 1),  # what a device computes for itself is whole
    ([AxisType.Auto, AxisType.Auto], 64, 8),
    ([AxisType.Manual, AxisType.Auto], 66, 1),  # and cannot be divided
  ],
)
def test_a_distribution_is_in_shards_where_the_compiler_may_divide_it(kinds, vocab_size, num_shards):
  assert shards_in_program(vocab_size) == 1
  mesh = AbstractMesh((2, 4), ('data', 'model'), axis_types=tuple(kinds))
  with jax.sharding.use_abstract_mesh(mesh):
    assert shards_in_program(vocab_size) == num_shards


def test_positive_part_falls_back_only_without_mass():
  fallback = jnp.array([0.5, 0.25, 0.25])
  np.testing.assert_array_equal(positive_part_or(jnp.array([-1.0, 0.0, -0.5]), fallback), fallback)
  np.testing.assert_array_equal(positive_part_or(jnp.array([-1.0, 1e-30, 0.5]), fallback), np.float32([0, 1e-30, 0.5]))


@pytest.mark.parametrize(
  ('sampling', 'message'),
  [
    ({'temperature': -0.1}, 'temperature must be finite and at least 0'),
    ({'temperature': float('nan')}, 'temperature must be finite'),
    ({'temperature': float('inf')}, 'temperature must be finite'),
    ({'temperature': [1.0, 1.0]}, r'temperature must be a scalar or \[3\]'),
    ({'temperature': [[1.0, 1.0, 1.0]]}, r'temperature must be a scalar or \[3\]'),
    ({'top_k': -1}, 'top_k must be at least 0'),
    ({'top_k': [0, 0, -5]}, 'top_k must be at least 0'),
    ({'top_k': 2**40}, r'top_k must be at least 0 .* below 2\*\*31'),
    ({'top_p': 0.0}, 'top_p must be above 0 and at most 1'),
    ({'top_p': 1.5}, 'top_p must be above 0 and at most 1'),
    ({'top_p': float('nan')}, 'top_p must be above 0'),
    ({'top_p': [0.5, 0.5]}, r'top_p must be a scalar or \[3\]'),
    ({'min_p': -0.1}, r'min_p must be from 0 to 1 \(0 keeps all\)'),
    ({'min_p': 1.1}, 'min_p must be from 0 to 1'),
    ({'min_p': float('nan')}, 'min_p must be from 0 to 1'),
  ],
)
def test_wrong_parameters_are_refused(sampling, message):
  with pytest.raises(ValueError, match=message):
    SamplingParams.make(3, **sampling)


def test_parameters_are_broadcast_and_may_be_traced():
  sampling = SamplingParams.make(3, temperature=0.5, top_k=np.array([1, 2, 3]), top_p=0.5)
  assert sampling.temperature.shape == sampling.top_k.shape == sampling.top_p.shape == (3,)
  assert (sampling.temperature.dtype, sampling.top_k.dtype) == (jnp.float32, jnp.int32)
  traced = jax.jit(functools.partial(SamplingParams.make, 3))(temperature=0.5)
  np.testing.assert_array_equal(traced.temperature, 0.5)
