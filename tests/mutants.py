"""Mutants: faults that a change could bring, and the default tests that kill them; `mutants.txt` says which did.

`python tests/mutants.py [NAME ...]` applies one fault after another to a copy of the working tree, runs the tests that
are the likeliest to notice it, and prints which test did, or that it survives. A mutant whose text does not occur
exactly once is refused. Names may be prefixes, such as `race`.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

_ROOT = pathlib.Path(__file__).parents[1]
_LEFT_OUT = '.git', '.venv', 'site', '__pycache__', '*_cache', 'findings'
_VERIFIERS, _COUPLINGS = 'spectr_jax/verifiers', 'spectr_jax/couplings'
_LAWS, _CLOSED = 'lossless_test.py', 'verifiers/closed_forms_test.py'

# Name, file, text that stands there once, what takes its place, and the tests, in the folder of tests.
# fmt: off
_MUTANTS = (
  ('univer_room', f'{_VERIFIERS}/univer.py', 'room = unkept + jnp.where(is_shared, ',
   'room = unkept + jnp.where(is_shared, jnp.exp(log_credit) * ', f'verifiers/univer_test.py {_LAWS}'),
  ('univer_left', f'{_VERIFIERS}/univer.py', 'credit * q - p / left)', 'credit * q - p)',
   f'verifiers/univer_test.py {_LAWS}'),
  ('block_credit', f'{_VERIFIERS}/block.py', 'jnp.minimum(0, log_kept + log_ratio)',
   'log_kept + jnp.minimum(0, log_ratio)', f'{_CLOSED} {_LAWS}'),
  ('block_residual', f'{_VERIFIERS}/block.py', 'kept * position.target_probs - pick.probs',
   'position.target_probs - pick.probs', f'{_CLOSED} {_LAWS}'),
  ('greedy_block_levels', f'{_VERIFIERS}/greedy_block.py', 'jnp.isposinf(v), v, v + gained', 'jnp.isposinf(v), v, v',
   f'verifiers/draws_test.py {_LAWS}'),
  ('greedy_block_left', f'{_VERIFIERS}/greedy_block.py', 'jnp.asarray(tree.depths)[node] - 1\n',
   'jnp.asarray(tree.depths)[node]\n', f'verifiers/draws_test.py {_LAWS}'),
  ('traversal_mass', f'{_VERIFIERS}/traversal.py', 'c + z * jnp.exp(-log_value) / norm', 'c + z / norm',
   f'{_CLOSED} {_LAWS}'),
  ('traversal_norm', f'{_VERIFIERS}/traversal.py', 'z * jnp.exp(-log_value) / norm', 'z * jnp.exp(-log_value)',
   f'{_CLOSED} {_LAWS}'),
  ('race_traversal_credit', 'spectr_jax/kernels/tree_steps.py', 'jnp.where(is_before, kept_back, shares), 0)',
   'shares, 0)', f'{_CLOSED} {_LAWS}'),
  ('race_traversal_mixed', f'{_VERIFIERS}/race_traversal.py', 'q * given.scale[rows], picked)',
   'given.scale[rows], picked)', 'verifiers/given_candidates_test.py'),
  ('walk_pool', f'{_VERIFIERS}/contexts.py', 'jnp.all(spelled == spelled[node], axis=-1)',
   'jnp.arange(tree.num_nodes + 1) == node', f'{_CLOSED} {_LAWS}'),
  ('walk_uniforms', f'{_VERIFIERS}/walk.py', 'uniforms[depth, 0] < jnp.cumsum', 'uniforms[0, 0] < jnp.cumsum',
   'verifiers/walk_test.py verifiers/draws_test.py'),
  ('walk_given', f'{_VERIFIERS}/walk.py', 'jnp.where(is_given, given.residual, drawn.residual)', 'drawn.residual',
   'verifiers/given_candidates_test.py'),

  ('given_copies', f'{_COUPLINGS}/given.py', 'is_valid & ~is_copy, target_probs', 'is_valid, target_probs',
   'couplings/coupling_test.py'),
  ('kseq_residual', f'{_COUPLINGS}/kseq.py', 'target_probs / gamma) * scale', 'target_probs / gamma)',
   'couplings/coupling_test.py'),
  ('recursive_norm', f'{_COUPLINGS}/recursive.py', '* (norm / z)', '* (1 / z)', 'couplings/coupling_test.py'),
  ('race_sides', f'{_COUPLINGS}/race.py', 'is_valid & (is_high[own] | ~jnp.any(is_valid & is_high[own]))', 'is_valid',
   'couplings/race_test.py couplings/coupling_test.py'),

  ('draw_boundary', 'spectr_jax/kernels/draws.py', 'is_above = (cumulative > level)',
   'is_above = (cumulative >= level)',
   'sampling_test.py'),

  ('draft_cache_full', 'spectr_jax/draft/model_drafter.py', 'jnp.where(is_active, num_committed - missing, 0)',
   'jnp.where(is_active, jnp.minimum(num_committed - missing, path.shape[1] - 1), 0)',
   'draft/model_drafter_test.py engine/generate_test.py'),
  ('draft_before_top_p', 'spectr_jax/draft/drawing.py', '(probs, new_probs, first, axis=1), texts), new_probs',
   '(probs, jax.nn.softmax(logits.astype(new_probs.dtype)), first, axis=1), texts), new_probs',
   'draft/model_drafter_test.py'),
  ('growth_sees_draw', 'spectr_jax/draft/growth.py', 'jnp.where(above < 0, -1, drawn)',
   'jnp.where((above < 0) | (probs[own, drawn] < 0.3), -1, drawn)', 'draft/growth_test.py draft/drafters_test.py'),

  ('cache_rollback', 'spectr_jax/model.py', 'jnp.minimum(self.lengths + num_committed, size)',
   'jnp.minimum(self.lengths + depth, size)', 'model_test.py'),
  ('cache_slots', 'spectr_jax/engine/loop.py', 'state.root_position[:, None] + jnp.asarray(tree.depths)',
   'state.root_position[:, None] + jnp.arange(tree.num_nodes + 1)',
   'engine/logprobs_test.py engine/equivalence_test.py'),

  ('engine_bonus', 'spectr_jax/engine/loop.py', 'jnp.argmax(is_eos, axis=1), verdict.num_accepted) + 1',
   'jnp.argmax(is_eos, axis=1), jnp.minimum(verdict.num_accepted, max(tree.max_depth - 1, 0))) + 1',
   'engine/generate_test.py'),
  ('engine_eos', 'spectr_jax/engine/loop.py', 'has_eos = jnp.any(is_eos, axis=1)', 'has_eos = is_eos[:, -1]',
   'engine/generate_test.py'),
  ('engine_limit', 'spectr_jax/engine/loop.py', 'jnp.minimum(count, state.limits - result.lengths)',
   'jnp.minimum(count, decoder.result_size - result.lengths)', 'engine/generate_test.py'),
  ('engine_refill', 'spectr_jax/engine/reading.py', 'constrain(decoder, replaced)',
   'constrain(decoder, dataclasses.replace(replaced, verifier_state=state.verifier_state))', 'engine/refill_test.py'),
  ('engine_keys', 'spectr_jax/engine/loop.py',
   'own = fold_each(jax.random.fold_in(key, root_position + 1), purposes)',
   'own, depths = fold_each(key, purposes), root_position + 1 + jnp.arange(decoder.tree.max_depth + 1)',
   'lossless_test.py'),

  ('sampling_top_p', 'spectr_jax/kernels/thresholds.py', 'weight >= goal[..., None], count',
   'weight > goal[..., None], count',
   'sampling_test.py'),
  ('sampling_greedy', 'spectr_jax/sampling.py', 'is_greedy = temperature == 0', 'is_greedy = temperature < 0',
   'sampling_test.py'),

  ('io_header', 'spectr_jax/io/hub/gguf_header.py', 'if end > len(self._data):', 'if end < 0:',
   'io/hub/gguf_file_test.py'),
  ('recurrence_gate', 'spectr_jax/kernels/recurrence.py', 'gates * (written - decay', '(written - decay',
   'kernels/recurrence_test.py'),
  ('recurrence_decay', 'spectr_jax/kernels/recurrence.py', 'total - on_path.totals', '0 * on_path.totals',
   'kernels/recurrence_test.py'),
  ('recurrence_inputs', 'spectr_jax/kernels/recurrence.py', 'jnp.where(depth > distances, pending',
   'jnp.where(depth >= distances, pending', 'kernels/recurrence_test.py'),
  ('recurrence_done', 'spectr_jax/engine/loop.py', '_after_logits(result.lengths - state.result.lengths, verdict)',
   '_after_logits(verdict.num_accepted + 1, verdict)', 'models/recurrent_test.py'),
  ('prefix_unchained', 'spectr_jax/engine/prefixes.py', 'sha256(before + tokens', 'sha256(tokens',
   'engine/prefixes_test.py'),
  ('budget_pause', 'spectr_jax/engine/rows.py', 'not self.budget.is_paused or error', 'True or error',
   'engine/budget_test.py'),
  ('budget_open', 'spectr_jax/engine/budget.py', 'if self.credit or not self.is_closed else', 'if True else',
   'engine/budget_test.py'),
  ('penalties_asked', 'spectr_jax/penalties.py', 'if found is not None]).any()', 'if found is not None]).all()',
   'engine/penalties_test.py'),
  ('penalties_path', 'spectr_jax/penalties.py', 'before + on_path, True', 'before, True', 'engine/penalties_test.py'),

  ('io_names', 'spectr_jax/io/hub/families.py', "'self_attn.o_proj'", "'self_attn.out_proj'",
   'io/hub/hub_model_test.py'),
  ('io_bytes', 'spectr_jax/io/token_bytes.py', "'ByteLevel' and not is_text", "'ByteLevel'", 'io/token_bytes_test.py'),

  ('command_flag', 'decode/experiment/workload.py', 'if asked.skip_long else every', 'if not every else every',
   'decode/run_test.py decode/prompts_test.py'),
  ('command_exit', 'common/command_line.py', 'sys.exit(code)', 'sys.exit(0)',
   'command_line_test.py decode/prove_test.py'),
  ('command_output', 'common/output_files.py', 'if is_same_file(path, place)', 'if path is place',
   'decode/output_files_test.py'),

  ('train_resume', 'train/run.py', "0 if state is None else int(state['step'])",
   "0 if state is None else int(state['step']) - 1", 'train/train_test.py'),
  ('train_mask', 'train/head_step.py', 'counts_here[..., None] & each for each', 'each for each', 'train/head_test.py'),

  ('serving_limit', 'decode/serving/answer.py', 'max_tokens > most:', 'max_tokens < 0:',
   'serving/app_test.py serving/gate_test.py'),
  ('serving_stop', 'spectr_jax/io/text_stream.py', 'return text[:begin]', 'return text',
   'serving/app_test.py'),
)
# fmt: on


def _mutated(name: str, folder: pathlib.Path) -> tuple[pathlib.Path, str, list[str]]:
  """The file of a mutant in a copy, its text with the fault, and the tests; a `ValueError` if the text is not there."""
  file, old, new, tests = next(mutant[1:] for mutant in _MUTANTS if mutant[0] == name)
  text = (folder / file).read_text()
  if text.count(old) != 1:
    raise ValueError(f'{file} has {old!r} {text.count(old)} times, expected 1')
  return folder / file, text.replace(old, new), [f'tests/{test}' for test in tests.split()]


def _run(name: str, folder: pathlib.Path) -> str:
  """Runs the tests of a mutant in a copy, and says which one failed."""
  file, text, tests = _mutated(name, folder)
  before = file.read_text()
  file.write_text(text)
  start = time.monotonic()
  try:
    # The copy comes before the package that is installed, also in processes that tests start.
    command = [sys.executable, '-m', 'pytest', *tests, '-x', '-q', '-p', 'no:cacheprovider', '-n', '0', '--tb=line']
    env = os.environ | {'PYTHONPATH': str(folder)}
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
  finally:
    file.write_text(before)
  failed = re.search(r'^(?:FAILED|ERROR) tests/(\S+)', ran.stdout, re.MULTILINE)
  seconds = time.monotonic() - start
  if ran.returncode == 0:
    return f'survives  ({seconds:.0f} s)'
  if ran.returncode != 1 or failed is None:
    return f'no result: {(ran.stdout + ran.stderr).strip()[-300:]}'
  return f'killed by {failed[1]}  ({seconds:.0f} s)'


def main(prefixes: list[str]) -> None:
  names = [mutant[0] for mutant in _MUTANTS if not prefixes or mutant[0].startswith(tuple(prefixes))]
  with tempfile.TemporaryDirectory(prefix='mutants_') as folder:
    copy = pathlib.Path(folder) / 'copy'
    shutil.copytree(_ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    for name in names:
      try:
        print(f'{name:22}  {_run(name, copy)}', flush=True)
      except ValueError as error:
        print(f'{name:22}  refused: {error}', flush=True)


if __name__ == '__main__':
  main(sys.argv[1:])
