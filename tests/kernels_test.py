"""Cycles of Pallas kernels, from schedules as the TPU compiler writes them."""

from collections import Counter

import pytest

from spectr_jax.aot import kernels

_CALL = '  %{} = f32[8]{{0}} custom-call(%p), custom_call_target="tpu_custom_call"\n'
_BUNDLES = '     0   :  { %s1 = smov 0 }\n   0x1   :  { %s2 = smov 0 }\n'
_CHAINS = 'New basic block in region: region0 {{members=1 hlo=k parent=-1}}\n  Length to end: {}, %s1 = smov 0\n'


def write_schedule(folder, name, length):
  (folder / f'17-{name}-00-critical-path.txt').write_text(_CHAINS.format(length))
  (folder / f'17-{name}-01-final_bundles.txt').write_text(_BUNDLES)


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.setattr(kernels, 'write_schedules', lambda: tmp_path)
  monkeypatch.setattr(kernels, '_slowest', Counter())
  return tmp_path


def test_equal_kernels_share_a_schedule(folder):
  text = ''.join(map(_CALL.format, ['forward.1', 'forward.2', 'forward.3.clone', 'backward']))
  for name, length in [('forward.1', 5), ('forward.2', 9), ('forward.3.clone', 4), ('backward', 1)]:
    write_schedule(folder, name, length)
  cycles = {'forward.1': 5, 'forward.2': 9, 'forward.3.clone': 4, 'backward': 2}
  assert kernels.take_schedules(text) == cycles
  assert not list(folder.iterdir())
  write_schedule(folder, 'forward.2', 7)
  write_schedule(folder, 'forward.7', 11)  # of no kernel of this program
  text = ''.join(map(_CALL.format, ['forward.2', 'forward.11', 'backward.5']))
  # A program that was compiled before had the others.
  assert kernels.take_schedules(text) == {'forward.2': 7, 'forward.11': 9, 'backward.5': 2}


def test_equal_kernels_have_the_same_results(folder):
  small, large = _CALL.format('forward.1'), _CALL.format('forward.2').replace('f32[8]', 'f32[64]')
  for name, length in [('forward.1', 5), ('forward.2', 90)]:
    write_schedule(folder, name, length)
  assert kernels.take_schedules(small + large + small.replace('.1', '.3')) == {
    'forward.1': 5, 'forward.2': 90, 'forward.3': 5,
  }  # fmt: skip
  with pytest.raises(ValueError, match=r'there is no schedule of the kernel forward\.4'):
    kernels.take_schedules(_CALL.format('forward.4').replace('f32[8]', 'f32[16]'))


def test_a_kernel_without_a_schedule_is_refused(folder):
  write_schedule(folder, 'forward.1', 5)
  with pytest.raises(ValueError, match=r'there is no schedule of the kernel backward\.1'):
    kernels.take_schedules(_CALL.format('forward.1') + _CALL.format('backward.1'))
