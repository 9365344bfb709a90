"""The pretraining loop: one run, from its newest checkpoint to its result.

The paper's recipe (section "C4 pretraining experiments"): AdamW, gradient clipping, linear warm-up over 40% of the
steps, then a cosine to 10% of the peak. On a GPU products are bfloat16 and master weights float32, and the layers run
as two CUDA graphs, forward and backward, captured before the first step: a Recurrent Transformer layer is some ten
thousand small kernels, which no Python loop launches fast enough. Step k reads the same tokens whatever the number of
processes.
"""

import errno
import math
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, replace
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from json import dumps
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock, Timeout

from runners.c4 import checkpoints
from runners.c4.config import Config
from runners.c4.corpus.prepare import Corpus, load_tokenizer
from runners.c4.corpus.windows import Windows
from runners.c4.cost import flops_per_token
from runners.c4.curve import Row, append_curve, read_curve, write_curve
from runners.c4.distributed import World, whole
from runners.c4.evaluation.downstream import Item, Scores, evaluate_items, read_items
from runners.c4.evaluation.evaluate import log_spaced, validation_loss
from runners.c4.model import build
from runners.c4.step import Stepper, learning_rate
from runners.files import read_json, write_atomically, write_json
from runners.interrupt import StoppedError, asked_to_stop
from runners.provenance import versions

PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
}
"""Dense bfloat16 operations a second of a GPU, by words of its name (vendor's data sheets); the first found counts."""
UNNAMED = (
    *("device", "out", "wandb", "checkpoint_every", "search", "dry_run", "preset", "parallel", "micro_batch_size"),
    *("recompute", "data", "tokenizer", "downstream"),
)
"""Options that do not make another run: where and how it is computed and evaluated; the corpus stands for its data."""


class RunError(RuntimeError):
    """A run cannot go on; the message is one line and says what to do."""


class DivergedError(RunError):
    """Loss or gradient of a run were not finite."""


class BusyError(RunError):
    """Another process is training the run."""


class EvaluationStoppedError(StoppedError):
    """Ctrl-C while a trained run answered questions."""

    def __str__(self) -> str:
        return "interrupted: the run is trained, the same command goes on with the downstream sets"


class Watcher(Protocol):
    """Told what a run does, in the first process; draws progress, logs to a tracker."""

    def started(self, name: str, description: dict[str, Any], row: Row | None) -> None:
        """A run begins, or goes on after ``row``."""

    def stepped(self, row: Row) -> None:
        """A step is done."""

    def evaluating(self, name: str, number: int, sets: int) -> None:
        """The run is trained and begins a downstream set, the ``number``-th of ``sets``."""

    def finished(self, result: dict[str, Any]) -> None:
        """The run is done and its result stored."""


def run_folder(config: Config, options: dict[str, Any], corpus: Corpus) -> Path:
    """Folder of a run's files; another configuration or corpus has another one."""
    values = {name: value for name, value in asdict(config).items() if name not in UNNAMED}
    identity = [values, options, corpus.folder.name]
    digest = sha256(dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:8]
    kind = f"{config.mixer}-{config.shape().width}x{config.layers}".replace(":", ".")
    return config.out / "c4" / f"{kind}-lr{config.lr:g}-beta{config.beta2:g}-seed{config.seed}-{digest}"


def train(
    config: Config, options: dict[str, Any], corpus: Corpus, world: World, watchers: Sequence[Watcher]
) -> dict[str, Any]:
    """Train one run to its end, or take the result of a finished one; with the scores of ``config.downstream``.

    Raises:
        RunError: the run diverged (also before), is another process's or of other code, or memory or disk are full.
        StoppedError: it was asked to stop, in training or after it.
        ValueError: the downstream items cannot be read.
    """
    folder = run_folder(config, options, corpus)
    items = {} if config.downstream is None else read_items(config.downstream)
    with _only_one(folder, world):
        try:
            result = _result(folder, config, options, corpus, world, watchers)
            if items:
                result["downstream"] = _downstream(folder, config, items, world, watchers)
            for watcher in watchers if world.is_first else ():
                watcher.finished(result)
            return result
        except torch.OutOfMemoryError as error:
            micro = config.micro_batch_size or config.batch_size // world.size
            raise RunError(f"out of GPU memory: lower --micro-batch-size (now {micro}) or give --recompute") from error
        except checkpoints.DiskFullError as error:
            raise RunError(str(error)) from error
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise RunError(f"no space in {folder}: free some and run the same command again") from error


def _result(
    folder: Path, config: Config, options: dict[str, Any], corpus: Corpus, world: World, watchers: Sequence[Watcher]
) -> dict[str, Any]:
    """Of a run that is finished, or is now."""
    begun = read_json(folder / "run.json")
    if begun is not None and begun["code"] != checkpoints.run_code(config):
        raise RunError(
            f"the code of {config.mixer} or of its training is not the one that {folder} was begun with: delete this "
            "folder or give another --out to train anew, or take the old code back"
        )
    if (result := read_json(folder / "result.json")) is not None:
        return dict(result)
    if (diverged := read_json(folder / "diverged.json")) is not None:
        raise DivergedError(f"{diverged['message']} (delete {folder / 'diverged.json'} to try again)")
    return _Run(folder, config, options, corpus, world, watchers).finish()


def _downstream(
    folder: Path, config: Config, items: dict[str, list[Item]], world: World, watchers: Sequence[Watcher]
) -> dict[str, Any]:
    """Scores of the last checkpoint on the questions of each set; those of the same questions and figures are kept."""
    path, figures = folder / "downstream.json", [field.name for field in fields(Scores)]
    digest = sha256(repr((figures, items)).encode()).hexdigest()
    known = read_json(path)
    world.wait()
    if known is None or known["items"] != digest:
        model, _, tokenizer = checkpoints.load_model(folder, world.device)
        batch = config.micro_batch_size or config.batch_size // world.size
        scores = {}
        try:
            for number, (name, questions) in enumerate(items.items(), start=1):
                for watcher in watchers if world.is_first else ():
                    watcher.evaluating(name, number, len(items))
                scores[name] = asdict(evaluate_items(model, tokenizer, questions, batch, config.seq_len, world.device))
        except KeyboardInterrupt:
            raise EvaluationStoppedError(config.steps, [signal.SIGINT]) from None
        if world.is_first:
            write_json(path, {"items": digest, "scores": scores})
        world.wait()
        known = read_json(path)
    return dict(known["scores"])


@contextmanager
def _only_one(folder: Path, world: World) -> Iterator[None]:
    """Keep other commands away from a run's folder, and take away what a killed one has left half-written."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        busy = 0.0
        if world.is_first:
            try:
                stack.enter_context(FileLock(folder / ".lock", timeout=0))
                checkpoints.clear_leftovers(folder)
            except Timeout:
                busy = 1.0
        if world.mean(torch.tensor(busy, device=world.device)) > 0:
            raise BusyError(f"another process is training {folder}: wait for it, or give another --seed or --out")
        yield


class _Run:
    def __init__(
        self,
        folder: Path,
        config: Config,
        options: dict[str, Any],
        corpus: Corpus,
        world: World,
        watchers: Sequence[Watcher],
    ) -> None:
        self.folder, self.config, self.options, self.corpus = folder, config, options, corpus
        self.world, self.watchers = world, watchers if world.is_first else ()
        described = read_json(folder / "run.json")
        if described is None:
            corpus_info = {
                "folder": corpus.folder.name,
                "vocab_size": corpus.manifest.vocab_size,
                "train_tokens": corpus.tokens("train"),
            }
            read = replace(config, validation_tokens=corpus.targets("validation", config.seq_len))
            described = checkpoints.describe_run(read, options, corpus_info)
            if world.is_first:
                tokenizer = load_tokenizer(config.tokenizer)
                write_atomically(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))
                write_json(folder / "run.json", described)
        world.wait()
        self.described: dict[str, Any] = described
        self.windows = Windows(corpus, "train", config.seq_len, config.seed)
        self.validation = Windows(corpus, "validation", config.seq_len, None)
        model = build(config, options, corpus.manifest.vocab_size).to(world.device)
        torch.manual_seed(config.seed)
        self.stepper = Stepper(model, config, world)
        self.peak = peak_flops(world.device)
        self.flops = 0 if self.peak is None else flops_per_token(config, options, corpus.manifest.vocab_size)
        self.rows: list[Row] = []
        self.step = 0
        if (path := checkpoints.newest(folder)) is not None:
            self.step = checkpoints.restore(path, self.stepper.objective, self.stepper.optimizer)["step"]
            self.rows = [row for row in read_curve(folder) if row.step <= self.step]
        self.stepper.keep_gradients()

    def finish(self) -> dict[str, Any]:
        """Train what is left, measure, store."""
        config, first = self.config, self.world.is_first
        if first:
            write_curve(self.folder, self.rows)
            for watcher in self.watchers:
                watcher.started(self.folder.name, self.described, self.rows[-1] if self.rows else None)
        evaluated = set(log_spaced(config.steps, config.evaluations))
        with asked_to_stop() as asked:
            while self.step < config.steps:
                row, stop = self._advance(asked)
                if row.step in evaluated:
                    row = replace(row, validation_loss=self._validate())
                    if not math.isfinite(row.validation_loss or 0.0):
                        raise self._diverged(f"validation loss {row.validation_loss}", row.step)
                self.rows.append(row)
                if first:
                    append_curve(self.folder, row)
                    for watcher in self.watchers:
                        watcher.stepped(row)
                if stop or row.step % config.checkpoint_every == 0 or row.step == config.steps:
                    self._save()
                if stop and row.step < config.steps:
                    raise StoppedError(row.step, asked)
            if self.world.mean(torch.tensor([float(bool(asked))], device=self.world.device)).item():
                raise StoppedError(self.step, asked)
        result = self._result()
        if first:
            write_json(self.folder / "result.json", result)
        self.world.wait()
        return result

    def _advance(self, asked: list[int]) -> tuple[Row, bool]:
        """One optimizer step; also whether any process was asked to stop."""
        config, world, started = self.config, self.world, time.perf_counter()
        batch = self.windows.batch(self.step, config.batch_size, world.rank, world.size)
        lr = learning_rate(config, self.step)
        for group in self.stepper.optimizer.param_groups:
            group["lr"] = lr
        loss, norm = self.stepper.step(torch.from_numpy(batch).to(world.device))
        asked_now = loss.new_tensor(float(bool(asked)))
        mean_loss, grad_norm, stop = world.mean(torch.stack([loss, norm, asked_now])).tolist()
        if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
            raise self._diverged(f"loss {mean_loss} or its gradient", self.step + 1)
        seconds = time.perf_counter() - started
        speed = config.batch_size * config.seq_len / seconds
        on_gpu = world.device.type == "cuda"
        self.step += 1
        row = Row(
            step=self.step,
            tokens=self.step * config.batch_size * config.seq_len,
            loss=mean_loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens_per_second=speed,
            mfu=None if self.peak is None else speed * self.flops / (self.peak * world.size),
            memory_gib=torch.cuda.max_memory_allocated(world.device) / 2**30 if on_gpu else 0.0,
            seconds=seconds + (self.rows[-1].seconds if self.rows else 0.0),
        )
        return row, stop > 0

    def _diverged(self, what: str, step: int) -> DivergedError:
        last = checkpoints.newest(self.folder)
        documents = self.windows.documents(step - 1, self.config.batch_size)
        message = (
            f"{what} is not finite at step {step}, with the batch of documents "
            f"{', '.join(documents[:8])}{' and others' if len(documents) > 8 else ''}; last good checkpoint: "
            f"{last or 'none'}: lower --lr"
        )
        if self.world.is_first:
            write_json(self.folder / "diverged.json", {"step": step, "documents": documents, "message": message})
        return DivergedError(message)

    def _save(self) -> None:
        objective, optimizer = self.stepper.objective, self.stepper.optimizer
        checkpoints.save(self.folder, self.step, objective, optimizer, self.described, self.world.is_first)

    def _validate(self) -> float:
        stepper, tokens, world = self.stepper, self.config.validation_tokens, self.world
        with whole(stepper.objective):
            return validation_loss(
                stepper.model, self.validation, tokens, stepper.micro, world.device, world.rank, world.size
            )

    def _result(self) -> dict[str, Any]:
        last = self.rows[-1]
        liger = {"liger-kernel": version("liger_kernel") if find_spec("liger_kernel") else None}
        result: dict[str, Any] = {**self.described, "versions": versions() | liger, **asdict(last)}
        steady = sorted(row.tokens_per_second for row in self.rows)
        result["tokens_per_second"] = steady[len(steady) // 2]
        return result


def peak_flops(device: torch.device) -> float | None:
    """Peak of bfloat16 products, operations a second; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for words, flops in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name)), None)
