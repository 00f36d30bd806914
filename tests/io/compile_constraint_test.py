"""Compiled constraints: what they accept, what is refused by name, bounds, and texts of random schemas."""

import json
import re
import time

import hostile
import jax
import jsonschema
import numpy as np
import pytest
import tiny_hub

import spectr_jax
from spectr_jax import Tokenizer, TokenTree, compile_constraint
from spectr_jax.io import constraints as constraints_module
from spectr_jax.io.constraints import ConstraintBusyError
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from tests.slow import slow

pytest.importorskip('outlines_core', reason='needs the extra grammar')


@pytest.fixture(scope='module')
def tokenizer():
  return Tokenizer.load('pretrained/target/tokenizer.json')


def accepts(constraint, tokenizer, text):
  return constraint.accepts(tokenizer.encode(text))


_APART = {
  'oneOf': [
    {'type': 'object', 'properties': {'kind': {'const': 'a'}}, 'required': ['kind']},
    {'$ref': '#/$defs/b'},
  ],
  '$defs': {'b': {'type': 'object', 'properties': {'kind': {'enum': ['b', 'c']}}, 'required': ['kind']}},
}


@pytest.mark.parametrize(
  ('given', 'inside', 'outside'),
  [
    ({'regex': '[0-9]{3}-[a-z]+'}, ['123-abc', '000-z'], ['12-abc', '123-', '123-abcX', '']),
    ({'regex': '^a*$|^[|b]+$'}, ['', 'a', 'aaa', '|b'], ['ab', 'c']),
    ({'regex': 'a|ab|abc'}, ['a', 'ab', 'abc'], ['', 'abcd', 'b']),
    ({'regex': '[]|^]|^[[:digit:]|^]b'}, [']', '|', '^', '1b', '^b'], ['[', 'b', 'a']),
    ({'regex': 'é+|☃'}, ['é', 'éé', '☃'], ['e', '☃☃']),
    ({'choices': ['yes', 'no', ' a.b']}, ['yes', 'no', ' a.b'], ['ye', 'yesno', ' axb']),
    ({'json_schema': {'type': 'integer', 'minimum': 7, 'maximum': 1203}}, ['7', '99', '1203'], ['6', '1204', '-7']),
    ({'json_schema': {'type': 'integer', 'exclusiveMaximum': -8}}, ['-9', '-100'], ['-8', '0', '5', '-0']),
    ({'json_schema': {'type': 'integer', 'minimum': -12}}, ['-12', '0', '99999'], ['-13', '-0', '01']),
    ({'json_schema': {'enum': [1, 'a"b', None, {'x': [1]}]}}, ['1', r'"a\"b"', 'null', '{"x": [1]}'], ['2', 'a"b']),
    ({'json_schema': {'type': 'string', 'maxLength': 3}}, ['""', '"abc"'], ['"abcd"', 'abc']),
    ({'json_schema': {'type': 'string', 'pattern': r'^\d+$|^x'}}, ['"12"', '"x"'], ['"1x"', '"y"']),
    ({'json_schema': {'type': 'string', 'pattern': 'b'}}, ['"b"', '"abc"'], ['"ac"']),
    ({'json_schema': {'type': 'string', 'pattern': '^[[a]$|^[+--]$|^[x&&y]$'}}, ['"["', '"a"', '","', '"x"'], ['"!"']),
    ({'json_schema': {'type': 'string', 'pattern': '^[[a]]$'}}, ['"[]"', '"a]"'], ['"a"', '"["']),
    ({'json_schema': {'properties': {5: {'type': 'null'}}}}, ['{"5": null}'], ['{5: null}']),
    ({'json_schema': _APART}, ['{"kind": "a"}', '{"kind": "c"}'], ['{}', '{"kind": "d"}']),
    ({'json_schema': {'type': 'array', 'prefixItems': [{'type': 'null'}, {'const': 1}]}}, ['[null, 1]'], ['[null]']),
    ({'regex': '(^a|b)c|d$'}, ['ac', 'bc', 'd'], ['c', 'bac']),
    ({'regex': '^(?:$|[a-c]+)$'}, ['', 'abc'], ['d']),
    ({'json_schema': {'pattern': '^(?:$|[a-c]+)$'}}, ['""', '"ab"'], ['"d"', '"abd"']),
    ({'json_schema': {'pattern': '(^|,)[0-9]{2}$'}}, ['"12"', '"x,12"'], ['"x12"', '"12,"']),
    ({'json_schema': {'pattern': '^a(b|$)'}}, ['"a"', '"ab"', '"abc"'], ['"ac"', '"xa"']),
    ({'json_schema': {'pattern': '(^ab$)|(^cd$)'}}, ['"ab"', '"cd"'], ['"abcd"', '""']),
    ({'json_schema': {'pattern': '^(ab$|cd)$'}}, ['"ab"', '"cd"'], ['"abx"', '"cdx"']),
    ({'json_schema': {'pattern': '^(?:(?:^|,)[a-z])+$'}}, ['"a,b"', '",a,b"'], ['"ab"', '"a,"']),
    ({'json_schema': {'pattern': r'^[^\W_]$'}}, ['"a"', '"0"'], ['"_"', '"é"', '"٣"', '"-"']),
    ({'json_schema': {'pattern': r'^[^\D]$'}}, ['"7"'], ['"٣"', '"a"']),
    ({'json_schema': {'pattern': r'^\W\D\S$'}}, ['"éé☃"', '"٣٣٣"'], ['"aéé"', '"é7é"', '"éé\\u00a0"']),
    ({'json_schema': {'pattern': '^.$'}}, [r'"\""', r'"\\"', r'"\t"', '"x"'], [r'"\n"', '"xy"']),
    ({'json_schema': {'type': 'string', 'maxLength': 2}}, [r'"\"\n"', r'"\u00e9\\"'], [r'"\"\n."', r'"\ud800"']),
    (
      {'json_schema': {'format': 'date'}},
      ['"2024-02-29"', '"2000-02-29"', '"0004-02-29"', '"0001-01-31"'],
      ['"2023-02-29"', '"1900-02-29"', '"0000-01-01"', '"2024-04-31"'],
    ),
    (
      {'json_schema': {'format': 'date-time'}},
      ['"2024-02-29t23:59:59.123456789z"', '"1985-04-12T23:20:50+23:59"'],
      ['"1985-04-12T24:00:00Z"', '"1985-04-12T23:20:50"'],
    ),
    (
      {'json_schema': {'format': 'uri'}},
      ['"https://a.B:65535/x?q=%2F#f"', '"urn:a:b"', '"ftp://u:p@[2001:DB8::1]:21/"', '"mailto:a@b"', '"HTTP://A?x"'],
      ['"https://a/%zz"', '"//a"', '"http://[::g]/"', '"http://a b"', '"1a:b"', '"http://a/#b#c"'],
    ),
    (
      {'json_schema': {'format': 'hostname'}},
      ['"A.b-C"', f'"{"a" * 63}.b"', f'"{".".join(["a" * 31] * 7)}"'],
      [f'"{"a" * 64}"', '"-a"', '"a-"', f'"{".".join(["a" * 63] * 4)}"', '"a..b"'],
    ),
    (
      {'json_schema': {'format': 'uuid'}},
      ['"00000000-AAAA-bbbb-CCCC-0123456789aB"'],
      ['"00000000AAAAbbbbCCCC0123456789aB"'],
    ),
    (
      {'json_schema': {'format': 'ipv6'}},
      ['"::"', '"1::8"', '"::ffff:1.2.3.4"', '"A:b:c:d:e:f:1:2"'],
      ['"1::2::3"', '":1"', '"1:2"'],
    ),
    ({'json_schema': {'format': 'email'}}, ['"a.b+c@X.org"'], ['"a"', '"@b"', '"a@b@c"', '"a..b@c"']),
    (
      {'json_schema': {'const': {'b': 1, 'a': [1, 2]}}},
      ['{"b":1,"a":[1,2]}', '{ "b": 1, "a": [ 1, 2 ] }'],
      ['{"a":[1,2],"b":1}'],
    ),
    ({'json_schema': {'enum': [1.0, -0.5]}}, ['1', '1.0', '-0.5'], ['1.', '10', '-5']),
    (
      {
        'json_schema': {
          'oneOf': [{'type': 'object', 'properties': {'kind': {'const': kind, 'default': kind}}} for kind in 'ab']
        }
      },
      ['{"kind": "a"}', '{"kind": "b"}'],
      ['{}', '{"kind": "c"}'],
    ),
    ({'json_schema': {'pattern': r'^[\p{L}0"]+$'}}, ['"é0"', '"x"'], ['"☃"', '"-"', '"x "', '"x0']),
    ({'json_schema': {'type': 'string', 'maxLength': 65}}, [r'"\"\n"'], [f'"{"a" * 66}"', r'"\u00e9"']),
    ({'json_schema': True}, ['{}', '{"a": [1, {"b": null}]}'], ['[]', '{"a"}', '1']),
  ],
)
def test_accept_whole_texts(tokenizer, given, inside, outside):
  constraint = compile_constraint(tokenizer, **given)
  assert [text for text in inside if not accepts(constraint, tokenizer, text)] == []
  assert [text for text in outside if accepts(constraint, tokenizer, text)] == []


def test_a_value_that_begins_another_may_go_on_where_tokens_are_bytes():
  """outlines-core 0.2.14 ends each of these at `1`, which is complete."""
  tokenizer = HubTokenizer.from_parts(tiny_hub.backend(merges=()), bos_id=None, eos_ids=(41,), add_bos=False)
  texts = ['1', '12', '123']
  for given in ({'choices': texts}, {'json_schema': {'enum': [1, 12, 123]}}):
    constraint = compile_constraint(tokenizer, **given)
    assert [text for text in (*texts, '', '13', '1234') if accepts(constraint, tokenizer, text)] == texts
  number = compile_constraint(tokenizer, json_schema={'type': 'number'})
  assert [text for text in ('1.5', '1.0', '1', '1.') if accepts(number, tokenizer, text)] == ['1.5', '1.0', '1']


_PERSON = {
  'type': 'object',
  'properties': {
    'nick': {'type': 'string'}, 'name': {'type': 'string'}, 'age': {'type': 'integer', 'minimum': 0},
    'tags': {'type': 'array', 'items': {'enum': ['a', 'b']}, 'minItems': 1, 'maxItems': 2},
  },
  'required': ['name'],
}  # fmt: skip


def test_objects_have_their_properties_in_order(tokenizer):
  constraint = compile_constraint(tokenizer, json_schema=json.dumps(_PERSON))
  for text in ('{"name":"x"}', '{"nick": "y", "name": "x", "age": 3}', '{"name": "x", "tags": ["a", "b"]}'):
    assert accepts(constraint, tokenizer, text), text
  for text in ('{}', '{"age": 3}', '{"age": 3, "name": "x"}', '{"name": "x",}', '{"name": "x", "tags": []}'):
    assert not accepts(constraint, tokenizer, text), text


def test_schemas_may_refer_to_themselves(tokenizer):
  node = {'type': 'object', 'properties': {'value': {'type': 'null'}, 'next': {'$ref': '#/$defs/node'}}}
  constraint = compile_constraint(tokenizer, json_schema={'$ref': '#/$defs/node', '$defs': {'node': node}})
  assert accepts(constraint, tokenizer, '{"value": null, "next": {"next": {"value": null}}}')
  with pytest.raises(ValueError, match='accepts nothing'):
    compile_constraint(
      tokenizer, json_schema={'$ref': '#/$defs/node', '$defs': {'node': node | {'required': ['next']}}}
    )


@pytest.mark.parametrize(
  ('schema', 'words'),
  [
    ({'type': 'array', 'uniqueItems': True}, "'#': uniqueItems is not supported"),
    ({'properties': {'a': {'not': {}}}}, "'#/properties/a': 'not' is not supported"),
    ({'type': 'number', 'maximum': 3}, 'of bounds of numbers only minimum 0'),
    ({'type': 'number', 'exclusiveMaximum': 3}, 'of bounds of numbers only minimum 0'),
    ({'type': 'integer', 'multipleOf': 3}, "'multipleOf' is not supported"),
    ({'allOf': [{'type': 'string'}, {'minLength': 2}]}, 'allOf of several'),
    ({'oneOf': [{'type': 'integer'}, {'type': 'number'}]}, 'oneOf is supported where'),
    ({'anyOf': [{}], 'type': 'string'}, "'type' beside anyOf"),
    ({'type': 'string', 'format': 'duration'}, "format 'duration' is not supported"),
    ({'type': 'string', 'format': ['date']}, r"format \['date'\] is not supported"),
    ({'oneOf': [{'type': 'object', 'properties': {}, 'required': 0}] * 2}, 'oneOf is supported where'),
    ({'type': 'string', 'pattern': 'a(?=b)'}, r"'#': in pattern 'a\(\?=b\)' looking around, \(\?=b, is not supported"),
    ({'properties': {'a': {'pattern': r'(?<!x)y'}}}, "'#/properties/a': in pattern .* looking around"),
    ({'type': 'string', 'pattern': r'\bx'}, r'\\b is not supported'),
    ({'type': 'string', 'pattern': r'(a)\1'}, r'\\1 is not supported'),
    ({'type': 'string', 'pattern': 'a^b'}, 'it matches nothing'),
    ({'type': 'object', 'required': ['b']}, "required names 'b'"),
    ({'$ref': 'https://example.org/schema'}, 'must name a part of this schema'),
    ({'$ref': '#/$defs/a'}, "there is no '#/\\$defs/a'"),
    ({'type': 'text'}, 'type must be one of'),
    ({'enum': []}, 'enum must be a list'),
    ({'type': 'string', 'pattern': 'a)|(b'}, "in pattern 'a\\)|\\(b' a parenthesis"),
    ({'oneOf': [{'required': 5}, {'required': None}]}, 'oneOf is supported where'),
    ({'type': 'number', 'enum': [float('inf')]}, 'finite numbers'),
    (False, 'accepts nothing'),
  ],
)
def test_what_cannot_be_done_is_refused_by_name(tokenizer, schema, words):
  with pytest.raises(ValueError, match=words) as caught:
    compile_constraint(tokenizer, json_schema=schema)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('given', 'words'),
  [
    ({}, 'a constraint is one of'),
    ({'regex': 'a', 'choices': ['b']}, 'got regex, choices'),
    ({'regex': '('}, 'regex cannot be compiled'),
    ({'regex': 'a^b'}, 'regex cannot be compiled'),
    ({'regex': 'a' + '(' * 5000}, 'nested more than'),
    ({'regex': 'a)|(b'}, 'a parenthesis or a bracket has no other half'),
    ({'regex': 'a\\'}, 'a backslash escapes nothing'),
    ({'regex': 'a', 'vocab_size': -5}, 'vocab_size must be a whole number of at least 1, got -5'),
    ({'choices': 5}, 'choices must be a list of texts'),
    ({'choices': {'a': 1}}, 'choices must be a list of texts'),
    ({'regex': '(?=a)b'}, r'looking around, \(\?=a, is not supported'),
    ({'json_schema': '{"type": "integer", "minimum": 1e999}'}, 'finite numbers'),
    ({'regex': 'a' * (2**20 + 1)}, 'it has 1,048,577 characters, allowed are 65,536'),
    ({'choices': ['a' * (2**20 + 1)]}, 'choices has 1,048,581 characters'),
    ({'regex': '\ud800'}, 'regex'),
    ({'regex': 3}, 'regex must be a text'),
    ({'choices': []}, 'choices must be a list of texts'),
    ({'choices': ['a', '']}, 'that are not empty'),
    ({'json_schema': '{"type": '}, 'the JSON schema'),
    ({'json_schema': '[' * 5000 + ']' * 5000}, 'the JSON schema'),
    ({'json_schema': {'type': object}}, 'must be a JSON value'),
    ({'json_schema': {1: 2}}, "the JSON schema at '#': '1' is not supported"),
    ({'json_schema': '{"type": "integer", "minimum": 1e999}'}, 'must be a JSON value'),
    ({'json_schema': {'type': 'number', 'enum': [float('inf')]}}, 'must be a JSON value'),
  ],
)
def test_wrong_arguments_get_one_line(tokenizer, given, words):
  with pytest.raises(ValueError, match=words) as caught:
    compile_constraint(tokenizer, **given)
  assert '\n' not in str(caught.value)


def test_hostile_expressions_and_schemas_are_bounded(tokenizer, monkeypatch):
  monkeypatch.setattr(constraints_module, '_SECONDS', 2)
  monkeypatch.setattr(constraints_module, '_MEMORY', 2**28)
  loops = {'$defs': {'a': {'anyOf': [{'$ref': '#/$defs/a'}] * 9 + [{'type': 'null'}]}}, '$ref': '#/$defs/a'}
  start = time.monotonic()
  for given in (
    {'regex': '(a{1000}){1000}'},
    {'regex': '(0|1)*1(0|1){18}'},
    {'json_schema': {'type': 'string', 'pattern': '^(([a-z]{0,99}){0,99}){0,99}$'}},
    {'json_schema': {'properties': {f'p{i}': loops for i in range(200)}, '$defs': loops['$defs']}},
    {'json_schema': {'type': 'array', 'items': {'type': 'array', 'minItems': 1000, 'maxItems': 1000}, 'minItems': 999}},
  ):
    with pytest.raises((ValueError, ConstraintBusyError), match='cannot be compiled|too large|more than') as caught:
      compile_constraint(tokenizer, **given)
    assert '\n' not in str(caught.value)
  assert time.monotonic() - start < 60


def test_what_is_narrower_is_said(tokenizer):
  schema = {'type': 'object', 'properties': {'a': {}, 'b': {'format': 'hostname'}}}
  said = compile_constraint(tokenizer, json_schema=schema).narrower
  assert [next(word for word in ('levels', 'labels', 'properties') if word in each) for each in said] == [
    'properties', 'levels', 'labels',
  ]  # fmt: skip
  closed = schema | {'properties': {}, 'additionalProperties': False}
  assert compile_constraint(tokenizer, json_schema=closed).narrower == ()


def test_too_little_time_or_memory_is_no_property_of_a_schema(tokenizer, monkeypatch):
  for name, value in (('_SECONDS', 0.01), ('_MEMORY', 2**24)):
    with monkeypatch.context() as patch:
      patch.setattr(constraints_module, name, value)
      with pytest.raises(ConstraintBusyError, match='within its bounds: ') as caught:
        compile_constraint(tokenizer, json_schema=_PERSON)
    assert not isinstance(caught.value, ValueError)
  compile_constraint(tokenizer, json_schema=_PERSON)


def test_a_table_that_is_too_large_is_refused(tokenizer, monkeypatch):
  monkeypatch.setattr(constraints_module, '_MOST_CELLS', 1000)
  with pytest.raises(ValueError, match='more than 1,000 transitions'):
    compile_constraint(tokenizer, json_schema=_PERSON)


def test_the_missing_package_is_named(tokenizer, monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(ValueError, match=r"pip install 'spectr_jax\[grammar\]'"):
    compile_constraint(tokenizer, regex='a')


def test_mutated_schemas_are_described_or_refused():
  tally, rng = hostile.Tally('JSON schema'), np.random.default_rng(0)
  schemas = [_PERSON, _APART, *(random_schema(rng) for _ in range(50))]
  for mutate in hostile.rngs():
    schema = hostile.mutated_json(mutate.choice(schemas), mutate)
    tally.read(lambda schema=schema: constraints_module._of_schema(schema), schema)
  tally.check(least_read=300)


# Texts of random schemas.


def random_schema(rng, depth=3):
  kind = rng.choice(['object', 'array', 'string', 'integer', 'number', 'boolean', 'null', 'enum', 'anyOf', 'pattern',
                     'format', 'const', 'types', 'any'][0 if depth else 2 :])  # fmt: skip
  match kind:
    case 'object':
      names = rng.permutation(['a', 'b c', 'd"e', 'é', 'f'])[: rng.integers(0, 5)].tolist()
      schema = {'type': 'object', 'properties': {name: random_schema(rng, depth - 1) for name in names}}
      if rng.random() < 0.8:
        schema['required'] = [name for name in names if rng.random() < 0.5]
      return schema | ({'additionalProperties': False} if rng.random() < 0.5 else {})
    case 'array':
      least, items = int(rng.integers(0, 3)), {}
      while ': {}' in f'{{0: {items}}}':  # lists of so many values of any kind take the compiler too long
        items = random_schema(rng, depth - 1)
      return {'type': 'array', 'items': items, 'minItems': least, 'maxItems': least + 2}
    case 'string':
      return {'type': 'string'} | ({'minLength': 1, 'maxLength': 5} if rng.random() < 0.5 else {})
    case 'integer':
      low = int(rng.integers(-1200, 1200))
      return {'type': 'integer', 'minimum': low, 'maximum': low + int(rng.integers(0, 3000))}
    case 'enum':
      return {'enum': [1, 'x', None, True, 2.5, [1, 'y'], {'z': 'w'}][rng.integers(0, 6) :]}
    case 'const':
      return {'const': ['only', 3, {'k': []}][rng.integers(0, 3)]}
    case 'anyOf':
      return {'anyOf': [random_schema(rng, max(depth - 1, 0)) for _ in range(2)]}
    case 'pattern':
      return {
        'type': 'string',
        'pattern': [r'^\d{2}-\w+$', 'ab|cd', '^x[^"\\\\\\x00-\\x20]?', '[0-9]$'][rng.integers(4)],
      }
    case 'format':
      return {
        'type': 'string',
        'format': ['date', 'time', 'date-time', 'email', 'ipv4', 'uuid', 'uri'][rng.integers(7)],
      }
    case 'types':
      return {'type': ['string', 'null', 'boolean'], 'maxLength': 3}
    case 'any':
      return {}
  return {'type': str(kind)}


def walk(rng, constraint, closeness=0.4):
  """A random way through a constraint's table, which goes towards an end every now and then."""
  used = np.unique(constraint.class_of)
  distance = np.where(constraint.is_final, 0, np.iinfo(np.int32).max - 1)
  while True:
    after = np.where(constraint.next_state < 0, np.iinfo(np.int32).max - 1, distance[constraint.next_state])
    closer = np.minimum(distance, after[:, used].min(axis=1) + 1)
    if (closer == distance).all():
      break
    distance = closer
  tokens, state = [], 0
  while True:
    ways = constraint.next_state[state, constraint.class_of]
    is_open = ways >= 0
    if constraint.is_final[state] and (not is_open.any() or rng.random() < closeness):
      return tokens
    if not constraint.is_final[state] and (rng.random() < closeness or len(tokens) > 200):
      is_open &= distance[ways] < distance[state]
    tokens.append(int(rng.choice(np.flatnonzero(is_open))))
    state = ways[tokens[-1]]


def check_text(tokenizer, tokens, schema):
  """Checks that tokens are a whole text that is valid."""
  text = tokenizer.decode(tokens)
  assert text.encode() == b''.join(tokenizer.token_contents[token] for token in tokens), (schema, tokens)
  jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


@pytest.mark.parametrize('count', [80, slow(2000)])
def test_texts_of_random_schemas_are_valid(tokenizer, count):
  rng = np.random.default_rng(1)
  for _ in range(count // 4):
    schema = random_schema(rng)
    constraint = compile_constraint(tokenizer, json_schema=schema)
    for _ in range(4):
      check_text(tokenizer, walk(rng, constraint), schema)


def check_generated(seed, count):
  """Decodes with the shipped pair until so many texts have ended; returns how many ended and were cut.

  Each batch has several constraints. Every text that ended is valid, every other one is the beginning of a way.
  """
  rng, num_ended, num_cut, batch = np.random.default_rng(seed), 0, 0, 0
  (target, tokenizer), (draft, _) = (spectr_jax.load_model(f'pretrained/{name}') for name in ('target', 'draft'))
  models, sizes = (target.for_decoding(), draft.for_decoding()), {'vocab_size': target.vocab_size}
  prompts = [tokenizer.encode_prompt(text) for text in ('Mr. Speaker', 'The owl', '{', 'On 3 May 1999 ')] * 4
  while num_ended < count:
    schemas = [schema for _ in range(4) for schema in [random_schema(rng)] * 4]
    each = [compile_constraint(tokenizer, json_schema=schema, **sizes) for schema in schemas[::4]]
    constraints = [constraint for constraint in each for _ in range(4)]
    made = spectr_jax.generate(
      jax.random.fold_in(jax.random.key(seed), batch), *models, prompts, method='race_traversal',
      tree=TokenTree.chains(2, 4), max_new_tokens=128, eos_id=tokenizer.eos_ids, constraint=constraints,
    )  # fmt: skip
    batch += 1
    for schema, constraint, tokens, length in zip(schemas, constraints, np.asarray(made.tokens), made.lengths):
      tokens = tokens[: int(length)].tolist()
      if tokens[-1] in tokenizer.eos_ids:
        num_ended += 1
        assert constraint.accepts(tokens[:-1]), (schema, tokens)
        check_text(tokenizer, tokens[:-1], schema)
        continue
      num_cut, state = num_cut + 1, 0
      for token in tokens:
        state = constraint.next_state[state, constraint.class_of[token]]
        assert state >= 0, (schema, tokens)
  return num_ended, num_cut


@pytest.mark.slow
def test_generated_texts_of_random_schemas_are_valid():
  ended, cut = check_generated(2, 100)
  assert cut < ended


def test_text_that_is_generated_is_whole(tokenizer):
  """By the names that users import, with the shipped pair's tokenizer and a draft."""
  target, own = spectr_jax.load_model('pretrained/draft')
  constraint = spectr_jax.compile_constraint(own, regex='(yes|no)[.!]')
  found = spectr_jax.generate_text(
    target, None, own, 'Mr. Speaker', max_new_tokens=8, constraint=constraint, method='autoregressive'
  )
  assert re.fullmatch('(yes|no)[.!]', found[0].text)
  assert found[0].finish_reason == 'eos'
