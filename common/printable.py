"""Text that is safe to print: nothing in it steers a terminal."""

from __future__ import annotations

import unicodedata

# Controls, formatting (which reverses or hides text), surrogates, and separators that are line breaks to some.
_UNSAFE = 'Cc', 'Cf', 'Cs', 'Zl', 'Zp'
# The first two join characters to one, or keep them apart, which several scripts and emoji need.
_SAFE = '\u200c\u200d\n\t'


def printable(text: str) -> str:
  """The text with U+FFFD in place of every character that could steer a terminal, or hide what it shows.

  Line breaks and tabs stay. Every character is looked at alone, so parts of a text may be printed one by one.
  """
  if text.isprintable():
    return text
  return ''.join('\ufffd' if c not in _SAFE and unicodedata.category(c) in _UNSAFE else c for c in text)
