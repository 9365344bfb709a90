"""Train single layers on diagnostic tasks and tabulate their accuracies.

    python -m runners.mad --mixer rt --task compression
    python -m runners.mad --mixer rt transformer --task all --seeds 5
    python -m runners.mad --mixer my_module:MyLayer --task parity --steps 2000
    python -m runners.mad --preset full --mixer my_module:MyLayer --task parity
    python -m runners.mad --mixer lstm transformer --task parity --match params
    python -m runners.mad --preset quick --mixer my_module:MyLayer
    python -m runners.mad --preset demo
    python -m runners.mad --mixer all --task all --dry-run
    python -m runners.mad --list

By default, a layer is trained at the six points of the published grid (Oncescu et al. 2026, appendix "Synthetic
experiments") on the task's baseline setting. With ``--preset full``, as the reference results, it is trained at ten
points and with five seeds at the best one. The same command resumes an interrupted training. Reference results of the
same task and settings are shown beside yours; ``--reference none`` leaves them out.
"""

from runners.interrupt import end_at_once

if __name__ == "__main__":
    end_at_once()  # the imports below take seconds

import hashlib
import math
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from rich.console import Console

from mixers.base import ContractError
from runners.cli import print_short_help
from runners.device import find_devices
from runners.ending import run_command, user_errors
from runners.files import DamagedFileError, write_table
from runners.mad.dry_run import print_forecast
from runners.mad.duration import Clock, sentence, work_left
from runners.mad.experiment import Experiment, study_folder
from runners.mad.layers import print_layers
from runners.mad.options import Options, read_options
from runners.mad.plan import plan_experiments, plan_layers
from runners.mad.reference.rows import check_rows, print_rankings, rankings, reference_folder, shown_together
from runners.mad.results.kept import delete_models, disk_use
from runners.mad.results.standings import Standing, print_comparison
from runners.mad.results.summary import Summary
from runners.mad.results.tables import explain_divergence, print_summary
from runners.mad.search.identity import identify
from runners.mad.search.study import ForeignFolderError, check_homes
from runners.mad.search.workers import WorkerError
from runners.mad.studies import look_into, train_studies, try_layers
from runners.mad.training.loop import SECONDS_BETWEEN_CHECKPOINTS
from runners.storage import existing_storage, explaining_database
from runners.tracking import check_login
from tasks.base import SplitOverlapError

FEW_STEPS = 100
"""The duration of trainings with fewer steps is not announced."""
LONGEST_NAME = 100
"""Characters of a chart's file name taken from the command line; file systems take 255 bytes."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments, console = sys.argv[1:] if arguments is None else arguments, Console(markup=False)
    say = partial(console.print, soft_wrap=True)
    if not arguments:
        print_short_help(__doc__, Options)

    with user_errors(ValueError, OSError):
        options, mixer_values, task_values = read_options(arguments)
        if options.list:
            print_layers(plan_layers(options, mixer_values, say), console)
            return
        reference = reference_folder(options.reference)
        experiments = plan_experiments(options, mixer_values, task_values, say)
        if reference is not None:
            check_rows(reference, {experiment.task for experiment in experiments})
        with explaining_database(options.settings.storage):
            check_homes(experiments, options.out, options.settings.storage)
            if options.dry_run:
                storage, clock = existing_storage(options.settings.storage), _clock(options)
                print_forecast(experiments, options.runs, storage, options.out, console, clock, options.more_seeds)
                return
        check_login(options.wandb)
    with user_errors(ContractError, SplitOverlapError):
        try_layers(experiments, find_devices(options.device)[0])

    only = len({experiment.label for experiment in experiments}) == 1
    following = beside_another(arguments, experiments[0].mixer) if only else None
    summaries = train(options, experiments, console)
    with user_errors(DamagedFileError, OSError):
        print_end(summaries, options, experiments, following, console)
    require_results(summaries)


def beside_another(arguments: Sequence[str], mixer: str) -> str:
    """Return the command line with a second layer: the Transformer, or RT if the only layer is the Transformer."""
    words, other = list(arguments), "rt" if mixer == "transformer" else "transformer"
    if "--mixer" not in words:
        return f"the same command with --mixer {mixer} {other}"
    words.insert(words.index("--mixer") + 2, other)
    return shlex.join(["python", "-m", "runners.mad", *words])


def train(options: Options, experiments: Sequence[Experiment], console: Console) -> list[Summary]:
    """Train missing runs; print the table of each study, and return their summaries."""
    say, settings, summaries = partial(console.print, soft_wrap=True), options.settings, []
    try:
        with (
            user_errors(ValueError, SplitOverlapError, DamagedFileError, ForeignFolderError, WorkerError, OSError),
            explaining_database(settings.storage),
        ):
            announce(options, experiments, say)
            for experiment, summary in train_studies(experiments, options.runs, settings, console, options.more_seeds):
                print_summary(summary, console)
                look_into(experiment, settings, say)
                delete_models(experiment, summary, settings.out, settings.keep)
                stored = study_folder(settings.out.resolve(), experiment)
                say(f"stored in {stored}: {disk_use(experiment, summary, settings.out)}\n")
                summaries.append(summary)
    except torch.OutOfMemoryError as error:
        print(f"stopped: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    return summaries


def print_end(
    summaries: Sequence[Summary],
    options: Options,
    experiments: Sequence[Experiment],
    following: str | None,
    console: Console,
) -> None:
    """Compare the studies with each other and with the reference rows, draw them, and suggest the next commands.

    Args:
        summaries: results of the studies.
        options: options of the command.
        experiments: experiments of the command.
        following: a command that compares the layer with another, for where there are no reference rows; None if there
            are several layers.
        console: where to print.
    """
    say = partial(console.print, soft_wrap=True)
    standings = [Standing.of(summary) for summary in summaries]
    if standings:
        print_comparison(standings, console)

    # The reference rows beside them.
    folder = reference_folder(options.reference)
    found = [] if folder is None else rankings(summaries, standings, folder)
    print_rankings(found, console)

    own, beside = shown_together(standings, found)
    if standings:
        from runners.mad.results.charts import plot_comparison  # imports Matplotlib

        figure = options.out / "figures" / f"{_figure_name(options, experiments)}.png"
        plot_comparison(own, beside, figure)
        table = write_table(figure.with_suffix(".csv"), [row for s in (*own, *beside) for row in s.rows()])
        say(f"chart: {figure}\ntable: {table}")
    if following is not None and not beside:
        say(f"to compare: {following}")
    storage = options.settings.storage
    say(f"studies: {storage}\ndashboard: optuna-dashboard {storage}")
    if (advice := options.tracking.advice()) is not None:
        say(advice)


def require_results(summaries: Sequence[Summary]) -> None:
    """Name the studies without a result; exit with status 1 if all diverged, or if one has no test accuracy."""
    for summary in summaries:
        if summary.chosen_point is None:
            print(explain_divergence(summary), file=sys.stderr)
        elif not summary.is_tested:
            print(f"{summary.heading}: no test accuracy, as said above", file=sys.stderr)
    if summaries and all(summary.chosen_point is None for summary in summaries):
        raise SystemExit(1)
    if any(summary.chosen_point is not None and not summary.is_tested for summary in summaries):
        raise SystemExit(1)


def _clock(options: Options) -> Clock:
    devices = find_devices(options.device)
    return Clock(devices, min(options.together, math.ceil(len(options.runs) / len(devices))))


def announce(options: Options, experiments: Sequence[Experiment], say: Callable[[str], None]) -> None:
    """Print how long the training will take, unless it has few steps.

    On a GPU nothing is timed, because the first step of many layers is compiled, which takes longer than the timing
    is worth.
    """
    if any(e.protocol.total_steps(e.task_config.train_examples) < FEW_STEPS for e in experiments):
        return

    storage, clock = existing_storage(options.settings.storage), _clock(options)
    if clock.devices[0].type == "cuda":
        clock.left = 0.0
    known = experiments if storage is None else [identify(e, storage, lambda line: None) for e in experiments]
    works = [work_left(e, options.runs, options.more_seeds, storage, options.out) for e in known]
    durations = clock.durations(known, works)
    if any(duration.here != 0.0 for duration in durations) and (text := sentence(durations)):
        say(f"training takes {text}")


def _figure_name(options: Options, experiments: Sequence[Experiment]) -> str:
    """Return a file name from the options, cut to the limit of file systems, and a digest of all settings and runs."""
    found = list(dict.fromkeys(experiment.difficulty for experiment in experiments))
    difficulties = options.difficulty if "all" in options.difficulty else found
    layers = options.mixer if "all" in options.mixer else dict.fromkeys(e.label for e in experiments)
    words = [options.preset] if options.preset == "demo" else [*layers, *options.task, *difficulties]
    readable = re.sub(r"[^\w.+-]+", "-", "-".join(words))[:LONGEST_NAME]
    of_all = [*(experiment.name for experiment in experiments), *options.runs, *options.more_seeds, options.reference]
    digest = hashlib.sha256("".join(map(str, of_all)).encode()).hexdigest()
    return f"{readable}-{digest[:8]}"


if __name__ == "__main__":
    due = f"one is due every {SECONDS_BETWEEN_CHECKPOINTS:.0f} seconds"
    run_command(main, f"interrupted: the same command resumes from the last checkpoint, if there is one yet ({due})")
