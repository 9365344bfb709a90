"""A user's own studies as cells: the results that ``runners.mad`` has written, and the command that trains them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mixers.registry import find_mixer
from runners.files import read_json
from runners.mad.experiment import Described, run_id
from runners.mad.options import GRIDS, PRESETS
from runners.mad.reference.cells import PROTOCOLS, Content, ProtocolName, cell_point, curve_rows, test_of
from runners.mad.reference.rows import terms_of
from runners.mad.results.compare import read_summaries
from runners.mad.results.standings import Standing, told_apart
from runners.mad.results.summary import Summary, under_grid
from runners.report.cells import YOURS, Cell, protocol_settings, protocol_terms
from tasks import TASKS


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

    # A study with more points or seeds than a protocol's is shown under the protocol, if that is known.
    shown = [_under_protocol(summary) for summary in summaries]
    same_model = {a.study for a, b in zip(summaries, shown, strict=True) if a.best_run == b.best_run}
    summaries = shown

    # Studies whose tasks have settings of their own have no table to stand in.
    protocols = [_protocol(summary) for summary in summaries]
    if left_out := [s.study for s, protocol in zip(summaries, protocols, strict=True) if protocol is None]:
        message = f"left out, because no reference result has their task's settings: {', '.join(left_out)}"
        if len(left_out) == len(summaries):
            raise ValueError(f"every study is {message}; python -m runners.compare shows them")
        say(f"{message}; python -m runners.compare shows them")

    newest: dict[str, int] = {}
    for summary in summaries:
        newest[summary.fingerprint] = max(_revision(summary), newest.get(summary.fingerprint, 1))

    found: dict[ProtocolName, list[Cell]] = {"full": [], "quick": []}
    for name, cells in found.items():
        members = [summary for summary, protocol in zip(summaries, protocols, strict=True) if protocol == name]
        standings = told_apart(members, [_usual(summary, name) for summary in members])
        for summary, standing in zip(members, standings, strict=True):
            cell = _cell(summary, standing, name, of_study[summary.study])
            diagnosis = cell.diagnosis if summary.study in same_model else None
            cells.append(replace(cell, diagnosis=diagnosis, stale=_revision(summary) < newest[summary.fingerprint]))
    if counts := [f"{len(cells)} with the tasks of --preset {name}" for name, cells in found.items() if cells]:
        say(f"your studies: {', '.join(counts)}; those with other steps or settings are marked")
    return found


def _revision(summary: Summary) -> int:
    """Return which study it is, from 1, among those of equal settings whose code trains differently."""
    _, _, number = summary.study.rpartition(" r")
    return int(number) if number.isdecimal() else 1


def _under_protocol(summary: Summary) -> Summary:
    """Return what a study shows with the grid and the seeds of the protocol that has its task settings."""
    if (protocol := _protocol(summary)) is None:
        return summary
    terms, own = protocol_terms(summary.config.task, protocol), terms_of(summary)
    if (own.points, own.seeds) == (terms.points, terms.seeds):
        return summary
    return under_grid(summary, terms.points, terms.seeds) or summary


def _cell(summary: Summary, standing: Standing, protocol: ProtocolName, folder: Path) -> Cell:
    """Return a study as a cell.

    Args:
        summary: the study.
        standing: its label and its figures.
        protocol: protocol whose task settings it has.
        folder: folder of the study.
    """
    label, terms, own = standing.mixer + YOURS, protocol_terms(summary.config.task, protocol), terms_of(summary)
    if summary.chosen is None and own.seeds < terms.seeds:  # no point was repeated with more seeds
        own = replace(own, seeds=terms.seeds)

    return Cell(
        row=label,
        kind="own",
        standing=replace(standing, mixer=label, difficulty="baseline"),
        content=_content(summary, folder),
        differs=tuple(terms.missing_options(own)),
        command="" if summary.config.mixer.startswith("__main__:") else command_of(summary, protocol),
        record=folder / "summary.json",
        diagnosis=read_json(folder / "diagnosis.json"),
    )


def _usual(summary: Summary, protocol: ProtocolName) -> Described:
    """Return the settings that the table of a protocol states, with the default settings of a study's layer."""
    known = protocol_settings(summary.config.task, protocol)
    return replace(known, mixer_config=_defaults(summary.config.mixer), precision="not stated")


def _protocol(summary: Summary) -> ProtocolName | None:
    """Return the protocol with a study's task settings, or None."""
    if summary.config.task not in TASKS:
        return None
    for protocol in PROTOCOLS:
        if protocol_terms(summary.config.task, protocol).task_config == terms_of(summary).task_config:
            return protocol
    return None


def _content(summary: Summary, folder: Path) -> Content:
    """Return settings and figures of a study."""
    chosen = summary.chosen_point
    names = [run_id(summary.study, summary.fingerprint, run) for run in (chosen.runs if chosen else [])]
    records = [read_json(folder.parent.parent / "runs" / name / "config.json") for name in names]
    return Content(
        task=summary.config.task,
        task_config=summary.config.task_config,
        protocol=summary.config.protocol,
        steps=terms_of(summary).steps,
        points=[cell_point(point) for point in summary.points],
        chosen=summary.chosen,
        edge=summary.edge,
        test=test_of(chosen),
        probes=chosen.extrapolation if chosen else {},
        curves=[curve_rows(record) for record in records if record is not None],
        device=summary.device,
        seconds=summary.seconds,
    )


def command_of(summary: Summary, protocol: ProtocolName) -> str:
    """Return the command that trains a study again; it names every option that differs from the protocol's preset."""
    config, usual, points = summary.config, _usual(summary, protocol), summary.points
    lrs = {point.lr for point in points}
    name = "quick" if protocol == "quick" else "full" if lrs == {*GRIDS["wide"]} else "grid"
    preset, _ = PRESETS[name]
    grids = {
        "--lr": (lrs, {run.lr for run in preset.runs}),
        "--weight-decay": ({point.weight_decay for point in points}, {run.weight_decay for run in preset.runs}),
    }

    # Seeds of the chosen point alone are more than those of the others. If every point diverged, none was repeated.
    counts = {len(point.seeds) for point in points}
    seeds_of = "chosen" if len(counts) > 1 else "all"
    repeats = f"--seeds-of {seeds_of}" if max(counts) > 1 and seeds_of != preset.seeds_of else ""
    seeds = preset.seeds if counts == {1} and summary.chosen is None else max(counts)

    words = [
        "python -m runners.mad",
        f"--preset {name}" if name != "grid" else "",
        f"--mixer {config.mixer} --task {config.task}",
        *_changed("--mixer.", config.mixer_config, usual.mixer_config),
        *_changed("--task.", config.task_config, usual.task_config),
        *_changed("--", vars(config.shape), vars(usual.shape)),
        *_changed("--", _training(config), _training(usual)),
        *(
            f"{name} {' '.join(f'{v:g}' for v in sorted(tried))}"
            for name, (tried, known) in grids.items()
            if tried != known
        ),
        f"--seeds {seeds}" if seeds != preset.seeds else "",
        repeats,
        f"--short-convolution {config.short_convolution}" if config.short_convolution else "",
    ]
    return " ".join(filter(None, words))


def _training(config: Described) -> dict[str, Any]:
    """Return the options of a study's training, with its length in steps or in epochs, whichever applies."""
    idle = "epochs" if config.protocol.steps is not None else "steps"
    return {name: value for name, value in vars(config.protocol).items() if name not in ("optimizer", idle)}


def _defaults(mixer: str) -> dict[str, Any]:
    """Return a layer's default settings; none for a layer that cannot be imported."""
    try:
        return asdict(find_mixer(mixer).Config())
    except (ImportError, ValueError):
        return {}


def _changed(prefix: str, settings: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options whose values differ from the known ones, as the command line spells them."""
    for name, value in settings.items():
        plain, default = (list(v) if isinstance(v, tuple) else v for v in (value, known.get(name)))
        if value is not None and (name not in known or plain != default):
            text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            yield f"{prefix}{name.replace('_', '-')} {text}"
