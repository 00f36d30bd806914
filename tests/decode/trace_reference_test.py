"""The reference code on the trace page: the displayed text is run, and its joint distribution enumerated."""

import collections
import functools
import html
import itertools
import pathlib
import re

import numpy as np
import pytest

from decode import trace
from decode.trace_page import reference

_ROUND = 'speculative_round'


def _shown():
  return html.unescape(re.search(r'<code id="reference">(.*?)</code>', trace.make_page({}), re.DOTALL)[1])


class _Uniform:
  """A uniform number of which only the outcome of a comparison is known."""

  def __init__(self, choose):
    self._choose = choose

  def __lt__(self, threshold):
    return self._choose([threshold, 1 - threshold]) == 0


class _Scripted:
  """A generator that makes the choices of a script and then the first possible ones; it notes all others."""

  def __init__(self, script):
    self.script, self.probability, self.others, self._place = script, 1.0, [], 0

  def _choose(self, probs):
    if self._place == len(self.script):
      first, *rest = np.flatnonzero(np.asarray(probs) > 0).tolist()
      self.others += [[*self.script, other] for other in rest]
      self.script = [*self.script, first]
    choice = self.script[self._place]
    self._place += 1
    self.probability *= probs[choice]
    return choice

  def choice(self, size, p):
    assert len(p) == size
    return self._choose(p)

  def random(self):
    return _Uniform(self._choose)


def _all_outcomes(run):
  """Every result of `run(rng)` with its probability."""
  probs, scripts = collections.Counter(), [[]]
  while scripts:
    rng = _Scripted(scripts.pop())
    probs[tuple(run(rng))] += rng.probability
    scripts += rng.others
  return probs


def _model(seed, num_tokens):
  """A function from texts to distributions with zeros, other ones after every text."""

  @functools.cache
  def probs_after(text):
    rng = np.random.default_rng([seed, *text])
    probs = rng.dirichlet(np.full(num_tokens, 0.7))
    if num_tokens > 2 and rng.random() < 0.3:
      probs[rng.integers(num_tokens)] = 0
    return probs / probs.sum()

  return lambda text: probs_after(tuple(text))


def _errors(code, num_drafts, length, num_tokens=4, horizon=3):
  """Total variation of the joint distributions of the first tokens after one round and after rounds in a row."""
  scope = {}
  exec(code, scope)
  draft, target = _model(1, num_tokens), _model(2, num_tokens)

  @functools.cache
  def round_probs(text):
    return _all_outcomes(lambda rng: scope[_ROUND](rng, list(text), draft, target, num_drafts, length))

  def written(one_round_only):
    probs, texts = collections.Counter(), {(): 1.0}
    while texts:
      text, probability = texts.popitem()
      if len(text) >= horizon:
        probs[text[:horizon]] += probability
        continue
      follows = dict(enumerate(target(text))) if one_round_only and text else round_probs(text)
      for added, chance in follows.items():
        longer = text + (added if isinstance(added, tuple) else (added,))
        texts[longer] = texts.get(longer, 0) + probability * chance
    return probs

  wanted = {
    text: np.prod([target(text[:i])[text[i]] for i in range(horizon)])
    for text in itertools.product(range(num_tokens), repeat=horizon)
  }
  all_probs = [written(one_round_only) for one_round_only in (True, False)]
  assert all(abs(sum(probs.values()) - 1) < 1e-9 for probs in all_probs)
  return [sum(abs(probs[text] - probability) for text, probability in wanted.items()) / 2 for probs in all_probs]


def test_the_page_shows_the_module():
  assert _shown().strip() == pathlib.Path(reference.__file__).read_text(encoding='utf-8').strip()
  code = re.sub(r'""".*?"""', '', _shown(), flags=re.DOTALL)
  assert len([line for line in code.splitlines() if line.strip()]) <= 32


@pytest.mark.parametrize(('num_drafts', 'length'), [(1, 2), (2, 2), (3, 1)])
def test_the_code_on_the_page_is_lossless(num_drafts, length):
  assert max(_errors(_shown(), num_drafts, length)) < 1e-12


def test_it_draws_from_a_real_generator():
  rng = np.random.default_rng(0)
  rounds = [reference.speculative_round(rng, [0], _model(1, 4), _model(2, 4), 1, 3) for _ in range(200)]
  assert {len(tokens) for tokens in rounds} == {1, 2, 3, 4}
  assert all(type(token) is int for tokens in rounds for token in tokens)


@pytest.mark.parametrize(
  ('right', 'wrong'),
  [
    ('rest = residual(rest, p)', 'pass'),  # the residual left out
    ('rest[x] / p[x]', 'drafts[0][2][i][x] / p[x]'),  # later candidates judged against the whole target
    ('draw(rng, p[-1])', 'draw(rng, draft(text))'),  # drawn from another distribution than the one kept
    (' if each[0][i] == x', ''),  # drafts that have parted stay
    ('drafts[0][2][length])]  # the bonus', 'drafts[0][2][length - 1])]  # the bonus'),  # after the wrong token
    ('np.maximum(q - p, 0)', 'q * (q > p)'),  # another residual
  ],
)
def test_a_wrong_variant_is_caught(right, wrong):
  assert _shown().count(right) == 1
  with np.errstate(divide='ignore', invalid='ignore'):
    errors = _errors(_shown().replace(right, wrong), 2, 2)
  assert max(errors) > 1e-3
