"""The training loop of one run, from its newest checkpoint to its result.

The paper's recipe (section "C4 pretraining experiments"): AdamW, gradient clipping, linear warm-up over 40% of the
steps, then a cosine to 10% of the peak. On a GPU, matrix products are in bfloat16 and master weights in float32. The
layers run as two CUDA graphs, forward and backward, captured before the first step, because a Recurrent Transformer
layer consists of about ten thousand small kernels, which a Python loop launches too slowly. Step k reads the same
tokens with any number of processes.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runners.c4 import checkpoints
from runners.c4.config import Config
from runners.c4.cost import flops_per_token
from runners.c4.curve import Row, append_curve, read_curve, write_curve
from runners.c4.data.corpus import Corpus, Windows, bytes_per_token
from runners.c4.data.tokenizer import load_tokenizer
from runners.c4.distributed import World, whole
from runners.c4.errors import DivergedError, RunError
from runners.c4.evaluation.evaluate import log_spaced, validation_loss, windows_together
from runners.c4.gpu_peak import peak_flops
from runners.c4.identity import describe_run
from runners.c4.model import build
from runners.c4.step import Stepper, learning_rate
from runners.c4.watchers import Watcher
from runners.files import DamagedFileError, checksum, load_tensors, read_json, write_atomically, write_json
from runners.interrupt import StoppedError, asked_to_stop
from runners.provenance import versions

NAMED_DOCUMENTS = 8
"""Largest number of documents named in the message of a diverged run."""


class Loop:
    """State of a run in training: model, optimizer, data, and the steps done.

    Args:
        folder: folder of the run, which no other command uses.
        config: configuration of the run.
        options: options of the layer that were set.
        corpus: its data.
        world: the processes.
        watchers: objects to inform, in the first process.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        options: dict[str, Any],
        corpus: Corpus,
        world: World,
        watchers: Sequence[Watcher],
    ) -> None:
        self.folder = folder
        self.config = config
        self.world = world
        self.watchers = watchers if world.is_first else ()

        # Data.
        self.windows = Windows(corpus, "train", config.seq_len, config.seed)
        self.validation = Windows(corpus, "validation", config.seq_len, None)
        self.described = self._describe(options, corpus)

        # Model and optimizer.
        vocab_size = corpus.manifest.vocab_size
        model = build(config, options, vocab_size).to(world.device)
        torch.manual_seed(config.seed)
        self.stepper = Stepper(model, config, world)

        # Operations per token, and the GPU's peak speed, for the utilisation.
        self.peak = peak_flops(world.device)
        self.flops = 0 if self.peak is None else flops_per_token(config, options, vocab_size)

        # Steps done.
        self.rows: list[Row] = []
        self.step = 0
        if (found := checkpoints.load_newest(folder, self._load, world.is_first)) is not None:
            path, tensors, self.rows = found
            self.step = len(self.rows)
            checkpoints.restore(path, tensors, self.stepper.objective, self.stepper.optimizer)
        self.stepper.keep_gradients()

    def finish(self) -> dict[str, Any]:
        """Train the remaining steps; store the result and return it.

        Raises:
            DivergedError: a loss or a gradient is not finite.
            RunError: that is so before any training.
            StoppedError: the process was asked to stop; its state is saved.
        """
        config, first = self.config, self.world.is_first
        if first:
            write_curve(self.folder, self.rows)
            for watcher in self.watchers:
                watcher.started(self.folder.name, self.described, self.rows[-1] if self.rows else None)

        evaluated = set(log_spaced(config.steps, config.evaluations))
        with asked_to_stop(self.world.is_first) as asked:
            while self.step < config.steps:
                row, stop = self._advance(asked)
                self._record(row if row.step not in evaluated else self._evaluated(row))

                if stop or row.step % config.checkpoint_every == 0 or row.step == config.steps:
                    self._save()
                if stop and row.step < config.steps:
                    raise StoppedError(row.step, asked)

            # A signal may have come during the last step.
            if self.world.mean(torch.tensor([float(bool(asked))], device=self.world.device)).item():
                raise StoppedError(self.step, asked)

        result = self._result()
        if first:
            write_json(self.folder / "result.json", result)
        self.world.wait()
        return result

    def _describe(self, options: dict[str, Any], corpus: Corpus) -> dict[str, Any]:
        """Return the description of the run; write it and the tokenizer if the run is new or the files are lost."""
        config, path = self.config, self.folder / "tokenizer.json"
        described: dict[str, Any] | None = read_json(self.folder / "run.json")
        self.world.wait()  # before the first process writes

        # The tokenizer comes first, because the description holds its checksum.
        if self.world.is_first and not _is_intact(path, described):
            tokenizer = load_tokenizer(config.tokenizer)
            write_atomically(path, lambda temporary: tokenizer.save(str(temporary)))
        self.world.wait()

        if described is None:
            corpus_info = {
                "folder": corpus.folder.name,
                "vocab_size": corpus.manifest.vocab_size,
                "train_tokens": corpus.tokens("train"),
                "bytes_per_token": bytes_per_token(self.validation, config.seq_len, load_tokenizer(config.tokenizer)),
                checkpoints.TOKENIZER_CHECKSUM: checksum(path.read_bytes()),
            }
            read = replace(config, validation_tokens=corpus.targets("validation", config.seq_len))
            described = describe_run(read, options, corpus_info)

            if self.world.is_first:
                write_json(self.folder / "run.json", described)

        self.world.wait()
        return described

    def _advance(self, asked: list[int]) -> tuple[Row, bool]:
        """Do one optimizer step; return its row, and whether any process was asked to stop."""
        config, world = self.config, self.world
        started = time.perf_counter()

        # This process's share of the batch.
        batch = self.windows.batch(self.step, config.batch_size, world.rank, world.size)
        lr = learning_rate(config, self.step)
        for group in self.stepper.optimizer.param_groups:
            group["lr"] = lr
        loss, norm = self.stepper.step(torch.from_numpy(batch).to(world.device))

        # Means over the processes.
        asked_now = loss.new_tensor(float(bool(asked)))
        mean_loss, grad_norm, stop = world.mean(torch.stack([loss, norm, asked_now])).tolist()
        if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
            of_gradient = f"the gradient's norm {grad_norm}, at loss {mean_loss:.4f},"
            what = of_gradient if math.isfinite(mean_loss) else f"loss {mean_loss}"
            if self.step == 0:  # no learning rate has had an effect yet
                raise RunError(f"{what} is not finite before any training: correct the layer")
            raise self._diverged(what, self.step + 1)

        seconds = time.perf_counter() - started
        self.step += 1
        return self._row(mean_loss, grad_norm, lr, seconds), stop > 0

    def _row(self, loss: float, grad_norm: float, lr: float, seconds: float) -> Row:
        """Return the row of the step that was just done and took ``seconds``."""
        config, world = self.config, self.world
        speed = config.batch_size * config.seq_len / seconds
        on_gpu = world.device.type == "cuda"

        return Row(
            step=self.step,
            tokens=self.step * config.batch_size * config.seq_len,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens_per_second=speed,
            mfu=None if self.peak is None else speed * self.flops / (self.peak * world.size),
            memory_gib=torch.cuda.max_memory_allocated(world.device) / 2**30 if on_gpu else 0.0,
            seconds=seconds + (self.rows[-1].seconds if self.rows else 0.0),
        )

    def _evaluated(self, row: Row) -> Row:
        """Return the row with the validation loss."""
        stepper, world = self.stepper, self.world
        tokens, together = self.config.validation_tokens, windows_together(self.config, world.device, world.size)

        with whole(stepper.objective):
            loss = validation_loss(
                stepper.model, self.validation, tokens, together, world.device, world.rank, world.size
            )

        if not math.isfinite(loss):
            raise self._diverged(f"validation loss {loss}", row.step)
        return replace(row, validation_loss=loss)

    def _record(self, row: Row) -> None:
        """Keep a row, write it, and inform the watchers."""
        self.rows.append(row)
        if self.world.is_first:
            append_curve(self.folder, row)
            for watcher in self.watchers:
                watcher.stepped(row)

    def _diverged(self, what: str, step: int) -> DivergedError:
        """Record in a file that ``what`` is not finite at ``step``; return the error."""
        last = checkpoints.newest(self.folder)
        documents = self.windows.documents(step - 1, self.config.batch_size)
        named = ", ".join(documents[:NAMED_DOCUMENTS])
        others = " and others" if len(documents) > NAMED_DOCUMENTS else ""
        message = (
            f"{what} is not finite at step {step}, with the batch of documents {named}{others}; last good checkpoint: "
            f"{last or 'none'}: lower --lr"
        )

        if self.world.is_first:
            write_json(self.folder / "diverged.json", {"step": step, "documents": documents, "message": message})
        return DivergedError(message)

    def _load(self, path: Path) -> tuple[Path, dict[str, Tensor], list[Row]]:
        """Return a checkpoint's path, its tensors, and the rows of the curve up to its step.

        Raises:
            DamagedFileError: the checkpoint or one of these rows is damaged.
        """
        tensors, info = load_tensors(path)
        return path, tensors, read_curve(self.folder, info["step"])

    def _save(self) -> None:
        """Write a checkpoint."""
        objective, optimizer = self.stepper.objective, self.stepper.optimizer
        checkpoints.save(self.folder, self.step, objective, optimizer, self.described, self.world.is_first)

    def _result(self) -> dict[str, Any]:
        """Return the result: the run's description, the versions of libraries, the last row, and the median speed."""
        liger = {"liger-kernel": version("liger_kernel") if find_spec("liger_kernel") else None}
        result: dict[str, Any] = {**self.described, "versions": versions() | liger, **asdict(self.rows[-1])}

        speeds = sorted(row.tokens_per_second for row in self.rows)
        result["tokens_per_second"] = speeds[len(speeds) // 2]
        return result


def _is_intact(tokenizer: Path, described: dict[str, Any] | None) -> bool:
    """Return whether the tokenizer file of a described run exists and is undamaged."""
    if described is None or not tokenizer.is_file():
        return False

    try:
        checkpoints.check_tokenizer(tokenizer, described)
    except DamagedFileError:
        return False
    return True
