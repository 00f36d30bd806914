"""The share of the optimal acceptance that each rule for i.i.d. candidates reaches, on a pair of models.

Command   python -m benchmarks.share_of_optimum --num_drafts=2,4,8 --temperature=1,0.5
          python -m benchmarks.share_of_optimum --given=text --num_drafts=1,2,4
Models    the pretrained pair, or --target and --draft
Laws      the distributions of both models at every position of the target's own continuations of the shipped prompts,
          sampled at the same temperature: the positions at which a lossless method draws candidates

The acceptance is computed exactly from the distributions (`spectr_jax.theory`); no candidate is drawn. A share is the
mean acceptance divided by the mean optimum, with its 95% interval over prompts. `worst` is the smallest share at any
single position. With `--given` one given token stands beside the drawn candidates: the one that the text goes on with,
as a lookup that is right has it, or the draft's likeliest.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from absl import flags

from benchmarks import command
from common import command_line
from common.output_files import OutputFiles
from decode.experiment import metrics
from decode.experiment.options import DecodeOptions
from decode.experiment.workload import Workload
from decode.papers.token_figures import acceptance_on_text
from spectr_jax import theory
from spectr_jax.couplings import Race

RULES = {
  'optimum': theory.optimal_acceptance,
  'race': theory.race_acceptance,
  'K-SEQ': theory.kseq_acceptance,
  'recursive': theory.recursive_acceptance,
}


def _optimum_beside(draft_probs, target_probs, num_drafts, given):
  """The optimal acceptance with one given token, int32 `[...]`, at each position."""
  return theory.given_optimum(
    draft_probs, target_probs, num_drafts, jnp.arange(draft_probs.shape[-1]) == given[..., None]
  )


def _race_beside(draft_probs, target_probs, num_drafts, given):
  """The acceptance of the race with one given token, int32 `[...]`, at each position."""
  place = jnp.arange(num_drafts + 1)

  def one(draft_probs, target_probs, given):
    # What wins the race does not depend on the tokens drawn.
    candidates = jnp.where(place < num_drafts, 0, given)
    winner = Race()(draft_probs, target_probs, candidates, place >= 0, place == num_drafts).probs
    return jnp.sum(jnp.minimum(winner, target_probs))

  return jnp.vectorize(one, signature='(v),(v),()->()')(draft_probs, target_probs, given)


RULES_BESIDE = {'optimum': _optimum_beside, 'race': _race_beside}


def measure(
  options: DecodeOptions, *, temperatures: Sequence[float], num_drafts: Sequence[int], given: str = 'none'
) -> list[dict]:
  """One record per temperature, number n of drawn candidates and rule; `given` as for `acceptance_on_text`."""
  rules, loaded, records = RULES if given == 'none' else RULES_BESIDE, Workload.load(options), []
  for temperature in temperatures:
    there, overlaps, accepted = acceptance_on_text(loaded.at(temperature), options.seed, rules, num_drafts, given=given)
    for (n, name), values in accepted.items():
      optimum = accepted[n, 'optimum']
      sums = (values * there).sum(1), (optimum * there).sum(1)
      records.append(
        {
          'temperature': temperature,
          'num_drafts': n,
          'rule': name,
          'num_prompts': len(there),
          'num_positions': int(there.sum()),
          'overlap': float(overlaps[there].mean()),
          'acceptance': float(values[there].mean()),
          'share': metrics.ratio(*sums),
          'share_ci95': metrics.ratio_interval(*sums),
          'worst_share': float((values[there] / optimum[there]).min()),
        }
      )
  return records


def _table(records: list[dict]) -> str:
  first = records[0]
  lines = [
    f'{first["num_prompts"]} prompts, {first["num_positions"]} positions at the first temperature',
    f'{"temperature":>12}{"1 - TV":>8}{"n":>4}  {"rule":<11}{"acceptance":>11}{"share of optimum":>24}{"worst":>8}',
  ]
  for record in records:
    lines.append(
      f'{record["temperature"]:>12g}{record["overlap"]:>8.3f}{record["num_drafts"]:>4}  {record["rule"]:<11}'
      f'{record["acceptance"]:>11.4f}{metrics.text_of(record["share"], record["share_ci95"], 4):>24}'
      f'{record["worst_share"]:>8.3f}'
    )
  return '\n'.join(lines)


if __name__ == '__main__':
  _OPTIONS = command.define_options('target', 'draft', 'seed', num_prompts=96, max_new_tokens=32)
  _NUM_DRAFTS = command.define_numbers('num_drafts', '2,3,4,6,8', 'n, numbers of candidates.')
  _GIVEN = flags.DEFINE_enum(
    'given',
    'none',
    ['none', 'text', 'draft'],
    'A given token beside them: that of the text, or the likeliest of the draft.',
  )
  _TEMPERATURES = command.define_numbers('temperature', '1,0.5', 'Temperatures.', float, least=0)
  _OUTPUT = command.define_output()

  def main(argv):
    del argv
    options = _OPTIONS(batch_size=8)
    grid = {'temperatures': _TEMPERATURES(), 'num_drafts': _NUM_DRAFTS()}
    if _GIVEN.value != 'none':
      grid['given'] = _GIVEN.value
    with OutputFiles(output=_OUTPUT.value).apart_from(options.inputs()) as files:
      records = measure(options, **grid)
      sizes = {'num_prompts': options.num_prompts, 'max_new_tokens': options.max_new_tokens}
      files.write_after(lambda: print(_table(records)), output=command.to_json(records, **grid, **sizes))

  command_line.run(main)
