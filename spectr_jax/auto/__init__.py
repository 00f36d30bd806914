"""The method and the tree that are fastest for a pair, a device and a batch, by measurement."""

from spectr_jax.auto.choice import measure_speeds
from spectr_jax.auto.observation import Speed
from spectr_jax.auto.setting import Setting, default_settings

__all__ = ['Setting', 'Speed', 'default_settings', 'measure_speeds']
