"""The adapter for tpu-inference: the engine's own suite with ours in its place, and both under the conformance kit.

pip install --no-deps tpu-inference==0.32.0 && python -m pytest -m engines tests/engines
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import engine_stubs, public_verifiers
from spectr_jax import SamplingParams, TokenTree, logits_to_probs
from spectr_jax.testing import check_verifier

_FOLDER = engine_stubs.find('tpu_inference')
_ROOT = pathlib.Path(__file__).parents[2]
pytestmark = [
  pytest.mark.engines,
  pytest.mark.skipif(_FOLDER is None, reason='needs tpu-inference'),
  pytest.mark.usefixtures('optimized'),
]
_DEPTH = 2
_CONFTEST = """
import sys
sys.path.insert(0, {root!r})
from benchmarks import engine_stubs
engine_stubs.install_tpu_inference()
from tpu_inference.layers.jax.sample import rejection_sampler
from integrations.tpu_inference import RejectionSampler
rejection_sampler.RejectionSampler = RejectionSampler
"""


@pytest.fixture(scope='module')
def samplers():
  engine_stubs.install_tpu_inference()
  from tpu_inference.layers.jax.sample import rejection_sampler as theirs
  from tpu_inference.layers.jax.sample.sampling_metadata import TPUSupportedSamplingMetadata

  from integrations.tpu_inference import RejectionSampler

  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('data', 'model'))
  return theirs.RejectionSampler(mesh), RejectionSampler(mesh, _DEPTH), TPUSupportedSamplingMetadata


def _suite_of(folder):
  """The engine's own test of its sampler, which its package has beside it."""
  return folder.parent / 'tests' / 'layers' / 'jax' / 'sample' / 'test_rejection_sampler.py'


def test_the_engines_own_suite_passes_with_ours_in_its_place(tmp_path):
  shutil.copy(_suite_of(_FOLDER), tmp_path)
  (tmp_path / 'conftest.py').write_text(_CONFTEST.format(root=str(_ROOT)))
  ran = subprocess.run(
    [sys.executable, '-m', 'pytest', '-q', '-o', 'addopts=', f'--rootdir={tmp_path}', str(tmp_path)],
    cwd=tmp_path, env={**os.environ, 'JAX_PLATFORMS': 'cpu'}, capture_output=True, text=True, timeout=1200,
  )  # fmt: skip
  assert re.search(r'\b52 passed\b', ran.stdout), ran.stdout[-3000:]
  assert 'failed' not in ran.stdout


def _plain_probs(logits, temperature, top_k, top_p):
  """The distributions of the engine's plain sampling, by its own filters in their order; the argmax of greedy rows."""
  from tpu_inference.layers.common.binary_search import topk_mask, topp_mask

  logits = jnp.asarray(logits) / jnp.where(temperature > 0, temperature, 1)[:, None]
  logits = jnp.where((top_k > 0)[:, None], topk_mask(logits, jnp.asarray(top_k), replace_val=-1e12), logits)
  logits = jnp.where((top_p < 1)[:, None], topp_mask(logits, jnp.asarray(top_p), replace_val=-1e12), logits)
  greedy = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
  return np.asarray(jnp.where((temperature > 0)[:, None], jax.nn.softmax(logits), greedy))


def _check(sampler, metadata_class, **options):
  function = public_verifiers.make_tpu_inference(sampler, metadata_class)
  return check_verifier(function, tree=TokenTree.chains(1, _DEPTH), plain_fn=_plain_probs, num_samples=5_000, **options)


@pytest.mark.parametrize('children', ['independent', 'given'])
def test_ours_is_exact_in_mixed_batches(samplers, children):
  _, ours, metadata_class = samplers
  report = _check(ours, metadata_class, children=children)
  assert report.is_passed, report


def test_the_kit_finds_what_the_released_sampler_does(samplers):
  """Greedy rows are divided by their marker of a temperature, and filters come before the temperature."""
  theirs, _, metadata_class = samplers
  failed = {check.compared for check in _check(theirs, metadata_class).checks if not check.is_passed}
  assert 'temperature 0' in failed
  assert 'temperature 0.7, top-p 0.8' in failed
  assert not {'no zeros', 'disjoint supports'} & failed


def test_whole_blocks_keep_more(samplers):
  theirs, ours, metadata_class = samplers
  rng, num_rows, vocab_size = np.random.default_rng(0), 4096, 16
  p, q = (rng.dirichlet(np.full(vocab_size, 0.5), (num_rows, _DEPTH)).astype(np.float32) for _ in range(2))
  sums = np.cumsum(p, axis=-1)
  tokens = (rng.random((num_rows, _DEPTH, 1)) * sums[..., -1:] >= sums).sum(axis=-1).astype(np.int32)
  with np.errstate(divide='ignore'):
    logits = np.maximum(np.log(q), -1e9)
  ones = jnp.ones(num_rows)
  metadata = metadata_class(temperature=ones, top_k=jnp.zeros(num_rows, jnp.int32), top_p=ones, do_sampling=True)
  arrays = [x.reshape(-1, *x.shape[2:]) for x in (tokens, p, logits)]
  lengths = jnp.full(num_rows, _DEPTH)
  bonus = jnp.zeros(num_rows, jnp.int32)
  kept = {}
  for name, sampler in (('theirs', theirs), ('ours', ours)):
    out = sampler(arrays[0], lengths, arrays[1], arrays[2], bonus, metadata, jax.random.key(0))
    kept[name] = float(np.mean(np.asarray(out) >= 0) * len(out) / num_rows)
  assert kept['ours'] > kept['theirs'] + 0.01, kept
  np.testing.assert_allclose(logits_to_probs(jnp.asarray(logits), SamplingParams(ones)), q, atol=1e-6)
