"""The commands that train, which need the extra `train`."""

from common.extras import need

need('train', 'absl', 'flax', 'ml_collections', 'optax', 'orbax', 'rich', 'tensorboardX', 'tokenizers')
