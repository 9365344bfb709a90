"""Time implementations of layers on this machine, after a check against float64.

    python -m runners.bench diagnostics
    python -m runners.bench diagnostics --lengths 128 --runs 1 30 --phases step
    python -m runners.bench diagnostics --device cpu
    python -m runners.bench diagnostics --layers all
    python -m runners.bench diagnostics --layers rt lstm module:Class --runs 6
    python -m runners.bench pretraining
    python -m runners.bench pretraining --parts layers --widths 1024

``diagnostics`` times one layer of the diagnostic models: forward, forward and backward, and the trainer's whole
optimizer step on in-context recall. With ``--layers`` it times that step for layers by name, as the trainer compiles
and captures it. ``pretraining`` times layers at the width of language models against width, batch and length, whole
training steps, and decoding. Implementations take turns within each repeat; a figure is the median
of the repeats. An implementation that fails its check gets no figure, and the exit status is then 1.
"""

from runners.interrupt import end_at_once

if __name__ == "__main__":
    end_at_once()  # the imports below take seconds

import sys
from collections.abc import Callable, Sequence

from runners.bench.diagnostics.command import diagnostics
from runners.bench.pretraining.command import pretraining
from runners.cli import print_short_help
from runners.ending import fail, run_command

BENCHMARKS: dict[str, Callable[[Sequence[str]], None]] = {"diagnostics": diagnostics, "pretraining": pretraining}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["--help"], ["-h"]):
        print(__doc__)
    elif not words:
        print_short_help(__doc__)
    elif words[0] not in BENCHMARKS:
        fail(f"no benchmark {words[0]!r}: choose from {', '.join(BENCHMARKS)}")
    else:
        BENCHMARKS[words[0]](words[1:])


if __name__ == "__main__":
    run_command(main, "interrupted: what was measured is in the JSON file")
