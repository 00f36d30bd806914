"""Every method keeps the target's distribution: exactly, by sampling, and in the engine; what is broken is caught."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coarse import coarse

from spectr_jax import METHODS, TokenTree, generate
from spectr_jax.engine.loop import noise_keys
from spectr_jax.methods import FURTHER_METHODS, with_children, with_gumbel
from spectr_jax.models import table
from spectr_jax.sampling import SamplingParams
from spectr_jax.testing import (
  CONTROLS,
  constant_tables,
  enumeration_error,
  expected_acceptance,
  joint_law,
  prove,
  random_tables,
  tiny_transformers,
)

# (tree, vocabulary, tokens compared): several rounds each, since a round emits at most L + 1 tokens.
_SMALL = [
  (TokenTree.chains(2, 2), 3, 4),
  (TokenTree.chains(1, 3), 3, 5),
  (TokenTree(), 3, 4),
  (TokenTree.chains(3, 2), 2, 5),
  (TokenTree((0, 0, 1, 1, 2, 4)), 2, 5),
]
_LARGE = [(TokenTree.chains(2, 3), 3, 4), (TokenTree.chains(3, 3), 2, 6), (TokenTree.chains(3, 3), 3, 4)]
# Three candidates for one token are enough for tickets to show, and few for an enumeration.
_FEW = [(TokenTree.chains(3, 1), 3, 2), _SMALL[2], _SMALL[1], _SMALL[0]]

# Every lossless method; traversal also on siblings that differ.
_LOSSLESS = {name: method for name, method in (METHODS | FURTHER_METHODS).items() if method.is_lossless}
_LOSSLESS['traversal_without_replacement'] = with_children(METHODS['traversal'], 'without_replacement')
# What a law can show: the noise of an exponential race is proven token for token, and faults of keys by sampling alone.
_WITH_LAW = {name: method for name, method in _LOSSLESS.items() if not method.is_seed_exact}
_BROKEN = {name: method for name, method in CONTROLS.items() if not method.is_seed_exact}
_BROKEN |= {name: method for name, method in METHODS.items() if not method.is_lossless}
# One method and one fault of each kind by default, each in its first case.
_KINDS = (
  'autoregressive', 'speculative', 'block', 'greedy_block', 'spectr', 'gsd', 'race_block', 'race_traversal', 'univer',
  'race_layers',
  'traversal_without_replacement', 'speculative_many_drafts', 'speculative_residual_left_out',
  'speculative_law_before_top_p', 'spectr_gamma_too_small', 'spectr_gbv', 'decoding_opt', 'race_one_ticket',
  'race_traversal_credit_not_divided', 'race_traversal_reranked', 'univer_room_not_divided', 'univer_drawn_among_given',
)  # fmt: skip
# A threshold or a competing draft shows with two candidates; tickets with three, one of which is twice the same.
_CANDIDATES_NEEDED = {
  'spectr_gamma_too_small': 2, 'speculative_many_drafts': 2, 'spectr_gbv': 2, 'race_one_ticket': 3,
  'race_block_one_ticket': 3, 'race_traversal_one_ticket': 3, 'race_traversal_copies_have_credit': 3,
  'race_traversal_credit_not_divided': 2, 'race_traversal_likelier_kept_first': 2, 'race_traversal_second_if_first': 2,
  'race_layers_mass_of_one_branch': 2, 'race_layers_copies_forgotten': 3, 'univer_room_not_divided': 2,
  'univer_drawn_among_given': 2,
}  # fmt: skip


# Faults that show in drafts of several tokens alone.
_LENGTH_NEEDED = {'race_layers_mass_of_one_branch': 2, 'hsd_as_published': 2}


def _fits(method, tree, vocab_size):
  """Whether the method is defined for the tree, and few enough ways to fill it; a child that may be missing is one."""
  try:
    is_own = method.tree_for(tree) == tree
  except ValueError:
    return False
  most_children = int(tree.num_children[0]) if tree.num_nodes else 0
  is_few = not method.proposal_rule.may_run_out or (vocab_size + 1) ** tree.num_nodes <= 20000
  is_deep = tree.max_depth >= _LENGTH_NEEDED.get(method.name, 0)
  return is_own and is_few and is_deep and most_children >= _CANDIDATES_NEEDED.get(method.name, not method.is_lossless)


def _cases(methods, settings):
  """The settings of each method, in `_KINDS` the first by default, all others among the slow tests."""
  for name, method in methods.items():
    own = [setting for setting in settings if _fits(method, *setting[:2])]
    for number, (tree, vocab_size, num_tokens) in enumerate(own):
      shape = f'{name}-N{tree.num_nodes}-L{tree.max_depth}-V{vocab_size}-T{num_tokens}'
      marks = () if name in _KINDS and number == 0 and settings is not _LARGE else pytest.mark.slow
      yield pytest.param(coarse(method), tree, vocab_size, num_tokens, id=shape, marks=marks)


def test_no_two_rounds_share_noise():
  """Noise behind a rejection has already influenced the decision; at its position the next round needs other noise."""
  decoder = types.SimpleNamespace(tree=TokenTree.chains(1, 3), method=METHODS['block'])
  rounds = [
    noise_keys(
      decoder, types.SimpleNamespace(keys=jax.random.split(jax.random.key(0), 2), root_position=np.full(2, at))
    )
    for at in range(6)
  ]
  bits = np.array([jax.random.key_data(jnp.stack(keys)) for keys in rounds]).reshape(-1, 2)
  assert len(np.unique(bits, axis=0)) == len(bits) == 6 * 2 * 2 * 4


def _error(method, tree, vocab_size, num_tokens, seeds):
  return max(
    enumeration_error(method, tree, random_tables(seed, vocab_size, num_tokens + tree.max_depth), num_tokens)
    for seed in range(seeds)
  )


_setting = pytest.mark.parametrize(
  ('method', 'tree', 'vocab_size', 'num_tokens'), [*_cases(_WITH_LAW, _SMALL), *_cases(_WITH_LAW, _LARGE)]
)


@_setting
def test_exact(method, tree, vocab_size, num_tokens):
  assert method.is_lossless
  # The largest case has 3^9 ways to fill its tree, after each of 40 prefixes.
  seeds = 1 if vocab_size**tree.num_nodes > 10_000 else 3
  # float64 sums of at most 3^9 terms: 1e-10 leaves four digits to spare.
  assert _error(method, tree, vocab_size, num_tokens, seeds) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize('name', ['race', 'race_block', 'race_traversal'])
def test_exact_with_all_classes(name):
  assert _error(METHODS[name], TokenTree.chains(2, 2), 3, 4, seeds=1) <= 1e-10


_BROKEN_CASES = list(_cases(_BROKEN, _FEW))


@pytest.mark.parametrize(('method', 'tree', 'vocab_size', 'num_tokens'), _BROKEN_CASES)
def test_exact_catches_what_is_broken(method, tree, vocab_size, num_tokens):
  assert not method.is_lossless
  assert _error(method, tree, vocab_size, num_tokens, seeds=2) > 1e-3


def test_every_control_is_caught_somewhere():
  exact = {case.values[0].name for case in _BROKEN_CASES}
  keyed = {name for name, method in CONTROLS.items() if method.is_seed_exact}
  assert exact | keyed == set(CONTROLS) | {'spectr_gbv', 'decoding_opt', 'decoding_uno'}
  assert keyed == {'block_keyed_by_position', 'race_block_keyed_by_position'}


def test_spectr_gbv_is_biased_as_enumerated():
  tables = constant_tables([0.75, 0.25], [0.5, 0.5], max_length=2)
  law = joint_law(METHODS['spectr_gbv'], TokenTree.chains(2, 1), tables, 1)
  assert np.abs(law - 0.5).sum() / 2 == pytest.approx(3 / 35, abs=1e-12)  # .0857
  accepted = expected_acceptance(METHODS['spectr_gbv'], TokenTree.chains(2, 1), tables)
  assert accepted[0] == pytest.approx(0.70357142857142857, abs=1e-12)


@pytest.mark.parametrize('name', [name for name, method in METHODS.items() if method.is_lossless_alone])
def test_what_is_lossless_on_one_draft_alone(name):
  method = METHODS[name]
  assert not method.is_lossless_on(TokenTree.chains(2, 3))
  assert method.is_lossless_on(TokenTree.chains(1, 3))
  assert _error(method, TokenTree.chains(1, 3), 3, 5, seeds=2) <= 1e-10


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_block_lies_between_token_level_and_the_optimum_of_one_draft(seed):
  tables, tree = random_tables(seed, 3, 4), TokenTree.chains(1, 3)
  speculative, block, greedy = (
    expected_acceptance(METHODS[name], tree, tables).sum() for name in ('speculative', 'block', 'greedy_block')
  )
  # The most a single draft allows in one round: the overlap of the laws of the first tokens, for each length.
  best, draft, target = 0.0, np.ones(1), np.ones(1)
  for length in range(3):
    first = (3**length - 1) // 2
    draft = (draft[:, None] * tables.draft_probs[first : first + 3**length]).reshape(-1)
    target = (target[:, None] * tables.target_probs[first : first + 3**length]).reshape(-1)
    best += np.minimum(draft, target).sum()
  assert greedy == pytest.approx(best, abs=1e-12)
  assert speculative <= block + 1e-12
  assert block <= best + 1e-12


@pytest.mark.slow
@pytest.mark.usefixtures('optimized')
@pytest.mark.parametrize('name', _LOSSLESS)
def test_the_whole_proof(name):
  """A million rows of the compiled loop on Markov chains, and 150,000 on transformers with filters."""
  proof = prove(coarse(_LOSSLESS[name]), num_samples=1_000_000)
  assert proof.is_passed, proof


_CAUGHT_BY_SAMPLING = [
  'spectr_residual_left_out', 'spectr_gamma_too_small', 'spectr_law_before_top_p', 'greedy_block_level_too_few',
  'block_keyed_by_position', 'race_block_keyed_by_position', 'race_one_ticket', 'race_traversal_credit_not_divided',
  'race_traversal_residual_of_parent', 'race_traversal_second_if_first', 'spectr_gbv',
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('name', _CAUGHT_BY_SAMPLING)
def test_sampling_catches_what_is_broken(name):
  proof = prove(coarse((CONTROLS | METHODS)[name]), num_samples=250_000)
  (sampling,) = (check for check in proof.checks if check.part == 'sampling')
  assert sampling.value < 1e-9, proof


@pytest.mark.slow
@pytest.mark.parametrize('tree', [TokenTree((0, 0, 1, 1, 2, 4)), TokenTree.chains(3, 2), TokenTree.chains(1, 3)])
def test_ersd_is_gumbel_max_sampling_token_for_token(tree):
  """On transformers with filters; in float32 a tie of two arrivals could differ, and none does here."""
  target, draft = tiny_transformers(vocab_size=7)
  prompts, lengths = np.tile([[3, 0, 0, 0, 0], [1, 4, 2, 6, 0], [5, 5, 1, 0, 0]], (100, 1)), np.tile([1, 5, 3], 100)
  keys = jax.random.split(jax.random.key(11), 300)
  common = {'max_new_tokens': 10, 'sampling': SamplingParams(temperature=0.8, top_k=6, top_p=0.9)}
  found = generate(keys, target, draft, prompts, lengths, method='ersd', tree=tree, **common)
  gumbel = with_gumbel(METHODS['autoregressive'])
  reference = generate(keys, target, None, prompts, lengths, method=gumbel, **common)
  np.testing.assert_array_equal(found.tokens, reference.tokens)
  assert float(np.sum(found.num_target_calls)) < 0.9 * float(np.sum(reference.num_target_calls))


def test_gumbel_max_sampling_is_what_its_name_says():
  """Against the textbook's argmax of log q plus Gumbel noise, with the keys written out."""
  logits = np.random.default_rng(1).normal(size=(6, 6)).astype(np.float32)
  row_keys = jax.random.split(jax.random.key(2), 40)
  tokens = generate(
    row_keys,
    table.table_model(jnp.asarray(logits)),
    None,
    np.zeros((40, 2), np.int32),
    np.full(40, 2),
    method=with_gumbel(METHODS['autoregressive']),
    max_new_tokens=8,
  ).tokens
  for row_key, row in zip(row_keys, np.asarray(tokens)):
    last = 0
    for position, token in enumerate(row, start=2):
      key = jax.random.fold_in(jax.random.fold_in(row_key, 2), position)
      bits = np.asarray(jax.random.bits(key, (6,), jnp.uint32))
      gumbel = -np.log(-np.log1p(-(bits + 0.5) / 2.0**32))
      assert token == np.argmax(logits[last] + gumbel)
      last = token
