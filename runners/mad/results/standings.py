"""Standings: the figures of finished studies for a comparison, their order, and the table."""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mixers import MIXERS
from mixers.base import Shape
from mixers.costs import LENGTHS, Costs
from mixers.registry import changed, variant_label
from runners.cost_cells import FOOTNOTE, HEADINGS, cells_of
from runners.mad.experiment import Described
from runners.mad.results.choice import GridPoint
from runners.mad.results.summary import TEST_METRICS, Estimate, Summary, means_beyond_training
from runners.mad.results.tables import print_intervals, print_protocols
from runners.tables import Name, abbreviated, fits
from tasks import TASKS
from tasks.base import Accuracy

FEW = 4
"""Largest number of mixers that are not grouped by family, and of values that a label names."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The figures of a finished study for a comparison.

    Attributes:
        mixer: label of the study's row.
        family: kind of layer.
        remark: text below the label in tables.
        task: name of the task.
        difficulty: name of the task's setting.
        test: test estimates of the chosen point by name, without those that are missing; None if every point diverged.
        seeds: number of runs of the chosen point.
        diverged: number of those that diverged; if any did, there are no means.
        ceiling: best possible accuracies on the test split.
        chance: accuracies of guessing on the test split.
        costs: costs of one layer.
        preset: name of the preset of the settings.
        steps: optimizer steps of a run; None if unknown.
        extrapolation: sequence and token accuracy of the chosen point on each extrapolation set, by its name.
        trained: name and options of the layer, number of layers, widths, and the chosen learning rate and weight decay,
            in the columns of a table's file.
        place: sort key of rows and bars; equal places keep their order.
    """

    mixer: str
    family: str
    remark: str | None
    task: str
    difficulty: str
    test: dict[str, Estimate] | None
    seeds: int
    diverged: int = 0
    ceiling: Accuracy
    chance: Accuracy
    costs: Costs
    preset: str | None = None
    steps: int | None = None
    extrapolation: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    trained: Mapping[str, Any] = field(default_factory=dict)
    place: tuple[Any, ...] = ()

    @staticmethod
    def of(summary: Summary) -> "Standing":
        """Return the standing of a study."""
        config = summary.config
        chosen = summary.chosen_point
        estimates = (chosen and chosen.estimates) or {}

        return Standing(
            mixer=_label(summary),
            family=summary.family,
            remark=summary.remark,
            task=config.task,
            difficulty=config.difficulty,
            test=None if chosen is None else {n: estimates[n] for n in TEST_METRICS if n in estimates},
            seeds=0 if chosen is None else len(chosen.seeds),
            diverged=0 if chosen is None else len(chosen.diverged),
            ceiling=summary.ceiling,
            chance=summary.chance,
            costs=summary.costs,
            preset=config.preset,
            steps=summary.steps,
            extrapolation={} if chosen is None else means_beyond_training(chosen.extrapolation),
            trained=as_trained(
                config.mixer,
                config.mixer_config,
                config.shape,
                None if chosen is None else (chosen.lr, chosen.weight_decay),
            ),
        )

    @property
    def setting(self) -> str:
        """The task, with its difficulty unless it is the baseline."""
        return self.task if self.difficulty == "baseline" else f"{self.task} ({self.difficulty})"

    def accuracy(self, metric: str) -> Estimate | None:
        """Return the accuracy on the test split; ``metric`` is ``sequence`` or ``token``."""
        return None if self.test is None else self.test.get(f"test_{metric}_accuracy")

    def figures(self) -> dict[str, Any]:
        """Return both accuracies, and half the width of the 95% interval of each, None for a single seed."""
        estimates = {f"{name}_accuracy": self.accuracy(name) for name in ("sequence", "token")}
        means = {name: estimate and estimate.mean for name, estimate in estimates.items()}
        return means | {f"{name}_half_width": estimate and estimate.half_width for name, estimate in estimates.items()}

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of a table's file: of the test split, then of each extrapolation set, whose limits are None.

        Figures are not rounded.
        """
        unknown = dict.fromkeys(("ceiling_sequence", "ceiling_token", "chance_sequence", "chance_token"))
        found = [self._row("test", self.figures())]
        for name, accuracies in self.extrapolation.items():
            means = {f"{metric}_accuracy": y.mean for metric, y in accuracies.items()}
            half_widths = {f"{metric}_accuracy_half_width": y.half_width for metric, y in accuracies.items()}
            found.append(self._row(name, means | half_widths) | unknown)
        return found

    def _row(self, split: str, figures: Mapping[str, Any]) -> dict[str, Any]:
        state, flops = self.costs.state_floats or {}, self.costs.flops_per_token or {}
        return {
            "task": self.task,
            "difficulty": self.difficulty,
            "split": split,
            "layer": self.mixer,
            "family": self.family,
            **self.trained,
            **figures,
            "seeds": self.seeds,
            "failure": self.failure,
            "ceiling_sequence": self.ceiling.sequence,
            "ceiling_token": self.ceiling.token,
            "chance_sequence": self.chance.sequence,
            "chance_token": self.chance.token,
            "steps": self.steps,
            "preset": self.preset,
            "parameters": self.costs.parameters,
            **{f"state_{length}": state.get(length) for length in LENGTHS},
            f"flops_per_token_{LENGTHS[0]}": flops.get(LENGTHS[0]),
        }

    @property
    def failure(self) -> str:
        """Which runs diverged, if there are no accuracies for that reason; else empty."""
        if self.test is None:
            return "diverged"
        return f"{self.diverged} of {self.seeds} diverged" if self.diverged else ""

    def accuracies(self) -> list[str]:
        """Return the table cells of both accuracies."""
        if self.failure:
            return [self.failure, ""]
        estimates = self.accuracy("sequence"), self.accuracy("token")
        return ["" if estimate is None else estimate.text() for estimate in estimates]


def as_trained(mixer: str, options: Mapping[str, Any], shape: Shape, chosen: GridPoint | None) -> dict[str, Any]:
    """Return what a row was trained with, as columns of a table's file; options of the layer are JSON.

    Args:
        mixer: name of the layer.
        options: all its options.
        shape: widths and number of layers.
        chosen: the chosen learning rate and weight decay; None if all diverged.
    """
    lr, weight_decay = chosen or (None, None)
    return {
        "mixer": mixer,
        "options": json.dumps(options),
        **vars(shape),
        "lr": lr,
        "weight_decay": weight_decay,
    }


def in_order(summaries: Iterable[Summary]) -> list[Summary]:
    """Sort summaries by the registries' order of tasks and layers, then by settings."""

    def key(summary: Summary) -> tuple[Any, ...]:
        config = summary.config
        task, difficulty = _registered(config.task, TASKS), config.difficulty
        setting = (difficulty != "baseline", _sortable(_of_task(config)), difficulty)
        return task, setting, _place(config), summary.study + summary.fingerprint

    return sorted(summaries, key=key)


def told_apart(summaries: Sequence[Summary], usual: Sequence[Described] | None = None) -> list[Standing]:
    """Return standings whose labels name the settings in which layers, tasks and training differ.

    Args:
        summaries: the studies.
        usual: for each study the ``config`` that its table states; labels leave out what equals it. None if the table
            states none.
    """
    configs = [summary.config for summary in summaries]

    # Names for the options in which layers of the same name, and for the widths and training in which all, differ.
    labels, everyone = [_label(summary) for summary in summaries], ["all"] * len(configs)
    words = [
        _differences(names, [of(config) for config in configs], [of(config) for config in usual or ()])
        for names, of in ((labels, _of_layer), (everyone, _of_widths), (everyone, _of_training))
    ]
    if usual is None:  # a table that states settings marks the rows of other grids, too
        of_task = [(config.task, config.difficulty) for config in configs]
        words.append(_differences(of_task, [_of_grid(summary) for summary in summaries]))
    mixers = [", ".join(filter(None, found)) for found in zip(*words, strict=True)]

    # The same for tasks of one name and difficulty.
    settings = [(config.task, config.difficulty) for config in configs]
    tasks = _differences(settings, [_of_task(config) for config in configs])

    standings = [
        replace(
            Standing.of(summary),
            mixer=f"{layer} ({mixer})" if mixer else layer,
            difficulty=", ".join(filter(None, (config.difficulty, task))),
            place=_place(config),
        )
        for summary, config, layer, mixer, task in zip(summaries, configs, labels, mixers, tasks, strict=True)
    ]

    # Rows with equal labels differ in code or data; fingerprints and revisions distinguish them.
    rows = Counter((s.mixer, s.setting) for s in standings)
    return [
        replace(s, mixer=f"{s.mixer} {_tail(summary)}") if rows[s.mixer, s.setting] > 1 else s
        for s, summary in zip(standings, summaries, strict=True)
    ]


def _tail(summary: Summary) -> str:
    """Return the end of a study's name, from its fingerprint on."""
    return summary.study[summary.study.rindex(summary.fingerprint[:8]) :]


def _label(summary: Summary) -> str:
    """Return the name of a study's layer in tables; summaries of earlier versions lack it."""
    if summary.label is not None:
        return summary.label
    config, mixer = summary.config, summary.config.mixer
    settings = changed(config.mixer_config, MIXERS[mixer].Config) if mixer in MIXERS else {}
    return variant_label(mixer, settings, config.shape.layers, config.short_convolution)


def _of_layer(config: Described) -> dict[str, Any]:
    """Return the options of an experiment's layer, and their number."""
    return dict(_leaves({"mixer_config": config.mixer_config, "layers": config.shape.layers}))


def _of_widths(config: Described) -> dict[str, Any]:
    """Return the widths of its layer and MLP."""
    return {name.replace("_", "-"): value for name, value in vars(config.shape).items() if name != "layers"}


def _of_training(config: Described) -> dict[str, Any]:
    """Return the settings of its training, with its length in steps or in epochs, whichever applies."""
    idle = "steps" if config.protocol.steps is None else "epochs"
    settings = _leaves({**asdict(config.protocol), "precision": config.precision})
    return {name: value for name, value in settings if name != idle}


def _of_grid(summary: Summary) -> dict[str, Any]:
    """Return the learning rates and weight decays among which a study has chosen."""
    grid = {
        "lr": [point.lr for point in summary.points],
        "weight-decay": [point.weight_decay for point in summary.points],
    }
    return {name: _span(sorted(set(values))) for name, values in grid.items()}


def _span(values: Sequence[float]) -> str:
    """Return sorted values in words; of more than a few, the ends and the number."""
    if len(values) <= FEW:
        return " or ".join(map(str, values))
    return f"{values[0]} to {values[-1]} in {len(values)}"


def _of_task(config: Described) -> dict[str, Any]:
    """Return the settings of its task."""
    return dict(_leaves(config.task_config))


def _place(config: Described) -> tuple[Any, ...]:
    """Return the sort key of an experiment's layer and training."""
    layer = _registered(config.mixer, MIXERS), config.short_convolution
    return *layer, *(_sortable(of(config)) for of in (_of_layer, _of_widths, _of_training))


def _registered(name: str, registry: Collection[str]) -> tuple[int, str]:
    """Return the sort key of a name: its place in the registry; other names follow in alphabetical order."""
    return list(registry).index(name) if name in registry else len(registry), name


def _sortable(settings: dict[str, Any]) -> list[tuple[str, float, str]]:
    """Return a sort key of settings: numbers are sorted by size, other values as text."""
    return [
        (name, value, "") if isinstance(value, int | float) else (name, math.inf, str(value))
        for name, value in settings.items()
    ]


def _leaves(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of nested settings that are not dictionaries themselves."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield name.replace("_", "-"), value


def _differences(
    names: Sequence[Any], settings: Sequence[dict[str, Any]], usual: Sequence[dict[str, Any]] = ()
) -> list[str]:
    """Return for each entry, as text, the settings in which the entries of its name differ, except ``usual`` ones."""
    of_name: dict[Any, list[dict[str, Any]]] = {}
    for name, setting in zip(names, settings, strict=True):
        of_name.setdefault(name, []).append(setting)

    return [
        ", ".join(
            f"{key} {value}"
            for key, value in setting.items()
            if any(key not in other or other[key] != value for other in of_name[name])
            and (key not in known or known[key] != value)
        )
        for name, setting, known in zip(names, settings, usual or [{}] * len(names), strict=True)
    ]


def grouped(standings: Sequence[Standing], attribute: Literal["setting", "family"]) -> list[Standing]:
    """Group standings by setting or family; apart from that, the order is kept."""
    value_of = attrgetter(attribute)
    values = list(dict.fromkeys(map(value_of, standings)))
    return sorted(standings, key=lambda s: values.index(value_of(s)))


def by_layer(standings: Sequence[Standing]) -> list[Standing]:
    """Sort standings by place, and group them by family."""
    return grouped(sorted(standings, key=attrgetter("place")), "family")


Row = tuple[str | Text, list[str], list[str]]
"""Label of a table's row, with its cells of results and of costs."""


def print_comparison(standings: Sequence[Standing], console: Console) -> None:
    """Print under each task one row per layer: test accuracies of the chosen point, and costs; then the task's limits.

    More than ``FEW`` mixers are grouped by family. On a narrow console, the costs are in a separate table. No more than
    ``FEW`` mixers have a table of their accuracies on extrapolation sets, too, if there is room for it.
    """
    levels = ("task", "family", "mixer") if count_mixers(standings) > FEW else ("task", "mixer")
    tree = "\n".join(f"{'  ' * depth}{level}" for depth, level in enumerate(levels))
    rows = _comparison_rows(standings, levels)

    title = "test accuracy of the points chosen on validation"
    headings = ("sequence", "token")

    # One table, or two on a narrow console.
    table = _table(title, (tree, *headings, *HEADINGS), [(label, results + costs) for label, results, costs in rows])
    if fits(table, console):
        console.print(table)
    else:
        of_mixers = {s.mixer: cells_of(s.costs, abbreviated) for s in by_layer(standings)}
        console.print(
            _table(title, (tree, *headings), [(label, results) for label, results, _ in rows]),
            _table("costs", ("mixer", *HEADINGS), list(of_mixers.items())),
        )

    mixers = list(dict.fromkeys(s.mixer for s in standings))
    if 1 < len(mixers) <= FEW and any(s.extrapolation for s in standings):
        beyond = _beyond_training(standings, mixers)
        if fits(beyond, console):
            console.print(beyond)

    print_intervals([s.seeds for s in standings if not s.failure], console)
    print_protocols([s.preset for s in standings], console)
    console.print(f"costs: {FOOTNOTE}")


def _comparison_rows(standings: Sequence[Standing], levels: Sequence[str]) -> list[Row]:
    """Return the rows of a comparison: the names of ``levels``, indented, and each task's limits."""
    rows: list[Row] = []
    for setting, of_setting in groupby(grouped(standings, "setting"), attrgetter("setting")):
        members = by_layer(list(of_setting))
        rows.append((Text(setting, "bold"), [], []))

        # Layers, with the names of their families if these are a level.
        for family, of_family in groupby(members, attrgetter("family")):
            if "family" in levels:
                rows.append((f"  {family}", [], []))
            indent = "  " * (len(levels) - 1)
            for s in of_family:
                label = indent + s.mixer + (f"\n{indent}  {s.remark}" if s.remark else "")
                rows.append((label, s.accuracies(), cells_of(s.costs, abbreviated)))

        for name, limit, digits in (("ceiling", members[0].ceiling, 4), ("chance", members[0].chance, 2)):
            rows.append((f"  {name}", [f"{limit.sequence:.{digits}g}", f"{limit.token:.{digits}g}"], []))

    return rows


def _beyond_training(standings: Sequence[Standing], mixers: Sequence[str]) -> Table:
    """Return the table of mean accuracies on extrapolation sets, with a column for each mixer."""
    rows: list[tuple[str | Text, list[str]]] = []
    for setting, of_setting in groupby(grouped(standings, "setting"), attrgetter("setting")):
        members = {s.mixer: s.extrapolation for s in of_setting}
        names = list(dict.fromkeys(name for sets in members.values() for name in sets))
        rows += [(Text(setting, "bold"), [])] * bool(names)
        for name in names:
            found = [members.get(mixer, {}).get(name) for mixer in mixers]
            rows.append((f"  {name}", [" / ".join(f"{y.mean:.4f}" for y in of.values()) if of else "" for of in found]))
    return _table("beyond training: sequence / token accuracy", ("task\n  set", *mixers), rows)


def count_mixers(standings: Sequence[Standing]) -> int:
    """Return the number of mixers in a comparison."""
    return len({s.mixer for s in standings})


def _table(title: str, headings: Sequence[str], rows: Sequence[tuple[str | Text, list[str]]]) -> Table:
    """Make a table of labels and cells, with a line above each task, whose label is a Text."""
    table = Table(title=title, title_justify="left")
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)

    for label, cells in rows:
        if isinstance(label, Text):
            table.add_section()
        table.add_row(label if isinstance(label, Text) else Name(label), *cells)
    return table
