"""The script that trains the family in pieces, with tiny settings on whatever is here."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from spectr_jax import load_model

ROOT = pathlib.Path(__file__).parents[1]

_TINY = (
  '--config.vocab_size=300 --config.seq_len=24 --config.batch_size=4 --config.num_steps=40 --config.warmup_steps=2'
  ' --config.eval_every=10 --config.checkpoint_every=5 --config.log_every=5 --config.eval_batches=2'
  ' --config.held_out_percent=10 --config.model.embed_dim=16 --config.model.num_layers=1 --config.model.num_heads=2'
  ' --config.model.mlp_dim=32 --config.model.dtype=float32'
)
_TABLES = 'spectr_table3', 'spectr_table4', 'gbv_table5'


def _piece(out, corpus, seconds):
  env = {
    **os.environ, 'FILES': str(corpus), 'OUT': str(out), 'PYTHON': sys.executable, 'SIZES': '97m 6m 2m', 'TRAIN': _TINY,
    'SECONDS_PER_PIECE': str(seconds), 'PROMPTS': f'HumanEval={out}.txt', 'TEXTS': f'{out}.txt',
    'TABLES': ' '.join(_TABLES), 'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true',
    'LATENCY': '--num_runs=2 --num_drafts=1 --draft_length=2 --context=8',
    'DECODE': '--num_drafts=2 --draft_length=2 --num_prompts=2 --batch_size=2 --max_new_tokens=8',
  }  # fmt: skip
  return subprocess.run(
    [ROOT / 'benchmarks' / 'gpu_family.sh'], cwd=ROOT, env=env, capture_output=True, text=True, timeout=500
  )


@pytest.mark.slow
def test_pieces_go_on_where_the_last_one_ended(tmp_path):
  corpus = tmp_path / 'corpus.txt'
  corpus.write_text('\n\n'.join(f'the {i} cats and {i * 7 % 97} dogs of house {i % 13}' for i in range(600)) + '\n')
  out = tmp_path / 'family'
  (tmp_path / 'family.txt').write_text('the 3 cats\nthe 5 cats and\n')
  ended = _piece(out, corpus, 12)
  assert ended.returncode == 3, ended
  assert 'out of time' in ended.stdout
  for _ in range(6):
    ended = _piece(out, corpus, 120)
    if ended.returncode == 0:
      break
    assert ended.returncode == 3, ended
  assert 'all done' in ended.stdout
  target, draft = (load_model(out / size / 'model')[0] for size in ('97m', '6m'))
  assert target.vocab_size == draft.vocab_size == 300
  assert 'held_out_overlap' in (out / '6m' / 'metrics.jsonl').read_text()
  assert [line.split(':')[0] for line in (out / 'utilisation.txt').read_text().splitlines()] == ['97m', '6m', '2m']
  tables = {name: json.loads((out / 'tables' / f'{name}.json').read_text()) for name in _TABLES}
  assert {row['draft'] for row in tables['spectr_table4']['rows']} == {'6m', '2m'}
  assert {row['prompts'] for row in tables['gbv_table5']['rows']} == {'HumanEval'}
  before = {path: path.stat().st_mtime for path in out.rglob('*.json')}
  assert _piece(out, corpus, 60).returncode == 0
  assert before == {path: path.stat().st_mtime for path in out.rglob('*.json')}
