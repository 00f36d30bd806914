import collections
import itertools
import json
import os
import zlib

import jax
import numpy as np
import pytest
from etils import epath

from common.text_files import Files
from tests.hostile import Tally, mutated_json_text, rngs
from train.input_pipeline import PackedText, batch_at, batch_rows, encode_documents, load_packed
from train.text_sources import SplitByContent, is_held_out

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


def load(source, tokenizer, cache):
  return load_packed(source, tokenizer, cache, source.describe())


def _source(*paths, percent=10.0):
  return SplitByContent(Files(tuple(map(str, paths))), percent)


def test_loading_splits_by_content_and_reads_its_cache(tmp_path, corpus, documents, tokenizer):
  cache = epath.Path(tmp_path)
  source = _source(corpus)
  train, held_out = load(source, tokenizer, cache)
  wanted = [encode_documents(tokenizer, (d for d in documents if is_held_out(d, 10) == is_out)) for is_out in (0, 1)]
  for part, want in zip((train, held_out), wanted):
    np.testing.assert_array_equal(part.tokens, want.tokens)
    assert part.num_bytes == want.num_bytes
  assert isinstance(train.tokens, np.memmap)
  assert list(source.describe()) == ['files/corpus.txt', 'held_out']
  (path,) = cache.iterdir()
  before = path.stat().mtime
  again, _ = load(_source(corpus), tokenizer, cache)
  np.testing.assert_array_equal(again.tokens, train.tokens)
  assert path.stat().mtime == before
  load(_source(corpus, percent=20.0), tokenizer, cache)
  assert len(list(cache.iterdir())) == 2


def test_a_damaged_cache_is_named(tmp_path, corpus, tokenizer):
  cache = epath.Path(tmp_path)
  load(_source(corpus), tokenizer, cache)
  (path,) = cache.iterdir()
  for name in ('train.bin', 'held_out.bin', 'index.json'):
    content = (path / name).read_bytes()
    for damaged in (content[: len(content) // 2], b'', content[:20] + bytes(20) + content[40:]):
      (path / name).write_bytes(damaged)
      with pytest.raises(ValueError, match=f'{path.name} is damaged'):
        load(_source(corpus), tokenizer, cache)
    (path / name).write_bytes(content)
  load(_source(corpus), tokenizer, cache)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'dtype': 'O'}, "dtype. 'uint16' or 'uint32'"),
    ({'dtype': 'float64'}, "dtype. 'uint16' or 'uint32'"),
    ({'num_tokens': 10**12}, 'train.bin has [0-9]+ bytes'),
    ({'num_tokens': -1}, 'num_tokens" a whole number'),
    ({'crc32': None}, 'index.json has no train/crc32'),
    ({'num_bytes': 'many'}, 'num_bytes" a whole number'),
  ],
)
def test_a_hostile_index(tmp_path, corpus, tokenizer, changes, message):
  cache = epath.Path(tmp_path)
  load(_source(corpus), tokenizer, cache)
  (path,) = cache.iterdir()
  index = json.loads((path / 'index.json').read_text())
  index['train'] |= changes
  (path / 'index.json').write_text(json.dumps(index))
  with pytest.raises(ValueError, match=f'is damaged .*{message}.*: delete it') as info:
    load(_source(corpus), tokenizer, cache)
  assert '\n' not in str(info.value)


def test_encoded_text_with_tokens_that_do_not_exist(tmp_path, corpus, tokenizer):
  """Whoever changes the text can change its checksum as well."""
  cache = epath.Path(tmp_path)
  load(_source(corpus), tokenizer, cache)
  (path,) = cache.iterdir()
  tokens = np.fromfile(path / 'train.bin', np.uint16)
  tokens[7] = tokenizer.vocab_size
  tokens.tofile(path / 'train.bin')
  index = json.loads((path / 'index.json').read_text())
  index['train']['crc32'] = zlib.crc32(tokens)
  (path / 'index.json').write_text(json.dumps(index))
  with pytest.raises(ValueError, match='train.bin has token 300, and there are 300'):
    load(_source(corpus), tokenizer, cache)


@pytest.mark.parametrize('name', ['train.bin', 'index.json'])
def test_encoded_text_that_is_no_file(tmp_path, corpus, tokenizer, name):
  cache = epath.Path(tmp_path)
  load(_source(corpus), tokenizer, cache)
  (path,) = cache.iterdir()
  (path / name).unlink()
  os.mkfifo(path / name)
  with pytest.raises(ValueError, match=f'is damaged .*{name} is not a regular file'):
    load(_source(corpus), tokenizer, cache)


def test_a_text_that_cannot_be_kept(tmp_path, corpus, tokenizer):
  (tmp_path / 'cache').write_text('mine')
  with pytest.raises(ValueError, match='cannot write .*cache/packed_.*: (Not a directory|File exists)'):
    load(_source(corpus), tokenizer, epath.Path(tmp_path / 'cache'))


@pytest.mark.slow
def test_hostile_encoded_text(tmp_path, corpus, tokenizer):
  cache = epath.Path(tmp_path)
  load(_source(corpus), tokenizer, cache)
  (path,) = cache.iterdir()
  index, tally = json.loads((path / 'index.json').read_text()), Tally(path)
  source = _source(corpus)
  origin = source.describe()
  for rng in rngs():
    (path / 'index.json').write_bytes(mutated_json_text(index, rng))
    tally.read(lambda: load_packed(source, tokenizer, cache, origin))
  tally.check()


def test_an_interrupted_encoding_leaves_nothing(tmp_path, corpus, tokenizer):
  class Interrupted(SplitByContent):
    def documents(self, part):
      yield from itertools.islice(super().documents(part), 3)
      raise KeyboardInterrupt

  cache = epath.Path(tmp_path / 'cache')
  with pytest.raises(KeyboardInterrupt):
    load(Interrupted(Files((str(corpus),)), 10.0), tokenizer, cache)
  assert not list(cache.iterdir())


def test_the_order_of_files_is_part_of_the_cache(tmp_path, tokenizer):
  for name in 'ab':
    (tmp_path / f'{name}.txt').write_text('\n\n'.join(f'{name} {i}' for i in range(50)))
  paths, cache = [tmp_path / f'{name}.txt' for name in 'ab'], epath.Path(tmp_path / 'cache')
  first, second = (load(_source(*order, percent=1.0), tokenizer, cache)[0] for order in (paths, paths[::-1]))
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
