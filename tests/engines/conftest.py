"""Tests beside the code of engines, `pytest -m engines`: each needs its engine's package, without dependencies."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
