"""Tables over a few classes of tokens, cut from the distributions of real models so that likelihood ratios stay real.

After a context the tokens of the vocabulary are sorted by q/p and cut into V classes of about equal (p + q)/2. A class
is a token of the table, with the masses p and q of its tokens. One of them, drawn by (p + q)/2, leads to the context
after the class, where the models are asked again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from decode.experiment.workload import Workload
from spectr_jax import TokenTree
from spectr_jax.draft import DraftRequest
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import score
from spectr_jax.engine.state import DecodeState, init_decode
from spectr_jax.proposal import Proposal
from spectr_jax.sampling import logits_to_probs


@jax.jit
def _laws(decoder: Decoder, state: DecodeState, tokens) -> tuple[jax.Array, jax.Array]:
  """The distributions after nodes with children, of the draft `[R, V]` and of the target, for one row of tokens."""
  tree = decoder.tree
  keys = jnp.broadcast_to(state.keys[:, None], (1, tree.max_depth + 1))
  request = DraftRequest(keys, state.sampling, tree, decoder.method.proposal_rule, tokens[None])
  assert decoder.drafter is not None
  draft = decoder.drafter.propose(state.draft_state, state.draft_context(decoder), request).probs
  logits = score(decoder, state, Proposal(tokens[None], draft)).logits[0, tree.parent_nodes]
  return draft[0], logits_to_probs(logits[None], state.sampling)[0]


def classes_of(draft_probs: np.ndarray, target_probs: np.ndarray, num_classes: int) -> np.ndarray:
  """The class of every token, int `[V]`, ascending in q/p; the classes have about equal masses (p + q)/2."""
  mass = (draft_probs + target_probs) / 2
  with np.errstate(divide='ignore', invalid='ignore'):
    order = np.argsort(np.where(draft_probs > 0, target_probs / draft_probs, np.inf), kind='stable')
  middle = np.cumsum(mass[order]) - mass[order] / 2
  classes = np.empty(len(mass), int)
  classes[order] = np.minimum(middle / mass.sum() * num_classes, num_classes - 1).astype(int)
  return classes


def real_tables(
  workload: Workload, prompt: int, num_classes: int, length: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
  """The joint distributions `[V] * L` of draft and target over classes after a prompt, float64.

  Args:
    workload: Models and prompts.
    prompt: The number of the prompt.
    num_classes: V.
    length: L, in tokens.
    seed: Seed of the tokens that stand for classes.
  """
  rng = np.random.default_rng(seed)
  joint = [np.ones(1), np.ones(1)]
  chosen = np.zeros(0, np.int32)
  row = np.array([prompt])
  for depth in range(length):
    tree = TokenTree.prefix((num_classes,) * depth + (1,))
    decoder = Decoder.make(
      workload.target, workload.draft, tree=tree, max_new_tokens=1, cache_size=workload.tokens.shape[1] + length
    )
    prompts = workload.tokens[row], workload.lengths[row]
    state = init_decode(decoder, workload.keys(seed)[row], *prompts, sampling=workload.sampling)
    tokens = np.concatenate([chosen, np.zeros(tree.num_nodes - len(chosen), np.int32)])
    laws = [np.asarray(each, np.float64) for each in _laws(decoder, state, tokens)]
    masses, leading = [], []
    for p, q in zip(*(each[-(num_classes**depth) :] for each in laws)):
      classes, weights = classes_of(p / p.sum(), q / q.sum(), num_classes), p + q
      masses.append([np.bincount(classes, each / each.sum(), num_classes) for each in (p, q)])
      for own in range(num_classes):
        inside = np.where(classes == own, weights, 0)
        leading.append(rng.choice(len(inside), p=inside / inside.sum()) if inside.any() else 0)
    joint = [(each[:, None] * own).reshape(-1) for each, own in zip(joint, np.swapaxes(masses, 0, 1))]
    chosen = np.concatenate([chosen, np.array(leading, np.int32)])
  shape = (num_classes,) * length
  return joint[0].reshape(shape), joint[1].reshape(shape)
