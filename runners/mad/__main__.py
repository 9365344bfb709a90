"""Train single layers on diagnostic tasks and tabulate their accuracies.

    python -m runners.mad --mixer rt --task compression
    python -m runners.mad --mixer rt transformer --task all --seeds 5
    python -m runners.mad --mixer my_module:MyLayer --task parity --steps 2000
    python -m runners.mad --preset full --mixer my_module:MyLayer --task parity
    python -m runners.mad --mixer lstm transformer --task parity --match params
    python -m runners.mad --preset quick --mixer my_module:MyLayer
    python -m runners.mad --preset profile --mixer rt
    python -m runners.mad --preset demo
    python -m runners.mad --mixer all --task all --dry-run
    python -m runners.mad --list

By default, a layer is trained at the six points of the published grid (Oncescu et al. 2026, appendix "Synthetic
experiments") on the task's baseline setting. ``--preset full`` is the reference protocol, that of the reference
results: ten points, and five seeds at the best one. The same command resumes an interrupted training. Reference results
of the same task and settings are shown beside yours; ``--reference none`` leaves them out. ``--preset profile`` trains
the ladder of difficulty of each task, and says where the layer breaks.
"""

from runners.interrupt import end_at_once

if __name__ == "__main__":
    end_at_once()  # the imports below take seconds

import re
import sys
from collections.abc import Sequence
from functools import partial

from runners.ending import run_command, user_errors
from runners.mad.experiment import choose_layers, plan
from runners.mad.options import read_options
from runners.mad.search import prepare, print_and_rank, train_studies
from runners.options import print_help
from runners.progress import open_console
from runners.search import shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments, console = sys.argv[1:] if arguments is None else arguments, open_console()
    say = partial(console.print, soft_wrap=True)
    if not arguments:
        print_help(__doc__)

    with user_errors(ValueError, OSError):
        options, mixer_options, task_options = read_options(arguments)
        if options.list:
            from runners.mad.preview import print_layers

            print_layers(choose_layers(options, mixer_options, say), console)
            return
        experiments = plan(options, mixer_options, task_options, say)
        experiments, reference = prepare(experiments, options, say)
        if options.preset == "profile":
            from runners.mad.preview import print_duration

            print_duration(experiments, options, console)
            if not options.dry_run:
                from runners.mad.profile import draw, train_profiles

                for file in draw(
                    *train_profiles(train_studies(experiments, options, console), options, console), options.out
                ):
                    say(f"chart: {file}")
                say(f"runs: {options.out / 'studies'}; dashboard: optuna-dashboard {shown(options.place)}")
            return
        if options.dry_run:
            from runners.mad.preview import print_plan

            print_plan(experiments, options, console)
            return
        trained, choices = print_and_rank(train_studies(experiments, options, console), options, reference, console)

        # The chart; where everything is.
        from runners.mad.charts import plot_comparison  # imports Matplotlib
        from runners.style import chart_file

        best = choices[choices["own"]]
        words = re.sub(r"[^\w.+-]+", "-", "-".join(dict.fromkeys([*best["layer"], *best["task"]])))[:100]
        figure = chart_file(options.out, words, [*best["study"], *trained["lr"], *trained["seed"]])
        plot_comparison(choices, trained, figure)
    say(f"chart: {figure}; rows with costs: the .csv beside it, or --verbose")
    folders = [experiment.folder(options.out) for experiment in experiments]
    studies = folders[0] if len(folders) == 1 else folders[0].parent
    say(f"runs and diagnosis: {studies}; dashboard: optuna-dashboard {shown(options.place)}")
    if (advice := options.advice()) is not None:
        say(advice)

    # A study without a result is an error, if no other has one or its test split could not be read.
    if not best["chosen"].any():
        print("no point converged: try smaller learning rates (--lr), or correct the layer", file=sys.stderr)
        raise SystemExit(1)
    if best.loc[best["chosen"], "test.token_accuracy"].isna().any():
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main, "interrupted: the same command resumes from the last checkpoint")
