"""The script that measures speed on a GPU in pieces, with tiny settings on whatever is here."""

import json
import os
import pathlib
import subprocess
import sys
import tarfile

import pytest
from hub_specs import SPECS

ROOT = pathlib.Path(__file__).parents[1]
SIZES = SPECS['llama'] | {'vocab_size': 64, 'max_position_embeddings': 512}


def _script(out, **more):
  env = {**os.environ, 'OUT': str(out), 'PYTHON': sys.executable, 'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true', **more}
  command = ROOT / 'benchmarks' / 'gpu_speed.sh'
  return subprocess.run([command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=550)


def _whole(out, **more):
  """Runs the script until it is done."""
  for _ in range(8):
    ended = _script(out, **more)
    if ended.returncode == 0:
      assert ended.stdout.splitlines()[-1] == 'all done'
      return ended.stdout
    assert ended.returncode == 3, ended
  raise AssertionError(ended)


@pytest.mark.slow
def test_models_from_disk(tmp_path):
  options = {
    'BATCHES': '1 2', 'SIZES': 'none', 'SHAPES': 'none',
    'DECODE': '--method=autoregressive,spectr --num_prompts=2 --max_new_tokens=4 --num_drafts=2 --draft_length=1',
  }  # fmt: skip
  ended = _script(tmp_path, SECONDS_PER_PIECE='5', **options)
  assert (ended.returncode, ended.stdout.splitlines()[-1]) == (3, 'out of time: run again')
  _whole(tmp_path, **options)
  for batch in (1, 2):
    found = json.loads((tmp_path / f'batch_{batch}.json').read_text())
    assert found['run']['flags']['batch_size'] == batch
  assert list((tmp_path / 'profile').rglob('*.xplane.pb'))
  before = (tmp_path / 'batch_2.json').stat().st_mtime
  _whole(tmp_path, **options)
  assert (tmp_path / 'batch_2.json').stat().st_mtime == before


@pytest.mark.slow
def test_random_models_of_public_sizes(tmp_path):
  for name, sizes in {'target': {'num_hidden_layers': 6}, 'draft': {'tie_word_embeddings': True}}.items():
    (tmp_path / name).mkdir()
    (tmp_path / name / 'config.json').write_text(json.dumps(SIZES | sizes))
  out = tmp_path / 'out'
  sizes = (
    f'--target_config={tmp_path}/target --draft_config={tmp_path}/draft --head --dtype=bfloat16 --batch_size=1'
    ' --num_runs=1'
  )
  options = {'SIZES': sizes, 'SHAPES': 'none', 'BATCHES': 'none'}
  ended = _script(out, SECONDS_PER_PIECE='45', **options)
  assert (ended.returncode, ended.stdout.splitlines()[-1]) == (3, 'out of time: run again')
  said = _whole(out, **options)
  assert 'transformers are left out' in said  # for want of torch, or of CUDA
  results = json.loads((out / 'sizes.json').read_text())['results']
  rounds = [
    f'{method} {shape}, {draft}, 1 rows'
    for draft in ('draft', 'head')
    for shape in ('1 x 4', '4 x 8', '4 x 16')
    for method in ('race_traversal', 'spectr')
  ]
  assert set(results) == {'spectr_jax with prefill, 1 row', 'steps, 1 rows', *rounds, 'profile'}
  with tarfile.open(out / 'sizes_profile.tar.gz') as archive:
    assert any(name.endswith('.xplane.pb') for name in archive.getnames())
  before = (out / 'sizes.json').stat().st_mtime
  _whole(out, **options)
  assert (out / 'sizes.json').stat().st_mtime == before
