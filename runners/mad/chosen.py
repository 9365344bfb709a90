"""The runs of a study: which are missing, which point is chosen, its test figures, its model and its diagnosis."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from mixers.models import Backbone
from runners.device import find_devices
from runners.files import DamagedFileError, load_info, load_tensors, read_json
from runners.mad.experiment import Experiment, Say
from runners.mad.options import START, Options
from runners.mad.points import (
    FULL,
    LEARNED,
    LOST,
    GridPoint,
    choose,
    chosen,
    point_of,
    points,
    rescaled,
    runs_of_points,
)
from runners.mad.tables import setting_of
from runners.mad.training.ensemble import Ensemble, Resident, evaluate
from runners.mad.training.protocol import Run
from runners.records import RECORD, Record, read_all, table_of, write
from runners.runs import is_finished
from tasks.metrics import Counts

MODEL, CHECKPOINT = "model.safetensors", "checkpoint.safetensors"
"""Files in the folder of a run, beside its record."""


def runs_of(experiment: Experiment, options: Options) -> Sequence[Run]:
    """Return the runs that are trained of an experiment before any repeats: the grid of the options.

    In a profile the third rung has the grid: first all but its smallest and largest learning rate, then one of these if
    its neighbour is the best, below the ceiling. A rung has the point of its neighbour on the side of the third one,
    unless that says too little about rates: the first harder rung below the ceiling also has the other rates that were
    at the ceiling on the third one, and an easier rung has the grid where the neighbour is hardly learned. It has no
    runs while the neighbour is not finished, beyond one that is lost, and below one at its ceiling.
    """
    rung, lrs = experiment.rung, sorted({run.lr for run in options.runs})
    if options.preset != "profile" or rung is None:
        return options.runs
    if rung != START:
        neighbour = experiment.at_rung(rung + 1 if rung < START else rung - 1)
        trained = runs_of(neighbour, options)
        found = read_runs(neighbour, trained, options.out)
        if not trained or len(found) < len(trained):
            return ()
        point = point_of(tried := runs_of_points(table := table_of(found)))
        score = 0.0 if point is None else rescaled(table[[at == point for at, _, _ in tried]], "validation").mean()
        if score < LOST if rung > START else score >= FULL:
            return ()
        if point is not None and (rung > START or score >= LEARNED):
            seeds = sorted({run.seed for run in options.runs})
            runs = [Run(lr=point[0], weight_decay=point[1], seed=seed) for seed in seeds]
            here = table_of(read_runs(experiment, runs, options.out) if score >= FULL else [])
            if len(here) < len(runs) or rescaled(here, "validation").mean() >= FULL:
                return runs
            rates = undecided(experiment.at_rung(START), lrs, options)
            return [*runs, *(run for run in options.runs if run.lr in rates - {point[0]})]

    # The grid.
    if len(lrs) < 4:
        return options.runs
    inner = [run for run in options.runs if run.lr in lrs[1:-1]]
    table = table_of(read_runs(experiment, inner, options.out))
    if len(table) < len(inner):
        return inner
    best = choose(table)
    further = {lrs[1]: lrs[0], lrs[-2]: lrs[-1]}.get(best[0]) if best else lrs[0]
    full = best is not None and rescaled(table[table["lr"] == best[0]], "validation").mean() >= FULL
    return inner if full else [*inner, *(run for run in options.runs if run.lr == further)]


def undecided(start: Experiment, lrs: Sequence[float], options: Options) -> set[float]:
    """Return the learning rates that the third rung, at its ceiling, does not tell apart, and the outer ones beside."""
    table = table_of(read_runs(start, runs_of(start, options), options.out))
    by_point = rescaled(table, "validation").groupby([table["lr"], table["weight_decay"]]).mean()
    rates = {lr for (lr, _), score in by_point.items() if score >= FULL}
    beside = ((lrs[1], lrs[0]), (lrs[-2], lrs[-1])) if len(lrs) > 3 else ()
    return rates | {outer for inner, outer in beside if inner in rates}


def missing_runs(experiment: Experiment, options: Options) -> list[Run]:
    """Return the runs of a grid that are not finished; of a finished grid, those that repeat the chosen point."""

    def unfinished(runs: Sequence[Run]) -> list[Run]:
        return [run for run in runs if not is_finished(experiment.folder_of(run, options.out))]

    return unfinished(runs_of(experiment, options)) or unfinished(
        chosen_and_repeats(experiment, options)[1] if options.more_seeds else []
    )


def chosen_and_repeats(experiment: Experiment, options: Options) -> tuple[GridPoint | None, list[Run]]:
    """Choose a point of a finished grid, and name the runs that repeat it with more seeds.

    Returns:
        The point, None if a seed of each point diverged; and the repeats, also those of better points of which one has
        diverged. Repeats need not be finished.
    """
    table = table_of(read_runs(experiment, runs_of(experiment, options), options.out))
    repeats: list[Run] = []
    unstable: list[GridPoint] = []
    while (point := choose(table, unstable)) is not None:
        of_point = [Run(lr=point[0], weight_decay=point[1], seed=seed) for seed in options.more_seeds]
        repeats += of_point
        repeated = read_runs(experiment, of_point, options.out)
        if all(record.diverged_step is None for _, record in repeated):
            break
        unstable.append(point)
    return point, repeats


def read_runs(experiment: Experiment, runs: Sequence[Run], out: Path) -> list[tuple[Path, Record]]:
    """Return the records of those runs that are finished, each with its file."""
    folders = [experiment.folder_of(run, out) for run in runs]
    return read_all(*(folder / RECORD for folder in folders if is_finished(folder)))


def saved_step(folder: Path) -> int:
    """Return the step from which the run of a folder would resume; 0 without a checkpoint."""
    path = folder / CHECKPOINT
    return int(load_info(path)["step"]) if path.exists() else 0


def evaluate_on_test(
    experiment: Experiment, runs: Sequence[tuple[Path, Record]], device: torch.device, together: int
) -> None:
    """Evaluate finished runs on the test split and the extrapolation sets, once, and write that into their records.

    Args:
        experiment: the study.
        runs: folders and records of its runs.
        device: device of the evaluation.
        together: largest number of models in memory at a time, as in training.

    Raises:
        DamagedFileError: the model of a run without test figures is gone or damaged.
    """
    unread = [(folder, record) for folder, record in runs if record.metrics and "test" not in record.metrics]
    task = experiment.instance
    for start in range(0, len(unread), together):
        part = unread[start : start + together]

        # An ensemble with the kept parameters.
        seeds = [Run(lr=record.lr, weight_decay=record.weight_decay, seed=record.seed) for _, record in part]
        members = Ensemble(experiment.build, seeds, experiment.protocol.optimizer, 1, device)
        models = [kept_parameters(folder, members.shapes) for folder, _ in part]
        for name, rows in members.named(members.params_RP).items():
            for row, parameters in zip(rows, models, strict=True):
                row.copy_(parameters[name])

        # A layer of limited length may raise anything on longer sequences; the diagnosis says what.
        counts_of: dict[str, Counts] = {}
        for name in ("test", *task.extrapolation_names):
            try:
                data = Resident.of(task.batch(name), device)
                counts_of[name] = evaluate(members, members.params_RP, data, task.vocab_size)
            except torch.OutOfMemoryError:
                raise
            except Exception:
                if name == "test":
                    raise

        for r, (folder, record) in enumerate(part):
            metrics = dict(record.metrics)
            for name, counts in counts_of.items():
                metrics[name] = {
                    "sequence_accuracy": counts.sequence_accuracy[r].item(),
                    "token_accuracy": counts.token_accuracy[r].item(),
                }
            loss = counts_of["test"].loss[r].item()
            metrics["test"]["loss"] = loss if math.isfinite(loss) else None
            write(folder, replace(record, metrics=metrics))


def kept_parameters(folder: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return the parameters of a finished run that training kept, by name.

    Args:
        folder: folder of the run.
        shapes: shapes of the parameters that the model has today, by name.

    Raises:
        DamagedFileError: they are gone, cannot be read, or are others than those of the model.
    """
    path, remedy = folder / MODEL, "delete its folder to train the run again"
    try:
        parameters, _ = load_tensors(path)
    except (FileNotFoundError, DamagedFileError) as error:
        lost = "is gone, perhaps by --keep" if isinstance(error, FileNotFoundError) else "is damaged"
        raise DamagedFileError(f"{path} {lost}: {remedy}") from error

    found = {name: parameter.shape for name, parameter in parameters.items()}
    if other := sorted(name for name in {*found, *shapes} if found.get(name) != shapes.get(name)):
        raise DamagedFileError(
            f"{path} and today's code do not share the parameters {', '.join(other[:3])}: give them the names and "
            f"shapes that they had, or {remedy}"
        )
    return parameters


def kept_model(experiment: Experiment, folder: Path) -> Backbone:
    """Return the model of a finished run with the parameters that its best evaluation kept, in evaluation mode.

    It lies on the CPU. Its buffers are those that the run's seed draws.

    Raises:
        DamagedFileError: as ``kept_parameters``.
    """
    ((_, record),) = read_all(folder / RECORD)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(record.seed)
        model = experiment.build()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.load_state_dict(kept_parameters(folder, shapes), strict=False)  # without buffers
    return model.eval()


def runs_of_choice(table: pd.DataFrame) -> pd.DataFrame:
    """Return the records of the chosen point of a study, that with the best validation score first."""
    choice = chosen(points(table))
    of_point = table.merge(choice[["lr", "weight_decay"]], on=["lr", "weight_decay"])
    return of_point if of_point.empty else of_point.sort_values("validation.score", ascending=False)


def diagnose_best(experiment: Experiment, options: Options, say: Say) -> None:
    """Diagnose the best model of a study, unless its files are there; say what they lack."""
    folder = experiment.folder(options.out)
    runs = runs_of_choice(table_of(read_all(folder)))
    if runs.empty:
        return
    best = runs.iloc[0]
    title = f"{experiment.name}, lr {best['lr']:g}, weight decay {best['weight_decay']:g}, seed {best['seed']}"
    file, figure = folder / "diagnosis.json", folder / "diagnosis.png"

    if not figure.exists() or (read_json(file) or {}).get("title") != title:
        from runners.mad.diagnosis.diagnose import diagnose  # imports scikit-learn and Matplotlib: seconds
        from runners.mad.diagnosis.outputs import UnreadableError

        try:
            model = kept_model(experiment, best["file"].parent)
            diagnose(model.to(find_devices(options.device)[0]), experiment.instance, folder, title)
        except (DamagedFileError, UnreadableError) as error:
            say(f"no diagnosis: {error}")
            return

    for name, reason in read_json(file).get("unreadable_sets", {}).items():
        where = setting_of(experiment.task, experiment.difficulty)
        say(f"diagnosis without {name!r}: {experiment.label} on {where} cannot be read there: {reason}")


def delete_models(experiment: Experiment, table: pd.DataFrame, options: Options) -> None:
    """Delete the models of a command's runs that ``--keep`` does not keep; records stay."""
    kept: set[Path] = set()
    if options.keep == "best":
        whole = table_of(read_all(experiment.folder(options.out)))
        kept = {*runs_of_choice(table)["file"], *runs_of_choice(whole)["file"]}
    for file in table["file"] if options.keep != "all" else ():
        if file not in kept:
            (file.parent / MODEL).unlink(missing_ok=True)
