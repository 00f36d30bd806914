"""The package and its products in C++, which are optional; the metadata is in pyproject.toml."""

import os
import pathlib
import platform

import setuptools
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

_SOURCES = pathlib.Path('spectr_jax/kernels/native')
_HEADERS = [
  str(_SOURCES / name)
  for name in (
    'attention.h',
    'blocks.h',
    'blocks_avx512.h',
    'norms.h',
    'panels.h',
    'product.h',
    'softmax.h',
    'steps.h',
    'threads.h',
  )
]
# Flags of each form; nothing else in its file is compiled for its processors.
_FLAGS = {
  'form_avx2.cc': ['-mavx2', '-mfma', '-mf16c'],
  'form_avx512.cc': ['-mavx512f', '-mavx512bw', '-mavx512vl', '-mfma', '-mf16c'],
  'form_avx512_vnni.cc': ['-mavx512f', '-mavx512bw', '-mavx512vl', '-mavx512vnni', '-mfma', '-mf16c'],
  'form_avx512_bf16.cc': ['-mavx512f', '-mavx512bw', '-mavx512vl', '-mavx512bf16', '-mfma'],
  'products.cc': [],
  'rounds.cc': [],
}


class BuildProducts(build_ext):
  """Compiles each file with the flags of its form."""

  def get_ext_filename(self, fullname):
    """A name that Python does not take for a module's."""
    return str(pathlib.Path(super().get_ext_filename(fullname)).with_name('products.bin'))

  def build_extension(self, ext):
    try:
      import jaxlib  # with XLA's headers
    except ImportError as error:
      raise CompileError(f'no headers of XLA: {error}') from None
    headers = pathlib.Path(jaxlib.__file__).parent / 'include'
    objects = []
    for name, flags in _FLAGS.items():
      objects += self.compiler.compile(
        [str(_SOURCES / name)],
        output_dir=self.build_temp,
        include_dirs=[str(headers)],
        extra_postargs=['-std=c++17', '-O3', '-w', *flags],
      )
    self.compiler.link_shared_object(objects, self.get_ext_fullpath(ext.name), target_lang='c++')


def _extensions():
  if os.environ.get('SPECTR_JAX_BUILD_PRODUCTS') == '0':
    return []
  if platform.machine() not in ('x86_64', 'AMD64') or platform.system() != 'Linux':
    return []
  sources = [str(_SOURCES / name) for name in _FLAGS]
  return [
    setuptools.Extension('spectr_jax.kernels.native.products', sources, depends=_HEADERS, optional=True, language='c++')
  ]


setuptools.setup(ext_modules=_extensions(), cmdclass={'build_ext': BuildProducts})
