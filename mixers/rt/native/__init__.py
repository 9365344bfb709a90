"""Layers of the Recurrent Transformer for CPUs, in C."""
