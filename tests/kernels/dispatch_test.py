"""Operations: which of their forms are traced, and which run, also on platforms that are not there."""

import contextlib
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spectr_jax.kernels
from spectr_jax.kernels.dispatch import OPERATIONS, Operation, default_platform, launch, operation, tracing_for


@pytest.fixture
def operation_with_forms():
  """An operation whose forms say by their result and by a list which they are."""
  traced = []

  def form(name, value):
    def apply(x):
      traced.append(name)
      return x + value

    return apply

  found = Operation(form('plain', 3))
  found.register('cpu', form('cpu', 1))
  found.register('tpu', form('tpu', 2))
  return found, traced


@pytest.mark.parametrize('is_default', [True, False])
@pytest.mark.parametrize(('platform', 'name', 'value'), [('cpu', 'cpu', 1), ('tpu', 'tpu', 2), ('gpu', 'plain', 3)])
def test_the_form_of_the_platform_is_traced_alone(monkeypatch, operation_with_forms, platform, name, value, is_default):
  apply, traced = operation_with_forms
  if is_default:
    monkeypatch.setattr(jax, 'default_backend', lambda: platform)
  with contextlib.nullcontext() if is_default else tracing_for(platform):
    assert jax.jit(lambda x: apply(x))(jnp.zeros(())) == value
  assert traced == [name]


def test_functions_are_traced_anew_for_another_platform(operation_with_forms):
  apply, _ = operation_with_forms
  inner = jax.jit(lambda x: apply(x))

  def found(platform):
    with tracing_for(platform):
      return inner(jnp.zeros(()))

  assert [float(found(platform)) for platform in ('cpu', 'tpu', 'cpu')] == [1, 2, 1]


def test_the_last_form_that_takes_the_arguments_is_chosen(operation_with_forms):
  """What a form needs may be a shape, a type, or something that was not there before."""
  apply, _ = operation_with_forms
  is_built = False
  apply.register('cpu', lambda x: x + 4, takes=lambda x: is_built and x.ndim == 1)
  apply.register('cpu', lambda x: x + 5, takes=lambda x: x.dtype == jnp.int32)
  with tracing_for('cpu'):
    assert [apply(jnp.zeros(())), apply(jnp.zeros((), jnp.int32)), apply(jnp.zeros(1))[0]] == [1, 5, 1]
    is_built = True
    assert [apply(jnp.zeros(())), apply(jnp.zeros(1, jnp.int32))[0], apply(jnp.zeros(1))[0]] == [1, 5, 4]
  with tracing_for('gpu'):
    assert apply(jnp.zeros(1))[0] == 3


def test_there_is_no_other_platform(operation_with_forms):
  with pytest.raises(ValueError, match="one of cpu, gpu, tpu, got 'cuda'"):
    operation_with_forms[0].register('cuda', jnp.sin)


def test_a_name_is_that_of_one_operation():
  def softmax(x):
    return x

  importlib.import_module('spectr_jax.kernels.softmax')
  with pytest.raises(ValueError, match=r'spectr_jax.kernels.softmax has an operation softmax, so .*dispatch_test'):
    operation(softmax)


def test_the_table_of_the_library():
  """Whoever adds or removes a form of a platform says so here."""
  for module in pkgutil.iter_modules(spectr_jax.kernels.__path__):
    importlib.import_module(f'spectr_jax.kernels.{module.name}')
  own = {name: ' '.join(each.platforms()) for name, each in OPERATIONS.items() if '.kernels.' in each.plain.__module__}
  assert own == {
    'apply_filters': 'gpu tpu',
    'arrange_packed': 'tpu',
    'attend_packed': 'tpu',
    'block_product': 'cpu',
    'draw_several': 'cpu tpu',
    'entries_of': 'tpu',
    'expert_block_product': 'cpu',
    'fastest_cache_dtype': 'cpu',
    'first_above': 'tpu',
    'first_kept': 'tpu',
    'first_largest': 'cpu',
    'fit_race': 'tpu',
    'for_rounds': 'cpu',
    'heads_in_order': 'gpu',
    'in_rows': 'tpu',
    'int8_product': 'cpu',
    'joined_in_loop': 'tpu',
    'kernel_gradient': 'tpu',
    'kernels_for_decoding': 'cpu gpu',
    'largest_threshold': 'cpu gpu',
    'map_entries': 'cpu gpu',
    'map_rows': 'cpu',
    'narrow_sections': 'tpu',
    'params_for_decoding': 'cpu',
    'pick': 'tpu',
    'product': 'cpu',
    'race_credits': 'tpu',
    'rotary_angles': 'cpu',
    'rounded': 'cpu',
    'rows_where_needed': 'cpu',
    'scan_depths': 'cpu gpu',
    'shares': 'cpu',
    'softmax': 'cpu gpu tpu',
    'solve_gamma': 'cpu',
    'spread': 'tpu',
    'sum_of': 'cpu',
    'sums_by_class': 'cpu',
    'sums_of_rows': 'tpu',
    'token_sums': 'tpu',
    'totals': 'cpu',
    'tree_attention': 'cpu gpu tpu',
    'write_slots': 'cpu tpu',
  }


@pytest.mark.parametrize('device', ['cpu', jax.devices('cpu')[0]], ids=['name', 'device'])
def test_a_default_device_has_another_platform_than_the_default_backend(monkeypatch, device):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
  assert default_platform() == 'tpu'
  with jax.default_device(device):
    assert default_platform() == 'cpu'


@pytest.mark.parametrize('lowered_for', ['tpu', 'cuda', 'rocm', 'cpu'])
@pytest.mark.parametrize(('platform', 'own'), [('tpu', {'tpu'}), ('gpu', {'cuda', 'rocm'})])
def test_a_kernel_is_lowered_for_its_platform_alone(platform, own, lowered_for):
  called = []

  def kernel(x):
    called.append(x.shape)
    return x + 1

  @jax.jit
  def apply(x):
    return launch(lambda x: x + 1, kernel, x, platform=platform)

  apply.trace(jnp.zeros((3, 2))).lower(lowering_platforms=(lowered_for,))
  assert called == ([(3, 2)] if lowered_for in own else [])


def test_entries_of_rows_are_entries_of_one_call():
  """Also where no platform has the kernel, and the plain form takes its place."""
  found = jax.vmap(lambda x, y: launch(lambda x, y: x * y, None, x, y, platform='gpu'), (0, None))(
    jnp.arange(12.0).reshape(2, 3, 2), jnp.full((3, 2), 2.0)
  )
  np.testing.assert_array_equal(found, 2 * np.arange(12).reshape(2, 3, 2))
