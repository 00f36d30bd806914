"""Trees that grow by confidence: the rules beside a plain search, exact proofs, and the loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coarse import coarse
from exact import assert_engine_is_exact, changed_proposals
from growing_drafter import GrowingDrafter

import spectr_jax
from spectr_jax import METHODS, Decoder, TokenTree, lookup_drafter
from spectr_jax.draft import Confident, DraftRequest, Estimated, Likeliest, growing, model_drafter
from spectr_jax.draft.drawing import draw_tree
from spectr_jax.engine.loop import noise_keys, propose, run_rounds
from spectr_jax.proposal import Independent, WithoutReplacement
from spectr_jax.sampling import SamplingParams
from spectr_jax.testing import (
  ContextTables,
  enumeration_error,
  joint_law,
  random_tables,
  tiny_transformers,
)
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures('highest')

_PROMPTS = np.array([[1, 2, 3, 4, 0], [2, 0, 0, 0, 0], [3, 3, 1, 0, 0], [4, 1, 0, 2, 0]])
_LENGTHS = np.array([5, 1, 3, 4])
_SLOTS = TokenTree.slots((3, 3, 2))


def _draw(table, prefix, length, tree, growth, *, temperature=1.0, seed=0):
  """`draw_tree` after a prefix, with a table of the distributions after each context; see `ContextTables`."""
  vocab_size = table.shape[1]

  def laws_after(texts, length):
    return table[(vocab_size**length - 1) // (vocab_size - 1) + texts]

  def score(texts, nodes):
    own = jnp.take_along_axis(texts, nodes.above, axis=1) * vocab_size + nodes.tokens
    texts = jax.lax.dynamic_update_slice_in_dim(texts, own, nodes.first, axis=1)
    return texts, jnp.log(laws_after(own, length + nodes.depth))

  texts = jnp.zeros((1, len(tree.parent_nodes)), jnp.int32).at[0, 0].set(jnp.asarray(prefix, jnp.int32))
  keys = jax.random.split(jax.random.key(seed), (1, tree.max_depth + 1))
  request = DraftRequest(keys, SamplingParams.make(1, temperature=temperature), tree, Independent())
  return draw_tree(request, jnp.log(laws_after(texts[:, 0], length)), texts, score, growth=growth)[0]


@pytest.mark.parametrize('threshold', slow_but([0.1], [0.0, 0.1]))
def test_the_likeliest_paths_stand_in_every_depth(threshold):
  table = random_tables(3, 4, 4).draft_probs
  tree = TokenTree.slots((2, 5, 3))
  proposal = _draw(jnp.asarray(table), 2, 1, tree, Likeliest(threshold=threshold))
  tokens, parents = np.asarray(proposal.tokens[0]), np.asarray(proposal.parents[0])
  paths, first = {(): 1.0}, 1
  for depth, width in enumerate((2, 5, 3)):
    children = {}
    for path, chance in paths.items():
      place = functools.reduce(lambda number, token: 4 * number + token, (2, *path), 0)
      probs = table[(4 ** (depth + 1) - 1) // 3 + place]
      children |= {(*path, token): chance * probs[token] for token in range(4)}
    ranked = sorted(children.items(), key=lambda item: -item[1])
    paths = {path: chance for path, chance in ranked[:width] if chance > 0 and chance >= threshold}

    def spelled(node):
      return () if node == 0 else (*spelled(parents[node - 1]), tokens[node - 1])

    nodes = [node for node in range(first, first + width) if parents[node - 1] >= 0]
    assert [spelled(node) for node in nodes] == list(paths)
    first += width
  assert ((tokens < 0) == (parents < 0)).all()
  np.testing.assert_array_equal(proposal.is_given[0], parents >= 0)
  assert (threshold == 0) == (parents >= 0).all()


@pytest.mark.parametrize('method', slow_but(['specinfer'], ('specinfer', 'spectr', 'race', 'race_traversal')))
def test_likeliest_guesses_are_exact(method):
  tree = TokenTree.slots((2, 2))
  for seed, threshold in enumerate((0.0, 0.15)):
    tables = random_tables(seed, 3, 5)

    def guess(text, length, tables=tables, threshold=threshold):
      prefix = jax.lax.fori_loop(0, length, lambda i, number: 3 * number + text[i], jnp.zeros((), text.dtype))
      proposal = _draw(jnp.asarray(tables.draft_probs), prefix, length, tree, Likeliest(threshold=threshold))
      return proposal.tokens[0], proposal.parents[0]

    assert enumeration_error(coarse(METHODS[method]), tree, tables, 3, guess_fn=guess) < 1e-10


# Estimates of a drafter that knows how likely a guess after each token is accepted; the root's comes last.
_ESTIMATES = 0.9, 0.2, 0.6


def _grow(tokens, parents, probs, depth, tree, growth):
  """`growth.allocate` depth by depth, as `enumeration.GrowFn`; an estimate reads the token before the guess."""
  chances = jnp.zeros(1, probs.dtype)
  for level in range(depth + 1):
    nodes, slots = (nodes[nodes >= 0] for nodes in tree.levels[level : level + 2])
    before = jnp.full(1, 2) if level == 0 else tokens[nodes - 1]
    own = jnp.array(_ESTIMATES, probs.dtype)[before] if growth.reads_estimates else probs[nodes]
    above, chances = growth.allocate(own, chances, len(slots))
  return jnp.full(tree.num_nodes, -1, jnp.int32).at[slots - 1].set(jnp.where(above < 0, -1, nodes[0] + above))


_DRAWN = 'spectr', 'specinfer', 'batch', 'race', 'race_block', 'traversal', 'race_traversal'


@pytest.mark.parametrize('method', slow_but(['race_traversal'], _DRAWN))
@pytest.mark.parametrize('kind', slow_but(['estimated'], ['confident', 'estimated']))
def test_allocated_samples_are_exact(method, kind):
  confident = (Confident(0.1), (2, 3)), (Confident(0.5, threshold=0.2), (2, 3))
  estimated = (Estimated(), (2, 3)), (Estimated(0.15), (2, 3)), (Estimated(0.3), (1, 1))
  for seed, (growth, widths) in enumerate(confident if kind == 'confident' else estimated):
    tree, tables = TokenTree.slots(widths), random_tables(seed, 2, 5)
    grow_fn = functools.partial(_grow, tree=tree, growth=growth)
    assert enumeration_error(coarse(METHODS[method]), tree, tables, 3, grow_fn=grow_fn) < 1e-10


def test_confident_allocation():
  """By hand: a sure node gets one child, an unsure one as many as there are left; unlikely children are left out."""
  probs = jnp.array([[0.9, 0.1, 0.0], [0.4, 0.3, 0.3]])
  chances = jnp.log(jnp.array([0.5, 0.5]))
  a, b = 0.82, 0.34
  worth = {(0, 0): a, (0, 1): a * (1 - a), (1, 0): b, (1, 1): b * (1 - b), (1, 2): b * (1 - b) ** 2}
  wanted = sorted(worth, key=lambda place: -worth[place])
  above, log_worth = Confident(0.0).allocate(probs, chances, 5)
  np.testing.assert_array_equal(above[:4], [node for node, _ in wanted[:4]])
  np.testing.assert_allclose(jnp.exp(log_worth[:4]), [0.5 * worth[place] for place in wanted[:4]], rtol=1e-5)
  above, log_worth = Confident(0.0, threshold=0.1).allocate(probs, chances, 5)
  np.testing.assert_array_equal(above, [0, 1, 1, -1, -1])
  assert not np.isfinite(log_worth[3:]).any()
  # The more a draft is trusted, the fewer siblings.
  above, _ = Confident(0.95).allocate(probs, jnp.log(jnp.array([0.9, 0.1])), 2)
  np.testing.assert_array_equal(above, [0, 1])


@pytest.mark.parametrize('rule', [Independent(), WithoutReplacement()])
def test_what_is_drawn_has_no_part_in_what_is_kept(rule):
  """Every slot with a parent has a token, and the first child of each node the draft's distribution."""
  probs, num_draws = jnp.array([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]]), 20_000
  keys = jax.random.split(jax.random.key(0), num_draws)
  expand = jax.jit(jax.vmap(lambda key: Confident().expand(key, rule, probs, jnp.log(jnp.full(2, 0.5)), jnp.arange(4))))
  above, tokens, _ = map(np.asarray, expand(keys))
  assert (above == above[0]).all()
  assert set(above[0]) == {0, 1}
  assert (tokens >= 0).all()
  for node in range(2):
    counts = np.bincount(tokens[:, list(above[0]).index(node)], minlength=4)
    error = np.sqrt(probs[node] * (1 - probs[node]) * num_draws)
    assert (np.abs(counts - probs[node] * num_draws) < 5 * error).all()


def test_estimated_allocation():
  """By hand; and a chain ends from left to right, with the first guess that is worth too little."""
  above, log_worth = Estimated().allocate(jnp.array([0.5, 0.8]), jnp.log(jnp.array([1.0, 0.5])), 3)
  np.testing.assert_array_equal(above, [0, 1, 0])
  np.testing.assert_allclose(jnp.exp(log_worth), [0.5, 0.4, 0.25], rtol=1e-5)
  chances, used = jnp.zeros(1), []
  for estimate in (0.9, 0.5, 0.8, 1.0):
    above, chances = Estimated(0.4).allocate(jnp.array([estimate]), chances, 1)
    used.append(int(above[0]))
  assert used == [0, 0, -1, -1]  # .9, .45, then .36: the last guess is not made either, although it would be accepted


@pytest.mark.parametrize('method', slow_but(['speculative'], ('speculative', 'spectr', 'block', 'race_traversal')))
def test_a_search_over_lengths_is_caught(method):
  """A first guess that is kept only if what follows it is worth a guess: the estimate for that reads the first."""
  target, draft = np.tile([0.7, 0.3], (3, 1)), np.tile([0.5, 0.5], (3, 1))
  tables, tree = ContextTables(draft, target, 1), TokenTree.chains(1, 1)
  # A name of its own, so that no other test gets the program that is compiled with the patch.
  cut_short = dataclasses.replace(coarse(METHODS[method]), name='cut short')

  def cut(tokens, *others):
    return jnp.where(jnp.array(_ESTIMATES)[tokens] > 0.5, tokens, -1), *others

  with changed_proposals(cut):
    np.testing.assert_allclose(joint_law(cut_short, tree, tables, 1), [0.85, 0.15], atol=1e-10)
  assert enumeration_error(coarse(METHODS[method]), tree, tables, 1) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
  ('growth', 'method', 'widths'),
  [
    *((Confident(0.3, threshold=0.1), method, (2, 3)) for method in (*_DRAWN, 'gsd')),
    *((Likeliest(), method, (2, 2)) for method in ('specinfer', 'race_traversal')),  # for rows that sample, too
  ],
)
def test_grown_trees_of_a_model_in_the_loop(growth, method, widths):
  drafter = growing(model_drafter(tiny_transformers()[1]), growth)
  assert_engine_is_exact(drafter, method, TokenTree.slots(widths))


@pytest.mark.parametrize('method', slow_but(['specinfer'], ('spectr', 'specinfer', 'race_traversal', 'traversal')))
def test_samples_dropped_by_their_own_probability_are_caught(method):
  """Two samples, of which the likelier one is kept: what EAGLE-2's ranking does to samples."""

  def ranked(tokens, probs, *others):
    is_worse = jnp.argmin(probs[0, tokens]) == jnp.arange(2)
    return jnp.where(is_worse, -1, tokens), probs, *others

  tree = TokenTree.chains(2, 1)
  with changed_proposals(ranked):
    errors = [enumeration_error(coarse(METHODS[method]), tree, random_tables(seed, 3, 4), 2) for seed in range(2)]
  assert max(errors) > 1e-2


def _generate(drafter, target, method, tree=_SLOTS, **options):
  options = {'max_new_tokens': 10, 'sampling': SamplingParams(0.0)} | options
  return spectr_jax.generate(
    jax.random.key(0), target, drafter, _PROMPTS, _LENGTHS, method=method, tree=tree, **options
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  'method', slow_but(['specinfer'], ('specinfer', 'spectr', 'race', 'race_block', 'race_traversal', 'ersd'))
)
def test_greedy_tokens_are_the_target_s(method):
  target, draft = tiny_transformers()
  wanted = _generate(None, target, 'autoregressive', None)
  result = _generate(growing(model_drafter(draft), Likeliest()), target, method)
  np.testing.assert_array_equal(result.tokens, wanted.tokens)
  calls = int(result.num_target_calls.sum())
  assert calls < int(wanted.num_target_calls.sum())
  chain = _generate(draft, target, 'speculative', TokenTree.chains(1, 3))
  assert calls < int(chain.num_target_calls.sum())


@pytest.mark.slow
def test_thresholds_are_data_and_save_the_drafts_steps():
  target, draft = tiny_transformers()
  sizes = {'tree': TokenTree.slots((2, 2, 2, 2)), 'max_new_tokens': 6, 'cache_size': 11}
  run = jax.jit(propose)
  num_run, sizes_before = [], None
  for threshold in (0.0, 0.8, 2.0):
    drafter = growing(model_drafter(draft), Likeliest(temperature=1.0, threshold=threshold))
    decoder = Decoder.make(target, drafter, method='specinfer', **sizes)
    state = spectr_jax.engine.init_decode(decoder, jax.random.key(0), _PROMPTS, _LENGTHS, sampling=SamplingParams(0.0))
    proposal = run(decoder, state, noise_keys(decoder, state)[0])
    num_run.append(int(proposal.state.cache.num_pending))
    is_used = np.asarray(proposal.parents >= 0)
    assert is_used.all() if threshold == 0 else not is_used.all()
    spectr_jax.engine.decode_rounds(decoder, state)
    programs = run._cache_size(), run_rounds._cache_size()
    assert sizes_before in (None, programs)
    sizes_before = programs
  # The last two committed tokens, then two nodes for each of three depths.
  assert num_run[0] == 8
  assert num_run[0] > num_run[1] >= num_run[2] == 2


def test_what_cannot_grow_is_refused():
  target, draft = tiny_transformers()
  sizes = {'max_new_tokens': 4, 'cache_size': 9}
  drafter = growing(model_drafter(draft), Likeliest())
  for make, message in (
    (lambda: growing(lookup_drafter(5), Likeliest()), 'only a drafter that draws'),
    (lambda: growing(GrowingDrafter(jnp.zeros((5, 5))), Likeliest()), 'only a drafter that draws'),
    (lambda: growing(model_drafter(draft), Estimated()), 'Estimated reads estimates of acceptance, and this draft'),
    (lambda: _draw(jnp.full((4, 3), 1 / 3), 0, 0, TokenTree.slots((1, 1)), Estimated()), 'this draft makes none'),
    (lambda: Decoder.make(target, drafter, method='traversal', tree=_SLOTS, **sizes), 'takes drawn candidates only'),
    (lambda: Decoder.make(target, drafter, method='specinfer', tree=TokenTree.chains(2, 2), **sizes), 'of its own'),
  ):
    with pytest.raises(ValueError, match=message):
      make()


def test_greedy_rows_are_ranked_without_their_filters():
  own = SamplingParams.make(2, temperature=np.array([0.0, 0.7]), top_p=0.5)
  ranked = Likeliest(temperature=0.25).sampling(own)
  np.testing.assert_allclose(ranked.temperature, [0.25, 0.7])
  np.testing.assert_allclose(ranked.top_p, [1, 0.5])
  assert ranked.top_k is None
