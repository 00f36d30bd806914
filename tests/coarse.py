"""Methods with coarse races, for tests of what holds for any weights: a full race in many rows takes minutes."""

import dataclasses

from spectr_jax.couplings import Race

_SIZES = {'num_classes': 6, 'octave_bits': 0, 'num_rounds': 1, 'log_range': 3.0}
COARSE_RACE = Race(**_SIZES)


def coarse(part):
  """A method, or a part of one, with every race of one class to an octave, whatever else it is made of."""
  if isinstance(part, Race):
    return dataclasses.replace(part, **_SIZES)  # of its own kind, which may be broken on purpose
  if dataclasses.is_dataclass(part):
    fields = [field.name for field in dataclasses.fields(part) if field.init]
    return dataclasses.replace(part, **{name: coarse(getattr(part, name)) for name in fields})
  return part
