"""Records of a run for programs: results as JSON, continuations as JSONL."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from decode.experiment.options import DecodeOptions
from decode.experiment.prompts import Prompt
from decode.experiment.results import DecodeRun, Measurement, Summary
from decode.experiment.settings import Setting
from spectr_jax import Continuation, StopStrings, finish_reason
from spectr_jax.auto.prediction import Prediction
from spectr_jax.io.tokenizer import TokenizerBase


def _result(summary: Summary, run: DecodeRun, seed: int) -> dict:
  setting = summary.setting
  return {
    'method': setting.method.name,
    'is_lossless': setting.method.is_lossless,
    'num_drafts': setting.num_drafts,
    'draft_length': setting.draft_length,
    'tree': setting.tree_name,
    'num_nodes': setting.tree.num_nodes,
    'children': setting.method.proposal_rule.name,
    'epsilon': run.options.epsilon,
    'temperature': run.options.temperature,
    'seed': seed,
    'num_prompts': len(run.prompts),
    'tokens': summary.num_tokens,
    'target_calls': summary.num_calls,
    'block_efficiency': summary.block_efficiency,
    'block_efficiency_ci95': None if summary.interval is None else list(summary.interval),
    'acceptance_by_position': summary.acceptance_by_position,
    'tokens_per_second': summary.tokens_per_second,
    'speedup': summary.speedup,
    'speedup_ci95': None if summary.speedup_interval is None else list(summary.speedup_interval),
    'seconds_per_round': summary.seconds_per_round or None,
    'share_of_optimum': summary.share_of_optimum,
    'share_of_optimum_ci95': None if summary.share_interval is None else list(summary.share_interval),
  }


def _prediction(found: Prediction) -> dict:
  setting = found.setting
  fields = dataclasses.asdict(dataclasses.replace(found, setting=None))
  return {
    'method': setting.method.name,
    'num_drafts': setting.num_drafts,
    'draft_length': setting.draft_length,
    'tree': setting.tree_name,
  } | {name: value for name, value in fields.items() if name != 'setting'}


def to_json(run: DecodeRun) -> str:
  """The run as JSON, with one result per setting and seed.

  These values can be null: `block_efficiency_ci95` for a single prompt, `speedup` if autoregressive decoding was not
  run, its interval (over batches) for a single batch, `seconds_per_round` and `share_of_optimum` unless requested, and
  `epsilon` if methods use their own. `acceptance_by_position[d]` is the share of rounds that kept at least d + 1
  drafted tokens. `acceptance` holds, by method, the rates that `optimal` trees were chosen from. `predictions` holds
  the settings that `auto` chose from, the fastest first.
  """
  results = [_result(run.summarize(found.setting, (found.seed,)), run, found.seed) for found in run.measurements]
  content = {'run': run.info, 'acceptance': run.acceptance, 'results': results}
  if run.predictions:
    content['predictions'] = [_prediction(found) for found in run.predictions]
  return json.dumps(content, indent=2, allow_nan=False) + '\n'


def describe_setting(options: DecodeOptions, setting: Setting) -> dict[str, Any]:
  """The values that a setting's continuations share, as JSON values.

  Args:
    options: The run's options.
    setting: The setting.
  """
  return {
    'method': setting.method.name,
    'is_lossless': setting.method.is_lossless,
    'num_drafts': setting.num_drafts,
    'draft_length': setting.draft_length,
    'tree': setting.tree_name,
    'children': setting.method.proposal_rule.name,
    'epsilon': options.epsilon,
    'temperature': options.temperature,
  }


def describe_continuation(
  setting: dict[str, Any],
  prompt: Prompt,
  seed: int,
  sample: int,
  found: Continuation,
  tokenizer: TokenizerBase,
  stop: StopStrings | None,
) -> dict[str, Any]:
  """A continuation as JSON values.

  Args:
    setting: The result of `describe_setting`.
    prompt: The prompt.
    seed: The seed.
    sample: The index of the sample among those of this prompt and seed.
    found: The continuation.
    tokenizer: The models' tokenizer.
    stop: The texts that end continuations, or None.
  """
  tokens = found.tokens.tolist()
  entry = {
    'id': prompt.id,
    'prompt': prompt.text,
    **setting,
    'seed': seed,
    'sample': sample,
    'tokens': tokens,
    'text': tokenizer.decode(tokens) if stop is None else stop.text_of(tokens),
    'target_calls': found.num_target_calls,
    'finish_reason': found.finish_reason,
  }
  return entry if found.logprobs is None else entry | {'logprobs': _numbers(found.logprobs)}


def _numbers(values: np.ndarray) -> list[float | None]:
  """float32 values with as few digits as tell them apart; null for a token that the target excludes."""
  return [float(str(value)) if np.isfinite(value) else None for value in values]


def continuation_of(
  measurement: Measurement, row: int, tokenizer: TokenizerBase, stop: StopStrings | None
) -> Continuation:
  """One row of a measurement, without padding.

  Args:
    measurement: The measurement.
    row: The row.
    tokenizer: The models' tokenizer.
    stop: The texts that end continuations, or None.
  """
  length = measurement.lengths[row]
  return Continuation(
    row,
    tokens=measurement.tokens[row, :length],
    origins=measurement.origins[row, :length],
    num_target_calls=int(measurement.calls[row]),
    finish_reason=finish_reason(measurement.tokens[row, :length], tokenizer.eos_ids, stop),
    logprobs=None if measurement.logprobs is None else measurement.logprobs[row, :length],
  )


def to_jsonl(run: DecodeRun) -> str:
  """The continuations as JSONL, one line per setting, seed, prompt and sample."""
  lines, texts = [], (run.tokenizer, run.options.make_stop(run.tokenizer))
  for found in run.measurements:
    setting = describe_setting(run.options, found.setting)
    for row in range(len(found.lengths)):
      place, sample = divmod(row, run.options.num_samples)
      continuation = continuation_of(found, row, *texts)
      line = describe_continuation(setting, run.prompts[place], found.seed, sample, continuation, *texts)
      lines.append(json.dumps(line, ensure_ascii=False) + '\n')
  return ''.join(lines)
