"""How often the loop compiles, and what stays in place."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spectr_jax
from benchmarks import rounds
from decode.experiment import latency
from spectr_jax import Decoder, TokenTree, lookup_beside, lookup_drafter
from spectr_jax.draft import Confident, DraftContext, Estimated, Likeliest, growing, model_drafter
from spectr_jax.draft.model_drafter import ModelDrafter
from spectr_jax.engine import init_decode, reading
from spectr_jax.engine import loop as engine_loop
from spectr_jax.engine.decoder import buffer_size, choose_cache_size
from spectr_jax.kernels import native
from tests.draft.tiny_heads import tiny_head, tiny_medusa, tiny_one_pass
from tests.engine.runs import KINDS, LENGTHS, NEW, PROMPTS, begin, generate, make_keys
from tests.slow import slow, slow_but

pytestmark = pytest.mark.usefixtures('highest')


@pytest.mark.parametrize('method', slow_but(['spectr'], KINDS))
def test_one_compilation_per_shape_and_method(tables, traces, method):
  def run(*args, models=tables, **options):
    generate(models, method, *args, **options)
    programs = reading._read_target._cache_size(), engine_loop.run_rounds._cache_size()
    return len(traces['target']), len(traces['draft']), *programs

  engine_loop.run_rounds.clear_cache()  # other tests compile the same programs
  filtered = run(jax.random.key(0), top_k=2, top_p=0.9, min_p=0.1)
  options = {'top_k': np.array([0, 1, 2, 3]), 'top_p': np.array([0.5, 1, 0.2, 0.9]), 'min_p': [0.5, 0, 0, 1]}
  assert run(jax.random.key(1), **options) == filtered
  first = run(jax.random.key(0))
  assert first[3] == filtered[3] + 1  # a filter that no row uses is not in the program
  for options in (
    {'temperature': 0.0},
    {'temperature': np.array([0.1, 0.2, 0.3, 2.0])},
    {'top_k': 0, 'top_p': np.ones(4), 'min_p': np.zeros(4)},
  ):
    assert run(jax.random.key(1), **options) == first
  assert run(make_keys(8)) == first
  assert run(jax.random.key(2), PROMPTS[::-1].copy(), np.array([6, 5, 4, 1])) == first
  scaled = dataclasses.replace(tables[0], params=tables[0].params * 0.5)
  assert run(jax.random.key(0), models=(scaled, tables[1])) == first
  for eos_id in (3, (2, 0, 1)):  # ids that end rows are data
    assert run(jax.random.key(0), eos_id=eos_id) == first
  if method in ('autoregressive', 'speculative'):  # other buffers are other shapes: the counters do count
    is_drafting = method == 'speculative'
    again = run(jax.random.key(0), max_new_tokens=[200, 300][is_drafting])  # of its own: prefills are shared
    assert [a > b for a, b in zip(again, first)] == [True, is_drafting, True, True]


def test_limits_are_data(tables, traces):
  """As long as caches and buffers are as large; models that state no context may compute on all that fits."""
  known = tuple(dataclasses.replace(table, context_length=200) for table in tables)

  def run(models, max_new_tokens):
    generate(models, 'speculative', make_keys(), max_new_tokens=max_new_tokens)
    return len(traces['target']), reading._read_target._cache_size(), engine_loop.run_rounds._cache_size()

  first = run(known, 5)
  assert [run(known, limit) for limit in (1, 17, 58, np.array([3, 1, 58, 2]))] == [first] * 4
  assert all(a > b for a, b in zip(run(known, 59), first))  # 65 tokens with the prompt
  assert choose_cache_size(*known, 65) == 128
  assert choose_cache_size(*known, 195) == 200
  for draft in (tables[1], model_drafter(tables[1])):
    assert choose_cache_size(*tables, 65) == choose_cache_size(known[0], draft, 65) == 65
  assert choose_cache_size(known[0], lookup_drafter(17), 65) == choose_cache_size(known[0], None, 65) == 128
  assert [buffer_size(n) for n in (1, 64, 65, 512, 1000, 1025)] == [64, 64, 128, 512, 1024, 1152]


def test_programs_hold_the_forms_of_their_platform_alone(monkeypatch, target, draft):
  """That of the default device, whatever the default backend is."""
  decoder, state = begin((target, draft), 'race_traversal', make_keys())
  guesses = jax.eval_shape(latency.draft, decoder, state)
  logits = jax.eval_shape(latency._score, decoder, state, guesses)
  sizes = {'num_new': 2, 'cache_size': decoder.cache_size, 'sharding': None}
  context, nothing = DraftContext(LENGTHS, target, PROMPTS, None), (None, None)
  programs = {
    'rounds': (engine_loop.run_rounds, (decoder, state, 1), {}),
    'prefill': (reading._read_target, (target, nothing, PROMPTS, LENGTHS, None), sizes),
    'prefill of the draft': (reading._read_draft, (decoder.drafter, None, context, None), sizes | {'classes': ()}),
    'turn': (reading._read_target, (target, (state.target_cache, None), PROMPTS, LENGTHS, LENGTHS - 1), sizes),
    'turn of the draft': (
      reading._read_draft, (decoder.drafter, state.draft_state, context, LENGTHS - 1), sizes | {'classes': ()},
    ),
    'draft': (latency.draft, (decoder, state), {}),
    'target': (latency._score, (decoder, state, guesses), {}),
    'verification': (latency._judge, (decoder, state, guesses, logits), {}),
  }  # fmt: skip

  def traced():
    return {name: str(program.trace(*args, **options).jaxpr) for name, (program, args, options) in programs.items()}

  expected = traced()
  assert [name for name, program in expected.items() if 'platform_index' in program] == []
  monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
  with jax.default_device('cpu'):
    assert traced() == expected


@pytest.mark.slow
def test_methods_share_the_prefill_of_the_target(tables):
  def num_programs(method):
    generate(tables, method, make_keys(), max_new_tokens=NEW + 5)
    return reading._read_target._cache_size()

  assert num_programs('autoregressive') == num_programs('speculative') == num_programs('spectr') > 0


def test_programs_are_those_of_a_drafter(tables):
  """Drafters of one class share programs, others do not."""

  @jax.tree_util.register_dataclass
  @dataclasses.dataclass(frozen=True)
  class Other(ModelDrafter):
    pass

  def structure_of(drafter):
    return jax.tree.structure(begin((tables[0], drafter), 'speculative', make_keys())[0])

  assert structure_of(model_drafter(tables[1])) == structure_of(tables[1])
  assert structure_of(tables[1]) != structure_of(Other(tables[1]))

  @jax.tree_util.register_dataclass
  @dataclasses.dataclass(frozen=True)
  class Beside(ModelDrafter):
    parts: tuple[ModelDrafter, ...] = ()

  beside = [Beside(tables[1], (kind(tables[1]),)) for kind in (ModelDrafter, Other)]
  assert structure_of(beside[0]) != structure_of(beside[1])


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'tree', 'growths'),
  [
    slow('head', TokenTree.chains(2, 3), [None]),
    ('head', TokenTree.slots((2, 2, 2)), [Likeliest(), Likeliest(temperature=0.5, threshold=0.3)]),
    slow('model', TokenTree.slots((2, 3)), [Confident(), Confident(0.5, 0.1)]),
    slow('one pass', TokenTree.slots((2, 3)), [Estimated(), Estimated(0.1)]),
    slow('beside a head', TokenTree.chains(2, 3), [None]),
  ],
)
def test_rounds_of_every_drafter_compile_once(target, draft, name, tree, growths):
  """Round by round, for other prompts, sampling parameters and rules of growth."""
  make = {'model': lambda *_, **__: model_drafter(draft), 'one pass': tiny_one_pass}.get(name, tiny_head)
  drafter, num_traces = make(target.vocab_size, width=32), []

  @jax.tree_util.register_dataclass
  @dataclasses.dataclass(frozen=True)
  class Counting(type(drafter)):
    def propose(self, *rest):
      num_traces.append(name)
      return super().propose(*rest)

  counts, drafter = [], Counting(**vars(drafter))
  drafter = lookup_beside(drafter) if name == 'beside a head' else drafter
  for seed, (growth, temperature) in enumerate(itertools.product(growths, (1.0, 0.0))):
    own = drafter if growth is None else growing(drafter, growth)
    decoder, state = begin((target, own), 'race_traversal', make_keys(seed), tree=tree, temperature=temperature)
    for _ in range(4):
      state = spectr_jax.engine.decode_rounds(decoder, state, 1)
      counts.append((len(num_traces), engine_loop.run_rounds._cache_size(), reading._read_draft._cache_size()))
    assert int(state.result.num_target_calls.max()) == 4
  assert len(set(counts)) == 1
  assert counts[0][0] >= 1


@pytest.mark.parametrize(
  ('drafter', 'per_token'),
  [
    # Keys and values of one layer with one head of width 4; the text; two hidden states of width 32.
    (lambda: tiny_head(17, width=32), 2 * 4 * 4 + 4 + 2 * 32 * 4),
    (lambda: lookup_beside(tiny_head(17, width=32)), 2 * 4 * 4 + 4 + 2 * 32 * 4),
    (lambda: tiny_medusa(17, width=32), 32 * 4),
    # Keys and values of two layers.
    (lambda: tiny_one_pass(17, width=32), 2 * 2 * 4 * 4 + 4 + 2 * 32 * 4),
    (lambda: lookup_drafter(17), 4),
  ],
  ids=['head', 'beside a head', 'Medusa', 'one pass', 'lookup'],
)
def test_memory_of_a_drafters_state(target, drafter, per_token):
  """Bytes per row and token of its room, as docs/tables/drafters.md has them."""
  sizes, plain = [], []
  for cache_size in (40, 1040):
    for method, each, measured in (('race_traversal', drafter(), sizes), ('autoregressive', None, plain)):
      _, state = begin((target, each), method, make_keys(), cache_size=cache_size)
      own = state.draft_state, state.text, state.features
      measured.append(sum(leaf.nbytes for leaf in jax.tree.leaves(own)) / len(state.keys))
  assert (sizes[1] - sizes[0]) / 1000 == per_token
  assert plain == [0, 0]


def test_state_is_donated_and_models_are_not(target, draft):
  decoder, old = begin((target, draft), 'speculative', make_keys())
  state = spectr_jax.engine.decode_rounds(decoder, old, 1)
  for cache in (old.target_cache, old.draft_state.cache):
    assert all(array.is_deleted() for array in (*cache.keys, *cache.values))
  assert not any(array.is_deleted() for array in jax.tree.leaves((target, draft)))
  assert decoder.target is target
  assert decoder.drafter.model is draft
  spectr_jax.engine.decode_rounds(decoder, state, 1)


@pytest.mark.parametrize('name', ['autoregressive', 'speculative'])
def test_caches_are_not_copied(target, draft, name):
  """Between two rounds they stay where they are, and what is committed is written into them."""
  decoder, state = begin((target, draft), name, make_keys())
  program = engine_loop.run_rounds.lower(decoder, state, np.int32(1)).compile().as_text()
  shapes = {'f32[' + ','.join(map(str, x[0].shape)) + ']' for x in (state.target_cache.keys, state.target_cache.values)}
  assert all(shape in program for shape in shapes)
  copied = re.findall(r'= (f32\[[\d,]*\])\S* copy\(', program)
  assert not shapes & set(copied), copied


def test_few_kernels_are_outside_of_networks(target, draft):
  """Of noise, draws, verification and commit; those of a CPU, whose launches cost as much as a small draft."""
  decoder = Decoder.make(target, draft, method='block', tree=TokenTree.chains(1, 4), max_new_tokens=NEW, cache_size=64)
  state = init_decode(decoder, jax.random.key(0), PROMPTS[:1], LENGTHS[:1])
  names = list(rounds.kernels(engine_loop.run_rounds.lower(decoder, state, np.int32(1)).compile().as_text()))
  assert 0 < rounds.outside_networks(names) <= (150 if native.form() else 250)
  assert rounds.outside_networks(names) < len(names)  # the networks are seen


def test_kernels_are_counted():
  def step(x):
    with jax.named_scope('network'):
      y = jnp.sin(x @ x)
    return jnp.cumsum(jnp.cos(y), axis=0) @ x

  names = list(rounds.kernels(jax.jit(step).lower(jnp.ones((64, 64))).compile().as_text()))
  products = [name for name in names if 'dot_general' in name]
  assert ['network' in name for name in products] == [True, False]
  assert rounds.outside_networks(names) == len(names) - sum('/network' in name for name in names)
