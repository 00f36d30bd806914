"""Held-out loss of a saved model on plain text: `python -m train.evaluate --model=DIR --files=A.txt,B.bz2`."""

from absl import flags
from etils import epath

from common import command_line
from spectr_jax.io.model_files import load_transformer
from spectr_jax.models.transformer import config_of
from train.held_out import evaluate
from train.input_pipeline import encode_documents
from train.step import Learner
from train.text_sources import Files


def evaluate_files(
  model_path: epath.PathLike,
  patterns: tuple[str, ...],
  *,
  seq_len: int | None = None,
  batch_size: int = 4,
  dtype: str | None = None,
) -> dict[str, float]:
  """Evaluates a saved model on text prepared as in training: documents end at blank lines and are packed.

  Args:
    model_path: A directory that `spectr_jax.save_model` wrote.
    patterns: Paths or globs of `.txt`, `.gz` or `.bz2` files.
    seq_len: Tokens in a row; None for the length that the model was trained at. Tokens at the end that do not fill a
      row do not count.
    batch_size: Rows in a batch. It affects only speed.
    dtype: Type to compute in; None for the model's own.

  Returns:
    `loss` in nats per token, `perplexity` per token, `bits_per_byte`, and `tokens` and `bytes` of the text.

  Raises:
    ValueError: The model or a file cannot be read, or the text is shorter than one row.
  """
  if not patterns:
    raise ValueError('no files to evaluate on')
  text = Files(patterns)
  text.paths  # noqa: B018 - refuses missing files before the model is loaded
  model, tokenizer = load_transformer(model_path, dtype=dtype)
  config = config_of(model)
  packed = encode_documents(tokenizer, text.documents())
  seq_len = seq_len or config.max_length
  found = evaluate(model.params, packed, Learner(config, tokenizer.bos_id), seq_len=seq_len, batch_size=batch_size)
  return {**found, 'tokens': len(packed.tokens), 'bytes': packed.num_bytes}


def main(argv):
  del argv
  patterns = tuple(filter(None, _FILES.value))
  found = evaluate_files(
    _MODEL.value, patterns, seq_len=_SEQ_LEN.value, batch_size=_BATCH_SIZE.value, dtype=_DTYPE.value
  )
  print(
    f'{", ".join(patterns)}: perplexity {found["perplexity"]:.3f}, bits per byte {found["bits_per_byte"]:.4f},'
    f' loss {found["loss"]:.4f} nats per token; {found["tokens"]:,} tokens, {found["bytes"]:,} bytes'
  )


if __name__ == '__main__':
  _MODEL = flags.DEFINE_string('model', None, 'Directory of a saved model, such as WORKDIR/model.', required=True)
  _FILES = flags.DEFINE_list('files', None, 'Paths or globs of .txt, .gz or .bz2 files.', required=True)
  _SEQ_LEN = flags.DEFINE_integer('seq_len', None, 'Tokens in a row; default: as in training.', lower_bound=2)
  _BATCH_SIZE = flags.DEFINE_integer('batch_size', 4, 'Rows in a batch.', lower_bound=1)
  _DTYPE = flags.DEFINE_enum('dtype', None, ['float32', 'bfloat16'], "Type to compute in; default: the model's own.")
  command_line.run(main)
