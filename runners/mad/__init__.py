"""Diagnostics: ``python -m runners.mad``."""
