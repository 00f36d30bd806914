"""`generate_text`: texts in, texts out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from spectr_jax.auto import measure_speeds
from spectr_jax.constraint import Constraint, numbered
from spectr_jax.draft import Drafter
from spectr_jax.engine.generate import Continuation, generate_many
from spectr_jax.engine.request import Request
from spectr_jax.engine.stop import Decodes, StopStrings
from spectr_jax.methods import Method
from spectr_jax.model import Model
from spectr_jax.sampling import SamplingParams
from spectr_jax.tree import TokenTree

_AUTO = 'auto'
_FEWEST_PROMPTS = 8  # that `auto` decodes
_SHORTEST = 16  # tokens that prompts are padded to, and to its doublings


class TextTokenizer(Decodes, Protocol):
  """A tokenizer that encodes texts to continue, and names the ids that end one."""

  @property
  def eos_ids(self) -> tuple[int, ...]: ...

  def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]: ...


@dataclasses.dataclass(frozen=True)
class TextContinuation(Continuation):
  """The continuation of a text, which is its `name`.

  Attributes:
    text: The new text, without the stop text or the id that ended it.
  """

  text: str = ''


def generate_text(
  target: Model,
  draft: Model | Drafter | None,
  tokenizer: TextTokenizer,
  texts: str | Sequence[str],
  *,
  max_new_tokens: int,
  method: str | Method | None = None,
  tree: TokenTree | None = None,
  sampling: SamplingParams | None = None,
  constraint: Constraint | Sequence[Constraint | None] | None = None,
  seed: int = 0,
  stop: Sequence[str] = (),
  batch_size: int = 8,
  **options: Any,
) -> list[TextContinuation]:
  """Continues texts with the target's distribution, guessing ahead with a draft.

  Text i has the key `fold_in(jax.random.key(seed), i)`: its continuation is what `generate` gives for its ids, and does
  not depend on the other texts, up to rounding. Prompts are padded to few lengths, so that texts of other lengths
  rarely compile anything anew.

  Args:
    target, draft: As for `generate`.
    tokenizer: The target's tokenizer, as `load_model` gives it.
    texts: Texts to continue, or one text. `tokenizer.encode_chat` and `generate_many` are for conversations.
    max_new_tokens: Limit of new tokens per text.
    method: As for `generate`; or `auto` for the method and the tree that are fastest here on the first texts, which
      takes a minute or more: to keep what it finds, call `auto.measure_speeds`.
    tree: As for `generate`.
    sampling: Of scalars, for all texts, as for `generate`.
    constraint: What continuations must follow, one for all texts or one for each, as for `generate`.
    seed: From 0 to 2**32 - 1.
    stop: Texts that end a continuation, and are no part of it.
    batch_size: The most texts that are decoded together.
    **options: `sharding` and `logprobs` of `generate`.

  Returns:
    One continuation for each text, in their order.

  Raises:
    ValueError: A text is empty for a tokenizer that puts nothing in front, or is not valid Unicode; or as for
      `generate`.
    NotFiniteError: A model's logits are not finite.
  """
  texts = [texts] if isinstance(texts, str) else list(texts)
  if wrong := [text for text in texts if not isinstance(text, str)]:
    raise ValueError(f'texts must be strings, got {wrong[0]!r}; generate takes ids')
  prompts = tokenizer.encode_prompts(texts)
  if not texts:
    return []
  if empty := [text for text, prompt in zip(texts, prompts) if not prompt]:
    raise ValueError(f'a text has at least one token, and {empty[0]!r} has none')
  key = jax.random.key(seed, impl='threefry2x32')
  longest = max(_SHORTEST, 1 << (max(map(len, prompts)) - 1).bit_length())
  constraints, numbers = numbered(constraint, len(prompts))
  own = [None if numbers is None or numbers[i] < 0 else constraints[numbers[i]] for i in range(len(prompts))]
  if method == _AUTO:
    if tree is not None:
      raise ValueError('auto chooses the tree: give it none')
    first = prompts[: max(_FEWEST_PROMPTS, 2 * batch_size)]
    best = measure_speeds(
      target,
      draft,
      np.array([[*prompt, *[0] * (longest - len(prompt))] for prompt in first]),
      np.array([len(prompt) for prompt in first]),
      max_new_tokens=max_new_tokens,
      batch_size=batch_size,
      sampling=sampling,
      constraint=own[: len(first)] if constraints else None,
      eos_id=tokenizer.eos_ids,
      seed=seed,
      sharding=options.get('sharding'),
    )[0].setting
    method, tree, draft = best.method, best.tree, best.drafter(draft)
  requests = [Request(i, prompt, jax.random.fold_in(key, i), constraint=own[i]) for i, prompt in enumerate(prompts)]
  end = StopStrings(tokenizer, stop) if stop else None
  generated = generate_many(
    target,
    draft,
    requests,
    batch_size=batch_size,
    longest_prompt=longest,
    max_new_tokens=max_new_tokens,
    method=method,
    tree=tree,
    stop=end,
    sampling=sampling,
    eos_id=tokenizer.eos_ids,
    **options,
  )
  by_place = {each.name: each for each in generated}
  decode = tokenizer.decode if end is None else end.text_of
  continuations = []
  for i, text in enumerate(texts):
    fields: dict[str, Any] = vars(by_place[i]) | {'name': text}
    continuations.append(TextContinuation(**fields, text=decode(by_place[i].tokens.tolist())))
  return continuations
