"""Held-out loss of a model, also of a saved one: `python -m train.evaluate --model=DIR --files=A.txt,B.bz2`."""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
from absl import flags
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from common import command_line
from common.text_files import Files
from spectr_jax.io.model_files import load_own
from spectr_jax.models.causal_lm import config_of
from spectr_jax.sharding import DATA
from train.input_pipeline import PackedText, encode_documents
from train.step import Learner, Teacher, summed_losses, summed_overlaps

_sum_of = functools.partial(jax.jit, static_argnames='learner')
_MEASURES = {'loss': _sum_of(summed_losses), 'overlap': _sum_of(summed_overlaps)}


def evaluate(
  params, text: PackedText, learner: Learner, *, seq_len: int, batch_size: int, max_batches: int | None = None,
  teacher: Teacher | None = None,
) -> dict[str, float]:  # fmt: skip
  """The loss of a model on `text`, in rows of `seq_len` tokens, of which `batch_size` are evaluated at a time.

  Of the text at most `max_batches` batches are read, of rows at equal distances. Parameters and batches are on the mesh
  of `learner` if there is one. Returns `loss` in nats per token, `perplexity` per token, `bits_per_byte` of the UTF-8
  text, and with a teacher `overlap`, the mean of 1 - TV between both distributions; a `ValueError` if the text is
  shorter than one row.
  """
  text.check(seq_len, 'held-out')
  num_rows = text.num_rows(seq_len)
  wanted = num_rows if max_batches is None else min(num_rows, max_batches * batch_size)
  chosen = np.linspace(0, num_rows - 1, wanted).astype(np.int64)
  teachers = {'loss': None} if teacher is None else {'loss': None, 'overlap': teacher}
  totals = {name: np.zeros(2) for name in teachers}
  for start in range(0, wanted, batch_size):
    rows = text.rows(chosen[start : start + batch_size], seq_len)
    absent = batch_size - len(rows)
    # The last batch is padded with bos, since bos targets have weight 0.
    rows = np.pad(rows, ((0, absent), (0, 0)), constant_values=learner.bos_id)
    if learner.mesh is not None:
      place = NamedSharding(learner.mesh, PartitionSpec(DATA))
      rows = jax.make_array_from_callback(rows.shape, place, rows.__getitem__)
    for name, other in teachers.items():
      totals[name] += [float(x) for x in _MEASURES[name](params, rows, learner=learner, teacher=other)]
  means = {name: float(total / count) for name, (total, count) in totals.items()}
  bytes_per_token = text.num_bytes / np.count_nonzero(text.tokens != learner.bos_id)
  return means | {
    'perplexity': math.exp(min(means['loss'], 50.0)),
    'bits_per_byte': means['loss'] / math.log(2) / bytes_per_token,
  }


def evaluate_files(
  model_path: epath.PathLike, patterns: tuple[str, ...], *, seq_len: int | None = None, batch_size: int = 4,
  dtype: str | None = None,
) -> dict[str, float]:  # fmt: skip
  """Evaluates a saved model on text prepared as in training: documents end at blank lines and are packed.

  By itself `seq_len` is the length that the model was trained at, and `dtype` the model's own. Tokens at the end that
  do not fill a row do not count. Returns what `evaluate` returns, with `tokens` and `bytes` of the text; a `ValueError`
  if the model or a file cannot be read, or the text is shorter than one row.
  """
  if not patterns:
    raise ValueError('no files to evaluate on')
  text = Files(patterns)
  text.paths  # noqa: B018 - refuses missing files before the model is loaded
  model, tokenizer = load_own(model_path, dtype=dtype)
  config = config_of(model)
  packed = encode_documents(tokenizer, text.documents())
  seq_len = seq_len or config.context_length
  metrics = evaluate(model.params, packed, Learner(config, tokenizer.bos_id), seq_len=seq_len, batch_size=batch_size)
  return {**metrics, 'tokens': len(packed.tokens), 'bytes': packed.num_bytes}


def main():
  patterns = tuple(filter(None, _FILES.value))
  held_out = evaluate_files(
    _MODEL.value, patterns, seq_len=_SEQ_LEN.value, batch_size=_BATCH_SIZE.value, dtype=_DTYPE.value
  )
  print(
    f'{", ".join(patterns)}: perplexity {held_out["perplexity"]:.3f}, bits per byte {held_out["bits_per_byte"]:.4f},'
    f' loss {held_out["loss"]:.4f} nats per token; {held_out["tokens"]:,} tokens, {held_out["bytes"]:,} bytes'
  )


if __name__ == '__main__':
  _MODEL = flags.DEFINE_string('model', None, 'Directory of a saved model, such as WORKDIR/model.', required=True)
  _FILES = flags.DEFINE_list('files', None, 'Paths or globs of .txt, .gz or .bz2 files.', required=True)
  _SEQ_LEN = flags.DEFINE_integer('seq_len', None, 'Tokens in a row; default: as in training.', lower_bound=2)
  _BATCH_SIZE = flags.DEFINE_integer('batch_size', 4, 'Rows in a batch.', lower_bound=1)
  _DTYPE = flags.DEFINE_enum('dtype', None, ['float32', 'bfloat16'], "Type to compute in; default: the model's own.")
  command_line.run(
    main,
    ['--model=pretrained/draft --files=held_out.txt', '--model=runs/target/model --files=A.txt,B.bz2 --batch_size=16'],
  )
