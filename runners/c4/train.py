"""One run: train it, continue it, or read its record; then evaluate it on downstream sets."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mixers.ops.numerics import product_precision
from mixers.registry import changed, variant_label
from runners import records
from runners.c4 import checkpoints
from runners.c4.checkpoints import StepRow
from runners.c4.config import Config, Identity, identity
from runners.c4.costs import known_figures
from runners.c4.data.corpus import Corpus, Windows, bytes_per_token
from runners.c4.data.tokenizer import load_tokenizer
from runners.c4.distributed import World
from runners.c4.loop import DivergedError, Loop, RunError
from runners.c4.model import layer_of
from runners.c4.progress import Progress
from runners.device import device_name, ran_out_of_memory
from runners.files import checksum, clear_leftovers, read_json, write_atomically, write_json
from runners.records import LANGUAGE_MODEL, RECORD, Record
from runners.runs import claimed, is_finished


class BusyError(RunError):
    """Another process is training the run."""


def train(config: Config, options: dict[str, Any], corpus: Corpus, world: World, progress: Progress) -> Record:
    """Train one run to its end, or read the record of a finished one.

    Args:
        config: configuration of the run.
        options: options of the layer that differ from its defaults.
        corpus: its data.
        world: the processes.
        progress: shows the run, in the first process.

    Returns:
        The record of the run, which may have diverged; ``config.downstream`` adds a split for each set.

    Raises:
        BusyError: another process trains the run.
        RunError: memory is full, or the first loss of all is not finite.
        StoppedError: the process was asked to stop, during training or after it.
        ValueError: the downstream items cannot be read.
        OSError: a file cannot be written.
    """
    run = identity(config, options, corpus.folder.name)
    # The first process claims the run, and tells the others.
    with claimed([run.folder] if world.is_first else []) as mine:
        if world.any(bool(mine)):
            try:
                _train(run, config, options, corpus, world, progress)
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
                micro = config.sequences_at_once(world.size)
                raise RunError(f"out of memory: lower --micro-batch-size (now {micro}) or give --recompute") from error
        elif not world.any(world.is_first and is_finished(run.folder)):
            raise BusyError(f"another process is training {run.folder}: wait for it, or give another --seed or --out")

        ((_, record),) = records.read_all(run.folder / RECORD)
        if config.downstream is not None and record.diverged_step is None:
            record = _with_downstream(record, run.folder, config, world, progress)
        if world.is_first:
            progress.finished(record)
        return record


def _train(
    run: Identity, config: Config, options: dict[str, Any], corpus: Corpus, world: World, progress: Progress
) -> None:
    """Train a run that this command has claimed, and write its record."""
    folder, tokenizer = run.folder, run.folder / "tokenizer.json"

    # The tokenizer comes first, because the description holds its checksum.
    if world.is_first:
        clear_leftovers(folder / "checkpoints")
        if not tokenizer.is_file():
            content = load_tokenizer(str(config.tokenizer)).to_str(pretty=True)
            write_atomically(tokenizer, lambda temporary: temporary.write_text(content, encoding="utf-8"))
        if not (folder / "run.json").exists():
            manifest, windows = corpus.manifest, Windows(corpus, "validation", config.seq_len, None)
            read = replace(config, validation_tokens=corpus.targets("validation", config.seq_len))
            text = {
                "name": corpus.folder.name,
                "tokenizer": manifest.tokenizer,
                "sources": manifest.sources,
                "vocab_size": manifest.vocab_size,
                "train_tokens": corpus.tokens("train"),
                "validation_tokens": read.validation_tokens,
                "bytes_per_token": bytes_per_token(windows, config.seq_len, load_tokenizer(str(tokenizer))),
                "tokenizer_checksum": checksum(tokenizer.read_bytes()),
            }
            description = {
                "config": {**asdict(read), "out": str(read.out)},
                "mixer_options": options,
                "corpus": text,
                "study": run.study,
                "fingerprint": run.fingerprint,
                "costs": known_figures(config, options, manifest.vocab_size),
            }
            write_json(folder / "run.json", description)
    world.wait()

    info = read_json(folder / "run.json")
    loop = Loop(folder, config, options, info, corpus, world)
    if world.is_first:
        progress.began(folder.name, info, loop.rows[-1] if loop.rows else None)
    diverged_step = None
    try:
        rows = loop.train_remaining(progress.stepped)
    except DivergedError as error:
        rows, diverged_step = loop.rows, len(loop.rows) + 1
        progress.console.print(f"diverged: {error}", soft_wrap=True)
    if world.is_first:
        checkpoints.write_curve(folder, rows)
        records.write(folder, _record(run, config, options, info, rows, diverged_step, world))
    world.wait()


def _record(
    run: Identity,
    config: Config,
    options: dict[str, Any],
    info: dict[str, Any],
    rows: Sequence[StepRow],
    diverged_step: int | None,
    world: World,
) -> Record:
    """Return the record of a run that has ended."""
    layer, _ = layer_of(config, options)
    text, costs, known = info["corpus"], info["costs"], settings_of(config, options)
    settings = {**known.pop("settings"), "parameters_without_embeddings": costs["parameters_without_embeddings"]}
    measured = [row for row in rows if row.validation_loss is not None]
    speeds = sorted(row.tokens_per_second for row in rows)

    metrics: dict[str, dict[str, float | None]] = {}
    if diverged_step is None:
        loss = measured[-1].validation_loss
        bits = loss / math.log(2) / text["bytes_per_token"] if loss and text["bytes_per_token"] else None
        metrics = {"training": {"loss": rows[-1].loss}, "validation": {"loss": loss, "bits_per_byte": bits}}

    return Record(
        **known,
        study=run.study,
        layer=variant_label(config.mixer, changed(options, layer.Config), 1),
        family=layer.family,
        task=LANGUAGE_MODEL,
        task_config=text,
        preset=config.preset,
        fingerprint=run.fingerprint,
        settings=settings,
        precision=product_precision(world.device),
        lr=config.lr,
        seed=config.seed,
        diverged_step=diverged_step,
        metrics=metrics,
        curve={
            "step": [row.step for row in measured],
            "train_loss": [row.loss for row in measured],
            "loss": [row.validation_loss for row in measured],
        },
        parameters=costs["parameters"],
        flops_per_token={str(config.seq_len): costs["flops_per_token"] // 3},  # of a forward pass
        seconds=rows[-1].seconds if rows else 0.0,
        steps_per_second=speeds[len(speeds) // 2] / (config.batch_size * config.seq_len) if speeds else None,
        device=device_name(world.device),
        versions={
            **records.versions(),
            "liger-kernel": version("liger_kernel") if find_spec("liger_kernel") else None,
        },
        commit=records.commit(),
    )


def loss_of(record: Record) -> float:
    """Return the validation cross-entropy of a converged run after the last step, in nats per token."""
    loss = record.metrics["validation"]["loss"]
    assert loss is not None
    return loss


def settings_of(config: Config, options: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a run's record that its settings decide, but for learning rate and seed."""
    shape, optimizer = config.shape(), ("beta1", "beta2", "eps", "clip", "warmup_fraction", "final_lr_fraction")
    return {
        "mixer": config.mixer,
        "mixer_config": asdict(layer_of(config, options)[1]),
        "width": shape.width,
        "mlp_width": shape.mlp_width,
        "layers": shape.layers,
        "batch_size": config.batch_size,
        "steps": config.steps,
        "evaluations": config.evaluations,
        "optimizer": {name: getattr(config, name) for name in optimizer},
        "weight_decay": config.weight_decay,
        "settings": {name: getattr(config, name) for name in ("size", "heads", "parametrisation", "seq_len")},
    }


def _with_downstream(record: Record, folder: Path, config: Config, world: World, progress: Progress) -> Record:
    """Return the record with a split for each set of questions, unless they are those of the record."""
    from runners.c4.evaluation.downstream import evaluate_items, read_items

    items = read_items(str(config.downstream))
    digest = sha256(repr(items).encode()).hexdigest()
    if record.settings.get("downstream") == digest:
        return record

    # An earlier checkpoint than the last one would have other scores.
    model, tokenizer = checkpoints.load_run(checkpoints.newest(folder) or folder)
    model.to(world.device)
    batch = config.sequences_at_once(world.size)
    scores = {}
    for name, questions in items.items():
        if world.is_first:
            progress.console.print(f"evaluating {name}, {len(questions):,} questions", soft_wrap=True)
        scores[name] = evaluate_items(model, tokenizer, questions, batch, config.seq_len, world.device)

    settings = {**record.settings, "downstream": digest}
    record = replace(record, metrics={**record.metrics, **scores}, settings=settings)
    if world.is_first:
        records.write(folder, record)
    world.wait()
    return record
