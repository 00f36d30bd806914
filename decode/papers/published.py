"""Numbers that the papers print, to stand beside what is measured.

SpecTr is "SpecTr: Fast Speculative Decoding via Optimal Transport" (a 97M target trained on LM1B, drafts of 2M, 6M and
20M). SpecTr-GBV is "SpecTr-GBV: Multi-Draft Block Verification Accelerating Speculative Decoding" (DeepSeek models,
temperature 0.4 and 3 drafts unless a key says otherwise). An entry is a mean and the standard deviation printed with
it, or None where the paper prints none. Methods have this library's names.

Spec-Bench is "Unlocking Efficiency in Large Language Model Inference: A Comprehensive Survey of Speculative Decoding";
its leaderboard is kept with its code.
"""

YIN = 'A Theoretical Perspective for Speculative Decoding (Yin et al. 2024)'

# SpecTr, Tables 1 and 3: time of a call by length and batch size, over that of the target at length 4 and batch 1.
TARGET_LATENCY = {
  (4, 1): (1.00, 0.16), (4, 2): (1.01, 0.15), (4, 4): (1.06, 0.10), (4, 8): (1.10, 0.16),
  (8, 1): (1.01, 0.18), (8, 2): (1.09, 0.25), (8, 4): (1.10, 0.09), (8, 8): (1.42, 0.4),
}  # fmt: skip
DRAFT_LATENCY = {
  (4, 1): (0.18, 0.02), (4, 2): (0.19, 0.04), (4, 4): (0.18, 0.09), (4, 8): (0.20, 0.13),
  (8, 1): (0.17, 0.04), (8, 2): (0.19, 0.05), (8, 4): (0.16, 0.02), (8, 8): (0.18, 0.04),
}  # fmt: skip

# SpecTr, Table 4: tokens per target call by draft, then by method, K and L. Table 2 prints the 6M column, rounded.
BLOCK_EFFICIENCY = {
  '2M': {
    ('autoregressive', 0, 0): (1.00, None),
    ('speculative', 1, 4): (1.86, 0.02), ('spectr', 2, 4): (2.07, 0.01), ('spectr', 4, 4): (2.32, 0.00),
    ('spectr', 8, 4): (2.56, 0.01), ('speculative', 1, 8): (1.91, 0.01), ('spectr', 2, 8): (2.15, 0.01),
    ('spectr', 4, 8): (2.41, 0.00), ('spectr', 8, 8): (2.68, 0.01),
  },
  '6M': {
    ('autoregressive', 0, 0): (1.00, None),
    ('speculative', 1, 4): (2.21, 0.01), ('spectr', 2, 4): (2.43, 0.01), ('spectr', 4, 4): (2.74, 0.01),
    ('spectr', 8, 4): (2.99, 0.02), ('speculative', 1, 8): (2.33, 0.01), ('spectr', 2, 8): (2.61, 0.02),
    ('spectr', 4, 8): (2.96, 0.03), ('spectr', 8, 8): (3.27, 0.02),
  },
  '20M': {
    ('autoregressive', 0, 0): (1.00, None),
    ('speculative', 1, 4): (2.71, 0.01), ('spectr', 2, 4): (2.96, 0.00), ('spectr', 4, 4): (3.28, 0.02),
    ('spectr', 8, 4): (3.49, 0.03), ('speculative', 1, 8): (3.12, 0.02), ('spectr', 2, 8): (3.48, 0.04),
    ('spectr', 4, 8): (3.85, 0.05), ('spectr', 8, 8): (4.15, 0.04),
  },
}  # fmt: skip

# SpecTr-GBV. Targets, all with a draft of 1.3B.
LARGE, SMALL = 'DeepSeek-33B', 'DeepSeek-6.7B'
NUM_DRAFTS = 3
GBV_METHODS = ('autoregressive', 'speculative', 'spectr', 'greedy_block', 'spectr_gbv')
_ONE = (1.0, None)


def _by_method(*figures):
  return dict(zip(GBV_METHODS, (_ONE, *figures)))


# Table 1: block efficiency and speed-up by target (with its L) and prompt set, K = 3.
COMPARISON = {
  (LARGE, 12): {
    'HumanEval': (
      _by_method((9.53, 1.53), (10.25, 1.37), (9.60, 1.52), (10.45, 1.44)),
      _by_method((2.02, 0.32), (2.21, 0.30), (2.03, 0.32), (2.50, 0.39)),
    ),
    'GSM8K': (
      _by_method((6.83, 1.66), (7.25, 1.31), (6.89, 1.44), (7.65, 1.54)),
      _by_method((1.57, 0.42), (2.26, 0.44), (1.57, 0.37), (2.46, 0.58)),
    ),
    'MGSM': (
      _by_method((7.18, 1.85), (8.10, 1.86), (7.37, 1.88), (8.31, 1.81)),
      _by_method((1.55, 0.45), (1.97, 0.72), (1.60, 0.47), (2.12, 0.76)),
    ),
    'LM1B': (
      _by_method((8.17, 2.76), (8.93, 2.45), (8.42, 2.66), (8.94, 2.51)),
      _by_method((1.71, 0.57), (1.82, 0.47), (1.75, 0.54), (1.90, 0.55)),
    ),
    'Alpaca': (
      _by_method((6.51, 2.28), (7.42, 2.18), (6.89, 2.27), (7.58, 2.22)),
      _by_method((1.36, 0.47), (1.52, 0.42), (1.41, 0.54), (1.60, 0.48)),
    ),
    'Average': (
      _by_method((7.64, None), (8.39, None), (7.83, None), (8.59, None)),
      _by_method((1.64, None), (1.96, None), (1.67, None), (2.12, None)),
    ),
  },
  (SMALL, 8): {
    'HumanEval': (
      _by_method((7.06, 0.91), (7.53, 0.81), (7.06, 0.92), (7.70, 0.72)),
      _by_method((1.19, 0.15), (1.15, 0.18), (1.19, 0.15), (1.28, 0.12)),
    ),
    'GSM8K': (
      _by_method((5.78, 0.55), (6.55, 0.58), (5.99, 0.65), (6.68, 0.72)),
      _by_method((1.02, 0.10), (1.28, 0.11), (1.04, 0.12), (1.42, 0.17)),
    ),
    'MGSM': (
      _by_method((5.84, 1.00), (6.38, 1.01), (5.99, 1.01), (6.60, 1.11)),
      _by_method((1.01, 0.18), (1.06, 0.26), (1.02, 0.20), (1.14, 0.31)),
    ),
    'LM1B': (
      _by_method((6.17, 1.78), (6.86, 1.66), (6.42, 1.73), (7.01, 1.66)),
      _by_method((1.02, 0.29), (1.04, 0.22), (1.03, 0.27), (1.12, 0.27)),
    ),
    'Alpaca': (
      _by_method((5.81, 1.28), (6.12, 1.18), (5.89, 1.27), (6.23, 0.22)),
      _by_method((1.01, 0.17), (1.00, 0.42), (1.00, 0.14), (1.03, 0.18)),
    ),
    'Average': (
      _by_method((6.13, None), (6.69, None), (6.27, None), (6.84, None)),
      _by_method((1.05, None), (1.11, None), (1.06, None), (1.20, None)),
    ),
  },
}


def _by_length(rows):
  return {
    length: tuple(_by_method(*((value, None) for value in row[start::2])) for start in (0, 1))
    for length, row in rows.items()
  }


# Tables 2 and 4: block efficiency and speed-up on HumanEval by L; the rows are those of the paper.
BY_LENGTH = {
  LARGE: _by_length(
    {
      12: (9.53, 2.02, 10.25, 2.21, 9.60, 2.03, 10.45, 2.50),
      16: (11.36, 1.93, 12.56, 2.56, 11.37, 1.94, 12.63, 2.52),
      20: (13.10, 1.88, 13.64, 2.55, 13.19, 1.86, 14.58, 2.87),
      24: (14.63, 1.80, 16.22, 2.33, 15.08, 1.85, 16.52, 2.68),
    }
  ),
  SMALL: _by_length(
    {
      4: (4.42, 1.19, 4.57, 1.15, 4.44, 1.19, 4.62, 1.26),
      8: (7.06, 1.19, 7.53, 1.15, 7.06, 1.19, 7.70, 1.28),
      12: (9.39, 1.12, 10.11, 1.16, 9.89, 1.14, 10.29, 1.26),
      16: (11.23, 1.06, 12.22, 1.13, 11.58, 1.08, 12.49, 1.23),
    }
  ),
}

# Table 5: per prompt, by target (with its L), prompt set and method, K = 3: seconds in all, rounds, seconds of draft,
# target, verification and the rest, tokens per second, and the share of drafted tokens accepted.
BREAKDOWN_COLUMNS = ('total', 'rounds', 'draft', 'target', 'verification', 'rest', 'tokens/s', 'accepted')
BREAKDOWN = {
  (LARGE, 12): {
    'GSM8K': {
      'spectr': (19.24, 73.46, 11.97, 6.05, 1.01, 0.20, 27.48, 0.521),
      'spectr_gbv': (18.03, 70.13, 11.57, 5.79, 0.47, 0.20, 29.64, 0.555),
    },
    'HumanEval': {
      'spectr': (12.91, 51.72, 8.91, 2.83, 1.03, 0.12, 40.99, 0.772),
      'spectr_gbv': (11.39, 50.92, 8.24, 2.75, 0.26, 0.12, 46.79, 0.788),
    },
  },
  (SMALL, 8): {
    'GSM8K': {
      'spectr': (12.36, 79.27, 8.71, 2.44, 1.00, 0.19, 42.01, 0.695),
      'spectr_gbv': (11.12, 78.07, 8.20, 2.39, 0.35, 0.19, 46.93, 0.711),
    },
    'HumanEval': {
      'spectr': (10.09, 69.71, 7.39, 1.56, 1.01, 0.12, 51.85, 0.816),
      'spectr_gbv': (9.05, 67.65, 7.17, 1.52, 0.25, 0.12, 57.67, 0.838),
    },
  },
}

# Spec-Bench's leaderboard for Vicuna-13B-v1.3 on an A100 of 80 GB (PyTorch 2.5.1, greedy, float16, batches of 1):
# speed-up by task and over all prompts, in the order of `SPEC_BENCH_COLUMNS`; tokens per target call over all prompts.
SPEC_BENCH_COLUMNS = (
  'multi-turn conversation', 'translation', 'summarization', 'question answering', 'mathematical reasoning',
  'retrieval-augmented generation', 'overall',
)  # fmt: skip
SPEC_BENCH = {
  'EAGLE-3': ((3.48, 2.36, 3.14, 2.94, 3.42, 2.78, 3.02), 5.71),
  'SAMD (EAGLE-2)': ((3.38, 2.11, 2.96, 2.35, 3.16, 2.67, 2.77), 4.52),
  'EAGLE-2': ((2.95, 1.96, 2.43, 2.20, 2.95, 2.25, 2.46), 4.43),
  'Hydra': ((2.58, 1.99, 1.94, 2.08, 2.62, 1.95, 2.20), 3.35),
  'Token Recycling': ((2.30, 2.02, 2.10, 2.05, 2.60, 1.94, 2.17), 2.73),
  'EAGLE': ((2.52, 1.84, 2.12, 1.91, 2.52, 2.01, 2.16), 3.64),
  'Medusa': ((2.05, 1.71, 1.62, 1.69, 2.08, 1.61, 1.80), 2.39),
  'prompt lookup': ((1.54, 1.03, 2.30, 1.05, 1.65, 1.82, 1.56), 1.67),
  'SpS (a small draft)': ((1.67, 1.15, 1.71, 1.43, 1.58, 1.70, 1.54), 2.19),
  'REST': ((1.52, 1.17, 1.37, 1.53, 1.19, 1.55, 1.38), 1.82),
  'Lookahead': ((1.43, 1.09, 1.28, 1.18, 1.59, 1.21, 1.30), 1.63),
}
