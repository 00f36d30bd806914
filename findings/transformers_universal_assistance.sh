#!/usr/bin/env bash
# Library: transformers 5.24.0 with torch 2.13.0.
# Behavior: with an assistant of another tokenizer (universal assisted generation) samples do not have the target's
#   distribution. The assistant's output head keeps the shared tokens in the order of `get_vocab()`, which is that of a
#   hash table, and its logits are placed in the target's vocabulary in the order of ids. So guesses are weighed by the
#   probabilities of other tokens.
# Output seen: total variation .79 to .85, as the order changes from run to run; .05 without an assistant and .04 with one
#   that shares the tokenizer, which is what 1,000 draws allow.
# Two tiny random models, and two tokenizers of the same words in another order, one more in the second; only
#   packages are downloaded.
# Exits with 1 if this is no longer so, or if a control without the assistant or with the target's tokenizer fails.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/venv/bin/python" - <<'PYTHON'
import sys

import tokenizers
import torch
import transformers

WORDS = ['the', 'owl', 'lives', 'in', 'old', 'trees', 'near', 'rivers']
NUM_DRAWS, NUM_NEW = 1000, 3


def make_tokenizer(words):
  found = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token='the'))
  found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  return transformers.PreTrainedTokenizerFast(tokenizer_object=found)


def make_model(seed, num_words):
  torch.manual_seed(seed)
  config = transformers.LlamaConfig(
    vocab_size=num_words, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None,
  )
  return transformers.LlamaForCausalLM(config).eval()


print(f'transformers {transformers.__version__}, torch {torch.__version__}')
torch.set_grad_enabled(False)
torch.set_num_threads(1)
target, sharing, assistant = make_model(0, len(WORDS)), make_model(1, len(WORDS)), make_model(2, len(WORDS) + 1)
for model in (sharing, assistant):
  model.generation_config.assistant_confidence_threshold = 0.0
tokenizer, other = make_tokenizer(WORDS), make_tokenizer(['streams', *WORDS[::-1]])
prompt = tokenizer('owl in trees', return_tensors='pt').input_ids

# The exact distribution of each new token, by all continuations.
laws, rows, probs = [], prompt, torch.ones(1)
for _ in range(NUM_NEW):
  steps = torch.softmax(target(rows).logits[:, -1].double(), dim=-1)
  probs = (probs[:, None] * steps).reshape(-1)
  rows = torch.cat([rows.repeat_interleave(len(WORDS), 0), torch.arange(len(WORDS)).repeat(len(rows))[:, None]], 1)
  laws.append(torch.zeros(len(WORDS), dtype=torch.float64).index_add(0, rows[:, -1], probs.double()))


def distance(**options):
  """The largest total variation of a new token's frequencies from its distribution."""
  torch.manual_seed(0)
  options = {'do_sample': True, 'temperature': 1.0, 'top_k': 0, 'max_new_tokens': NUM_NEW, **options}
  counts = torch.zeros(NUM_NEW, len(WORDS), dtype=torch.float64)
  for _ in range(NUM_DRAWS):
    found = target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, prompt.shape[1] :]
    counts[torch.arange(NUM_NEW), found] += 1
  return max(float((row / NUM_DRAWS - law).abs().sum() / 2) for row, law in zip(counts, laws))


plain = distance()
same = distance(assistant_model=sharing)
universal = distance(assistant_model=assistant, tokenizer=tokenizer, assistant_tokenizer=other)
print(f'largest total variation of {NUM_NEW} new tokens from their distributions, {NUM_DRAWS} draws:')
print(f'  no assistant: {plain:.3f}')
print(f'  an assistant that shares the tokenizer: {same:.3f}')
print(f'  an assistant with another tokenizer: {universal:.3f}')
sys.exit(0 if plain < 0.08 and same < 0.08 and universal > 0.15 else 1)
PYTHON
