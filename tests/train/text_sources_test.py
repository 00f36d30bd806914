import itertools

import ml_collections
import pytest

from train import text_sources
from train.text_sources import Stdlib, is_held_out, make_source


def test_no_files_are_refused():
  source = make_source(ml_collections.ConfigDict({'source': 'files', 'files': '', 'held_out_percent': 1.0}))
  with pytest.raises(ValueError, match=r'needs config\.files'):
    list(source.documents('train'))


def test_stdlib_takes_sources_and_docstrings_and_leaves_tests_and_site_packages(tmp_path, monkeypatch):
  docstring = 'What the module is for. ' * 10 + 'End.'
  for name in ('a.py', 'b/c.py', 'test/d.py', 'b/tests/e.py', 'site-packages/f.py', 'b/__pycache__/g.py'):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(f'"""{docstring}"""\nname = {name!r}\n')
  (tmp_path / 'odd.py').write_text('this is (not Python')
  (tmp_path / 'short.py').write_text('"""Short."""')
  monkeypatch.setattr(text_sources.sysconfig, 'get_path', lambda name: str(tmp_path))
  texts = list(Stdlib().documents())
  names = [line for text in texts for line in text.splitlines() if line.startswith('name =')]
  assert names == ["name = 'a.py'", "name = 'b/c.py'"]
  assert texts.count(docstring) == 2
  assert texts[-1] == '"""Short."""'  # as source, not as a docstring: those have 200 characters or more
  assert texts == list(Stdlib().documents())
  assert set(Stdlib().describe()) == {'stdlib/documents', 'stdlib/python'}


def test_stdlib_of_this_python_has_text():
  documents = list(itertools.islice(Stdlib().documents(), 200))
  assert len(documents) == 200
  assert all(document.strip() == document and document for document in documents)


def test_the_split_depends_on_content_alone(documents):
  held_out, half = {document for document in documents if is_held_out(document, 10)}, documents[:200]
  assert {document for document in reversed(half) if is_held_out(document, 10)} == held_out & set(half)
  # 400 documents at 10 %: within five standard deviations of 40.
  assert 10 < len(held_out) < 70
  assert not any(is_held_out(document, 0) for document in documents)
  assert all(is_held_out(document, 100) for document in documents)
  assert held_out <= {document for document in documents if is_held_out(document, 20)}
