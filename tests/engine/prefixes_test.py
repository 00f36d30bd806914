"""Beginnings of texts that no row holds any more: the text is the one without them, to the bit, and less is read."""

import dataclasses
import hashlib
import os
import pathlib

import jax
import numpy as np
import pytest

from spectr_jax import (
  Constraint,
  Decoder,
  Request,
  SamplingParams,
  TokenTree,
  generate_many,
  load_model,
  lookup_drafter,
)
from spectr_jax.draft import vocabulary_drafter
from spectr_jax.engine import prefixes
from spectr_jax.engine.prefixes import BLOCK
from spectr_jax.engine.rows import Rows
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.kernels import native
from spectr_jax.models import causal_lm, transformer
from spectr_jax.models.table import table_model
from spectr_jax.sharding import make_mesh
from tests import commands
from tests.conftest import CONFIG
from tests.draft.feature_drafter import FeatureDrafter
from tests.draft.tiny_heads import tiny_head, tiny_medusa, tiny_one_pass
from tests.draft.toy_vocabularies import other_vocabulary
from tests.models.recurrent_test import _model as hybrid
from tests.models.recurrent_test import _near as near
from tests.slow import slow, slow_but

_NEW, _SIZE, _VOCAB = 5, 60, 17
_CHAINS = {'method': 'race_traversal', 'tree': TokenTree.chains(2, 3)}
_PLENTY = 2**30
pytestmark = pytest.mark.usefixtures('highest')


def _rows(models, num_bytes, batch_size=1, **options):
  own = {'max_new_tokens': _NEW, 'cache_size': _SIZE}
  return Rows(Decoder.make(*models, **own | options), batch_size=batch_size, prefix_cache_bytes=num_bytes)


def _run(rows, requests, at_once=1, fields=('tokens', 'origins')):
  """Of requests, so many at once: tokens and where they came from, by name; and how much of each prompt was kept."""
  said, kept = {}, {}
  for first in range(0, len(requests), at_once):
    rows.put(requests[first : first + at_once])
    kept |= {request.name: int(rows.num_kept[row]) for row, request in rows.owners.items()}
    while rows.owners:
      for piece in rows.step(2):
        if piece.is_done:
          values = (getattr(rows.result, name) for name in fields)
          said[piece.request.name] = [array[piece.row, : piece.end].tolist() for array in values]
          rows.end([piece.row])
  return said, kept


def _requests(prompts, **options):
  """Greedy ones and others, each with a key of its own."""
  return [
    Request(i, prompt, jax.random.key(i), SamplingParams([0.0, 0.9, 0.6][i % 3]), **options)
    for i, prompt in enumerate(prompts)
  ]


def _prompts(rng, vocab_size=_VOCAB):
  """Headers in turns. Two begin like the first one, up to the middle and to the end of a block; one is known whole."""
  one, two = rng.integers(3, vocab_size, 40).tolist(), rng.integers(3, vocab_size, 35).tolist()
  rests = [rng.integers(3, vocab_size, size).tolist() for size in (3, 11, 1, 7, 4, 9)]
  middle, end = ([*one[:at], *[3 + (token - 2) % (vocab_size - 3) for token in one[at:]]] for at in (24, BLOCK))
  prompts = one + rests[0], two + rests[1], one + rests[2], middle + rests[3], end + rests[4], one[:32], one[:33], two
  return [*prompts, end + rests[5], one + rests[4], one[BLOCK:] + rests[0]]


def _most_kept(requests, said):
  """By name, of prompts one after another: what the one row holds, and whole blocks of any earlier text."""
  texts, kept = [], {}
  for request in requests:
    shared = [len(os.path.commonprefix([text, request.tokens[:-1]])) for text in texts]
    blocks = [min(same, len(text) - 2) // BLOCK * BLOCK for same, text in zip(shared, texts, strict=True)]
    held = [min(same, len(text) - 1) for same, text in zip(shared[-1:], texts[-1:], strict=True)]
    kept[request.name] = max([0, *held]), max([0, *blocks])
    texts.append([*request.tokens, *said[request.name][0]])
  return kept


def _vocabulary_drafter():
  config = dataclasses.replace(CONFIG, vocab_size=23, num_layers=1)
  model = causal_lm.causal_lm(transformer.init_params(jax.random.key(5), config), config)
  return vocabulary_drafter(model, other_vocabulary(num_draft=23, num_target=_VOCAB, num_shared=11))


_DRAFTERS = {
  'model': lambda draft: draft,
  'head': lambda draft: tiny_head(_VOCAB, width=32),
  'head at once': lambda draft: tiny_head(_VOCAB, width=32, num_layers=2, mask_id=3),
  'one pass': lambda draft: tiny_one_pass(_VOCAB, width=32),
  'Medusa': lambda draft: tiny_medusa(_VOCAB, width=32),
  'lookup': lambda draft: lookup_drafter(_VOCAB),
  'vocabulary': lambda draft: _vocabulary_drafter(),
  'features': lambda draft: FeatureDrafter(_VOCAB),
  'none': lambda draft: None,
}


def _options(name):
  if name == 'none':
    return {'method': 'autoregressive'}
  if name in ('lookup', 'features'):
    return {'method': 'speculative', 'tree': TokenTree.chains(1, 3)}
  return _CHAINS


@pytest.mark.filterwarnings('ignore:the draft reads prompts')
@pytest.mark.parametrize('name', slow_but(['model', 'lookup'], _DRAFTERS))
def test_texts_are_the_same_and_less_is_read(target, draft, name):
  models, options = (target, _DRAFTERS[name](draft)), _options(name)
  requests = _requests(_prompts(np.random.default_rng(0)))
  wanted, none = _run(_rows(models, 0, **options), requests)
  rows = _rows(models, _PLENTY, **options)
  found, kept = _run(rows, requests)
  assert found == wanted
  assert set(none.values()) == {0}
  most = _most_kept(requests, wanted)
  assert kept == {name: max(each) for name, each in most.items()}
  assert rows.num_read == sum(len(each.tokens) - 1 for each in requests) - sum(kept.values())
  taken = [blocks for held, blocks in most.values() if blocks > held]
  assert (rows.prefixes.num_hits, rows.prefixes.num_tokens) == (len(taken), sum(taken))
  assert len(taken) > 3
  assert rows.prefixes.num_bytes == sum(entry.num_bytes for entry in rows.prefixes._entries.values()) > 0


@pytest.mark.skipif(native.form() is None, reason=f'no products in C++: {native.why_not()}')
@pytest.mark.parametrize('dtype', slow_but(['bfloat16'], ['float32', 'bfloat16']))
def test_log_probabilities_are_equal_to_the_bit(optimized, dtype):
  """With products in C++, where they are a function of the text."""
  folder = pathlib.Path(__file__).parents[2] / 'pretrained'
  models = [load_model(str(folder / name), dtype=dtype)[0].for_decoding() for name in ('target', 'draft')]
  prompts, fields = _prompts(np.random.default_rng(9), 4096), ('tokens', 'origins', 'logprobs')
  requests = _requests([*prompts[:3], *prompts[7:9]])
  without, rows = (_rows(models, num_bytes, logprobs=True, **_CHAINS) for num_bytes in (0, _PLENTY))
  assert _run(rows, requests, fields=fields)[0] == _run(without, requests, fields=fields)[0]
  assert rows.prefixes.num_hits == 3


def test_rows_are_refilled(target, draft):
  """Three rows take two requests at a time; `generate_many` takes them as rows come free."""
  requests = _requests([*_prompts(np.random.default_rng(1)), *_prompts(np.random.default_rng(1))])
  wanted, _ = _run(_rows((target, draft), 0, **_CHAINS), requests)
  rows = _rows((target, draft), _PLENTY, batch_size=3, **_CHAINS)
  found, kept = _run(rows, requests, at_once=2)
  assert found == wanted
  assert rows.prefixes.num_hits > 3
  assert sum(kept.values()) >= sum(blocks for _, blocks in _most_kept(requests, wanted).values()) - 2 * 32
  sizes = {'batch_size': 2, 'longest_prompt': 55, 'max_new_tokens': _NEW, 'prefix_cache_bytes': _PLENTY}
  many = list(generate_many(target, draft, requests, **sizes, **_CHAINS))
  assert {each.name: each.tokens.tolist() for each in many} == {name: each[0] for name, each in wanted.items()}
  assert sum(each.num_kept for each in many) >= 32 * 8


def test_what_was_used_longest_ago_goes_first(target, draft):
  """The last block of a text before its first one, and nothing is beyond the bytes."""
  prompts, models = _prompts(np.random.default_rng(2)), (target, draft)
  requests = _requests([*prompts, *prompts])
  wanted, _ = _run(_rows(models, 0, **_CHAINS), requests)
  size = _rows(models, _PLENTY, **_CHAINS).prefixes._block_bytes
  for num_blocks in (0.5, 1, 3, 4.5):
    rows = _rows(models, int(num_blocks * size), **_CHAINS)
    assert _run(rows, requests)[0] == wanted
    assert rows.prefixes.num_bytes == int(num_blocks) * size
  one, two, three = ([token] * 40 for token in (3, 4, 5))
  rows = _rows(models, 5 * size, **_CHAINS)
  _run(rows, _requests([one, two, one, three]))
  found = [rows.prefixes.find(np.array(each, np.int32)).num_tokens for each in (one, two, three)]
  assert found == [32, 16, 32]


def test_sampling_and_constraints_are_not_part_of_it(target, draft):
  """A prompt is known whatever its text had to follow, and however it was drawn."""
  odd = Constraint(np.arange(_VOCAB) % 2, np.array([[-1, 0]]), np.array([True]))
  one, two = _prompts(np.random.default_rng(3))[:2]
  requests = [
    Request(0, one, jax.random.key(0), SamplingParams(0.0), constraint=odd),
    Request(1, two, jax.random.key(1), SamplingParams(1.0, top_k=3)),
    Request(2, one, jax.random.key(2), SamplingParams(0.8, top_p=0.9)),
    Request(3, two, jax.random.key(3), constraint=odd),
  ]
  rows = _rows((target, draft), _PLENTY, **_CHAINS)
  found, kept = _run(rows, requests)
  assert found == _run(_rows((target, draft), 0, **_CHAINS), requests)[0]
  assert [kept[i] for i in range(4)] == [0, 0, 32, 32]


@pytest.mark.parametrize('kind', ['delta', slow('mamba'), slow('conv')])
@pytest.mark.parametrize('has_hybrid_draft', [True, slow(False)])
def test_hybrids_continue_where_texts_ended(kind, has_hybrid_draft):
  """Turns of conversations that take a row from each other; a prompt that goes on before an end is read from there."""
  target = hybrid(kind)
  models, rng = (target, near(target) if has_hybrid_draft else lookup_drafter(_VOCAB)), np.random.default_rng(4)
  options = _CHAINS if has_hybrid_draft else {'method': 'speculative', 'tree': TokenTree.chains(1, 3)}
  without, rows = (_rows(models, num_bytes, cache_size=128, **options) for num_bytes in (0, _PLENTY))
  texts = [rng.integers(3, _VOCAB, size).tolist() for size in (20, 3, 33)]
  for turn in range(3):
    requests = _requests(texts)
    wanted, _ = _run(without, requests)
    found, kept = _run(rows, requests)
    assert found == wanted
    # All but the new tokens and the last one before them.
    assert list(kept.values()) == [len(text) - 4 if turn else 0 for text in texts]
    texts = [[*text, *wanted[i][0], *rng.integers(3, _VOCAB, 3).tolist()] for i, text in enumerate(texts)]
  # Before its continuation the prompt itself was an end.
  first = requests[0].tokens
  for text, size in ((first, len(first) - 1), ([*first, 3, 3], len(first) - 1), (first[:-2], len(first) - 4)):
    assert rows.prefixes.find(np.array(text, np.int32)).num_tokens == size
  small = _rows(models, 2 * rows.prefixes._block_bytes + rows.prefixes._end_bytes, cache_size=128, **options)
  assert _run(small, requests)[0] == _run(without, requests)[0]
  assert 0 < small.prefixes.num_bytes <= small.prefixes._max_bytes


def test_programs_do_not_depend_on_what_is_kept(target, draft):
  """One copies out and one in, for any number of blocks."""
  rows = _rows((target, draft), _PLENTY, **_CHAINS)
  for program in (prefixes._copy_out, prefixes._copy_in):
    program.clear_cache()
  rows.compile_prefixes()
  assert _run(rows, _requests(_prompts(np.random.default_rng(5))))
  assert [program._cache_size() for program in (prefixes._copy_out, prefixes._copy_in)] == [1, 1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Counting(FeatureDrafter):
  """A drafter with a state that does not say how it may be kept: the number of tokens that it has read."""

  def init(self, batch_size, cache_size):
    return jax.numpy.zeros(batch_size, jax.numpy.int32)

  def read(self, state, context, num_kept, num_new):
    return num_kept + jax.numpy.minimum(context.lengths - num_kept, num_new)


def test_what_is_not_kept_is_said(target):
  """The draft reads from the start, or both do."""
  options, prompts = _options('features'), _prompts(np.random.default_rng(6))
  models, requests = (target, _Counting(_VOCAB)), _requests(prompts[:3])
  with pytest.warns(UserWarning, match='the draft reads prompts from their start: its state is not kept'):
    rows = _rows(models, _PLENTY, **options)
  found, kept = _run(rows, requests)
  assert found == _run(_rows(models, 0, **options), requests)[0]
  assert list(kept.values()) == [0, 0, 32]
  assert rows.state.draft_state.tolist() == [len(prompts[2])]
  with pytest.warns(UserWarning, match='prefix_cache_bytes 99 keep nothing: a block takes'):
    _rows((target, None), 99)
  with pytest.raises(ValueError, match='prefix_cache_bytes must be at least 0, got -1'):
    _rows((target, None), -1)
  table = table_model(np.zeros((_VOCAB, _VOCAB), np.float32))
  with pytest.warns(UserWarning, match='texts are not kept beyond their rows: the cache of the target does not say'):
    assert _rows((table, None), _PLENTY).prefixes is None


@pytest.mark.parametrize('goes_back', [True, False])
@pytest.mark.parametrize('most', [8, 12, 20, 100, 400])
def test_bytes_add_up_and_what_fits_is_found(monkeypatch, goes_back, most):
  """Texts that go on from the middle of earlier ones, without a model: blocks take 8 bytes, an end 4 more."""
  entry = prefixes._Entry((np.zeros(8, np.uint8),), () if goes_back else (np.zeros(4, np.uint8),))
  monkeypatch.setattr(prefixes, '_copy_out', lambda *args: [entry] * 16)
  monkeypatch.setattr(prefixes, '_sizes', lambda *args: {np.dtype(np.uint8): 8})
  monkeypatch.setattr(prefixes, '_kept', lambda *args: [] if goes_back else [(0, None, entry.end[0][None])])
  decoder = dataclasses.make_dataclass('_', ['constraints', 'drafter', 'can_truncate'])(None, None, goes_back)
  cache, rng, texts = prefixes.PrefixCache(decoder, None, most), np.random.default_rng(10), [np.zeros(0, np.int32)]
  for _ in range(200):
    before = texts[rng.integers(len(texts))][: rng.integers(200)]
    texts.append(np.append(before, rng.integers(9, size=rng.integers(2, 90))).astype(np.int32))
    cache.keep(None, 0, texts[-1], is_end=True)
    assert cache.num_bytes == sum(each.num_bytes for each in cache._entries.values()) <= most
    num_blocks, found = (len(texts[-1]) - 2) // BLOCK, cache.find(texts[-1]).num_tokens
    if goes_back:
      assert found == min(num_blocks, most // 8) * BLOCK
    elif num_blocks * 8 + 12 <= most:
      assert found == len(texts[-1]) - 1


def test_keys_depend_on_all_tokens_before():
  """Those of two texts are equal as far as the texts are."""
  rng = np.random.default_rng(7)
  text = rng.integers(0, 2**31 - 1, 5 * BLOCK + 3).astype(np.int32)
  keys = list(prefixes._keys(text))
  assert len(set(keys)) == 5
  assert keys[0] == hashlib.sha256(text[:BLOCK].astype('<i4').tobytes()).digest()
  for place in range(len(text)):
    other = text.copy()
    other[place] ^= 1
    assert [a == b for a, b in zip(keys, prefixes._keys(other))] == [end <= place // BLOCK for end in range(1, 6)]


def on_meshes():
  """Rows over two devices, and the heads of both models; run on virtual devices."""
  config = dataclasses.replace(CONFIG, vocab_size=18)  # which two devices divide
  target = causal_lm.causal_lm(transformer.init_params(jax.random.key(0), config), config)
  requests = _requests([prompt for seed in (8, 9, 8) for prompt in _prompts(np.random.default_rng(seed))])
  for sizes, has_head in (({'data': 2}, False), ({'data': 1, 'model': 2}, False), ({'data': 2}, True)):
    sharding = DecodeSharding(make_mesh(sizes, jax.devices()[:2]), is_draft_divided=not has_head)
    models = target, tiny_head(18, width=32) if has_head else target
    without, rows = (_rows(models, size, batch_size=2, sharding=sharding, **_CHAINS) for size in (0, _PLENTY))
    wanted, _ = _run(without, requests, at_once=2)
    found, _ = _run(rows, requests, at_once=2)
    assert found == wanted
    assert rows.prefixes.num_hits > 2
    print('equal')


@pytest.mark.slow
def test_on_meshes_of_two():
  path = os.pathsep.join(map(str, (commands.ROOT, commands.ROOT / 'tests')))
  ran = commands.finish(commands.start('tests.engine.prefixes_test', num_devices=8, PYTHONPATH=path))
  assert ran == 'equal\n' * 3


if __name__ == '__main__':
  on_meshes()
