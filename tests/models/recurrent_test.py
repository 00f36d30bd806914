"""Decoders with recurrent layers: trees, chunks and rows beside whole texts, and the traps of states in decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spectr_jax
from spectr_jax import Decoder, Request, SamplingParams, Session, TokenTree, lookup_drafter
from spectr_jax.draft import model_drafter
from spectr_jax.engine.rows import Rows
from spectr_jax.model import Model
from spectr_jax.models.causal_lm import causal_lm, init_params
from spectr_jax.models.causal_lm_config import CausalLMConfig, Rope
from spectr_jax.models.recurrent import Recurrence
from spectr_jax.models.routing import Experts
from tests.draft.exact import assert_engine_is_exact
from tests.slow import slow, slow_but

_VOCAB, _NEW = 17, 10
_LAYERS = (True, False, True)
_KINDS = {
  'delta': Recurrence('delta', _LAYERS, num_heads=4, num_groups=2, key_dim=6, value_dim=5),
  'mamba': Recurrence(
    'mamba', _LAYERS, num_heads=4, num_groups=2, key_dim=6, value_dim=8, has_conv_bias=True, num_norm_groups=2,
    steps=(0.01, 2.0),
  ),
  'conv': Recurrence('conv', _LAYERS, num_channels=32, conv_width=3),
}  # fmt: skip
_MAMBA = _KINDS['mamba']
# With attention in the same layers, and in blocks of one part, with experts without gates.
_KINDS |= {
  'beside': dataclasses.replace(_MAMBA, layers=(True,) * 3, norm=None, has_attention=True),
  'alone': dataclasses.replace(_MAMBA, layers=(True, False, False), norm='before'),
}
_EXPERTS = Experts(4, 2, 16, layers=(False, True, False), scores='sigmoid', has_choice_bias=True, shared_dim=12)
_ALONE = {'parts': ('mixer', 'mlp', 'mixer'), 'experts': _EXPERTS, 'is_gated': False, 'activation': 'relu2'}
pytestmark = pytest.mark.usefixtures('highest')


def _config(kind, vocab_size=_VOCAB):
  return CausalLMConfig(
    vocab_size, 32, 3, 4, 2, 8, 48, 256, rope=Rope((1.0, 0.1)), has_output_gate=kind == 'delta', has_qk_norm=True,
    recurrence=_KINDS[kind], **(_ALONE if kind == 'alone' else {}),
  )  # fmt: skip


@functools.cache
def _model(kind, seed=0):
  params = init_params(jax.random.key(seed), _config(kind))
  return causal_lm(jax.tree.map(lambda x: 2 * x if x.ndim > 1 else x, params), _config(kind))


def _near(model, scale=0.03):
  params = jax.tree.map(lambda x: x + scale * jnp.sin(jnp.arange(x.size)).reshape(x.shape), model.params)
  return dataclasses.replace(model, params=params)


@pytest.fixture(params=['delta', slow('mamba'), slow('conv'), slow('beside'), slow('alone')])
def kind(request):
  return request.param


_apply, _prefill = jax.jit(Model.apply), jax.jit(Model.prefill, static_argnames='chunk_size')


def _whole(model, text):
  """Logits after every token of one text, in one call; of one size for all texts."""
  size = 24
  positions, causal = np.arange(size)[None], jnp.tril(jnp.ones((size, size), bool))
  padded = jnp.asarray([[*text, *[0] * (size - len(text))]])
  return _apply(model, padded, positions, causal, model.init_cache_fn(1, 64)).logits[0, : len(text)]


@pytest.mark.parametrize('kind', slow_but(['delta'], _KINDS))
def test_trees_chunks_steps_and_rows_are_whole_texts(kind):
  model, rng = _model(kind), np.random.default_rng(0)
  prompts, lengths = rng.integers(0, _VOCAB, (3, 13)), np.array([13, 5, 1])
  tree = TokenTree((0, 0, 1, 1, 2, 4))
  tokens = rng.integers(0, _VOCAB, (3, tree.num_nodes + 1))
  for chunk_size in (128, 4) if kind == 'delta' else (4,):
    cache, _ = _prefill(model, prompts, lengths, model.init_cache_fn(3, 64), chunk_size=chunk_size)
    assert cache.lengths.tolist() == lengths.tolist()
    output = _apply(model, tokens, lengths[:, None] + np.asarray((0, *tree.depths[1:])), tree.ancestors, cache)
    for row in range(3):
      for path in tree.paths:
        nodes = [0, *(node for node in path if node >= 0)]
        text = [*prompts[row, : lengths[row]], *tokens[row, nodes]]
        np.testing.assert_allclose(output.logits[row, nodes], _whole(model, text)[-len(nodes) :], atol=2e-4)


def test_what_is_committed_is_the_path_and_a_row_of_none_stays(kind):
  model, rng = _model(kind), np.random.default_rng(1)
  prompts, lengths = rng.integers(0, _VOCAB, (3, 9)), np.array([9, 4, 6])
  cache, _ = _prefill(model, prompts, lengths, model.init_cache_fn(3, 64), chunk_size=128)
  tree = TokenTree((0, 0, 1, 1, 2, 4))
  tokens = rng.integers(0, _VOCAB, (3, tree.num_nodes + 1))
  output = _apply(model, tokens, lengths[:, None] + np.asarray(tree.depths), tree.ancestors, cache)
  path, numbers = np.array([[0, 1, 4, 6], [0, 2, 5, 0], [0, 0, 0, 0]]), np.array([3, 2, 0])
  after = output.cache.commit(jnp.asarray(path), jnp.asarray(numbers))
  for old, new in zip(jax.tree.leaves(cache.recurrent), jax.tree.leaves(after.recurrent), strict=True):
    np.testing.assert_array_equal(old[2], new[2])  # a row that is done
  last = rng.integers(0, _VOCAB, (3, 1))
  logits = _apply(model, last, after.lengths[:, None], np.ones((1, 1), bool), after).logits
  for row in range(3):
    text = [*prompts[row, : lengths[row]], *tokens[row, path[row, : numbers[row]]], last[row, 0]]
    np.testing.assert_allclose(logits[row, 0], _whole(model, text)[-1], atol=2e-4)


def _greedy(target, draft, prompts, lengths, **options):
  return spectr_jax.generate(
    jax.random.key(0), target, draft, prompts, lengths, sampling=SamplingParams(0.0), max_new_tokens=_NEW, **options
  )


@pytest.mark.parametrize(
  ('method', 'tree', 'drafter'),
  [
    ('race_traversal', TokenTree.chains(2, 3), _near),
    slow('block', TokenTree.chains(1, 4), _near),
    slow('speculative', TokenTree.chains(1, 3), lambda model: lookup_drafter(_VOCAB)),
    slow('spectr', TokenTree.prefix((2, 2)), _near),
  ],
)
def test_greedy_texts_are_those_without_a_draft(kind, method, tree, drafter):
  """The draft is a hybrid as well: its calls of a round append to each other."""
  model, rng = _model(kind), np.random.default_rng(2)
  prompts, lengths = rng.integers(0, _VOCAB, (3, 9)), np.array([9, 4, 6])
  plain = _greedy(model, None, prompts, lengths, method='autoregressive')
  drafted = _greedy(model, drafter(model), prompts, lengths, method=method, tree=tree)
  np.testing.assert_array_equal(drafted.tokens, plain.tokens)
  if drafter is _near:  # which guesses much
    assert drafted.num_target_calls.sum() < plain.num_target_calls.sum()


@pytest.mark.slow
@pytest.mark.parametrize('method', ['spectr', 'race_traversal'])
@pytest.mark.parametrize('kind', ['delta', 'mamba'])
def test_the_loop_is_exact(kind, method):
  """Sampled text by a chi-square test, with a draft of the same kind."""
  target = causal_lm(init_params(jax.random.key(3), _config(kind, 5)), _config(kind, 5))
  assert_engine_is_exact(model_drafter(_near(target, 0.2)), method, TokenTree.chains(2, 2), target=target)


def test_rejecting_everything_is_decoding_without_a_draft(kind):
  """For 50 rounds: states that kept something of what was rejected would go astray."""
  model = _model(kind)
  against = dataclasses.replace(model, apply_fn=_contrary(model.apply_fn))
  prompts, lengths = np.array([[3, 1, 4, 1], [5, 9, 0, 0]]), np.array([4, 2])
  run = functools.partial(spectr_jax.generate, jax.random.key(0), sampling=SamplingParams(0.0), max_new_tokens=50)
  plain = run(model, None, prompts, lengths, method='autoregressive')
  drafted = run(model, against, prompts, lengths, method='speculative', tree=TokenTree.chains(1, 3))
  assert drafted.num_target_calls.tolist() == [50, 50]
  np.testing.assert_array_equal(drafted.tokens, plain.tokens)


@functools.cache
def _contrary(apply_fn):
  def apply(*arguments):
    output = apply_fn(*arguments)
    return dataclasses.replace(output, logits=-output.logits)

  return apply


def test_turns_continue_where_a_row_ends_or_begin_anew(kind):
  """What is new is read where a text goes on, and all of it where its last turn was changed."""
  model = _model(kind)
  draft = _near(model)
  options = {'method': 'block', 'tree': TokenTree.chains(1, 3), 'max_new_tokens': _NEW}
  session, text = Session(Decoder.make(model, draft, cache_size=96, **options)), [3, 1, 4]
  num_read = []
  for turn in range(4):
    if turn == 3:
      text = [*text[:-4], (text[-4] + 1) % _VOCAB, 6]
    padded = [[*text, *[0] * (64 - len(text))]]  # one shape for all turns
    wanted = spectr_jax.generate(jax.random.key(turn)[None], model, draft, padded, [len(text)], **options)
    new = [token for piece in session.stream(jax.random.key(turn), text) for token in piece]
    assert new == wanted.tokens[0].tolist()
    num_read.append(session.num_read)
    text = [*text, *new, turn, 7]
  # The last token of the turn before is read with two new ones.
  assert num_read == [3, 3, 3, len(text) - _NEW - 2]


@pytest.mark.slow
def test_rows_are_refilled_and_share_ends(kind):
  model, rng = _model(kind), np.random.default_rng(4)
  options = {'method': 'race_traversal', 'tree': TokenTree.chains(2, 2), 'max_new_tokens': _NEW}
  requests = [
    Request(str(i), rng.integers(0, _VOCAB, size).tolist(), jax.random.key(i))
    for i, size in enumerate((3, 9, 1, 6, 12))
  ]
  draft = _near(model)
  for each in spectr_jax.generate_many(model, draft, requests, batch_size=2, longest_prompt=12, **options):
    request = requests[int(each.name)]
    alone = spectr_jax.generate(request.key[None], model, draft, [request.tokens], **options)
    assert each.tokens.tolist() == alone.tokens[0, : int(alone.lengths[0])].tolist()
  rows = Rows(Decoder.make(model, draft, cache_size=64, **options), batch_size=2)
  rows.put(requests[:2])
  assert rows.num_read == sum(len(each.tokens) - 1 for each in requests[:2])


def test_bytes_of_a_cache(kind):
  """No state per guess: with a tree pending a cache is larger by what its nodes write."""
  model, tree = _model(kind), TokenTree.chains(4, 4)
  cache = model.init_cache_fn(1, 64)
  tokens, size = np.zeros((1, tree.num_nodes + 1), np.int32), tree.num_nodes + 1
  pending = jax.eval_shape(model.apply, tokens, np.asarray(tree.depths)[None], tree.ancestors, cache).cache
  of_state = sum(state.state.nbytes for state in cache.recurrent if state.state is not None)
  own = _KINDS[kind]
  writes = own.num_groups * own.key_dim + own.num_heads * (own.value_dim + 2) if of_state else 0
  more = sum(x.size for each in pending.recurrent for x in jax.tree.leaves((each.pending_inputs, each.writes)))
  assert more == sum(own.layers) * size * (own.conv_dim + writes)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'kind': 'rwkv'}, 'delta, mamba or conv'),
    ({'num_heads': 10**9}, 'num_heads of recurrent layers must be from 1 to'),
    ({'num_groups': 3}, 'do not divide into num_groups 3'),
    ({'key_dim': -1}, 'key_dim of recurrent layers must be from 1'),
    ({'conv_width': 0}, 'conv_width of recurrent layers must be from 1'),
    ({'steps': (2.0, 1.0)}, 'steps of recurrent layers'),
    ({'norm': 'above'}, 'norm of recurrent layers must be behind, before or None'),
  ],
)
def test_sizes_that_do_not_fit(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_KINDS['delta'], **changes)


def test_layers_that_do_not_fit():
  config = _config('delta')
  for layers in ((True,) * 3, (True, False)):
    with pytest.raises(ValueError, match='one of which has attention'):
      dataclasses.replace(config, recurrence=dataclasses.replace(_KINDS['delta'], layers=layers))
  for parts, problem in ((('both',), 'parts must be'), (('mlp',) * 3, 'attention'), (('mlp', 'both', 'both'), 'alone')):
    with pytest.raises(ValueError, match=problem):
      dataclasses.replace(config, parts=parts)
  with pytest.raises(ValueError, match='must have 32 channels'):
    dataclasses.replace(config, recurrence=dataclasses.replace(_KINDS['conv'], num_channels=16))
