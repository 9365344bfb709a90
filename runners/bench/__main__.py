"""Time layers and models on this machine, each checked against float64.

    python -m runners.bench diagnostics
    python -m runners.bench layers --layers rt gla --runs 1 6 30
    python -m runners.bench layers --width 1024
    python -m runners.bench pretraining --parts training
    python -m runners.bench layers --help

diagnostics: implementations of RT, and the Transformer, against length.
layers: the whole optimizer step of any layer, as the trainer takes it.
pretraining: layers at the width of language models, training, decoding.

What is compared takes turns within each repeat; a figure is the median of
the repeats. What fails its check gets no figure, and the exit status is 1.
"""

from runners.interrupt import end_at_once

if __name__ == "__main__":
    end_at_once()  # the imports below take seconds

import sys
from collections.abc import Sequence

from runners.bench import diagnostics, layers, pretraining
from runners.ending import fail, run_command
from runners.options import print_help

BENCHMARKS = {"diagnostics": diagnostics.main, "layers": layers.main, "pretraining": pretraining.main}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        print_help(__doc__)
    elif words[0] in ("--help", "-h"):
        print(__doc__)
    elif words[0] not in BENCHMARKS:
        fail(f"no benchmark {words[0]!r}: choose from {', '.join(BENCHMARKS)}")
    else:
        BENCHMARKS[words[0]](words[1:])


if __name__ == "__main__":
    run_command(main, "interrupted: what was measured is in the JSON file")
