"""Compare finished studies in a table and a chart.

    python -m runners.compare results/studies/rt-copying-*

Nothing is trained.
"""

from runners.interrupt import end_at_once

if __name__ == "__main__":
    end_at_once()  # the imports below take seconds

from runners.ending import run_command
from runners.mad.compare import main

if __name__ == "__main__":
    run_command(main, "interrupted")
