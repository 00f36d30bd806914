"""The package; its metadata is in pyproject.toml."""

import setuptools

setuptools.setup()
