"""The formats of published heads: what `config.json` and the names of tensors say about a head.

What differs between heads of a format follows from the tensors where it can, since configurations are often incomplete.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from spectr_jax.io.foreign import FLAG, TEXT, list_of, object_of, shown, whole
from spectr_jax.io.heads.names import DEEPSEEK_MTP, DFLASH, DFLASH2, DSPARK, MTP, head_prefix
from spectr_jax.io.hub.config_fields import BLOCK_FIELDS, TOKEN, VOCAB, WIDTH, check_requests, checked, plain_name
from spectr_jax.io.hub.families import LLAMA_MODULES
from spectr_jax.io.hub.family_configs import layer_windows, llama_config
from spectr_jax.io.hub.load import for_platform
from spectr_jax.io.hub.tensors import Tensors
from spectr_jax.model import KVCache, Model
from spectr_jax.models import head, one_pass
from spectr_jax.models.causal_lm_config import CausalLMConfig
from spectr_jax.models.head import HeadConfig
from spectr_jax.models.one_pass import Convolution, Markov, OnePassConfig, Selector

_BLOCK_MODULES = {
  ours: theirs
  for ours, theirs in LLAMA_MODULES.items()
  if ours == 'mlp_norm' or ours.startswith(('attention/', 'mlp/'))
}
_LAYER_IDS = list_of(whole(-1, 10_000), 1000)  # -1 is the last layer
_EAGLE3_FIELDS = {
  'eagle_aux_hidden_state_layer_ids': _LAYER_IDS,
  'use_aux_hidden_state': FLAG,
  'fc_norm': FLAG,
  'norm_before_fc': FLAG,
  'norm_before_residual': FLAG,
  'norm_output': FLAG,
}
_ONE_PASS_FIELDS = {
  'block_size': whole(1, 1024),
  'mask_token_id': TOKEN,
  'target_layer_ids': _LAYER_IDS,
  'aux_hidden_state_layer_ids': _LAYER_IDS,
  'sample_from_anchor': FLAG,
  'sliding_window_non_causal': FLAG,
  'is_causal': FLAG,
  'markov_head_type': TEXT,
  'conv_kernel_size': whole(1, 1024),
  'conv_group_size': WIDTH,
  'selector_top_k': VOCAB,
}
# Of the `config.json` of a head. The number of blocks may be that of the target.
_FIELDS = (
  BLOCK_FIELDS
  | _EAGLE3_FIELDS
  | _ONE_PASS_FIELDS
  | {
    'num_hidden_layers': whole(0, 10_000),
    'architectures': list_of(TEXT, 100),
    'bias': FLAG,
    'dflash_config': object_of({}),
    'eagle_config': object_of({}),
    'speculators_model_type': TEXT,
    'transformer_layer_config': object_of({}),
  }
)


@dataclasses.dataclass(frozen=True)
class TargetSizes:
  """The sizes of a target that a head must fit.

  Attributes:
    vocab_size: V.
    width: Width of its hidden states.
    embedding_dim: Width of its embedded tokens, or None if drafters cannot read them.
    num_layers: The number of its blocks.
  """

  vocab_size: int
  width: int
  embedding_dim: int | None
  num_layers: int


@dataclasses.dataclass(frozen=True)
class Layout:
  """A head as its files describe it.

  Attributes:
    config: Its sizes.
    modules: The hub's name of every module, by ours.
    prefix: The beginning of the names that belong to the head.
  """

  config: HeadConfig | OnePassConfig
  modules: Mapping[str, str]
  prefix: str = ''

  @property
  def param_shapes(self) -> dict[str, Any]:
    """The shapes of all parameters."""
    if isinstance(self.config, OnePassConfig):
      return one_pass.param_shapes(self.config)
    return head.param_shapes(self.config)


def target_sizes(target: Model) -> TargetSizes:
  """The sizes of a target that a head must fit.

  Args:
    target: The target; nothing is computed.

  Raises:
    ValueError: The target returns no hidden states, or does not tell the number of its layers.
  """
  if target.features_fn is None:
    raise ValueError('a head reads hidden states of the target, but this target returns none: its features_fn is None')

  def call(target):
    token, cache = jnp.zeros((1, 1), jnp.int32), target.init_cache_fn(1, 1)
    output = target.with_features((-1,)).apply(token, token, jnp.ones((1, 1), bool), cache)
    return cache, output.features, None if target.embed_fn is None else target.embed_fn(target.params, token)

  cache, features, embedded = jax.eval_shape(call, target)
  if not isinstance(cache, KVCache):
    raise ValueError('a head needs the number of layers of its target, which only a KVCache tells')
  embedding_dim = None if embedded is None else embedded.shape[-1]
  return TargetSizes(target.vocab_size, features.shape[-1], embedding_dim, len(cache.keys))


def _modules(block: str, **others: str) -> dict[str, str]:
  """The hub's names of modules: those of a block of Llama's kind below `block`, and others."""
  return {ours: block + theirs for ours, theirs in _BLOCK_MODULES.items()} | others


def _layer_modules(layers: range) -> dict[str, str]:
  """The hub's name of every module of whole blocks, which stand below `layers`, by ours."""
  modules = _BLOCK_MODULES | {'attention_norm': 'input_layernorm'}
  for conv in ('attention_conv', 'mlp_conv'):
    modules |= {conv: f'{conv}.kernel_projection', f'{conv}/base': f'{conv}.base_kernel'}
  return {f'layer_{i}/{ours}': f'layers.{i}.{theirs}' for i in layers for ours, theirs in modules.items()}


def _block(
  spec: Mapping[str, Any],
  tensors: Tensors,
  prefix: str,
  vocab_size: int,
  dtype: str | None,
  *,
  num_layers: int = 1,
  known: tuple[str, ...] = (),
  **differences: Any,
) -> CausalLMConfig:
  """The configuration of a head's blocks; biases and norms of queries and keys are there where their tensors are.

  Args:
    spec: The content of `config.json`.
    tensors: The head's tensors.
    prefix: The beginning of the names of the first block.
    vocab_size: Vd.
    dtype: The dtype to compute in; None for the one of the configuration.
    num_layers: The number of blocks.
    known: Fields that the format reads and others refuse.
    **differences: Fields of the format's own.
  """
  names = tensors.names()
  check_requests(spec, known=known, has_experts=True)
  kinds = spec.get('layer_types', [])
  if len(kinds) != num_layers and set(kinds) <= {'full_attention'}:  # those of the target
    kinds = ['full_attention'] * num_layers
  spec = {
    'max_position_embeddings': 2048,
    **spec,
    'num_hidden_layers': num_layers,
    'vocab_size': vocab_size,
    'layer_types': kinds,
  }
  config = llama_config(
    spec,
    windows=layer_windows(spec),
    has_qkv_bias=f'{prefix}self_attn.q_proj.bias' in names,
    has_out_bias=f'{prefix}self_attn.o_proj.bias' in names,
    has_mlp_bias=f'{prefix}mlp.up_proj.bias' in names,
    has_qk_norm=f'{prefix}self_attn.q_norm.weight' in names,
    is_tied=False,
    **differences,
  )
  return for_platform(config if dtype is None else dataclasses.replace(config, dtype=dtype), None)


def _shape(tensors: Tensors, name: str, num_axes: int = 2) -> tuple[int, ...]:
  """The shape of a tensor that must have so many axes."""
  shape = tensors.shape(name)
  if len(shape) != num_axes or 0 in shape:
    raise ValueError(f'tensor {name} has shape {shape}, expected {num_axes} axes of at least 1')
  return shape


def _num_rows(tensors: Tensors, name: str, num_axes: int = 2) -> int | None:
  """The outputs of a matrix or the number of ids, or None if there is no such tensor."""
  return _shape(tensors, name, num_axes)[0] if name in tensors.names() else None


def _num_layers(spec: Mapping[str, Any], tensors: Tensors) -> int:
  """The blocks of a head that has several, no more than it has tensors."""
  num_layers, num_tensors = spec['num_hidden_layers'], len(tensors.names())
  if not 1 <= num_layers <= num_tensors:
    raise ValueError(f'the configuration has {num_layers} layers, but the checkpoint {num_tensors} tensors')
  return num_layers


def _embedding(tensors: Tensors, name: str, sizes: TargetSizes) -> tuple[int | None, int]:
  """Tokens of a head's own embedding, None if it reads the target's, and the width of embedded tokens."""
  if name in tensors.names():
    num_tokens, width = shape = _shape(tensors, name)
    if num_tokens < sizes.vocab_size:
      raise ValueError(f'tensor {name} has shape {shape}, and the target has {sizes.vocab_size} tokens')
    return num_tokens, width
  if sizes.embedding_dim is None:
    raise ValueError('this head reads embeddings of the target, but the target has no embed_fn')
  return None, sizes.embedding_dim


def _feature_layers(spec: Mapping[str, Any], tensors: Tensors, sizes: TargetSizes) -> tuple[int, ...]:
  """The target's layers that a head of EAGLE-3's kind reads, numbered as in `Model.features_fn`.

  Configurations number them in two ways: in an `eagle_config` they name blocks whose outputs are read, at the top those
  whose inputs are.
  """
  num_inputs = _shape(tensors, 'fc.weight')[1]
  if num_inputs % sizes.width:
    raise ValueError(f'the head reads {num_inputs} numbers of the target, whose hidden states have {sizes.width}')
  nested = spec['eagle_config'].get('eagle_aux_hidden_state_layer_ids')
  named = spec.get('eagle_aux_hidden_state_layer_ids') or (nested and [layer + 1 for layer in nested])
  if not named and sizes.num_layers < 3:
    raise ValueError(f'config.json does not say which layers the head reads, and the target has {sizes.num_layers}')
  layers = tuple(named or (2, sizes.num_layers // 2, sizes.num_layers - 3))
  if num_inputs != len(layers) * sizes.width:
    raise ValueError(
      f'the head reads {num_inputs // sizes.width} hidden states of the target, and the configuration names'
      f' {len(layers)} layers: {", ".join(map(str, layers))}'
    )
  return layers


def eagle3_modules(config: HeadConfig, block: str) -> dict[str, str]:
  """The hub's name of every module of a head of EAGLE-3's kind, by ours.

  Args:
    config: The head.
    block: The beginning of the names of the block's modules.
  """
  layers = _layer_modules(range(1, config.block.num_layers))
  return layers | _modules(
    block,
    mask_features='mask_hidden',
    features='fc',
    features_norm='input_norm' if config.features_norm == 'joint' else 'fc_norm',
    embedding_norm=f'{block}input_layernorm',
    hidden_norm=f'{block}hidden_norm',
    output_norm='norm',
    embedding='embed_tokens',
    unembedding='lm_head',
  )


def read_eagle3(
  spec: Mapping[str, Any], tensors: Tensors, sizes: TargetSizes, dtype: str | None, *, mask_id: int | None = None
) -> Layout:
  """A head of EAGLE-3's kind; with what the speculators format adds, which some files without that format have too.

  Args:
    spec: The content of `config.json`.
    tensors: The head's tensors, of which only names and shapes are read.
    sizes: The target's sizes.
    dtype: The dtype to compute in; None for the one of the configuration.
    mask_id: The mask token of P-EAGLE; None for a head that reads its guesses.

  Raises:
    ValueError: Something is missing, unknown or does not fit the target.
    KeyError: A size is missing.
  """
  names = tensors.names()
  block = 'midlayer.' if any(name.startswith('midlayer.') for name in names) else 'layers.0.'
  nested = checked(spec.get('eagle_config', {}), _EAGLE3_FIELDS, 'eagle_config')
  spec, options = {**spec, 'eagle_config': nested}, {**spec, **nested}
  if not options.get('use_aux_hidden_state', True):
    raise ValueError(
      "use_aux_hidden_state False is not supported: such a head reads the target's last hidden state, without a product"
    )
  num_embedded, embedding_dim = _embedding(tensors, 'embed_tokens.weight', sizes)
  vocab_size = _num_rows(tensors, 'lm_head.weight') or _num_rows(tensors, 'd2t', 1) or sizes.vocab_size
  if 'fc.weight' not in names:
    raise ValueError('the checkpoint lacks fc.weight')
  num_layers = 1 if mask_id is None else _num_layers(spec, tensors)
  config = HeadConfig(
    _block(spec, tensors, block, vocab_size, dtype, num_layers=num_layers),
    sizes.width,
    embedding_dim,
    _feature_layers(spec, tensors, sizes),
    features_norm='each' if options.get('fc_norm') else 'joint' if options.get('norm_before_fc') else None,
    is_residual_normed=options.get('norm_before_residual', False),
    is_output_normed=options.get('norm_output', False),
    num_embedded=num_embedded,
    has_unembedding='lm_head.weight' in names,
    is_reduced='d2t' in names,
    mask_id=mask_id,
  )
  return Layout(config, eagle3_modules(config, block))


def _peagle(spec, tensors: Tensors, sizes: TargetSizes, dtype) -> Layout:
  return read_eagle3(spec, tensors, sizes, dtype, mask_id=spec['mask_token_id'])


def _one_pass_modules(num_layers: int) -> dict[str, str]:
  """The hub's name of every module of a network that guesses in one pass, by ours."""
  return _layer_modules(range(num_layers)) | {
    'features': 'fc', 'features_norm': 'hidden_norm', 'final_norm': 'norm',
    'embedding': 'embed_tokens', 'unembedding': 'lm_head',
    'markov/embedding': 'markov_head.markov_w1', 'markov/unembedding': 'markov_head.markov_w2',
    'markov/gate': 'markov_head.gate_proj', 'markov/joint': 'markov_head.joint_proj',
    'confidence': 'confidence_head.proj', 'selector': 'candidate_selector.hidden_projection',
    'selector/before': 'candidate_selector.predecessor_codebook',
    'selector/after': 'candidate_selector.successor_codebook',
  }  # fmt: skip


def _table(tensors: Tensors, name: str, sizes: TargetSizes) -> tuple[int, int] | None:
  """Tokens and width of a table of the target's tokens, None if there is no such tensor."""
  if name not in tensors.names():
    return None
  num_tokens, width = _shape(tensors, name)
  if num_tokens < sizes.vocab_size:
    raise ValueError(f'tensor {name} has shape {(num_tokens, width)}, and the target has {sizes.vocab_size} tokens')
  return num_tokens, width


def _markov(spec: Mapping[str, Any], tensors: Tensors, sizes: TargetSizes) -> Markov | None:
  """The sequential part of DSpark, None for a network that has none."""
  table, names = _table(tensors, 'markov_head.markov_w1.weight', sizes), tensors.names()
  if table is None:
    return None
  num_tokens, rank = table
  kind: Literal['vanilla', 'gated', 'rnn'] = 'vanilla'
  if 'markov_head.gate_proj.weight' in names:
    kind = 'gated'
  elif 'markov_head.joint_proj.weight' in names:
    kind = 'rnn'
  if spec.get('markov_head_type', kind) != kind:
    raise ValueError(f'markov_head_type is {plain_name(spec["markov_head_type"])}, and the tensors are those of {kind}')
  return Markov(rank, num_tokens, kind)


def _selector(spec: Mapping[str, Any], tensors: Tensors, sizes: TargetSizes) -> Selector | None:
  """The sequential part of DFlash 2, None for a network that has none."""
  table = _table(tensors, 'candidate_selector.predecessor_codebook', sizes)
  if table is None:
    return None
  num_tokens, rank = table
  return Selector(rank, num_tokens, spec['selector_top_k'])


def _read_one_pass(
  spec: Mapping[str, Any], tensors: Tensors, sizes: TargetSizes, dtype: str | None, **differences: Any
) -> Layout:
  """A network that guesses in one pass.

  Args:
    spec: The content of `config.json`.
    tensors: Its tensors, of which only names and shapes are read.
    sizes: The target's sizes.
    dtype: The dtype to compute in; None for the one of the configuration.
    **differences: Fields of `OnePassConfig` by which formats differ, `feature_layers` among them.
  """
  names, num_layers = tensors.names(), _num_layers(spec, tensors)
  if spec.get('model_type', 'qwen3') == 'qwen3':
    spec = {'num_key_value_heads': 32, 'head_dim': 128, **spec}  # what Qwen3 has where a file says nothing
  num_embedded, width = _embedding(tensors, 'embed_tokens.weight', sizes)
  vocab_size = _num_rows(tensors, 'lm_head.weight') or _num_rows(tensors, 'd2t', 1) or sizes.vocab_size
  backbone = _block(spec, tensors, 'layers.0.', vocab_size, dtype, num_layers=num_layers, known=('is_causal',))
  if width != backbone.embed_dim:
    raise ValueError(f'this head is {backbone.embed_dim} wide, and reads embeddings of width {width}')
  for layer in differences['feature_layers']:
    if not 0 <= layer < sizes.num_layers:
      # Whether the last layer's output is normed depends on the implementation.
      raise ValueError(
        f'the head reads what enters layer {layer} of the target; possible are 0 to {sizes.num_layers - 1}'
      )
  markov, confidence = _markov(spec, tensors, sizes), None
  if 'confidence_head.proj.weight' in names:
    read = _shape(tensors, 'confidence_head.proj.weight')[1]
    confidence = 'hidden' if read == width else 'markov'
    if confidence == 'markov' and markov is None:
      raise ValueError(f'confidence_head.proj.weight reads {read} numbers, and there are {width}')
  convolution = None
  if 'layers.0.attention_conv.base_kernel' in names:
    convolution = Convolution(spec['conv_kernel_size'], spec['conv_group_size'])
  config = OnePassConfig(
    backbone,
    sizes.width,
    num_slots=spec['block_size'],
    mask_id=spec['mask_token_id'],
    markov=markov,
    selector=_selector(spec, tensors, sizes),
    convolution=convolution,
    confidence=confidence,
    num_embedded=num_embedded,
    has_unembedding='lm_head.weight' in names,
    is_reduced='d2t' in names,
    **differences,
  )
  return Layout(config, _one_pass_modules(num_layers))


def _check_architecture(spec: Mapping[str, Any], known: str) -> None:
  """Refuses files whose architecture is not that of the format."""
  for name in spec.get('architectures', []):
    if name != known:
      raise ValueError(f'architecture {plain_name(name)} is unknown in this format; known is {known}')


def _layers_after(spec: Mapping[str, Any]) -> tuple[int, ...]:
  """The target's layers by `target_layer_ids`, which names blocks whose outputs are read; -1 is the embedding."""
  return tuple(layer + 1 for layer in spec['target_layer_ids'])


# Entries of `dflash_config` that change what is computed, and the values that change nothing.
_DFLASH_REQUESTS = {'input_embedding_scale': 1, 'output_multiplier': 1, 'final_logit_softcapping': None}


def _dflash(spec, tensors: Tensors, sizes: TargetSizes, dtype, architecture: str = 'DFlashDraftModel') -> Layout:
  _check_architecture(spec, architecture)
  nested = checked(spec.get('dflash_config', {}), _ONE_PASS_FIELDS, 'dflash_config')
  for name, harmless in _DFLASH_REQUESTS.items():
    if nested.get(name, harmless) != harmless:
      raise ValueError(f'{name} {shown(nested[name])} is not supported')
  spec = {**spec, **nested}
  if spec.get('is_causal'):
    raise ValueError('is_causal True is not supported: slots of a layer without a window attend to all others')
  return _read_one_pass(
    spec, tensors, sizes, dtype, feature_layers=_layers_after(spec), has_causal_windows='is_causal' not in spec
  )


def _dflash2(spec, tensors: Tensors, sizes: TargetSizes, dtype) -> Layout:
  return _dflash(spec, tensors, sizes, dtype, 'DFlash2DraftModel')


def _dspark(spec, tensors: Tensors, sizes: TargetSizes, dtype) -> Layout:
  _check_architecture(spec, 'Qwen3DSparkModel')
  if 'sliding_attention' in spec.get('layer_types', []):
    raise ValueError('layer_types: sliding_attention is not supported in this format')
  return _read_one_pass(spec, tensors, sizes, dtype, feature_layers=_layers_after(spec), guesses_at_root=True)


def _one_pass_speculators(spec, tensors: Tensors, sizes: TargetSizes, dtype) -> Layout:
  return _read_one_pass(
    spec,
    tensors,
    sizes,
    dtype,
    feature_layers=tuple(spec['aux_hidden_state_layer_ids']),
    guesses_at_root=spec.get('sample_from_anchor', spec['speculators_model_type'] == 'dspark'),
    sees_from_root=True,
    has_causal_windows=not spec.get('sliding_window_non_causal', spec['speculators_model_type'] == 'dflash2'),
  )


# Readers of the speculators format, by type.
_SPECULATORS: dict[str, Callable[..., Layout]] = {
  'eagle3': read_eagle3,
  'dflash': _one_pass_speculators,
  'dflash2': _one_pass_speculators,
  'dspark': _one_pass_speculators,
  'peagle': _peagle,
}


def _speculators(spec, tensors: Tensors, sizes: TargetSizes, dtype) -> Layout:
  kind = spec['speculators_model_type']
  if kind not in _SPECULATORS:
    raise ValueError(f'speculators of type {plain_name(kind)} are not read; known are {", ".join(_SPECULATORS)}')
  block = checked(spec['transformer_layer_config'], _FIELDS, 'transformer_layer_config')
  return _SPECULATORS[kind]({**spec, **block}, tensors, sizes, dtype)


def _eagle(spec, tensors: Tensors, sizes: TargetSizes, dtype) -> Layout:
  num_embedded, embedding_dim = _embedding(tensors, 'embed_tokens.weight', sizes)
  has_unembedding = 'lm_head.weight' in tensors.names()
  vocab_size = _num_rows(tensors, 'lm_head.weight') or sizes.vocab_size
  config = HeadConfig(
    _block(spec, tensors, 'layers.0.', vocab_size, dtype),
    sizes.width,
    embedding_dim,
    (-1,),
    join='linear',
    has_features_kernel=False,
    has_input_norms=False,
    has_join_bias=spec.get('bias', True),
    has_output_norm=False,
    num_embedded=num_embedded,
    has_unembedding=has_unembedding,
    is_reduced=False,
  )
  return Layout(config, _modules('layers.0.', join='fc', embedding='embed_tokens', unembedding='lm_head'))


def _mtp(
  spec,
  tensors: Tensors,
  sizes: TargetSizes,
  dtype,
  prefix: str,
  block: str,
  others: dict[str, str],
  **differences: Any,
) -> Layout:
  """A layer for multi-token prediction, which stands among the tensors of its target."""
  names = {name.removeprefix(block) for name in tensors.names() if name.startswith(block)}
  unknown = 'this MTP head has {}, which is not computed here; known are dense blocks of Llama and Qwen'
  for marker, kind in (('mlp.experts.', 'a mixture of experts'), ('self_attn.kv_', 'latent attention')):
    if any(name.startswith(marker) for name in names):
      raise ValueError(unknown.format(kind))
  modules = _modules(block, attention_norm=f'{block}input_layernorm', **others)
  vocab_size = _num_rows(tensors, f'{modules["unembedding"]}.weight') or sizes.vocab_size
  num_embedded, embedding_dim = _embedding(tensors, f'{modules["embedding"]}.weight', sizes)
  config = _block(spec, tensors, block, vocab_size, dtype, **differences)
  if _num_rows(tensors, f'{block}self_attn.q_proj.weight') == 2 * config.num_heads * config.head_dim:
    raise ValueError(unknown.format('gated attention'))
  config = HeadConfig(
    config,
    sizes.width,
    embedding_dim,
    (-1,),
    join='linear',
    has_features_kernel=False,
    has_attention_norm=True,
    is_output_normed=True,
    num_embedded=num_embedded,
    has_unembedding=f'{modules["unembedding"]}.weight' in tensors.names(),
    is_reduced=False,
  )
  return Layout(config, modules, prefix)


def _qwen_mtp(spec, tensors: Tensors, sizes: TargetSizes, dtype) -> Layout:
  others = {
    'join': 'fc', 'embedding_norm': 'pre_fc_norm_embedding', 'hidden_norm': 'pre_fc_norm_hidden', 'output_norm': 'norm',
    'embedding': 'embed_tokens', 'unembedding': 'lm_head',
  }  # fmt: skip
  others = {ours: f'mtp.{theirs}' for ours, theirs in others.items()}
  # The norms of this family hold the gain less 1.
  return _mtp(spec, tensors, sizes, dtype, 'mtp.', 'mtp.layers.0.', others, gain_offset=1.0)


def _deepseek_mtp(spec, tensors: Tensors, sizes: TargetSizes, dtype) -> Layout:
  prefix = head_prefix(DEEPSEEK_MTP, tensors.names())
  others = {
    'join': 'eh_proj', 'embedding_norm': 'enorm', 'hidden_norm': 'hnorm', 'output_norm': 'shared_head.norm',
    'embedding': 'embed_tokens', 'unembedding': 'shared_head.head',
  }  # fmt: skip
  others = {ours: f'{prefix}{theirs}' for ours, theirs in others.items()}
  return _mtp(spec, tensors, sizes, dtype, prefix, prefix, others)


# `(spec, tensors, sizes, dtype) -> Layout` by format, of a configuration as `checked_spec` gives it.
READERS: dict[str, Callable[..., Layout]] = {
  'EAGLE': _eagle,
  'EAGLE-3': read_eagle3,
  'speculators': _speculators,
  DFLASH: _dflash,
  DFLASH2: _dflash2,
  DSPARK: _dspark,
  MTP: _qwen_mtp,
  DEEPSEEK_MTP: _deepseek_mtp,
}


def checked_spec(spec: Any, where: str) -> dict[str, Any]:
  """The `config.json` of a head, with fields of the right kinds.

  Args:
    spec: Its content.
    where: Where it stands, for messages.

  Raises:
    ValueError: It is not an object, or a field is of another kind.
  """
  return checked(spec, _FIELDS, where)


# Ends of names of tensors that are not the weight of a module.
_WITHOUT_WEIGHT = '_codebook', '.base_kernel', 'mask_hidden'


def _name_of(path: str, modules: Mapping[str, str]) -> str:
  """The hub's name of a parameter."""
  if path == 'target_ids':
    return 'd2t'
  if path in modules:
    return modules[path] if modules[path].endswith(_WITHOUT_WEIGHT) else f'{modules[path]}.weight'
  module, leaf = path.rsplit('/', 1)
  kind, _, number = module.partition('/')
  stem = modules[module] if module in modules else f'{modules[kind]}.{number}'
  return f'{stem}.{"bias" if leaf == "bias" else "weight"}'


def is_transposed(path: str) -> bool:
  """Whether the parameter of a path is stored as its transpose."""
  return path.endswith(('unembedding', '/kernel'))


def names_and_shapes(layout: Layout) -> dict[str, tuple[str, jax.ShapeDtypeStruct]]:
  """The hub's name and our shape of every parameter that a file holds, by our path.

  Args:
    layout: The head.
  """
  leaves = jax.tree_util.tree_leaves_with_path(layout.param_shapes)
  paths = {jax.tree_util.keystr(keys, simple=True, separator='/'): leaf for keys, leaf in leaves}
  if not layout.config.has_unembedding:
    del paths['unembedding']
  return {path: (_name_of(path, layout.modules), leaf) for path, leaf in paths.items()}
