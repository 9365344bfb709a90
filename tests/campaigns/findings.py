"""What programs have found, without times: it must be the same however often they were killed."""

import json
from pathlib import Path
from typing import Any

TIMES = {"seconds", "steps_per_second", "tokens_per_second", "checksum", "trained_together", "out"}


def studied(out: Path) -> object:
    """The figures of the only study in a results folder."""
    (path,) = out.glob("studies/*/summary.json")
    return _untimed(json.loads(path.read_text()))


def pretrained(out: Path) -> object:
    """The record of the only pretraining run in a results folder."""
    (path,) = out.glob("c4/*/record.json")
    return _untimed(json.loads(path.read_text()))


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _untimed(inner) for name, inner in value.items() if name not in TIMES}
    return [_untimed(inner) for inner in value] if isinstance(value, list) else value
