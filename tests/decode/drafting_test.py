"""Defaults of drafting in `decode.chat` and `decode.serve`."""

import re

import commands
import pytest

from decode import chat
from decode.experiment import drafting
from decode.experiment.model_options import PRETRAINED
from decode.experiment.options import DecodeOptions
from decode.experiment.settings import only_setting

_HEAD, _MODEL = str(PRETRAINED / 'smollm2_head'), str(PRETRAINED / 'draft')
_DRAFTS = {'a model': _MODEL, 'a head': _HEAD, 'lookup': 'lookup', 'lookup+DRAFT': f'lookup+{_HEAD}'}


def _values(**given):
  return {'target': str(PRETRAINED / 'target'), 'tree': ('chains',)} | given


@pytest.mark.parametrize('kind', _DRAFTS)
def test_the_default_depends_on_the_device_and_the_kind_of_draft(kind):
  assert set(drafting.ON_CPU) == set(_DRAFTS)
  draft = _DRAFTS[kind]
  assert drafting.kind_of('no/target', draft) == kind
  default = drafting.default_drafting('no/target', draft, 'cpu')
  assert default == drafting.ON_CPU[kind]
  assert default.num_drafts == 1
  assert default.draft_length <= 4
  for platform, wanted in (('cpu', default), ('gpu', drafting.ELSEWHERE), ('tpu', drafting.ELSEWHERE)):
    values = drafting.with_default_drafting(_values(draft=draft), platform)
    setting = only_setting(DecodeOptions.of(**values))  # refuses what does not fit
    assert (setting.method.name, setting.num_drafts, setting.draft_length) == (
      wanted.method, wanted.num_drafts, wanted.draft_length,
    )  # fmt: skip


def test_what_is_given_stays_and_chat_takes_the_rest(monkeypatch):
  given = {'method': ('spectr',), 'num_drafts': (3,), 'draft_length': (5,)}
  assert drafting.with_default_drafting(_values(draft=_HEAD, **given), 'cpu') == _values(draft=_HEAD, **given)
  short = drafting.with_default_drafting(_values(draft=_HEAD, draft_length=(3,)), 'cpu')
  assert (short['method'], short['num_drafts'], short['draft_length']) == (('block',), (1,), (3,))
  # One that takes several candidates stands in for one that does not.
  for several in ({'num_drafts': (4,)}, {'tree': ('prefix:2,2',)}):
    values = drafting.with_default_drafting(_values(draft=_HEAD, **several), 'cpu')
    assert values['method'] == ('race_traversal',)
    assert values | several == values
  monkeypatch.setattr(drafting.jax, 'default_backend', lambda: 'cpu')
  assert str(only_setting(chat.options_of(_values()))) == 'autoregressive'
  assert str(only_setting(chat.options_of(_values(draft=_HEAD)))) == 'block K=1 L=2'
  monkeypatch.setattr(drafting.jax, 'default_backend', lambda: 'tpu')
  assert str(only_setting(chat.options_of(_values(draft=_HEAD)))) == 'race_traversal K=2 L=8'
  assert chat.options_of(_values(draft=_HEAD, method=('auto',))).methods.is_auto
  for method in ('auto', 'block'):
    with pytest.raises(ValueError, match=f'^{method} needs a draft of the target: --draft=DRAFT, or --method='):
      chat.options_of(_values(method=(method,)))
  with pytest.raises(ValueError, match='needs a model that answers: --target=MODEL'):
    chat.options_of({'tree': ('chains',)})


def test_the_help_of_chat_is_its_own():
  shown = commands.succeed('decode.chat', '--help', COLUMNS='100')
  options = set(re.findall(r'^  --(?:\[no\])?(\w+)', shown, re.MULTILINE))
  assert not options & {*chat._UNUSED, 'chat'}
  assert {'target', 'draft', 'method', 'num_drafts', 'calibration', 'prompt', 'seed', 'context'} <= options
  text = ' '.join(shown.split())
  assert 'K, drafts per round [on CPUs 1, elsewhere 2]' in text
  of_length = re.search(r'L, tokens per draft \[on CPUs (.*?), elsewhere 8\]', text)[1]
  for kind, default in drafting.ON_CPU.items():
    assert re.search(rf'\b{default.draft_length} with [^\d]*{re.escape(kind)}', of_length)
  assert '[autoregressive without --draft, else on CPUs block with a model or a head' in text
  assert '[512]' in text
  assert 'pretrained/' not in text  # the pair that continues texts


@pytest.mark.parametrize('option', ['num_seeds=2', 'batch_size=4', 'breakdown', 'prompts=x.txt', 'share_of_optimum'])
def test_flags_of_other_commands_are_refused(option):
  line = commands.refuse('decode.chat', f'--target={_MODEL}', f'--{option}')
  assert line == f'error: {option.partition("=")[0]} is not for decode.chat, which answers one user'
