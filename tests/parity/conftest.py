"""Real models that tests compare with `transformers`."""

import pytest
from smollm2 import find_smollm2


@pytest.fixture(scope='session')
def smollm2():
  """The path of SmolLM2-135M-Instruct as a GGUF file, Q4_1."""
  return find_smollm2()


def pytest_ignore_collect(config):
  """Other runs leave these tests alone, so that they neither import nor miss what the extra installs."""
  expression = config.option.markexpr
  return True if 'parity' not in expression or 'not parity' in expression else None
