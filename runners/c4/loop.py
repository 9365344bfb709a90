"""The training loop of one run, from its newest checkpoint to its last step.

The paper's recipe (section "C4 pretraining experiments"): AdamW, gradient clipping, linear warm-up over 40% of the
steps, then a cosine to 10% of the peak. On a GPU, matrix products are in bfloat16 and master weights in float32. The
layers run as two CUDA graphs, forward and backward, captured before the first step, because a Recurrent Transformer
layer consists of about ten thousand small kernels, which a Python loop launches too slowly. Step k reads the same
tokens with any number of processes.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from runners.c4.checkpoints import StepRow, load_newest, restore, rows_of, save
from runners.c4.config import Config
from runners.c4.costs import peak_flops
from runners.c4.data.corpus import Corpus, Windows
from runners.c4.distributed import World, whole
from runners.c4.evaluation.evaluate import log_spaced, validation_loss, windows_together
from runners.c4.model import build
from runners.c4.step import ModelStepper, learning_rate
from runners.interrupt import StoppedError, asked_to_stop


class RunError(RuntimeError):
    """A run cannot continue; the message is one line and says what to do."""


class DivergedError(RunError):
    """The loss or the gradient of a run was not finite."""


class Loop:
    """State of a run in training: model, optimizer, data, and the rows of the steps done.

    Args:
        folder: folder of the run, which no other command uses.
        config: configuration of the run.
        options: options of the layer that differ from its defaults.
        info: content of the run's ``run.json``.
        corpus: its data.
        world: the processes.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        options: dict[str, Any],
        info: dict[str, Any],
        corpus: Corpus,
        world: World,
    ) -> None:
        self.folder = folder
        self.config = config
        self.info = info
        self.world = world
        self.windows = Windows(corpus, "train", config.seq_len, config.seed)
        self.validation = Windows(corpus, "validation", config.seq_len, None)
        self.peak = peak_flops(world.device)

        # Model and optimizer.
        model = build(config, options, corpus.manifest.vocab_size).to(world.device)
        torch.manual_seed(config.seed)
        self.stepper = ModelStepper(model, config, world)

        # Steps done.
        self.rows: list[StepRow] = []
        if (newest := load_newest(folder, world.is_first)) is not None:
            _, tensors, _ = newest
            self.rows = rows_of(tensors)
            restore(folder, tensors, self.stepper.objective, self.stepper.optimizer)
        self.stepper.keep_gradients()

    def train_remaining(self, watch: Callable[[StepRow], object]) -> list[StepRow]:
        """Train the remaining steps, and return the rows of all.

        Args:
            watch: is called after each step in the first process.

        Raises:
            DivergedError: a loss or a gradient is not finite.
            RunError: that is so before any training.
            StoppedError: the process was asked to stop; its state is saved.
        """
        config, world, stepper = self.config, self.world, self.stepper
        evaluated = set(log_spaced(config.steps, config.evaluations))
        flops = self.info["costs"]["flops_per_token"]
        together = windows_together(config, world.device, world.size)

        with asked_to_stop() as asked:
            for step in range(len(self.rows), config.steps):
                started = time.perf_counter()

                # This process's share of the batch, and what a layer draws in training, as for dropout.
                torch.manual_seed(((config.seed * world.size + world.rank) * 2**32 + step) % 2**63)
                tokens_BT = torch.from_numpy(self.windows.batch(step, config.batch_size, world.rank, world.size))
                lr = learning_rate(config, step)
                for group in stepper.optimizer.param_groups:
                    group["lr"] = lr
                loss, norm = stepper.step(tokens_BT.to(world.device))

                # Means over the processes.
                asked_now = loss.new_tensor(float(bool(asked)))
                mean_loss, grad_norm, stop = world.mean(torch.stack([loss, norm, asked_now])).tolist()
                if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
                    of_gradient = f"the gradient's norm {grad_norm}, at loss {mean_loss:.4f},"
                    what = of_gradient if math.isfinite(mean_loss) else f"loss {mean_loss}"
                    if step == 0:  # no learning rate has had an effect yet
                        raise RunError(f"{what} is not finite before any training: correct the layer")
                    raise DivergedError(f"{what} is not finite at step {step + 1}: lower --lr")

                # Speed and memory.
                seconds = time.perf_counter() - started
                speed = config.batch_size * config.seq_len / seconds
                on_gpu = world.device.type == "cuda"
                row = StepRow(
                    step=step + 1,
                    tokens=(step + 1) * config.batch_size * config.seq_len,
                    loss=mean_loss,
                    lr=lr,
                    grad_norm=grad_norm,
                    tokens_per_second=speed,
                    mfu=None if self.peak is None else speed * flops / (self.peak * world.size),
                    memory_gib=torch.cuda.max_memory_allocated(world.device) / 2**30 if on_gpu else 0.0,
                    seconds=seconds + (self.rows[-1].seconds if self.rows else 0.0),
                )

                # Evaluation.
                if row.step in evaluated:
                    data, tokens, model = self.validation, config.validation_tokens, stepper.model
                    with whole(stepper.objective):
                        measured = validation_loss(model, data, tokens, together, world.device, world.rank, world.size)
                    if not math.isfinite(measured):
                        raise DivergedError(f"validation loss {measured} is not finite at step {row.step}: lower --lr")
                    row = replace(row, validation_loss=measured)
                self.rows.append(row)
                if world.is_first:
                    watch(row)

                if stop or row.step % config.checkpoint_every == 0 or row.step == config.steps:
                    objective, optimizer = stepper.objective, stepper.optimizer
                    save(self.folder, self.rows, objective, optimizer, self.info, world.is_first)
                if stop and row.step < config.steps:
                    raise StoppedError(row.step, asked)

            # A signal may have come during the last step.
            if world.any(bool(asked)):
                raise StoppedError(config.steps, asked)
        return self.rows
