#!/usr/bin/env bash
# Library: transformers 5.24.0 with torch 2.13.0.
# Behavior: assisted generation hands the target's logits processors to the assistant, whose own `generate` adds those of
#   its configuration again. So drafts are drawn at the square of the temperature: with temperature .5 their
#   distributions are softmax(logits / .25). The text stays exact, since these distributions are also those that the
#   target's choice takes into account; but the draft is another one than asked for, and so is its acceptance.
# Output seen: total variation .3329 from the distributions at .5, .0000 from those at .25.
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

TEMPERATURE = 0.5
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
    initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=0,
  )
  return transformers.LlamaForCausalLM(config).eval()


print(f'transformers {transformers.__version__}, torch {torch.__version__}')
torch.set_grad_enabled(False)
AssistedCandidateGenerator.get_candidates = record
target, assistant = make_model(0), make_model(1)
assistant.generation_config.num_assistant_tokens = 4
assistant.generation_config.num_assistant_tokens_schedule = 'constant'
assistant.generation_config.assistant_confidence_threshold = 0.0
once = twice = 0.0
for first in range(1, 16):  # the first draft after each of 15 prompts, which hold no padding
  prompt = torch.tensor([[first, 2, 3]])
  seen.clear()
  target.generate(
    prompt, attention_mask=torch.ones_like(prompt), do_sample=True, temperature=TEMPERATURE, top_k=0, max_new_tokens=6,
    assistant_model=assistant,
  )
  ids, logits = seen[0]
  plain = assistant(ids).logits[:, -logits.shape[1] - 1 : -1]
  drawn = torch.softmax(logits, dim=-1)

  def distance(temperature):
    """The largest total variation between what a token was drawn from and the assistant's law at a temperature."""
    return float((drawn - torch.softmax(plain / temperature, dim=-1)).abs().sum(dim=-1).max() / 2)

  once, twice = max(once, distance(TEMPERATURE)), max(twice, distance(TEMPERATURE**2))
print(f'total variation of the distributions of {logits.shape[1]} guesses each after 15 prompts, at the most:')
print(f'  from those at temperature {TEMPERATURE}: {once:.4f}')
print(f'  from those at temperature {TEMPERATURE**2}: {twice:.4f}')
sys.exit(0 if once > 0.05 and twice < 0.001 else 1)
PYTHON
