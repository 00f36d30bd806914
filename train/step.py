"""One update of a model: its loss, its optimizer, and the state, sharded over a mesh."""

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
from spectr_jax.kernels.packed_attention import arrange_packed, attend_packed
from spectr_jax.models.causal_lm_config import CausalLMConfig
from spectr_jax.models.layers import unembed
from spectr_jax.models.transformer import Transformer, init_params
from spectr_jax.sharding import DATA, divide_rows, replicated, shardings, shards_in_program
from train.block_sums import sum_over_blocks

_BLOCK_LOGITS = 2**25  # numbers of the logits that exist at a time on a device
_PLAIN_LOGITS = 64.0  # exponentials of smaller ones can be added up as they are, in float32 over a billion tokens
# By itself the TPU compiler multiplies large matrices in loops, in which devices send each other parts of them, or adds
# up gradients over devices after the last product; both take 1.1 times as long for the 97M model. So matrices are
# gathered whole, and each gradient is added up over devices while others are computed.
_TPU_OPTIONS = {
  'xla_jf_spmd_threshold_for_windowed_einsum_mib': str(10**6),
  'xla_enable_async_all_reduce': 'true',
  'xla_tpu_enable_async_collective_fusion_fuse_all_reduce': 'true',
  'xla_jf_crs_combiner_threshold_in_bytes': str(2**20),
}


def out_of_memory(error: jax.errors.JaxRuntimeError) -> ValueError | None:
  """The error for users if the devices have too little memory; None for any other error."""
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


@dataclasses.dataclass(frozen=True)
class Learner:
  """A decoder as it is trained: on packed documents, within which attention stays."""

  config: CausalLMConfig
  bos_id: int  # begins a document and is never a target
  mesh: Mesh | None = None  # rows are sharded over it; None for one device
  remat: bool = False  # whether gradients recompute blocks, whose activations are then not stored
  dropout: float = 0.0  # probability to drop an entry of a block's output, where there is a key


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Teacher:
  """A model of the learner's vocabulary, whose distributions the learner is taught."""

  params: Any
  config: CausalLMConfig = dataclasses.field(metadata={'static': True})
  # Weight of the divergence from the teacher in the loss; the loss of the text's own tokens has the rest.
  weight: float = dataclasses.field(default=1.0, metadata={'static': True})


def _packed(params, inputs, learner: Learner, dropout_key: jax.Array | None = None):
  """Logits `[B, T, V]` and inputs of the output head `[B, T, D]`; a program computes those that it uses."""
  positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
  documents = jnp.cumsum(inputs == learner.bos_id, axis=1)[:, None]
  mesh = learner.mesh
  network = Transformer(
    learner.config, learner.remat, dropout=0.0 if dropout_key is None else learner.dropout,
    attend_fn=functools.partial(attend_packed, mesh=mesh), arrange_fn=functools.partial(arrange_packed, mesh=mesh),
  )  # fmt: skip
  if mesh is not None:
    network = network.clone(constrain_fn=functools.partial(divide_rows, mesh))
  rngs = None if dropout_key is None else {'dropout': dropout_key}
  return network.apply({'params': params}, inputs, positions, documents, rngs=rngs)


def packed_logits(params, inputs, learner: Learner, dropout_key: jax.Array | None = None) -> jax.Array:
  """Logits `[B, T, V]` after every token of packed documents, int32 `[B, T]`; without a key there is no dropout."""
  return _packed(params, inputs, learner, dropout_key)[0]


def _taught_by(learner: Learner, teacher: Teacher) -> Learner:
  return Learner(teacher.config, learner.bos_id, learner.mesh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def head_losses(embedding, features, targets, teacher_logits, teacher_weight: float = 0.0) -> jax.Array:
  """The loss `[B, T]` of each token, in nats, with gradients in few passes over logits.

  It is the negative log-likelihood of the target token. With a teacher it is a weighted mean of that and of
  KL(teacher's distribution || own distribution), since the text holds only one sample of each distribution.

  The gradient by the logits is p - q, with p the model's distribution and q what it learns. A token's gradient scales
  the features and their gradient, which are D wide, in place of p - q, which is V wide. So XLA computes p - q inside of
  a product on TPUs.

  Shapes are `[V, D]` of `embedding`, `[B, T, D]` of `features`, the inputs of the output head, int32 `[B, T]` of
  `targets`, and `[B, T, V]` of `teacher_logits`, which have no gradient; they are None where `teacher_weight` is 0.
  """
  return _head_forward(embedding, features, targets, teacher_logits, teacher_weight)[0]


def log_total(logits: jax.Array) -> jax.Array:
  """`jax.nn.logsumexp` of `[..., V]`. On TPUs sums of exponentials of small logits are part of the product that
  computes these, where those of differences to the largest one take another pass.
  """
  if shards_in_program(logits.shape[-1]) > 1:  # devices would have to agree on whether all are small
    return jax.nn.logsumexp(logits, axis=-1)
  top = jnp.max(logits, axis=-1)
  plain = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
  is_small = jnp.all(jnp.abs(top) < _PLAIN_LOGITS)
  return jax.lax.cond(is_small, lambda: plain, lambda: jax.nn.logsumexp(logits, axis=-1))


def _head_forward(embedding, features, targets, teacher_logits, teacher_weight):
  logits, teacher_total = unembed({'embedding': embedding}, features), None
  total = log_total(logits)
  losses = total
  if teacher_logits is not None:
    teacher_total = log_total(teacher_logits)
    learnt = jnp.exp(teacher_logits - teacher_total[..., None])
    losses += teacher_weight * (jnp.sum(learnt * (teacher_logits - logits), axis=-1) - teacher_total)
  if teacher_weight < 1:
    losses -= (1 - teacher_weight) * jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  return losses, (embedding, features, targets, teacher_logits, logits, total, teacher_total)


def _head_backward(teacher_weight, residuals, gradient):
  embedding, features, targets, teacher_logits, logits, total, teacher_total = residuals
  by_logits = jnp.exp(logits - total[..., None])
  if teacher_weight < 1:
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    by_logits -= (1 - teacher_weight) * is_target
  if teacher_logits is not None:
    by_logits -= teacher_weight * jnp.exp(teacher_logits - teacher_total[..., None])
  scale = gradient[..., None].astype(features.dtype)
  by_features = jax.vjp(lambda x: unembed({'embedding': embedding}, x), features)[1](by_logits)[0]
  by_embedding = jax.vjp(lambda x: unembed({'embedding': x}, features * scale), embedding)[1](by_logits)[0]
  return by_embedding, by_features * scale, None, None


head_losses.defvjp(_head_forward, _head_backward)


def summed_losses(
  params, rows, learner: Learner, teacher: Teacher | None = None, *, dropout_key: jax.Array | None = None,
  unroll: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
  """The summed `head_losses` of packed documents, int32 `[B, T + 1]`, and the number of tokens that have a target. The
  logits of some tokens exist at a time. `unroll` writes the loop out, for the compiler's count of operations.
  """
  inputs, targets = rows[:, :-1], rows[:, 1:]
  weights = (targets != learner.bos_id).astype(jnp.float32)
  features = _packed(params, inputs, learner, dropout_key)[1]
  constants, data = {}, {'targets': targets, 'weights': weights}
  if teacher is not None:
    constants['embedding'] = teacher.params['embedding']
    data['features'] = _packed(teacher.params, inputs, _taught_by(learner, teacher))[1]

  def sums(embedding, features, constants, data):
    other = None if teacher is None else unembed(constants, data['features'])
    weight = 0.0 if teacher is None else teacher.weight
    losses = head_losses(embedding, features, data['targets'], other, weight)
    return jnp.sum(losses * data['weights']), ()

  def of_rows(embedding, features, constants, data):
    size = max(1, _BLOCK_LOGITS // (len(features) * learner.config.vocab_size))
    return sum_over_blocks(sums, embedding, features, constants, data, size=size, unroll=unroll)[0][None]

  if learner.mesh is not None:
    # Every device sums over its own rows, so that gradients of the output head are added up over devices once.
    by_rows = PartitionSpec(DATA)
    of_rows = jax.shard_map(
      of_rows, mesh=learner.mesh, axis_names={DATA}, in_specs=(PartitionSpec(), by_rows, PartitionSpec(), by_rows),
      out_specs=by_rows, check_vma=False,
    )  # fmt: skip
  return of_rows(params['embedding'], features, constants, data).sum(), weights.sum()


def summed_overlaps(params, rows, learner: Learner, teacher: Teacher) -> tuple[jax.Array, jax.Array]:
  """The sum of the overlaps 1 - TV of the model's and the teacher's distributions, the probabilities that a draft token
  is accepted at temperature 1, and the number of tokens; arguments as for `summed_losses`.
  """
  inputs, targets = rows[:, :-1], rows[:, 1:]
  own = jax.nn.softmax(packed_logits(params, inputs, learner))
  other = jax.nn.softmax(packed_logits(teacher.params, inputs, _taught_by(learner, teacher)))
  weights = (targets != learner.bos_id).astype(jnp.float32)
  return jnp.sum(jnp.minimum(own, other).sum(-1) * weights), weights.sum()


def new_state(params: Any, optimizer: optax.GradientTransformation) -> dict[str, Any]:
  """The state before the first step."""
  return {'params': params, 'opt_state': optimizer.init(params), 'step': jnp.zeros((), jnp.int32)}


def make_update(optimizer: optax.GradientTransformation, differentiate: Callable, **options) -> Callable:
  """The jitted update `(state, batch, constants) -> (state, loss)` of whatever is trained; it donates the state.
  `differentiate` gives the loss and its gradients by `state['params']`, `options` are those of `jax.jit`.
  """

  @functools.partial(jax.jit, donate_argnums=0, **options)
  def update(state, batch, constants):
    loss, grads = differentiate(state, batch, constants)
    updates, opt_state = optimizer.update(grads, state['opt_state'], state['params'])
    params = optax.apply_updates(state['params'], updates)
    return {**state, 'params': params, 'opt_state': opt_state, 'step': state['step'] + 1}, loss

  return update


def init_state(
  seed: int, optimizer: optax.GradientTransformation, model_config: CausalLMConfig, params: Any = None
) -> dict[str, Any]:
  """The initial state of a model, of `params` or random ones: that of `new_state`, and the best held-out loss so far
  with its step.
  """
  params = init_params(jax.random.key(seed), model_config) if params is None else params
  return new_state(params, optimizer) | {
    'best_loss': jnp.asarray(jnp.finfo(jnp.float32).max),  # not inf, which would be a sign of trouble
    'best_step': jnp.zeros((), jnp.int32),
  }


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """The sharding of rows `[A, B, T + 1]`: every microbatch is sharded over `data`."""
  return NamedSharding(mesh, PartitionSpec(None, DATA))


def make_train_step(
  optimizer: optax.GradientTransformation, learner: Learner, *, seed: int = 0, unroll: bool = False
) -> Callable:
  """The `make_update` of a model: batches are rows `[A, B, T + 1]`, constants a teacher or None. Gradients of A
  microbatches are added up, weighted by their numbers of targets, as if they were one batch of A x B rows. What dropout
  drops depends on seed, step and microbatch; `unroll` is that of `summed_losses`.
  """
  mesh = learner.mesh
  assert mesh is not None  # a single device has one too
  state_sharding = shardings(mesh, jax.eval_shape(lambda: init_state(0, optimizer, learner.config)))

  def sum_of_losses(params, rows, dropout_key, teacher):
    return summed_losses(
      params, rows, learner, teacher, dropout_key=dropout_key if learner.dropout else None, unroll=unroll
    )

  def differentiate(state, rows, teacher):
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
    return loss / weight, jax.tree.map(lambda x: x / weight, grads)

  return make_update(
    optimizer,
    differentiate,
    in_shardings=(state_sharding, batch_sharding(mesh), None),
    out_shardings=(state_sharding, replicated(mesh)),
    compiler_options=_TPU_OPTIONS if mesh.devices.flat[0].platform == 'tpu' else None,
  )
