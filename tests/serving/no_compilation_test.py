"""What a request asks for is data: nothing is compiled once the endpoint serves."""

import concurrent.futures
import itertools
import time

import jax.monitoring
import numpy as np
import pytest
from starlette.testclient import TestClient

from decode.serving.answer import Served
from decode.serving.app import make_app
from spectr_jax.engine import Budget
from spectr_jax.engine.loop import run_rounds
from spectr_jax.engine.reading import _put_rows
from tests.serving.stub import LONGEST, NEW, make_worker, running

_FILTERS = {'top_k': 3, 'top_p': 0.5, 'min_p': 0.1}
_SUBSETS = [
  {'temperature': number / 2} | {name: _FILTERS[name] for name in names}
  for number in range(4)
  for names in itertools.combinations(_FILTERS, number)
]


_SCHEMAS = [
  {'type': 'object', 'properties': {name: {'type': kind}}, 'required': [name]}
  for name, kind in (('a', 'null'), ('b', 'integer'), ('c', 'string'), ('d', 'boolean'), ('e', 'number'))
]


def _ask(client, body):
  response = client.post('/v1/completions', json={'prompt': 'owl', 'max_tokens': 4} | body)
  assert response.status_code == 200, response.text


def _ask_for_forms(client):
  """What has a constraint, alone, beside others and beside plain requests, and all that it may come with."""
  forms = [{'response_format': {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': x}}} for x in _SCHEMAS]
  forms += [{'structured_outputs': {'regex': '[a-c]{2,40}'}}, {'response_format': {'type': 'json_object'}}]
  for form in forms:
    for more in ({}, {'stream': True}, {'logprobs': 0}, {'n': 4, 'top_k': 3}):
      _ask(client, form | more)
  with concurrent.futures.ThreadPoolExecutor(12) as pool:
    for each in [pool.submit(_ask, client, form) for form in [*forms, {}, *forms, {'logprobs': 3}]]:
      each.result()
  for choices in (['a', 'b'], ['ow', 'oww', 'x'], [f'{number:04}' for number in range(14)]):
    for more in ({}, {'max_tokens': 0}, {'n': 2, 'prompt': ['a', 'a b c d e f g h']}):
      _ask(client, {'structured_outputs': {'choice': choices}, 'choice_probs': True} | more)


def test_filters_are_data(client):
  sizes = set()
  for subset in _SUBSETS:
    _ask(client, subset)
    sizes.add((run_rounds._cache_size(), _put_rows._cache_size()))
  assert len(sizes) == 1


@pytest.mark.slow
@pytest.mark.parametrize('budget', [None, 'auto', 8])
def test_nothing_is_compiled_after_the_start(models, tokenizer, budget):
  pytest.importorskip('outlines_core', reason='needs the extra grammar')
  budget = budget and Budget(budget, is_resized=True)
  worker, compiled = make_worker(models, tokenizer, longest=LONGEST + NEW - 1, budget=budget), []

  def note(name, seconds, **_):
    if name.startswith('/jax/core/compile/'):  # traced, lowered or compiled
      compiled.append(seconds)

  jax.monitoring.register_event_duration_secs_listener(note)
  jax.jit(lambda x: x * 1.2345)(1.0)
  assert compiled  # programs are noted
  steps = []
  worker.compile(lambda *step: steps.append(step))
  assert steps[-1] == (len(steps) - 1, len(steps) - 1)
  with running(worker):
    while not worker.is_measured:
      time.sleep(0.1)
    served = Served(worker, tokenizer, 'tiny', NEW, together=LONGEST + NEW)
    served.prepare()
    client = TestClient(make_app(served))
    compiled.clear()
    for length in (1, 7, 16, 17, 40, 59, 68):  # the last ones are read by another program
      for body in ({}, {'logprobs': 0}, {'echo': True, 'logprobs': length % 21}, {'logprobs': 20}, {'stream': True}):
        _ask(client, {'prompt': [1] * length} | body)
      _ask(client, {'prompt': [1] * length, 'max_tokens': 0, 'echo': True, 'logprobs': 1 + length % 20})
    for subset in _SUBSETS:
      _ask(client, subset | {'seed': 1, 'stop': ['x']})
    for number in (1, 2, 3, 9, 16):
      _ask(client, {'n': number})
    assert compiled == []
    _ask_for_forms(client)
    assert compiled == []


@pytest.mark.slow
def test_what_a_budget_may_choose_is_measured_while_nobody_waits(models, tokenizer):
  """A server is ready with the whole tree in all rows; who comes has that, and what is measured goes on behind."""
  budget = Budget(is_resized=True)
  worker = make_worker(models, tokenizer, budget=budget, prefix_cache_bytes=2**20)
  worker.compile(lambda *_: None)
  whole = budget.sizes[-1], len(budget.trees) - 1
  assert {(size, place) for size, place, _ in budget._ran} == {whole} == set(budget.seconds)
  assert len(budget.sizes) > 1
  idle = worker._measure_next
  measured = []

  def measure_next():
    if len(measured) == 1:  # somebody comes before it goes on
      time.sleep(0.2)
    measured.append(idle())
    return measured[-1]

  worker._measure_next = measure_next
  with running(worker):
    client = TestClient(make_app(Served(worker, tokenizer, 'tiny', NEW, together=LONGEST + NEW)))
    while len(measured) < 1:
      time.sleep(0.01)
    _ask(client, {'n': 2})
    while not worker.is_measured:
      time.sleep(0.01)
    rounds = dict(budget.rounds)
    _ask(client, {'n': 2})
  assert {place for _, place in budget.seconds} == set(range(len(budget.trees)))
  assert {size for size, _ in budget.seconds} == {*budget.sizes}
  assert dict(budget.rounds) != rounds


@pytest.mark.slow
def test_a_budget_measures_one_program_at_a_time_where_somebody_always_waits(models, tokenizer, monkeypatch):
  monkeypatch.setattr('decode.serving.worker._PATIENCE', 0.0)
  budget = Budget()
  worker = make_worker(models, tokenizer, budget=budget)
  worker.compile(lambda *_: None)
  monkeypatch.setattr(type(worker), 'is_idle', property(lambda self: False))
  known = {*budget.seconds}
  for number in range(1, len(budget.trees)):
    worker._measure()
    while len(budget.seconds) == len(known):
      budget.choose(1)
      budget.note(1.0, 1, 1, np.zeros(2, int))
    assert len({*budget.seconds} - known) == 1
    assert budget.credit == 0
    known = {*budget.seconds}
    for _ in range(20):
      budget.choose(1)
      budget.note(1.0, 1, 1, np.zeros(2, int))
    assert {*budget.seconds} == known, number
  assert not worker.is_measured


def test_a_fault_of_what_is_measured_is_not_tried_again(stub, tokenizer):
  def fail():
    yield None
    raise MemoryError('no room')

  stub._measuring = (step for step in fail())
  stub._budget = None
  with running(stub):
    client = TestClient(make_app(Served(stub, tokenizer, 'tiny', NEW)))
    _ask(client, {})
    assert stub.is_measured
    assert stub.fault is None
