"""Check the two theorems of the Recurrent Transformer's paper (Oncescu et al. 2026, arXiv:2604.21215) numerically.

    python -m runners.theory
    python -m runners.theory --out results --seed 1

Theorem 1 is in ``runners.theory.simulation``, theorem 2 in ``runners.theory.path_lengths``. Everything is computed in
float64. The program writes ``theory/theory.json`` and ``theory/path-lengths.png`` below the results folder. The exit
status is 1 if a check fails.
"""

from runners.interrupt import end_at_once

if __name__ == "__main__":
    end_at_once()  # the imports below take seconds

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from runners.ending import run_command, user_errors
from runners.files import write_json
from runners.options import parse
from runners.progress import open_console
from runners.theory.figure import plot_path_lengths
from runners.theory.path_lengths import POSITIONS, check_gradient, check_path_lengths
from runners.theory.simulation import check_simulation


@dataclass(frozen=True, kw_only=True)
class Options:
    """Check the two theorems of the Recurrent Transformer's paper numerically.

    Attributes:
        out: folder of results.
        seed: seed of weights and inputs.
    """

    out: Path = Path("results")
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"--seed {self.seed} must be 0 or more, and below 2**64")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    with user_errors(ValueError):
        options = parse(Options, arguments)

    # Checks.
    console = open_console()
    checks = [*check_simulation(options.seed), *check_gradient(options.seed), check_path_lengths()]
    table = Table(title="theorems of arXiv:2604.21215, float64", title_justify="left")
    for heading in ("check", "setting"):
        table.add_column(heading)
    for heading in ("largest\nerror", "bound", "holds"):
        table.add_column(heading, justify="right")
    for c in checks:
        table.add_row(c.check, c.setting, f"{c.error:.1e}", f"{c.bound:.0e}", "yes" if c.holds else "NO")
    console.print(table)

    # Files.
    folder = options.out / "theory"
    with user_errors(OSError):
        write_json(folder / "theory.json", [check.to_dict() for check in checks])
        plot_path_lengths(folder / "path-lengths.png")
    console.print(
        f"L layers, N positions, H heads, width d'; positions k up to {POSITIONS[-1]}; "
        "errors as a share of the largest expected value"
    )
    console.print(f"stored in {folder}", soft_wrap=True)

    if not all(check.holds for check in checks):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main, "interrupted: the checks were not finished")
