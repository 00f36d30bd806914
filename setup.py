"""Package metadata of spectr_jax; settings of tools are in pyproject.toml."""

import pathlib
import re

import setuptools

_ROOT = pathlib.Path(__file__).parent


def _version() -> str:
  # Read, not imported: a build has none of the dependencies.
  source = (_ROOT / 'spectr_jax' / '__init__.py').read_text(encoding='utf-8')
  return re.search(r"^__version__ = '([^']+)'$", source, re.MULTILINE).group(1)


def _readme() -> str:
  path = _ROOT / 'README.md'
  return path.read_text(encoding='utf-8') if path.exists() else ''


# The lower bounds are tested: all of them together, on the oldest supported Python.

# What spectr_jax imports: `import spectr_jax` needs JAX and NumPy, the others are imported on first use.
_LIBRARY = [
  'etils[epath]>=1.9',  # paths of model files, local or remote
  'flax>=0.12',  # spectr_jax.models
  'gguf>=0.17',  # load_model of .gguf files
  'jax>=0.8.1',
  'jinja2>=3.1.6',  # chat templates; earlier sandboxes have known holes
  'numpy>=2.0',
  'orbax-checkpoint>=0.11.26',  # load_model, save_model
  'safetensors>=0.5',  # load_model of hub folders
  'scipy>=1.13',  # spectr_jax.theory, spectr_jax.testing
  'tensorstore>=0.1.71',  # load_model; Orbax reads with it as well
  'tokenizers>=0.21',  # Tokenizer
]

# What the commands of decode/ and train/ need in addition. They run from a clone and are not in the wheel, but
# `pip install -e .` alone must be enough for those of README.md.
_COMMANDS = [
  'absl-py>=2.1',  # flags
  'filelock>=3.13',  # JAX locks a compilation cache of limited size
  'ml_collections>=1.0',  # configs/
  'optax>=0.2.6',  # train/
  'rich>=13.7',  # tables and progress
  'tensorboardX>=2.6.2.2',  # metrics of train/
]

setuptools.setup(
  name='spectr_jax',
  version=_version(),
  description='Lossless multi-draft speculative decoding in JAX.',
  long_description=_readme(),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  license_files=['LICENSE'],
  packages=setuptools.find_packages(include=['spectr_jax', 'spectr_jax.*']),
  package_data={'spectr_jax': ['py.typed']},
  python_requires='>=3.11',
  install_requires=[*_LIBRARY, *_COMMANDS],
  extras_require={
    'test': ['hypothesis>=6.100', 'matplotlib>=3.9', 'nbformat>=5.10', 'pytest>=8.0', 'pytest-xdist>=3.6', 'ruff>=0.9'],
    # `load_model('ORG/NAME')` downloads from the hub.
    'hub': ['huggingface_hub>=0.30'],
    # The peers that real models are compared with.
    'parity': ['torch>=2.6', 'transformers>=5.0', 'accelerate>=1.0'],
    'plots': ['matplotlib>=3.9'],
    'notebooks': ['ipykernel>=6.29', 'matplotlib>=3.9', 'nbclient>=0.10', 'nbformat>=5.10'],
    'lm1b': ['array_record>=0.5', 'importlib_resources>=6.0', 'tensorflow-datasets>=4.9.7'],
    'docs': ['mkdocs>=1.6,<2', 'mkdocs-material>=9.6', 'mkdocstrings[python]>=0.26', 'ruff>=0.9'],
    'types': ['pyright[nodejs]>=1.1.414'],
    'browser': ['playwright>=1.45'],
    'tpu': ['jax[tpu]'],
    'cuda': ['jax[cuda12]'],
  },
  classifiers=[
    'Intended Audience :: Science/Research',
    'Programming Language :: Python :: 3',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
  ],
)
