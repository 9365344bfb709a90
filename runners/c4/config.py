"""Every option of a pretraining run, and the paper's table of model sizes."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from mixers.base import Shape
from runners.cli import LARGEST_LR, check_out, check_seed
from runners.guidance import flag_of
from runners.tracking import Mode, Tracking

Parametrisation = Literal["paper", "authors"]
HEAD_WIDTH = 64
"""Width of a head in the paper's models (appendix "C4 pretraining experiments")."""


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


OF_THE_MODEL = ("heads",)
"""Options of layers that follow from the size of the model, so that they are options only of the program."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Pretrain a language model of any registered layer on C4.

    In place of options, convert FOLDER TEXTS makes data of text files, compare tabulates runs, generate RUN continues
    texts, export RUN FOLDER writes the model for use elsewhere, gradients RUN measures how far back it reaches, and
    lm_eval runs lm-evaluation-harness: see their --help.

    Attributes:
        preset: paper, tiny, which trains in a minute on a CPU, ranking or 30m, the models of runners.c4.reference.
        size: size of the paper's model; size and layers determine width, MLP and heads.
        layers: stacked layers.
        mixer: layer to train: a registered name or package.module:Class; a command trains several one after another.
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
        seed: seed of the initial parameters and of the order of the data; a command trains several one after another.
        search: train the paper's grid of learning rates and beta2 instead of one run.
        tokenizer: name on the hub, or a tokenizer.json; unless given, the one that convert made with the data, or T5's.
        data: C4-format json.gz files or folders of them; unless given, allenai/c4 streamed from the hub.
        validation_tokens: tokens of the validation split that an evaluation reads.
        evaluations: number of evaluations during training, at log-spaced steps including the last step.
        downstream: folder of multiple-choice sets (jsonl or jsonl.gz) to evaluate at the end.
        recompute: compute activations again in the backward pass instead of keeping them: less memory, more time.
        parallel: with several processes, ddp keeps the whole model in each process, and fsdp a part of it.
        device: auto takes the GPU if there is one.
        out: folder of results.
        checkpoint_every: steps between checkpoints.
        wandb: Weights & Biases mode.
        wandb_project: W&B project, c4 unless given.
        wandb_entity: W&B user or team, the default of your login unless given.
        wandb_tags: W&B tags of each run.
        dry_run: print parameters, FLOPs, tokens, memory (of a GPU unless --device is cpu) and time; train nothing.
    """

    groups: ClassVar[dict[str, str]] = {
        "preset": "model",
        "seq_len": "training",
        "tokenizer": "data",
        "recompute": "machine",
        "out": "output",
    }
    """First field of each group of the help; the fields after it belong to the same group."""

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
    tokenizer: str = "google-t5/t5-base"
    data: tuple[str, ...] = ()
    validation_tokens: int = 2**22
    evaluations: int = 12
    downstream: str | None = None
    recompute: bool = False
    parallel: Literal["ddp", "fsdp"] = "ddp"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("results")
    checkpoint_every: int = 500
    wandb: Mode = "disabled"
    wandb_project: str | None = None
    wandb_entity: str | None = None
    wandb_tags: tuple[str, ...] = ()
    dry_run: bool = False

    @property
    def tracking(self) -> Tracking:
        """Settings of Weights & Biases."""
        return Tracking(
            mode=self.wandb,
            folder=self.out,
            project=self.wandb_project,
            entity=self.wandb_entity,
            tags=self.wandb_tags,
        )

    def shape(self) -> Shape:
        """Return the shape of each layer.

        Raises:
            ValueError: the paper has no such model and no width is given.
        """
        if self.width is not None:
            width, mlp_width = self.width, 4 * self.width
        else:
            width, mlp_width, _ = self._table()
        return Shape(width=width, mlp_width=self.mlp_width or mlp_width, layers=self.layers)

    def head_count(self) -> int:
        """Return the number of heads of a layer that has heads.

        Raises:
            ValueError: as ``shape``, or the paper's head width does not divide the given width.
        """
        if self.heads is not None:
            return self.heads
        if self.width is None:
            return self._table().heads

        if self.width % HEAD_WIDTH:
            raise ValueError(f"width {self.width} is no multiple of the head width {HEAD_WIDTH}: give --heads as well")
        return self.width // HEAD_WIDTH

    def sequences_at_once(self, world_size: int = 1) -> int:
        """Return the number of sequences per forward pass of training in each of ``world_size`` processes."""
        return self.micro_batch_size or self.batch_size // world_size

    def check(self, world_size: int = 1) -> None:
        """Check every option.

        Raises:
            ValueError: ``world_size`` processes cannot train this configuration; the message is one line and says what
                to do.
        """
        self._check_values()
        self.shape()
        check_seed(self.seed)
        check_out(self.out, writes=not self.dry_run)
        self.tracking.check()

        if self.validation_tokens < self.seq_len:
            raise ValueError(
                f"--validation-tokens {self.validation_tokens} fill no sequence: give {self.seq_len} at least"
            )

        # Shares of the batch.
        if self.batch_size % world_size:
            raise ValueError(
                f"--batch-size {self.batch_size} must be a multiple of the {world_size} processes: "
                f"give {_next_multiple(self.batch_size, world_size)}"
            )
        share = self.batch_size // world_size
        micro = self.micro_batch_size
        if micro is not None and share % micro:
            fitting = max(part for part in range(1, min(micro, share) + 1) if share % part == 0)
            raise ValueError(
                f"--micro-batch-size {micro} must divide the {share} sequences that a process has of each step: "
                f"give {fitting}"
            )

    def _check_values(self) -> None:
        """Check the range of each number.

        Raises:
            ValueError: a number is out of its range.
        """
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{flag_of(name)} {value} must be at least 1")
            if value is not None and value > (most := _MOST.get(name, _LARGEST)):
                raise ValueError(f"{flag_of(name)} {value} must be at most {most:,}")

        for name, (low, high, words) in _RANGES.items():
            value = getattr(self, name)
            if not (low <= value < high):  # false for NaN
                raise ValueError(f"{flag_of(name)} {value:g} must be {words}")

    def _table(self) -> Widths:
        """Return the widths of the paper's model.

        Raises:
            ValueError: the paper has no such model.
        """
        models = SIZES[self.size]
        if self.layers not in models:
            known = "; ".join(f"{size} with {_join(rows)} layers" for size, rows in SIZES.items())
            raise ValueError(
                f"the paper has no {self.size} model of {self.layers} layers, only {known}: choose one, or give --width"
            )
        return models[self.layers]


_COUNTS = (
    "layers",
    "width",
    "mlp_width",
    "heads",
    "seq_len",
    "batch_size",
    "micro_batch_size",
    "steps",
    "validation_tokens",
    "evaluations",
    "checkpoint_every",
)
"""Options that are whole numbers of at least 1."""
_MOST = {
    "layers": 10**3,
    "steps": 10**9,
    "evaluations": 10**5,
    "batch_size": 10**7,
    "micro_batch_size": 10**7,
    "seq_len": 10**7,
}
"""Largest values of options whose larger values would take years, or more memory than any machine has."""
_LARGEST = 10**12
"""Largest value of the other whole numbers; ``runners.c4.checks.check_memory`` refuses models that do not fit."""
_SMALLEST = math.ulp(0.0)
_POSITIVE = (_SMALLEST, math.inf, "a positive number")
_FRACTION = (0.0, 1.0, "at least 0 and below 1")
_RANGES: dict[str, tuple[float, float, str]] = {
    "lr": (_SMALLEST, math.nextafter(LARGEST_LR, math.inf), f"a positive number, at most {LARGEST_LR:g}"),
    "eps": _POSITIVE,
    "clip": _POSITIVE,
    "weight_decay": (0.0, math.inf, "0 or a positive number"),
    "beta1": _FRACTION,
    "beta2": _FRACTION,
    "warmup_fraction": _FRACTION,
    "final_lr_fraction": (0.0, math.nextafter(1.0, 2.0), "between 0 and 1"),
}
"""For each real-valued option: its least value, the value that it must stay below, and both limits in words."""


def _next_multiple(number: int, unit: int) -> int:
    """Round ``number`` up to a multiple of ``unit``."""
    return -(-number // unit) * unit


def _join(numbers: dict[int, Widths]) -> str:
    """List numbers in words."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
