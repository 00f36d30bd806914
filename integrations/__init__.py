"""Verification by this library in engines of others, one short file for each; none is imported by the library."""
