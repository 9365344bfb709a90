"""The file of a reference language model, and the locks with which processes share its runs.

The file is written after each run, so that the files alone show which runs are missing: ``runners.c4.reference.order``
says which follow. Each run has a lock beside the file, and the file has one for as long as a run is added to it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from filelock import FileLock, Timeout
from pydantic import Discriminator, Tag

from runners.c4.config import Config
from runners.c4.cost import flops_per_token, model_parameters
from runners.c4.data.corpus import Corpus
from runners.c4.evaluation.evaluate import RecallSplit
from runners.c4.model import layer_of
from runners.c4.reference.order import RATES, Place, chosen_rate, open_places
from runners.files import damaged, make_durable, read_json, validated, write_json

SHIPPED = Path(__file__).parents[3] / "results" / "reference"
NAME = "language-models"
"""Name of the folder below the reference results."""
FOLDER = (SHIPPED if SHIPPED.is_dir() else Path("results/reference")) / NAME
"""Lies in the checkout of this file; without a checkout, in the current folder."""
REMEDY = "move it elsewhere, or delete it to train the model again"


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run in a model's file.

    Attributes:
        lr: peak learning rate.
        seed: seed of the weights and of the order of the data.
        device: name of the device on which it was trained.
        code: hash of the code that trained it.
        unrehearsed_code: hash of the modules that a rehearsal does not show; None in files of earlier versions.
        trajectory: losses of its rehearsal (``runners.c4.rehearsal``).
    """

    lr: float
    seed: int
    device: str
    code: str
    unrehearsed_code: str | None = None
    trajectory: list[float]


@dataclass(frozen=True, kw_only=True)
class DivergedRun(_Run):
    """A run whose loss became infinite or not a number.

    Attributes:
        diverged_at: the step at which it did.
    """

    diverged_at: int
    validation_loss: None = None


@dataclass(frozen=True, kw_only=True)
class ConvergedRun(_Run):
    """A run that was trained to its end. Losses are in nats a token.

    Attributes:
        validation_loss: loss on the validation text.
        bits_per_byte: the same in bits per byte; None if the text's bytes are not known.
        recall_loss: loss of the recall tokens (``runners.c4.evaluation.evaluate``).
        rest_loss: loss of the other tokens.
        curve: step, training loss and validation loss of each evaluation.
        seconds: time of training without evaluations.
        evaluation_seconds: time of one evaluation; 0 in files of earlier versions, which did not take it.
        gradient: norm of the gradient at each distance (``runners.c4.evaluation.gradients``); None if not measured.
        gradient_half_width: half of its 95% intervals; None likewise.
        tokens_per_second: tokens trained a second.
        versions: versions of libraries by name.
    """

    validation_loss: float
    bits_per_byte: float | None
    recall_loss: float
    rest_loss: float
    curve: list[tuple[int, float, float]]
    seconds: float
    evaluation_seconds: float = 0.0
    gradient: list[float] | None = None
    gradient_half_width: list[float] | None = None
    tokens_per_second: int
    versions: dict[str, str | None]


def _outcome_of(run: Any) -> str:
    """Return the class of a run in a file, by its tag."""
    return "diverged" if isinstance(run, dict) and run.get("validation_loss", 0.0) is None else "converged"


Run = Annotated[
    Annotated[ConvergedRun, Tag("converged")] | Annotated[DivergedRun, Tag("diverged")], Discriminator(_outcome_of)
]


@dataclass(frozen=True, kw_only=True)
class Text:
    """The corpus of a model.

    Attributes:
        name: name of the corpus, a hash of its texts and its tokenizer.
        vocab_size: tokens of the vocabulary.
        train_tokens: tokens to train on.
        tokenizer: hash of the tokenizer.
        sources: files of the texts with their hashes, by split.
        validation_tokens: tokens that the validation loss is the mean of.
        recall_share: share of them that are recall tokens.
        rare: occurrences in training up to which a bigram is rare.
    """

    name: str
    vocab_size: int
    train_tokens: int
    tokenizer: str
    sources: Any
    validation_tokens: int
    recall_share: float
    rare: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The content of a model's file.

    Attributes:
        layer: name of its layer.
        options: all options of the layer.
        family: family of the layer.
        config: settings that its runs share (``settings_of``).
        tokens: tokens of a run's training.
        parameters: number of parameters.
        parameters_without_embeddings: the same without the embeddings.
        flops_per_token: FLOPs of training, divided by its tokens.
        corpus: the text.
        runs: finished runs, in the order in which they ended.
    """

    layer: str
    options: dict[str, Any]
    family: str
    config: dict[str, Any]
    tokens: int
    parameters: int
    parameters_without_embeddings: int
    flops_per_token: int
    corpus: Text
    runs: list[Run]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that its runs share; its runs had the defaults of settings that are newer than it."""
        return settings_of(Config()) | self.config

    @property
    def chosen(self) -> float | None:
        """The learning rate with the lowest validation loss of the first seed; None before a run has converged."""
        return chosen_rate(self.runs)

    @property
    def complete(self) -> bool:
        """Whether all its runs are trained."""
        return not open_places(self.runs)

    @property
    def best(self) -> list[ConvergedRun]:
        """The runs of all seeds at the chosen learning rate; none before a run has converged."""
        rate = self.chosen
        return [run for run in self.converged if run.lr == rate]

    @property
    def converged(self) -> list[ConvergedRun]:
        """The runs that did not diverge."""
        return [run for run in self.runs if isinstance(run, ConvergedRun)]


def cell_file(folder: Path, name: str) -> Path:
    """Return the file of a model's runs; the colon in the name of a user's own layer becomes a dot."""
    return folder / f"{name.replace(':', '.')}.json"


def cell_files(folder: Path) -> list[Path]:
    """Return the files of all models in a folder, without those that another process is writing or has left."""
    return sorted(folder.glob("[!.]*.json"))


def read_cell(file: Path) -> Cell | None:
    """Return the content of a model's file; None if there is none.

    Raises:
        DamagedFileError: it is damaged, or no model's file.
    """
    if not file.exists():
        return None

    cell = validated(file, Cell, read_json(file, REMEDY), REMEDY)
    for run in cell.runs:
        if run.lr not in RATES:
            raise damaged(file, f"a run has the learning rate {run.lr:g}, which is never tried", REMEDY)
    return cell


def runs_in(file: Path) -> list[Run]:
    """Return the runs in a model's file; none if there is no file.

    Raises:
        DamagedFileError: it is damaged, or no model's file.
    """
    cell = read_cell(file)
    return [] if cell is None else cell.runs


@contextmanager
def free_place(file: Path, fits: Callable[[Place], bool]) -> Iterator[Place | None]:
    """Give and lock the first run of a model that can be trained; None if there is none.

    Args:
        file: file of the model.
        fits: whether to train a run; it is asked before the run is locked.

    Raises:
        DamagedFileError: the file is damaged, or no model's file.
    """
    for place in filter(fits, open_places(runs_in(file))):
        with locked(file, place) as is_free:
            if is_free and place in open_places(runs_in(file)):  # another process may have ended it before the lock
                yield place
                return
    yield None


@contextmanager
def locked(file: Path, place: Place) -> Iterator[bool]:
    """Lock a run of a model; False if another process has locked it."""
    rate, seed = place
    with ExitStack() as stack:
        is_free = True
        try:
            stack.enter_context(FileLock(file.with_name(f".{file.stem}-lr{rate:g}-seed{seed}.lock"), timeout=0))
        except Timeout:
            is_free = False
        yield is_free


def new_cell(config: Config, options: dict[str, Any], corpus: Corpus, split: RecallSplit) -> Cell:
    """Return the content of a model's file before its first run.

    Args:
        config: configuration that the model's runs share.
        options: options of the layer that differ from its defaults.
        corpus: data of the runs.
        split: the recall tokens of the validation data.
    """
    layer, layer_config = layer_of(config, options)
    parameters, tables = model_parameters(config, options, corpus.manifest.vocab_size)
    text = Text(
        name=corpus.folder.name,
        tokenizer=corpus.manifest.tokenizer,
        sources=corpus.manifest.sources,
        vocab_size=corpus.manifest.vocab_size,
        train_tokens=corpus.tokens("train"),
        validation_tokens=corpus.targets("validation", config.seq_len),
        recall_share=split.share,
        rare=split.rare,
    )
    return Cell(
        layer=config.mixer,
        options=asdict(layer_config),
        family=layer.family,
        config=settings_of(config),
        tokens=config.steps * config.batch_size * config.seq_len,
        parameters=parameters,
        parameters_without_embeddings=parameters - tables,
        flops_per_token=flops_per_token(config, options, corpus.manifest.vocab_size),
        corpus=text,
        runs=[],
    )


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings that all runs of a model share."""
    own = ("mixer", "lr", "seed")
    places = ("out", "data", "tokenizer", "device", "dry_run", "search", "downstream", "parallel")
    computing = ("micro_batch_size", "recompute", "checkpoint_every")
    left_out = {*own, *places, *computing}
    return {name: y for name, y in asdict(config).items() if name not in left_out and not name.startswith("wandb")}


def write_cell(file: Path, cell: Cell) -> None:
    """Write a model's file durably, with the chosen learning rate and whether all runs are there."""
    write_json(file, {**asdict(cell), "chosen": cell.chosen, "complete": cell.complete})
    make_durable(file)
