"""The canon: the shapes with which default tests run the loop.

Each further shape is a further program, and compiling takes more of a test's time than running. A default test that
runs the loop takes these shapes; one that needs others is marked `slow`.
"""

from spectr_jax import TokenTree

CHAIN = TokenTree.chains(1, 3)
TREE = TokenTree.chains(2, 3)
SLOTS = TokenTree.slots((2, 2, 2))
VOCAB_SIZE = 7
BATCH_SIZE = 4
CACHE_SIZE = 64
MAX_NEW_TOKENS = 12
