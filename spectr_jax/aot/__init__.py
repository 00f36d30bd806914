"""Ahead-of-time compilation for TPU slices, and reports of the compiler."""
