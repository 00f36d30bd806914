"""What begins a prompt, beside `AutoTokenizer` of Transformers: tiny tokenizers whose files say different things."""

import pytest
import tiny_hub
from tokenizers import processors

from spectr_jax.io.hub.hub_tokenizer import load_hub_tokenizer

pytestmark = pytest.mark.parity
# Classes of Transformers 5 that read the rules of tokenizer.json, as public folders name them: that of GPT-NeoX drops
# them, and LlamaTokenizer splits words by rules of its own in some versions.
_CLASSES = {
  'llama': 'PreTrainedTokenizerFast', 'mistral': 'PreTrainedTokenizerFast', 'qwen2': 'Qwen2TokenizerFast',
  'gemma': 'PreTrainedTokenizerFast', 'gpt2': 'GPT2TokenizerFast',
}  # fmt: skip


@pytest.mark.parametrize('said', [{}, {'add_bos_token': True}, {'add_bos_token': False}])
@pytest.mark.parametrize('bos', [{'bos_token': '<s>'}, {'bos_token': None}])
@pytest.mark.parametrize('has_rule', [True, False])
@pytest.mark.parametrize('model_type', _CLASSES)
def test_prompts_begin_as_those_of_transformers(model_type, has_rule, bos, said, tmp_path):
  transformers = pytest.importorskip('transformers')
  backend = tiny_hub.backend(add_bos=has_rule)
  if has_rule:
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), backend.post_processor])
  config = {'tokenizer_class': _CLASSES[model_type], 'eos_token': '<|im_end|>', **bos, **said}
  folder = tiny_hub.write(tmp_path / 'model', backend, tokenizer_config=config, config={'model_type': model_type})
  theirs = transformers.AutoTokenizer.from_pretrained(folder)('the owl').input_ids
  ours = load_hub_tokenizer(folder).encode_prompt('the owl')
  assert (ours[0] == tiny_hub.SPECIAL['<s>']) == (theirs[0] == tiny_hub.SPECIAL['<s>']) == has_rule
  assert ours == theirs
