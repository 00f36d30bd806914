"""A pair as public models come: special tokens at any ids, two padded vocabularies, conversations."""

import dataclasses

import jax
import pytest
import tiny_hub
from hub_specs import SPECS

import spectr_jax
from decode import chat, trace
from decode.experiment.options import DecodeOptions
from decode.experiment.workload import Workload
from spectr_jax.io.hub.families import read_spec
from spectr_jax.io.hub.hub_tokenizer import load_hub_tokenizer
from spectr_jax.models import causal_lm, transformer

_SIZES = {'target': 320, 'draft': 304}
_QUESTION = 'the owl <|im_end|>'


def _model(seed, vocab_size):
  config = causal_lm.lm1b_config(vocab_size, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=16, context_length=96)
  init_params = jax.jit(transformer.init_params, static_argnames='config')
  return causal_lm.causal_lm(init_params(jax.random.key(seed), config=config), config)


@pytest.fixture
def options(tmp_path, monkeypatch):
  folder = tiny_hub.write(
    tmp_path / 'tokenizer',
    tokenizer_config={'bos_token': '<s>', 'eos_token': '<|im_end|>', 'add_bos_token': False},
    generation_config={'eos_token_id': [200, 41, 319]},
    chat_template=tiny_hub.CHAT,
  )
  models = {role: _model(seed, size) for seed, (role, size) in enumerate(_SIZES.items())}
  monkeypatch.setattr(spectr_jax, 'load_model', lambda path, **options: (models[path], load_hub_tokenizer(folder)))
  return DecodeOptions.of(
    target='target', draft='draft', method=('speculative',), draft_length=(2,), max_new_tokens=8, prompt=_QUESTION,
    chat=True,
  )  # fmt: skip


def test_an_answer_leaves_room_for_a_prompt(options):
  with pytest.raises(ValueError, match='max_new_tokens 96 leaves no room for a prompt: the conversation may have 96'):
    chat.start_chat(options.replace(max_new_tokens=96), 2048)


@pytest.mark.slow
def test_a_conversation_is_decoded(options):
  traced = trace.record_trace(options, ('speculative',))
  work = Workload.load(options)
  assert work.tokenizer.decode(work.tokens[0, : work.lengths[0]]) == f'user\n{_QUESTION}\nassistant\n'
  assert work.decoder(trace.only_setting(options)).eos_ids == (41, 200, 319, -1)
  names = traced['names']
  assert names[str(traced['rounds'][0]['root'])] == '\n'  # the end of the template
  laws = [row for played in traced['rounds'] for law in played['laws'].values() for row in law]
  unknown = [row for row in laws if row[0] >= _SIZES['draft']]
  assert unknown
  assert all(draft in (0, None) and target > 0 for _, draft, target in unknown)  # emitted, but never drafted
  assert {names[str(token)] for token, *_ in unknown} == {f'⟨{token}⟩' for token, *_ in unknown}


@pytest.mark.slow
def test_auto_chooses_how_a_conversation_is_decoded(options, tmp_path, monkeypatch):
  (tmp_path / 'questions.jsonl').write_text('{"prompt": "the owl"}\n{"prompt": "the fox"}\n')
  monkeypatch.setattr(chat, '_QUESTIONS', tmp_path / 'questions.jsonl')
  options = options.replace(
    method=('auto',), prompt=None, num_drafts=(1, 2), calibration_prompts=2, max_new_tokens=6,
    calibration=str(tmp_path / 'auto.json'),
  )  # fmt: skip
  said = []
  talk = chat.start_chat(options, 96, lambda what, *_: said.append(what.split(':')[0]))
  assert 'auto' in said
  chosen = talk.session.decoder
  assert chosen.eos_ids == (41, 200, 319, -1)
  assert list(talk.ask('the owl'))
  said.clear()
  again = chat.start_chat(options, 96, lambda what, *_: said.append(what.split(':')[0])).session.decoder
  assert 'auto' not in said  # it was measured already
  assert (again.method, again.tree) == (chosen.method, chosen.tree)


def test_results_say_what_type_a_model_computes_in(options, tmp_path, monkeypatch):
  config = read_spec(SPECS['llama'])[1]
  config = dataclasses.replace(config, vocab_size=320, context_length=96, dtype='bfloat16', cache_dtype='float32')
  model = causal_lm.causal_lm(causal_lm.init_params(jax.random.key(0), config), config)
  tokenizer = load_hub_tokenizer(tmp_path / 'tokenizer')
  monkeypatch.setattr(spectr_jax, 'load_model', lambda path, **options: (model, tokenizer))
  assert Workload.load(options).info['models']['target']['dtype'] == 'bfloat16'


def test_a_draft_with_another_tokenizer_is_taken(options, tmp_path, monkeypatch):
  other = tiny_hub.write(tmp_path / 'other', tiny_hub.backend(merges=[('h', 'e'), ('a', 'b')]))
  folders = {'target': tmp_path / 'tokenizer', 'draft': other}
  model = _model(0, 320)
  monkeypatch.setattr(spectr_jax, 'load_model', lambda path, **options: (model, load_hub_tokenizer(folders[path])))
  found = Workload.load(options)
  # All bytes, the one merge that both have, and the special tokens of one name.
  assert found.info['models']['draft']['vocabulary']['num_shared'] == 257 + len(tiny_hub.SPECIAL)


@pytest.mark.slow
def test_a_conversation_with_a_draft_of_another_tokenizer(options, tmp_path, monkeypatch):
  """Turn by turn, greedy, it is that of the target alone."""
  other = tiny_hub.write(tmp_path / 'other', tiny_hub.backend(merges=[('h', 'e'), ('a', 'b')]))
  folders, seeds = {'target': tmp_path / 'tokenizer', 'draft': other}, {'target': 0, 'draft': 1}

  def load(path, **options):
    return _model(seeds[path], 320), load_hub_tokenizer(folders[path])

  monkeypatch.setattr(spectr_jax, 'load_model', load)
  said = []
  for method in ('speculative', 'autoregressive'):
    changes = {'method': (method,), 'num_drafts': (1,), 'temperature': 0.0, 'prompt': None}
    talk = chat.start_chat(options.replace(**changes), 96)
    said.append([''.join(talk.ask(question)) for question in ('the owl', 'the end')])
  assert said[0] == said[1]
