"""Penalties: of the text so far on every path of a tree, exactly and in the loop, against plain loops in NumPy."""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coarse import coarse

import spectr_jax
from spectr_jax import METHODS, Constraint, Request, SamplingParams, Session, TokenTree, generate_many, lookup_drafter
from spectr_jax.draft import Confident, Likeliest, growing, lookup_beside, model_drafter, vocabulary_drafter
from spectr_jax.engine import Rows, loop
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.models.table import table_model
from spectr_jax.penalties import Penalties, TokenCounts
from spectr_jax.sampling import COUNTED, logits_to_probs
from spectr_jax.sharding import make_mesh
from spectr_jax.testing import chi_square, joint_law, random_tables, tiny_transformers
from spectr_jax.testing.tables import first_context
from tests.draft.tiny_heads import tiny_head, tiny_medusa, tiny_one_pass
from tests.draft.toy_vocabularies import other_vocabulary
from tests.engine.runs import begin, generate, make_keys
from tests.slow import slow_but

V, EOS = 6, 5
LOSSLESS = [name for name, method in METHODS.items() if method.is_lossless]
WITH_LAW = [name for name in LOSSLESS if not METHODS[name].is_seed_exact]  # the others are proven token for token
ALL = {
  'presence_penalty': 0.6,
  'frequency_penalty': 0.4,
  'repetition_penalty': 1.4,
  'logit_bias': {1: 0.7, 4: -0.9},
  'min_tokens': 2,
}  # fmt: skip
PROMPT = (2, 0)


def penalized(logits, prompt, new, *, presence_penalty=0, frequency_penalty=0, repetition_penalty=1, logit_bias=(),
              min_tokens=0, eos_id=EOS):  # fmt: skip
  """The logits `[V]` after a text, token by token."""
  out = []
  for token, value in enumerate(np.asarray(logits, np.float64)):
    value += dict(logit_bias).get(token, 0)
    if token == eos_id and len(new) < min_tokens:
      value = -np.inf
    if token in prompt or token in new:
      value = value / repetition_penalty if value > 0 else value * repetition_penalty
    value -= frequency_penalty * list(new).count(token)
    value -= presence_penalty * (token in new)
    out.append(value)
  return np.array(out)


def law_after(logits, prompt, new, temperature=1.0, **options):
  values = penalized(logits, prompt, new, **options) / temperature
  probs = np.exp(values - values.max())
  return probs / probs.sum()


def law_of(logits, prompt, num_tokens, **options):
  """The probabilities of continuations of a Markov chain, by texts that may end early."""
  law = {}

  def extend(text, chance):
    if len(text) == num_tokens or text[-1:] == (EOS,):
      law[text] = chance
      return
    for token, share in enumerate(law_after(logits[(prompt + text)[-1]], prompt, text, **options)):
      if share:
        extend((*text, token), chance * share)

  extend((), 1.0)
  return law


@pytest.fixture(scope='module')
def chains():
  """The logits of target and draft, `[V, V]` each, and their models."""
  logits = np.random.default_rng(0).normal(size=(2, V, V)).astype(np.float32) * 1.2
  return logits, [table_model(jnp.asarray(each)) for each in logits]


# Exactly: the distributions that the library makes, in float64, with every draft and decision enumerated.


def penalized_tables(tables, prompt, options, num_tokens, *, has_path=True):
  """Tables of contexts with the library's penalties, each as a path below the root, and those of `penalized`."""
  size, texts = tables.vocab_size, [()]
  for length in range(tables.max_length):
    above = texts[first_context(size, length) :]
    texts += [(*text, token) for text in above for token in range(size)]
  depth = tables.max_length
  paths = np.array([[*text, *[-1] * (depth - len(text))] for text in texts], np.int32)[None]
  with jax.enable_x64(True), np.errstate(divide='ignore'):
    sampling = SamplingParams(**options).for_rows(1, size)
    counts = TokenCounts.of_prompts(jnp.array([prompt]), jnp.array([len(prompt)]), size)
    own = Penalties.of(sampling, counts, jnp.zeros(1, jnp.int32), [jnp.int32(size - 1)])
    found = [
      np.asarray(logits_to_probs(own.apply(jnp.log(each)[None], jnp.asarray(paths if has_path else paths[..., :0])),
                                 SamplingParams.make(1)))[0]
      for each in (tables.draft_probs, tables.target_probs)
    ]  # fmt: skip
    wanted = [law_after(np.log(each), prompt, text, **options, eos_id=size - 1)
              for each, text in zip(tables.target_probs, texts)]  # fmt: skip
  made = dataclasses.replace(tables, draft_probs=found[0], target_probs=found[1])
  return made, dataclasses.replace(tables, target_probs=np.array(wanted))


TINY = {**ALL, 'logit_bias': {1: 0.7}, 'min_tokens': 1}
CASES = (TokenTree.chains(1, 2), 4), (TokenTree.chains(2, 2), 3)


@pytest.mark.parametrize('name', slow_but(('race_traversal', 'spectr'), WITH_LAW))
def test_the_penalized_distribution_comes_out_exactly(name):
  method = METHODS[name]
  for tree, num_tokens in CASES:
    tree = TokenTree() if method.max_drafts == 0 else tree
    if method.max_drafts == 1 and not tree.is_chain:
      continue
    tables = random_tables(3, 3, num_tokens + tree.max_depth)
    found, wanted = penalized_tables(tables, (1,), TINY, num_tokens)
    law = joint_law(method, tree, found, num_tokens)
    np.testing.assert_allclose(law, wanted.joint_target_law(num_tokens), atol=1e-6)


def test_penalties_without_the_paths_tokens_are_caught():
  tree, num_tokens = CASES[1]
  tables = random_tables(3, 3, num_tokens + tree.max_depth)
  found, wanted = penalized_tables(tables, (1,), TINY, num_tokens, has_path=False)
  law = joint_law(METHODS['race_traversal'], tree, found, num_tokens)
  assert np.abs(law - wanted.joint_target_law(num_tokens)).max() > 0.01


# In the loop.

DRAFTERS = {
  'model': lambda draft: draft,
  'lookup': lambda draft: lookup_drafter(V, lookup_min=1),
  'beside': lambda draft: lookup_beside(draft, lookup_min=1),
  'likeliest': lambda draft: growing(model_drafter(draft), Likeliest()),
  'confident': lambda draft: growing(model_drafter(draft), Confident()),
}
_FAST = [('model', 'race_traversal')]
_PAIRS = [('model', name) for name in LOSSLESS] + [
  (kind, 'race_traversal') for kind in DRAFTERS if kind not in ('model', 'lookup')
] + [('lookup', 'speculative')]  # fmt: skip


def sampled(models, kind, name, num_rows, num_tokens):
  target, draft = models
  method = coarse(METHODS[name])
  tree = TokenTree.slots((2, 2, 2)) if kind in ('likeliest', 'confident') else TokenTree.chains(2, 3)
  tree = TokenTree.chains(1, 3) if method.max_drafts == 1 else tree
  result = spectr_jax.generate(
    jax.random.key(4), target, None if method.max_drafts == 0 else DRAFTERS[kind](draft),
    np.tile(PROMPT, (num_rows, 1)), method=method, tree=tree, max_new_tokens=num_tokens, eos_id=EOS,
    sampling=SamplingParams(temperature=0.8, **ALL),
  )  # fmt: skip
  pairs = zip(np.asarray(result.tokens).tolist(), np.asarray(result.lengths))
  return collections.Counter(tuple(tokens[:length]) for tokens, length in pairs)


def p_value(counts, law):
  found, wanted = (np.array([each.get(text, 0) for text in law]) for each in (counts, law))
  return chi_square(found, wanted).p_value


@pytest.mark.parametrize('pair', slow_but(_FAST, _PAIRS), ids='-'.join)
def test_the_loop_samples_the_penalized_distribution(chains, pair):
  logits, models = chains
  counts = sampled(models, *pair, num_rows=8192, num_tokens=4)
  law = law_of(logits[0], PROMPT, 4, temperature=0.8, **ALL)
  assert set(counts) <= set(law)
  assert p_value(counts, law) > 1e-4


def test_a_loop_without_the_paths_tokens_is_caught(chains, monkeypatch):
  logits, models = chains
  jax.clear_caches()
  with monkeypatch.context() as patch:
    patch.setattr(loop, 'path_tokens', lambda tree, tokens, parents: jnp.full((len(tokens), tree.num_nodes + 1, 0), -1))
    counts = sampled(models, 'model', 'race_traversal', num_rows=8192, num_tokens=4)
  jax.clear_caches()
  assert p_value({text: counts[text] for text in counts}, law_of(logits[0], PROMPT, 4, temperature=0.8, **ALL)) < 1e-9


ENDS = {'logit_bias': {EOS: 2.0}}
OPTIONS = [{name: ALL[name]} for name in COUNTED] + [ENDS, {**ENDS, 'min_tokens': 4}, ALL, {}]


def greedy(logits, prompt, num_tokens, ignore_eos=False, **options):
  text = ()
  while len(text) < num_tokens and (ignore_eos or text[-1:] != (EOS,)):
    text += (int(penalized(logits[(prompt + text)[-1]], prompt, text, **options).argmax()),)
  return text


def texts_of(result):
  return [tuple(row[:length].tolist()) for row, length in zip(np.asarray(result.tokens), np.asarray(result.lengths))]


PROMPTS = [(3,), (1, 4), (2, 2, 0, 3), (0, 1)]


@pytest.mark.parametrize('method', slow_but(['race_traversal'], ['race_traversal', 'block', 'ersd', 'autoregressive']))
def test_greedy_text_is_that_of_a_plain_loop(chains, method):
  logits, models = chains
  texts = []
  for options in OPTIONS:
    sampling = SamplingParams(temperature=0.0, **options)
    result = generate(models, method, make_keys(), [list(each) for each in PROMPTS], None, max_new_tokens=9,
                      eos_id=EOS, sampling=sampling)  # fmt: skip
    texts.append(texts_of(result))
    assert texts[-1] == [greedy(logits[0], prompt, 9, **options) for prompt in PROMPTS]
  assert texts[-1] not in texts[:-1]  # every option changes a text
  assert texts[3] != texts[4]


def test_rows_of_requests_have_penalties_of_their_own(chains):
  logits, models = chains
  every = *reversed(OPTIONS), {'ignore_eos': True}  # the first rows have none
  many = [(prompt, options) for options in every for prompt in PROMPTS]
  requests = [
    Request(number, prompt, jax.random.key(0), SamplingParams(temperature=0.0, **options))
    for number, (prompt, options) in enumerate(many)
  ]
  found = generate_many(*models, requests, batch_size=3, longest_prompt=4, max_new_tokens=9, eos_id=EOS)
  for each in found:
    prompt, options = many[each.name]
    assert tuple(each.tokens.tolist()) == greedy(logits[0], prompt, 9, **options), options
    is_over = len(each.tokens) == 9 and ('ignore_eos' in options or each.tokens[-1] != EOS)
    assert each.finish_reason == ('length' if is_over else 'eos')


def test_a_session_counts_the_new_tokens_of_a_turn(chains):
  logits, models = chains
  decoder, _ = begin(models, 'race_traversal', make_keys(), max_new_tokens=6, cache_size=32)
  session = Session(decoder, sampling=SamplingParams(temperature=0.0, **{**ALL, 'min_tokens': 0}))
  text = ()
  for more in ((3, 1), (2,)):
    text += more
    new = tuple(itertools.chain(*session.stream(jax.random.key(0), text)))
    assert new == greedy(logits[0], text, 6, True, **{**ALL, 'min_tokens': 0})
    text += new


def test_a_program_without_penalties_is_the_same(chains):
  _, models = chains
  plain, neutral, used = (
    begin(models, 'race_traversal', make_keys(), sampling=SamplingParams(**options))[1]
    for options in ({}, {'presence_penalty': 0.0, 'repetition_penalty': 1.0, 'logit_bias': {}, 'min_tokens': 0}, ALL)
  )
  assert jax.tree.structure(plain) == jax.tree.structure(neutral)
  assert plain.counts is None
  assert used.counts is not None
  assert {x.shape for x in jax.tree.leaves(plain)}.isdisjoint({(4, V)})


def test_values_share_a_program(chains):
  _, models = chains
  loop.run_rounds.clear_cache()
  for value in (0.3, 1.7):
    sampling = SamplingParams(
      **{**ALL, 'presence_penalty': value, 'logit_bias': {0: value}, 'min_tokens': 1 + int(value)}
    )
    generate(models, 'race_traversal', make_keys(), sampling=sampling)
  assert loop.run_rounds._cache_size() == 1


@pytest.mark.parametrize(('options', 'said'), [
  ({'repetition_penalty': 0.0}, 'repetition_penalty must be from 1e-6 to 1e6'),
  ({'presence_penalty': np.nan}, 'presence_penalty must be from -1e6 to 1e6'),
  ({'min_tokens': -1}, 'min_tokens must be at least 0'),
  ({'logit_bias': {9: 1.0}}, 'logit_bias must name ids from 0 to 5, got 9'),
  ({'logit_bias': {1: np.inf}}, 'logit_bias must add numbers from -1e6 to 1e6'),
  ({'logit_bias': 3.0}, 'logit_bias must map ids to numbers, or be 4 such mappings or None, got 3.0'),
  ({'logit_bias': [{}]}, 'logit_bias must map ids to numbers, or be 4 such mappings'),
])  # fmt: skip
def test_what_is_out_of_range_is_refused_by_one_line(chains, options, said):
  with pytest.raises(ValueError, match=said) as error:
    generate(chains[1], 'race_traversal', make_keys(), sampling=SamplingParams(**options))
  assert '\n' not in str(error.value)


def test_a_constraint_stands_beside_penalties(chains):
  """It has the last word: where it allows the end alone, the end comes before `min_tokens`."""
  logits, models = chains
  two = Constraint(np.array([0, 0, 1, 1, 2, 2]), [[-1, 1, -1], [0, -1, 1]], [False, True])
  short = Constraint(np.arange(6), [[-1, 1, -1, -1, -1, -1], [-1] * 6], [False, True])
  options = {**ALL, 'min_tokens': 5}
  sampling = SamplingParams(temperature=0.0, **options)
  for constraint in (two, short):
    state, text = 0, ()
    while len(text) < 9 and text[-1:] != (EOS,):
      values = penalized(logits[0][((3, *text))[-1]], (3,), text, **options)
      values[EOS] = -1e20 if values[EOS] == -np.inf else values[EOS]
      allowed = constraint.next_state[state, constraint.class_of] >= 0
      allowed[EOS] = constraint.is_final[state]
      text += (int(np.where(allowed, values, -np.inf).argmax()),)
      state = constraint.next_state[state, constraint.class_of[text[-1]]]
    result = generate(models, 'race_traversal', make_keys()[:1], [[3]], None, max_new_tokens=9, eos_id=EOS,
                      sampling=sampling, constraint=constraint)  # fmt: skip
    assert texts_of(result) == [text]
  with pytest.raises(ValueError, match='ignore_eos and a constraint are both given'):
    generate(models, 'race_traversal', make_keys()[:1], [[3]], None, eos_id=EOS, constraint=two,
             sampling=SamplingParams(ignore_eos=True))  # fmt: skip


def test_rows_that_may_have_penalties_take_them_without_another_program(chains):
  _, models = chains
  decoder, _ = begin(models, 'race_traversal', make_keys(), eos_id=EOS)
  rows = Rows(decoder, batch_size=2, longest_prompt=4, filters=SamplingParams(**ALL))
  loop.run_rounds.clear_cache()
  for options in ({}, ALL):
    rows.put([Request('a', [1], jax.random.key(1), SamplingParams(**options))])
    rows.step(None)
    rows.end(list(rows.owners))
  assert loop.run_rounds._cache_size() == 1


_HEADS = {
  'head': tiny_head,
  'heads in one pass': lambda: tiny_head(mask_id=0),
  'medusa': tiny_medusa,
  'one pass': tiny_one_pass,
  'another vocabulary': lambda: vocabulary_drafter(
    tiny_transformers(vocab_size=7)[1], other_vocabulary(num_draft=7, num_target=5, num_shared=4)
  ),
  'on a mesh of one': lambda: model_drafter(tiny_transformers()[1]),
}


@pytest.mark.parametrize('kind', slow_but(['head'], _HEADS))
def test_seed_exact_tokens_are_those_of_the_seed_with_any_drafter(kind):
  target, keys = tiny_transformers()[0], make_keys()
  sampling = SamplingParams(temperature=[0.7, 1.0, 1.0, 2.0], **ALL, top_k=3)
  options = {'sampling': sampling, 'eos_id': 3, 'prompts': [[1], [1, 4], [2, 3, 1], [0, 0]], 'lengths': None}
  sharding = DecodeSharding(make_mesh({}, jax.devices()[:1])) if 'mesh' in kind else None
  tree = TokenTree.chains(2, 2)
  found = generate((target, _HEADS[kind]()), 'ersd', keys, tree=tree, sharding=sharding, **options)
  wanted = generate((target, None), 'gumbel', keys, **options)
  np.testing.assert_array_equal(found.tokens, wanted.tokens)
  assert np.any(found.tokens != generate((target, None), 'gumbel', keys, **{**options, 'sampling': None}).tokens)
