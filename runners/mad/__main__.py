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
import re
import sys
from collections.abc import Sequence
from functools import partial

import pandas as pd
from rich.console import Console

from runners.device import find_devices
from runners.ending import run_command, user_errors
from runners.mad.checks import check
from runners.mad.chosen import delete_models, look_into
from runners.mad.experiment import choose_layers, plan
from runners.mad.options import read_options
from runners.mad.points import chosen, points
from runners.mad.rows import load
from runners.mad.search import train_studies
from runners.mad.tables import print_comparison, print_study
from runners.options import print_help
from runners.tracking import check_login


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments, console = sys.argv[1:] if arguments is None else arguments, Console(markup=False)
    say = partial(console.print, soft_wrap=True)
    if not arguments:
        print_help(__doc__)

    # What to train.
    with user_errors(ValueError, OSError):
        options, mixer_options, task_options = read_options(arguments)
        if options.list:
            from runners.mad.preview import print_layers

            print_layers(choose_layers(options, mixer_options, say), console)
            return
        experiments = plan(options, mixer_options, task_options, say)
        reference = load(options.reference, {experiment.task for experiment in experiments})
        experiments = check(experiments, options.together, find_devices(options.device)[0], say)
        if options.dry_run:
            from runners.mad.preview import print_plan

            print_plan(experiments, options, console)
            return
        check_login(options.wandb)

    # Training.
    tables = []
    with user_errors(ValueError, OSError):
        for experiment, table in train_studies(experiments, options, console):
            print_study(table, console)
            look_into(experiment, options, say)
            delete_models(experiment, table, options)
            say(f"stored in {experiment.folder(options.out)}\n")
            tables.append(table)

    # All studies together, with the reference rows.
    own = pd.concat(tables)
    best = chosen(points(own))
    with user_errors(ValueError, OSError):
        from runners.mad.charts import plot_comparison  # imports Matplotlib
        from runners.mad.ranking import print_rankings

        print_comparison(best, console)
        print_rankings(own, reference, console)
        words = re.sub(r"[^\w.+-]+", "-", "-".join(dict.fromkeys([*best["layer"], *best["task"]])))[:100]
        digest = hashlib.sha256(" ".join(map(str, [*best["study"], *own["lr"], *own["seed"]])).encode()).hexdigest()
        figure = options.out / "figures" / f"{words}-{digest[:8]}.png"
        plot_comparison(own, reference, figure)
    say(f"chart: {figure}\ndashboard: optuna-dashboard {options.place}")
    if (advice := options.tracking.advice()) is not None:
        say(advice)

    # A study without a result is an error, if no other has one or its test split could not be read.
    diverged = best["lr"].isna()
    for name in best["study"][diverged]:
        print(f"{name}: every run diverged: try smaller learning rates (--lr), or correct the layer", file=sys.stderr)
    untested = best.loc[~diverged].reindex(columns=["test.token_accuracy"]).isna().any(axis=None)
    if diverged.all() or untested:
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main, "interrupted: the same command resumes from the last checkpoint")
