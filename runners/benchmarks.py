"""Records of ``runners.bench``: the times of optimizer steps of layers.

They are the JSON files in the folders of ``results/published`` and ``results/bench``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runners.files import read_json

TRANSFORMER = "transformer"
RENAMED = {"rt-triton": "rt-fused", "rt-chunked": "rt-wavefront", "rt-chunked-graph": "rt-wavefront-graph"}
"""Today's names of implementations, by their earlier names."""
LENGTH = WIDTH = 128
"""Length of the sequences, and width, at which steps of layers are compared."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The time of an optimizer step of a layer.

    Attributes:
        record: the record of the benchmark.
        device: the card.
        times: by number of runs that are trained together: milliseconds, and their ratio to the Transformer's.
    """

    record: Path
    device: str
    times: Mapping[int, tuple[float, float]]

    @property
    def ratio(self) -> float:
        """Time relative to the Transformer's, with as many runs together as were measured."""
        return self.times[max(self.times)][1]


def read_benchmarks(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return the records of benchmarks in the folders of a folder, the newest first, with today's names."""
    found = {}
    for path in sorted(folder.glob("*/*.json"), key=lambda path: (path.parent.name[:10], path.name), reverse=True):
        content = read_json(path)
        if isinstance(content, dict) and "benchmark" in content:
            for cell in content["cells"]:
                cell["implementation"] = RENAMED.get(cell["implementation"], cell["implementation"])
            found[path] = content
    return found


def steps_of_layers(benchmarks: Mapping[Path, Mapping[str, Any]]) -> dict[str, Steps]:
    """Return the times of a step of each layer, from records that have the Transformer, too.

    The record with the most layers comes first, so that all layers in it are measured on one card; others follow with
    the layers that it lacks, each relative to the Transformer of its own record.
    """
    timed: dict[Path, dict[str, dict[int, float]]] = {}
    for path, content in benchmarks.items():
        for cell in content["cells"] if content["benchmark"].endswith("layers") else ():
            if cell["status"] == "timed" and (cell["length"], cell.get("width", WIDTH)) == (LENGTH, WIDTH):
                timed.setdefault(path, {}).setdefault(cell["implementation"], {})[cell["runs"]] = cell["median_ms"]
    found: dict[str, Steps] = {}
    for path, layers in sorted(timed.items(), key=lambda pair: -len(pair[1])):
        theirs = layers.get(TRANSFORMER, {})
        for layer, mine in layers.items():
            both = {runs: (ms, ms / theirs[runs]) for runs, ms in sorted(mine.items()) if runs in theirs}
            if both:
                found.setdefault(layer, Steps(record=path, device=benchmarks[path]["device"], times=both))
    return found
