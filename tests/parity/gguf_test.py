"""A real GGUF file, read here and by `transformers`: the same parameters, the same tokens."""

import pathlib
import random
import re

import numpy as np
import pytest

from spectr_jax.io.hub.gguf_header import read_header
from spectr_jax.io.hub.gguf_tokenizer import build_tokenizer
from spectr_jax.io.model_files import GgufFile

pytestmark = pytest.mark.parity

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope='module')
def transformers():
  return pytest.importorskip('transformers')


@pytest.fixture(scope='module')
def file(smollm2):
  return GgufFile(smollm2)


@pytest.fixture(scope='module')
def peer(transformers, smollm2):
  """The tokenizer of `transformers`."""
  return transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


def test_parameters_and_configuration_are_equal(file, transformers, smollm2):
  peer = transformers.AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype='float32')
  expected = {name: tensor.numpy() for name, tensor in peer.state_dict().items()}
  assert set(expected) - file.tensors.names() == {'lm_head.weight'}  # tied
  for name in file.tensors.names():
    assert file.tensors.shape(name) == expected[name].shape
    whole = file.tensors.read(name, (slice(None),) * expected[name].ndim)
    np.testing.assert_array_equal(whole, expected[name], err_msg=name)
    part = tuple(slice(size // 5, size // 2 + 7) for size in expected[name].shape)
    np.testing.assert_array_equal(file.tensors.read(name, part), whole[part], err_msg=name)
  theirs = peer.config.to_dict()
  # It keeps the float32 number of the file, and RoPE elsewhere.
  assert file.spec['rms_norm_eps'] == pytest.approx(theirs.pop('rms_norm_eps'), rel=1e-6)
  assert file.spec['rope_theta'] == theirs['rope_parameters']['rope_theta']
  assert file.spec['architectures'] == [type(peer).__name__]
  checked = set(theirs) & set(file.spec) - {'architectures'}
  assert len(checked) > 12
  assert {name: file.spec[name] for name in checked} == {name: theirs[name] for name in checked}


_SCRIPTS = (
  "The 3 quick brown foxes’ den isn't 12,345.67 km away; we'll see, \"they'd say\".",
  'Größenwahn in Übersee kostet 1000 €, façade déjà-vu, señor ñandú, İstanbul, Łódź.',
  'Сколько долларов она зарабатывает? Утки несут по 16 яиц в день.',
  '珍妮特的鸭子每天下 16 颗蛋。ジャネットのアヒルは1日に卵を生みます。오늘은 날씨가 좋다.',
  'เป็ดวางไข่วันละ 16 ฟอง, हंस प्रतिदिन १६ अंडे, ডিম ১৬টি, గుడ్లు ౧౬, البط يضع ١٦ بيضة, ברווז',
  '½ Ⅷ ² ٣ ௧ é e\u0301 ﬁ 👩\u200d👩\u200d👧\u200d👦 🇩🇪 ✌🏽 ∑∫√ \u00a0 \u3000 \u200b \ufeff',
  'def f(x):\n\treturn {"a": [x**2, 0x1F, 1e-5]}  # 100%\r\n\n\n    if not x:  \n',
  '<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n <|endoftext|> <repo_name>x <|im_star',
)


def _texts():
  """Prose, code, tables, many scripts, special tokens, and random mixtures of all these."""
  generator = random.Random(0)
  pieces = [piece for text in _SCRIPTS for piece in re.findall(r'\s+|\S+', text)]
  texts = [*_SCRIPTS, '']
  for page in sorted([*(_ROOT / 'docs').glob('*.md'), *(_ROOT / 'spectr_jax').glob('*.py')]):
    texts += page.read_text(encoding='utf-8').split('\n\n')
  texts += [''.join(generator.choices(pieces, k=generator.randrange(1, 12))) for _ in range(2000)]
  return texts + [''.join(generator.choices(''.join(_SCRIPTS), k=generator.randrange(1, 40))) for _ in range(1000)]


def test_tokens_are_equal(smollm2, peer):
  # `transformers` 5.23 leaves digits to GPT-2's words, though the file names a pre-tokenizer that cuts digits first.
  # Tokens differ where two spaces stand before a digit, and where digits of other scripts stand side by side.
  from tokenizers import pre_tokenizers

  found = build_tokenizer(read_header(smollm2))
  texts = _texts()
  assert len(texts) > 3000
  as_they_read_it = [peer.encode(text, add_special_tokens=False) for text in texts]
  peer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
  )
  num_different = 0
  for text, theirs in zip(texts, as_they_read_it, strict=True):
    ids = found.encode(text).ids
    assert ids == peer.encode(text, add_special_tokens=False), text
    if ids != theirs:
      num_different += 1
      assert re.search(r'\s\s\d', text) or any(x.isnumeric() and not x.isascii() for x in text), text
    for skip in (True, False):
      expected = peer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
      assert found.decode(ids, skip_special_tokens=skip) == expected
    assert found.decode(ids, skip_special_tokens=False) == text
  assert num_different < len(texts) / 10


def test_special_tokens_and_template_are_equal(file, peer):
  tokenizer = file.tokenizer()
  assert tokenizer._backend.get_vocab() == peer.get_vocab()
  assert (tokenizer.bos_id, tokenizer.pad_id) == (peer.bos_token_id, peer.pad_token_id)
  assert tokenizer.eos_ids == (peer.eos_token_id,)
  assert tokenizer.special_token_names.keys() == {i for i, token in peer.added_tokens_decoder.items() if token.special}
  assert not tokenizer.add_bos
  assert tokenizer.chat_template.source == peer.chat_template
