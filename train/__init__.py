"""Training of models and of drafts. `configs/` holds the experiments."""

from common.extras import need

need('train', 'absl', 'flax', 'ml_collections', 'optax', 'orbax', 'rich', 'tensorboardX', 'tokenizers')
