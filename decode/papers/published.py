"""Numbers that the papers print, to stand beside what is measured; they are read from `published.json`.

SpecTr is "SpecTr: Fast Speculative Decoding via Optimal Transport" (a 97M target trained on LM1B, drafts of 2M, 6M and
20M). SpecTr-GBV is "SpecTr-GBV: Multi-Draft Block Verification Accelerating Speculative Decoding" (DeepSeek models with
a draft of 1.3B, temperature 0.4 and 3 drafts unless a key says otherwise). An entry is a mean and the standard
deviation printed with it, or None where the paper prints none. Methods have this library's names.

Spec-Bench is "Unlocking Efficiency in Large Language Model Inference: A Comprehensive Survey of Speculative Decoding";
its leaderboard is kept with its code.
"""

import json
import pathlib

_PRINTED = json.loads((pathlib.Path(__file__).parent / 'published.json').read_text(encoding='utf-8'))

YIN = 'A Theoretical Perspective for Speculative Decoding (Yin et al. 2024)'


def _by_key(rows):
  """Means and standard deviations, the last two cells of each row, by the cells before."""
  return {tuple(key): (mean, deviation) for *key, mean, deviation in rows}


# SpecTr, Tables 1 and 3: time of a call by length and batch size, over that of the target at length 4 and batch 1.
TARGET_LATENCY, DRAFT_LATENCY = (_by_key(_PRINTED[f'{role}_latency']) for role in ('target', 'draft'))

# SpecTr, Table 4: tokens per target call by draft, then by method, K and L. Table 2 prints the 6M column, rounded.
BLOCK_EFFICIENCY = {draft: _by_key(rows) for draft, rows in _PRINTED['block_efficiency'].items()}

# SpecTr-GBV. Targets, and the L of Tables 1 and 5 for each.
LARGE, SMALL = 'DeepSeek-33B', 'DeepSeek-6.7B'
_LENGTHS = {LARGE: 12, SMALL: 8}
NUM_DRAFTS = 3
GBV_METHODS = ('autoregressive', *_PRINTED['gbv_methods'])


def _by_method(column):
  """Entries by method; those of autoregressive decoding, which are 1, come first and are not printed."""
  entries = [each if isinstance(each, list) else [each, None] for each in column]
  return dict(zip(GBV_METHODS, ((1.0, None), *map(tuple, entries))))


# Table 1: block efficiency and speed-up by target (with its L) and prompt set, K = 3.
COMPARISON = {
  (target, _LENGTHS[target]): {name: tuple(map(_by_method, columns)) for name, columns in sets.items()}
  for target, sets in _PRINTED['comparison'].items()
}
# Tables 2 and 4: block efficiency and speed-up on HumanEval by target and L.
BY_LENGTH = {
  target: {int(length): tuple(map(_by_method, columns)) for length, columns in rows.items()}
  for target, rows in _PRINTED['by_length'].items()
}
# Table 5: per prompt, by target (with its L), prompt set and method, K = 3: seconds in all, rounds, seconds of draft,
# target, verification and the rest, tokens per second, and the share of drafted tokens accepted.
BREAKDOWN_COLUMNS = tuple(_PRINTED['breakdown_columns'])
BREAKDOWN = {(target, _LENGTHS[target]): sets for target, sets in _PRINTED['breakdown'].items()}

# Spec-Bench's leaderboard for Vicuna-13B-v1.3 on an A100 of 80 GB (PyTorch 2.5.1, greedy, float16, batches of 1):
# speed-up by task and over all prompts, in the order of `SPEC_BENCH_COLUMNS`; tokens per target call over all prompts.
SPEC_BENCH_COLUMNS = tuple(_PRINTED['spec_bench_columns'])
SPEC_BENCH = {name: (tuple(speed_ups), tokens) for name, (*speed_ups, tokens) in _PRINTED['spec_bench'].items()}
