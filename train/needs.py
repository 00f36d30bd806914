"""Imported first by modules that need the extra `train`, for one line that says so where it is missing."""

from common.extras import need

need('train', 'absl', 'flax', 'ml_collections', 'optax', 'orbax', 'rich', 'tensorboardX', 'tokenizers')
