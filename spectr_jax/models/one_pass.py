"""Networks that guess a block of tokens in one pass: DFlash, DFlash 2, DSpark.

A few decoder blocks run once over W slots: the last token of the text, then W - 1 times a mask token. The text behind
them is there as the target's hidden states, which a product and a norm map to a context. Every layer projects keys and
values of the context with its own kernels, keeps them in a cache, and attends to them and to all W slots. Slots are not
written to the cache: what they hold are guesses.

The output of a slot gives logits U, whatever is guessed in the slots before. DFlash stops there, so its guesses at
different depths are independent. In DSpark a small sequential part adds a bias B(x) for the token x before, so the W
logits become a Markov chain, softmax(U_k + B(x_{k-1})), and any tree of guesses is drawn from one pass. DFlash 2 does
so with the likeliest tokens of each slot alone, and mixes neighboring slots before and after attention and MLP.

Sources: DFlash (arXiv:2602.06036), DSpark (arXiv:2607.05147), DFlash 2 (github.com/z-lab/dflash). Parameters are a
nested dict of arrays of one dtype, with kernels `[in, out]`, see `param_shapes`. Functions take the network's `params`
and `config` first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from spectr_jax.kernels.matrices import matmul
from spectr_jax.kernels.products import accumulation_dtype, rounded, sum_of
from spectr_jax.model import KVCache
from spectr_jax.models import causal_lm, layers
from spectr_jax.models.one_pass_config import OnePassConfig

Visible: TypeAlias = tuple[jax.Array, jax.Array | None, jax.Array]


def param_shapes(config: OnePassConfig) -> dict[str, Any]:
  """The shapes of all parameters, a nested dict of `jax.ShapeDtypeStruct`.

  The output head is one of them also where it is made of the target's rows: it is gathered once, when it is loaded.
  """
  backbone, width = config.backbone, config.backbone.embed_dim

  def array(*shape, dtype=backbone.dtype):
    return jax.ShapeDtypeStruct(shape, dtype)

  def linear(num_in, num_out):
    return {'kernel': array(num_in, num_out), 'bias': array(num_out)}

  of_decoder = causal_lm.param_shapes(backbone)
  shapes = {name: shape for name, shape in of_decoder.items() if name.startswith('layer_') or name == 'final_norm'}
  shapes |= {
    'features': {'kernel': array(len(config.feature_layers) * config.target_dim, width)},
    'features_norm': {'gain': array(width)},
    'unembedding': array(width, backbone.vocab_size),
  }
  if config.num_embedded is not None:
    shapes['embedding'] = array(config.num_embedded, width)
  if config.is_reduced:
    shapes['target_ids'] = array(backbone.vocab_size, dtype='int32')
  rank = 0 if config.markov is None else config.markov.rank
  if config.markov is not None:
    more = {
      'vanilla': {},
      'gated': {'gate': linear(width + rank, rank)},
      'rnn': {'joint': linear(2 * rank + width, 3 * rank)},
    }
    shapes['markov'] = {
      'embedding': array(config.markov.num_tokens, rank),
      'unembedding': array(rank, backbone.vocab_size),
      **more[config.markov.kind],
    }
  if config.selector is not None:
    books = array(config.selector.num_tokens, config.selector.rank)
    shapes['selector'] = {'before': books, 'after': books, 'kernel': array(width, config.selector.rank)}
  if config.convolution is not None:
    num_taps, num_groups = config.convolution.num_taps, width // config.convolution.group_size
    own = {'base': array(2, num_taps, width), 'kernel': array(width, 2 * num_taps * num_groups)}
    for layer in range(backbone.num_layers):
      shapes[f'layer_{layer}'] |= {'attention_conv': dict(own), 'mlp_conv': dict(own)}
  if config.confidence is not None:
    shapes['confidence'] = linear(width + (rank if config.confidence == 'markov' else 0), 1)
  return shapes


def _rotations(config: OnePassConfig, positions: jax.Array) -> list[Any]:
  """The angles of rotary positions of every layer."""
  backbone = config.backbone
  by_rope = {rope: causal_lm.rotation_of(rope, positions) for rope in map(backbone.rope_of, range(backbone.num_layers))}
  return [by_rope[backbone.rope_of(layer)] for layer in range(backbone.num_layers)]


def read_context(
  params: Mapping[str, Any], config: OnePassConfig, features: jax.Array, positions: jax.Array, cache: KVCache
) -> KVCache:
  """The cache with the keys and values pending of tokens `[B, N]` with the target's states `[B, N, F, target_dim]`."""
  backbone, num_new = config.backbone, features.shape[1]
  joined = features.astype(backbone.dtype).reshape(*features.shape[:2], -1)
  context = causal_lm.norm(params['features_norm'], causal_lm.linear(params['features'], joined), backbone)
  pending = []
  for layer, rotation in enumerate(_rotations(config, positions)):
    _, key, value, _ = causal_lm.project(params[f'layer_{layer}']['attention'], backbone, context, rotation)
    pending.append(cache.append(layer, key, value, num_pending_slots=num_new))
  return cache.with_pending(pending, num_new)


def _visible(config: OnePassConfig, window: int | None, positions: jax.Array, cache: KVCache) -> Visible:
  """What the slots of one block attend to, see `run_slots`."""
  slots = jnp.arange(config.num_slots)
  ahead = slots - slots[:, None]  # of the other slot over this one
  seen = jnp.ones(ahead.shape, bool)
  if window is None:
    return seen[None], causal_lm.visible_slots(None, positions, cache), positions
  if config.has_causal_windows:
    seen &= ahead <= 0
  if config.sees_from_root:
    with_root = min(window, 2**31 - 2) + 1  # the root counts itself
    return seen[None], causal_lm.visible_slots(with_root, positions[:, :1], cache), positions
  return (seen & (jnp.abs(ahead) < window))[None], causal_lm.visible_slots(window, positions, cache), positions


def _convolve(x: jax.Array, base: jax.Array, dynamic: jax.Array) -> jax.Array:
  """Slots `[B, W, embed_dim]` mixed by b `[T, embed_dim]` and d `[B, W, T, G]`, see `Convolution`."""
  dtype, group_size = x.dtype, x.shape[-1] // dynamic.shape[-1]
  x, base, dynamic = (array.astype(accumulation_dtype(dtype)) for array in (x, base, dynamic))
  mixed = jnp.zeros_like(x)
  for tap in range(len(base)):
    before = jnp.pad(x[:, : x.shape[1] - tap], ((0, 0), (tap, 0), (0, 0)))
    mixed += (base[tap] + jnp.repeat(dynamic[:, :, tap], group_size, axis=-1)) * before
  return rounded(mixed, dtype)


def _mixed(params, x: jax.Array, run_fn: Callable[[jax.Array], jax.Array]) -> jax.Array:
  """`run_fn` of mixed slots, mixed again; both kernels are those of its input `[B, W, embed_dim]`."""
  dynamic = causal_lm.linear(params, x).reshape(*x.shape[:2], 2, params['base'].shape[1], -1)
  result = run_fn(_convolve(x, params['base'][0], dynamic[:, :, 0]))
  return _convolve(result, params['base'][1], dynamic[:, :, 1])


def _layer(params, config: OnePassConfig, layer: int, x, rotation, visible, cache: KVCache):
  """The stream after a decoder block, `[B, W, embed_dim]`, whose slots may be mixed."""
  backbone = config.backbone
  if config.convolution is None:
    return causal_lm.block(params, backbone, layer, x, rotation, visible, cache)[0]

  def attend(normed):
    return causal_lm.attention(params['attention'], backbone, layer, normed, rotation, visible, cache)[0]

  def transform(normed):
    return causal_lm.mlp(params['mlp'], backbone, normed)

  normed = causal_lm.norm(params['attention_norm'], x, backbone)
  x = sum_of(x, _mixed(params['attention_conv'], normed, attend))
  normed = causal_lm.norm(params['mlp_norm'], x, backbone)
  return sum_of(x, _mixed(params['mlp_conv'], normed, transform))


def run_slots(
  params: Mapping[str, Any],
  config: OnePassConfig,
  embedded: jax.Array,
  positions: jax.Array,
  visible_fn: Callable[[int | None], Visible],
  cache: KVCache,
) -> jax.Array:
  """The inputs of the output head `[B, N, embed_dim]` for embedded tokens of that shape; the cache stays as it is.

  `visible_fn` gives what each slot attends to in layers with a window, or without one: pending tokens, bool `[1 or B,
  N, M]`; slots of the cache, bool `[B, 1 or N, S]`, or None if nothing is committed; and `positions`.
  """
  backbone = config.backbone
  visible = {window: visible_fn(window) for window in map(backbone.window, range(backbone.num_layers))}
  x = embedded.astype(backbone.dtype)
  for layer, rotation in enumerate(_rotations(config, positions)):
    seen = visible[backbone.window(layer)]
    x = _layer(params[f'layer_{layer}'], config, layer, x, rotation, seen, cache)
  return causal_lm.norm(params['final_norm'], x, backbone)


def run_block(params: Mapping[str, Any], config: OnePassConfig, embedded: jax.Array, cache: KVCache) -> jax.Array:
  """The outputs `[B, W, embed_dim]` of a block: the embedded last token and mask tokens, behind the context."""
  positions = cache.lengths[:, None] + jnp.arange(config.num_slots)
  return run_slots(
    params, config, embedded, positions, lambda window: _visible(config, window, positions, cache), cache
  )


def embed_before(params: Mapping[str, Any], config: OnePassConfig, tokens: jax.Array) -> jax.Array:
  """The embeddings e of the tokens before, `[..., rank]`, of a network with a sequential part."""
  return layers.take_rows(params['markov']['embedding'], tokens).astype(config.backbone.dtype)


def read_before(
  params: Mapping[str, Any], config: OnePassConfig, before: jax.Array, output: jax.Array, state: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
  """What W of the sequential part is applied to for the bias of a slot's logits, `[..., rank]`, and s after it; see
  `Markov`.

  `before` is from `embed_before`, `output` `[..., embed_dim]` that of the slot. Only `rnn` reads the state `[...,
  rank]`, which is 0 before the first slot; ValueError if it is missing, or the network has no such part.
  """
  if config.markov is None:
    raise ValueError('this network has no Markov chain')
  own = params['markov']
  if config.markov.kind == 'gated':
    mixed = jax.nn.sigmoid(causal_lm.linear(own['gate'], jnp.concatenate([output, before], axis=-1))) * before
  elif config.markov.kind == 'rnn':
    if state is None:
      raise ValueError('a recurrent bias needs the state before the slot')
    product = causal_lm.linear(own['joint'], jnp.concatenate([state, before, output], axis=-1))
    gate, candidate, mixed = jnp.split(product, 3, axis=-1)
    gate, mixed = jax.nn.sigmoid(gate), jnp.tanh(mixed)
    state = gate * state + (1 - gate) * jnp.tanh(candidate)
  else:
    mixed = before
  return mixed, state


def select(
  params: Mapping[str, Any],
  logits: jax.Array,
  candidates: jax.Array,
  tokens: jax.Array,
  output: jax.Array,
) -> jax.Array:
  """The logits `[B, N, V]` of a slot after tokens `[B, N]`; -inf for what is no candidate `[B, C]`. See `Selector`."""
  own = params['selector']
  before = layers.take_rows(own['before'], tokens).astype(output.dtype) * causal_lm.linear(own, output)[:, None]
  after = layers.take_rows(own['after'], candidates).astype(output.dtype)
  scores = jnp.einsum('bnr,bcr->bnc', before, after, preferred_element_type=logits.dtype)
  scores += jnp.take_along_axis(logits, candidates, axis=1)[:, None]

  def of_row(scores, candidates):
    return jnp.full((len(scores), logits.shape[-1]), -jnp.inf, logits.dtype).at[:, candidates].set(scores)

  return jax.vmap(of_row)(scores, candidates)


def confidence_logits(
  params: Mapping[str, Any], config: OnePassConfig, output: jax.Array, before: jax.Array | None
) -> jax.Array:
  """Logits `[...]` of the estimated chance that a slot's guess is accepted, in float32 or wider (DSpark, section 3).

  They read neither that guess nor a later one, but `embed_before` if `config.confidence` is `markov`; else it may be
  None.
  """
  if config.confidence == 'markov':
    if before is None:
      raise ValueError('this estimate reads the embeddings of the tokens before')
    output = jnp.concatenate([output, before], axis=-1)
  own = params['confidence']
  return matmul(output, own['kernel'])[..., 0] + own['bias'][0]


class Block(NamedTuple):
  """What one pass has for the L depths of a tree, whatever is guessed."""

  outputs: jax.Array  # [B, L, embed_dim], of the slots that guess the tokens at depth 1, 2, ..., L
  logits: jax.Array  # [B, L, Vd], their logits U
  candidates: jax.Array | None  # int32 [B, L, C], the tokens that a selector chooses among
  state: jax.Array | None  # [B, 1, rank], s before the first of these slots, of a part that has one


def begin(
  params: Mapping[str, Any], config: OnePassConfig, outputs: jax.Array, root: jax.Array, num_depths: int
) -> Block:
  """The part of a pass, of outputs `[B, W, embed_dim]`, that trees of a depth need; `root` is `[B, 1]`."""
  first = config.num_slots - config.max_depth
  own = outputs[:, first : first + num_depths]
  logits, candidates, state = layers.unembed(params, own), None, None
  if config.selector is not None:
    _, candidates = jax.lax.top_k(logits, config.selector.num_candidates)
  if config.markov is not None and config.markov.kind == 'rnn':
    state = jnp.zeros((len(root), 1, config.markov.rank), outputs.dtype)
    if first:  # the recurrence begins at slot 0, also where that guesses nothing
      _, state = read_before(params, config, embed_before(params, config, root), outputs[:, :1], state)
  return Block(own, logits, candidates, state)


def _at(rows: jax.Array, depth: jax.Array, num_nodes: int) -> jax.Array:
  """`[B, N, ...]`, the rows `[B, L, ...]` of a depth, for each of N nodes."""
  own = jax.lax.dynamic_index_in_dim(rows, depth, axis=1)
  return jnp.broadcast_to(own, (len(own), num_nodes, *own.shape[2:]))


def logits_after(
  params: Mapping[str, Any],
  config: OnePassConfig,
  block: Block,
  depth: jax.Array,
  tokens: jax.Array,
  states: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
  """The logits `[B, N, Vd]` after tokens `[B, N]` at one depth, and s after the slot that guesses their children."""
  num_nodes = tokens.shape[1]
  logits, outputs = _at(block.logits, depth, num_nodes), _at(block.outputs, depth, num_nodes)
  if block.candidates is not None:
    candidates = jax.lax.dynamic_index_in_dim(block.candidates, depth, axis=1, keepdims=False)
    return select(params, logits[:, 0], candidates, tokens, outputs[:, 0]), states
  if config.markov is None:
    return logits, states
  mixed, states = read_before(params, config, embed_before(params, config, tokens), outputs, states)
  return logits + matmul(mixed, params['markov']['unembedding']), states


def confidence_after(
  params: Mapping[str, Any], config: OnePassConfig, block: Block, depth: jax.Array, tokens: jax.Array
) -> jax.Array:
  """The estimated chance that a guess after nodes of one depth is accepted, `[B, N]`; see `confidence_logits`."""
  before = None if config.markov is None else embed_before(params, config, tokens)
  return jax.nn.sigmoid(confidence_logits(params, config, _at(block.outputs, depth, tokens.shape[1]), before))
