"""Records say what the verifiers really did: the uniforms, the numbers they fell below, and the path that follows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import METHODS, SamplingParams, TokenTree, generate
from spectr_jax.couplings import Race
from spectr_jax.engine.trace import make_judge, trace_decode
from spectr_jax.models import table
from spectr_jax.proposal import Proposal
from spectr_jax.verifiers import Verifier, Walk
from tests.slow import slow, slow_but

V, ROWS = 6, 256
_WIDE = TokenTree.prefix((3, 1, 2))
_CHAIN = TokenTree.chains(1, 3)
_TREES = {'spectr_gbv': TokenTree.chains(3, 3)}


def _probs_of_tables():
  """Distributions `[2, V, V]` after each token, of a draft and a target, with zeros and a context where they agree."""
  rng = np.random.default_rng(5)
  probs = rng.dirichlet(np.full(V, 0.7), (2, V))
  probs[rng.random(probs.shape) < 0.15] = 0
  probs[1, 2] = probs[0, 2]
  return (probs / probs.sum(-1, keepdims=True)).astype(np.float32)


def _tables():
  """A target and a draft with these distributions."""
  with np.errstate(divide='ignore'):
    return [table.table_model(jnp.asarray(np.log(each))) for each in _probs_of_tables()[::-1]]


def _draft(keys, method, tree, probs):
  """Guesses of all rows by the method's rule, `[ROWS, N]`, when `probs[x]` is the distribution after x."""
  tokens = np.zeros((ROWS, tree.num_nodes + 1), np.int32)
  tokens[:, 0] = np.arange(ROWS) % V
  if not method.is_seed_exact:  # else the verifier meets the noise of drafting again
    keys = jax.random.split(jax.random.key(7), keys.shape)
  for parent in tree.parent_nodes:
    first, count = int(tree.first_child[parent]), int(tree.num_children[parent])
    draw = functools.partial(method.proposal_rule, first_child=first, num_children=count)
    tokens[:, first : first + count] = jax.vmap(draw)(keys[:, tree.depths[parent]], probs[tokens[:, parent]])
  return tokens


@functools.cache
def _played(name):
  """Drafts of many rows, the verifier's verdicts on them and its explanations, in numpy."""
  method = METHODS[name]
  tree = _CHAIN if method.max_drafts == 1 else _TREES.get(name, _WIDE)
  draft_table, target_table = _probs_of_tables()
  keys = jax.random.split(jax.random.key(3, impl='threefry2x32'), (ROWS, tree.max_depth + 1))
  tokens = _draft(keys, method, tree, draft_table)
  proposal = Proposal(tokens[:, 1:], draft_table[tokens[:, tree.parent_nodes]])
  target_probs = target_table[tokens]

  @jax.jit
  @jax.vmap
  def judge(keys, proposal, target_probs):
    row = keys, tree, proposal, target_probs, method.verifier.init_state(tree)
    return method.verifier.verify(*row), method.verifier.explain(*row)

  verdict, (explained, record) = jax.device_get(judge(keys, proposal, target_probs))
  # One run gives both, so a record cannot be of another verdict; and it is the verdict without a record.
  jax.tree.map(np.testing.assert_array_equal, explained, verdict)
  rows = proposal, target_probs, explained, record
  return tree, [jax.tree.map(lambda x, row=row: x[row], rows) for row in range(ROWS)]


def _decisions(record):
  """(kind, place) of every decision that was made."""
  return [(kind, place) for kind, made in record.decisions.items() for place in np.flatnonzero(made.is_made)]


def _spelled(tree, tokens, node):
  return [int(tokens[each - 1]) for each in tree.paths[node] if each > 0]


# With children of one node and with one chain; what has no shares is among the slow tests.
_QUICK = ('spectr', 'block')
_RECORDED = slow_but(_QUICK, [name for name, method in METHODS.items() if method.max_drafts != 0])


@pytest.mark.parametrize('name', _RECORDED)
def test_uniforms_and_shares_lead_to_the_verdict(name):
  tree, rows = _played(name)
  num_decisions = num_chosen = 0
  for proposal, _, verdict, record in rows:
    deepest = int(verdict.path[verdict.num_accepted - 1]) if verdict.num_accepted else 0
    assert _spelled(tree, proposal.tokens, record.node) == _spelled(tree, proposal.tokens, deepest)
    if record.uniform is not None:  # the next token lies where its uniform points to
      cumulative = np.cumsum(record.weights.astype(np.float64))
      below, above = cumulative[verdict.next_token] - record.weights[verdict.next_token], cumulative[verdict.next_token]
      level = record.uniform * cumulative[-1]
      assert record.weights[verdict.next_token] > 0
      assert below - 1e-6 <= level <= above + 1e-6
    for kind, place in _decisions(record):
      made = record.decisions[kind]
      chosen, nodes, is_valid = made.chosen[place], made.nodes[place], made.is_valid[place]
      assert chosen == -1 or chosen in nodes[is_valid]
      num_decisions, num_chosen = num_decisions + 1, num_chosen + (chosen >= 0)
      if made.shares is None:
        winner = made.numbers['winner'][place]
        is_winner = is_valid & (proposal.tokens[nodes - 1] == winner)
        assert chosen == (nodes[is_winner][0] if is_winner.any() else -1)
        continue
      shares = made.shares[place].astype(np.float64)
      assert not shares[~is_valid].any()
      ends = np.cumsum(shares)
      if np.abs(ends - made.uniform[place]).min() < 1e-6:
        continue
      slots = np.flatnonzero((made.uniform[place] < ends) & (shares > 0))
      assert chosen == (nodes[slots[0]] if len(slots) else -1)
    # Following the decisions gives the node.
    kinds, end = record.decisions, 0
    if 'accept' in kinds or 'race' in kinds:
      for kind, place in _decisions(record):
        assert record.decisions[kind].node[place] in (end, record.decisions[kind].node[place])
        chosen = record.decisions[kind].chosen[place]
        end = int(chosen) if chosen >= 0 else end
    else:
      kept = kinds['keep'].chosen[kinds['keep'].is_made]
      kept = kept[kept >= 0]
      if len(kept):  # the first in either traversal, which ends there; else the deepest
        end = int(kept[np.argmax(tree.depths[kept])])
      if name in ('traversal', 'race_traversal'):
        assert len(kept) <= 1
    assert _spelled(tree, proposal.tokens, end) == _spelled(tree, proposal.tokens, record.node)
  assert 100 < num_chosen < num_decisions or name in ('batch', 'greedy_block')
  assert num_chosen > 30


def _probs(tree, proposal, target_probs, node):
  return proposal.probs[tree.parent_index[node]].astype(np.float64), target_probs[node].astype(np.float64)


def _turns(accept, is_valid):
  """Shares of candidates that are tried in turn."""
  shares, left = np.zeros(len(accept)), 1.0
  for i in np.flatnonzero(is_valid):
    shares[i] = left * accept[i]
    left -= shares[i]
  return shares


def _speculative(p, q, tokens, is_valid, numbers):
  return _turns(np.minimum(1, q[tokens] / np.maximum(p[tokens], 1e-30)), is_valid)


def _spectr(p, q, tokens, is_valid, numbers):
  gamma, n = float(numbers['gamma']), is_valid.sum()
  beta = np.minimum(p, q / gamma).sum()
  assert 1 <= gamma <= max(n, 1)
  assert 1 - (1 - beta) ** n <= gamma * beta + 1e-5  # not below the root
  if gamma > 1 + 1e-3:  # nor far above it
    beta = np.minimum(p, q / (gamma - 1e-3)).sum()
    assert 1 - (1 - beta) ** n >= (gamma - 1e-3) * beta - 1e-5
  return _turns(np.minimum(1, q[tokens] / (gamma * np.maximum(p[tokens], 1e-30))), is_valid)


def _specinfer(p, q, tokens, is_valid, numbers):
  accept, r = np.zeros(len(tokens)), q
  for i in np.flatnonzero(is_valid):
    accept[i] = min(1, r[tokens[i]] / p[tokens[i]])
    left = np.maximum(r - p, 0)
    r = left / left.sum() if left.sum() > 1e-7 else r
  return _turns(accept, is_valid)


def _race(p, q, tokens, is_valid, numbers):
  picked, picked_probs = numbers['pick_prob'], np.maximum(numbers['picked_prob'], 1e-30)
  np.testing.assert_allclose(picked.sum(), 1, atol=1e-5)
  return picked * np.where(is_valid, np.minimum(1, q[tokens] / picked_probs), 0)


@pytest.mark.parametrize('formula', [_spectr, *map(slow, (_speculative, _specinfer, _race))])
def test_shares_of_candidates_by_another_route(formula):
  tree, rows = _played(formula.__name__[1:])
  for proposal, target_probs, _, record in rows:
    made = record.decisions['accept']
    for _, place in _decisions(record):
      p, q = _probs(tree, proposal, target_probs, made.node[place])
      is_valid = made.is_valid[place]
      tokens = np.where(is_valid, proposal.tokens[made.nodes[place] - 1], 0)
      numbers = {name: values[place] for name, values in made.numbers.items()}
      np.testing.assert_allclose(made.shares[place], formula(p, q, tokens, is_valid, numbers), atol=2e-5)
      np.testing.assert_allclose(numbers['draft_prob'][is_valid], p[tokens[is_valid]], atol=1e-7)
      np.testing.assert_allclose(numbers['target_prob'][is_valid], q[tokens[is_valid]], atol=1e-7)


@pytest.mark.parametrize('name', ['block', slow('race_block')])
def test_blocks_by_another_route(name):
  """P and h of the picked path, from the distributions of the picked tokens."""
  tree, rows = _played(name)
  select = jax.jit(Race())
  for proposal, target_probs, _, record in rows[: ROWS if name == 'block' else 64]:
    picks, keeps, kept = record.decisions['pick'], record.decisions['keep'], 1.0
    for depth in range(tree.max_depth + 1):
      if depth:
        assert keeps.is_made[depth]
        np.testing.assert_allclose(np.exp(keeps.numbers['log_kept'][depth]), kept, rtol=1e-4, atol=1e-7)
      q = target_probs[picks.node[depth]].astype(np.float64)
      probs = np.zeros(V)
      if picks.is_made[depth]:
        is_valid = picks.is_valid[depth]
        tokens = np.where(is_valid, proposal.tokens[picks.nodes[depth] - 1], 0)
        p = proposal.probs[tree.parent_index[picks.node[depth]]]
        probs = np.asarray(select(p, target_probs[picks.node[depth]], tokens, is_valid).probs if name != 'block' else p)
      mass = np.maximum(kept * q - probs, 0).sum()
      if depth and mass + 1 - kept > 1e-4:
        np.testing.assert_allclose(keeps.shares[depth, 0], mass / (mass + 1 - kept), rtol=2e-3, atol=1e-4)
      if picks.is_made[depth]:
        slot = np.flatnonzero(picks.nodes[depth] == picks.chosen[depth])[0]
        kept = min(1.0, kept * q[tokens[slot]] / probs[tokens[slot]])
      else:
        break
    assert depth == tree.max_depth


def test_traversal_by_another_route():
  tree, rows = _played('traversal')

  def children(node):
    return [child for child in range(1, tree.num_nodes + 1) if tree.parent_of[child] == node]

  def visit(node, value, tokens, probs_of, seen):
    """Appends (node, P) of what is visited below `node`, and itself, as if all were rejected."""
    p, q = probs_of(node)
    for child in children(node):
      token = tokens[child - 1]
      below = min(1.0, value * q[token] / p[token])
      visit(child, below, tokens, probs_of, seen)
      left = np.maximum(value * q - p, 0)
      mass = left.sum()
      total = mass + 1 - value
      q, value = (left / mass if mass > 1e-7 else q), (mass / total if total > 1e-7 else 1.0)
    seen.append((node, value))

  compared = 0
  for proposal, target_probs, _, record in rows:
    seen = []
    visit(0, 1.0, proposal.tokens, functools.partial(_probs, tree, proposal, target_probs), seen)
    made = record.decisions['keep']
    for (node, value), place in zip(seen, np.flatnonzero(made.is_made)):
      assert made.node[place] == node
      if 1e-4 < value < 1 - 1e-4:
        np.testing.assert_allclose(made.shares[place, 0], value, rtol=5e-3, atol=5e-4)
        compared += 1
  assert compared > 150


def test_race_traversal_by_another_route():
  """Contexts as lists of nodes, changed one by one, recursively."""
  tree, rows = _played('race_traversal')
  select = jax.jit(Race())
  padding = np.zeros(tree.num_nodes, np.int32)

  def visit(nodes, credit, arithmetic, tokens, probs_of, seen):
    """Appends (nodes, P, arithmetic, h) of what is visited below a context, and of itself, as if all were rejected.

    The arithmetic is s, P above, q/p̃, m and what the siblings before took.
    """
    candidates = [int(child) for child in range(1, tree.num_nodes + 1) if tree.parent_of[child] in nodes]
    if not candidates:
      seen.append((nodes, credit, arithmetic, credit))
      return
    p, q = probs_of(nodes[0])
    drawn = padding.copy()
    drawn[: len(candidates)] = tokens[np.array(candidates) - 1]
    pick = select(p.astype(np.float32), q.astype(np.float32), drawn, np.arange(len(drawn)) < len(candidates))
    shares, picked = np.asarray(pick.pick_probs), np.asarray(pick.probs, np.float64)
    groups = {}
    for child in candidates:
      groups.setdefault(tokens[child - 1], []).append(child)
    share_of = {token: sum(shares[candidates.index(child)] for child in group) for token, group in groups.items()}
    spent = 0.0
    for token in sorted(groups, key=share_of.get):  # of equal ones the one that was drawn first
      share, ratio = share_of[token], q[token] / picked[token] if picked[token] else 0.0
      mass = share * min(1.0, credit * ratio)
      below = mass / (1 - spent) if mass else 0.0
      visit(groups[token], below, (share, credit, ratio, mass, spent), tokens, probs_of, seen)
      spent += mass
    excess = np.maximum(credit * q - picked, 0).sum()
    total = excess + 1 - credit
    seen.append((nodes, credit, arithmetic, min(excess / total if total > 1e-6 else 1.0, credit)))

  compared = num_visits = 0
  for proposal, target_probs, _, record in rows[:64]:
    seen, made = [], record.decisions['keep']
    visit([0], 1.0, None, proposal.tokens, functools.partial(_probs, tree, proposal, target_probs), seen)
    places = np.flatnonzero(made.is_made)
    assert (places == np.arange(len(places))).all()
    assert len(places) == len(seen) - 1 or made.chosen[places[-1]] >= 0
    for nodes, credit, _, _ in seen:  # those that are not reached as well, and all nodes of a context
      np.testing.assert_allclose(record.credits[np.array(nodes)], credit, rtol=2e-3, atol=2e-4)
    for (nodes, credit, (share, above, ratio, mass, spent), keep), place in zip(seen, places):
      assert made.node[place] == min(nodes)
      numbers = {name: values[place] for name, values in made.numbers.items()}
      np.testing.assert_allclose(np.exp(numbers['log_kept']), credit, rtol=2e-3, atol=2e-4)
      np.testing.assert_allclose(np.exp(numbers['log_above']), above, rtol=2e-3, atol=2e-4)
      np.testing.assert_allclose(np.exp(numbers['log_ratio']), ratio, rtol=1e-3, atol=1e-6)
      np.testing.assert_allclose(numbers['picked_share'], share, rtol=1e-4, atol=1e-6)
      np.testing.assert_allclose(numbers['mass'], mass, rtol=2e-3, atol=2e-4)
      np.testing.assert_allclose(numbers['before'], spent, rtol=2e-3, atol=2e-4)
      num_visits += 1
      if 1e-4 < keep < 1 - 1e-4:
        np.testing.assert_allclose(made.shares[place, 0], keep, rtol=5e-3, atol=5e-4)
        compared += 1
  assert compared > 50
  assert num_visits > 100


def test_arrival_times_of_a_race():
  _, rows = _played('ersd')
  for _, _, _, record in rows:
    made = record.decisions['race']
    for _, place in _decisions(record):
      is_valid, numbers = made.is_valid[place], {name: values[place] for name, values in made.numbers.items()}
      assert (np.diff(numbers['draft_time'][is_valid]) >= 0).all()  # first arrivals in order
      is_possible = is_valid & (numbers['target_prob'] > 0)
      # One exponential per token, divided by either probability.
      possible = {name: x[is_possible] for name, x in numbers.items() if np.shape(x)}
      draft, target = (possible[f'{role}_time'] * possible[f'{role}_prob'] for role in ('draft', 'target'))
      np.testing.assert_allclose(draft, target, rtol=1e-4)
      assert (numbers['winner_time'] <= numbers['target_time'][is_valid] * (1 + 1e-6)).all()


def _trace(name, tree, **more):
  target, draft = _tables()
  key = jax.random.key(11, impl='threefry2x32')
  request = {'method': name, 'tree': tree, 'max_new_tokens': 20} | more
  others = request.pop('others', ())
  trace = trace_decode(key, target, draft, [1, 3], others=others, **request)
  return trace, generate(key, target, draft, np.array([[1, 3]]), np.array([2]), **request)


@pytest.mark.slow  # by default a test of the command compares the two
@pytest.mark.parametrize(
  ('name', 'tree', 'more'),
  [
    ('spectr', TokenTree.chains(2, 2), {'others': ('spectr', 'speculative')}),
    ('greedy_block', _CHAIN, {'sampling': SamplingParams(0.7)}),
    ('ersd', TokenTree.chains(2, 3), {'eos_id': 0}),
  ],
)
def test_a_trace_is_the_run_that_generate_makes(name, tree, more):
  trace, generation = _trace(name, tree, **more)
  assert trace.generation.tokens.tolist() == np.asarray(generation.tokens).tolist()
  assert trace.generation.origins.tolist() == np.asarray(generation.origins).tolist()
  length = int(generation.lengths[0])
  assert np.concatenate([each.emitted for each in trace.rounds]).tolist() == generation.tokens[0, :length].tolist()
  assert len(trace.rounds) == int(generation.num_target_calls[0])
  text, place = [3, *generation.tokens[0].tolist()], 0
  for played in trace.rounds:
    assert played.root == text[place]
    place += len(played.emitted)
    verdict, record = played.judgements[0].verdict, played.judgements[0].record
    kept = [int(played.tokens[node - 1]) for node in verdict.path[: verdict.num_accepted]] + [int(verdict.next_token)]
    assert kept[: len(played.emitted)] == played.emitted.tolist()
    assert record is not None
    assert len(played.judgements) == 1 + len(more.get('others', ()))
    if 'others' in more:  # they judge the same drafts: all of them, or the first
      own, same, single = played.judgements
      assert own.verdict.num_accepted == same.verdict.num_accepted
      p, q, token = played.draft_probs[0], played.target_probs[0], played.tokens[0]
      share = single.record.decisions['accept'].shares[0, 0]
      np.testing.assert_allclose(share, min(1, q[token] / p[token]), atol=1e-6)


def test_who_may_judge():
  assert make_judge(METHODS['speculative'], METHODS['spectr'], _WIDE).nodes.tolist() == [0, 1, 4, 7]  # the first draft
  assert make_judge(METHODS['block'], METHODS['spectr'], _WIDE).tree == _CHAIN
  assert make_judge(METHODS['traversal'], METHODS['gsd'], _WIDE).method.verifier.with_replacement is False
  for name, run, message in (
    ('spectr', 'gsd', 'only if children are drawn independent'),
    ('greedy_block', 'spectr', 'keeps a state between rounds'),
    ('autoregressive', 'spectr', 'drafts nothing'),
  ):
    with pytest.raises(ValueError, match=message):
      make_judge(METHODS[name], METHODS[run], _WIDE)
  with pytest.raises(ValueError, match='drafts nothing'):
    trace_decode(jax.random.key(0), *_tables(), [1], method='autoregressive', tree=_CHAIN, max_new_tokens=2)


@pytest.mark.slow
def test_a_verifier_without_a_record_is_traced_without_one():
  @dataclasses.dataclass(frozen=True)
  class Silent(Walk):
    explain = Verifier.explain

  method = dataclasses.replace(METHODS['spectr'], name='silent', verifier=Silent(METHODS['spectr'].verifier.coupling))
  trace, generation = _trace(method, TokenTree.chains(2, 2))
  assert all(played.judgements[0].record is None for played in trace.rounds)
  assert trace.generation.tokens.tolist() == np.asarray(generation.tokens).tolist()
