"""What determines a continuation of `decode.bulk`. It stands in every line, so that no file mixes runs."""

from __future__ import annotations

import enum
import hashlib
import json
from typing import Any

from decode.experiment import records
from decode.experiment.options import DecodeOptions
from decode.experiment.prompts import Prompt
from decode.experiment.settings import Setting
from decode.experiment.workload import Workload
from spectr_jax.io.content import hash_content


class Part(enum.Enum):
  """How an option takes part in a continuation."""

  RUN = 'of the field `run` of a line'
  SETTING = 'of the setting, which a line describes'
  FIELD = 'a field of a line'
  LINE = 'checked with every line'
  FREE = 'changes no continuation, but for rounding, or only which there are'
  REFUSED = 'not for decode.bulk'


# Every option of `DecodeOptions`.
OPTIONS = {
  'target': Part.RUN, 'draft': Part.RUN, 'lookup_max': Part.RUN, 'lookup_min': Part.RUN, 'lookup_corpus': Part.RUN,
  'dtype': Part.RUN, 'weights': Part.RUN, 'growth_threshold': Part.RUN, 'gumbel': Part.RUN, 'logprobs': Part.RUN,
  'method': Part.SETTING, 'num_drafts': Part.SETTING, 'draft_length': Part.SETTING, 'tree': Part.SETTING,
  'children': Part.SETTING, 'epsilon': Part.SETTING, 'temperature': Part.SETTING,
  'top_k': Part.FIELD, 'top_p': Part.FIELD, 'min_p': Part.FIELD, 'stop': Part.FIELD, 'max_new_tokens': Part.FIELD,
  'chat': Part.FIELD, 'system': Part.FIELD,
  'prompt': Part.LINE, 'prompts': Part.LINE,
  'num_prompts': Part.FREE, 'skip_long': Part.FREE, 'num_samples': Part.FREE, 'num_seeds': Part.FREE, 'seed': Part.FREE,
  'acceptance': Part.FREE, 'calibration': Part.FREE, 'calibration_prompts': Part.FREE, 'batch_size': Part.FREE,
  'mesh': Part.FREE, 'draft_mesh': Part.FREE,
  'share_of_optimum': Part.REFUSED, 'breakdown': Part.REFUSED, 'profile_dir': Part.REFUSED,
}  # fmt: skip


def options_of(part: Part) -> list[str]:
  """The options that take part in one way."""
  return [name for name, its_part in OPTIONS.items() if its_part is part]


def describe_run(work: Workload, setting: Setting) -> dict[str, Any]:
  """The values that all lines of a run share, as JSON values: those of the files that are read by their content.

  Args:
    work: Models and prompts.
    setting: The setting.

  Raises:
    ValueError: A file cannot be read.
  """
  options, models = work.options, work.info['models']
  has_lookup = options.has_lookup and options.needs_draft
  run = {
    'target': hash_content(options.target),
    'target_dtype': models['target']['dtype'],
    'draft': hash_content(options.draft_model) if 'draft' in models else None,
    'draft_dtype': models['draft']['dtype'] if 'draft' in models else None,
    'weights': options.weights,
    'lookup_max': options.lookup_max if has_lookup else None,
    'lookup_min': options.lookup_min if has_lookup else None,
    'lookup_corpus': _hash([*models['corpus']['sha256'].values()]) if 'corpus' in models else None,
    'growth_threshold': 0.0 if setting.growth is None else setting.growth.threshold,
    'gumbel': options.gumbel,
    'logprobs': options.logprobs,
  }
  fields = {name: getattr(options, name) for name in options_of(Part.FIELD)}
  return {'run': run} | records.describe_setting(options, setting) | fields | {'stop': list(options.stop)}


def describe_prompt(prompt: Prompt) -> dict[str, Any]:
  """What a line says about its prompt, as JSON values. Texts do not say which messages a conversation has."""
  found = {'id': prompt.id, 'prompt': prompt.text}
  return found | ({'messages': _hash([dict(message) for message in prompt.messages])} if prompt.messages else {})


def _hash(content: Any) -> str:
  """The first 16 hexadecimal digits of a SHA-256 of a JSON value."""
  return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def check_measures_nothing(options: DecodeOptions) -> None:
  """Refuses options that are for a comparison.

  Raises:
    ValueError: There is one.
  """
  for name in options_of(Part.REFUSED):
    if getattr(options, name):
      raise ValueError(f'{name} is for decode.main, which compares settings; decode.bulk measures nothing')
