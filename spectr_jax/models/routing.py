"""Which experts of a mixture a token is sent to, and how much each counts; families differ by data alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from spectr_jax.kernels.matrices import matmul
from spectr_jax.kernels.products import accumulation_dtype
from spectr_jax.kernels.softmax import shares, totals

MOST_EXPERTS = 4096


@dataclasses.dataclass(frozen=True)
class Experts:
  """The experts of a decoder's MLPs and their router. The defaults are those of Mixtral.

  Attributes:
    num: E, the number of experts of a layer.
    num_chosen: k, those of a token.
    hidden_dim: Hidden width of an expert.
    layers: For each layer whether it has experts; empty for all of them. The others have an MLP.
    scores: What a router's logits become: their softmax or their sigmoid.
    is_chosen_first: Whether scores are those of the chosen experts alone, chosen by their logits.
    is_normalized: Whether the weights of a token are divided by their sum.
    sum_epsilon: Added to that sum, which sigmoids may leave at 0.
    scale: Factor of all weights.
    num_groups: Groups of experts of equal sizes (DeepSeek-AI 2024).
    num_chosen_groups: Of these, those that experts are chosen of; a group counts by the sum of its best two scores.
    has_choice_bias: Whether a bias is added to scores where experts are chosen, and not where they are weighted.
    has_bias: Whether router and experts have biases.
    limit: Bound of hidden units, whose gate then is `(up + 1) * gate * sigmoid(gate_factor * gate)` (gpt-oss); None for
      the decoder's activation.
    gate_factor: See `limit`.
    shared_dim: Hidden width of an MLP that every token goes through beside its experts; 0 for none.
    has_shared_gate: Whether the output of that MLP is multiplied by a sigmoid of a product of its input.
    are_beside_mlp: Whether layers with experts have an MLP as well, whose output is added (Gemma 4). The router then
      reads the stream before both, normalized, and has a factor of each expert's weights.
    logit_scale: Factor of the router's logits.

  Raises:
    ValueError: A number is beyond its range, or numbers do not fit each other.
  """

  num: int
  num_chosen: int
  hidden_dim: int
  layers: tuple[bool, ...] = ()
  scores: Literal['softmax', 'sigmoid'] = 'softmax'
  is_chosen_first: bool = False
  is_normalized: bool = True
  sum_epsilon: float = 1e-20
  scale: float = 1.0
  num_groups: int = 1
  num_chosen_groups: int = 1
  has_choice_bias: bool = False
  has_bias: bool = False
  limit: float | None = None
  gate_factor: float = 1.702
  shared_dim: int = 0
  has_shared_gate: bool = False
  are_beside_mlp: bool = False
  logit_scale: float = 1.0

  def __post_init__(self):
    for name, most in (
      ('num', MOST_EXPERTS),
      ('num_chosen', self.num),
      ('hidden_dim', 2**31 - 1),
      ('num_groups', self.num),
      ('num_chosen_groups', self.num_groups),
    ):
      value = getattr(self, name)
      if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f'{name} of experts must be from 1 to {most}, got {value!r}')
    if type(self.shared_dim) is not int or not 0 <= self.shared_dim < 2**31:
      raise ValueError(f'shared_dim of experts must be from 0 to {2**31 - 1}, got {self.shared_dim!r}')
    if self.num % self.num_groups:
      raise ValueError(f'{self.num} experts do not divide into {self.num_groups} groups')
    group = self.num // self.num_groups
    if self.num_groups > 1 and (group < 2 or self.num_chosen > group * self.num_chosen_groups):
      raise ValueError(f'{self.num_chosen_groups} groups of {group} experts are too few to choose {self.num_chosen}')
    if self.has_shared_gate and not self.shared_dim:
      raise ValueError('experts have a gate of their shared MLP, but shared_dim is 0')
    if self.scores not in ('softmax', 'sigmoid'):
      raise ValueError(f'scores of experts must be softmax or sigmoid, got {self.scores!r}')
    if self.is_chosen_first and (self.num_groups > 1 or self.has_choice_bias):
      raise ValueError('experts chosen by their logits have neither groups nor a bias of the choice')
    for name in ('scale', 'sum_epsilon', 'limit', 'gate_factor', 'logit_scale'):
      value = getattr(self, name)
      if value is not None and not 0 < value < math.inf:
        raise ValueError(f'{name} of experts must be finite and above 0, got {value!r}')

  def are_in(self, layer: int) -> bool:
    """Whether a layer has experts."""
    return not self.layers or self.layers[layer]


def route(params: Mapping[str, Any], experts: Experts, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The experts of tokens, the best first, and their weights; a token's do not depend on those beside it.

  Args:
    params: `kernel` `[D, E]`, perhaps `bias` `[E]`, `choice_bias` `[E]`, and `expert_scale` `[E]`.
    experts: The rules.
    x: `[N, D]`.

  Returns:
    int32 `[N, k]`, and `[N, k]` in float32 or wider.
  """
  logits = matmul(x, params['kernel']).astype(accumulation_dtype(x.dtype)) * experts.logit_scale
  if 'bias' in params:
    logits += params['bias']
  scores_of = shares if experts.scores == 'softmax' else jax.nn.sigmoid
  if experts.is_chosen_first:
    best, chosen = jax.lax.top_k(logits, experts.num_chosen)
    weights = scores_of(best)
  else:
    scores = scores_of(logits)
    _, chosen = jax.lax.top_k(_ranked(params, experts, scores), experts.num_chosen)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
  if experts.is_normalized:
    weights /= totals(weights) + experts.sum_epsilon
  if 'expert_scale' in params:
    weights *= params['expert_scale'][chosen]
  return chosen, weights * experts.scale


def _ranked(params, experts, scores):
  """What experts are chosen by: their scores, with those of other groups than the best below all."""
  ranked = scores + params['choice_bias'] if 'choice_bias' in params else scores
  if experts.num_groups == 1:
    return ranked
  groups = ranked.reshape(len(ranked), experts.num_groups, -1)
  best, _ = jax.lax.top_k(groups, 2)
  _, kept = jax.lax.top_k(best[..., 0] + best[..., 1], experts.num_chosen_groups)
  is_kept = (kept[..., None] == jnp.arange(experts.num_groups)).any(axis=1)
  return jnp.where(is_kept[..., None], groups, -jnp.inf).reshape(ranked.shape)
