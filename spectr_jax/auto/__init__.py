"""The method and the tree that are fastest for a pair, a device and a batch, by measurement."""

from spectr_jax.auto.choice import predict_speeds
from spectr_jax.auto.prediction import Prediction
from spectr_jax.auto.setting import Setting, default_settings

__all__ = ['Prediction', 'Setting', 'default_settings', 'predict_speeds']
