"""Exports of a run for programs: results as JSON, continuations as JSONL.

What determines a continuation of `decode.bulk` stands in every line, so that no file mixes runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Any

import numpy as np

from decode import study
from decode.experiment.measurements import BESIDE, DecodeRun, Measurement
from decode.experiment.prompt_options import SamplingOptions
from decode.experiment.prompts import Prompt
from decode.experiment.settings import Setting, describe_setting
from decode.experiment.workload import Workload
from decode.study import Row
from spectr_jax import Continuation, StopStrings, finish_reason
from spectr_jax.auto import Speed
from spectr_jax.io.model_files import hash_content
from spectr_jax.io.tokenizer import TokenizerBase

_PARTS = 'round', 'draft', 'target', 'verification', 'rest'  # of `seconds_per_round`


def _rows(run: DecodeRun) -> list[Row]:
  every = (run.summarize(each.setting, (each.seed,)) for each in run.measurements)
  return [{name: value for name, value in row.items() if name not in BESIDE} for row in every]


def _speed(speed: Speed) -> dict:
  setting = speed.setting
  return {
    'method': setting.method.name,
    'num_drafts': setting.num_drafts,
    'draft_length': setting.draft_length,
    'tree': setting.tree_name,
    'tokens_per_call': speed.tokens_per_call,
    'tokens_per_second': speed.tokens_per_second,
    'tokens_per_second_ci95': speed.interval,
    'round_seconds': speed.round_seconds,
  }


def to_json(run: DecodeRun) -> str:
  """The run as JSON, with one result per setting and seed.

  Null are intervals of fewer than three prompts or batches, `speedup` without autoregressive decoding, what was not
  requested, and `epsilon` if methods use their own. `acceptance_by_position[d]` is the share of rounds that kept at
  least d + 1 drafted tokens; `acceptance` holds, by method, the rates that `optimal` trees were chosen from.
  """
  content = {'run': run.info, 'acceptance': run.acceptance, 'results': _rows(run)}
  if run.speeds:
    content |= {'speeds': [_speed(each) for each in run.speeds], 'left_out': run.left_out}
  return json.dumps(content, indent=2, allow_nan=False) + '\n'


def to_csv(run: DecodeRun) -> str:
  """The results of `to_json` as comma-separated values, a line each below their names.

  An interval is two values, `_low` and `_high`; shares by position stand in one, separated by spaces; null is empty.
  Each line ends with the paths of both models.
  """
  rows, models = [], run.info['models']
  for result in _rows(run):
    row = {}
    for name, value in result.items():
      if name.endswith('_ci95'):
        row |= dict(zip((f'{name}_low', f'{name}_high'), value or ('', '')))
      elif name == 'seconds_per_round':
        row |= {f'seconds_{part}': (value or {}).get(part, '') for part in _PARTS}
      else:
        row[name] = ' '.join(map(str, value)) if isinstance(value, list) else value
    rows.append(row | {role: models.get(role, {}).get('path', '') for role in ('target', 'draft')})
  return study.to_csv(rows)


def describe_continuation(
  setting: dict[str, Any],
  prompt: Prompt,
  seed: int,
  sample: int,
  continuation: Continuation,
  tokenizer: TokenizerBase,
  stop: StopStrings | None,
) -> dict[str, Any]:
  """A continuation as JSON values, below those of `describe_setting`."""
  tokens = continuation.tokens.tolist()
  entry = {
    'id': prompt.id,
    'prompt': prompt.text,
    **setting,
    'seed': seed,
    'sample': sample,
    'tokens': tokens,
    'text': tokenizer.decode(tokens) if stop is None else stop.text_of(tokens),
    'target_calls': continuation.num_target_calls,
    'finish_reason': continuation.finish_reason,
  }
  return entry if continuation.logprobs is None else entry | {'logprobs': _numbers(continuation.logprobs)}


def _numbers(values: np.ndarray) -> list[float | None]:
  """float32 values with as few digits as tell them apart; null for a token that the target excludes."""
  return [float(str(value)) if np.isfinite(value) else None for value in values]


def continuation_of(
  measurement: Measurement, row: int, eos_ids: Collection[int], stop: StopStrings | None
) -> Continuation:
  length = measurement.lengths[row]
  return Continuation(
    row,
    tokens=measurement.tokens[row, :length],
    origins=measurement.origins[row, :length],
    num_target_calls=int(measurement.num_target_calls[row]),
    finish_reason=finish_reason(measurement.tokens[row, :length], eos_ids, stop),
    logprobs=None if measurement.logprobs is None else measurement.logprobs[row, :length],
  )


def to_jsonl(run: DecodeRun) -> str:
  """The continuations as JSONL, one line per setting, seed, prompt and sample."""
  lines, texts = [], (run.tokenizer, run.options.prompts.make_stop(run.tokenizer))
  eos_ids = () if run.options.sampling.ignore_eos else run.tokenizer.eos_ids
  for measurement in run.measurements:
    setting = describe_setting(run.options, measurement.setting)
    for row in range(len(measurement.lengths)):
      place, sample = divmod(row, run.options.sampling.num_samples)
      continuation = continuation_of(measurement, row, eos_ids, texts[1])
      line = describe_continuation(setting, run.prompts[place], measurement.seed, sample, continuation, *texts)
      lines.append(json.dumps(line, ensure_ascii=False) + '\n')
  return ''.join(lines)


# Of `decode.bulk`.


# Every option of `DecodeOptions`, by what it is to a line.
OPTIONS = {
  'run': (  # of its field `run`
    'target', 'draft', 'lookup_max', 'lookup_min', 'lookup_corpus', 'dtype', 'weights', 'growth_threshold', 'gumbel',
    'logprobs', 'regex', 'json_schema', 'choice', 'presence_penalty', 'frequency_penalty', 'repetition_penalty',
    'logit_bias', 'min_tokens', 'ignore_eos', 'bad_words', 'constraint_after',
  ),
  'setting': ('method', 'num_drafts', 'draft_length', 'tree', 'children', 'epsilon', 'temperature'),
  'field': ('top_k', 'top_p', 'min_p', 'stop', 'max_new_tokens', 'chat', 'system'),
  'checked': ('prompt', 'prompts'),  # with every line
  'free': (  # changes no continuation, but for rounding, or only which there are
    'num_prompts', 'skip_long', 'num_samples', 'num_seeds', 'seed', 'acceptance', 'grid', 'calibration',
    'calibration_prompts', 'batch_size', 'mesh', 'draft_mesh',
  ),
  'refused': ('share_of_optimum', 'breakdown', 'profile_dir'),
}  # fmt: skip


def describe_run(work: Workload, setting: Setting) -> dict[str, Any]:
  """The values that all lines of a run share, as JSON values: those of the files that are read by their content."""
  options, models, pair = work.options, work.info['models'], work.options.models
  has_lookup = pair.has_lookup and options.methods.needs_draft
  run = {
    'target': hash_content(pair.target),
    'target_dtype': models['target']['dtype'],
    'draft': hash_content(pair.draft_model) if 'draft' in models else None,
    'draft_dtype': models['draft']['dtype'] if 'draft' in models else None,
    'weights': pair.weights,
    'lookup_max': pair.lookup_max if has_lookup else None,
    'lookup_min': pair.lookup_min if has_lookup else None,
    'lookup_corpus': hash_json([*models['corpus']['sha256'].values()]) if 'corpus' in models else None,
    'growth_threshold': 0.0 if setting.growth is None else setting.growth.threshold,
    'gumbel': options.methods.gumbel,
    'logprobs': options.prompts.logprobs,
    **({'constraint': constraint} if (constraint := hash_constraint(options.sampling)) else {}),
    **({'penalties': penalties} if (penalties := options.sampling.penalties) else {}),
  }
  fields = {name: options.flags[name] for name in OPTIONS['field']}
  return {'run': run} | describe_setting(options, setting) | fields | {'stop': list(options.prompts.stop)}


def describe_prompt(prompt: Prompt) -> dict[str, Any]:
  """The values of a line about its prompt. Texts do not say which messages a conversation has."""
  described = {'id': prompt.id, 'prompt': prompt.text}
  return described | (
    {'messages': hash_json([dict(message) for message in prompt.messages])} if prompt.messages else {}
  )


def hash_constraint(options: SamplingOptions) -> str | None:
  """A hash of what continuations must follow, or None; in a schema the order of properties counts."""
  constraint = options.read_constraint()
  return hash_json(json.dumps(constraint)) if constraint else None


def hash_json(content: Any) -> str:
  """The first 16 hexadecimal digits of a SHA-256 of a JSON value."""
  return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
