"""The scripts that run on a GPU in pieces: their order, their pieces, and their commands at tiny sizes."""

import json
import os
import pathlib
import subprocess
import sys
import tarfile

import hub_specs
import pytest
import safetensors.numpy
import tiny_hub

from spectr_jax import load_drafter, load_model

ROOT = pathlib.Path(__file__).parents[1]
# In the place of Python: notes every command, may be too slow once or fail, and writes what the real command would.
_STUB = """#!/usr/bin/env bash
[[ $1 == - ]] && exec "$REAL" "$@"
echo "${*:2}" >>"$CALLS"
number=$(wc -l <"$CALLS")
((number == FAILS)) && exit 5
if ((number == SLOW)); then
  # A training ends well when it is told to end.
  [[ $2 == train.head ]] && trap 'exit 0' TERM
  sleep 60 &
  trap "kill $!; $(trap -p TERM | cut -d"'" -f2)" TERM
  wait $!
  exit
fi
for argument; do
  case $argument in
    --output=*) output=${argument#*=} ;;
    --workdir=*) workdir=${argument#*=} ;;
    --table=*) table=${argument#*=} ;;
    --config.tokenizer=*) tokenizer=${argument#*=} ;;
  esac
done
case $2 in
  benchmarks.drafters) touch "$output" ;;
  benchmarks.speed) mkdir -p "${output%.json}_profile" && touch "$output" ;;
  decode.main) touch "$output" ;;
  decode.reproduce) mkdir -p "$output" && touch "$output/$table.json" ;;
  train.tokenizer) touch "$tokenizer" ;;
  train.head | train.main)
    mkdir -p "$workdir"/{head,model}
    echo '{"teraflops_per_device": 2}' >"$workdir/metrics.jsonl"
    echo 'held-out loss'
    ;;
  *) exit 6 ;;
esac
"""
_SCRIPTS = {
  'gpu_speed': {'BATCHES': '1 8'},
  'gpu_public': {'TARGET': 'model.gguf'},
  'gpu_head': {'TARGET': 'model', 'SPEC_BENCH': 'question.jsonl'},
  'gpu_family': {'FILES': 'corpus.txt', 'SIZES': '97m 6m', 'TABLES': 'spectr_table3 gbv_table5'},
}
# In the order in which they run.
_COMMANDS = {
  'gpu_speed': ['benchmarks.speed'] * 2 + ['decode.main'] * 2,
  'gpu_public': ['benchmarks.drafters'] * 4 + ['benchmarks.speed'],
  'gpu_head': ['train.head'] + ['decode.main'] * 8,
  'gpu_family': ['train.tokenizer', 'train.main', 'train.main', 'decode.reproduce', 'decode.reproduce'],
}


def _run(script, out, **variables):
  env = {**os.environ, 'OUT': str(out), 'PYTHON': sys.executable, 'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true', **variables}
  return subprocess.run(
    [ROOT / 'benchmarks' / f'{script}.sh'], cwd=ROOT, env=env, capture_output=True, text=True, timeout=550
  )


def _whole(script, out, **variables):
  """Runs a script that needs one piece."""
  ended = _run(script, out, **variables)
  assert ended.returncode == 0, ended
  assert ended.stdout.splitlines()[-1] == 'all done'
  return ended.stdout


@pytest.fixture
def stub(tmp_path):
  """Runs a script with the stub; returns how it ended and the commands that it ran."""
  path, calls = tmp_path / 'python', tmp_path / 'calls'
  path.write_text(_STUB)
  path.chmod(0o755)

  def run(script, *, slow=0, fails=0, **variables):
    calls.write_text('')
    variables |= {'PYTHON': str(path), 'REAL': sys.executable, 'CALLS': str(calls), 'SLOW': str(slow)}
    ended = _run(script, tmp_path / 'out', **_SCRIPTS[script], **variables, FAILS=str(fails))
    return ended, calls.read_text().splitlines()

  return run


@pytest.mark.slow
@pytest.mark.parametrize('script', _SCRIPTS)
def test_pieces_go_on_where_the_last_one_ended(stub, script):
  whole = _COMMANDS[script]
  first, calls = stub(script, slow=2, SECONDS_PER_PIECE='2')
  assert (first.returncode, first.stdout.splitlines()[-1]) == (3, 'out of time: run again'), first
  assert [call.split()[0] for call in calls] == whole[:2]
  second, later = stub(script)
  assert (second.returncode, second.stdout.splitlines()[-1]) == (0, 'all done'), second
  assert [call.split()[0] for call in later] == whole[1:]
  assert later[0] == calls[1]
  third, none = stub(script)
  assert (third.returncode, none) == (0, [])


def test_a_head_whose_training_was_ended_is_not_complete(stub):
  ended, calls = stub('gpu_head', slow=1, SECONDS_PER_PIECE='2')
  assert (ended.returncode, len(calls)) == (3, 1), ended
  ended, calls = stub('gpu_head')
  assert (ended.returncode, [call.split()[0] for call in calls]) == (0, _COMMANDS['gpu_head'])


@pytest.mark.parametrize('script', _SCRIPTS)
def test_a_command_that_fails_ends_the_script_with_its_code(stub, script):
  ended, calls = stub(script, fails=2)
  assert (ended.returncode, len(calls)) == (5, 2), ended
  assert 'all done' not in ended.stdout


@pytest.mark.slow
def test_a_table_that_fits_into_no_piece_is_named(stub):
  last = len(_COMMANDS['gpu_family'])
  assert stub('gpu_family', fails=last)[0].returncode == 5
  for code in (3, 4):
    # A table of the first tenth of a piece had all of it: that is a second, which a busy machine needs.
    ended, calls = stub('gpu_family', slow=1, SECONDS_PER_PIECE='11')
    assert (ended.returncode, len(calls)) == (code, 1), ended
  assert 'gbv_table5: 11 seconds are too short' in ended.stdout


@pytest.mark.slow
def test_speed(tmp_path):
  sizes = hub_specs.SPECS['llama'] | {'vocab_size': 64, 'max_position_embeddings': 512}
  for name, more in {'target': {'num_hidden_layers': 2}, 'draft': {'tie_word_embeddings': True}}.items():
    (tmp_path / name).mkdir()
    (tmp_path / name / 'config.json').write_text(json.dumps(sizes | more))
  out = tmp_path / 'out'
  configs = f'--target_config={tmp_path}/target --draft_config={tmp_path}/draft'
  said = _whole(
    'gpu_speed', out, SHAPES='none', BATCHES='2',
    SIZES=f'{configs} --dtype=bfloat16 --batch_size=1 --shapes=1x2 --num_runs=1 --peer_device=cuda',
    DECODE='--method=autoregressive,spectr --num_prompts=2 --max_new_tokens=4 --num_drafts=2 --draft_length=1',
  )  # fmt: skip
  assert 'transformers are left out' in said  # for want of torch, or of CUDA
  results = json.loads((out / 'sizes.json').read_text())['results']
  names = 'with prefill, 1 rows', 'steps, 1 rows', 'rounds, 1 x 2, draft, 1 rows', 'profile'
  assert list(results) == [f'{name}, bfloat16' for name in names]
  methods = 'no verification', 'race_traversal', 'spectr'
  assert tuple(results[f'{names[2]}, bfloat16']['milliseconds']) == methods
  with tarfile.open(out / 'sizes_profile.tar.gz') as archive:
    assert any(name.endswith('.xplane.pb') for name in archive.getnames())
  assert json.loads((out / 'batch_2.json').read_text())['run']['flags']['batch_size'] == 2
  assert list((out / 'profile').rglob('*.xplane.pb'))


@pytest.mark.slow
def test_head(tmp_path):
  spec = hub_specs.SPECS['llama'] | {
    'vocab_size': 310, 'num_hidden_layers': 6, 'max_position_embeddings': 512, 'tie_word_embeddings': True,
    'eos_token_id': tiny_hub.SPECIAL['<|im_end|>'],
  }  # fmt: skip
  target = tiny_hub.write(tmp_path / 'target', config=spec, chat_template=tiny_hub.CHAT)
  safetensors.numpy.save_file(tiny_hub.tensors_of(spec), target / 'model.safetensors')
  out = tmp_path / 'out'
  _whole(
    'gpu_head', out, TARGET=str(target), WORK=str(tmp_path / 'work'), SHARDS='3', ROWS='8', STEPS='10',
    BATCH='4', DECODE='--num_prompts=2 --batch_size=2 --max_new_tokens=8',
    TRAIN='--config.max_user_tokens=8 --config.max_new_tokens=12 --config.vocab_size=40 --config.warmup_steps=2'
    ' --config.eval_every=5 --config.checkpoint_every=5 --config.log_every=5 --config.dtype=float32',
  )  # fmt: skip
  assert load_drafter(out / 'head', load_model(target)[0]).vocab_size == 310
  assert 'final_acceptance_3' in (out / 'training_log.jsonl').read_text()
  names = ['greedy_chain', 'greedy_tree', 'sampled_chain', 'sampled_tree']
  assert sorted(path.stem for path in out.glob('*.json')) == [f'shipped_{name}' for name in names]
  assert json.loads((out / 'shipped_sampled_tree.json').read_text())['run']['flags']['temperature'] == 1


@pytest.mark.slow
def test_family(tmp_path):
  corpus, prompts = tmp_path / 'corpus.txt', tmp_path / 'prompts.txt'
  corpus.write_text('\n\n'.join(f'the {i} cats and {i * 7 % 97} dogs of house {i % 13}' for i in range(600)) + '\n')
  prompts.write_text('the 3 cats\nthe 5 cats and\n')
  out, tables = tmp_path / 'family', ('spectr_table3', 'spectr_table4')
  _whole(
    'gpu_family', out, FILES=str(corpus), SIZES='97m 6m', TABLES=' '.join(tables), TEXTS=f'HumanEval={prompts}',
    LATENCY='--num_runs=2 --num_drafts=1 --draft_length=2 --context=8',
    DECODE='--num_drafts=2 --draft_length=2 --num_prompts=2 --batch_size=2 --max_new_tokens=8',
    TRAIN='--config.vocab_size=300 --config.seq_len=24 --config.batch_size=4 --config.num_steps=10'
    ' --config.warmup_steps=2 --config.eval_every=5 --config.checkpoint_every=5 --config.log_every=5'
    ' --config.eval_batches=2 --config.held_out_percent=10 --config.model.embed_dim=16 --config.model.num_layers=1'
    ' --config.model.num_heads=2 --config.model.mlp_dim=32 --config.model.dtype=float32',
  )  # fmt: skip
  target, draft = (load_model(out / size / 'model')[0] for size in ('97m', '6m'))
  assert target.vocab_size == draft.vocab_size == 300
  assert 'held_out_overlap' in (out / '6m' / 'metrics.jsonl').read_text()
  assert [line.split(':')[0] for line in (out / 'utilisation.txt').read_text().splitlines()] == ['97m', '6m']
  written = {name: json.loads((out / 'tables' / f'{name}.json').read_text()) for name in tables}
  assert {row['draft'] for row in written['spectr_table4']['rows']} == {'6m'}
