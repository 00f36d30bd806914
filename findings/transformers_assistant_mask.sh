#!/usr/bin/env bash
# Library: transformers 5.24.0 with torch 2.13.0.
# Behavior: in assisted generation the assistant draws its guesses as if every token of the prompt that is the padding
#   token were hidden, also where the attention mask that the caller gives shows them all. So target and assistant read
#   different prompts where the padding token stands for something, as the end of a text does in many models. The text
#   stays exact; the draft is another one than asked for.
# Output seen: total variation .1751 from the assistant's distributions with the given mask, .0000 with one that hides
#   the padding token.
# Two tiny random models; nothing is downloaded but the packages.
# Exits with 1 if the distributions are no longer these.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/venv/bin/python" - <<'PYTHON'
import sys

import torch
import transformers
from transformers.generation import AssistedCandidateGenerator

PADDING = 0
seen = []
own = AssistedCandidateGenerator.get_candidates


def record(self, input_ids, **options):
  """Keeps what the assistant proposes, and the logits that it says it drew from."""
  ids, logits = own(self, input_ids, **options)
  if logits is not None:
    seen.append((ids.clone(), logits.clone()))
  return ids, logits


def make_model(seed):
  torch.manual_seed(seed)
  config = transformers.LlamaConfig(
    vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=PADDING,
  )
  return transformers.LlamaForCausalLM(config).eval()


print(f'transformers {transformers.__version__}, torch {torch.__version__}')
torch.set_grad_enabled(False)
AssistedCandidateGenerator.get_candidates = record
target, assistant = make_model(0), make_model(1)
assistant.generation_config.num_assistant_tokens = 4
assistant.generation_config.num_assistant_tokens_schedule = 'constant'
assistant.generation_config.assistant_confidence_threshold = 0.0
prompt = torch.tensor([[5, PADDING, 3, 2]])
target.generate(
  prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=0, max_new_tokens=7, assistant_model=assistant
)
ids, logits = seen[0]
drawn = torch.softmax(logits, dim=-1)


def distance(mask):
  """The largest total variation between what a guess was drawn from and the assistant's law with a mask."""
  plain = assistant(ids, attention_mask=mask).logits[:, -logits.shape[1] - 1 : -1]
  return float((drawn - torch.softmax(plain, dim=-1)).abs().sum(dim=-1).max() / 2)


given, inferred = torch.ones_like(ids), torch.ones_like(ids)
inferred[:, : prompt.shape[1]] = prompt != PADDING
print(f'total variation of the distributions of the first {logits.shape[1]} guesses, at the most:')
print(f'  from those with the mask that was given: {distance(given):.4f}')
print(f'  from those with a mask that hides the padding token of the prompt: {distance(inferred):.4f}')
sys.exit(0 if distance(given) > 0.05 and distance(inferred) < 0.001 else 1)
PYTHON
