"""A folder of made-up results, and the pages of one."""

from pathlib import Path

import pytest

from runners.files import write_json
from runners.records import REFERENCE
from runners.report import __main__ as report
from tests.runners.report.made_up import bench, cell, write_cell, write_model, write_study

SHIPPED = REFERENCE.parent
TASKS = ("parity", "memorization", "copying")
LAYERS = {"rt": 0.9, "transformer": 0.5, "deltanet": 0.7}
"""Token accuracy of the first seed by layer."""


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers on three tasks, a variant, a stack, a profile and a language model of each layer, and one's own."""
    folder = tmp_path_factory.mktemp("results")
    for task in TASKS:
        for row, y in LAYERS.items():
            write_cell(folder, cell(row, task, [y, y + 0.05]))
            write_cell(folder, cell(row, task, [y, y], preset="quick", difficulty="quick", steps=50))
        write_cell(folder, cell("rt-block-4", task, [0.99, 0.99], mixer="rt", best=5e-3))
        write_cell(folder, cell("transformer+rt", task, [0.99, 0.99], layers=2))
    for row, y in LAYERS.items():
        rungs = [(f"rung-{n}", f"{row} {n}") for n in range(1, 7)]
        runs = [cell(row, "parity", [y, y], preset="profile", difficulty=n, study=name) for n, name in rungs]
        write_cell(folder, [run for of_rung in runs for run in of_rung])
        write_model(folder / "reference" / "language-models", row, 4 - y)
        for name in ("rt-against-transformer", "read-once"):
            write_model(folder / "reference" / "language-models" / name, row, 3 - y)
    write_study(folder, cell("my_layer:MyLayer", "parity", [0.8, 0.85], study="MyLayer parity"))
    narrow = bench({"transformer": 2.0, "rt": 5.0}, length=128, runs=30)
    wide = bench({"transformer": 8.0, "deltanet": 20.0, "rt": 52.0}, width=1024, batch_size=32, length=512)
    wide["cells"] += bench({"rt": 120.0, "transformer": 8.0}, width=1024, batch_size=8, length=2048)["cells"]
    skipped = {"median_ms": None, "relative": None, "status": "skipped: out of memory"}
    wide["cells"].append({**wide["cells"][-1], "implementation": "deltanet", **skipped})
    for name, content in {"2026-01-01-bench": narrow, "2026-01-02-bench-wide": wide}.items():
        write_json(folder / "published" / name / "layers.json", content)
    (folder / "claims.csv").symlink_to(SHIPPED / "claims.csv")
    return folder


@pytest.fixture(scope="session")
def pages(results: Path) -> Path:
    """The folder of the pages of these results, made once."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(report, "REFERENCE", results / "reference")
        report.main([str(results / "studies" / "MyLayer-parity"), "--out", str(results)])
    return results / "report"
