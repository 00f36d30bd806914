"""The pre-tokenizers of GGUF files: by name, how each splits a text into the words that merges stay within.

They are those of the models' own files on the hub. llama.cpp brings no text to the form NFC, and matches some
expressions otherwise, so that on rare texts it gives other ids than these.
"""

from __future__ import annotations

import dataclasses

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
# Marks belong to the letters that they stand on.
_QWEN35_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
  r'| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_CHINESE = '[一-龥ࠀ-一가-퟿]+'
# Letters with a case as DeepSeek LLM lists them: without Mathematical Alphanumeric Symbols, small Armenian letters,
# most of Georgian, parts of Latin Extended-D and E, and scripts that came to Unicode later.
_CASED = (
  r'[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C6}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2F}\x{A78F}-\x{AB6F}'
  r'\x{10570}-\x{105BF}\x{10D50}-\x{10D8F}\x{16E40}-\x{16EDF}\x{1D400}-\x{1D7FF}\x{1DF00}-\x{1DFFF}]]'
)


@dataclasses.dataclass(frozen=True)
class Words:
  """How a text is split into the words that merges stay within."""

  patterns: tuple[str, ...]  # applied one after the other; each match is a word, and so is what is between them
  is_nfc: bool = False  # whether the text is brought to Unicode's form NFC first
  takes_whole_words: bool = False  # whether a word that is a token is taken without merging
  adds_bos: bool = False  # whether a text begins with the beginning of a document by default


_GPT2 = Words((_GPT2_WORDS,))
_GPT_NEOX = dataclasses.replace(_GPT2, is_nfc=True)
_SINGLE_DIGITS = Words((r'\p{N}', _GPT2_WORDS))
_LLAMA3 = Words((_LLAMA3_WORDS.replace('DIGITS', '{1,3}'),), takes_whole_words=True, adds_bos=True)
_QWEN2 = Words((_LLAMA3_WORDS.replace('DIGITS', ''),), is_nfc=True)
_THREES = '[0-9][0-9][0-9]'
WORDS = {
  # For files from before pre-tokenizers had names; llama.cpp reads them like this.
  'default': Words((r'[\p{P}\$\+<=>\^~\|]+', _GPT2_WORDS, r'\p{N}+', _THREES)),
  'gpt-2': _GPT2,
  'olmo': _GPT_NEOX,  # Pythia as well
  'mpt': _GPT_NEOX,
  'smollm': _SINGLE_DIGITS,
  'starcoder': _SINGLE_DIGITS,
  'refact': _SINGLE_DIGITS,
  'minerva-7b': _SINGLE_DIGITS,
  'command-r': dataclasses.replace(_SINGLE_DIGITS, is_nfc=True),
  'falcon': Words((r'[\p{P}\$\+<=>\^~\|`]+', _GPT2_WORDS, _THREES)),
  'llama-bpe': _LLAMA3,
  'llama3': _LLAMA3,
  'llama-v3': _LLAMA3,
  'falcon3': _LLAMA3,
  'smaug-bpe': Words(_LLAMA3.patterns),
  'qwen2': _QWEN2,
  'deepseek-r1-qwen': _QWEN2,
  'megrez': _QWEN2,
  'qwen35': Words((_QWEN35_WORDS,)),  # without NFC in llama.cpp's tests
  'deepseek-coder': Words(('[\r\n]', r'\s?\p{L}+', r'\s?\p{P}+', _CHINESE, r'\p{N}')),
  'deepseek-llm': Words(('[\r\n]', rf'\s?{_CASED}+', r'\s?[!-/:-~！-／：-～‘-‟　-。]+', r'\s+$', _CHINESE, r'\p{N}+')),
}
