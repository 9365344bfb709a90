"""The experiments with language models: the models that each experiment trains, and their settings.

- ``ranking``: every layer as a small language model. It answers whether the scores of the tasks predict losses.
  Layers that read a sequence in segments, chunks or windows have four times as long ones as on the tasks, because
  sequences are four times as long.
- ``transition``: RT and the Transformer at 30M parameters and 301M tokens, in the parametrisation of the paper and in
  that of the authors' code. Induction heads form after 110M tokens at this batch size (arXiv:2511.16893).
- ``variants`` and ``variants-authors``: the paper's other changes of RT, each compared with RT of ``transition``. The
  first uses the parametrisation of the paper, the second that of the authors' code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mixers import MIXERS
from mixers.named import is_path
from runners.c4.config import Config, Parametrisation
from runners.c4.presets import PRESETS
from runners.guidance import row_of

WIDTHS_30M: Mapping[int, int | None] = {3: 896, 6: PRESETS["30m"].width, 12: 448}
"""Widths of models with about 30M parameters without embeddings, by their number of layers."""


@dataclass(frozen=True, kw_only=True)
class Row:
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
class Experiment:
    """Models that read the same number of tokens of the same text.

    Attributes:
        preset: preset of ``runners.c4`` with the settings that the models share.
        folder: folder of the models' files, below the folder of all experiments.
        rows: models by name; the name is also the name of the model's file.
        takes_own: whether a user's own layer can be a model.
    """

    preset: str
    folder: str
    rows: Mapping[str, Row]
    takes_own: bool = False

    def row(self, name: str) -> Row:
        """Return a model's row; ``package.module:Class`` is a model of a user's own layer.

        Raises:
            ValueError: there is none; the message names the one that was probably meant.
        """
        if is_path(name) and self.takes_own:
            return Row(mixer=name)
        if is_path(name):
            raise ValueError(f"no row {name!r}: a layer of your own is a row of --experiment ranking alone")
        if "." in name and self.takes_own:
            raise ValueError(f"no row {name!r}: write a layer of your own as package.module:Class, with a colon")
        return self.rows[row_of(name, self.rows)]

    def config(self, name: str, **shared: Any) -> Config:
        """Return the configuration that all runs of a model share.

        Args:
            name: name of the model.
            **shared: fields of ``Config`` that all models share: the paths of data and results, and whether to train.

        Raises:
            ValueError: as ``row``.
        """
        row = self.row(name)
        return replace(PRESETS[self.preset], mixer=row.mixer, **row.settings, **shared)


def _ranking() -> dict[str, Row]:
    """Every layer; parts of a sequence are as many as in the tasks with sequences of 128."""
    parts = {
        "sliding-attention": "window",
        "transformer-xl": "segment",
        "staircase": "chunk",
        "transformer-fam": "block",
        "rmt": "segment",
    }
    factor = PRESETS["ranking"].seq_len // 128
    rows = {mixer: Row(mixer=mixer) for mixer in MIXERS}
    for mixer, option in parts.items():
        rows[mixer] = Row(mixer=mixer, options={option: factor * getattr(MIXERS[mixer].Config(), option)})
    return rows


def _transition() -> dict[str, Row]:
    """RT, the Transformer of equal depth, and the Transformer of twice the depth with as many parameters."""
    rows = {}
    for parametrisation, ending in _ENDINGS.items():
        own = {"parametrisation": parametrisation}
        rows["rt-6" + ending] = Row(mixer="rt", settings=own)
        rows["transformer-6" + ending] = Row(mixer="transformer", settings=own)
        deep = {"layers": 12, "width": WIDTHS_30M[12]}
        rows["transformer-12" + ending] = Row(mixer="transformer", settings={**own, **deep})
    return rows


def _variants(parametrisation: Parametrisation) -> dict[str, Row]:
    """RT with one change per row, and the Transformer with the same change where a comparison needs it."""
    own, steps = {"parametrisation": parametrisation}, PRESETS["30m"].steps
    batch_32 = {**own, "batch_size": 32, "steps": 2 * steps}
    rows = {
        "rt-6-no-persistent-norm": Row(mixer="rt", options={"persistent_norm": False}, settings=own),
        "rt-6-beta2-0.99": Row(mixer="rt", settings={**own, "beta2": 0.99}),
        "transformer-6-beta2-0.99": Row(mixer="transformer", settings={**own, "beta2": 0.99}),
        "rt-6-batch-32": Row(mixer="rt", settings=batch_32),
        "transformer-6-batch-32": Row(mixer="transformer", settings=batch_32),
        "rt-6-block-4": Row(mixer="rt", options={"block": 4}, settings=own),
        "rt-6-block-16": Row(mixer="rt", options={"block": 16}, settings=own),
        "rt-3": Row(mixer="rt", settings={**own, "layers": 3, "width": WIDTHS_30M[3]}),
    }
    return {name + _ENDINGS[parametrisation]: row for name, row in rows.items()}


_ENDINGS: dict[Parametrisation, str] = {"paper": "", "authors": "-authors"}

AGAINST = "rt-against-transformer"
"""Folder of the experiments at 30M parameters, whose rows are compared with each other."""
EXPERIMENTS: dict[str, Experiment] = {
    "ranking": Experiment(preset="ranking", folder="", rows=_ranking(), takes_own=True),
    "transition": Experiment(preset="30m", folder=AGAINST, rows=_transition()),
    "variants": Experiment(preset="30m", folder=AGAINST, rows=_variants("paper")),
    "variants-authors": Experiment(preset="30m", folder=AGAINST, rows=_variants("authors")),
}
