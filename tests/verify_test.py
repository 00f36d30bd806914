"""`spectr_jax.verify`: its shapes and errors, its agreement with the engine, and how it is transformed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spectr_jax
from spectr_jax import METHODS, TokenTree
from spectr_jax.kernels.dispatch import tracing_for
from tests import commands
from tests.slow import slow_but

_VOCAB = 5
_CHAIN, _CHAINS = TokenTree.chains(1, 3), TokenTree.chains(2, 3)


def _round(tree, batch_size=4, seed=0, vocab_size=_VOCAB, dtype=np.float32):
  """Random laws, and children drawn from them: tokens, draft laws and target laws of a round."""
  rng = np.random.default_rng(seed)
  draft = np.zeros((batch_size, len(tree.parent_nodes), vocab_size), dtype)
  target = np.zeros((batch_size, tree.num_nodes + 1, vocab_size), dtype)
  tokens = np.zeros((batch_size, tree.num_nodes), np.int32)
  for row in range(batch_size):
    spelled = [()]
    for node in range(tree.num_nodes + 1):
      if node:
        parent = tree.parents[node - 1]
        law = draft[row, tree.parent_index[parent]].astype(np.float64)
        tokens[row, node - 1] = rng.choice(vocab_size, p=law / law.sum())
        spelled.append((*spelled[parent], tokens[row, node - 1]))
      # Nodes that spell the same have the same distributions.
      laws = np.random.default_rng((seed, row, 99, *spelled[node])).dirichlet(np.ones(vocab_size), 2)
      target[row, node] = laws[0]
      if tree.parent_index[node] >= 0:
        draft[row, tree.parent_index[node]] = laws[1]
  return tokens, draft, target


def _keys(batch_size=4, seed=1):
  return jax.random.split(jax.random.key(seed), batch_size)


def _tree_of(method):
  return _CHAIN if METHODS[method].max_drafts == 1 else _CHAINS


_DRAFTING = [name for name, method in METHODS.items() if method.max_drafts != 0 and not method.is_seed_exact]


@pytest.mark.parametrize('method', slow_but(('block', 'race_traversal', 'spectr'), _DRAFTING))
def test_what_is_kept_is_a_path_of_the_tree_and_one_token_more(method):
  tree = _tree_of(method)
  tokens, *laws = _round(tree, 64)
  found = jax.tree.map(np.asarray, spectr_jax.verify(_keys(64), tree, tokens, *laws, method=method))
  assert found.tokens.shape == (64, tree.max_depth + 1)
  assert found.path.shape == (64, tree.max_depth)
  np.testing.assert_array_equal(found.lengths, found.num_accepted + 1)
  assert {*found.num_accepted} > {0}
  for row in range(64):
    node, count = 0, found.num_accepted[row]
    for depth in range(count):
      assert tree.parent_of[found.path[row, depth]] == node
      node = found.path[row, depth]
      assert found.tokens[row, depth] == tokens[row, node - 1]
    assert laws[1][row, node, found.tokens[row, count]] > 0
    assert (found.tokens[row, count + 1 :] == -1).all()
    assert (found.path[row, count:] == -1).all()


def test_without_a_tree_it_samples_from_the_target():
  target = np.zeros((3, 1, _VOCAB), np.float32)
  target[:, :, 2] = 1
  none = np.zeros((3, 0), np.int32), np.zeros((3, 0, _VOCAB), np.float32)
  kept = spectr_jax.verify(jax.random.key(0), TokenTree(), *none, target, method='autoregressive')
  assert kept.tokens.tolist() == [[2]] * 3
  assert kept.lengths.tolist() == [1] * 3
  with pytest.raises(ValueError, match='needs guesses'):
    spectr_jax.verify(jax.random.key(0), TokenTree(), *none, target)


def test_a_row_does_not_depend_on_its_batch():
  tokens, *laws = _round(_CHAINS, 8)
  keys = _keys(8)
  whole = spectr_jax.verify(keys, _CHAINS, tokens, *laws)
  for rows in (slice(0, 1), slice(3, 8)):
    part = spectr_jax.verify(keys[rows], _CHAINS, tokens[rows], *(law[rows] for law in laws))
    jax.tree.map(np.testing.assert_array_equal, part, jax.tree.map(lambda x, rows=rows: x[rows], whole))


def test_keys_of_all_rows_of_rows_and_of_depths():
  tokens, *laws = _round(_CHAINS, 4)
  key = jax.random.key(3)
  rows = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(4))
  depths = jax.vmap(lambda row: jax.vmap(jax.random.fold_in, (None, 0))(row, jnp.arange(4)))(rows)
  found = [spectr_jax.verify(each, _CHAINS, tokens, *laws) for each in (key, rows, depths)]
  for other in found[1:]:
    jax.tree.map(np.testing.assert_array_equal, found[0], other)


@pytest.mark.parametrize(
  'method', slow_but(('block', 'race_traversal'), [m for m in _DRAFTING if METHODS[m].takes_grown])
)
def test_slots_that_a_row_does_not_use_are_as_if_they_were_not_there(method):
  """A row that uses a part of the tree is decided as if that part were the tree, up to the noise of other nodes."""
  long, short = (TokenTree.chains(1, 3), TokenTree.chains(1, 1)) if _tree_of(method) == _CHAIN else (
    TokenTree.chains(2, 3), TokenTree.chains(2, 1),
  )  # fmt: skip
  tokens, draft, target = _round(long, 3, dtype=np.float64)
  used = np.isin(np.arange(1, long.num_nodes + 1), range(1, short.num_nodes + 1))
  ragged = np.where(used, tokens, -1)
  with jax.enable_x64(True):
    verifier = METHODS[method].verifier

    @functools.partial(jax.jit, static_argnums=0)
    def law(tree, tokens, draft, target):
      return verifier.law(tree, spectr_jax.proposal.Proposal(tokens, draft), target, verifier.init_state(tree))

    for row in range(3):
      nodes = np.arange(short.num_nodes + 1)
      laws = draft[row, long.parent_index[short.parent_nodes]], target[row, nodes]
      expected = np.asarray(law(short, tokens[row, : short.num_nodes], *laws))
      # What stands at nodes that are not used has no influence.
      rest = np.where(
        np.isin(np.arange(len(draft[row])), long.parent_index[short.parent_nodes])[:, None], draft[row], 7.0
      )
      found = np.asarray(law(long, ragged[row], rest, target[row]))
      assert np.all(found[short.num_nodes + 1 :] == 0)
      # Nodes that spell the same are one; either of them may stand for both.
      same = np.r_[-1, tokens[row, : short.num_nodes]]
      is_same = same[:, None] == same
      np.testing.assert_allclose(is_same @ found[nodes], is_same @ expected, atol=1e-12)


@pytest.mark.parametrize('method', ['greedy_block', 'spectr_gbv'])
def test_methods_for_whole_drafts_give_other_rows_no_token(method):
  tokens, *laws = _round(_CHAIN, 4)
  tokens[1, 2] = -1
  found = jax.jit(lambda *x: spectr_jax.verify(x[0], _CHAIN, *x[1:], method=method))(_keys(4), tokens, *laws)
  np.testing.assert_array_equal(np.asarray(found.lengths) > 0, [True, False, True, True])
  assert (np.asarray(found.tokens)[1] == -1).all()


def test_siblings_that_run_out_are_a_whole_draft():
  """A draft that is sure has one likeliest token and nothing to draw; such a row is decided like any other."""
  tree, laws = TokenTree.chains(3, 1), np.zeros((4, 1, _VOCAB), np.float32)
  laws[:, 0, 2] = 1
  target = np.zeros((4, 4, _VOCAB), np.float32)
  target[:, 0, 2], target[:, 1:, 4] = 1, 1
  tokens = np.tile(np.array([2, -1, -1], np.int32), (4, 1))
  kept = spectr_jax.verify(_keys(4), tree, tokens, laws, target, method='univer')
  np.testing.assert_array_equal(kept.tokens, [[2, 4]] * 4)
  # With tokens left to draw, a node that is missing is an error of the caller's: no row can be right.
  laws[1:, 0] = [0.5, 0.3, 0, 0.2, 0]
  tokens[2:], tokens[3, 2] = [0, 1, 3], -1
  kept = spectr_jax.verify(_keys(4), tree, tokens, laws, target, method='univer')
  np.testing.assert_array_equal(np.asarray(kept.lengths) > 0, [True, False, True, False])
  # No distribution is defined after a node that is missing: whatever stands there has a say in nothing.
  tree, laws = TokenTree.chains(2, 2), np.full((2, 3, _VOCAB), 1 / _VOCAB, np.float32)
  laws[:, 0] = np.eye(_VOCAB)[2]
  tokens = np.array([[2, -1, 0, -1], [2, -1, -1, -1]], np.int32)
  kept = spectr_jax.verify(_keys(2), tree, tokens, laws, _round(tree, 2)[2], method='univer')
  np.testing.assert_array_equal(np.asarray(kept.lengths) > 0, [True, False])


def test_given_guesses_need_no_draft_laws():
  tokens, _, target = _round(_CHAIN, 5)
  found = spectr_jax.verify(_keys(5), _CHAIN, tokens, None, target, method='speculative')
  same = spectr_jax.verify(
    _keys(5), _CHAIN, tokens, np.zeros((5, 3, _VOCAB), np.float32), target, method='speculative',
    is_given=np.ones((5, 3), bool),
  )  # fmt: skip
  jax.tree.map(np.testing.assert_array_equal, found, same)
  # A given token is accepted with the target's probability: where it is certain, always.
  certain = np.zeros_like(target)
  for row in range(5):
    for node in range(3):
      certain[row, node, tokens[row, node]] = 1
    certain[row, 3, 4] = 1
  found = spectr_jax.verify(_keys(5), _CHAIN, tokens, None, certain, method='race_traversal')
  np.testing.assert_array_equal(found.tokens, np.c_[tokens, np.full(5, 4)])


def test_rows_may_have_trees_of_their_own():
  bounds, rng = TokenTree.slots((2, 2)), np.random.default_rng(0)
  draft = rng.dirichlet(np.ones(_VOCAB), (2, len(bounds.parent_nodes))).astype(np.float32)
  target = rng.dirichlet(np.ones(_VOCAB), (2, 5)).astype(np.float32)
  parents = np.array([[0, 0, 1, 2], [0, 0, 2, -1]], np.int32)
  row = np.where(parents < 0, -1, rng.integers(0, _VOCAB, (2, 4))).astype(np.int32), draft, target
  assert spectr_jax.verify(_keys(2), bounds, *row, parents=parents).tokens.shape == (2, 3)
  with pytest.raises(ValueError, match='parents belong to a tree of TokenTree.slots'):
    spectr_jax.verify(_keys(2), bounds, *row)
  with pytest.raises(ValueError, match='parents belong to'):
    spectr_jax.verify(_keys(2), TokenTree.chains(2, 2), *row, parents=parents)


def test_a_state_goes_from_round_to_round():
  """`greedy_block` has one; a second round with the first one's state is another than one that begins."""
  tree, method = _CHAIN, 'greedy_block'
  tokens, *laws = _round(tree, 64)
  first = spectr_jax.verify(_keys(64), tree, tokens, *laws, method=method)
  assert jax.tree.leaves(first.state)
  states = jax.vmap(lambda _: METHODS[method].verifier.init_state(tree))(jnp.arange(64))
  same = spectr_jax.verify(_keys(64), tree, tokens, *laws, method=method, state=states)
  jax.tree.map(np.testing.assert_array_equal, first, same)
  second = spectr_jax.verify(_keys(64, 2), tree, tokens, *laws, method=method, state=first.state)
  anew = spectr_jax.verify(_keys(64, 2), tree, tokens, *laws, method=method)
  assert (np.asarray(second.tokens) != np.asarray(anew.tokens)).any()


def test_seed_exact_methods_need_the_keys_of_their_guesses():
  tokens, *laws = _round(_CHAINS, 2)
  with pytest.raises(ValueError, match=r'ersd shares its randomness with drafting: give it the keys \[2, 4\]'):
    spectr_jax.verify(_keys(2), _CHAINS, tokens, *laws, method='ersd')
  keys = jax.vmap(lambda key: jax.random.split(key, 4))(_keys(2))
  assert spectr_jax.verify(keys, _CHAINS, tokens, *laws, method='ersd').tokens.shape == (2, 4)


def test_it_is_a_pure_function_under_every_transformation():
  tokens, *laws = _round(_CHAINS, 6)
  row = _keys(6), tokens, *laws
  plain = spectr_jax.verify(row[0], _CHAINS, *row[1:])
  in_two = [array.reshape(2, 3, *array.shape[1:]) for array in row]

  def apply(key, *arrays):
    return spectr_jax.verify(key, _CHAINS, *arrays)

  def joined(tree):
    return jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), tree)

  scanned = jax.lax.scan(lambda carry, row: (carry, apply(*row)), None, in_two)[1]
  for kept in (jax.jit(apply)(*row), joined(jax.vmap(apply)(*in_two)), joined(scanned)):
    jax.tree.map(np.testing.assert_array_equal, plain, kept)


@pytest.mark.parametrize('is_given', [True, False])
def test_a_small_vocabulary_costs_no_races_that_nothing_needs(is_given):
  """A race adds up thousands of terms; for all contexts of all rows at once they would be hundreds of megabytes."""
  tree, num = TokenTree.prefix((2, 2)), 1_000
  shapes = (num, tree.num_nodes), (num, len(tree.parent_nodes), 4), (num, tree.num_nodes + 1, 4)
  tokens, *laws = map(jax.ShapeDtypeStruct, shapes, (jnp.int32, jnp.float32, jnp.float32))
  laws[0] = None if is_given else laws[0]
  verify = jax.jit(lambda tokens, *laws: spectr_jax.verify(jax.random.key(0), tree, tokens, *laws))
  assert verify.lower(tokens, *laws).compile().memory_analysis().temp_size_in_bytes < 16e6


@pytest.mark.slow
def test_two_devices_decide_as_one():
  assert commands.succeed('tests.verify_on_two_devices', num_devices=2).strip() == 'equal'


def test_only_the_form_of_the_platform_is_traced(monkeypatch):
  """Without a context a caller gets the forms of the default platform, those of GPUs included."""
  tokens, *laws = _round(_CHAINS, 2, vocab_size=64)

  def program(platform):
    monkeypatch.setattr(jax, 'default_backend', lambda: platform)
    jax.clear_caches()  # this cannot change while a program runs, so they do not tell its values apart
    return str(jax.make_jaxpr(lambda *x: spectr_jax.verify(x[0], _CHAINS, *x[1:]))(_keys(2), tokens, *laws))

  def engines(platform):
    monkeypatch.undo()
    with tracing_for(platform):
      return str(jax.make_jaxpr(lambda *x: spectr_jax.verify(x[0], _CHAINS, *x[1:]))(_keys(2), tokens, *laws))

  texts = {}
  for platform in ('cpu', 'gpu', 'tpu'):
    texts[platform] = program(platform)
    assert 'platform_index' not in texts[platform]
    assert len(texts[platform]) == len(engines(platform))
  assert len({*texts.values()}) == 3


_TOKENS, _DRAFT, _TARGET = _round(_CHAINS, 2)


def test_gsd_takes_given_guesses():
  spectr_jax.verify(_keys(2), _CHAINS, _TOKENS, None, _TARGET, method='gsd')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'key': jnp.zeros((2, 2), jnp.uint32)}, r'key must be a typed key .* got uint32\[2, 2\]'),
    ({'key': _keys(3)}, r'key must be .* \[2\] of them for the rows, or \[2, 4\]'),
    ({'tree': (0, 0)}, 'tree must be a TokenTree, got tuple'),
    ({'tree': TokenTree.chains(3, 3)}, r'target_probs must be float32 or wider \[2, 10, 5\], got float32\[2, 7, 5\]'),
    ({'tokens': _TOKENS[:1]}, r'tokens must be whole numbers \[2, 6\], got int32\[1, 6\]'),
    ({'tokens': _TOKENS.astype(np.float32)}, 'tokens must be whole numbers'),
    ({'tokens': _TOKENS.tolist()}, 'tokens must be whole numbers .* got list'),
    ({'draft_probs': _DRAFT[:, :-1]}, r'draft_probs must be float32 or wider \[2, 5, 5\]'),
    ({'draft_probs': _DRAFT.astype(np.float16)}, 'they must be the same'),
    ({'draft_probs': _DRAFT.astype(np.float16), 'target_probs': _TARGET.astype(np.float16)}, 'float32 or wider, got'),
    ({'target_probs': _TARGET[0]}, r'target_probs must be \[B, N \+ 1, V\]'),
    ({'method': 'rase'}, "unknown method 'rase'"),
    ({'method': 'block'}, 'block verifies a single draft'),
    ({'method': 'traversal', 'draft_probs': None}, 'traversal takes no given guesses'),
    ({'is_given': np.zeros((2, 5), bool)}, r'is_given must be bool \[2, 6\]'),
  ],
)
def test_errors_name_what_is_wrong(changes, message):
  arguments = {'key': _keys(2), 'tree': _CHAINS, 'tokens': _TOKENS, 'draft_probs': _DRAFT, 'target_probs': _TARGET}
  with pytest.raises(ValueError, match=message):
    spectr_jax.verify(**arguments | changes)
