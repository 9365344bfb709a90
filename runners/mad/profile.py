"""The profile of a layer: its score and capacity on the ladder of each task, and its tier among other layers.

    table = records.load("results/studies")      # one row for each training
    scores = seed_scores(table)                  # one row for each rung and seed
    found = abilities(scores)                    # one row for each ability: score, capacity, intervals

1. The score of a rung is the token accuracy on the test split, rescaled: chance is 0, the ceiling 1. A run that
   diverged scores 0.
2. The third rung is trained at all learning rates but the smallest and the largest, then at one of these if its
   neighbour is the best. The rate with the best validation token accuracy over all seeds is that of the other rungs.
   Those at the ceiling are told apart on the first rung below it. Where the third rung scores below ``LEARNED``, the
   second chooses for the easier ones, and if it does, too, the first.
3. Rungs beyond one that scores below ``LOST`` on validation count 0 without training, and rungs below one that scores
   ``FULL`` count 1. Both are marked.
4. The score of an ability is the mean over its rungs; the profile score is the mean over abilities.
5. Capacity is the value on the axis up to which the score is ``HELD`` or more, between two rungs interpolated.

Intervals are those of ``runners.mad.points``, over seeds.
"""

import math
from collections.abc import Collection, Generator, Hashable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich.console import Console

from runners import records
from runners.mad.chosen import delete_models
from runners.mad.experiment import Experiment
from runners.mad.options import START, Options
from runners.mad.points import FULL, LOST, Estimate, choose, ends, point_of, rescaled, runs_of_points
from runners.mad.ranking import OTHER_TIES, TIE, average_ranks, places_by_ties, rule_of
from runners.mad.rows import RANKED, load_rows
from runners.mad.tables import printed_table
from runners.progress import spell
from runners.tables import COSTS, cost_cells, fits, ordinal
from runners.task_names import find_task
from tasks.base import Ladder

LAYER = ["layer", "width", "mlp_width", "layers", "steps", "batch_size"]
"""Columns that name a profile."""
SIZE = LAYER[1:4]
"""Those that profiles share in one ranking."""
HELD = 0.9
"""Score of a rung up to which capacity reaches."""
RESAMPLES = 4_000
"""Samples of a bootstrap."""
MARK, STAR = "°", "*"
"""Behind the score of a rung that was not trained, and of an ability whose rate is the largest of the grid."""
YOURS = " (yours)"
"""Behind the names of one's own layers, beside reference profiles."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The profile of one layer.

    Attributes:
        table: records of all rungs, as ``runners.records.load`` returns them.
        score: mean over abilities, with its 95% interval over seeds.
    """

    table: pd.DataFrame = field(repr=False)
    score: Estimate

    def rungs(self) -> pd.DataFrame:
        """One row for each ability, rung and seed; see ``seed_scores``."""
        return seed_scores(self.table)

    def abilities(self) -> pd.DataFrame:
        """One row for each ability; see ``abilities``."""
        return abilities(self.rungs())


def seed_scores(table: pd.DataFrame) -> pd.DataFrame:
    """Return the score of each rung and seed, and whether the chosen rate of a ladder is the largest of its grid.

    Args:
        table: records of diagnostic runs, of which those on rungs count, and of each rung the point that is chosen.

    Returns:
        Columns ``LAYER``, ``task``, ``rung`` (from 1), ``seed``, ``score`` (NaN for a rung that is still missing),
        ``trained``, and ``edge``: whether the rate is the largest of the grid, below the ceiling. All rungs of a ladder
        are there.
    """
    number = table["difficulty"].str.extract(r"^rung-(\d+)", expand=False).astype(float)
    known = table.assign(rung=number, validation=rescaled(table, "validation"), score=rescaled(table, "test"))[
        number.notna()
    ]
    runs, validation, score = runs_of_points(known), known["validation"].tolist(), known["score"].tolist()

    # Rows of each rung: tables of their own would take seconds.
    ladders: dict[tuple[Any, ...], dict[int, list[int]]] = {}
    for row, (*names, rung) in enumerate(known[[*LAYER, "task", "rung"]].itertuples(index=False)):
        ladders.setdefault(tuple(names), {}).setdefault(int(rung), []).append(row)

    found = []
    for key, ladder in ladders.items():
        points = {rung: point_of([runs[row] for row in ladder[rung]]) for rung in sorted(ladder)}
        at = {rung: [row for row in ladder[rung] if runs[row][0] == points[rung]] for rung in points}
        means = {rung: float(pd.Series([validation[row] for row in rows]).mean()) for rung, rows in at.items()}
        seeds = sorted({runs[row][1] for rows in (at if any(at.values()) else ladder).values() for row in rows})
        rates = {rung: {runs[row][0][0] for row in rows} for rung, rows in ladder.items()}
        chosen = [
            rung
            for rung, rows in at.items()
            if rows and len(rates[rung]) > 1 and means[rung] < FULL
            if runs[rows[0]][0][0] == max(set().union(*rates.values()))
        ]
        edge = any(means[rung] >= LOST or rung == 1 for rung in chosen)

        for rung in range(1, len(ladder_of(key[-1]).rungs) + 1):
            own = {runs[row][1]: score[row] for row in at.get(rung, ())}
            implied = math.nan
            if points.get(min(rung, START), ()) is None or any(means[r] < LOST for r in means if r < rung):
                implied = 0.0
            elif any(means[r] >= FULL for r in means if r > rung):
                implied = 1.0
            of_seeds = [(seed, own.get(seed, math.nan) if own else implied) for seed in seeds]
            found += [[*key, rung, *of_seed, bool(own), edge] for of_seed in of_seeds]
    return pd.DataFrame(found, columns=[*LAYER, "task", "rung", "seed", "score", "trained", "edge"])


def abilities(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the score and the capacity of each ability.

    Args:
        scores: what ``seed_scores`` returns.

    Returns:
        Columns ``LAYER``, ``task``, ``axis``; ``score`` and ``capacity`` with the ends of their 95% intervals in
        ``.low`` and ``.high``; ``rungs``, the mean score of each, and ``trained``; and ``edge``. A capacity below the
        first rung is -inf. An ability of which a rung is missing has neither.
    """
    found = []
    for names, of_task in scores.groupby([*LAYER, "task"], sort=False):
        # Rows are in the order of rungs, and of seeds within a rung; pivots would take a second.
        scores_RS, trained_RS = (
            of_task[name].to_numpy().reshape(of_task["rung"].nunique(), -1) for name in ("score", "trained")
        )
        ladder = ladder_of(names[-1])
        values = [float(value) for value in ladder.rungs]
        score = over_seeds(scores_RS.mean(axis=0))
        rung = over_seeds(np.array([last_held(of_seed) for of_seed in scores_RS.T]), most=len(values))
        found.append(
            dict(zip([*LAYER, "task"], names, strict=True))
            | {"axis": ladder.axis, "score": score.mean, "score.low": score.low, "score.high": score.high}
            | {"capacity": on_axis(rung.mean, values)}
            | {"capacity.low": on_axis(rung.low, values), "capacity.high": on_axis(rung.high, values)}
            | {"rungs": scores_RS.mean(axis=1).tolist(), "trained": trained_RS.any(axis=1).tolist()}
            | {"edge": bool(of_task["edge"].any())}
        )
    return pd.DataFrame(found)


def profile_score(scores: pd.DataFrame) -> Estimate:
    """Return the mean over the abilities of one layer, with its interval over seeds, from ``seed_scores``."""
    by_seed = scores.pivot_table(index=["task", "rung"], columns="seed", values="score", dropna=False)
    return over_seeds(by_seed.groupby("task").mean().mean(axis=0).where(by_seed.notna().all(axis=0)).to_numpy())


def over_seeds(values: Floats, most: float | None = None) -> Estimate:
    """Return the mean of one value a seed with its interval.

    Args:
        values: one for each seed.
        most: values lie between 0 and this; None for scores, whose interval is that of accuracies.
    """
    mean, n = float(values.mean()), len(values)
    error = float(values.std(ddof=1)) / n**0.5 if n > 1 else math.nan
    low, high = ends(mean, error, n, (values.min(), values.max()) if most is None else None)
    if most is not None:
        low, high = np.clip([low, high], 0, most)
    return Estimate(mean=mean, low=float(low) if n > 1 else math.nan, high=float(high) if n > 1 else math.nan)


def last_held(scores: Floats) -> float:
    """Return the rung up to which all scores are ``HELD``, interpolated, from 1; 0 if the first one is below."""
    if np.isnan(scores).any():
        return math.nan
    held = int(np.argmin([*(scores >= HELD), False]))
    if held in (0, len(scores)):
        return float(held)
    return held + float((scores[held - 1] - HELD) / (scores[held - 1] - scores[held]))


def on_axis(rung: float, values: Sequence[float]) -> float:
    """Return the value on the axis of a rung with its fraction; -inf below the first.

    Between two rungs the axis is logarithmic if the logarithms of all values are more evenly spaced than the values.
    """
    if math.isnan(rung) or rung < 1:
        return rung if math.isnan(rung) else -math.inf
    axis, numbers = np.array(values), np.arange(1, len(values) + 1)

    def unevenness(steps: Floats) -> float:
        return float(steps.std() / steps.mean())

    if axis.min() > 0 and unevenness(np.diff(np.log(axis))) < unevenness(np.diff(axis)):
        return float(np.exp(np.interp(rung, numbers, np.log(axis))))
    return float(np.interp(rung, numbers, axis))


def tiers(scores_LAS: Floats) -> list[int]:
    """Return the tier of each layer, from 1, by a paired bootstrap over abilities and seeds.

    A sample draws abilities, and seeds of each, the same for all layers. Two layers differ if the difference of their
    profile scores, in standard errors, is above the 95% quantile of the largest such deviation over all pairs, which
    adjusts for their number (Romano & Wolf 2005). The best layer leads the first tier. A layer that is worse than the
    leader, so tested, and by ``TIE`` or more, leads the next one.

    Args:
        scores_LAS: score of each layer, ability and seed.
    """
    rng, (layers, count, seeds) = np.random.default_rng(0), scores_LAS.shape
    ability_NA = rng.integers(count, size=(RESAMPLES, count))
    seed_NAS = rng.integers(seeds, size=(RESAMPLES, count, seeds))
    means_NL = scores_LAS[:, ability_NA[:, :, None], seed_NAS].mean(axis=(2, 3)).T
    mean_L = scores_LAS.mean(axis=(1, 2))

    first, second = np.triu_indices(layers, 1)
    difference_P = mean_L[first] - mean_L[second]
    deviation_NP = np.abs(means_NL[:, first] - means_NL[:, second] - difference_P)
    error_P = np.maximum(deviation_NP.std(axis=0), 1e-12)
    limit = np.quantile((deviation_NP / error_P).max(axis=1, initial=0.0), 0.95)
    differ_LL = np.zeros((layers, layers), dtype=bool)
    differ_LL[first, second] = (np.abs(difference_P) / error_P > limit) & (np.abs(difference_P) >= TIE)
    differ_LL |= differ_LL.T

    found, leader, tier = [0] * layers, None, 0
    for layer in np.argsort(-mean_L, kind="stable").tolist():
        if leader is None or differ_LL[leader, layer]:
            leader, tier = layer, tier + 1
        found[layer] = tier
    return found


def standings(scores: pd.DataFrame, ranked: Collection[str]) -> pd.DataFrame:
    """Return where layers stand by their profile scores, tier by tier and the best score first.

    Args:
        scores: of all layers, from ``seed_scores``.
        ranked: layers that are ranked, if they have all abilities and seeds; the others follow.

    Returns:
        By ``layer`` the columns ``tier``, ``rank`` and ``mean``, ``low``, ``high`` of the profile score; NaN for a
        layer that is not ranked, or has no profile score.
    """
    layers = dict(iter(scores.groupby("layer", sort=False)))
    seeds = {name: by_seed(of_layer).unstack() for name, of_layer in layers.items()}
    shape = max((of_AS.shape for of_AS in seeds.values()), default=(0, 0))
    whole = {name: of_AS for name, of_AS in seeds.items() if of_AS.shape == shape and of_AS.notna().all(axis=None)}
    found = pd.DataFrame(
        [vars(profile_score(layers[name])) if name in whole else {} for name in layers],
        index=pd.Index(layers, name="layer"),
        columns=["tier", "rank", "mean", "low", "high"],
        dtype=float,
    )
    compared = [name for name in whole if name in ranked]
    if compared:
        found.loc[compared, "tier"] = tiers(np.stack([whole[name].to_numpy() for name in compared]))
        found.loc[compared, "rank"] = average_ranks(found.loc[compared, "mean"])
    return found.sort_values(["tier", "mean"], ascending=[True, False], kind="stable")


def beside(scores: pd.DataFrame, reference: pd.DataFrame) -> pd.DataFrame:
    """Return one's own scores, whose layers are marked as yours, and those of comparable reference profiles.

    Args:
        scores: of one's own layers, from ``seed_scores``.
        reference: of other layers. Those of the size of the first of one's own that have all its abilities and seeds
            are compared, if they were trained on as many sequences, or on more.
    """
    own = scores.iloc[0]
    mine = by_seed(scores[scores["layer"] == own["layer"]])
    found = [scores.assign(layer=scores["layer"] + YOURS)]
    for names, of_layer in reference.groupby(LAYER, sort=False):
        other = dict(zip(LAYER, names, strict=True))
        same = all(other[name] == own[name] for name in SIZE)
        longer = other["steps"] * other["batch_size"] >= own["steps"] * own["batch_size"]
        shared = of_layer[of_layer["task"].isin(scores["task"]) & of_layer["seed"].isin(scores["seed"])]
        if same and longer and by_seed(shared).reindex(mine.index).notna().all():
            found.append(shared)
    return pd.concat(found, ignore_index=True)


def place_of(scores: pd.DataFrame, reference: pd.DataFrame) -> str | None:
    """Return a layer's tier and rank in words, and what other rules of ties would change of its place.

    Args:
        scores: of one layer, from ``seed_scores``.
        reference: of other layers; ``beside`` says which are compared. If they read more sequences, the words say so.

    Returns:
        The words; None without comparable reference profiles.
    """
    found = beside(scores, reference)
    if found["layer"].nunique() == 1:
        return None

    label, standing = found.iloc[0]["layer"], standings(found, {*found["layer"]})
    tier, rank = standing.loc[label, ["tier", "rank"]]
    same = [name for name in standing.index[standing["tier"] == tier] if name != label]
    company = f", with {', '.join(same[:5])}{f' and {len(same) - 5} others' * (len(same) > 5)}" if same else ""
    place = places_by_ties(standing[["mean"]]).loc[label]
    others = [f"{ordinal(place[tie])} {rule_of(tie)}" for tie in OTHER_TIES if place[tie] != place[TIE]]
    rules = f" ({ordinal(place[TIE])} {rule_of(TIE)}; {', '.join(others) or 'other rules of ties change nothing'})"
    read = found["steps"] * found["batch_size"]
    less = f"; trained on {read[0]:,} sequences, others on up to {read.max():,}" if read.max() > read[0] else ""
    return f"tier {tier:g} of {standing['tier'].max():g}{company}; rank {rank:g} of {len(standing)}{rules}{less}"


def by_seed(scores: pd.DataFrame) -> pd.Series:
    """Return the score of each ability and seed of one layer; NaN where a rung is missing."""
    return scores.groupby(["task", "seed"])["score"].agg(lambda rungs: rungs.mean(skipna=False))


def train_profiles(
    studies: Generator[tuple[Experiment, pd.DataFrame], None, None], options: Options, console: Console
) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Print each rung as soon as it is trained, then the profile of each layer.

    Args:
        studies: what ``runners.mad.search.train_studies`` yields.
        options: what is kept, and where reference profiles are.
        console: where to print.

    Returns:
        The records, and the scores of the reference profiles, as ``seed_scores`` returns them; None without any.
    """
    tables = []
    with closing(studies):  # an error here ends the processes on other GPUs, too
        for experiment, table in studies:
            tables.append(table)
            delete_models(experiment, table, options)
            here = seed_scores(table)
            score = over_seeds(here.loc[here["rung"] == experiment.rung, "score"].to_numpy())
            ladder = ladder_of(experiment.task)
            value = [*ladder.rungs][(experiment.rung or 1) - 1]
            name = f"{experiment.label} on {experiment.task}, rung {experiment.rung} ({ladder.axis} {value:g})"
            point = choose(table) if table["lr"].nunique() > 1 else None
            is_edge = point is not None and point[0] == max(run.lr for run in options.runs)
            edge = ", the largest of the grid" if is_edge else ""
            choice = "" if point is None else f" at lr {point[0]:g}, the best of its grid{edge}"
            console.print(f"{name}: score {score.text(3)}{choice}", soft_wrap=True)

    table = pd.concat(tables, ignore_index=True)
    folder = records.REFERENCE if options.reference == "shipped" else Path(options.reference)
    known = load_rows(folder, ["profile"], RANKED, table["task"].unique()) if options.reference != "none" else table[:0]
    comparable = not known.empty and not table["difficulty"].str.endswith("custom").any()
    reference = seed_scores(known) if comparable else None
    for _, of_layer in table.groupby(LAYER, sort=False):
        print_profile(of_layer, reference, console)
    console.print(
        f"{MARK} not trained: 0 beyond a rung below {LOST} on validation, 1 below a rung from {FULL}; "
        f"{STAR} the largest rate of the grid",
        soft_wrap=True,
    )
    if reference is None and options.reference != "none":
        console.print("no place among other layers: there are no reference profiles yet", soft_wrap=True)
    return table, reference


def draw(table: pd.DataFrame, reference: pd.DataFrame | None, out: Path) -> list[Path]:
    """Draw one's own layers in front of comparable reference profiles; return the files of the two pictures.

    Args:
        table: records of one's own layers.
        reference: scores of the reference profiles; None without any.
        out: results folder.
    """
    from runners.mad.profile_charts import draw_ladders, draw_profiles  # imports Matplotlib
    from runners.style import chart_file, write_chart

    scores = seed_scores(table)
    shown = beside(scores, scores[:0] if reference is None else reference)
    found, own = abilities(shown), [f"{name}{YOURS}" for name in scores["layer"].unique()]
    standing = standings(shown, {*shown["layer"]})
    pictures = {"profile": draw_profiles(found, standing, own), "ladders": draw_ladders(found, own)}
    runs = [*table["study"].unique(), *table["lr"], *table["seed"], *standing.index]
    files = [chart_file(out, words, runs) for words in pictures]
    for file, figure in zip(files, pictures.values(), strict=True):
        write_chart(figure, file)
    return files


def print_profile(table: pd.DataFrame, reference: pd.DataFrame | None, console: Console) -> None:
    """Print the profile of one layer from its records: score and capacity of each ability, costs, and its place."""
    scores = seed_scores(table)
    seconds = (table["seconds"] / table["together"]).groupby(table["task"]).sum()
    parts: tuple[list[list[str]], ...] = ([], [], [])
    for row in abilities(scores).to_dict("records"):
        score = Estimate(mean=row["score"], low=row["score.low"], high=row["score.high"]).text(3)
        score += STAR * row["edge"]
        parts[0].append([row["task"], score, spell(seconds[row["task"]])])
        parts[1].append([row["task"], capacity(row), row["axis"]])
        rungs = zip(row["rungs"], row["trained"], strict=True)
        parts[2].append([row["task"], *("" if math.isnan(y) else f"{y:.2f}" + MARK * (not own) for y, own in rungs)])
    headings = ["score", "time"], ["capacity", "axis"], [*map(str, range(1, len(parts[2][0])))]
    whole = [[*a[:-1], *b[1:], *c[1:], a[-1]] for a, b, c in zip(*parts, strict=True)]
    one = printed_table(["ability", "score", *headings[1], *headings[2], "time"], whole)
    narrow = [printed_table(["ability", *names], rows) for names, rows in zip(headings, parts, strict=True)]
    console.print(*([one] if fits(one, console) else narrow))

    # The layer.
    first = table.iloc[0]
    cells = zip(cost_cells(first["parameters"], first["state"], first["flops_per_token"]), COSTS, strict=True)
    costs = ", ".join(f"{' '.join(heading.split())} {cell}" for cell, heading in cells)
    console.print(f"{first['layer']}: width {first['width']}, {costs}, {spell(seconds.sum())}", soft_wrap=True)
    count = scores["task"].nunique()
    over = f"over {count} abilit{'ies' if count > 1 else 'y'}"
    console.print(f"{first['layer']}: profile score {profile_score(scores).text(3)} {over}", soft_wrap=True)
    if reference is not None:
        place = place_of(scores, reference) or "no place: no reference profiles of this size and training"
        console.print(f"{first['layer']}: {place}", soft_wrap=True)


def capacity(row: Mapping[Hashable, Any]) -> str:
    """Return a capacity with its interval; one that the ladder does not hold is below its first or from its last."""
    ladder = [float(value) for value in ladder_of(str(row["task"])).rungs]

    def text(value: float) -> str:
        if value == -math.inf:
            return f"<{ladder[0]:g}"
        return f"≥{ladder[-1]:g}" if value >= ladder[-1] - 1e-9 else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"

    mean, low, high = (row["capacity" + end] for end in ("", ".low", ".high"))
    if math.isnan(mean):
        return ""
    return text(mean) if math.isnan(low) or low == high else f"{text(mean)} ({text(low)}–{text(high)})"


def ladder_of(task: str) -> Ladder:
    """Return the ladder of a task that has one."""
    ladder: Ladder = find_task(task).ladder
    return ladder
