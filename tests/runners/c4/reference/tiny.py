"""The smallest setting in which reference language models are trained."""

from typing import Any

from tests.runners.c4 import runs

TINY: dict[str, Any] = {**runs.TINY, "evaluations": 2, "checkpoint_every": 2}
