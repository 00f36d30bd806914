#!/usr/bin/env bash
# Library: transformers 5.24.0 with torch 2.13.0.
# Behavior: Mamba-2 layers bound the size of a step by `time_step_limit` where they read several tokens; the step of
#   one token behind a cache does not. So with a limit that binds, cached generation continues another model than the one
#   that reads the text at once. (The limit of published Mamba-2 models binds nothing: from 0 to infinity.)
# Output seen: logits of tokens read one by one differ from those read at once by .3858 with a limit of .05, and by less
#   than 1e-4 without one.
# A tiny random Falcon-H1; nothing is downloaded but the packages.
# Exits with 1 if the two are equal with a limit, or differ without one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/venv/bin/python" -W ignore - <<'PYTHON'
import sys

import torch
import transformers

torch.set_grad_enabled(False)


def difference(limit):
  """The largest difference of logits between a text read at once and token by token."""
  torch.manual_seed(0)
  config = transformers.FalconH1Config(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1,
    mamba_chunk_size=8, time_step_limit=limit, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    pad_token_id=0,
  )
  model = transformers.FalconH1ForCausalLM(config).eval()
  tokens = torch.tensor([[3, 9, 4, 30, 11, 7, 2, 5]])
  whole = model(tokens).logits
  cache, one_by_one = None, []
  for place in range(tokens.shape[1]):
    output = model(tokens[:, place : place + 1], past_key_values=cache, use_cache=True)
    cache = output.past_key_values
    one_by_one.append(output.logits)
  return float((torch.cat(one_by_one, dim=1) - whole).abs().max())


print(f'transformers {transformers.__version__}, torch {torch.__version__}')
free, bound = difference((0.0, float('inf'))), difference((0.0, 0.05))
print(f'largest difference of logits: {free:.6f} without a limit, {bound:.4f} with one of .05')
sys.exit(0 if free < 1e-4 < 1e-2 < bound else 1)
PYTHON
