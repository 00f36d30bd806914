"""Verifiers of other projects under the conformance kit; docs/tables/public_verifiers.md has results.

  python -m benchmarks.public_verifiers --verifier=flashspec

Each needs its project, most of them without dependencies. Nothing of them is changed but what a
docstring says.
"""

import functools
import types
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import engine_stubs
from common import command_line
from spectr_jax import TokenTree
from spectr_jax.testing import check_verifier


def make_tpu_inference(sampler, metadata_class):
  """tpu-inference: flat rows of guesses, and after the last of them a token that plain sampling has drawn."""

  def tpu_inference(seed, tokens, lengths, draft_probs, target_logits, target_probs, temperature, top_k, top_p):
    num_rows, depth = tokens.shape
    is_there = np.arange(depth) < lengths[:, None]

    def packed(array):
      rest = np.zeros((num_rows * depth - is_there.sum(), *array.shape[2:]), array.dtype)
      return jnp.asarray(np.concatenate([array[is_there], rest]))

    sums = np.cumsum(target_probs[np.arange(num_rows), lengths], axis=1, dtype=np.float64)
    bonus = (np.random.default_rng(seed).random((num_rows, 1)) * sums[:, -1:] >= sums).sum(axis=1)
    metadata = metadata_class(
      # The engine marks greedy requests by a temperature of -1.
      temperature=jnp.where(temperature > 0, temperature, -1), top_k=jnp.asarray(top_k), top_p=jnp.asarray(top_p),
      do_sampling=True,
    )  # fmt: skip
    out = sampler(
      packed(tokens), jnp.asarray(lengths), None if draft_probs is None else packed(draft_probs),
      packed(np.nan_to_num(target_logits[:, :-1], neginf=-1e9)), jnp.asarray(bonus, jnp.int32), metadata,
      jax.random.key(seed),
    )  # fmt: skip
    out, emitted = np.asarray(out), np.full((num_rows, depth + 1), -1, np.int32)
    emitted[:, :-1][is_there] = out[: is_there.sum()]
    emitted[np.arange(num_rows), lengths] = out[num_rows * depth :]
    return emitted

  return tpu_inference


@functools.cache
def _tpu_inference():
  engine_stubs.install_tpu_inference()
  from tpu_inference.layers.jax.sample.rejection_sampler import RejectionSampler
  from tpu_inference.layers.jax.sample.sampling_metadata import TPUSupportedSamplingMetadata

  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('data', 'model'))
  return make_tpu_inference(RejectionSampler(mesh), TPUSupportedSamplingMetadata)


def tpu_inference(seed, tokens, lengths, draft_probs, target_logits, target_probs, temperature, top_k, top_p):
  """`RejectionSampler` of tpu-inference."""
  return _tpu_inference()(seed, tokens, lengths, draft_probs, target_logits, target_probs, temperature, top_k, top_p)


@functools.cache
def _levanter():
  engine_stubs.install_levanter()
  from levanter.inference.speculative import verify_deterministic_proposals

  return jax.jit(verify_deterministic_proposals, static_argnames='logprobs_mode')


def levanter(key, tokens, lengths, target_probs):
  """`verify_deterministic_proposals` of Levanter, at temperature 1; guesses are given."""
  num_rows = len(tokens)
  logits, ones = jnp.log(jnp.asarray(target_probs)), jnp.ones(num_rows)
  full, none = jnp.full(num_rows, tokens.shape[1] + 1), jnp.zeros(num_rows, bool)
  return _levanter()(logits, tokens, lengths, ones, full, none, key=key, logprobs_mode='raw_logprobs').token_ids


def transformers(seed, tokens, lengths, draft_probs, target_probs):
  """`_speculative_sampling` of transformers, row by row; a row without guesses samples from the target."""
  import torch
  from transformers.generation.utils import _speculative_sampling

  torch.manual_seed(seed)
  emitted = torch.full((len(tokens), tokens.shape[1] + 1), -1)
  tokens, draft_logits, target_logits = tokens.long(), draft_probs.log(), target_probs.log()
  for row, length in enumerate(lengths.tolist()):
    if length:
      guesses, drafted, target = (x[row : row + 1, : length + more] for x, more in (
        (tokens, 0), (draft_logits, 0), (target_logits, 1)
      ))  # fmt: skip
      kept, _ = _speculative_sampling(guesses, drafted, length, target)
    else:
      kept = torch.multinomial(target_probs[row, :1], 1)
    emitted[row, : kept.shape[1]] = kept[0]
  return emitted


def flashspec(seed, tokens, lengths, draft_probs, target_probs):
  """`rejection_step` of flashspec, or `rejection_step_onehot` for given guesses; whole drafts alone."""
  import torch

  engine_stubs.install_flashspec()
  from flashspec.sampling.rejection import rejection_step, rejection_step_onehot

  generator = torch.Generator().manual_seed(seed)
  guesses, target = tokens.clamp(min=0).long(), target_probs.log()
  if draft_probs is None:
    kept = rejection_step_onehot(guesses, target, lengths, generator=generator)
  else:
    kept = rejection_step(guesses, draft_probs.log(), target, generator=generator)
  places = torch.arange(tokens.shape[1] + 1)
  padded = torch.nn.functional.pad(tokens.long(), (0, 1), value=-1)
  return torch.where(places < kept[:, :1], padded, torch.where(places == kept[:, :1], kept[:, 1:], -1))


def _table_model(logits):
  """A model whose logits after the first token, and after every guess, are the rows of `[L + 1, V]`."""
  return lambda ids: types.SimpleNamespace(logits=logits[None, : ids.shape[1]])


def _rounds(module, step, seed, tokens, draft_probs, target_probs):
  """Rounds of sequential-speculative-decoding, row by row: its models are tables, and it drafts the kit's guesses."""
  import torch

  torch.manual_seed(seed)
  draw, emitted = module.sample_from_probs, torch.full((len(tokens), tokens.shape[1] + 1), -1)
  tokens = tokens.long()
  for row, guesses in enumerate(tokens):
    waiting = list(guesses)

    def drafted_or_drawn(probs, waiting=waiting):
      return waiting.pop(0) if waiting else draw(probs)

    draft, target = (_table_model(laws[row].log()) for laws in (draft_probs, target_probs))
    with unittest.mock.patch.object(module, 'sample_from_probs', drafted_or_drawn):
      start = torch.zeros((1, 1), dtype=torch.long)
      kept = step(draft, target, start, len(guesses), draft_temperature=1.0, target_temperature=1.0)[0][0, 1:]
    emitted[row, : len(kept)] = kept
  return emitted


def seqspecdecod_standard(seed, tokens, draft_probs, target_probs):
  """`standard_speculative_step` of sequential-speculative-decoding; whole drafts alone."""
  engine_stubs.install_seqspecdecod()
  from seqspecdecod import standard_sd

  return _rounds(standard_sd, standard_sd.standard_speculative_step, seed, tokens, draft_probs, target_probs)


def seqspecdecod_capped(seed, tokens, draft_probs, target_probs):
  """`capped_hsd_step` of sequential-speculative-decoding; whole drafts alone."""
  engine_stubs.install_seqspecdecod()
  from seqspecdecod import capped_hsd

  return _rounds(capped_hsd, capped_hsd.capped_hsd_step, seed, tokens, draft_probs, target_probs)


@functools.cache
def _hsd():
  import torch

  file = 'transformers/generation/utils.py'
  return engine_stubs.function_of(file, '_speculative_sampling', torch=torch, F=torch.nn.functional)


def _hsd_round(guesses, draft_probs, target_probs):
  """The tokens that one row keeps."""
  import torch

  return _hsd()(
    guesses[None], draft_probs.log()[None], len(guesses), target_probs.log()[None], torch.zeros(1, dtype=torch.bool),
    backward=True, clever=True, stop=lambda *_, **__: False,
  )[0][0]  # fmt: skip


def hsd(seed, tokens, draft_probs, target_probs):
  """`_speculative_sampling` of Hierarchical-Speculative-Decoding, `backward` and `clever`; whole drafts alone."""
  import torch

  torch.manual_seed(seed)
  emitted = torch.full((len(tokens), tokens.shape[1] + 1), -1)
  for row, (guesses, draft, target) in enumerate(zip(tokens.long(), draft_probs, target_probs)):
    kept = _hsd_round(guesses, draft, target)
    emitted[row, : len(kept)] = kept
  return emitted


@functools.cache
def _hsd_eagle():
  import torch

  return engine_stubs.function_of('EAGLE-3H/eagle/model/utils.py', 'evaluate_posterior', torch=torch)


def hsd_eagle(seed, tokens, target_probs):
  """`evaluate_posterior` of Hierarchical-Speculative-Decoding's EAGLE-3, `hsd`, on one path; guesses are given."""
  import torch

  torch.manual_seed(seed)
  emitted = torch.full((len(tokens), tokens.shape[1] + 1), -1)
  for row, (guesses, target) in enumerate(zip(tokens.long(), target_probs)):
    path = torch.nn.functional.pad(guesses, (1, 0))[None]
    _, length, probs = _hsd_eagle()(target.log()[None], path, lambda _, logits: logits, hsd=True)
    emitted[row, :length] = guesses[:length]
    emitted[row, length] = torch.multinomial(probs, 1)
  return emitted


_TORCH, _WHOLE = {'arrays': 'torch'}, {'arrays': 'torch', 'is_ragged': False}
_OPTIONS = {
  tpu_inference: {},
  levanter: {'children': 'given'},
  transformers: _TORCH,
  flashspec: _WHOLE,
  seqspecdecod_standard: _WHOLE,
  seqspecdecod_capped: _WHOLE,
  hsd: _WHOLE,
  hsd_eagle: _WHOLE | {'children': 'given'},
}

if __name__ == '__main__':
  _BY_NAME = {function.__name__: function for function in _OPTIONS}
  _VERIFIER = flags.DEFINE_enum('verifier', None, [*_BY_NAME], 'Whose verification.', required=True)
  _CHILDREN = flags.DEFINE_enum('children', None, ('independent', 'given'), 'How guesses are drawn, if not as usual.')
  _NUM_SAMPLES = flags.DEFINE_integer('num_samples', 20_000, 'Rows of every kind.', lower_bound=1)

  def main():
    function = _BY_NAME[_VERIFIER.value]
    options = _OPTIONS[function] | ({'children': _CHILDREN.value} if _CHILDREN.value else {})
    print(check_verifier(function, tree=TokenTree.chains(1, 2), num_samples=_NUM_SAMPLES.value, **options))

  command_line.run(main)
