"""The repetition penalty and fewest tokens beside those of `transformers`: `pytest -m parity`."""

import dataclasses

import jax
import numpy as np
import pytest

import spectr_jax
from spectr_jax import SamplingParams, TokenTree
from spectr_jax.io.hub.hub_model import load_hub_model

torch = pytest.importorskip('torch', reason='needs the extra parity')
transformers = pytest.importorskip('transformers', reason='needs the extra parity')
pytestmark = [pytest.mark.parity, pytest.mark.usefixtures('highest')]

V, NEW, EOS = 61, 24, 2
PROMPTS = [[5, 9, 9, 40], [7], [1, 3, 8, 12, 33, 60, 5]]


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
  """A tiny random Llama of `transformers`, and the same as target and, with noise, as draft."""
  config = transformers.LlamaConfig(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=EOS, tie_word_embeddings=False,
  )  # fmt: skip
  torch.manual_seed(0)
  reference = transformers.LlamaForCausalLM(config).eval()
  path = tmp_path_factory.mktemp('llama')
  reference.save_pretrained(path)
  target = load_hub_model(str(path))
  noise = np.random.default_rng(0)

  def disturbed(leaf):
    return leaf + 0.01 * noise.normal(size=leaf.shape).astype(np.float32)

  return reference, target, dataclasses.replace(target, params=jax.tree.map(disturbed, target.params))


@pytest.mark.parametrize('options', [
  {}, {'repetition_penalty': 1.05}, {'repetition_penalty': 1.6}, {'repetition_penalty': 0.7},
  {'repetition_penalty': 1.3, 'min_tokens': 20},
], ids=str)  # fmt: skip
def test_greedy_text_is_that_of_transformers(pair, options):
  reference, target, draft = pair
  result = spectr_jax.generate(
    jax.random.key(0), target, draft, PROMPTS, max_new_tokens=NEW, eos_id=EOS, tree=TokenTree.chains(2, 3),
    sampling=SamplingParams(temperature=0.0, **options),
  )  # fmt: skip
  renamed = {'min_new_tokens' if name == 'min_tokens' else name: value for name, value in options.items()}
  renamed |= {'do_sample': False, 'max_new_tokens': NEW}
  for row, prompt in enumerate(PROMPTS):
    with torch.no_grad():
      ids = reference.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **renamed)
    assert result.tokens[row, : result.lengths[row]].tolist() == ids[0, len(prompt) :].tolist()
