"""Forms by platform: which of them are traced, and which run."""

import jax
import jax.numpy as jnp
import pytest

from spectr_jax.kernels.dispatch import by_platform, default_platform, made_for


@pytest.fixture
def forms():
  """Forms that say by their result and by a list which they are."""
  traced = []

  def form(name, value):
    def apply(x):
      traced.append(name)
      return x + value

    return apply

  return {'cpu': form('cpu', 1), 'tpu': form('tpu', 2), 'default': form('default', 3)}, traced


@pytest.mark.parametrize(('platform', 'value'), [('cpu', 1), ('tpu', 2), ('gpu', 3)])
def test_the_form_of_the_default_platform_is_traced_alone(monkeypatch, forms, platform, value):
  forms, traced = forms
  monkeypatch.setattr(jax, 'default_backend', lambda: platform)
  assert jax.jit(lambda x: by_platform(x, **forms))(jnp.zeros(())) == value
  assert len(traced) == 1


@pytest.mark.parametrize(('platform', 'name', 'value'), [('cpu', 'cpu', 1), ('tpu', 'tpu', 2), ('gpu', 'default', 3)])
def test_one_form_is_traced_where_it_is(forms, platform, name, value):
  forms, traced = forms
  with made_for(platform):
    assert jax.jit(lambda x: by_platform(x, **forms))(jnp.zeros(())) == value
  assert traced == [name]


def test_a_form_for_gpus_is_used(forms):
  forms, traced = forms

  def apply(x):
    return by_platform(x, **forms, gpu=lambda x: x + 4)

  with made_for('gpu'):
    assert jax.jit(lambda x: apply(x))(jnp.zeros(())) == 4
  assert not traced
  assert jax.jit(lambda x: apply(x))(jnp.zeros(())) == 1


def test_functions_are_traced_anew_for_another_platform(forms):
  forms, _ = forms
  inner = jax.jit(lambda x: by_platform(x, **forms))

  def found(platform):
    with made_for(platform):
      return inner(jnp.zeros(()))

  assert [float(found(platform)) for platform in ('cpu', 'tpu', 'cpu')] == [1, 2, 1]


@pytest.mark.parametrize('device', ['cpu', jax.devices('cpu')[0]], ids=['name', 'device'])
def test_a_default_device_has_another_platform_than_the_default_backend(monkeypatch, device):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
  assert default_platform() == 'tpu'
  with jax.default_device(device):
    assert default_platform() == 'cpu'
