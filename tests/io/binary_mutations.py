"""Reads many mutations of a binary file: `python binary_mutations.py KIND FOLDER NUM`.

A reader that reads memory which is not the file's may end the process, so that this is one of its own.
"""

import json
import os
import pathlib
import pickle
import random
import struct
import sys
import zipfile

import gguf
import gguf_files
import hostile
import ml_dtypes
import numpy as np
import safetensors.numpy

from spectr_jax.io.hub import gguf_header, gguf_tensors, tensors, torch_file


def _read_all(found):
  for name in sorted(found.names()):
    whole = tuple(slice(0, size) for size in found.shape(name))
    np.asarray(found.read(name, whole)).astype(np.float32).sum()
    found.read(name, tuple(slice(size // 3, size - 1) for size in found.shape(name)))
    found.dtype(name)


# Files of torch.


HOOKS = b'ccollections\nOrderedDict\n)R'


def plain(value):
  """The instructions that make a plain value."""
  return pickle.dumps(value, 2)[2:-1]


def pickled_tensor(key, kind, size, shape, strides, offset=0):
  """The instructions that make a tensor, as torch writes them."""
  pid = b'(' + plain('storage') + f'ctorch\n{kind}\n'.encode() + b''.join(map(plain, (key, 'cpu', size))) + b'tQ'
  fields = b''.join(map(plain, (offset, shape, strides, False)))
  return b'ctorch._utils\n_rebuild_tensor_v2\n(' + pid + fields + HOOKS + b'tR'


def pickled_state(**values):
  """A pickle of instructions by name."""
  return b'\x80\x02}(' + b''.join(plain(name) + value for name, value in values.items()) + b'u.'


def torch_zip(path, content, storages, compression=zipfile.ZIP_STORED):
  """Writes an archive as torch does."""
  with zipfile.ZipFile(path, 'w', compression) as archive:
    archive.writestr('a/data.pkl', content)
    archive.writestr('a/byteorder', 'little')
    for key, numbers in storages.items():
      archive.writestr(f'a/data/{key}', numbers)
  return path


_STORAGES = {'0': bytes(range(48)), '1': bytes(16), '2': b'\1\0\1'}
_STATE = (
  b'\x80\x02' + HOOKS + b'q\0('
  + plain('a.weight') + b'q\1' + pickled_tensor('0', 'FloatStorage', 12, (3, 4), (4, 1))
  + plain('b') + pickled_tensor('0', 'FloatStorage', 12, (2, 2), (1, 4), 1) + b'r\2\0\0\0'
  + plain('c') + pickled_tensor('1', 'LongStorage', 2, (2,), (1,))
  + plain('d') + b'ctorch._utils\n_rebuild_parameter\n'
  + pickled_tensor('2', 'BoolStorage', 3, (), ()) + b'\x88' + HOOKS + b'\x87R'
  + b'u}' + plain('_metadata') + b'}' + plain('version') + b'K\1ssb.'
)  # fmt: skip


def _torch(folder):
  path = folder / 'x.bin'
  torch_zip(path, _STATE, _STORAGES)
  whole = path.read_bytes()

  def mutate(rng):
    if rng.random() < 0.6:
      torch_zip(path, hostile.mutated_bytes(_STATE, rng), _STORAGES)
    else:
      path.write_bytes(hostile.mutated_bytes(whole, rng))

  return [path], mutate, lambda: _read_all(torch_file.TorchFile(path))


# Safetensors.


def _safetensors(folder):
  arrays = {
    'a': np.arange(12, dtype=np.float32).reshape(3, 4),
    'b': np.ones((2, 0), np.float16),
    'c': np.arange(5, dtype=ml_dtypes.bfloat16),
    'd': np.array(3),
  }
  names = 'x-1.safetensors', 'x-2.safetensors'
  whole = safetensors.numpy.save({name: arrays[name] for name in 'ab'})
  (folder / names[1]).write_bytes(safetensors.numpy.save({name: arrays[name] for name in 'cd'}))
  index = {'metadata': {'total_size': 98}, 'weight_map': dict(zip('abcd', (names[0],) * 2 + (names[1],) * 2))}
  index_path, path = folder / 'model.safetensors.index.json', folder / names[0]
  path.write_bytes(whole)
  index_path.write_text(json.dumps(index))
  size = int.from_bytes(whole[:8], 'little')
  header = json.loads(whole[8 : 8 + size])

  def mutate(rng):
    path.write_bytes(whole)
    index_path.write_text(json.dumps(index))
    which = rng.randrange(4)
    if which == 0:
      index_path.write_bytes(hostile.mutated_json_text(index, rng))
    elif which == 1:
      path.write_bytes(hostile.mutated_bytes(whole, rng))
    else:
      text = hostile.mutated_json_text(header, rng)
      path.write_bytes(struct.pack('<Q', len(text)) + text + whole[8 + size :])

  return [folder], mutate, lambda: _read_all(tensors.SafetensorsFolder(folder))


# GGUF.

_CONFIG = {
  'architectures': ['LlamaForCausalLM'], 'num_attention_heads': 2, 'num_key_value_heads': 1, 'head_dim': 4,
  'hidden_size': 8,
}  # fmt: skip


def write_gguf(path):
  """Writes a few tensors of a tiny Llama, one of them quantized."""
  metadata = {
    'llama.block_count': 1, 'llama.rope.freq_base': 1e4, 'tokenizer.ggml.tokens': ['a', 'b', 'é'],
    'tokenizer.ggml.scores': [0.5, -1.0, 3.0], 'tokenizer.ggml.add_bos_token': True,
  }  # fmt: skip
  rng, kinds = np.random.default_rng(0), gguf.GGMLQuantizationType
  shapes = {'token_embd': (3, 8), 'blk.0.attn_q': (8, 8), 'blk.0.attn_k': (4, 8), 'output_norm': (8,)}
  tensors = [(f'{name}.weight', rng.normal(size=shape).astype(np.float32), kinds.F32) for name, shape in shapes.items()]
  blocks = gguf.quants.quantize(rng.normal(size=(2, 64)).astype(np.float32), kinds.Q4_1)
  gguf_files.write(path, 'llama', metadata, [*tensors, ('blk.0.ffn_up.weight', blocks, kinds.Q4_1)])


def read_gguf(path):
  """Reads all tensors of such a file."""
  with np.errstate(all='ignore'):
    _read_all(gguf_tensors.GgufTensors(gguf_header.read_header(path), _CONFIG, 'llama'))


def _gguf(folder):
  path = folder / 'x.gguf'
  write_gguf(path)
  whole = path.read_bytes()
  start = min(tensor.offset for tensor in gguf_header.read_header(path).tensors.values())

  def mutate(rng):
    end = start if rng.random() < 0.8 else len(whole)
    path.write_bytes(hostile.mutated_bytes(whole[:end], rng) + whole[end:])

  return [path], mutate, lambda: read_gguf(path)


_KINDS = {'torch': _torch, 'safetensors': _safetensors, 'gguf': _gguf}


def main(kind, folder, num):
  names, mutate, read = _KINDS[kind](pathlib.Path(folder))
  read()  # the valid file
  tally = hostile.Tally(*names)
  for number in range(int(num)):
    mutate(random.Random(f'{kind}/{number}'))
    print(number, file=sys.stderr)  # the last one is that which ended the process
    tally.read(read, f'mutation {number}')
  tally.check(int(num))
  if os.environ.get('SHOW'):
    print(json.dumps(tally.refusals, indent=1))


if __name__ == '__main__':
  main(*sys.argv[1:])
