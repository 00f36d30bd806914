"""Tiny tokenizers as public models have them, byte-level BPE with special tokens at odd ids; and tiny weights."""

import json

import jax
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from spectr_jax.io.hub.families import read_spec
from spectr_jax.io.hub.sources import source_of
from spectr_jax.models.param_shapes import param_shapes

# One of them stands alone behind a gap in the ids.
SPECIAL = {'<s>': 7, '<|im_start|>': 40, '<|im_end|>': 41, '<|stop|>': 200, '<pad>': 300}
CHAT = (
  '{% for message in messages %}'
  "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}"
  '{% endfor %}'
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MERGES = (('h', 'e'), ('Ġ', 't'), ('Ġt', 'he'), ('o', 'w'), ('ow', 'l'), ('Ġ', 'owl'))


def _added(*tokens):
  return [tokenizers.AddedToken(token, normalized=False) for token in tokens]


def backend(special=SPECIAL, merges=_MERGES, add_bos=False):
  """A byte-level tokenizer of `tokenizers`, whose rules may put `<s>` in front."""
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  vocab, free = dict(special), (index for index in range(1000) if index not in special.values())
  for token in (*sorted(alphabet), *map(''.join, merges)):
    vocab[token] = next(free)
  found = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
  found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  found.decoder = decoders.ByteLevel()
  found.add_special_tokens(_added(*special))
  if add_bos:
    found.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', special['<s>'])])
  return found


def spaced_backend():
  """A tokenizer that writes spaces as ▁, puts one in front of a text, and has bytes for unknown characters."""
  tokens = ['<unk>', '<s>', '</s>', *(f'<0x{byte:02X}>' for byte in range(256)), *'▁abcdehlotw<>/s', '▁a', '▁b', 'he']
  vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
  merges = [('▁', 'a'), ('▁', 'b'), ('h', 'e')]
  found = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token='<unk>', byte_fallback=True))
  found.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
  found.decoder = decoders.Sequence(
    [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
  )
  found.add_special_tokens(_added('<unk>', '<s>', '</s>'))
  return found


def write(folder, found=None, **files):
  """Writes a folder: `tokenizer.json`, and each file that is named, as JSON or as text."""
  folder.mkdir(exist_ok=True)
  (backend() if found is None else found).save(str(folder / 'tokenizer.json'))
  for name, content in files.items():
    if name == 'chat_template':
      (folder / f'{name}.jinja').write_text(content)
    else:
      (folder / f'{name}.json').write_text(json.dumps(content))
  return folder


def random_array(*shape):
  """Normal numbers that depend on the shape alone."""
  return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def tensors_of(spec):
  """Random tensors of the shapes that a checkpoint needs, by the names that loading asks for."""
  family, config = read_spec(spec)
  tensors = {}
  for keys, leaf in jax.tree_util.tree_leaves_with_path(param_shapes(config)):
    path = jax.tree_util.keystr(keys, simple=True, separator='/')
    source = source_of(path, leaf.shape, family, config, {family.prefix})
    for i, name in enumerate(source.names):
      tensors[name] = random_array(*source.shape) + i / 8
  return tensors


def write_model(folder, spec, arrays=None, num_files=1):
  """Writes `config.json`, a JSON value or a text, and its weights, random ones by default, spread over files."""
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(spec if isinstance(spec, str) else json.dumps(spec))
  arrays = tensors_of(spec) if arrays is None else arrays
  tensors = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
  if num_files == 1:
    save_file(tensors, folder / 'model.safetensors')
    return folder
  weight_map = {name: f'model-{i % num_files}.safetensors' for i, name in enumerate(tensors)}
  for file in set(weight_map.values()):
    save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
  (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
  return folder


class Recorded:
  """Tensors in memory that record the size of everything that is read."""

  def __init__(self, tensors):
    self.tensors, self.reads = tensors, []

  def names(self):
    return set(self.tensors)

  def shape(self, name):
    return self.tensors[name].shape

  def dtype(self, name):
    return self.tensors[name].dtype

  def read(self, name, index):
    part = self.tensors[name][index].copy()
    self.reads.append((name, part.size))
    return part
