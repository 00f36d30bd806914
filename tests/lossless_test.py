"""Every method keeps the target's law: exactly, by sampling, and through the real engine; what is broken is caught."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import METHODS, SamplingParams, TokenTree, generate
from spectr_jax.models import table, transformer
from spectr_jax.sampling import logits_to_probs
from spectr_jax.testing import (
  CONTROLS,
  chi_square,
  constant_tables,
  enumeration_error,
  expected_acceptance,
  random_tables,
  sample_counts,
)

# (tree, vocabulary, tokens compared): several rounds each, since a round emits at most L + 1 tokens.
_SMALL = [
  (TokenTree(), 3, 4),
  (TokenTree.chains(1, 3), 3, 5),
  (TokenTree.chains(2, 2), 3, 4),
  (TokenTree.chains(3, 2), 2, 5),
  (TokenTree((0, 0, 1, 1, 2, 4)), 2, 5),
]
_LARGE = [
  (TokenTree.chains(2, 3), 3, 4),
  (TokenTree.chains(3, 3), 2, 6),
  (TokenTree.chains(3, 3), 3, 4),
]


def _cases(methods, settings):
  for method in methods.values():
    for tree, vocab_size, num_tokens in settings:
      try:
        if method.tree_for(tree) != tree:
          continue
      except ValueError:
        continue
      shape = f'{method.name}-N{tree.num_nodes}-L{tree.max_depth}-V{vocab_size}-T{num_tokens}'
      yield pytest.param(method, tree, vocab_size, num_tokens, id=shape)


def _error(method, tree, vocab_size, num_tokens, seeds):
  return max(
    enumeration_error(method, tree, random_tables(seed, vocab_size, num_tokens + tree.max_depth), num_tokens)
    for seed in range(seeds)
  )


@pytest.mark.parametrize(('method', 'tree', 'vocab_size', 'num_tokens'), list(_cases(METHODS, _SMALL)))
def test_exact(method, tree, vocab_size, num_tokens):
  assert method.is_lossless
  # float64 sums of at most 3^9 terms: 1e-10 leaves four digits to spare.
  assert _error(method, tree, vocab_size, num_tokens, seeds=3) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(('method', 'tree', 'vocab_size', 'num_tokens'), list(_cases(METHODS, _LARGE)))
def test_exact_large(method, tree, vocab_size, num_tokens):
  assert _error(method, tree, vocab_size, num_tokens, seeds=2) <= 1e-10


def _visible(cases):
  """Cases in which a control's fault shows: a threshold or a second draft needs more than one draft."""
  for case in cases:
    method, tree = case.values[:2]
    if tree.num_nodes and not (tree.is_chain and method.name in ('spectr_gamma_too_small', 'speculative_many_drafts')):
      yield case


@pytest.mark.parametrize(('method', 'tree', 'vocab_size', 'num_tokens'), list(_visible(_cases(CONTROLS, _SMALL))))
def test_exact_catches_controls(method, tree, vocab_size, num_tokens):
  assert not method.is_lossless
  assert _error(method, tree, vocab_size, num_tokens, seeds=2) > 1e-3


def test_acceptance_in_closed_form():
  tables = constant_tables([0.75, 0.25], [0.5, 0.5], max_length=3)
  # K-SEQ on Ber(.25) -> Ber(.5), two candidates: .8476 (verification without it being optimal: .9375).
  np.testing.assert_allclose(
    expected_acceptance(METHODS['spectr'], TokenTree.chains(2, 1), tables), [0.8476], atol=5e-5
  )
  # One candidate: 1 - TV at each depth.
  np.testing.assert_allclose(
    expected_acceptance(METHODS['speculative'], TokenTree.chains(1, 3), tables), [0.75, 0.75**2, 0.75**3], rtol=1e-12
  )


def _chain_counts(method, tree, num_samples):
  """Counts of the first L + 2 tokens from Markov chains over 3 tokens, and their law."""
  rng = np.random.default_rng(7)
  draft, target = rng.dirichlet(np.ones(3), 3), rng.dirichlet(np.ones(3), 3)
  draft[0, 1], target[1, 2] = 0, 0
  draft /= draft.sum(1, keepdims=True)
  target /= target.sum(1, keepdims=True)
  num_tokens = tree.max_depth + 2
  law = target[0]
  for _ in range(num_tokens - 1):
    law = law[..., None] * target
  with np.errstate(divide='ignore'):
    models = [table.table_model(jnp.asarray(np.log(probs), jnp.float32)) for probs in (target, draft)]
  counts = sample_counts(
    jax.random.key(3), *models, np.array([0]), method=method, tree=tree, num_tokens=num_tokens, num_samples=num_samples
  )
  return counts, law


_SAMPLED = [
  ('autoregressive', TokenTree()),
  ('speculative', TokenTree.chains(1, 3)),
  ('spectr', TokenTree.chains(3, 2)),
  ('spectr', TokenTree((0, 0, 1, 1, 2, 4))),
]


@pytest.mark.parametrize(('name', 'tree'), _SAMPLED, ids=lambda x: x if isinstance(x, str) else f'N{x.num_nodes}')
def test_joint_law_by_sampling(name, tree):
  result = chi_square(*_chain_counts(name, tree, 1_000_000))
  assert result.num_samples >= 1_000_000
  assert result.p_value > 1e-3, result


@pytest.mark.parametrize('name', ['spectr_residual_left_out', 'spectr_gamma_too_small', 'spectr_law_before_top_p'])
def test_sampling_catches_controls(name):
  result = chi_square(*_chain_counts(CONTROLS[name], TokenTree.chains(3, 2), 250_000))
  assert result.p_value < 1e-9, result


_VOCAB = 7
_PROMPTS = [[3], [1, 4, 2, 6, 0], [5, 5, 1]]
_SAMPLING = {'temperature': 0.8, 'top_k': 6, 'top_p': 0.9}


def _tiny_transformer(seed, width):
  config = transformer.TransformerConfig(_VOCAB, width, 2, 2, 2 * width, 16)
  params = transformer.init_params(jax.random.key(seed), config)
  # Sharper than at initialisation, so that laws differ between contexts and top-p has something to cut.
  params['final_norm']['gain'] *= 2.0
  return transformer.transformer_model(params, config)


def _joint_law(model, prompt, num_tokens):
  """The law of ordinary sampling, from uncached forwards of every context."""
  law = np.ones(1)
  for length in range(num_tokens):
    contexts = np.array(list(itertools.product(range(_VOCAB), repeat=length)))
    tokens = jnp.asarray(np.concatenate([np.tile(prompt, (len(contexts), 1)), contexts], axis=1), jnp.int32)
    size = tokens.shape[1]
    cache = model.init_cache_fn(len(tokens), 1)
    output = model.apply(
      tokens, jnp.broadcast_to(jnp.arange(size), tokens.shape), jnp.tril(jnp.ones((size, size), bool)), cache
    )
    probs = logits_to_probs(output.logits[:, -1:], SamplingParams.make(len(tokens), **_SAMPLING))[:, 0]
    law = (law[:, None] * np.asarray(probs)).reshape(-1)
  return law


@pytest.mark.parametrize(('name', 'tree'), _SAMPLED[1:], ids=lambda x: x if isinstance(x, str) else f'N{x.num_nodes}')
def test_engine_against_ordinary_sampling(name, tree):
  """Cache, tree attention, rollback, a ragged batch, temperature, top-k and top-p on transformers."""
  target, draft = _tiny_transformer(0, 32), _tiny_transformer(1, 16)
  num_tokens, rows = 4, 25_000
  prompts = np.zeros((len(_PROMPTS), 6), np.int32)
  for row, prompt in enumerate(_PROMPTS):
    prompts[row, : len(prompt)] = prompt
  lengths = np.array([len(prompt) for prompt in _PROMPTS])
  tokens = np.asarray(
    generate(
      jax.random.key(5),
      target,
      draft,
      np.tile(prompts, (rows, 1)),
      np.tile(lengths, rows),
      method=name,
      tree=tree,
      max_new_tokens=num_tokens,
      **_SAMPLING,
    ).tokens
  ).reshape(rows, len(_PROMPTS), num_tokens)
  weights = _VOCAB ** np.arange(num_tokens)[::-1]
  for index, prompt in enumerate(_PROMPTS):
    counts = np.bincount(tokens[:, index] @ weights, minlength=_VOCAB**num_tokens)
    result = chi_square(counts, _joint_law(target, prompt, num_tokens))
    assert result.p_value > 1e-3, (prompt, result)
