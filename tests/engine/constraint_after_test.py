"""Constraints behind a text, and bad words: any division into tokens, inside of a guess, and the law of what comes."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hub

import spectr_jax
from spectr_jax import METHODS, TokenTree, compile_constraint
from spectr_jax.io import constraints as constraints_module
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from spectr_jax.models.table import table_model
from spectr_jax.testing import chi_square
from tests.slow import slow_but

# Few tokens that divide the marker `>>x` in several ways, then a choice; a special token, and one that ends a text.
TOKENS = ['a', '>', '>>', 'x', '>x', '>>x', '>>xy', 'y', 'n', 'yn', '<think>', '<eos>']
SPECIAL, EOS = 10, 11
TEXTS = [each if place < SPECIAL else '' for place, each in enumerate(TOKENS)]


class Tokens:
  """As much of a tokenizer as `compile_constraint` reads."""

  vocab_size = len(TOKENS)
  token_contents = tuple(each.encode() for each in TEXTS)
  special_token_names = {SPECIAL: '<think>', EOS: '<eos>'}


def text_of(tokens):
  """The text in which special tokens have their names, without an end."""
  return ''.join(TOKENS[token] for token in tokens if token != EOS)


def may_follow(text, marker='>>x', choices=('y', 'yn', 'n')):
  """Whether a text, which is not over, may become one of a choice behind the marker; whether it is one."""
  place = text.find(marker)
  if place < 0:
    return True, False
  rest = text[place + len(marker) :]
  return any(each.startswith(rest) for each in choices), rest in choices


def law_of(logits, first, num_tokens):
  """The probabilities of continuations with the mask at every step, by what texts may be."""
  law = {}

  def extend(tokens, chance):
    if len(tokens) == num_tokens or tokens[-1:] == (EOS,):
      law[tokens] = chance
      return
    text = text_of(tokens)
    is_over = '>>x' in text
    allowed = [
      may_follow(text)[1] if token == EOS else not is_over if token == SPECIAL else may_follow(text + TEXTS[token])[0]
      for token in range(len(TOKENS))
    ]
    values = np.where(allowed, np.float64(logits[(first, *tokens)[-1]]), -np.inf)
    probs = np.exp(values - values.max())
    for token, share in enumerate(probs / probs.sum()):
      if share:
        extend((*tokens, token), chance * share)

  extend((), 1.0)
  return law


@pytest.fixture(scope='module')
def chains():
  """The logits of target and draft, `[V, V]` each, and their models; the marker is likely."""
  logits = np.random.default_rng(1).normal(size=(2, len(TOKENS), len(TOKENS))).astype(np.float32)
  logits[:, :, 1:7] += 1
  return logits, [table_model(jnp.asarray(each)) for each in logits]


@pytest.fixture(scope='module')
def constraint():
  pytest.importorskip('outlines_core', reason='needs the extra grammar')
  return compile_constraint(Tokens(), choices=['y', 'yn', 'n'], after='>>x')


def sampled(models, constraint, tree, num_tokens, num_rows, method='race_traversal'):
  result = spectr_jax.generate(
    jax.random.key(4), *models, np.zeros((num_rows, 1), np.int32), method=METHODS[method], tree=tree,
    max_new_tokens=num_tokens, eos_id=EOS, constraint=constraint,
  )  # fmt: skip
  pairs = zip(np.asarray(result.tokens).tolist(), np.asarray(result.lengths).tolist())
  return [tuple(tokens[:length]) for tokens, length in pairs], np.asarray(result.origins)


@pytest.mark.parametrize('shape', [(1, 4), (2, 4)])
def test_every_text_is_valid_behind_the_marker(chains, constraint, shape):
  texts, origins = sampled(chains[1], constraint, TokenTree.chains(*shape), 24, 256)
  num_inside = num_over = 0
  for tokens, origin in zip(texts, origins):
    assert may_follow(text_of(tokens))[0]
    if tokens[-1] == EOS:
      assert may_follow(text_of(tokens))[1]
      num_over += 1
    # The token that completes the marker, between two kept guesses of one round.
    places = [at for at in range(len(tokens)) if '>>x' in text_of(tokens[: at + 1])]
    num_inside += any((origin[at - 1 : at + 2] == 0).all() for at in places[:1] if 0 < at < len(tokens) - 1)
  assert num_over > 200
  assert num_inside > 10


@pytest.mark.usefixtures('optimized')
@pytest.mark.parametrize('method', slow_but(['race_traversal'], ['race_traversal', 'spectr', 'block', 'ersd']))
def test_the_loop_samples_the_law_behind_the_marker(chains, constraint, method):
  tree = TokenTree.chains(1 if METHODS[method].max_drafts == 1 else 2, 3)
  texts, _ = sampled(chains[1], constraint, tree, 4, 16384, method)
  law, counts = law_of(chains[0][0], 0, 4), collections.Counter(texts)
  assert set(counts) <= set(law)
  found, wanted = (np.array([each.get(text, 0) for text in law]) for each in (counts, law))
  assert chi_square(found, wanted).p_value > 1e-4


def test_tokens_divide_the_marker_in_any_way(constraint):
  def accepts(*names):
    return constraint.accepts([TOKENS.index(name) for name in names])

  assert accepts('a', '>>x', 'y')
  assert accepts('>', '>', 'x', 'y', 'n')
  assert accepts('>', '>>x', 'n')
  assert accepts('<think>', '>', '>x', 'yn')
  assert accepts('>>xy', 'n')
  assert not accepts('y')
  assert not accepts('>>x')
  assert not accepts('>>x', 'a')
  assert not accepts('>>x', '<think>', 'y')
  assert not accepts('>>x', 'y', 'a')


def test_bad_words_are_found_however_tokens_divide_them():
  found = compile_constraint(Tokens(), bad_words=['>>x', 'ny', [SPECIAL, 0], [8, 8, 8]])
  rng = np.random.default_rng(0)
  is_bad = re.compile(r'>>x|ny').search
  kinds = set()
  for _ in range(3000):
    tokens = rng.integers(0, EOS, rng.integers(1, 6)).tolist()
    by_ids = any(tokens[at : at + len(ids)] == ids for ids in ([SPECIAL, 0], [8, 8, 8]) for at in range(len(tokens)))
    wanted = not by_ids and not is_bad(text_of(tokens))
    kinds.add((wanted, by_ids))
    assert found.accepts(tokens) == wanted, tokens
  assert kinds == {(True, False), (False, False), (False, True)}


def test_words_that_contain_each_other_are_all_found():
  found = constraints_module._search([b'ab', b'abcd', b'bc', b'xab', b'c'], 256)
  for text in (b'zab', b'xxab', b'bbc', b'acab', b'xc'):
    state = 0
    for at, byte in enumerate(text):
      state = found[state, byte]
      is_found = any(word in text[: at + 1] for word in (b'ab', b'abcd', b'bc', b'xab', b'c'))
      assert (state == len(found)) == is_found, (text, at)
      if is_found:
        break


def test_special_tokens_may_be_the_marker():
  pytest.importorskip('outlines_core', reason='needs the extra grammar')
  found = compile_constraint(Tokens(), regex='n+', after='<think>', bad_words=['nn'])
  assert found.accepts([0, SPECIAL, 8])
  assert not found.accepts([0, SPECIAL, 8, 8])
  assert not found.accepts([8])
  assert not found.accepts([SPECIAL, SPECIAL, 8])


def test_json_behind_a_marker_may_begin_on_a_new_line():
  pytest.importorskip('outlines_core', reason='needs the extra grammar')
  tokenizer = HubTokenizer.from_parts(tiny_hub.backend(merges=()), bos_id=None, eos_ids=(41,), add_bos=False)
  found = compile_constraint(tokenizer, json_schema={'type': 'integer'}, after='</t>')
  for text, is_valid in (
    ('so</t>12', True),
    ('</t>\n\n7', True),
    ('</t>\n\n\n7', False),
    ('12', False),
    ('</t>x', False),
  ):
    assert found.accepts(tokenizer.encode(text)) == is_valid, text


@pytest.mark.parametrize(('given', 'said'), [
  ({'after': 'x'}, 'a constraint is one of regex, json_schema, choices; got none'),
  ({'after': 'x', 'bad_words': ['a']}, 'after is where a constraint begins, and there is none'),
  ({'after': '', 'regex': 'a'}, 'after must be a text that is not empty'),
  ({'after': 'x' * 129, 'regex': 'a'}, 'after has 129 bytes, allowed are 128'),
  ({'bad_words': 'ab'}, 'bad_words must be a list of at most 64 texts or lists of ids'),
  ({'bad_words': ['']}, 'a text of bad_words must be a text that is not empty'),
  ({'bad_words': ['ab' * 64] * 9}, 'bad_words have 1,152 bytes and ids together, allowed are 1,024'),
  ({'bad_words': [[]]}, 'bad_words must be texts or lists of 1 to 128 ids'),
  ({'bad_words': [[99]]}, 'bad_words must name ids from 0 to 11, got 99'),
  ({'bad_words': [[True]]}, 'bad_words must be texts or lists of 1 to 128 ids'),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_one_line(given, said):
  with pytest.raises(ValueError, match=re.escape(said)) as error:
    compile_constraint(Tokens(), **given)
  assert '\n' not in str(error.value)
