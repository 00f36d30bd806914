"""Converts a model folder of an older version (`model.json` and `params/`) to the format of today.

Command   python -m train.convert --model=OLD_FOLDER --output=NEW_FOLDER
"""

from __future__ import annotations

import json

import numpy as np
import orbax.checkpoint as ocp
from absl import flags
from etils import epath

from common import command_line
from spectr_jax import Tokenizer, save_model
from spectr_jax.models.causal_lm import causal_lm, lm1b_config


def convert(old: epath.PathLike, new: epath.PathLike) -> None:
  """Writes a folder of `format` 1, 2 or 3 anew. It is trusted: use it for models that you trained yourself."""
  old = epath.Path(old).resolve()
  if not (old / 'model.json').exists():
    raise ValueError(f'{old} has no model.json: it is not a model of an older version')
  spec = json.loads((old / 'model.json').read_text())
  sizes = spec['config']
  config = lm1b_config(**{'context_length': sizes.pop('max_length'), **sizes})
  with ocp.PyTreeCheckpointer() as checkpointer:
    stored = checkpointer.restore(old / 'params')

  def kernel(node):
    kernel = np.asarray(node['kernel'])
    return kernel if spec['format'] == 3 else kernel.T  # before, they were `[out, in]`

  def block(node):
    parts = kernel(node['qkv']).reshape(
      config.embed_dim, *((3, config.num_heads) if spec['format'] == 1 else (config.num_heads, 3)), config.head_dim
    )
    by_part = parts if spec['format'] == 1 else parts.swapaxes(1, 2)
    attention = {name: {'kernel': by_part[:, i].reshape(config.embed_dim, -1)} for i, name in enumerate('qkv')}
    return {
      'attention': attention | {'out': {'kernel': kernel(node['attention_out'])}},
      'mlp': {'up': {'kernel': kernel(node['mlp_in'])}, 'down': {'kernel': kernel(node['mlp_out'])}},
      'attention_norm': node['attention_norm'],
      'mlp_norm': node['mlp_norm'],
    }

  params = {name: block(node) if name.startswith('layer_') else node for name, node in stored.items()}
  tokenizer = Tokenizer.load(old / 'tokenizer.json')
  model = causal_lm(params, config)
  save_model(new, model, tokenizer, info=spec['info'], param_dtype=spec['param_dtype'])


def main():
  convert(_MODEL.value, _OUTPUT.value)


if __name__ == '__main__':
  _MODEL = flags.DEFINE_string('model', None, 'Folder of an older version.', required=True)
  _OUTPUT = flags.DEFINE_string('output', None, 'Folder to write.', required=True)
  command_line.run(main, ['--model=runs/old/model --output=runs/new/model'])
