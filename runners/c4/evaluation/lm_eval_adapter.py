"""The command line of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) with ``rt-c4``.

    python -m runners.c4 lm_eval --model rt-c4 --model_args checkpoint=results/c4/<run> --tasks piqa hellaswag

The command registers the model of ``runners.c4.evaluation.lm_eval_model``, and then runs the harness's own command
``lm_eval`` with all arguments. From version 0.4.14 on, the harness finds the model by itself (its pull request 4013),
and ``lm_eval --model rt-c4`` does the same. From Python:

    from lm_eval import simple_evaluate
    from runners.c4.evaluation import lm_eval_model

    simple_evaluate("rt-c4", model_args={"checkpoint": "results/c4/<run>"}, tasks=["piqa", "hellaswag"])

The extra ``eval`` installs the harness: ``pip install -e '.[eval]'``.
"""

import sys
from collections.abc import Sequence

from runners.ending import user_errors


def main(arguments: Sequence[str]) -> None:
    """Run the harness's command line with ``rt-c4`` registered; an error is one line and exit status 2."""
    with user_errors(ValueError, OSError):
        try:
            from lm_eval.__main__ import cli_evaluate
        except ImportError as error:
            raise ValueError(f"lm-evaluation-harness ({error}): pip install -e '.[eval]'") from error

        import runners.c4.evaluation.lm_eval_model  # noqa: F401  (registers the model)

        sys.argv = ["lm_eval", *arguments]  # where the harness reads its arguments
        cli_evaluate()
