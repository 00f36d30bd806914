import collections
import itertools

import jax
import numpy as np
import pytest
from etils import epath

from train.input_pipeline import PackedText, batch_at, batch_rows, encode_documents, load_packed
from train.text_sources import Files, SplitByContent, is_held_out

_ON_ONE_DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def test_documents_are_packed_between_bos_and_eos(tokenizer):
  packed = encode_documents(tokenizer, iter(['one é', 'two']))
  bos, eos = tokenizer.bos_id, tokenizer.eos_id
  assert packed.tokens.tolist() == [bos, *tokenizer.encode('one é'), eos, bos, *tokenizer.encode('two'), eos]
  assert packed.num_bytes == len('one étwo'.encode())
  assert len(encode_documents(tokenizer, iter([])).tokens) == 0


def test_many_documents_are_packed_like_few(tokenizer, documents):
  many = documents * 3  # more than one chunk
  packed = encode_documents(tokenizer, iter(many)).tokens
  one_by_one = [encode_documents(tokenizer, iter([document])).tokens for document in many]
  np.testing.assert_array_equal(packed, np.concatenate(one_by_one))


def test_rows_overlap_by_one_token():
  text = PackedText(np.arange(23, dtype=np.uint16), 0)
  assert text.num_rows(5) == 4  # the last row ends at token 20; two tokens fill no row
  assert PackedText(np.arange(21, dtype=np.uint16), 0).num_rows(5) == 4
  assert PackedText(np.arange(20, dtype=np.uint16), 0).num_rows(5) == 3
  np.testing.assert_array_equal(text.rows(np.array([0, 3]), 5), [range(6), range(15, 21)])


def _source(*paths, percent=10.0):
  return SplitByContent(Files(tuple(map(str, paths))), percent)


def test_loading_splits_by_content_and_reads_its_cache(tmp_path, corpus, documents, tokenizer):
  cache = epath.Path(tmp_path)
  train, held_out, origin = load_packed(_source(corpus), tokenizer, cache)
  wanted = [encode_documents(tokenizer, (d for d in documents if is_held_out(d, 10) == is_out)) for is_out in (0, 1)]
  for part, want in zip((train, held_out), wanted):
    np.testing.assert_array_equal(part.tokens, want.tokens)
    assert part.num_bytes == want.num_bytes
  assert isinstance(train.tokens, np.memmap)
  assert list(origin) == ['files/corpus.txt', 'held_out']
  (path,) = cache.iterdir()
  before = path.stat().mtime
  again, _, _ = load_packed(_source(corpus), tokenizer, cache)
  np.testing.assert_array_equal(again.tokens, train.tokens)
  assert path.stat().mtime == before
  load_packed(_source(corpus, percent=20.0), tokenizer, cache)
  assert len(list(cache.iterdir())) == 2


def test_a_damaged_cache_is_named(tmp_path, corpus, tokenizer):
  cache = epath.Path(tmp_path)
  load_packed(_source(corpus), tokenizer, cache)
  (path,) = cache.iterdir()
  for name in ('train.bin', 'held_out.bin', 'index.json'):
    content = (path / name).read_bytes()
    for damaged in (content[: len(content) // 2], b'', content[:20] + bytes(20) + content[40:]):
      (path / name).write_bytes(damaged)
      with pytest.raises(ValueError, match=f'{path.name} is damaged'):
        load_packed(_source(corpus), tokenizer, cache)
    (path / name).write_bytes(content)
  load_packed(_source(corpus), tokenizer, cache)


def test_an_interrupted_encoding_leaves_nothing(tmp_path, corpus, tokenizer):
  class Interrupted(SplitByContent):
    def documents(self, part):
      yield from itertools.islice(super().documents(part), 3)
      raise KeyboardInterrupt

  cache = epath.Path(tmp_path / 'cache')
  with pytest.raises(KeyboardInterrupt):
    load_packed(Interrupted(Files((str(corpus),)), 10.0), tokenizer, cache)
  assert not list(cache.iterdir())


def test_the_order_of_files_is_part_of_the_cache(tmp_path, tokenizer):
  for name in 'ab':
    (tmp_path / f'{name}.txt').write_text('\n\n'.join(f'{name} {i}' for i in range(50)))
  paths, cache = [tmp_path / f'{name}.txt' for name in 'ab'], epath.Path(tmp_path / 'cache')
  first, second = (load_packed(_source(*order, percent=1.0), tokenizer, cache)[0] for order in (paths, paths[::-1]))
  assert len(first.tokens) == len(second.tokens)
  assert (first.tokens != second.tokens).any()


def test_a_batch_is_a_function_of_seed_and_step_and_an_epoch_has_each_row_once():
  sizes = dict(num_rows=11, batch_size=4)  # epochs end within batches
  rows = np.concatenate([batch_rows(step=step, seed=0, **sizes) for step in range(11)])
  epochs = rows.reshape(4, 11)
  assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) == 4
  again = [batch_rows(step=step, seed=0, **sizes) for step in reversed(range(11))]
  np.testing.assert_array_equal(np.concatenate(again[::-1]), rows)
  other = np.concatenate([batch_rows(step=step, seed=1, **sizes) for step in range(11)])
  assert collections.Counter(other) == collections.Counter(rows)
  assert (other != rows).any()


def test_a_batch_is_cut_into_microbatches():
  text = PackedText(np.arange(1 + 5 * 11, dtype=np.uint16), 0)
  batch = batch_at(text, 1, batch_size=4, seq_len=5, seed=3, num_microbatches=2, sharding=_ON_ONE_DEVICE)
  rows = batch_rows(11, 1, batch_size=4, seed=3)
  np.testing.assert_array_equal(batch, text.rows(rows, 5).reshape(2, 2, 6))


def test_text_of_less_than_a_row_is_refused():
  text = PackedText(np.arange(5, dtype=np.uint16), 0)
  with pytest.raises(ValueError, match='training text of 5 tokens is shorter than one row of 5'):
    batch_at(text, 0, batch_size=1, seq_len=5, seed=0, num_microbatches=1, sharding=_ON_ONE_DEVICE)
  with pytest.raises(ValueError, match='held-out text of 0 tokens'):
    PackedText(np.zeros(0, np.uint16), 0).check(5, 'held-out')
