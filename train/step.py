"""One update of a model: its loss, its optimizer, and the state both work on, divided over a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spectr_jax.aot import hlo_report as compiled
from spectr_jax.models.transformer import Transformer, TransformerConfig, init_params
from spectr_jax.sharding import DATA, divide_rows, replicated, shardings


def out_of_memory(error: jax.errors.JaxRuntimeError) -> ValueError | None:
  """What to tell the user about an error that says that devices have too little memory; None for any other."""
  return compiled.out_of_memory(error, 'more microbatches, remat or a larger mesh need less')


def make_optimizer(config) -> optax.GradientTransformation:
  """AdamW with linear warm-up, cosine decay to a tenth and gradient clipping; only matrices are decayed."""
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, config.learning_rate, config.warmup_steps, config.num_steps, end_value=config.learning_rate / 10
  )
  return optax.chain(
    optax.clip_by_global_norm(config.max_grad_norm),
    optax.adamw(
      schedule,
      b2=config.adam_b2,
      weight_decay=config.weight_decay,
      mask=lambda params: jax.tree.map(lambda x: x.ndim == 2, params),
    ),
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Teacher:
  """A model whose laws another one learns.

  Attributes:
    params: Its parameters.
    config: Its sizes; same vocabulary as the learner's.
    weight: Share of the divergence from the teacher's laws in the loss; the rest is that of the text's own tokens.
  """

  params: Any
  config: TransformerConfig = dataclasses.field(metadata={'static': True})
  weight: float = dataclasses.field(default=1.0, metadata={'static': True})


def packed_logits(
  params,
  inputs,
  model_config: TransformerConfig,
  bos_id: int,
  *,
  remat: bool = False,
  mesh: Mesh | None = None,
  dropout: float = 0.0,
  dropout_key: jax.Array | None = None,
) -> jax.Array:
  """Logits `[B, T, V]` after every token of packed documents `[B, T]`; attention stays within a document.

  With `remat` each block is computed again for its gradient, instead of keeping what is inside it. Rows are divided
  over the mesh, if there is one. What blocks add is left out with probability `dropout`, if there is a key.
  """
  positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
  document = jnp.cumsum(inputs == bos_id, axis=1)
  mask = (document[:, :, None] == document[:, None, :]) & (positions[:, :, None] >= positions[:, None, :])
  network = Transformer(model_config, remat, dropout=0.0 if dropout_key is None else dropout)
  if mesh is not None:
    network = network.clone(constrain_fn=functools.partial(divide_rows, mesh))
  rngs = None if dropout_key is None else {'dropout': dropout_key}
  return network.apply({'params': params}, inputs, positions, mask, rngs=rngs)[0]


def token_losses(
  params,
  rows,
  model_config: TransformerConfig,
  bos_id: int,
  *,
  teacher: Teacher | None = None,
  **options,
):
  """Loss of each target token, in nats: its negative log-likelihood.

  With a teacher, the divergence KL(teacher's law || own law) takes its place as far as `teacher.weight` says: a draft
  is there for the target's laws, of which the text holds one token each.

  Args:
    params: Parameters of the transformer.
    rows: int32 `[B, T + 1]`, packed documents; attention stays within a document.
    model_config: Sizes of the transformer.
    bos_id: The token that begins a document; it is never a target.
    teacher: The teacher, or None.
    **options: `remat`, `mesh`, `dropout` and `dropout_key`, see `packed_logits`.

  Returns:
    Losses `[B, T]`, 0 where there is no target, and weights `[B, T]`, 1 where there is one.
  """
  inputs, targets = rows[:, :-1], rows[:, 1:]
  logits = packed_logits(params, inputs, model_config, bos_id, **options)
  weights = (targets != bos_id).astype(jnp.float32)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
  if teacher is not None:
    laws = packed_logits(teacher.params, inputs, teacher.config, bos_id, mesh=options.get('mesh'))
    laws = jax.nn.log_softmax(laws)
    divergence = optax.losses.kl_divergence_with_log_targets(jax.nn.log_softmax(logits), laws)
    losses = teacher.weight * divergence + (1 - teacher.weight) * losses
  return losses * weights, weights


def overlaps(params, rows, model_config: TransformerConfig, bos_id: int, *, mesh: Mesh | None = None, teacher: Teacher):
  """1 - TV of own law and teacher's, `[B, T]`, 0 where there is no target, and weights `[B, T]`.

  This is the chance that a single draft token is accepted at temperature 1.
  """
  inputs, targets = rows[:, :-1], rows[:, 1:]
  own = jax.nn.softmax(packed_logits(params, inputs, model_config, bos_id, mesh=mesh))
  other = jax.nn.softmax(packed_logits(teacher.params, inputs, teacher.config, bos_id, mesh=mesh))
  weights = (targets != bos_id).astype(jnp.float32)
  return jnp.minimum(own, other).sum(-1) * weights, weights


def init_state(seed: int, optimizer: optax.GradientTransformation, model_config: TransformerConfig) -> dict[str, Any]:
  """Parameters, what the optimizer keeps, the step, and the best held-out loss so far with its step."""
  params = init_params(jax.random.key(seed), model_config)
  return {
    'params': params,
    'opt_state': optimizer.init(params),
    'step': jnp.zeros((), jnp.int32),
    'best_loss': jnp.asarray(jnp.finfo(jnp.float32).max),  # not inf, which would be a sign of trouble
    'best_step': jnp.zeros((), jnp.int32),
    # Of a checkpoint without it kernels are `[out, in]`, some with the same shape: it is refused.
    'layout_in_out': jnp.ones((), jnp.int32),
  }


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Of rows `[A, B, T + 1]`: every microbatch is divided over `data`."""
  return NamedSharding(mesh, PartitionSpec(None, DATA))


def make_train_step(
  optimizer: optax.GradientTransformation,
  model_config: TransformerConfig,
  bos_id: int,
  mesh: Mesh,
  *,
  remat: bool = False,
  dropout: float = 0.0,
  seed: int = 0,
  unroll: bool = False,
) -> Callable:
  """The jitted update `(state, rows, teacher or None) -> (state, loss)`; the state is donated.

  Rows are `[A, B, T + 1]`: gradients of A microbatches are added up, weighted by their targets, so that the update is
  that of one batch of A x B rows, up to rounding.

  Args:
    optimizer: The optimizer.
    model_config: Sizes of the transformer.
    bos_id: The token that begins a document.
    mesh: Where state and rows are.
    remat: See `packed_logits`.
    dropout: See `packed_logits`.
    seed: What is left out is a function of this, the step and the microbatch.
    unroll: Whether microbatches are written out one after another, for a compiler's count of operations.
  """
  state_sharding = shardings(mesh, jax.eval_shape(lambda: init_state(0, optimizer, model_config)))

  def sum_of_losses(params, rows, dropout_key, teacher):
    losses, weights = token_losses(
      params, rows, model_config, bos_id, teacher=teacher, remat=remat, mesh=mesh, dropout=dropout,
      dropout_key=dropout_key if dropout else None,
    )  # fmt: skip
    return losses.sum(), weights.sum()

  @functools.partial(
    jax.jit,
    donate_argnums=0,
    in_shardings=(state_sharding, batch_sharding(mesh), None),
    out_shardings=(state_sharding, replicated(mesh)),
  )
  def train_step(state, rows, teacher):
    params = state['params']

    step_key = jax.random.fold_in(jax.random.key(seed), state['step'])

    def add_microbatch(carry, microbatch):
      number, rows = microbatch
      key = jax.random.fold_in(step_key, number)
      (loss, weight), grads = jax.value_and_grad(sum_of_losses, has_aux=True)(params, rows, key, teacher)
      return jax.tree.map(jnp.add, carry, (loss, weight, grads)), None

    microbatches = jnp.arange(rows.shape[0]), rows
    nothing = jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    (loss, weight, grads), _ = jax.lax.scan(
      add_microbatch, nothing, microbatches, unroll=rows.shape[0] if unroll else 1
    )
    grads = jax.tree.map(lambda x: x / weight, grads)
    updates, opt_state = optimizer.update(grads, state['opt_state'], params)
    params = optax.apply_updates(params, updates)
    return {**state, 'params': params, 'opt_state': opt_state, 'step': state['step'] + 1}, loss / weight

  return train_step
