"""Options of what is decoded: the records of sampling, and of prompts and output, which check their own fields."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Any

import spectr_jax
from decode.experiment.model_options import PRETRAINED
from decode.experiment.option_fields import AT_LEAST_0, AT_LEAST_1, Rule, check_fields, option
from decode.experiment.prompt_sets import PROMPT_SETS
from decode.experiment.prompts import Prompt, as_conversations, read_prompts
from spectr_jax import Constraint, SamplingParams, StopStrings
from spectr_jax.engine.stop import check_stop_texts
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.io.untrusted import parse_json, read_text, shown
from spectr_jax.kernels.filters import FILTERS_BY_NAME
from spectr_jax.sampling import SAMPLING_NAMES
from spectr_jax.unicode import check_unicode

# Of which one may be given.
CONSTRAINTS = 'regex', 'json_schema', 'choice'
SHIPPED_PROMPTS = PRETRAINED / 'prompts.jsonl'
_TOP_K: Rule = 'at least 0 (0 keeps all) and below 2**31', lambda x: 0 <= x < 2**31
_TOP_P: Rule = 'above 0 and at most 1', lambda x: 0 < x <= 1
_MIN_P: Rule = 'from 0 to 1 (0 keeps all)', lambda x: 0 <= x <= 1
_PENALTY: Rule = 'from -1e6 to 1e6', lambda x: abs(x) <= 1e6
_REPETITION: Rule = 'from 1e-6 to 1e6 (1 changes nothing)', lambda x: 1e-6 <= x <= 1e6
_TOKENS: Rule = 'at least 0 and below 2**31', lambda x: 0 <= x < 2**31


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
  """Sampling of tokens, and the number of samples. The seeds are `seed` to `seed + num_seeds - 1`."""

  temperature: float = option('Sampling', 'Sampling temperature; 0 decodes greedily.', 1.0, rule=AT_LEAST_0)
  top_k: int = option('Sampling', 'Sample from the k likeliest tokens; 0 for all.', 0, rule=_TOP_K)
  top_p: float = option('Sampling', 'Sample from the likeliest tokens of this mass.', 1.0, rule=_TOP_P)
  min_p: float = option(
    'Sampling', 'Sample from tokens at least this many times as likely as the likeliest; 0 for all.', 0.0, rule=_MIN_P
  )
  presence_penalty: float = option(
    'Sampling', 'Subtracted from the logits of tokens that the continuation has.', 0.0, rule=_PENALTY
  )
  frequency_penalty: float = option(
    'Sampling', 'Subtracted as often as the continuation has the token.', 0.0, rule=_PENALTY
  )
  repetition_penalty: float = option(
    'Sampling', 'Divides logits above 0, and multiplies others, of tokens in the text so far.', 1.0, rule=_REPETITION
  )
  logit_bias: tuple[str, ...] = option(
    'Sampling', 'ID:NUMBER, which is added to the logit of this id; repeat for several.', (), is_repeated=True
  )
  min_tokens: int = option('Sampling', 'New tokens before an id that ends a text may come.', 0, rule=_TOKENS)
  ignore_eos: bool = option('Sampling', 'Go on behind ids that end a text.', False)
  bad_words: tuple[str, ...] = option('Sampling', 'Text that never comes; repeat for several.', (), is_repeated=True)
  constraint_after: str | None = option('Sampling', 'Text behind which the next three begin, as </think>.', None)
  regex: str | None = option('Sampling', 'Regular expression that continuations match.', None)
  json_schema: str | None = option('Sampling', 'File of a JSON schema that continuations follow.', None)
  choice: tuple[str, ...] = option(
    'Sampling', 'Text that continuations may be; repeat for several.', (), is_repeated=True
  )
  num_samples: int = option('Sampling', 'Continuations of each prompt with each seed.', 1, rule=AT_LEAST_1)
  num_seeds: int = option('Sampling', 'Runs of every setting, each with its own seed.', 1, rule=AT_LEAST_1)
  seed: int = option('Sampling', 'The first seed.', 0)

  def __post_init__(self):
    check_fields(self)
    if self.seed < 0 or self.seed + self.num_seeds > 2**32:
      raise ValueError(f'seeds must be from 0 to 2**32 - 1, got {self.num_seeds} from {self.seed} on')
    given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, ())]
    if len(given) > 1:
      raise ValueError(f'{given[0]} and {given[1]} are both given; choose one')
    if self.ignore_eos and (given or self.bad_words):
      other = (*given, 'bad_words')[0]
      raise ValueError(f'ignore_eos and {other} are both given: a constraint ends where it is complete')
    list(map(_read_bias, self.logit_bias))

  @property
  def seeds(self) -> range:
    return range(self.seed, self.seed + self.num_seeds)

  @property
  def params(self) -> SamplingParams:
    """What `logits_to_probs` makes all distributions with, of drafts and in `engine.loop.judge`."""
    values = {name: getattr(self, name) for name in SAMPLING_NAMES}
    return SamplingParams(**values | {'logit_bias': dict(map(_read_bias, self.logit_bias))})

  @property
  def penalties(self) -> dict[str, Any]:
    """What is asked for beside temperature and filters, as JSON values."""
    names = [name for name in SAMPLING_NAMES if name != 'temperature' and name not in FILTERS_BY_NAME]
    defaults = {field.name: field.default for field in dataclasses.fields(self)}
    given = {name: getattr(self, name) for name in names if getattr(self, name) != defaults[name]}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}

  def read_constraint(self) -> dict[str, Any]:
    """What continuations must follow, as keyword arguments of `compile_constraint`; empty for nothing.

    Raises:
      ValueError: The file of the schema is unusable.
    """
    given: dict[str, Any] = {'bad_words': list(self.bad_words)} if self.bad_words else {}
    if self.constraint_after is not None:
      given['after'] = self.constraint_after
    if self.json_schema is not None:
      schema = parse_json(read_text(self.json_schema), self.json_schema)
      if not isinstance(schema, dict | bool):
        raise ValueError(f'the JSON schema {self.json_schema} must be an object or a boolean, got {shown(schema)}')
      return {**given, 'json_schema': schema}
    if self.regex is not None:
      return {**given, 'regex': self.regex}
    return {**given, 'choices': self.choice} if self.choice else given

  def make_constraint(self, tokenizer: TokenizerBase, vocab_size: int) -> Constraint | None:
    """What continuations must follow, or None.

    Args:
      tokenizer: The target's tokenizer.
      vocab_size: V, the target's.

    Raises:
      ValueError: It cannot be compiled; the message says why.
      ConstraintBusyError: Compiling took too much time or memory.
    """
    given = self.read_constraint()
    if not given:
      return None
    made = spectr_jax.compile_constraint(tokenizer, vocab_size=vocab_size, **given)
    if made.narrower:
      print(f'--json_schema is followed more narrowly: {"; ".join(made.narrower)}', file=sys.stderr)
    return made


def _read_bias(entry: str) -> tuple[int, float]:
  """The id and the number of an entry of `logit_bias`."""
  found = re.fullmatch(r'(\d{1,10}):([-+]?(?:\d+\.?\d*|\.\d+))', entry.strip(), re.ASCII)
  if found is None:
    raise ValueError(f'logit_bias must be ID:NUMBER, such as 17:-2.5, got {shown(entry)}')
  return int(found[1]), float(found[2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptOptions:
  """Texts to continue, and what is measured and written of continuations. See `read_prompts` about `prompts`."""

  stop: tuple[str, ...] = option(
    'Prompts',
    'Text or special token that ends a continuation, and is no part of it; repeat for several.',
    (),
    is_repeated=True,
  )
  logprobs: bool = option(
    'Measurements and output', "Write the target's log probability of every token to --generations.", False
  )
  prompt: str | None = option('Prompts', 'One text to continue.', None)
  prompts: str | None = option(
    'Prompts',
    'File of texts to continue: .jsonl with a "prompt" field, else a text per line; .json, .tsv and .gz are read too.'
    f' SET:FILE reads a published set: {", ".join(PROMPT_SETS)}. Default: the shipped prompts.',
    None,
  )
  num_prompts: int = option('Prompts', 'Prompts to take from the beginning of the file, at most.', 32, rule=AT_LEAST_1)
  chat: bool = option(
    'Prompts',
    "Let the model answer: render prompts as turns of the user, and conversations, by the model's chat template.",
    False,
  )
  system: str | None = option('Prompts', 'System message of conversations without one.', None)
  skip_long: bool = option('Prompts', 'Leave out prompts that are too long; else refused.', False)
  batch_size: int = option('Prompts', 'Prompts decoded together, at most.', 1, rule=AT_LEAST_1)
  max_new_tokens: int = option('Prompts', 'New tokens per prompt, at most.', 64, rule=AT_LEAST_1)
  share_of_optimum: bool = option(
    'Measurements and output',
    'Compare acceptance with the most that token-level verification of the same candidates could reach; takes time.',
    False,
  )
  breakdown: bool = option(
    'Measurements and output', 'Time the parts of a round: draft, target, verification, and the rest.', False
  )
  profile_dir: str | None = option(
    'Measurements and output',
    "Directory for what JAX's profiler records of some rounds of every setting; for TensorBoard or Perfetto.",
    None,
  )

  def __post_init__(self):
    check_fields(self)
    check_stop_texts(self.stop)
    for name in ('prompt', 'system'):
      if (text := getattr(self, name)) is not None:
        check_unicode(text, name)
    if self.stop and self.share_of_optimum:
      raise ValueError('share_of_optimum counts whole rounds, and stop may end a row within one; choose one')
    if self.prompt is not None and self.prompts is not None:
      raise ValueError('prompt and prompts are both given; choose one: a text, or a file of texts')
    if self.system is not None and not self.chat:
      raise ValueError('system is for --chat, which renders conversations')

  def make_stop(self, tokenizer: TokenizerBase) -> StopStrings | None:
    return StopStrings(tokenizer, self.stop) if self.stop else None

  def read(self) -> list[Prompt]:
    """All prompts of the file, or the one text; conversations with `chat`, refused without it."""
    path = SHIPPED_PROMPTS if self.prompts is None else self.prompts
    prompts = read_prompts(path) if self.prompt is None else [Prompt(self.prompt)]
    if self.chat:
      return as_conversations(prompts, self.system)
    if conversation := next((prompt for prompt in prompts if prompt.messages), None):
      raise ValueError(f"{conversation.origin}: a conversation, which --chat renders by the model's template")
    return prompts
