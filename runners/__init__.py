"""The programs, and what they share."""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

__version__ = "0.2.0"
"""Version of the project; ``pyproject.toml`` reads it from here."""


class OwnPackages(PathFinder):
    """Finds ``mixers`` and ``tasks`` beside this package, before those of the folder in which a program is run."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the location of one of the two packages; None for any other module."""
        if fullname not in ("mixers", "tasks"):
            return None
        return PathFinder.find_spec(fullname, [str(Path(__file__).parents[1])], target)


sys.meta_path.insert(0, OwnPackages)

# PyTorch's threads wait for each other by spinning, for so long that training is several times slower where other
# processes use the cores. This many turns cost nothing where none does. The library of threads reads it when PyTorch is
# imported.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"
