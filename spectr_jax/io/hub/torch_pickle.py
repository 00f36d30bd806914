"""The pickle in a file of `torch.save`, read by a machine that can make descriptions of tensors and nothing else.

A pickle is a program. Python's own machine calls whatever a pickle names, and lets it replace the attributes of what it
makes. This one knows the instructions that torch writes for tensors by name. It makes plain dicts, lists, tuples, texts
and numbers, and `Tensor`s that lie within their storages; it looks none
of the names up.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from spectr_jax.io import foreign
from spectr_jax.io.hub.tensors import check_shape

_STORAGES = {
  'DoubleStorage': np.float64, 'FloatStorage': np.float32, 'HalfStorage': np.float16,
  'BFloat16Storage': ml_dtypes.bfloat16, 'LongStorage': np.int64, 'IntStorage': np.int32, 'BoolStorage': np.bool_,
}  # fmt: skip
_ORDERED_DICT = 'collections.OrderedDict'
_TENSOR, _PARAMETER = 'torch._utils._rebuild_tensor_v2', 'torch._utils._rebuild_parameter'
_KNOWN = (_ORDERED_DICT, _TENSOR, _PARAMETER, *(f'torch.{name}' for name in _STORAGES))
_LONGEST_NAME = 256  # bytes of a module or of a name in it


class Storage(NamedTuple):
  """Raw numbers in the archive: their type, the entry's key, and how many they are."""

  dtype: np.dtype
  key: str
  size: int


class Tensor(NamedTuple):
  """A part of a storage; offset and strides count numbers."""

  storage: Storage
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]


class Misfit(NamedTuple):
  """In place of a tensor that cannot be read, and why not."""

  reason: str


class _Name(NamedTuple):
  """What a pickle names; one of `_KNOWN`."""

  text: str


def read_pickle(content: bytes) -> Any:
  """The value that a pickle describes.

  It is a `Tensor` or a `Misfit`, or plain dicts with texts as keys, lists, tuples, texts and numbers. Values may
  contain themselves and each other.

  Raises:
    ValueError: The pickle is damaged, or holds anything that tensors by name do not need.
  """
  return _Machine(content).run()


def _is_count(value: Any) -> bool:
  return type(value) is int and value >= 0


def _is_empty_dict(value: Any) -> bool:
  return type(value) is dict and not value


def _storage(pid: Any) -> Storage:
  """The storage that a pickle refers to."""
  if type(pid) is not tuple or len(pid) != 5 or pid[0] != 'storage':
    raise ValueError('it refers to something that is not a storage')
  _, kind, key, _, size = pid
  dtype = _STORAGES.get(kind.text.removeprefix('torch.')) if type(kind) is _Name else None
  if dtype is None or type(key) is not str or not _is_count(size):
    raise ValueError('it refers to something that is not a storage')
  return Storage(np.dtype(dtype), key, size)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *others: Any) -> Tensor | Misfit:
  """The part of a storage that the arguments of torch's function describe.

  Args:
    storage, offset, shape, strides: As of a `Tensor`, unchecked.
    others: Whether there are gradients; hooks; and how the numbers differ from those of the storage, if they do.
  """
  _, _, *differences = others
  if any(x is not None and not _is_empty_dict(x) for x in differences):
    return Misfit('its numbers are not those of its storage')
  if type(storage) is not Storage or type(shape) is not tuple or type(strides) is not tuple:
    return Misfit('it is described in an unknown way')
  if not all(map(_is_count, (offset, *shape, *strides))) or len(shape) != len(strides):
    return Misfit('it is described in an unknown way')
  try:
    check_shape(shape)
  except ValueError as error:
    return Misfit(str(error))
  # The last number, if there is any. An axis of one number may have any stride.
  strides = tuple(stride if size > 1 else 0 for size, stride in zip(shape, strides))
  last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides))
  if 0 not in shape and last >= storage.size:
    return Misfit(f'it is not within its storage of {foreign.shown(storage.size)} numbers')
  return Tensor(storage, offset, shape, strides)


def _called(name: Any, arguments: Any) -> Any:
  """What a call gives."""
  if type(name) is not _Name or type(arguments) is not tuple:
    raise ValueError('it calls something that is no function')
  if name.text == _ORDERED_DICT and not arguments:
    return {}
  if name.text == _TENSOR and len(arguments) in (6, 7):
    return _tensor(*arguments)
  if name.text == _PARAMETER and len(arguments) == 3 and type(arguments[0]) in (Tensor, Misfit):
    return arguments[0]
  raise ValueError(f'it calls {name.text} in an unknown way')


class _Machine:
  """Runs a pickle."""

  def __init__(self, content: bytes):
    self._content, self._at = content, 0
    self._stack: list[Any] = []
    self._marks: list[int] = []  # heights of the stack
    self._memo: dict[int, Any] = {}

  def run(self) -> Any:
    for code in iter(lambda: self._bytes(1), b'.'):
      act = _INSTRUCTIONS.get(code)
      if act is None:
        raise ValueError(f'it holds {_instruction_name(code)}, which a file of tensors does not need')
      act(self)
    return self._pop()

  # The content.

  def _bytes(self, size: int) -> bytes:
    end = self._at + size
    if end > len(self._content):
      raise ValueError('it ends early')
    found = self._content[self._at : end]
    self._at = end
    return found

  def _number(self, code: str) -> Any:
    return struct.unpack(code, self._bytes(struct.calcsize(code)))[0]

  def _line(self) -> str:
    end = self._content.find(b'\n', self._at, self._at + _LONGEST_NAME)
    if end < 0:
      raise ValueError('it holds a name without an end')
    return self._bytes(end + 1 - self._at)[:-1].decode()

  # The stack.

  def _tops(self, size: int) -> list[Any]:
    if len(self._stack) - size < (self._marks[-1] if self._marks else 0):
      raise ValueError('it takes a value where there is none')
    return self._stack[-size:]

  def _top(self) -> Any:
    return self._tops(1)[0]

  def _pop(self) -> Any:
    self._top()
    return self._stack.pop()

  def _pop_to_mark(self) -> list[Any]:
    if not self._marks:
      raise ValueError('it takes values where there are none')
    height = self._marks.pop()
    values = self._stack[height:]
    del self._stack[height:]
    return values

  def _push(self, value: Any) -> None:
    self._stack.append(value)

  # Instructions.

  def skip(self, size: int) -> None:
    self._bytes(size)

  def mark(self) -> None:
    self._marks.append(len(self._stack))

  def text(self, code: str) -> None:
    self._push(self._bytes(self._number(code)).decode())

  def number(self, code: str) -> None:
    self._push(self._number(code))

  def long(self) -> None:
    self._push(int.from_bytes(self._bytes(self._number('B')), 'little', signed=True))

  def tuple(self, size: int) -> None:
    self._stack[-size:] = [tuple(self._tops(size))]

  def marked_tuple(self) -> None:
    self._push(tuple(self._pop_to_mark()))

  def append(self, values: list[Any]) -> None:
    target = self._top()
    if type(target) is not list:
      raise ValueError('it appends to something that is no list')
    target += values

  def set_items(self, values: list[Any]) -> None:
    target = self._top()
    if type(target) is not dict or len(values) % 2:
      raise ValueError('it sets items of something that is no dict')
    for key, value in zip(values[::2], values[1::2]):
      if type(key) is not str:
        raise ValueError('it holds a dict with keys that are not texts')
      if key in target:
        raise ValueError(f'it holds {foreign.shown(key)} twice')
      target[key] = value

  def set_item(self) -> None:
    value, key = self._pop(), self._pop()
    self.set_items([key, value])

  def get(self, code: str) -> None:
    number = self._number(code)
    if number not in self._memo:
      raise ValueError('it takes a value where there is none')
    self._push(self._memo[number])

  def put(self, number: int) -> None:
    self._memo[number] = self._top()

  def name(self, module: Any, name: Any) -> None:
    if type(module) is not str or type(name) is not str:
      raise ValueError('it names something by what is no text')
    text = f'{module}.{name}'
    if text not in _KNOWN:
      raise ValueError(f'it names {foreign.name_shown(text)}, which a file of tensors does not need')
    self._push(_Name(text))

  def stack_name(self) -> None:
    name, module = self._pop(), self._pop()
    self.name(module, name)

  def call(self) -> None:
    arguments, name = self._pop(), self._pop()
    self._push(_called(name, arguments))

  def build(self) -> None:
    # The versions of a module's parts, which torch attaches to its tensors.
    state = self._pop()
    if type(self._top()) is not dict or type(state) is not dict or state.keys() != {'_metadata'}:
      raise ValueError('it changes an object, which a file of tensors does not need')


_INSTRUCTIONS: dict[bytes, Callable[[_Machine], None]] = {
  b'\x80': lambda m: m.skip(1),  # PROTO
  b'\x95': lambda m: m.skip(8),  # FRAME
  b'(': _Machine.mark,
  b'}': lambda m: m._push({}),
  b']': lambda m: m._push([]),
  b')': lambda m: m._push(()),
  b'N': lambda m: m._push(None),
  b'\x88': lambda m: m._push(True),
  b'\x89': lambda m: m._push(False),
  b'X': lambda m: m.text('<I'),  # BINUNICODE
  b'\x8c': lambda m: m.text('B'),
  b'\x8d': lambda m: m.text('<Q'),
  b'J': lambda m: m.number('<i'),  # BININT
  b'K': lambda m: m.number('B'),
  b'M': lambda m: m.number('<H'),
  b'\x8a': _Machine.long,
  b'G': lambda m: m.number('>d'),  # BINFLOAT
  b't': _Machine.marked_tuple,
  b'\x85': lambda m: m.tuple(1),
  b'\x86': lambda m: m.tuple(2),
  b'\x87': lambda m: m.tuple(3),
  b'a': lambda m: m.append([m._pop()]),
  b'e': lambda m: m.append(m._pop_to_mark()),
  b's': _Machine.set_item,
  b'u': lambda m: m.set_items(m._pop_to_mark()),
  b'h': lambda m: m.get('B'),  # BINGET
  b'j': lambda m: m.get('<I'),
  b'q': lambda m: m.put(m._number('B')),  # BINPUT
  b'r': lambda m: m.put(m._number('<I')),
  b'\x94': lambda m: m.put(len(m._memo)),  # MEMOIZE
  b'c': lambda m: m.name(m._line(), m._line()),  # GLOBAL
  b'\x93': _Machine.stack_name,
  b'R': _Machine.call,  # REDUCE
  b'Q': lambda m: m._push(_storage(m._pop())),  # BINPERSID
  b'b': _Machine.build,
}


def _instruction_name(code: bytes) -> str:
  names = {known.code: known.name for known in pickletools.opcodes}
  name = names.get(code.decode('latin-1'))
  return f'the instruction {name}' if name else f'the unknown instruction {code[0]}'
