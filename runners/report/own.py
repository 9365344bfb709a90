"""A user's own studies as cells: the results that ``runners.mad`` has written, and the command that trains them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

from mixers.base import Shape
from mixers.registry import find_mixer
from runners.files import read_json
from runners.mad.experiment import run_id
from runners.mad.reference.cells import ProtocolName, cell_point, curve_rows
from runners.mad.reference.rows import terms_of
from runners.mad.results.compare import read_summaries
from runners.mad.results.standings import told_apart
from runners.mad.results.summary import Summary
from runners.mad.training.protocol import Protocol
from runners.report.cells import Cell, protocol_terms
from tasks import TASKS

YOURS = " (yours)"
"""End of the label of a user's own study."""


def read_own(paths: Sequence[Path], say: Callable[[str], None]) -> dict[ProtocolName, list[Cell]]:
    """Read studies as cells, grouped by the protocol whose task settings they share; leave out all other studies.

    Args:
        paths: folders of studies, or their summary.json.
        say: prints a line that names the studies that are left out.

    Raises:
        ValueError: a study cannot be read, or all are left out; the message says what to do.
    """
    folders = {path.parent if path.name == "summary.json" else path for path in paths}
    summaries = read_summaries(list(paths))
    of_study = {read_json(folder / "summary.json")["study"]: folder for folder in folders}

    # Studies whose tasks have settings of their own have no table to stand in.
    protocols = [_protocol(summary) for summary in summaries]
    if left_out := [s.study for s, protocol in zip(summaries, protocols, strict=True) if protocol is None]:
        message = f"left out, because no reference result has their task's settings: {', '.join(left_out)}"
        if len(left_out) == len(summaries):
            raise ValueError(f"every study is {message}; python -m runners.compare shows them")
        say(f"{message}; python -m runners.compare shows them")

    found: dict[ProtocolName, list[Cell]] = {"full": [], "quick": []}
    for summary, standing, protocol in zip(summaries, told_apart(summaries), protocols, strict=True):
        if protocol is None:
            continue
        folder = of_study[summary.study]
        label = standing.mixer + YOURS
        found[protocol].append(
            Cell(
                row=label,
                kind="own",
                standing=replace(standing, mixer=label, difficulty="baseline"),
                content=_content(summary, folder),
                differs=tuple(protocol_terms(summary.config["task"], protocol).missing_options(terms_of(summary))),
                command=command_of(summary),
                record=folder / "summary.json",
                diagnosis=read_json(folder / "diagnosis.json"),
            )
        )
    return found


def _protocol(summary: Summary) -> ProtocolName | None:
    """Return the protocol with a study's task settings, or None."""
    protocols: tuple[ProtocolName, ...] = ("full", "quick")
    for protocol in protocols:
        if protocol_terms(summary.config["task"], protocol).task_config == terms_of(summary).task_config:
            return protocol
    return None


def _content(summary: Summary, folder: Path) -> dict[str, Any]:
    """Return the fields of a stored cell that the page reads."""
    config, chosen = summary.config, summary.chosen_point
    values = (chosen and chosen.values) or {}
    names = [run_id(summary.study, summary.fingerprint, run) for run in (chosen.runs if chosen else [])]
    records = [read_json(folder.parent.parent / "runs" / name / "config.json") for name in names]
    return {
        **config,
        "steps": terms_of(summary).steps,
        "points": [cell_point(point) for point in summary.points],
        "chosen": summary.chosen,
        "edge": summary.edge,
        "near_best": summary.near_best,
        "seeds": chosen.seeds if chosen else [],
        "test": {name: values.get(f"test_{name}", []) for name in ("sequence_accuracy", "token_accuracy")},
        "probes": {name: [asdict(a) for a in found] for name, found in chosen.extrapolation.items()} if chosen else {},
        "curves": [curve_rows(record) for record in records if record is not None],
        "device": summary.device,
        "seconds": summary.seconds,
    }


def command_of(summary: Summary) -> str:
    """Return the command that trains a study again; it names every option that differs from its default."""
    config, points = summary.config, summary.points
    training = {name: value for name, value in config["protocol"].items() if name != "optimizer"}
    seeds = max(len(point.seeds) for point in points)
    numbers = {
        "--lr": sorted({point.lr for point in points}),
        "--weight-decay": sorted({point.weight_decay for point in points}),
    }
    words = [
        f"python -m runners.mad --mixer {config['mixer']} --task {config['task']}",
        *_changed("--mixer.", config["mixer_config"], _defaults(config["mixer"])),
        *_changed("--task.", config["task_config"], TASKS[config["task"]].Config()),
        *_changed("--", config["shape"], Shape()),
        *_changed("--", training, Protocol()),
        *(f"{name} {' '.join(f'{value:g}' for value in values)}" for name, values in numbers.items()),
        f"--seeds {seeds}" if seeds > 1 else "",
        "--seeds-of chosen" if len({len(point.seeds) for point in points}) > 1 else "",
        f"--short-convolution {config['short_convolution']}" if config.get("short_convolution") else "",
    ]
    return " ".join(filter(None, words))


def _defaults(mixer: str) -> Any:
    """Return a layer's default settings; None for a layer that cannot be imported."""
    try:
        return find_mixer(mixer).Config()
    except (ImportError, ValueError):
        return None


def _changed(prefix: str, settings: Mapping[str, Any], defaults: Any) -> Iterator[str]:
    """Yield the options whose values differ from the defaults, as the command line spells them."""
    known = asdict(defaults) if is_dataclass(defaults) and not isinstance(defaults, type) else {}
    for name, value in settings.items():
        default = known.get(name)
        plain = list(default) if isinstance(default, tuple) else default
        if value is not None and (name not in known or plain != (list(value) if isinstance(value, tuple) else value)):
            text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            yield f"{prefix}{name.replace('_', '-')} {text}"
