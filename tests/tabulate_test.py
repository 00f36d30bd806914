"""Tables from generations: counts by prompt, and the summary that gives the same tables."""

import json

import pytest

from benchmarks import cut_prompts, tabulate


def _line(method, prompt, seed, num_tokens, calls, **changes):
  line = {
    'id': prompt, 'method': method, 'is_lossless': method != 'biased', 'num_drafts': 2, 'draft_length': 4,
    'tree': 'chains', 'children': 'independent', 'epsilon': None, 'temperature': 1.0, 'seed': seed,
    'tokens': [0] * num_tokens, 'target_calls': calls,
  }  # fmt: skip
  return json.dumps(line | changes)


@pytest.fixture
def generations(tmp_path):
  path = tmp_path / 'text.jsonl'
  lines = [_line('spectr', prompt, seed, 6 + prompt, 3) for prompt in (0, 1, 2) for seed in (0, 1)]
  lines += [_line('race', prompt, seed, 12 + 2 * prompt, 3) for prompt in (0, 1, 2) for seed in (0, 1)]
  lines += [_line('race', prompt, 0, 9, 3, tree='optimal:8 = prefix:2,1') for prompt in (0, 1)]
  path.write_text('\n'.join(lines) + '\n')
  return path


def test_seeds_are_added_and_tables_compare_with_the_baseline(generations):
  by_setting = tabulate.read([str(generations)])
  counts = by_setting[tabulate.Setting(1.0, 'race', True, '2 x 4')]
  assert [x.tolist() for x in counts.arrays()] == [[24, 28, 32], [6, 6, 6]]
  assert counts.seeds == [0, 1]
  text = '\n'.join(tabulate.tables(by_setting, 'spectr'))
  assert '| method | 2 x 4 |' in text
  assert '| `race` | 2 x 4 | 4.67 ± ' in text
  assert ' | 2.000 (2.000 to 2.000) |' in text  # prompts differ, the ratio does not
  assert 'optimal:8' not in text  # nothing to compare with


def test_each_method_on_its_best_shape(tmp_path):
  path = tmp_path / 'text.jsonl'
  shapes = {'2 x 4': 12, '4 x 4': 18, '8 x 8': 30}
  lines = []
  for method, more in (('spectr', 0), ('race', 7)):
    for prompt in (0, 1, 2):
      for shape, num_tokens in shapes.items():
        num_drafts, length = map(int, shape.split(' x '))
        sizes = {'num_drafts': num_drafts, 'draft_length': length}
        lines.append(_line(method, prompt, 0, num_tokens + more + prompt, 3, **sizes))
      lines.append(_line(method, prompt, 0, 24 + prompt, 3, tree='prefix:2,2,1'))
  path.write_text('\n'.join(lines))
  by_setting = tabulate.read([str(path)])
  *_, first, second = tabulate.best_shapes(by_setting, 16)
  assert first.startswith('| `race` | 4 x 4 | 8.67 ± ')  # more than on prefix:2,2,1, and the other less
  assert second.startswith('| `spectr` | prefix:2,2,1 | 8.33 ± ')
  assert ' | 1.040 (1.0' in second
  *_, first, second = tabulate.best_shapes(by_setting, 64)
  assert ['8 x 8' in line for line in (first, second)] == [True, True]
  assert first.endswith(' |  |')
  assert tabulate.best_shapes(by_setting, 7) == []


def test_shapes():
  shapes = {'4 x 16': 64, 'prefix:2,2,1': 10, 'optimal:8 = prefix:2,1': 4, 'specinfer': None}
  assert {shape: tabulate.num_nodes(shape) for shape in shapes} == shapes
  in_order = ['2 x 8', '16 x 1', 'optimal:8', 'optimal:16', 'prefix:2,2']
  assert sorted(reversed(in_order), key=tabulate._natural) == in_order


def test_a_summary_gives_the_same_tables_and_nothing_counts_twice(generations, tmp_path):
  by_setting = tabulate.read([str(generations)])
  path = tmp_path / 'summary.json'
  path.write_text(tabulate.summarize(by_setting))
  assert tabulate.tables(tabulate.read([str(path)]), 'spectr') == tabulate.tables(by_setting, 'spectr')
  with pytest.raises(ValueError, match='prompt 0 with seed 0 twice'):
    tabulate.read([str(generations)] * 2)
  with pytest.raises(ValueError, match='in two files'):
    tabulate.read([str(path)] * 2)


def test_versions_of_a_method_are_told_apart(tmp_path):
  path = tmp_path / 'text.jsonl'
  lines = [_line('traversal', 0, 0, 6, 3), _line('traversal', 0, 0, 9, 3, children='without_replacement')]
  lines += [_line('decoding_opt', 0, 0, 6, 3), _line('decoding_opt', 0, 0, 9, 3, epsilon=0.5)]
  path.write_text('\n'.join(lines))
  methods = [setting.method for setting in tabulate.read([str(path)])]
  assert methods == ['traversal', 'traversal, without_replacement', 'decoding_opt', 'decoding_opt, epsilon 0.5']


def test_a_single_prompt_has_no_interval_and_other_files_are_refused(tmp_path):
  path = tmp_path / 'text.jsonl'
  path.write_text('\n'.join(_line(method, 0, 0, 6, 3) for method in ('spectr', 'race')))
  assert '| `race` | 2 x 4 | 2.00 |  |' in tabulate.tables(tabulate.read([str(path)]), 'spectr')
  path.write_text('{"a": 1}\n')
  with pytest.raises(ValueError, match='text.jsonl: neither generations'):
    tabulate.read([str(path)])


def test_prompts_are_cut_where_passages_begin():
  text = '= Title =\n\none two three\nfour five\n\nsix seven\n\neight nine ten eleven\n'
  assert cut_prompts.cut(text, 2, 4) == ['one two three four', 'eight nine ten eleven']
  assert cut_prompts.cut(text, 1, 6) == ['one two three four five six']
  with pytest.raises(ValueError, match='the text has 3 passages of 4 words, fewer than 4'):
    cut_prompts.cut(text, 4, 4)
