"""Budgets across rows: the same text or distribution whatever is drafted when, and the choice by what calls cost."""

import dataclasses
import itertools

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from coarse import coarse

from spectr_jax import METHODS, Constraint, Decoder, Request, SamplingParams, TokenTree, generate_many, lookup_drafter
from spectr_jax.draft import Confident, growing, model_drafter
from spectr_jax.engine import Budget, Rows, loop, reading
from spectr_jax.engine.budget import ladder, name_of, with_tree
from spectr_jax.methods import with_gumbel
from spectr_jax.testing import chi_square, enumeration, random_tables
from tests.draft.tiny_heads import tiny_head
from tests.models import recurrent_test
from tests.slow import slow, slow_but

pytestmark = pytest.mark.usefixtures('highest')
_TREE, _NEW, _SIZE, _VOCAB = TokenTree.chains(2, 3), 24, 48, 17


def _make(target, draft, *, batch_size=3, budget=None, **options):
  own = {'method': 'race_traversal', 'tree': _TREE, 'max_new_tokens': _NEW} | options
  return Rows(Decoder.make(target, draft, cache_size=_SIZE, **own), batch_size=batch_size, budget=budget)


class Script(Budget):
  """A budget that takes sizes and trees in turn, whatever they cost."""

  def __init__(self, *calls):
    super().__init__(is_resized=True)
    self._calls = itertools.cycle(calls)

  def choose(self, num_rows, *, has_tables=False, keeps_tree=False):
    least, self.place = next(self._calls)
    self.size = next(size for size in self.sizes if size >= max(num_rows, least))
    return self.size, self.tree


def _requests(lengths, *, temperature=0.0):
  rng = np.random.default_rng(0)
  return [
    Request(i, rng.integers(3, _VOCAB, size).tolist(), jax.random.key(i), SamplingParams(temperature), _NEW - 3 * i)
    for i, size in enumerate(lengths)
  ]


def _finish(rows, requests):
  """The continuations of requests that come one by one, a round apart: tokens, and calls of the target."""
  waiting, found = list(requests), {}
  while waiting or rows.owners:
    if waiting and rows.free:
      rows.put([waiting.pop(0)])
    for piece in rows.step():
      if piece.is_done:
        result, row = rows.result, piece.row
        found[piece.request.name] = result.tokens[row, : piece.end].tolist(), int(result.num_target_calls[row])
        rows.end([row])
  return found


def test_a_constraint_holds_whatever_tree_ran_before(tables):
  """A decoder with another tree is kept from call to call, and has the tables of the requests in progress."""
  rows = Rows(
    Decoder.make(*tables, method='race_traversal', tree=_TREE, max_new_tokens=6, cache_size=16),
    batch_size=1,
    budget=Script((1, 1)),
  )
  twos = Constraint((np.arange(6) == 2).astype(int), np.array([[-1, 0]]), np.ones(1, bool))
  for constraint in (None, twos, None, twos):
    rows.put([Request(0, [1], jax.random.key(0), SamplingParams(1.0), constraint=constraint)])
    while not any(piece.is_done for piece in rows.step()):
      pass
    tokens = rows.result.tokens[0, : rows.result.lengths[0]]
    assert (set(tokens.tolist()) == {2}) == (constraint is not None)
    rows.end([0])


def test_texts_that_measure_are_not_kept(target, draft):
  rows = Rows(
    Decoder.make(target, draft, method='race_traversal', tree=_TREE, max_new_tokens=_NEW, cache_size=64),
    batch_size=1,
    budget=Budget(),
    prefix_cache_bytes=2**24,
  )
  for forced in ((1, 0), None):
    rows.budget.forced = forced
    rows.put([Request(0, [5] * 38, jax.random.key(0))])
    rows.end([0])
    assert (rows.prefixes.num_bytes == 0) == (forced is not None)


def test_a_ladder_has_fewer_guesses_step_by_step():
  assert [*map(name_of, ladder(TokenTree.chains(2, 4)))] == ['0', '1x1', '1x2', '1x4', '2x4']
  assert [*map(name_of, ladder(TokenTree.chains(1, 3)))] == ['0', '1x1', '1x2', '1x3']
  assert ladder(TokenTree.slots((2, 3, 2)))[1:] == [TokenTree.slots((2, 3, 2)[:depth]) for depth in (1, 2, 3)]
  assert ladder(TokenTree()) == [TokenTree()]


_DRAFTERS = {
  'model': lambda draft: draft,
  'head': lambda draft: tiny_head(_VOCAB, width=32),
  'growing': lambda draft: growing(model_drafter(draft), Confident()),
  'recurrent': lambda draft: recurrent_test._model('delta'),  # which cannot go back, and goes on where it ends
  'lookup': lambda draft: lookup_drafter(_VOCAB, lookup_min=1),
}


@pytest.mark.parametrize('name', slow_but(['model'], _DRAFTERS))
def test_greedy_text_is_that_without_a_draft(monkeypatch, target, draft, name):
  """Rows come and go, calls grow and shrink, and the drafter pauses, some of the time longer than it reads at once."""
  monkeypatch.setattr(reading, '_FEW', 4)
  tree = TokenTree.slots((2, 2)) if name == 'growing' else TokenTree.chains(1, 3) if name == 'lookup' else _TREE
  requests = _requests([1, 9, 4, 13, 2])
  plain = _finish(_make(target, None, method='autoregressive', tree=None), requests)
  calls = [(1, 0)] * 7 + [(3, -1), (1, 1), (3, -1)] + [(1, 0)] * 2 + [(3, -1)]
  rows = _make(target, _DRAFTERS[name](draft), tree=tree, budget=Script(*calls))
  assert {i: tokens for i, (tokens, _) in _finish(rows, requests).items()} == {
    i: tokens for i, (tokens, _) in plain.items()
  }
  assert {guesses for _, guesses in rows.budget.rounds} >= {'0', name_of(tree)}


def _texts(found):
  return {name: tokens for name, (tokens, _) in found.items()}


def test_without_guesses_it_is_decoding_without_a_draft(target, draft):
  """Also what is drawn, since keys follow from the length of the text."""
  requests = _requests([1, 9, 4], temperature=1.0)
  plain = _finish(_make(target, None, method='autoregressive', tree=None), requests)
  assert _finish(_make(target, draft, budget=0), requests) == plain


def test_a_request_that_keeps_its_tree_says_the_same_whatever_runs_beside(target, draft):
  """Drafts pause for those before it; while it runs, all have the decoder's tree."""
  requests = _requests([1, 9, 4, 6], temperature=1.0)
  kept = dataclasses.replace(requests[3], keeps_tree=True)
  plain = _texts(_finish(_make(target, draft), [kept]))
  for others in ([], requests[:3]):
    rows = _make(target, draft, budget=Budget())
    trees, choose = [], rows.budget.choose

    def note(*arguments, choose=choose, trees=trees, rows=rows, **options):
      found = choose(*arguments, **options)
      trees.append((any(each.keeps_tree for each in rows.owners.values()), found[1]))
      return found

    rows.budget.choose = note
    assert _texts(_finish(rows, [*others, kept])).items() >= plain.items()
    assert {tree for is_kept, tree in trees if is_kept} == {_TREE}
    assert not others or {tree for is_kept, tree in trees if not is_kept} - {_TREE}


def test_text_by_position_does_not_depend_on_the_budget(target, draft):
  requests = _requests([1, 9, 4, 6], temperature=1.0)
  gumbel = with_gumbel(METHODS['autoregressive'])
  plain = _texts(_finish(_make(target, None, method=gumbel, tree=None), requests))
  found = _finish(_make(target, draft, method='ersd', budget=Script((1, 0), (3, -1))), requests)
  assert _texts(found) == plain


@pytest.mark.parametrize('name', slow_but(['model'], [*_DRAFTERS][:4]))
def test_a_pause_leaves_no_trace_in_what_is_proposed(monkeypatch, target, draft, name):
  """The guesses and their distributions are those of rows that begin with this text."""
  monkeypatch.setattr(reading, '_FEW', 4)
  drafter, tree = _DRAFTERS[name](draft), TokenTree.slots((2, 2)) if name == 'growing' else _TREE
  rows = _make(target, drafter, tree=tree, budget=Script(*[(1, 0)] * 11, (3, -1), *[(1, 0)] * 3), batch_size=4)
  requests = _requests([5, 2, 8], temperature=1.0)
  rows.put(requests[:1])
  for _ in range(5):
    rows.step()
  rows.put(requests[1:])  # whose prompts the drafter has not read
  for _ in range(10):
    rows.step()
  rows._read_draft([*rows.owners])
  anew = _make(target, drafter, tree=tree, batch_size=4)
  ends = {row: rows._texts.lengths[row] for row in rows.owners}
  texts = {row: rows._texts.tokens[row, :end].tolist() for row, end in ends.items()}
  anew.put([Request(row, text, rows.owners[row].key, SamplingParams(1.0), 1) for row, text in texts.items()])
  places = {request.name: row for row, request in anew.owners.items()}

  def proposal(of):
    return loop.propose(of.decoder, of.state, loop.noise_keys(of.decoder, of.state)[0])

  paused, fresh = proposal(rows), proposal(anew)
  for row, place in places.items():
    np.testing.assert_array_equal(paused.tokens[row], fresh.tokens[place])
    np.testing.assert_allclose(paused.probs[row], fresh.probs[place], rtol=1e-4, atol=1e-5)


# Rows that compete.


def _outcomes(method, tree, tables, prefix, length):
  arguments = jnp.asarray(tables.draft_probs), jnp.asarray(tables.target_probs), prefix, length
  own = method if tree.num_nodes else METHODS['autoregressive']
  return enumeration._outcomes(*arguments, (), method=own, tree=tree, grow_fn=None, guess_fn=None, drawn_nodes=())


def _pair_law(method, choose, tables, num_tokens):
  """The joint distribution of the texts of two rows, whose rounds have the tree `choose(texts)`."""
  vocab_size, finished = tables.vocab_size, np.zeros((tables.vocab_size**num_tokens,) * 2)
  waiting = {((0, 0), (0, 0)): 1.0}
  with jax.enable_x64(True):
    while waiting:
      texts = min(waiting, key=lambda texts: sum(length for _, length in texts))
      probability, tree = waiting.pop(texts), choose(texts)
      ends = []
      for text, length in texts:
        if length == num_tokens:
          ends.append({(text, length): 1.0})
          continue
        found = {}
        for count, emitted, share, _ in _outcomes(method, tree, tables, text, length)[0]:
          end = min(length + count, num_tokens)
          after = (text * vocab_size**count + emitted) // vocab_size ** (length + count - end), end
          found[after] = found.get(after, 0.0) + share
        ends.append(found)
      for (first, share), (second, other) in itertools.product(*(each.items() for each in ends)):
        if first[1] == second[1] == num_tokens:
          finished[first[0], second[0]] += probability * share * other
        else:
          waiting[first, second] = waiting.get((first, second), 0.0) + probability * share * other
  return finished


_ONE = TokenTree.chains(1, 2)
_COMPETING = {'spectr': TokenTree.chains(2, 1), 'block': _ONE, 'race_traversal': TokenTree.chains(2, 1)}


@pytest.mark.parametrize('name', _COMPETING)
def test_trees_chosen_by_the_texts_of_all_rows_are_exact(name):
  """All guesses of both rows are dropped by what either of them said, and how far it is."""
  method, tables = coarse(METHODS[name]), random_tables(1, 2, 4)
  trees = [TokenTree(), TokenTree.chains(1, 1), _COMPETING[name]]

  def choose(texts):
    return trees[sum(text + length for text, length in texts) % 3]

  wanted = tables.joint_target_law(3).reshape(-1)
  np.testing.assert_allclose(_pair_law(method, choose, tables, 3), np.outer(wanted, wanted), atol=1e-10)


_NUM_ROWS, _END = 256, 0


def _text_law(law, start, num_tokens):
  found = np.zeros((len(law),) * num_tokens)
  for text in np.ndindex(found.shape):
    chance, before = 1.0, start
    for token in text:
      chance *= float(token == _END) if before == _END else law[before, token]
      before = token
    found[text] = chance
  return found


@pytest.mark.parametrize('name', slow_but(['race_traversal'], _COMPETING))
def test_rows_that_compete_have_the_target_s_distribution(tables, name):
  """The fewer rows are left the more each guesses, and which are left depends on what they said."""
  tree = TokenTree.chains(1 if name == 'block' else 2, 2)
  decoder = Decoder.make(
    *tables, method=coarse(METHODS[name]), tree=tree, max_new_tokens=4, cache_size=8, eos_id=_END
  )  # fmt: skip
  budget, counts = Budget(_NUM_ROWS), np.zeros((6,) * 4)
  for turn in range(16):
    rows = Rows(decoder, batch_size=_NUM_ROWS, budget=budget)
    keys = jax.random.split(jax.random.key(turn), _NUM_ROWS)
    rows.put([Request(i, [3], keys[i]) for i in range(_NUM_ROWS)])
    while rows.owners:
      done = [piece for piece in rows.step() if piece.is_done]
      for piece in done:
        text = np.full(4, _END)
        text[: piece.end] = rows.result.tokens[piece.row, : piece.end]
        counts[tuple(text)] += 1
      rows.end(piece.row for piece in done)
  assert {guesses for _, guesses in budget.rounds} >= {'1x1', name_of(tree)}
  law = np.array(jax.nn.softmax(tables[0].params, axis=-1))
  assert chi_square(counts, _text_law(law, 3, 4)).p_value > 1e-3


class _Peeking(Budget):
  """A budget that drafts by a score of the next round's guess, which it must not know, or of its distribution."""

  rows, sees = None, False

  def choose(self, num_rows, *, has_tables=False, keeps_tree=False):
    decoder = with_tree(self.rows.decoder, self.trees[1])
    proposal = _propose(decoder, self.rows.state)
    token = int(proposal.tokens[0, 0])
    is_likely = token == int(np.argmax(proposal.probs[0, 0])) if self.sees else float(proposal.probs[0, 0].max()) > 0.3
    self.place = 1 if is_likely else 0
    return self.size, self.tree


_propose = jax.jit(lambda decoder, state: loop.propose(decoder, state, loop.noise_keys(decoder, state)[0]))


@pytest.mark.parametrize('sees', [slow(False), True])
def test_a_score_that_reads_the_guess_is_caught(tables, sees):
  """The negative control: guesses that are dropped for what they are leave other tokens too likely."""
  decoder = Decoder.make(*tables, method='spectr', tree=TokenTree.chains(1, 1), max_new_tokens=2, cache_size=4)
  budget, counts = _Peeking(), np.zeros((6, 6))
  budget.sees = sees
  budget.rows = rows = Rows(decoder, batch_size=1, budget=budget)
  for key in jax.random.split(jax.random.key(0), 700):
    rows.put([Request('', [4], key)])
    while not rows._is_done[0]:
      rows.step()
    counts[tuple(rows.result.tokens[0, :2])] += 1
    rows.end([0])
  law = np.array(jax.nn.softmax(tables[0].params, axis=-1))
  p_value = chi_square(counts, law[4][:, None] * law).p_value
  assert p_value < 1e-6 if sees else p_value > 1e-3


# The choice by what calls cost.


class _Load:
  """Calls that take as long as a rule says, and keep guesses at one rate, with a pinch of noise."""

  def __init__(self, budget, rate, seconds_fn, seed=0):
    self.budget, self.rate, self.seconds_fn, self.rng = budget, rate, seconds_fn, np.random.default_rng(seed)

  def rate_of(self, tree):
    """Two drafts keep a little more than one."""
    return self.rate if tree.num_nodes <= tree.max_depth else self.rate + 0.3 * (1 - self.rate)

  def tokens(self, tree):
    """Expected, of a row and round."""
    return sum(self.rate_of(tree) ** depth for depth in range(tree.max_depth + 1))

  def run(self, num_rows, num_calls):
    """Tokens per second of a load of so many rows, and of the best fixed tree in calls of the same rows."""
    tokens, seconds = 0, 0.0
    for _ in range(num_calls):
      size, tree = self.budget.choose(num_rows)
      rate = self.rate_of(tree)
      is_kept = self.rng.random((num_rows, self.budget.trees[-1].max_depth)) < rate
      kept = np.cumprod(is_kept[:, : tree.max_depth], axis=1).sum(axis=0)
      took = self.seconds_fn(size, tree)
      self.budget.note(took * self.rng.lognormal(0, 0.03), 1, num_rows, kept)
      tokens, seconds = tokens + num_rows * self.tokens(tree), seconds + took
    size = next(size for size in self.budget.sizes if size >= num_rows)
    best = max(num_rows * self.tokens(tree) / self.seconds_fn(size, tree) for tree in self.budget.trees)
    return tokens / seconds, best


def _bound(tables, batch_size, tree=_TREE, **options):
  budget = Budget(**options)
  method = {'method': 'race_traversal', 'tree': tree, 'max_new_tokens': 4, 'cache_size': 8}
  budget.bind(Decoder.make(*tables, **method), batch_size)
  return budget


def _of_a_cpu(size, tree):
  """Nearly linear in tokens behind the weights, and a draft that costs a tenth."""
  return 5 + size * (1 + tree.num_nodes) + 0.1 * tree.max_depth * (5 + size)


@pytest.mark.parametrize('rate', [0.2, 0.6, 0.9])
def test_it_is_nearly_as_fast_as_the_best_tree_for_every_load(tables, rate):
  """After the first thousand calls, which measure."""
  load = _Load(_bound(tables, 16, TokenTree.chains(2, 4), is_resized=True), rate, _of_a_cpu)
  assert load.budget.sizes == [1, 4, 16]
  load.run(16, 500), load.run(4, 500), load.run(1, 500)
  for num_rows in (1, 16, 4, 1, 16):
    found, best = load.run(num_rows, 1500)
    assert found > 0.98 * best, (num_rows, load.budget.rounds)


def test_it_follows_what_is_kept(tables):
  """Guesses that are kept no longer are given up, and tried again when they may be worth it."""
  load = _Load(_bound(tables, 1, TokenTree.chains(1, 4)), 0.9, _of_a_cpu)
  load.run(1, 1000)
  assert load.budget.tree == TokenTree.chains(1, 4)
  load.rate = 0.05
  load.run(1, 6000)
  assert load.budget.is_paused
  load.rate = 0.95
  for _ in range(400):
    load.budget.note(6.0, 1, 1000, np.zeros(4, int))  # as many rounds without a guess
  found, best = load.run(1, 500)
  assert found > 0.9 * best


def test_all_calls_that_measure_count(tables):
  """Not the last ones most, in which the machine was busy."""
  budget = _bound(tables, 4, TokenTree.chains(1, 1))
  budget.forced = 4, 1
  budget.choose(4)
  for seconds in [9.0, *6 * [2.0], *20 * [1.0], *6 * [2.0]]:  # the first one compiles
    budget.note(seconds, 1, 4, np.zeros(1, int))
  assert budget.seconds == {(4, 1): 1.0}


def test_trees_that_were_not_tried_keep_what_others_do(tables):
  """At each depth; of two drafts at most one fails where both would."""
  kept = np.array([8000, 5600, 4480, 4032])
  wide, narrow = (_bound(tables, 1, TokenTree.chains(num_drafts, 4)) for num_drafts in (2, 1))
  for budget in (wide, narrow):
    budget.note(1.0, 1, 10_000, kept)
  assert wide.tokens(TokenTree.chains(1, 4)) == pytest.approx(1 + kept.sum() / 10_000, rel=0.003)
  assert narrow.tokens(TokenTree.chains(1, 2)) == pytest.approx(1 + kept[:2].sum() / 10_000, rel=0.003)
  wide = _bound(tables, 1, TokenTree.chains(2, 4))
  wide.place = 3
  wide.note(1.0, 1, 10_000, kept)
  assert wide.tree == TokenTree.chains(1, 4)
  expected = 1 + np.cumprod(1 - (1 - np.array([0.8, 0.7, 0.8, 0.9])) ** 2).sum()
  assert wide.tokens(TokenTree.chains(2, 4)) == pytest.approx(expected, rel=0.003)


def test_what_a_draft_reads_of_prompts_counts(tables):
  """A draft that saves half a second of a new token does not pay where reading a prompt's token takes it two."""
  budget = _bound(tables, 4, TokenTree.chains(1, 4))
  load = _Load(budget, 0.9, _of_a_cpu)
  budget.forced = 4, 0
  for seconds, reads_draft in ((30.0, True), (10.0, False), (40.0, True)):  # the last with others on the machine
    budget.note_reading(seconds, 10, reads_draft=reads_draft)
  budget.forced = None
  load.run(4, 1000)
  assert not budget.is_paused
  for _ in range(1000):
    budget.note_reading(0.0, 8, reads_draft=not budget.is_paused)
    load.run(4, 1)
  assert budget.is_paused
  for _ in range(1000):  # whose prompts are known
    budget.note_reading(0.0, 0, reads_draft=not budget.is_paused)
    load.run(4, 20)
  assert not budget.is_paused


def test_trees_that_cannot_pay_are_not_tried(tables):
  budget = _bound(tables, 8, TokenTree.chains(1, 8))
  load = _Load(budget, 0.9, lambda size, tree: 1.0 + 2.0 * tree.num_nodes)
  load.run(8, 200)
  assert {guesses for _, guesses in budget.rounds} == {'0', '1x1', '1x2'}


def test_a_number_of_guesses_is_shared_by_the_rows_in_progress(tables):
  budget = _bound(tables, 16, TokenTree.chains(2, 4), guesses=16)
  found = {number: name_of(budget.choose(number)[1]) for number in (1, 2, 3, 4, 8, 16)}
  assert found == {1: '2x4', 2: '2x4', 3: '1x4', 4: '1x4', 8: '1x2', 16: '1x1'}
  assert [*budget.places(16)] == [1, 2, 3, 4]


def test_rows_are_put_away_after_some_calls_and_come_back_at_once(tables):
  budget = _bound(tables, 16, is_resized=True, guesses=100)
  assert [budget.choose(1)[0] for _ in range(9)] == [16] * 7 + [1, 1]
  assert [budget.choose(number)[0] for number in (2, 1, 5, 16, 4)] == [4, 4, 16, 16, 16]


def test_what_was_not_measured_is_not_chosen_while_it_is_closed(tables):
  budget = _bound(tables, 16, is_resized=True)
  budget.is_closed = True
  assert {budget.choose(1) for _ in range(9)} == {(16, _TREE)}
  budget.forced = 4, 1
  while not budget.is_measured(4, 1):
    budget.choose(1)
    budget.note(1.0, 1, 1, np.zeros(3, int))
  budget.forced = None
  assert {budget.choose(1) for _ in range(9)} == {(4, budget.trees[1])}
  assert budget.choose(5) == (16, _TREE)


@pytest.mark.parametrize('budget', ['fast', -1, 1.5, True])
def test_what_no_budget_is(tables, budget):
  with pytest.raises(ValueError, match="budget must be 'auto', a number of guesses from 0 on, or None"):
    next(generate_many(*tables, [Request(0, [1], jax.random.key(0))], batch_size=1, longest_prompt=1, max_new_tokens=1,
                       budget=budget))  # fmt: skip


def test_a_method_with_a_state_keeps_its_tree(tables):
  decoder = Decoder.make(*tables, method='greedy_block', tree=_ONE, max_new_tokens=4, cache_size=8)
  budget = Budget()
  budget.bind(decoder, 4)
  assert budget.trees == [_ONE]
  with pytest.raises(ValueError, match='greedy_block keeps a state of its tree'):
    Budget(3).bind(decoder, 4)


def test_many_prompts_are_continued_by_a_budget(target, draft):
  """Whatever it measures here: the greedy text is the same, and every round is counted."""
  requests = _requests([1, 9, 4, 13, 2])
  sizes = {'batch_size': 2, 'longest_prompt': 13, 'max_new_tokens': _NEW, 'tree': _TREE, 'rounds_at_a_time': 2}
  plain = {each.name: each.tokens.tolist() for each in generate_many(target, None, requests, **sizes | {'tree': None})}
  budget = Budget()
  found = [*generate_many(target, draft, requests, **sizes, budget=budget)]
  assert {each.name: each.tokens.tolist() for each in found} == plain
  assert 0 < max(each.num_target_calls for each in found) <= sum(budget.rounds.values())


@pytest.mark.parametrize('name', slow_but(['model'], ['model', 'head']))
def test_nothing_is_compiled_after_preparing(target, draft, name):
  """Whatever number of rows is in progress, and whatever they draft."""
  rows = _make(
    target, _DRAFTERS[name](draft), batch_size=4, budget=Budget(is_resized=True), tree=TokenTree.chains(1, 1)
  )
  calls = [*rows.measure()]
  assert (calls[0].num_rows, calls[0].guesses) == (4, '1x1')
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: compiled.append(name) if name.startswith('/jax/core/compile/backend') else None
  )
  jax.jit(lambda x: x * 1.2345)(1.0)
  assert compiled.pop()  # programs are noted
  assert len(rows.budget.seconds) == 2 * 2
  assert rows.budget.reading.keys() == {True, False}
  plan = [(0, 0), (1, 1), (1, 0), (0, 1), (0, 0), (1, 1), (0, 1), (1, 0)]
  for turn, (size, place) in enumerate(plan):
    rows.budget.forced = rows.budget.sizes[size], place
    if turn in (0, 1, 6):
      rows.put(_requests([3 + turn])[:1])
    for _ in range(3):
      done = [piece.row for piece in rows.step() if piece.is_done]
      rows.end(done)
  assert not compiled
