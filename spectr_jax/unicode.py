"""The check that a text is valid Unicode."""

from __future__ import annotations


def check_unicode(text: str, where: str) -> None:
  """ValueError, with `where` a text stands, for lone surrogates: JSON spells them, Python keeps other bytes by them."""
  try:
    text.encode()
  except UnicodeEncodeError as error:
    code = ord(text[error.start])
    what = f'byte {code - 0xDC00:#04x} is not UTF-8' if 0xDC80 <= code < 0xDD00 else f'U+{code:04X} is no character'
    raise ValueError(f'{where} is not valid Unicode: {what}') from error
