"""Evaluation of a model on held-out text."""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spectr_jax.sharding import DATA
from train.input_pipeline import PackedText
from train.step import Learner, Teacher, overlaps, token_losses


@functools.partial(jax.jit, static_argnames=('measure', 'learner'))
def _sums(params, rows, teacher, *, measure, learner):
  values, weights = measure(params, rows, learner, teacher)
  return values.sum(), weights.sum()


def evaluate(
  params,
  text: PackedText,
  learner: Learner,
  *,
  seq_len: int,
  batch_size: int,
  max_batches: int | None = None,
  teacher: Teacher | None = None,
) -> dict[str, float]:
  """The loss of a model on `text`, in rows of `seq_len` tokens.

  If `max_batches` does not cover the text, evenly spaced rows are evaluated.

  Args:
    params: Parameters of the transformer, on the mesh if there is one.
    text: The text.
    learner: The transformer, with the mesh that batches are sharded over if there is one.
    seq_len: Tokens in a row.
    batch_size: Rows in a batch.
    max_batches: The largest number of batches; None for the whole text.
    teacher: A model to compare with.

  Returns:
    `loss` in nats per token, `perplexity` per token, `bits_per_byte` of the UTF-8 text; with a teacher also `overlap`,
    the mean of 1 - TV between the two models' distributions.

  Raises:
    ValueError: The text is shorter than one row.
  """
  text.check(seq_len, 'held-out')
  num_rows = text.num_rows(seq_len)
  wanted = num_rows if max_batches is None else min(num_rows, max_batches * batch_size)
  chosen = np.linspace(0, num_rows - 1, wanted).astype(np.int64)
  measures = {'loss': (token_losses, None)} | ({} if teacher is None else {'overlap': (overlaps, teacher)})
  totals = {name: np.zeros(2) for name in measures}
  for start in range(0, wanted, batch_size):
    rows = text.rows(chosen[start : start + batch_size], seq_len)
    absent = batch_size - len(rows)
    # The last batch is padded with bos, since bos targets have weight 0.
    rows = np.pad(rows, ((0, absent), (0, 0)), constant_values=learner.bos_id)
    if learner.mesh is not None:
      place = NamedSharding(learner.mesh, PartitionSpec(DATA))
      rows = jax.make_array_from_callback(rows.shape, place, rows.__getitem__)
    for name, (measure, other) in measures.items():
      sums = _sums(params, rows, other, measure=measure, learner=learner)
      totals[name] += [float(x) for x in sums]
  means = {name: float(total / count) for name, (total, count) in totals.items()}
  bytes_per_token = text.num_bytes / np.count_nonzero(text.tokens != learner.bos_id)
  return means | {
    'perplexity': math.exp(min(means['loss'], 50.0)),
    'bits_per_byte': means['loss'] / math.log(2) / bytes_per_token,
  }
