"""The experiments with language models, and which runs a model still needs.

- ``ranking``: every layer as a small language model. It answers whether the scores of the tasks predict losses.
  Layers that read a sequence in segments, chunks or windows have four times as long ones as on the tasks, because
  sequences are four times as long.
- ``transition``: RT and the Transformer at 30M parameters and 301M tokens, in the parametrisation of the paper and in
  that of the authors' code. Induction heads form after 110M tokens at this batch size (arXiv:2511.16893).
- ``variants`` and ``variants-authors``: the paper's other changes of RT, each compared with RT of ``transition``. The
  first uses the parametrisation of the paper, the second that of the authors' code.
- ``read-once``: RT, the Transformer and two of these variants on a text of 301M tokens or more, each read once; and RT
  with the tokens that it reads in the time of the Transformer.

A model is trained at three learning rates with the first seed. While the best rate is the lowest or highest one tried,
its next neighbour is tried as well. The best rate is then trained with the other seeds. If one of them diverges, the
next best rate takes its place.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mixers import MIXERS
from mixers.named import is_path
from runners.c4.config import PRESETS, Parametrisation
from runners.records import Record

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""Learning rates that may be tried, in ascending order."""
FIRST = RATES[3:6]
"""Learning rates at which every model is trained. At 1e-3, every loss measured with RT or the Transformer is at least
0.3 nats above that at 3e-3. A model whose best rate is 3e-3 is trained at 1e-3 as well."""
SEEDS = (0, 1)
WIDTHS_30M: Mapping[int, int | None] = {3: 896, 6: PRESETS["30m"].width, 12: 448}
"""Widths of models with about 30M parameters without embeddings, by their number of layers."""
AGAINST = "rt-against-transformer"
"""Folder of the experiments at 30M parameters, whose rows are compared with each other."""
SLOWER = 2.8
"""Times as long as the Transformer RT takes for equal tokens, 6 layers of 640 alone on one H200."""

Place = tuple[float, int]
"""Learning rate and seed of a run."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A model that is trained at several learning rates.

    Attributes:
        mixer: layer.
        options: options of the layer that differ from its defaults.
        settings: fields of ``Config`` that differ from the experiment's preset.
    """

    mixer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LanguageModelExperiment:
    """Models that read the same number of tokens of the same text.

    Attributes:
        preset: preset of ``runners.c4`` with the settings that the models share.
        folder: folder of the models' files, below the folder of all experiments.
        rows: models by name; the name is also the name of the model's file.
        takes_own: whether a user's own layer can be a model.
    """

    preset: str
    folder: str
    rows: Mapping[str, ModelSettings]
    takes_own: bool = False

    def row(self, name: str) -> ModelSettings:
        """Return a model's row; ``package.module:Class`` is a model of a user's own layer.

        Raises:
            ValueError: there is none.
        """
        if is_path(name) and self.takes_own:
            return ModelSettings(mixer=name)
        if name not in self.rows:
            own = " or package.module:Class" if self.takes_own else ""
            raise ValueError(f"no row {name!r}: choose from {', '.join(self.rows)}{own}")
        return self.rows[name]


def open_places(runs: Sequence[Record]) -> list[Place]:
    """Return learning rate and seed of each run that can be trained after ``runs``; none if the model is finished.

    None of them depends on the loss of another, so several processes may train them at the same time.
    """
    losses = losses_by_rate(runs)
    if rates := [rate for rate in FIRST if rate not in losses]:
        return [(rate, SEEDS[0]) for rate in rates]

    # Neighbours of the best rate.
    best = min(losses, key=lambda rate: (losses[rate], rate))
    at = RATES.index(best)
    if rates := [rate for rate in RATES[max(0, at - 1) : at + 2] if rate not in losses]:
        return [(rate, SEEDS[0]) for rate in rates]

    # Other seeds, unless every run diverged.
    done = {run.seed for run in runs if run.lr == best}
    return [(best, seed) for seed in SEEDS if seed not in done] if math.isfinite(losses[best]) else []


def chosen_rate(runs: Sequence[Record]) -> float | None:
    """Return the learning rate with the lowest validation loss of the first seed; None before a run has converged.

    A rate at which any seed diverged is not chosen.
    """
    losses = {rate: loss for rate, loss in losses_by_rate(runs).items() if math.isfinite(loss)}
    return min(losses, key=lambda rate: (losses[rate], rate), default=None)


def losses_by_rate(runs: Sequence[Record]) -> dict[float, float]:
    """Return the validation loss of the first seed at each learning rate; infinity if any seed diverged there."""
    diverged = {run.lr for run in runs if run.diverged_step is not None}
    first = [run for run in runs if run.seed == SEEDS[0]]
    return {run.lr: math.inf if run.lr in diverged else run.metrics["validation"]["loss"] or math.inf for run in first}


_PARTS = {
    "sliding-attention": "window",
    "transformer-xl": "segment",
    "staircase": "chunk",
    "transformer-fam": "block",
    "rmt": "segment",
}
"""Options of layers that read a sequence in parts, whose number is as in the tasks with sequences of 128."""
_LONGER = PRESETS["ranking"].seq_len // 128
_ENDINGS: dict[Parametrisation, str] = {"paper": "", "authors": "-authors"}


def _transition(parametrisation: Parametrisation) -> dict[str, ModelSettings]:
    """Return RT, the Transformer of equal depth, and the Transformer of twice the depth with as many parameters."""
    own = {"parametrisation": parametrisation}
    rows = {
        "rt-6": ModelSettings(mixer="rt", settings=own),
        "transformer-6": ModelSettings(mixer="transformer", settings=own),
        "transformer-12": ModelSettings(mixer="transformer", settings={**own, "layers": 12, "width": WIDTHS_30M[12]}),
    }
    return {name + _ENDINGS[parametrisation]: row for name, row in rows.items()}


def _variants(parametrisation: Parametrisation) -> dict[str, ModelSettings]:
    """Return RT with one change per row, and the Transformer with the same change where a comparison needs it."""
    own, steps = {"parametrisation": parametrisation}, PRESETS["30m"].steps
    batch_32 = {**own, "batch_size": 32, "steps": 2 * steps}
    rows = {
        "rt-6-no-persistent-norm": ModelSettings(mixer="rt", options={"persistent_norm": False}, settings=own),
        "rt-6-beta2-0.99": ModelSettings(mixer="rt", settings={**own, "beta2": 0.99}),
        "transformer-6-beta2-0.99": ModelSettings(mixer="transformer", settings={**own, "beta2": 0.99}),
        "rt-6-batch-32": ModelSettings(mixer="rt", settings=batch_32),
        "transformer-6-batch-32": ModelSettings(mixer="transformer", settings=batch_32),
        "rt-6-block-4": ModelSettings(mixer="rt", options={"block": 4}, settings=own),
        "rt-6-block-16": ModelSettings(mixer="rt", options={"block": 16}, settings=own),
        "rt-3": ModelSettings(mixer="rt", settings={**own, "layers": 3, "width": WIDTHS_30M[3]}),
    }
    return {name + _ENDINGS[parametrisation]: row for name, row in rows.items()}


EXPERIMENTS: dict[str, LanguageModelExperiment] = {
    "ranking": LanguageModelExperiment(
        preset="ranking",
        folder="",
        rows={mixer: ModelSettings(mixer=mixer) for mixer in MIXERS}
        | {
            mixer: ModelSettings(mixer=mixer, options={part: _LONGER * getattr(MIXERS[mixer].Config(), part)})
            for mixer, part in _PARTS.items()
        },
        takes_own=True,
    ),
    "transition": LanguageModelExperiment(
        preset="30m", folder=AGAINST, rows=_transition("paper") | _transition("authors")
    ),
    "variants": LanguageModelExperiment(preset="30m", folder=AGAINST, rows=_variants("paper")),
    "variants-authors": LanguageModelExperiment(preset="30m", folder=AGAINST, rows=_variants("authors")),
    "read-once": LanguageModelExperiment(
        preset="30m",
        folder="read-once",
        rows=_transition("paper")
        | {name: _variants("paper")[name] for name in ("rt-3", "rt-6-no-persistent-norm", "rt-6-beta2-0.99")}
        | {"rt-6-equal-time": ModelSettings(mixer="rt", settings={"steps": round(PRESETS["30m"].steps / SLOWER)})},
    ),
}
