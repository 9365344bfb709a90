"""Every option of a pretraining run, the presets, and the identity of a run."""

import math
import re
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mixers.base import Shape
from mixers.named import is_path, text_of
from mixers.registry import variant_label
from runners.c4.data.tokenizer import file_beside
from runners.options import flag_of
from runners.tracking import Tracking

Parametrisation = Literal["paper", "authors"]
HEAD_WIDTH = 64
"""Width of a head in the paper's models (appendix "C4 pretraining experiments")."""
LONGEST_LABEL = 120
"""Largest number of characters of a layer's name in that of a run's folder; file systems allow 255 bytes."""
TOKENIZER = "google-t5/t5-base"
"""The paper's tokenizer."""


class Widths(NamedTuple):
    """Model width, hidden width of the MLP, and number of heads."""

    width: int
    mlp_width: int
    heads: int


SIZES: dict[str, dict[int, Widths]] = {
    "150m": {6: Widths(1408, 5632, 22), 12: Widths(1024, 4096, 16)},
    "300m": {6: Widths(2048, 8192, 32), 12: Widths(1408, 5632, 22), 24: Widths(1024, 4096, 16)},
}
"""The paper's models, by size and number of layers (Oncescu et al. 2026, arXiv:2604.21215, "C4 pretraining"). The
heads of the deepest ones follow from the paper's head width of 64."""

_COUNTS = (
    *("layers", "width", "mlp_width", "heads", "seq_len", "batch_size", "micro_batch_size", "steps"),
    *("validation_tokens", "evaluations", "checkpoint_every"),
)
"""Options that are whole numbers of at least 1."""
_POSITIVE = (math.ulp(0.0), math.inf, "a positive number")
_FRACTION = (0.0, 1.0, "at least 0 and below 1")
_RANGES: dict[str, tuple[float, float, str]] = {
    "lr": (math.ulp(0.0), 10.0, "a positive number below 10"),
    "eps": _POSITIVE,
    "clip": _POSITIVE,
    "weight_decay": (0.0, math.inf, "0 or a positive number"),
    "beta1": _FRACTION,
    "beta2": _FRACTION,
    "warmup_fraction": _FRACTION,
    "final_lr_fraction": (0.0, math.nextafter(1.0, 2.0), "between 0 and 1"),
}
"""For each real-valued option: its least value, the value that it must stay below, and both limits in words."""


@dataclass(frozen=True, kw_only=True)
class Config(Tracking):
    """Configuration of a run: pretraining of a language model on C4, or on other text.

    Attributes:
        preset: paper, tiny, which trains in a minute on a CPU, ranking or 30m, the models of runners.c4.reference.
        size: size of the paper's model; size and layers determine width, MLP and heads.
        layers: stacked layers.
        mixer: the layer: a registered name, package.module:Class, or a stack such as "3*gated-deltanet+transformer".
        width: model width, replaces the paper's; unless given, the MLP is then 4 times as wide and a head 64 wide.
        mlp_width: hidden width of the MLP, replaces the paper's.
        heads: heads of layers that have heads, replaces the paper's (32 for 300M with 6 layers).
        parametrisation: the paper's, or that of the authors' code (layer norms, other scales) for rt and transformer.
        seq_len: target tokens of a sequence.
        batch_size: sequences per step, of all processes together.
        micro_batch_size: sequences per forward pass in a process; unless given, the process's whole share of a step.
        steps: optimizer steps; the paper takes 25,000 for 300M, its 150M models read about half the tokens.
        lr: peak learning rate.
        beta1: decay of AdamW's first moment.
        beta2: decay of AdamW's second moment.
        eps: number added to the root of AdamW's second moment.
        weight_decay: AdamW's weight decay of matrices.
        clip: largest norm of the gradient; a larger gradient is scaled down to it.
        warmup_fraction: fraction of the steps in which the learning rate rises.
        final_lr_fraction: learning rate of the last step as a fraction of the peak.
        seed: seed of the initial parameters and of the order of the data.
        search: train the paper's grid of learning rates and beta2 instead of one run.
        tokenizer: name on the hub, or a tokenizer.json; unless given, the one that convert made with the data, or T5's.
        data: C4-format json.gz files or folders of them; unless given, allenai/c4 streamed from the hub.
        validation_tokens: tokens of the validation split that an evaluation reads.
        evaluations: number of evaluations during training, at log-spaced steps including the last step.
        downstream: folder of multiple-choice sets (jsonl or jsonl.gz) to evaluate at the end.
        recompute: compute activations again in the backward pass instead of keeping them: less memory, more time.
        parallel: with several processes, ddp keeps the whole model in each process, and fsdp a part of it.
        device: auto takes the GPU if there is one.
        checkpoint_every: steps between checkpoints.
        dry_run: print parameters, FLOPs, tokens, memory (of a GPU unless --device is cpu) and time; train nothing.
    """

    preset: Literal["paper", "tiny", "ranking", "30m"] = "paper"
    size: Literal["150m", "300m"] = "300m"
    layers: int = 6
    mixer: str = "rt"
    width: int | None = None
    mlp_width: int | None = None
    heads: int | None = None
    parametrisation: Parametrisation = "paper"
    seq_len: int = 512
    batch_size: int = 512
    micro_batch_size: int | None = None
    steps: int = 25_000
    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    warmup_fraction: float = 0.4
    final_lr_fraction: float = 0.1
    seed: int = 0
    search: bool = False
    tokenizer: str | None = None
    data: tuple[str, ...] = ()
    validation_tokens: int = 2**22
    evaluations: int = 12
    downstream: str | None = None
    recompute: bool = False
    parallel: Literal["ddp", "fsdp"] = "ddp"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    checkpoint_every: int = 500
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ValueError: an option is invalid; the message is one line and says what to do.
        """
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{flag_of(name)} {value} must be at least 1")
        for name, (low, high, words) in _RANGES.items():
            value = getattr(self, name)
            if not (low <= value < high):  # false for NaN
                raise ValueError(f"{flag_of(name)} {value:g} must be {words}")

        if not 0 <= self.seed < 2**64:
            raise ValueError(f"--seed {self.seed} must be 0 or more, and below 2**64")
        if self.validation_tokens < self.seq_len:
            raise ValueError(
                f"--validation-tokens {self.validation_tokens} fill no sequence: give {self.seq_len} at least"
            )
        self.shape()
        self.check_shares(1)
        self.check_tracking()

    def check_shares(self, world_size: int) -> None:
        """Check that processes can share a batch.

        Raises:
            ValueError: the sequences cannot be divided.
        """
        if self.batch_size % world_size:
            raise ValueError(f"--batch-size {self.batch_size} must be a multiple of the {world_size} processes")
        share, micro = self.batch_size // world_size, self.micro_batch_size
        if micro is not None and share % micro:
            raise ValueError(
                f"--micro-batch-size {micro} must divide the {share} sequences that a process has of each step"
            )

    @property
    def tokens(self) -> int:
        """Target tokens that training reads."""
        return self.steps * self.batch_size * self.seq_len

    def shape(self) -> Shape:
        """Return the shape of each layer.

        Raises:
            ValueError: the paper has no such model and no width is given.
        """
        width, mlp_width = (self.width, 4 * self.width) if self.width is not None else self._paper()[:2]
        return Shape(width=width, mlp_width=self.mlp_width or mlp_width, layers=self.layers)

    def head_count(self) -> int:
        """Return the number of heads of a layer that has heads.

        Raises:
            ValueError: as ``shape``, or the paper's head width does not divide the given width.
        """
        if self.heads is not None:
            return self.heads
        if self.width is None:
            return self._paper().heads
        if self.width % HEAD_WIDTH:
            raise ValueError(f"width {self.width} is no multiple of the head width {HEAD_WIDTH}: give --heads as well")
        return self.width // HEAD_WIDTH

    def sequences_at_once(self, world_size: int = 1) -> int:
        """Return the number of sequences per forward pass of training in each of ``world_size`` processes."""
        return self.micro_batch_size or self.batch_size // world_size

    def _paper(self) -> Widths:
        """Return the widths of the paper's model.

        Raises:
            ValueError: the paper has no such model.
        """
        if (widths := SIZES[self.size].get(self.layers)) is None:
            known = "; ".join(f"{size} with {', '.join(map(str, rows))} layers" for size, rows in SIZES.items())
            raise ValueError(
                f"the paper has no {self.size} model of {self.layers} layers, only {known}: choose one, or give --width"
            )
        return widths


PRESETS: dict[str, Config] = {
    "paper": Config(),
    "tiny": Config(
        layers=2,
        width=64,
        heads=4,
        seq_len=32,
        batch_size=8,
        steps=100,
        lr=1e-2,
        warmup_fraction=0.1,
        validation_tokens=2048,
        evaluations=4,
        checkpoint_every=20,
        preset="tiny",
    ),
    "ranking": Config(
        layers=4,
        width=256,
        heads=8,
        seq_len=512,
        batch_size=64,
        steps=4000,
        validation_tokens=2**19,
        preset="ranking",
    ),
    "30m": Config(
        layers=6,
        width=640,
        seq_len=512,
        batch_size=64,
        steps=9200,
        validation_tokens=2**19,
        preset="30m",
    ),
}
"""Defaults of each preset."""


def with_tokenizer(config: Config) -> Config:
    """Return the configuration with the tokenizer that ``convert`` has made with its data, unless another is given.

    Raises:
        ValueError: the data have different tokenizers.
    """
    if config.tokenizer is not None:
        return config
    folders = [path if path.is_dir() else path.parent for path in map(Path, config.data)]
    files = [file for file in map(file_beside, folders) if file.is_file()]
    if len({file.read_bytes() for file in files}) > 1:
        raise ValueError(f"the data have different tokenizers, {' and '.join(map(str, files))}: give --tokenizer")
    return replace(config, tokenizer=str(files[0]) if files else TOKENIZER)


INCIDENTAL = (
    *("device", "out", "wandb", "checkpoint_every", "search", "dry_run", "preset", "parallel", "micro_batch_size"),
    *("recompute", "data", "tokenizer", "downstream", "wandb_project", "wandb_entity", "wandb_tags"),
)
"""Options that do not change a run's identity: where and how it is computed and evaluated.

``data`` and ``tokenizer`` are among them because the hash of the corpus covers both.
"""
VARIED = ("lr", "weight_decay", "beta2", "seed")
"""Options in which the runs of a study differ."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a run is.

    Attributes:
        study: name of the study.
        fingerprint: SHA-256 of settings and corpus, and of the text of a user's module; equal for a whole study.
        folder: folder of the run's files.
    """

    study: str
    fingerprint: str
    folder: Path


def identity(config: Config, options: dict[str, Any], corpus: str) -> Identity:
    """Return the identity of a run; another configuration, corpus or module has another folder.

    Args:
        config: configuration of the run.
        options: options of the layer that differ from its defaults.
        corpus: name of the folder of the run's corpus.
    """
    values = {name: value for name, value in asdict(config).items() if name not in INCIDENTAL}
    varied = {name: values.pop(name) for name in VARIED}

    text = text_of(config.mixer) if is_path(config.mixer) else ""
    fingerprint = _digest([values, options, corpus, text])

    # The digests identify study and run; the rest of their names describes them to a reader.
    label = re.sub(r"[^\w.+-]+", "-", variant_label(config.mixer, options, 1).replace(":", "."))[:LONGEST_LABEL]
    kind = f"{label}-{config.shape().width}x{config.layers}"
    kind += "-authors" if config.parametrisation == "authors" else ""
    point = f"lr{config.lr:g}-beta{config.beta2:g}-seed{config.seed}"
    digest = _digest([fingerprint, varied])[:8]
    folder = config.out / "c4" / f"{kind}-{point}-{digest}"
    return Identity(study=f"{kind}-{fingerprint[:8]}", fingerprint=fingerprint, folder=folder)


def config_of(info: dict[str, Any]) -> Config:
    """Return the configuration in the description of a run.

    Raises:
        KeyError: a setting is missing.
        TypeError: there is one that this version does not have.
        ValueError: one has a value that this version refuses.
    """
    values = info["config"]
    return Config(**{**values, "data": tuple(values["data"]), "out": Path(values["out"])})


def _digest(content: Any) -> str:
    return sha256(dumps(content, sort_keys=True, default=str).encode()).hexdigest()
