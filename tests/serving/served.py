"""Sizes of the tiny pair that is served, and the thread that decodes with it."""

from decode.serving.worker import Worker
from spectr_jax import Decoder, TokenTree

NEW, LONGEST, ROWS = 12, 60, 3
EOS = 41


def make_worker(models, tokenizer, *, most_waiting=64, batch_size=ROWS):
  decoder = Decoder.make(
    *models, method='race_traversal', tree=TokenTree.chains(2, 2), max_new_tokens=NEW, cache_size=LONGEST + NEW,
    eos_id=tokenizer.eos_ids, logprobs=True,
  )  # fmt: skip
  return Worker(
    decoder, tokenizer, batch_size=batch_size, longest_prompt=LONGEST, most_waiting=most_waiting, rounds_at_a_time=1
  )
