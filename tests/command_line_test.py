"""Options with structure: what their parsers read and what they refuse."""

import pytest

from spectr_jax.io.command_line import parse_name_and_ints


@pytest.mark.parametrize(
  ('text', 'name', 'integers'),
  [
    ('specinfer', 'specinfer', ()),
    ('prefix:4', 'prefix', (4,)),
    ('prefix:4,2,2,1', 'prefix', (4, 2, 2, 1)),
    (' prefix : 4 ,2, 1 ', 'prefix', (4, 2, 1)),
    ('a-b_2:007', 'a-b_2', (7,)),
    ('chains:-1,+2', 'chains', (-1, 2)),  # the range is the business of who asked
    ('Chains:0', 'Chains', (0,)),
  ],
)
def test_name_and_ints(text, name, integers):
  assert parse_name_and_ints(text) == (name, integers)


@pytest.mark.parametrize(
  'text',
  [
    '',
    ' ',
    ':',
    ':4',
    'prefix:',
    'prefix: ',
    'prefix:,',
    'prefix:4,',
    'prefix:,4',
    'prefix:4,,2',
    'prefix:4 2',
    'prefix:4:2',
    'prefix:4.0',
    'prefix:1e3',
    'prefix:1_000',
    'prefix:- 1',
    'prefix:\u0663',
    'a:b',
    'a b',
    'a,b',
    '4',
    '4:4',
    '4,2',
    'prefix\n:4\nx',
  ],
)
def test_anything_else_is_refused_in_one_line(text):
  with pytest.raises(ValueError, match='expected name or name:integers, such as chains:8,4, got ') as caught:
    parse_name_and_ints(text)
  assert str(caught.value).endswith(repr(text))
  assert '\n' not in str(caught.value)
