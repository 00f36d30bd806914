"""What the tests of the loop run: methods, trees, prompts, and short ways to call it."""

import jax
import numpy as np

import spectr_jax
from spectr_jax import METHODS, Decoder, TokenTree
from spectr_jax.methods import with_children, with_gumbel
from spectr_jax.sampling import SAMPLING_NAMES, SamplingParams

# Every method, and the other versions of two: traversal on siblings that differ, sampling with keys by position.
VERSIONS = {
  **METHODS,
  'traversal_without_replacement': with_children(METHODS['traversal'], 'without_replacement'),
  'gumbel': with_gumbel(METHODS['autoregressive']),
}
TREES = {
  name: {0: TokenTree(), 1: TokenTree.chains(1, 3)}.get(method.max_drafts, TokenTree.chains(2, 3))
  for name, method in VERSIONS.items()
}
# One of each kind of verifier, proposal and state.
KINDS = (
  'autoregressive', 'speculative', 'spectr', 'gsd', 'ersd', 'greedy_block', 'race_block', 'traversal', 'race_traversal',
)  # fmt: skip
LOSSLESS = [name for name, method in VERSIONS.items() if method.is_lossless]
NEW = 12
PROMPTS = np.array([[3, 0, 0, 0, 0, 0], [1, 4, 0, 0, 0, 0], [5, 2, 0, 3, 1, 4], [2, 2, 5, 0, 0, 0]])
LENGTHS = np.array([1, 2, 6, 3])


def make_keys(seed=0):
  """One key per row."""
  return jax.random.split(jax.random.key(seed), 4)


def _with_sampling(options):
  """Options of `generate`, in which `sampling` holds the temperature and the filters."""
  loose = {name: options.pop(name) for name in SAMPLING_NAMES if name in options}
  return options | ({'sampling': SamplingParams(**loose)} if loose else {})


def generate(models, method, keys, prompts=PROMPTS, lengths=LENGTHS, *, tree=None, max_new_tokens=NEW, **options):
  """`spectr_jax.generate` by a name of `VERSIONS`, on its tree unless another is given."""
  method, tree = VERSIONS.get(method, method), TREES[method] if tree is None else tree
  return spectr_jax.generate(
    keys, *models, prompts, lengths, method=method, tree=tree, max_new_tokens=max_new_tokens, **_with_sampling(options)
  )


def begin(models, method, keys, prompts=PROMPTS, lengths=LENGTHS, *, tree=None, max_new_tokens=NEW, **options):
  """A decoder, and its state before the first round."""
  method, tree = VERSIONS.get(method, method), TREES[method] if tree is None else tree
  cache_size = options.pop('cache_size', np.shape(prompts)[1] + max_new_tokens)
  options = _with_sampling(options)
  sampling = options.pop('sampling', None)
  decoder = Decoder.make(
    *models, method=method, tree=tree, max_new_tokens=max_new_tokens, cache_size=cache_size, **options
  )
  return decoder, spectr_jax.engine.init_decode(decoder, keys, prompts, lengths, sampling=sampling)


def assert_same(first, second):
  """Equal arrays, one by one."""
  jax.tree.map(np.testing.assert_array_equal, first, second)
