"""The script that trains a head in pieces, with tiny settings on whatever is here."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import hub_specs
import pytest
import safetensors.numpy
import tiny_hub

from spectr_jax import load_drafter, load_model

ROOT = pathlib.Path(__file__).parents[1]
_TRAIN = (
  '--config.max_user_tokens=8 --config.max_new_tokens=12 --config.vocab_size=40 --config.warmup_steps=2'
  ' --config.eval_every=20 --config.checkpoint_every=5 --config.log_every=5 --config.dtype=float32'
)


def _piece(target, out, work, prompts, seconds):
  env = {
    **os.environ, 'TARGET': str(target), 'OUT': str(out), 'WORK': str(work), 'SPEC_BENCH': str(prompts),
    'PYTHON': sys.executable, 'SECONDS_PER_PIECE': str(seconds), 'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true',
    'SHARDS': '3', 'ROWS': '8', 'STEPS': '40', 'BATCH': '4', 'TRAIN': _TRAIN,
    'DECODE': '--num_prompts=2 --batch_size=2 --max_new_tokens=8',
  }  # fmt: skip
  command = ROOT / 'benchmarks' / 'gpu_head.sh'
  return subprocess.run([command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=550)


@pytest.mark.slow
def test_pieces_go_on_where_the_last_one_ended(tmp_path):
  spec = hub_specs.SPECS['llama'] | {
    'vocab_size': 310, 'num_hidden_layers': 6, 'max_position_embeddings': 512, 'tie_word_embeddings': True,
    'eos_token_id': tiny_hub.SPECIAL['<|im_end|>'],
  }  # fmt: skip
  target = tiny_hub.write(tmp_path / 'target', config=spec, chat_template=tiny_hub.CHAT)
  safetensors.numpy.save_file(tiny_hub.tensors_of(spec), target / 'model.safetensors')
  prompts = tmp_path / 'question.jsonl'
  entries = ({'question_id': 81 + i, 'category': 'writing', 'turns': [f'the {i} owls']} for i in range(2))
  prompts.write_text(''.join(json.dumps(entry) + '\n' for entry in entries))
  out, work = tmp_path / 'out', tmp_path / 'work'

  ended = _piece(target, out, work, prompts, 12)
  assert ended.returncode == 3, ended
  assert 'out of time' in ended.stdout
  for _ in range(8):
    ended = _piece(target, out, work, prompts, 90)
    if ended.returncode == 0:
      break
    assert ended.returncode == 3, ended
  assert 'all done' in ended.stdout
  assert load_drafter(out / 'head', load_model(target)[0]).vocab_size == 310
  assert 'final_acceptance_3' in (out / 'training_log.jsonl').read_text()
  names = [f'{of}_{name}' for of in ('shipped', 'spec_bench')
           for name in ('greedy_chain', 'greedy_tree', 'sampled_chain', 'sampled_tree')]  # fmt: skip
  assert sorted(path.stem for path in out.glob('*.json')) == sorted(names)
  found = json.loads((out / 'spec_bench_sampled_tree.json').read_text())
  assert found['run']['flags']['temperature'] == 1
  before = {path: path.stat().st_mtime for path in out.rglob('*')}
  shutil.rmtree(work)
  assert _piece(target, out, work, prompts, 60).returncode == 0
  assert before == {path: path.stat().st_mtime for path in out.rglob('*')}
