"""The programs, and what they share."""

import os

__version__ = "0.2.0"
"""Version of the project; ``pyproject.toml`` reads it from here."""

# PyTorch's threads wait for each other by spinning, for so long that training is several times slower where other
# processes use the cores. This many turns cost nothing where none does. The library of threads reads it when PyTorch is
# imported.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"
