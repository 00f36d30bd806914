"""Drafters of one pass beside the code of `speculators`, on tiny random checkpoints that it makes.

Backbone states, logits of every slot and estimates of acceptance of whole texts, computed at once, beside those of
drafting: ragged prompts, before and after a partial acceptance, and with a cache that was cropped. What `speculators`
trains is in its own format; the same tensors are also read in the formats of DFlash and DSpark.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_heads import CANDIDATES, GROUP, HEADS, IDS, KV_HEADS, MASK, MLP, RANK, SLOTS, VD, D, V, tiny_target
from safetensors.torch import load_file, save_file

import spectr_jax
from spectr_jax.draft import DraftContext
from spectr_jax.draft.one_pass_drafter import config_of
from spectr_jax.models import one_pass
from tests.parity.rounds import TEMPERATURE, features_of, played

torch = pytest.importorskip('torch', reason='needs the extra parity')
pytest.importorskip('speculators', reason='needs speculators, see .ci/run')
pytestmark = [pytest.mark.parity, pytest.mark.usefixtures('highest')]

LAYERS_READ = [0, 3]
CLOSE = {'rtol': 1e-4, 'atol': 1e-4}


def _layer_config(layer_types):
  from transformers import Qwen3Config

  config = Qwen3Config(
    vocab_size=V, hidden_size=D, intermediate_size=MLP, num_hidden_layers=len(layer_types), num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, head_dim=D // HEADS, rms_norm_eps=1e-5, use_sliding_window=True, sliding_window=3,
    layer_types=layer_types, tie_word_embeddings=False,
  )  # fmt: skip
  config._attn_implementation = 'eager'
  return config


def _randomized(model, seed, *, is_reduced):
  """The model with random weights, and with the tokens `IDS` alone where it is reduced."""
  generator, ids = torch.Generator().manual_seed(seed), torch.tensor(IDS)
  with torch.no_grad():
    for param in model.parameters():
      noise = torch.randn(param.shape, generator=generator)
      param.copy_(1 + 0.3 * noise if param.ndim == 1 else 1.5 * param.shape[-1] ** -0.5 * noise)
  if is_reduced:
    model.load_vocab_mappings(torch.isin(torch.arange(V), ids), ids - torch.arange(VD))
  return model


def _model(target, kind, *, layer_types=('full_attention', 'full_attention'), is_reduced=False, **options):
  """A model of `speculators` with random weights and the target's embedding and output head."""
  from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
  from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
  from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

  of_kind = {
    'dflash': (DFlashDraftModel, DFlashSpeculatorConfig),
    'dflash2': (DFlash2DraftModel, DFlash2SpeculatorConfig),
    'dspark': (DSparkDraftModel, DSparkSpeculatorConfig),
  }
  make, make_config = of_kind[kind]
  if kind == 'dspark':
    options = {'markov_rank': RANK} | options
  elif kind == 'dflash2':
    options |= _SELECTOR
  config = make_config(
    transformer_layer_config=_layer_config(list(layer_types)), draft_vocab_size=VD if is_reduced else V,
    block_size=SLOTS, aux_hidden_state_layer_ids=LAYERS_READ, mask_token_id=MASK, **options,
  )  # fmt: skip
  model = _randomized(make(config), 0, is_reduced=is_reduced)
  rows = torch.tensor(np.asarray(target.params['embedding']))  # it is the output head as well
  model.embed_tokens.weight.data.copy_(rows)
  model.lm_head.weight.data.copy_(rows[torch.tensor(IDS)] if is_reduced else rows)
  return model.eval()


def _write_in_own_format(folder, model, spec, *, is_self_contained):
  """The tensors of a model in the format of DFlash or DSpark."""
  left_out = ('verifier_', 't2d', 'd2t') + (() if is_self_contained else ('embed_tokens', 'lm_head'))
  tensors = {name: x.contiguous().clone() for name, x in model.state_dict().items() if not name.startswith(left_out)}
  sizes = {
    'model_type': 'qwen3', 'hidden_size': D, 'intermediate_size': MLP, 'num_hidden_layers': 2, 'vocab_size': V,
    'num_attention_heads': HEADS, 'num_key_value_heads': KV_HEADS, 'head_dim': D // HEADS, 'rms_norm_eps': 1e-5,
    'layer_types': ['full_attention'] * 2, 'block_size': SLOTS,
  }  # fmt: skip
  folder.mkdir()
  save_file(tensors, folder / 'model.safetensors')
  (folder / 'config.json').write_text(json.dumps(sizes | spec))
  return folder


_READ = {'target_layer_ids': [layer - 1 for layer in LAYERS_READ], 'mask_token_id': MASK}


def _as_dspark(folder, model):
  spec = _READ | {
    'architectures': ['Qwen3DSparkModel'], 'markov_rank': RANK, 'markov_head_type': model.config.markov_head_type,
    'enable_confidence_head': True, 'confidence_head_with_markov': True, 'num_anchors': 512,
  }  # fmt: skip
  return _write_in_own_format(folder, model, spec, is_self_contained=True)


def _as_dflash(folder, model):
  spec = {'architectures': ['DFlashDraftModel'], 'num_target_layers': 5, 'dflash_config': _READ}
  return _write_in_own_format(folder, model, spec, is_self_contained=False)


def _as_speculators(folder, model):
  model.save_pretrained(folder)
  return folder


def _as_dflash2(folder, model):
  spec = {'architectures': ['DFlash2DraftModel'], 'is_causal': False, 'dflash_config': _READ | _SELECTOR}
  return _write_in_own_format(folder, model, spec, is_self_contained=False)


_SELECTOR = {'conv_kernel_size': 2, 'conv_group_size': GROUP, 'selector_rank': RANK, 'selector_top_k': CANDIDATES}
_SLIDING = {'layer_types': ('sliding_attention', 'full_attention')}
# Name -> the model's kind and options, and what writes it.
_CASES = {
  'dflash': ('dflash', _SLIDING, _as_speculators),
  'dflash, reduced': ('dflash', {'is_reduced': True}, _as_speculators),
  'dflash, windows to both sides': ('dflash', _SLIDING | {'sliding_window_non_causal': True}, _as_speculators),
  'dflash, as DFlash': ('dflash', {}, _as_dflash),
  'dflash2': ('dflash2', _SLIDING, _as_speculators),
  'dflash2, as DFlash 2': ('dflash2', {}, _as_dflash2),
  'dspark': ('dspark', _SLIDING, _as_speculators),
  'dspark, reduced': ('dspark', {'is_reduced': True, 'confidence_head_with_markov': False}, _as_speculators),
  'dspark, as DSpark': ('dspark', {}, _as_dspark),
  'dspark from slot 1': ('dspark', {'sample_from_anchor': False, 'enable_confidence_head': False}, _as_speculators),
  **{
    f'{kind}{written}': ('dspark', options | {'markov_head_type': kind}, write)
    for kind in ('gated', 'rnn')
    for written, options, write in (
      ('', _SLIDING, _as_speculators),
      (', reduced, from slot 1', {'is_reduced': True, 'sample_from_anchor': False}, _as_speculators),
      (', as DSpark', {}, _as_dspark),
    )
  },
}


@torch.no_grad()
def _reference(model, text, features, guesses):
  """States `[W, D]`, logits `[W, V]` and estimates `[W]` of the block behind a text, if it holds these guesses."""
  size, num_slots = len(text), model.block_size
  tokens = [*text, *guesses, *[0] * (num_slots - len(guesses))]
  hidden = torch.zeros(1, len(tokens), len(LAYERS_READ) * D, dtype=torch.float64)
  hidden[0, : size - 1] = torch.tensor(np.asarray(features, np.float64)).reshape(size - 1, len(LAYERS_READ) * D)
  anchor = torch.zeros(1, len(tokens))
  anchor[0, size - 1] = 1
  ids = torch.tensor([tokens])
  last = torch.zeros(1, len(tokens), D, dtype=torch.float64)
  states, logits, *_ = model._backbone_forward(hidden, ids, anchor, last, torch.zeros_like(ids), max_anchors=1)
  estimates, before = None, ids[:, size - 1 : size - 1 + num_slots]
  if not model.config.sample_from_anchor:
    before = torch.cat([before[:, :1], before[:, :-1]], 1)
  if getattr(model, 'candidate_selector', None) is not None:
    candidates, scores = model.candidate_selector.select(logits, states, before)
    logits = torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)
  if getattr(model, 'markov_head', None) is not None:
    logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=states)
    if model.confidence_head is not None:
      read = states
      if model.config.confidence_head_with_markov:
        read = torch.cat([states, model.markov_head.prev_embeddings(before)], -1)
      estimates = model.confidence_head(read)[0].sigmoid().numpy()
  full = torch.full((num_slots, V), -torch.inf, dtype=torch.float64)
  full[:, torch.tensor(IDS) if model.use_draft_vocab else torch.arange(V)] = logits[0]
  return states[0].numpy(), full, estimates


def _ours(drafter, target, cache, text, guesses):
  """The same by the drafter's own network after the context in row 0 of its cache."""
  params, config = drafter.params, config_of(drafter)
  slots = jnp.array([[text[-1], *[MASK] * (SLOTS - 1)]])
  own = params.get('embedding', target.params['embedding'])
  states = one_pass.run_block(params, config, own[slots], cache)[0]
  estimates = None
  if config.confidence is not None:
    tokens = [text[-1], *guesses] if config.guesses_at_root else [text[-1], text[-1], *guesses]
    before = one_pass.embed_before(params, config, jnp.array(tokens[:SLOTS]))
    estimates = jax.nn.sigmoid(one_pass.confidence_logits(params, config, states, before))
  return states, estimates


def _row(cache, row):
  """One row of a cache, as a cache."""
  return jax.tree.map(lambda x: x[row : row + 1] if x.ndim else x, cache)


def _assert_same_probs(found, logits):
  wanted = (logits / TEMPERATURE).softmax(-1).numpy()
  np.testing.assert_array_equal(found > 0, wanted > 0)
  np.testing.assert_allclose(np.log(found[wanted > 0]), np.log(wanted[wanted > 0]), **CLOSE)


@pytest.mark.parametrize('name', _CASES)
def test_states_distributions_and_estimates(tmp_path, name):
  target = tiny_target()
  kind, options, write = _CASES[name]
  model = _model(target, kind, **options)
  drafter = spectr_jax.load_drafter(write(tmp_path / 'head', model), target)
  model = model.double()
  assert drafter.feature_layers == tuple(LAYERS_READ)
  assert drafter.max_depth == (SLOTS if model.config.sample_from_anchor else SLOTS - 1)
  first, read = SLOTS - drafter.max_depth, features_of(target, drafter.feature_layers)

  def assert_same(cache, text, guesses, probs=None):
    states, logits, estimates = _reference(model, text, read(text), guesses)
    found, own_estimates = _ours(drafter, target, cache, text, guesses)
    np.testing.assert_allclose(found, states, **CLOSE)
    assert (estimates is None) == (own_estimates is None)
    if estimates is not None:
      np.testing.assert_allclose(own_estimates, estimates, **CLOSE)
    if probs is not None:
      _assert_same_probs(probs, logits[first:])

  for state, rows in played(target, drafter, drafter.max_depth, (9, 1, 5, 7)):
    for row, (text, guesses, probs) in enumerate(rows):
      assert_same(_row(state.draft_state, row), text, guesses[: SLOTS - 1], probs)

  # Another prompt keeps the first tokens of a text, crops the cache and goes on.
  other = [*rows[0][0][:6], 1, 2, 3]
  features = jnp.pad(read(other), ((0, 1), (0, 0), (0, 0)))[None]
  context = DraftContext(jnp.array([len(other)]), target, jnp.array([other]), features)
  cache = drafter.read(_row(state.draft_state, 0), context, jnp.array([6]), 3)
  assert cache.lengths.tolist() == [len(other) - 1]
  assert_same(cache, other, [4] * (SLOTS - 1))


_WRITTEN = [name for name, case in _CASES.items() if case[2] is _as_speculators and case[0] != 'dflash2']


@pytest.mark.parametrize('name', _WRITTEN)
def test_what_is_written_is_what_speculators_writes(tmp_path, name):
  target = tiny_target()
  kind, options, write = _CASES[name]
  model = _model(target, kind, **options)
  drafter = spectr_jax.load_drafter(write(tmp_path / 'theirs', model), target)
  spectr_jax.save_drafter(tmp_path / 'ours', drafter, param_dtype='float32')
  theirs, ours = (load_file(tmp_path / each / 'model.safetensors') for each in ('theirs', 'ours'))
  assert ours.keys() <= theirs.keys()
  for tensor, found in ours.items():
    assert torch.equal(found.to(theirs[tensor].dtype), theirs[tensor]), tensor
  read = type(model.config).from_pretrained(tmp_path / 'ours')
  for field in json.loads((tmp_path / 'ours' / 'config.json').read_text()):
    if field not in ('dtype', 'info', 'transformer_layer_config', 'target_hidden_size'):
      assert getattr(read, field) == getattr(model.config, field), field
  for field in ('hidden_size', 'num_hidden_layers', 'layer_types', 'num_key_value_heads', 'head_dim', 'rms_norm_eps'):
    assert getattr(read.transformer_layer_config, field) == getattr(model.config.transformer_layer_config, field), field


class _Enough(Exception):  # noqa: N818 - no error
  pass


@torch.no_grad()
def _logits_of_peagle(model, text, features, num_guesses, monkeypatch):
  """`[L, V]`, of the last token of a text and of the mask tokens behind it."""
  from speculators.models.peagle import core

  num_pairs = len(text) - 1
  anchors = torch.cat([torch.arange(num_pairs), torch.full((num_guesses - 1,), num_pairs - 1)])
  depths = torch.cat([torch.zeros(num_pairs, dtype=torch.long), torch.arange(1, num_guesses)])
  monkeypatch.setattr(core, 'generate_cod_sample_indices', lambda **_: (anchors, depths))
  found = []

  def keep(module, inputs, output):
    found.append(output)
    raise _Enough

  ids = torch.tensor([[*text[1:], *[0] * num_guesses]])
  hidden = torch.zeros(1, ids.shape[1], 3 * D, dtype=torch.float64)
  hidden[0, :num_pairs] = torch.tensor(np.asarray(features, np.float64)).reshape(num_pairs, 3 * D)
  handle = model.lm_head.register_forward_hook(keep)
  with pytest.raises(_Enough):
    model(hidden, ids, torch.zeros_like(ids), verifier_last_hidden_states=torch.zeros(1, ids.shape[1], D))
  handle.remove()
  full = torch.full((num_guesses, V), -torch.inf, dtype=torch.float64)
  full[:, torch.tensor(IDS)] = found[0][0, num_pairs - 1 :]
  return full


@pytest.mark.parametrize(
  'options', [{}, {'norm_before_fc': True, 'norm_before_residual': True}], ids=['plain', 'normed']
)
def test_distributions_of_p_eagle(tmp_path, monkeypatch, options):
  from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig

  target, depth = tiny_target(), 4
  config = PEagleSpeculatorConfig(
    transformer_layer_config=_layer_config(['full_attention'] * 2), draft_vocab_size=VD,
    eagle_aux_hidden_state_layer_ids=[1, 3, 4], mask_token_id=MASK, **options,
  )  # fmt: skip
  model = _randomized(PEagleDraftModel(config), 1, is_reduced=True)
  model.save_pretrained(tmp_path / 'head')
  drafter = spectr_jax.load_drafter(tmp_path / 'head', target)
  model = model.eval().double()

  read = features_of(target, drafter.feature_layers)
  for _, rows in played(target, drafter, depth, (9, 2, 5, 7)):
    for text, _, probs in rows:
      _assert_same_probs(probs, _logits_of_peagle(model, text, read(text), depth, monkeypatch))
