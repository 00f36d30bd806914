"""Pairs whose vocabularies are padded to different sizes: one size, and still the target's distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import TokenTree, table
from spectr_jax.testing import chi_square
from spectr_jax.testing.engine import sample_counts
from tests.slow import slow

_PROBS = np.random.default_rng(0).dirichlet(np.ones(5), 5)


def _draft(vocab_size):
  return table.table_model(np.log(np.random.default_rng(1).dirichlet(np.ones(vocab_size), vocab_size)).astype('f4'))


@pytest.mark.parametrize('own_size', [slow(3), 7])
def test_the_output_has_the_distribution_of_the_target(own_size):
  """The draft never guesses some tokens that the target emits and that it then reads; or knows more than can occur."""
  target = table.table_model(jnp.log(_PROBS.astype('f4')))
  draft = _draft(own_size).with_vocab_size(5)
  counts = sample_counts(
    jax.random.key(own_size), target, draft, [2],
    method='speculative', tree=TokenTree.chains(num_drafts=1, draft_length=1),
    num_tokens=2, num_samples=20_000, batch_size=20_000,
  )  # fmt: skip
  law = _PROBS[2][:, None] * _PROBS
  assert chi_square(counts.reshape(-1), law.reshape(-1)).p_value > 1e-4
  if own_size < 5:
    assert counts[own_size:].sum() > 1000


@jax.jit
def _outputs(model, tokens):
  """Logits, hidden states, the logits that the output head makes of them, and what enters block 0."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
  output = model.with_features((0, -1)).apply(tokens, positions, causal, model.init_cache_fn(len(tokens), 8))
  unembedded = model.unembed_fn(model.params, output.features[:, :, 1])
  return output.logits, output.features, unembedded, model.embed_fn(model.params, tokens)


@pytest.mark.parametrize('added', [3, -2])
def test_all_functions_have_the_new_size(target, added):
  size = target.vocab_size
  model = target.with_vocab_size(size + added)
  assert model.vocab_size == size + added
  assert target.with_vocab_size(size + added).apply_fn is model.apply_fn  # equal models share programs
  tokens = jnp.array([[3, 0, 14, 1]])
  plain, kept = _outputs(target, tokens), min(size, size + added)
  read = tokens.at[0, 1].set(size + added - 1) if added > 0 else tokens  # an id that the model lacks is read as 0
  logits, features, unembedded, embedded = _outputs(model, read)
  for found in (logits, unembedded):
    assert found.shape == (*tokens.shape, size + added)
    np.testing.assert_allclose(found[..., :kept], plain[0][..., :kept], atol=1e-5)
    assert (np.asarray(found[..., kept:]) == -np.inf).all()
    assert (np.asarray(jax.nn.softmax(found))[..., kept:] == 0).all()
  np.testing.assert_allclose(features, plain[1], atol=1e-5)
  np.testing.assert_array_equal(embedded, plain[3])


def test_the_same_size_is_the_same_model(target):
  assert target.with_vocab_size(target.vocab_size) is target
  with pytest.raises(ValueError, match='vocab_size must be a positive int, got 0'):
    target.with_vocab_size(0)
