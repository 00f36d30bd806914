"""Tables over a few classes of tokens, cut from the distributions of real models so that likelihood ratios stay real.

After a context the tokens of the vocabulary are sorted by q/p and cut into V classes of about equal (p + q)/2. A class
is a token of the table, with the masses p and q of its tokens. One of them, drawn by (p + q)/2, leads to the context
after the class, where the models are asked again.
"""

from __future__ import annotations

import numpy as np

from decode.experiment.distributions import distributions_after
from decode.experiment.workload import Workload
from spectr_jax import Model, TokenTree


def classes_of(draft_probs: np.ndarray, target_probs: np.ndarray, num_classes: int) -> np.ndarray:
  """The class of every token, int `[V]`, ascending in q/p; the classes have about equal masses (p + q)/2."""
  mass = (draft_probs + target_probs) / 2
  with np.errstate(divide='ignore', invalid='ignore'):
    order = np.argsort(np.where(draft_probs > 0, target_probs / draft_probs, np.inf), kind='stable')
  middle = np.cumsum(mass[order]) - mass[order] / 2
  classes = np.empty(len(mass), int)
  classes[order] = np.minimum(middle / mass.sum() * num_classes, num_classes - 1).astype(int)
  return classes


def real_tables(workload: Workload, prompt: int, num_classes: int, length: int, seed: int) -> list[np.ndarray]:
  """The joint distributions `[V] * L` of draft and target over V classes after the prompt of a number, float64.

  The seed is of the tokens that stand for classes. A `ValueError` says that the draft is no model.
  """
  rng = np.random.default_rng(seed)
  joint = [np.ones(1), np.ones(1)]
  chosen = np.zeros(0, np.int32)
  row = np.array([prompt])
  sampling = workload.sampling.for_rows(1)
  for depth in range(length):
    tree = TokenTree.prefix((num_classes,) * depth) if depth else TokenTree()
    prompts = workload.tokens[row], workload.lengths[row]
    laws = []
    for model in (workload.draft, workload.target):
      if not isinstance(model, Model):
        raise ValueError(f'tables are cut from two models, and {workload.options.draft} is not a model')
      own = distributions_after(model, *prompts, chosen[None], sampling, tree=tree)[0]
      laws.append(np.asarray(own, np.float64))
    masses, leading = [], []
    for p, q in zip(*(each[-(num_classes**depth) :] for each in laws)):
      classes, weights = classes_of(p / p.sum(), q / q.sum(), num_classes), p + q
      masses.append([np.bincount(classes, each / each.sum(), num_classes) for each in (p, q)])
      for own in range(num_classes):
        inside = np.where(classes == own, weights, 0)
        leading.append(rng.choice(len(inside), p=inside / inside.sum()) if inside.any() else 0)
    joint = [(each[:, None] * own).reshape(-1) for each, own in zip(joint, np.swapaxes(masses, 0, 1))]
    chosen = np.concatenate([chosen, np.array(leading, np.int32)])
  return [each.reshape((num_classes,) * length) for each in joint]
