"""Tiny vocabularies that share part of their tokens, and what a draft makes of a text, by Python alone."""

import numpy as np

from spectr_jax.draft.shared_vocabulary import SharedVocabulary

# The target's 5 tokens and the draft's 6: the first three are shared, at other ids; the target's 3 takes two of the
# draft's tokens and its 4 three, one of them shared; the draft's 5 stands for the same bytes as its 0, and its 4 for
# nothing that the target has.
TO_TARGET = (2, 0, -1, 1, -1, -1)
SPELLED = ((), (), (), (2, 4), (0, 2, 2))
BOS = 2


def vocabulary(bos_id=BOS):
  """The tables; with `bos_id` None no token begins the draft's texts."""
  return SharedVocabulary.make(TO_TARGET, [row or (0,) for row in SPELLED], bos_id=bos_id)


def draft_text(tokens, bos_id=BOS):
  """The draft's tokens of a text."""
  ids = [index for token in tokens for index in SPELLED[token] or (TO_TARGET.index(token),)]
  return ids if bos_id is None or ids[:1] == [bos_id] else [bos_id, *ids]


def restricted(probs):
  """A distribution of the draft on shared tokens, in the target's ids; all of them alike where they have no mass."""
  found = [0.0] * len(SPELLED)
  for own, target in enumerate(TO_TARGET):
    if target >= 0:
      found[target] = float(probs[own])
  total = sum(found)
  return [each / total for each in found] if total else [1 / 3, 1 / 3, 1 / 3, 0, 0]


def other_vocabulary(*, num_draft, num_target, num_shared, seed=0):
  """Tables at random: some tokens shared, each of the target's others as one to three of the draft's."""
  rng = np.random.default_rng(seed)
  to_target = np.full(num_draft, -1)
  to_target[rng.choice(num_draft, num_shared, replace=False)] = rng.choice(num_target, num_shared, replace=False)
  spelled = [rng.integers(0, num_draft, rng.integers(1, 4)).tolist() for _ in range(num_target)]
  return SharedVocabulary.make(to_target, spelled, bos_id=int(rng.integers(num_draft)))
