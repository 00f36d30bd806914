"""What rows hold is not read again: it changes the work, and nothing else."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spectr_jax
from spectr_jax import Constraint, Decoder, Request, SamplingParams, Session, TokenTree, lookup_beside, lookup_drafter
from spectr_jax.engine import loop, reading
from spectr_jax.engine.rows import Rows
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.sharding import make_mesh
from tests.draft.feature_drafter import FeatureDrafter
from tests.draft.tiny_heads import tiny_head, tiny_medusa, tiny_one_pass
from tests.slow import slow

_NEW, _SIZE, _VOCAB = 6, 60, 17
_OPTIONS = {'method': 'race_traversal', 'tree': TokenTree.chains(2, 3), 'max_new_tokens': _NEW, 'eos_id': 2}
pytestmark = pytest.mark.usefixtures('highest')


def _rows(models, batch_size=3, **options):
  return Rows(Decoder.make(*models, cache_size=_SIZE, **_OPTIONS | options), batch_size=batch_size)


def _finish(rows, num_rounds=1):
  """The continuations of all requests, by name: tokens, origins and log probabilities."""
  found = {}
  while rows.owners:
    for piece in rows.step(num_rounds):
      if piece.is_done:
        result, row = rows.result, piece.row
        logprobs = None if result.logprobs is None else result.logprobs[row, : piece.end].copy()
        arrays = result.tokens[row, : piece.end].tolist(), result.origins[row, : piece.end].tolist()
        found[piece.request.name] = *arrays, int(result.num_target_calls[row]), logprobs
        rows.end([row])
  return found


def _assert_as_anew(models, requests, found, **options):
  """As one batch of new rows says it; its rows and those of `requests` are of one shape in all turns."""
  prompts = np.zeros((len(requests), _SIZE - _NEW), np.int32)
  for row, request in zip(prompts, requests, strict=True):
    row[: len(request.tokens)] = request.tokens
  keys, lengths = jnp.stack([each.key for each in requests]), [len(each.tokens) for each in requests]
  constraints = [each.constraint for each in requests]
  own = {'sampling': requests[0].sampling, 'constraint': constraints if any(constraints) else None}
  anew = spectr_jax.generate(keys, *models, prompts, lengths, **own, **_OPTIONS | options)
  for row, request in enumerate(requests):
    tokens, origins, num_calls, logprobs = found[request.name]
    length = int(anew.lengths[row])
    assert tokens == anew.tokens[row, :length].tolist(), request.name
    assert origins == anew.origins[row, :length].tolist()
    assert num_calls == anew.num_target_calls[row]
    if logprobs is not None:
      np.testing.assert_allclose(logprobs, anew.logprobs[row, :length], rtol=1e-4, atol=1e-4)


def _conversations(rng, texts, turn, **own):
  """The next prompts of conversations: what was said, and more; the last tokens of one of them are other ones."""
  requests = []
  for name, text in enumerate(texts):
    kept = text[: len(text) - 3] if turn == 2 and name == 1 else text
    new = rng.integers(3, _VOCAB, [5, 1, 11][(name + turn) % 3]).tolist()
    requests.append(Request(name, [*kept, *new], jax.random.key(10 * turn + name), **own))
  return requests


_DRAFTERS = {
  'model': lambda target, draft: draft,
  'head': lambda target, draft: tiny_head(_VOCAB, width=32),
  'one pass': lambda target, draft: tiny_one_pass(_VOCAB, width=32),
  'Medusa': lambda target, draft: tiny_medusa(_VOCAB, width=32),
  'lookup': lambda target, draft: lookup_drafter(_VOCAB),
  'beside': lambda target, draft: lookup_beside(draft, lookup_min=1),
  'features': lambda target, draft: FeatureDrafter(_VOCAB),
  'none': lambda target, draft: None,
}


@pytest.mark.parametrize(
  ('name', 'few'), [('model', 3), slow('model', 32), *(slow(name, 3) for name in [*_DRAFTERS][1:])]
)
def test_turns_read_what_is_new_and_say_the_same(monkeypatch, target, draft, name, few):
  """Three conversations in three rows, in another order each turn; a history may end otherwise than the row's text."""
  monkeypatch.setattr(reading, '_FEW', few)
  drafter = _DRAFTERS[name](target, draft)
  chains = TokenTree() if drafter is None else TokenTree.chains(1, 2 if name == 'Medusa' else 3)
  method = {'none': 'autoregressive', 'lookup': 'speculative', 'features': 'speculative'}.get(name, 'race_traversal')
  own = {'method': method, 'tree': chains}
  models, rng, texts = (target, drafter), np.random.default_rng(0), [[3], [4, 5, 6], [7] * 9]
  rows = _rows(models, **own)
  for turn in range(3):
    requests = _conversations(rng, texts, turn, sampling=SamplingParams(0.9))
    before = rows.num_read
    rows.put(requests[::-1] if turn else requests)
    # A row lacks the last token of its text, and the last one of a prompt is the root of the next tree.
    shared = [os.path.commonprefix([text, each.tokens]) for text, each in zip(texts, requests, strict=True)]
    kept = [min(len(same), len(text) - 1) if turn else 0 for same, text in zip(shared, texts, strict=True)]
    assert rows.num_read - before == sum(len(each.tokens) - 1 for each in requests) - sum(kept)
    by_name = {request.name: row for row, request in rows.owners.items()}
    assert [rows.num_kept[by_name[i]] for i in range(3)] == kept
    found = _finish(rows, 1 + turn % 2)
    _assert_as_anew(models, requests, found, **own)
    texts = [request.tokens + found[request.name][0] for request in requests]


def test_a_header_is_taken_from_a_row_in_progress(target, draft):
  """Also by several requests at once, and by more than there are rows that hold it."""
  rng, header = np.random.default_rng(1), np.random.default_rng(2).integers(3, _VOCAB, 20).tolist()
  requests = [Request(i, header + rng.integers(3, _VOCAB, 1 + i % 4).tolist(), jax.random.key(i)) for i in range(6)]
  rows = _rows((target, draft), batch_size=4, eos_id=None)
  rows.put(requests[:1])
  rows.step()
  rows.put(requests[1:3])
  assert rows.num_kept[list(rows.owners)].tolist() == [0, 20, 20]
  found = _finish(rows)
  rows.put(requests[3:])
  assert sum(rows.num_kept[list(rows.owners)] >= 20) == 3
  _assert_as_anew((target, draft), requests, found | _finish(rows), eos_id=None)


def test_a_row_without_a_request_gives_way_to_who_reads_least(target):
  """A prompt takes the row that holds its beginning, others the row that ended first."""
  rows = _rows((target, None), method='autoregressive', tree=TokenTree(), eos_id=None)
  first = [Request(i, [3 + i] * 8, jax.random.key(i)) for i in range(3)]
  rows.put(first)
  rows.step(None)
  rows.end([1, 0, 2])
  held = {request.name: row for row, request in enumerate(first)}
  rows.put([Request('new', [9, 9], jax.random.key(3)), Request('old', [4] * 8 + [1], jax.random.key(4))])
  assert {each.name: row for row, each in rows.owners.items()}['old'] == held[1]
  assert {each.name: row for row, each in rows.owners.items()}['new'] == held[0]
  with pytest.raises(ValueError, match='2 requests do not fit into 1 free rows'):
    rows.put(first[:2])


def _poisoned(target):
  """The target, with NaN for the values of token 5, which it never draws."""

  def apply(*args):
    tokens, output = args[1], target.apply_fn(*args)
    is_bad = (tokens == 5)[:, None, :, None]
    values = tuple(jnp.where(is_bad, jnp.nan, x) for x in output.cache.pending_values)
    cache = dataclasses.replace(output.cache, pending_values=values)
    return dataclasses.replace(output, logits=output.logits.at[..., 5].set(-jnp.inf), cache=cache)

  return dataclasses.replace(target, apply_fn=apply)


def test_what_was_not_finite_does_not_stay(target):
  """A row whose cache holds NaN takes another prompt, and its neighbor goes on; so does a session."""
  target = _poisoned(target)
  own = {'method': 'autoregressive', 'tree': TokenTree()}
  ill, *good = (Request(i, tokens, jax.random.key(i)) for i, tokens in enumerate(([3, 4, 5, 5, 7], [3, 4], [3, 4, 6])))
  rows = _rows((target, None), 2, **own)
  rows.put([ill, good[0]])
  (error,) = [piece.error for piece in rows.step() if piece.error is not None]
  assert rows.owners[error.row] is ill
  rows.end([error.row])
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(rows.state.held))
  rows.put(good[1:])
  _assert_as_anew((target, None), good, _finish(rows), **own)
  session = Session(rows.decoder)
  with pytest.raises(ValueError, match='not finite'):
    list(session.stream(ill.key, ill.tokens))
  new = [token for part in session.stream(good[1].key, good[1].tokens) for token in part]
  _assert_as_anew((target, None), good[1:], {2: (new, [2] * len(new), len(new), None)}, **own)


# Tokens of three classes, of which class 1 may not follow class 0.
_FREE = Constraint(np.arange(_VOCAB) % 3, np.array([[0, -1, 1], [0, 1, 1]]), np.array([True, True]))


def test_constraints_and_log_probabilities_are_the_same(target, draft):
  """Each turn has another constraint, or none."""
  models, own = (target, draft), {'logprobs': True}
  rows, rng, texts = _rows(models, 2, **own), np.random.default_rng(3), [[3], [4, 5]]
  for turn, kinds in enumerate(((None, _FREE), (_FREE, None))):
    requests = [
      dataclasses.replace(each, constraint=kind)
      for each, kind in zip(_conversations(rng, texts, turn), kinds, strict=True)
    ]
    rows.put(requests)
    assert (rows.num_kept > 0).all() or not turn
    found = _finish(rows)
    _assert_as_anew(models, requests, found, **own)
    texts = [request.tokens + found[request.name][0] for request in requests]


def test_programs_do_not_depend_on_what_is_read(monkeypatch, target, draft):
  """Two read prompts, for the target and the draft each; one takes what rows hold and one puts it back."""
  monkeypatch.setattr(reading, '_FEW', 4)
  counted = reading._read_target, reading._read_draft, reading.take_rows, reading._put_rows, loop.run_rounds

  rows, rng, texts = _rows((target, draft), eos_id=None), np.random.default_rng(0), [[3]]
  for program in counted:  # other tests run the same ones
    program.clear_cache()
  for turn, size in enumerate((1, 20, 3, 9, 1, 2)):
    prompt = [*texts[turn % len(texts)][:10], *rng.integers(3, _VOCAB, size).tolist()]
    rows.put([Request('', prompt, jax.random.key(turn), SamplingParams(0.5 * turn))])
    texts.append(prompt + _finish(rows)[''][0])
  assert [program._cache_size() for program in counted] == [2, 2, 1, 1, 1]


def test_caches_are_not_copied_where_a_row_stays(target, draft):
  """A session's row is read in place: what it held is donated."""
  rows = _rows((target, draft), 1)
  rows.put([Request('', [3, 4], jax.random.key(0))])
  held = jax.tree.leaves((rows.state.target_cache.keys, rows.state.draft_state.cache.keys))
  rows.end([0])
  rows.put([Request('', [3, 4, 5], jax.random.key(0))])
  assert all(array.is_deleted() for array in held)


def test_what_a_request_may_be_is_said(target):
  rows = _rows((target, None), method='autoregressive', tree=TokenTree())
  with pytest.raises(ValueError, match='prompt 7: its constraint must be a Constraint'):
    rows.put([Request(7, [3], jax.random.key(0), constraint=0)])
  rows = _rows((target, None), method='autoregressive', tree=TokenTree(), constraints=[_FREE])
  with pytest.raises(ValueError, match='its constraint must be the number of one'):
    rows.put([Request(7, [3], jax.random.key(0), constraint=_FREE)])
  rows.put([Request(7, [3], jax.random.key(0), constraint=0)])
  assert _FREE.accepts(_finish(rows)[7][0][:-1]) or rows.result.lengths.max() == _NEW


def test_on_a_mesh_of_one(target, draft):
  sharding = DecodeSharding(make_mesh({}, jax.devices()[:1]), is_draft_divided=True)
  rows, rng, texts = _rows((target, draft), 2, sharding=sharding), np.random.default_rng(0), [[3], [4, 5, 6]]
  for turn in range(2):
    requests = _conversations(rng, texts, turn)
    rows.put(requests)
    assert (rows.num_kept > 0).all() == (turn > 0)
    found = _finish(rows)
    _assert_as_anew((target, draft), requests, found)
    texts = [request.tokens + found[request.name][0] for request in requests]
