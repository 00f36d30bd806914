"""Sizes of the tiny pair that is served, and the thread that decodes with it."""

from decode.serving.worker import Worker
from spectr_jax import Decoder, TokenTree

NEW, LONGEST, ROWS, DEPTH = 12, 60, 3, 2
EOS = 41


def make_worker(models, tokenizer, *, most_waiting=64, batch_size=ROWS, most_new=NEW, longest=LONGEST):
  """A worker whose caches hold the longest prompt and its continuation; the two may be longer one by one."""
  decoder = Decoder.make(
    *models, method='race_traversal', tree=TokenTree.chains(2, DEPTH), max_new_tokens=most_new,
    cache_size=LONGEST + NEW, eos_id=tokenizer.eos_ids, logprobs=True,
  )  # fmt: skip
  return Worker(
    decoder, tokenizer, batch_size=batch_size, longest_prompt=longest, most_waiting=most_waiting, rounds_at_a_time=1
  )
