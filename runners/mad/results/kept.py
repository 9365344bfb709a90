"""The disk space of a study, and the deletion of models that are not kept."""

from pathlib import Path
from typing import Literal

from runners.mad.experiment import Experiment, run_folder, study_folder
from runners.mad.results.summary import Summary

Keep = Literal["all", "best", "none"]
"""Which models are kept after a study has its result: those of all runs, of the chosen point, or none."""


def delete_models(experiment: Experiment, summary: Summary, out: Path, keep: Keep) -> None:
    """Delete the models that are not kept; records, curves and test figures are kept.

    Args:
        experiment: the experiment that was trained.
        summary: its results; points that other grids would choose count as chosen.
        out: results folder.
        keep: which models are kept.
    """
    chosen = {summary.chosen, *summary.other_choices.values()} if keep == "best" else set()
    for index, point in enumerate(summary.points if keep != "all" else ()):
        for run in point.runs if index not in chosen else ():
            (run_folder(out.resolve(), experiment, run) / "model.safetensors").unlink(missing_ok=True)


def disk_use(experiment: Experiment, summary: Summary, out: Path) -> str:
    """Return in words the disk space of a study's files and of its runs."""
    folders = [run_folder(out.resolve(), experiment, run) for run in summary.runs]
    files = (path for folder in [study_folder(out.resolve(), experiment), *folders] for path in folder.glob("*"))
    size = sum(path.stat().st_size for path in files)
    return f"{size / 2**20:,.1f} MiB with its {len(folders)} run{'s' * (len(folders) > 1)}"
