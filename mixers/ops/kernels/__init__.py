"""Triton kernels of the functions in ``mixers.ops``."""
