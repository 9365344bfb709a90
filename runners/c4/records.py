"""The JSON files in the folder of a run, read with a check of the entries that the programs use."""

from pathlib import Path
from typing import Any

from runners.files import AGAIN, check_entries, read_json

_FIGURES = ("loss", "validation_loss", "tokens_per_second", "seconds")
KINDS: dict[str, dict[str, Any]] = {
    "run.json": {"config": dict, "mixer_options": dict, "corpus": dict, "code": str},
    "result.json": {"corpus": dict, "step": int, **dict.fromkeys(_FIGURES, float | int)},
    "diverged.json": {"step": int, "message": str},
    "downstream.json": {"items": str, "scores": dict},
}
"""Types of the entries by name, for each file."""


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the content of a file of a run; None if there is no file.

    Args:
        path: the file, which has a name in ``KINDS``.

    Raises:
        DamagedFileError: it is damaged, or it is another program's.
    """
    if not path.exists():
        return None

    content: dict[str, Any] = read_json(path)
    check_entries(path, content, KINDS[path.name], AGAIN)
    return content
