"""Conversations: what is said is what the model continues, turn after turn, and it is shown as it comes."""

import contextlib
import io
import os
import pty
import re
import select
import signal
import sys

import commands
import hub_specs
import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny_hub

import spectr_jax
from common.printable import printable
from decode import chat, conversation
from decode.experiment.options import DecodeOptions
from spectr_jax import Decoder, SamplingParams, Session, TokenTree, lookup_beside
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from spectr_jax.models import causal_lm, transformer
from tests.draft.tiny_heads import tiny_head

_NEW, _CONTEXT = 10, 200


def _tokenizer(template):
  return HubTokenizer.from_parts(tiny_hub.backend(), bos_id=None, eos_ids=(41,), add_bos=False, chat_template=template)


@pytest.fixture(scope='module')
def tokenizer():
  return _tokenizer(tiny_hub.CHAT)


@pytest.fixture(scope='module')
def target(tokenizer):
  config = causal_lm.lm1b_config(
    tokenizer.vocab_size, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=16, context_length=_CONTEXT
  )
  return causal_lm.causal_lm(transformer.init_params(jax.random.key(0), config), config)


@pytest.fixture(scope='module')
def decoder(target, tokenizer):
  return Decoder.make(
    target, None, method='autoregressive', max_new_tokens=_NEW, cache_size=_CONTEXT, eos_id=tokenizer.eos_ids
  )


def _chat(decoder, tokenizer, **options):
  return chat.Chat(Session(decoder, sampling=SamplingParams(top_k=20)), tokenizer, **options)


def _generated(target, tokenizer, messages, turn, seed=0, drafter=None, **options):
  """The tokens of an answer by `generate`, from the whole conversation, and the calls of the target."""
  prompt, key = tokenizer.encode_chat(messages), jax.random.fold_in(jax.random.key(seed), turn)
  padded = np.pad([prompt], ((0, 0), (0, _CONTEXT - _NEW - len(prompt))))  # one program for all turns
  options = {'method': 'autoregressive', 'max_new_tokens': _NEW} | options
  result = spectr_jax.generate(
    key[None], target, drafter, padded, [len(prompt)], eos_id=tokenizer.eos_ids, sampling=SamplingParams(top_k=20),
    **options,
  )  # fmt: skip
  tokens = result.tokens[0, : int(result.lengths[0])].tolist()
  return [token for token in tokens if token not in tokenizer.eos_ids], int(result.num_target_calls[0])


@pytest.mark.slow
def test_turns_continue_the_whole_conversation(decoder, target, tokenizer):
  talk, messages = _chat(decoder, tokenizer, system='be kind', seed=3), [{'role': 'system', 'content': 'be kind'}]
  for turn, text in enumerate(('the owl', 'and then?')):
    messages.append({'role': 'user', 'content': text})
    pieces = list(talk.ask(text))
    tokens, _ = _generated(target, tokenizer, messages, turn, seed=3)
    messages.append({'role': 'assistant', 'content': ''.join(pieces)})
    assert ''.join(pieces) == tokenizer.decode(tokens)
    assert talk.messages == messages
    assert talk.answer.num_target_calls >= len(tokens) > 1
    assert talk.answer.num_left_out == 0 < talk.answer.prompt_seconds < talk.answer.seconds
    assert 0 < talk.answer.num_read <= len(talk.session.tokens) - talk.answer.num_tokens


@pytest.mark.slow
@pytest.mark.parametrize('is_beside', [False, True])
def test_turns_with_a_head_are_those_of_a_fresh_start(target, tokenizer, is_beside):
  head = tiny_head(tokenizer.vocab_size)
  drafter = lookup_beside(head) if is_beside else head
  options = {'method': 'race_traversal', 'tree': TokenTree.chains(2, 3), 'max_new_tokens': _NEW}
  decoder = Decoder.make(target, drafter, cache_size=_CONTEXT, eos_id=tokenizer.eos_ids, **options)
  talk = _chat(decoder, tokenizer)
  for turn, text in enumerate(('the owl', 'and then?', 'the owl')):
    messages = [*talk.messages, {'role': 'user', 'content': text}]
    tokens, num_target_calls = _generated(target, tokenizer, messages, turn, drafter=drafter, **options)
    assert ''.join(talk.ask(text)) == tokenizer.decode(tokens)
    assert talk.answer.num_target_calls == num_target_calls


def test_a_stop_text_or_special_token_ends_the_answer(decoder, tokenizer):
  whole = ''.join(_chat(decoder, tokenizer).ask('the owl'))
  stop = spectr_jax.StopStrings(tokenizer, [whole[3:5]])
  cut = _chat(decoder, tokenizer, stop=stop)
  assert ''.join(cut.ask('the owl')) == whole[: whole.index(whole[3:5])]
  assert cut.messages[-1]['content'] == whole[: whole.index(whole[3:5])]
  names, num_tried = tokenizer.special_token_names, 0
  for seed in range(60):
    whole = _chat(decoder, tokenizer, seed=seed)
    list(whole.ask('the owl'))
    prompt = len(tokenizer.encode_chat(whole.messages[:1]))
    tokens = whole.session.tokens[prompt:]
    place = next((place for place, token in enumerate(tokens) if token in names), 0)
    last = tokenizer.decode(tokens[place - 1 : place]) if place else ''
    if not last or '\ufffd' in last:
      continue
    text = tokenizer.decode(tokens[:place])
    for stop, kept in ((names[tokens[place]], text), (last + names[tokens[place]], text[: -len(last)])):
      cut = _chat(decoder, tokenizer, seed=seed, stop=spectr_jax.StopStrings(tokenizer, [stop]))
      assert ''.join(cut.ask('the owl')) == kept == cut.messages[-1]['content']
    num_tried += 1
  assert num_tried > 2


def test_the_oldest_turns_are_left_out(decoder, tokenizer):
  talk = _chat(decoder, tokenizer, system='be kind')
  for _ in range(3):
    list(talk.ask('x y z ' * 8))
  assert talk.answer.num_left_out == 2
  assert [message['role'] for message in talk.messages] == ['system', *['user', 'assistant'] * 3]
  with pytest.raises(ValueError, match='the message is too long, 2.. tokens with its template; at most 190 are'):
    list(talk.ask('x y z ' * 40))
  assert len(talk.messages) == 7  # the conversation goes on without it
  assert list(talk.ask('owl'))


def test_answers_are_printed_and_measured(decoder, tokenizer, monkeypatch, capsys):
  monkeypatch.setattr(sys, 'stdin', io.StringIO('the owl\n\n  then?\n'))
  talk = _chat(decoder, tokenizer)
  chat.talk(talk, chat.read_turns())
  out, err = capsys.readouterr()
  answers = [message['content'] for message in talk.messages if message['role'] == 'assistant']
  assert out == ''.join(printable(answer) + '\n' for answer in answers)
  assert [message['content'] for message in talk.messages[::2]] == ['the owl', 'then?']
  assert err.count('tokens/s, 1.00 per target call; prompt ') == 2
  (shown,) = re.findall(r'^\[.*tokens/s.*\]$', (commands.ROOT / 'README.md').read_text(encoding='utf-8'), re.M)
  assert {re.sub(r'\d[\d.]*', 'N', line) for line in [shown, *err.splitlines()]} == {
    '[N tokens, N tokens/s, N per target call; prompt N tokens in N s]'
  }


def _fails(talk, text, message):
  before = list(talk.messages)
  with pytest.raises(ValueError, match=message):
    list(talk.ask(text))
  assert talk.messages == before


def test_turns_that_cannot_be_answered_leave_the_conversation_as_it_was(decoder, target, tokenizer):
  talk, wanted = _chat(decoder, tokenizer), _chat(decoder, tokenizer)
  strict = "{% if 'fox' in messages[-1].content %}{{ raise_exception('no foxes') }}{% endif %}" + tiny_hub.CHAT
  talk._tokenizer = _tokenizer(strict)
  for text in ('the owl', 'and then?'):
    _fails(talk, 'a\udcff', 'the message is not valid Unicode: byte 0xff is not UTF-8')
    _fails(talk, '\ud800', r'U\+D800 is no character')
    _fails(talk, 'x y z ' * 40, 'the message is too long')
    _fails(talk, 'the fox', 'no foxes')
    assert list(talk.ask(text)) == list(wanted.ask(text))
  assert talk.messages == wanted.messages


def test_a_token_that_the_target_does_not_have_is_named(tokenizer):
  """The tokenizer has 301 ids, and `<pad>` is the last."""
  config = causal_lm.lm1b_config(300, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=16, context_length=_CONTEXT)
  target = causal_lm.causal_lm(transformer.init_params(jax.random.key(0), config), config)
  decoder = Decoder.make(target, None, method='autoregressive', max_new_tokens=_NEW, cache_size=_CONTEXT, eos_id=41)
  padded = _tokenizer("<pad>{{ messages[0]['content'] }}")
  _fails(_chat(decoder, padded), 'x', "the token '<pad>' of id 300, and the target has ids from 0 to 299")
  _fails(_chat(decoder, _tokenizer('')), 'x', 'the chat template is empty')


def test_a_conversation_survives_what_is_typed(decoder, tokenizer, monkeypatch, capsys):
  lines = ['the owl', '\udcff', 'x y z ' * 40, 'y' * 3_000_000, 'then?\x00\x1b', 'z' * (1 << 20)]
  monkeypatch.setattr(sys, 'stdin', io.StringIO('\n'.join(lines)))
  talk = _chat(decoder, tokenizer)
  chat.talk(talk, chat.read_turns())
  assert [message['content'] for message in talk.messages[::2]] == ['the owl', 'then?\x00\x1b']
  errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith('error: ')]
  assert [error.split(',')[0].split(':')[1].strip() for error in errors] == [
    'the message is not valid Unicode', 'the message is too long', 'the message is too long', 'the message is too long',
  ]  # fmt: skip
  monkeypatch.setattr(sys, 'stdin', None)
  assert list(chat.read_turns()) == []


@pytest.fixture
def interrupts():
  """Interrupts as in a terminal; a shell ignores those of what it runs in the background."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures('interrupts')
def test_an_interrupted_answer_is_kept_as_far_as_it_came(decoder, target, tokenizer, monkeypatch, capsys):
  whole = ''.join(_chat(decoder, tokenizer).ask('the owl'))
  raised = []

  def interrupting(text):
    raised.append(text)
    if len(raised) == 2:
      signal.raise_signal(signal.SIGINT)
    return text

  talk = _chat(decoder, tokenizer)
  with monkeypatch.context() as patch:
    patch.setattr(chat, 'printable', interrupting)
    chat.print_answer(talk, 'the owl')
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
  said = talk.messages[-1]['content']
  assert whole.startswith(said)
  assert 2 <= talk.answer.num_tokens < _NEW
  assert talk.answer.is_interrupted
  out, err = capsys.readouterr()
  assert (out, err.endswith(', interrupted]\n')) == (said + '\n', True)
  # The next answer is that of a fresh start with the same messages.
  messages = [*talk.messages, {'role': 'user', 'content': 'then?'}]
  assert ''.join(talk.ask('then?')) == tokenizer.decode(_generated(target, tokenizer, messages, 1)[0])
  assert [message['role'] for message in talk.messages] == ['user', 'assistant'] * 2


def test_an_answer_that_nobody_waits_for_is_kept_as_far_as_it_came(decoder, tokenizer):
  talk = _chat(decoder, tokenizer)
  answer = talk.ask('the owl')
  pieces = [next(answer), next(answer)]
  answer.close()
  assert talk.messages[-1]['content'].startswith(''.join(pieces))
  assert [message['role'] for message in talk.messages] == ['user', 'assistant']


def test_answers_cannot_steer_the_terminal(decoder, tokenizer, monkeypatch, capsys):
  talk = _chat(decoder, tokenizer)
  monkeypatch.setattr(talk, 'ask', lambda text: iter(['a\x1b[2J', '\x9b\r\n', '\u202eb\tc']))
  talk.answer.seconds = 1
  chat.print_answer(talk, 'x')
  assert capsys.readouterr().out == 'a\ufffd[2J\ufffd\ufffd\n\ufffdb\tc\n'


def test_commands_within_a_conversation(decoder, tokenizer):
  talk = _chat(decoder, tokenizer, system='be kind')
  assert conversation.obey(talk, '/stats') == 'no answer yet'
  greedy = _chat(decoder, tokenizer, system='be kind')
  assert conversation.obey(greedy, '/temperature 0') == 'temperature 0'
  assert [list(greedy.ask('the owl')) for _ in range(2)][0] != list(talk.ask('the owl'))
  assert greedy.session.sampling == SamplingParams(0.0, top_k=20)
  assert re.fullmatch(
    r'1 answers, 10 tokens, [\d.]+ tokens/s, 1.00 per target call; \d+ of 200 tokens of context',
    conversation.obey(talk, '/stats'),
  )
  assert conversation.obey(talk, '/reset') == 'a new conversation'
  assert talk.messages == [{'role': 'system', 'content': 'be kind'}]
  conversation.obey(talk, '/system  be  brief ')
  assert talk.messages == [{'role': 'system', 'content': 'be  brief'}]
  assert conversation.obey(talk, '/draft') == 'no draft: one token per call of the target'
  assert conversation.obey(talk, '/help').count('\n') == 5
  for line, message in {
    '/rest': 'there is no command /rest, did you mean /reset[?]; /help lists them',
    '/': 'there is no command /; /help',
    '/system': '/system takes TEXT',
    '/stats now': '/stats takes nothing',
    '/temperature hot': '/temperature takes a number, got hot',
    '/temperature nan': 'the temperature must be finite and at least 0, got nan',
    '/system a\udcff': 'the system message is not valid Unicode',
  }.items():
    with pytest.raises(ValueError, match=message):
      conversation.obey(talk, line)


# Makes stdin, a terminal, the one whose Ctrl-C reaches the command.
_AS_A_SHELL = (
  sys.executable, '-c',
  'import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0);'
  ' os.execv(sys.argv[1], sys.argv[1:])',
)  # fmt: skip


class _Terminal:
  """`decode.chat` with a tiny model in a terminal of its own; its answers come by `process.stdout`."""

  def __init__(self, folder, *flags, context):
    spec = hub_specs.SPECS['llama'] | {'vocab_size': 301, 'max_position_embeddings': context, 'eos_token_id': 41}
    folder = tiny_hub.write(folder, config=spec, chat_template=tiny_hub.CHAT)
    safetensors.numpy.save_file(tiny_hub.tensors_of(spec), folder / 'model.safetensors')
    self._master, terminal = pty.openpty()
    self._seen = b''
    self.process = commands.start(
      'decode.chat', f'--target={folder}', *flags, wrapper=_AS_A_SHELL, stdin=terminal, stderr=terminal
    )
    os.close(terminal)

  def type(self, text):
    os.write(self._master, text.encode())

  def wait_for(self, text):
    while text.encode() not in self._seen:
      assert select.select([self._master], [], [], 120)[0], self._seen
      self._seen += os.read(self._master, 4096)
    before, _, self._seen = self._seen.partition(text.encode())
    return before.decode(errors='replace')

  def rest(self):
    """What is left of what was printed, once the process has ended."""
    with contextlib.suppress(OSError):
      while part := os.read(self._master, 4096):
        self._seen += part
    return self._seen.decode(errors='replace')

  def close(self):
    self.process.kill()
    self.process.communicate()
    os.close(self._master)


@pytest.fixture
def terminal(tmp_path):
  opened = []

  def start(*flags, **options):
    opened.append(_Terminal(tmp_path / 'hub', *flags, **options))
    return opened[0]

  yield start
  for each in opened:
    each.close()


def test_a_conversation_in_a_terminal(terminal):
  talk = terminal('--max_new_tokens=8', context=_CONTEXT)
  talk.wait_for('Type a message')
  for typed, answer in (
    ('the owx\x7fl\r', 'per target call; prompt'),
    ('/reset now\x03/stats\r', '1 answers'),
    ('/rest\r', 'did you mean /reset?'),
  ):
    talk.wait_for('>')
    talk.type(typed)
    talk.wait_for(answer)
  talk.wait_for('>')
  talk.type('\x04')
  out = commands.finish(talk.process, timeout=60)
  assert out.count('\n') == 1


def test_interrupts_in_a_terminal(terminal):
  # Greedy, since a sample would end the answer soon; and long, since it must last until Ctrl-C comes.
  talk = terminal('--context=30200', '--max_new_tokens=30000', '--temperature=0', context=2**15)
  talk.wait_for('Type a message')
  talk.wait_for('>')
  talk.type('the owl\r')
  assert talk.process.stdout.read(1)
  talk.type('\x03')
  talk.wait_for(', interrupted]')
  talk.wait_for('>')
  talk.type('/reset now\x03/stats\r')
  talk.wait_for('1 answers')
  talk.wait_for('>')
  talk.type('half a line\x03\x03')
  assert talk.process.wait(60) == 0
  assert 'error' not in talk.rest()


def test_what_cannot_be_answered_is_refused_in_one_line(pair):
  options = DecodeOptions.of(**pair, method=('block',), chat=True)
  with pytest.raises(ValueError, match='breakdown is not for decode.chat'):
    chat.start_chat(options.replace(breakdown=True), 64)
  with pytest.raises(ValueError, match='the model has no chat template'):  # and nothing else is asked of such a model
    chat.start_chat(options, 2048)
  ran = commands.run('decode.chat', f'--target={pair["target"]}', '--prompt=the owl', '--max_new_tokens=8')
  assert ran.returncode == 1
  assert ran.stderr.splitlines() == [
    'error: the model has no chat template: it continues texts, and takes no conversations'
  ]
