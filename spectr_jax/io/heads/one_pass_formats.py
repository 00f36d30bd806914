"""Networks that guess a block in one pass, as z-lab, DeepSpec and speculators publish them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from spectr_jax.io.heads import layout
from spectr_jax.io.hub.config_fields import TOKEN, VOCAB, WIDTH, checked
from spectr_jax.io.untrusted import FLAG, TEXT, name_shown, shown, whole
from spectr_jax.models.one_pass_config import Convolution, Markov, OnePassConfig, Selector

ONE_PASS_FIELDS = {
  'block_size': whole(1, 1024),
  'mask_token_id': TOKEN,
  'target_layer_ids': layout.LAYER_IDS,
  'aux_hidden_state_layer_ids': layout.LAYER_IDS,
  'sample_from_anchor': FLAG,
  'sliding_window_non_causal': FLAG,
  'is_causal': FLAG,
  'markov_head_type': TEXT,
  'conv_kernel_size': whole(1, 1024),
  'conv_group_size': WIDTH,
  'selector_top_k': VOCAB,
}


def one_pass_modules(num_layers: int) -> dict[str, str]:
  """The hub's name of every module of a network that guesses in one pass, by ours."""
  return layout.layer_modules(range(num_layers)) | {
    'features': 'fc', 'features_norm': 'hidden_norm', 'final_norm': 'norm',
    'embedding': 'embed_tokens', 'unembedding': 'lm_head',
    'markov/embedding': 'markov_head.markov_w1', 'markov/unembedding': 'markov_head.markov_w2',
    'markov/gate': 'markov_head.gate_proj', 'markov/joint': 'markov_head.joint_proj',
    'confidence': 'confidence_head.proj', 'selector': 'candidate_selector.hidden_projection',
    'selector/before': 'candidate_selector.predecessor_codebook',
    'selector/after': 'candidate_selector.successor_codebook',
  }  # fmt: skip


def _markov(head: layout.Described) -> Markov | None:
  """The sequential part of DSpark, None for a network that has none."""
  table = head.table_sizes('markov_head.markov_w1.weight')
  if table is None:
    return None
  num_tokens, rank = table
  kind: Literal['vanilla', 'gated', 'rnn'] = 'vanilla'
  if head.has('markov_head.gate_proj.weight'):
    kind = 'gated'
  elif head.has('markov_head.joint_proj.weight'):
    kind = 'rnn'
  named = head.spec.get('markov_head_type', kind)
  if named != kind:
    raise ValueError(f'markov_head_type is {name_shown(named)}, and the tensors are those of {kind}')
  return Markov(rank, num_tokens, kind)


def _read_one_pass(head: layout.Described, **differences: Any) -> layout.Layout:
  if head.spec.get('is_causal'):
    raise ValueError('is_causal True is not supported: slots of a layer without a window attend to all others')
  num_layers = head.num_layers()
  if head.spec.get('model_type', 'qwen3') == 'qwen3':  # has these where a file says nothing
    head = head.saying({'num_key_value_heads': 32, 'head_dim': 128, **head.spec})
  num_embedded, width = head.embedding_sizes()
  vocab_size, spec = head.vocab_size(is_reduced=True), head.spec
  backbone = head.block_config('layers.0.', vocab_size, num_layers=num_layers, known=('is_causal',))
  if width != backbone.embed_dim:
    raise ValueError(f'this head is {backbone.embed_dim} wide, and reads embeddings of width {width}')
  for layer in differences['feature_layers']:
    if not 0 <= layer < head.sizes.num_layers:
      # Whether the last layer's output is normed depends on the implementation.
      raise ValueError(
        f'the head reads what enters layer {layer} of the target; possible are 0 to {head.sizes.num_layers - 1}'
      )
  if differences['feature_layers']:
    layout.check_layer_ids(differences['feature_layers'], head.sizes)
  markov, confidence = _markov(head), None
  if head.has('confidence_head.proj.weight'):
    read = head.shape_of('confidence_head.proj.weight')[1]
    confidence = 'hidden' if read == width else 'markov'
    if confidence == 'markov' and markov is None:
      raise ValueError(f'confidence_head.proj.weight reads {read} numbers, and there are {width}')
  convolution = selector = None
  if head.has('layers.0.attention_conv.base_kernel'):
    convolution = Convolution(spec['conv_kernel_size'], spec['conv_group_size'])
  if table := head.table_sizes('candidate_selector.predecessor_codebook'):
    num_tokens, rank = table
    selector = Selector(rank, num_tokens, spec['selector_top_k'])
  config = OnePassConfig(
    backbone,
    head.sizes.width,
    num_slots=spec['block_size'],
    mask_id=spec['mask_token_id'],
    markov=markov,
    selector=selector,
    convolution=convolution,
    confidence=confidence,
    num_embedded=num_embedded,
    has_unembedding=head.has('lm_head.weight'),
    is_reduced=head.has('d2t'),
    **differences,
  )
  return layout.Layout(config, one_pass_modules(num_layers))


def _check_architecture(spec: Mapping[str, Any], known: str) -> None:
  for name in spec.get('architectures', []):
    if name != known:
      raise ValueError(f'architecture {name_shown(name)} is unknown in this format; known is {known}')


def _layers_after(spec: Mapping[str, Any]) -> tuple[int, ...]:
  """The layers behind the blocks that `target_layer_ids` names; -1 is the embedding."""
  return tuple(layer + 1 for layer in spec['target_layer_ids'])


# Entries of `dflash_config` that change what is computed, and the values that change nothing.
_DFLASH_REQUESTS = {'input_embedding_scale': 1, 'output_multiplier': 1, 'final_logit_softcapping': None}


def read_dflash(head: layout.Described, architecture: str = 'DFlashDraftModel') -> layout.Layout:
  _check_architecture(head.spec, architecture)
  nested = checked(head.spec.get('dflash_config', {}), ONE_PASS_FIELDS, 'dflash_config')
  for name, harmless in _DFLASH_REQUESTS.items():
    if nested.get(name, harmless) != harmless:
      raise ValueError(f'{name} {shown(nested[name])} is not supported')
  head = head.saying(nested)
  return _read_one_pass(head, feature_layers=_layers_after(head.spec), has_causal_windows='is_causal' not in head.spec)


def read_dspark(head: layout.Described) -> layout.Layout:
  _check_architecture(head.spec, 'Qwen3DSparkModel')
  if 'sliding_attention' in head.spec.get('layer_types', []):
    raise ValueError('layer_types: sliding_attention is not supported in this format')
  return _read_one_pass(head, feature_layers=_layers_after(head.spec), guesses_at_root=True)


def read_one_pass_speculators(head: layout.Described) -> layout.Layout:
  spec, kind = head.spec, head.spec['speculators_model_type']
  return _read_one_pass(
    head,
    feature_layers=tuple(spec['aux_hidden_state_layer_ids']),
    guesses_at_root=spec.get('sample_from_anchor', kind == 'dspark'),
    sees_from_root=True,
    has_causal_windows=not spec.get('sliding_window_non_causal', kind == 'dflash2'),
  )
