"""A text that grows turn by turn: what the caches hold of it is kept for the next prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import jax

from spectr_jax.engine import checks
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.request import Request
from spectr_jax.engine.rows import Rows
from spectr_jax.sampling import SamplingParams


class Session:
  """One text that prompts and continuations extend in turns, as in a chat.

  It begins empty. Few programs serve prompts of all lengths.

  Attributes:
    decoder: The decoder; its `cache_size` bounds the text, the new tokens of a turn included.
    tokens: The text so far: the last prompt, and the new tokens that were taken from `stream`.
    sampling: The sampling parameters of the next prompt; scalars, as for `generate`. It may be replaced between two.
    constraint: Which of the decoder's constraints the next continuation follows, -1 for none. It may be replaced, too.
    num_read: Tokens of the last prompt that no row held, so that the models read them.
    prompt_seconds: How long they read, and compiled for it.
  """

  def __init__(self, decoder: Decoder, *, sampling: SamplingParams | None = None, constraint: int = -1):
    self.decoder, self.sampling, self.constraint = decoder, sampling, constraint
    self.tokens: list[int] = []
    self.num_target_calls = self.num_read = 0
    self.prompt_seconds = 0.0
    self._rows: Rows | None = None

  @property
  def longest_prompt(self) -> int:
    """The most tokens of a prompt."""
    return self.decoder.cache_size - int(self.decoder.max_new_tokens)

  def stream(self, rng_key: jax.Array, prompt: Sequence[int], *, rounds_at_a_time: int = 1) -> Iterator[list[int]]:
    """Continues a prompt, and yields the new tokens as they come, at least one at a time.

    The models read only what follows the beginning that the prompt shares with the text so far. A caller that has seen
    enough may stop: the text ends with the tokens that it was given.

    Args:
      rng_key: A typed key.
      prompt: Ids, at least one: as a rule the text so far and what follows it.
      rounds_at_a_time: Rounds between two looks at the new tokens.

    Raises:
      ValueError: The prompt is empty or too long, or holds an id that is not in the vocabulary.
      NotFiniteError: A model's logits are not finite.
    """
    ids = checks.as_ids('the prompt', prompt, self.decoder.target.vocab_size, self.longest_prompt).tolist()
    start = time.perf_counter()
    rows = self._put(ids, rng_key)
    jax.block_until_ready(rows.state)
    self.prompt_seconds = time.perf_counter() - start
    while rows.owners:
      for piece in rows.step(rounds_at_a_time):
        if piece.is_done:
          rows.end([0])
        if piece.error is not None:
          raise piece.error
        self.num_target_calls = int(rows.result.num_target_calls[0])
        new = rows.result.tokens[0, piece.start : piece.end].tolist()
        self.tokens += new
        if new:
          yield new

  def compile(
    self, notify: Callable[[int, int], None] = lambda done, total: None, prompt_length: int | None = None
  ) -> None:
    """Compiles what turns run, or only a first prompt of so many tokens, and begins anew.

    `notify` is called with the programs done and their number.
    """
    longest = min(self.longest_prompt, (self.decoder.context_length or 2**31) - int(self.decoder.max_new_tokens))
    sizes = (1, max(1, longest)) if prompt_length is None else (prompt_length,)
    for number, size in enumerate(sizes):
      notify(number, len(sizes) + 1)
      rows = self._put([0] * size, jax.random.key(0, impl='threefry2x32'))
      jax.block_until_ready(rows.state)
    notify(len(sizes), len(sizes) + 1)
    rows.step(1)
    self._rows, self.tokens = None, []
    notify(len(sizes) + 1, len(sizes) + 1)

  def _put(self, prompt: list[int], rng_key: jax.Array) -> Rows:
    """The row with a prompt, of which the models have read what it did not hold."""
    if self._rows is None:
      self._rows = Rows(self.decoder, batch_size=1)
    rows = self._rows
    rows.end(list(rows.owners))  # a stream that was left
    constraint = self.constraint if self.constraint >= 0 else None
    rows.put([Request('', prompt, rng_key, self.sampling, constraint=constraint)])
    self.tokens, self.num_read = prompt, len(prompt) - int(rows.num_kept[0])
    return rows
