"""The disk that a study takes, and which of its models are kept."""

from pathlib import Path
from typing import Literal

from runners.mad.experiment import Experiment, run_folder, study_folder
from runners.mad.results.summary import Summary

Keep = Literal["all", "best", "none"]
"""Which models stay once a study has its result: those of all runs, of the chosen point, or none."""


def delete_models(experiment: Experiment, summary: Summary, out: Path, keep: Keep) -> None:
    """Delete the models that are not kept; records, curves and test figures stay.

    Args:
        experiment: what was trained.
        summary: what it reached; points that other grids would choose count as chosen.
        out: results folder.
        keep: which models stay.
    """
    chosen = {summary.chosen, *summary.other_choices.values()} if keep == "best" else set()
    for index, point in enumerate(summary.points if keep != "all" else ()):
        for run in point.runs if index not in chosen else ():
            (run_folder(out.resolve(), experiment, run) / "model.safetensors").unlink(missing_ok=True)


def disk_use(experiment: Experiment, summary: Summary, out: Path) -> str:
    """Return in words what the files of a study and of its runs take."""
    folders = [run_folder(out.resolve(), experiment, run) for run in summary.runs]
    files = (path for folder in [study_folder(out.resolve(), experiment), *folders] for path in folder.glob("*"))
    size = sum(path.stat().st_size for path in files)
    return f"{size / 2**20:,.1f} MiB with its {len(folders)} run{'s' * (len(folders) > 1)}"
