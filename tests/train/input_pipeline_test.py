import collections
import itertools

import jax
import numpy as np
import pytest
from etils import epath

from common.text_files import Files
from train.input_pipeline import PackedText, batch_at, batch_rows, encode_documents, load_packed
from train.text_sources import SplitByContent, is_held_out

_ON_ONE_DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def test_documents_are_packed_between_bos_and_eos(tokenizer, documents):
  packed = encode_documents(tokenizer, iter(['one é', 'two']))
  bos, eos = tokenizer.bos_id, tokenizer.eos_id
  assert packed.tokens.tolist() == [bos, *tokenizer.encode('one é'), eos, bos, *tokenizer.encode('two'), eos]
  assert packed.num_bytes == len('one étwo'.encode())
  assert len(encode_documents(tokenizer, iter([])).tokens) == 0
  many = documents * 3  # more than one chunk
  one_by_one = [encode_documents(tokenizer, iter([document])).tokens for document in many]
  np.testing.assert_array_equal(encode_documents(tokenizer, iter(many)).tokens, np.concatenate(one_by_one))


def test_rows_overlap_by_one_token():
  text = PackedText(np.arange(23, dtype=np.uint16), 0)
  # The last of 23 tokens that fills a row is token 20.
  assert [PackedText(text.tokens[:size], 0).num_rows(5) for size in (23, 21, 20)] == [4, 4, 3]
  np.testing.assert_array_equal(text.rows(np.array([0, 3]), 5), [range(6), range(15, 21)])


def load(source, tokenizer, cache):
  return load_packed(source, tokenizer, epath.Path(cache), source.describe())


def _source(*paths, percent=10.0):
  return SplitByContent(Files(tuple(map(str, paths))), percent)


@pytest.fixture
def cached(tmp_path, corpus, tokenizer):
  """The folder of an encoded text, and what reads it."""
  load(_source(corpus), tokenizer, tmp_path)
  (path,) = tmp_path.iterdir()
  return path, lambda: load(_source(corpus), tokenizer, tmp_path)


def test_loading_splits_by_content_and_reads_its_cache(tmp_path, corpus, documents, tokenizer, cached):
  path, read = cached
  before = path.stat().st_mtime_ns
  train, held_out = read()
  wanted = [encode_documents(tokenizer, (d for d in documents if is_held_out(d, 10) == is_out)) for is_out in (0, 1)]
  for part, want in zip((train, held_out), wanted):
    np.testing.assert_array_equal(part.tokens, want.tokens)
    assert part.num_bytes == want.num_bytes
  assert isinstance(train.tokens, np.memmap)
  assert list(_source(corpus).describe()) == ['files/corpus.txt', 'held_out']
  assert path.stat().st_mtime_ns == before
  load(_source(corpus, percent=20.0), tokenizer, tmp_path)
  assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_cache_is_named(cached):
  path, read = cached
  for name in ('train.bin', 'held_out.bin', 'index.json'):
    content = (path / name).read_bytes()
    for damaged in (content[: len(content) // 2], b'', content[:20] + bytes(20) + content[40:]):
      (path / name).write_bytes(damaged)
      with pytest.raises(ValueError, match=f'{path.name} is damaged'):
        read()
    (path / name).write_bytes(content)
  read()
  (path / 'index.json').write_text('{"train": {"dtype": "uint16"}, "held_out": {}}')
  with pytest.raises(ValueError, match=f'{path.name} is damaged .*num_tokens.*: delete it'):
    read()


def test_a_text_that_cannot_be_kept(tmp_path, corpus, tokenizer):
  (tmp_path / 'cache').write_text('mine')
  with pytest.raises(ValueError, match='cannot write .*cache/packed_.*: (Not a directory|File exists)'):
    load(_source(corpus), tokenizer, tmp_path / 'cache')


@pytest.mark.parametrize('error', [KeyboardInterrupt, ValueError('no text')])
def test_an_interrupted_encoding_leaves_nothing(tmp_path, corpus, tokenizer, error):
  class Interrupted(SplitByContent):
    def documents(self, part):
      yield from itertools.islice(super().documents(part), 3)
      raise error

  with pytest.raises((KeyboardInterrupt, ValueError), match='^(no text)?$'):
    load(Interrupted(Files((str(corpus),)), 10.0), tokenizer, tmp_path / 'cache')
  assert not list((tmp_path / 'cache').iterdir())


def test_another_process_that_is_the_first_to_encode_a_text(tmp_path, corpus, tokenizer):
  class Overtaken(SplitByContent):
    def documents(self, part):
      if not list((tmp_path / 'cache').glob('packed_*')):
        load(_source(corpus), tokenizer, tmp_path / 'cache')
      yield from super().documents(part)

  source = Overtaken(Files((str(corpus),)), 10.0)
  tokens, wanted = (load(each, tokenizer, tmp_path / 'cache')[0].tokens for each in (source, _source(corpus)))
  np.testing.assert_array_equal(tokens, wanted)
  assert len(list((tmp_path / 'cache').iterdir())) == 1


def test_the_order_of_files_is_part_of_the_cache(tmp_path, tokenizer):
  for name in 'ab':
    (tmp_path / f'{name}.txt').write_text('\n\n'.join(f'{name} {i}' for i in range(50)))
  paths = [tmp_path / f'{name}.txt' for name in 'ab']
  first, second = (
    load(_source(*order, percent=1.0), tokenizer, tmp_path / 'cache')[0] for order in (paths, paths[::-1])
  )
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
  with pytest.raises(ValueError, match='training text of 5 tokens is shorter than one row of 5'):
    PackedText(text.tokens[:5], 0).check(5, 'training')
