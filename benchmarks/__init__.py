"""Measurements, which need the extra `commands`."""

from common.extras import need

need('commands', 'absl', 'filelock', 'flax', 'orbax', 'rich', 'tokenizers')
