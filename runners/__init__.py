"""The programs, and what they share."""

__version__ = "0.2.0"
"""Version of the project; ``pyproject.toml`` reads it from here."""
