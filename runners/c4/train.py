"""One run: train it, continue it, or return its stored result; then evaluate it on downstream sets."""

import errno
import math
import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from mixers.named import is_path
from runners.c4 import checkpoints, identity
from runners.c4.config import Config
from runners.c4.data.corpus import Corpus
from runners.c4.distributed import World
from runners.c4.errors import BusyError, DiskFullError, DivergedError, EvaluationStoppedError, RunError, out_of_memory
from runners.c4.evaluation.downstream import Item, Scores, evaluate_items, read_items
from runners.c4.loop import Loop
from runners.c4.records import REHEARSAL, read_record
from runners.c4.rehearsal import agree, trajectory, unrehearsed_code
from runners.c4.watchers import Watcher
from runners.files import clear_leftovers, write_json
from runners.memory import ran_out_of_memory

LOCK = ".lock"
"""Name of the file in a run's folder that a process locks while it uses the folder."""
WIDEST = 256
"""Largest width of the model of a run's rehearsal."""
LONGEST = 2048
"""Largest length of the sequences of a user's layer with which a run is rehearsed."""


def train(
    config: Config, options: dict[str, Any], corpus: Corpus, world: World, watchers: Sequence[Watcher]
) -> dict[str, Any]:
    """Train one run to its end, or read the result of a finished one.

    Args:
        config: configuration of the run.
        options: options of the layer that were set.
        corpus: its data.
        world: the processes.
        watchers: objects to inform, in the first process.

    Returns:
        The result of the run, with the scores of ``config.downstream`` as ``downstream``.

    Raises:
        RunError: the run diverged (now or before), another process trains it, it was begun with other code, or memory
            or disk are full.
        StoppedError: the process was asked to stop, during training or after it.
        ValueError: the downstream items cannot be read.
    """
    folder = identity.run_folder(config, options, corpus.folder.name)
    items = {} if config.downstream is None else read_items(config.downstream)

    with _only_one(folder, world):
        try:
            with _errors_of_tokenizers(folder):
                result = _result(folder, config, options, corpus, world, watchers)
            if items:
                result["downstream"] = _downstream(folder, config, items, world, watchers)

            for watcher in watchers if world.is_first else ():
                watcher.finished(result)
            return result

        # Errors that the user can do something about.
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise DiskFullError(f"no space in {folder}: free some and run the same command again") from error
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            raise out_of_memory(config.sequences_at_once(world.size)) from error


def _result(
    folder: Path, config: Config, options: dict[str, Any], corpus: Corpus, world: World, watchers: Sequence[Watcher]
) -> dict[str, Any]:
    """Return the stored result of a run; train the run if there is none."""
    begun = read_record(folder / "run.json")
    code = identity.run_code(config)
    differs = float(begun is not None and begun["code"] != code)
    if world.mean(torch.tensor(differs, device=world.device)) > 0:  # constants of a layer may differ between processes
        _require_same_training(folder, config, options, world)

    # The run ended before, with a result or by divergence.
    if (result := read_record(folder / "result.json")) is not None:
        return result
    if (diverged := read_record(folder / "diverged.json")) is not None:
        raise DivergedError(f"{diverged['message']} (delete {folder / 'diverged.json'} to try again)")

    loop = Loop(folder, config, options, corpus, world, watchers)
    if world.is_first and not (folder / REHEARSAL).exists() and (begun is None or begun["code"] == code):
        found = _trajectory(config, options)
        write_json(folder / REHEARSAL, {"trajectory": found, "unrehearsed_code": unrehearsed_code(), "codes": [code]})
    return loop.finish()


def _require_same_training(folder: Path, config: Config, options: dict[str, Any], world: World) -> None:
    """Check that today's code trains as the code does that a run was begun with, because results are not comparable.

    Code that does so is remembered. The first process checks, and tells the others.

    Raises:
        RunError: it trains differently, or nothing is known of the code then.
    """
    differs = 0.0
    if world.is_first:
        known = read_record(folder / REHEARSAL)
        differs = float(known is None or not _trains_as(known, config, options))
        code = identity.run_code(config)
        if known is not None and not differs and code not in known["codes"]:
            write_json(folder / REHEARSAL, {**known, "codes": [*known["codes"], code]})

    if world.mean(torch.tensor(differs, device=world.device)) > 0:
        raise RunError(
            f"the code of {config.mixer} or of its training is not the one that {folder} was begun with: delete this "
            "folder or give another --out to train again, or take the old code back"
        )


def _trains_as(known: dict[str, Any], config: Config, options: dict[str, Any]) -> bool:
    """Return whether today's code is known to train as the code of a stored rehearsal, or shows it in another one."""
    if identity.run_code(config) in known["codes"]:
        return True
    then = known["trajectory"]
    if then is None or known["unrehearsed_code"] != unrehearsed_code():
        return False
    now = _trajectory(config, options)
    return now is not None and agree(then, now)


def _trajectory(config: Config, options: dict[str, Any]) -> list[float] | None:
    """Return the losses of a run's rehearsal.

    None if they are not finite, or if the layer cannot compute on this CPU in float64. A user's layer, which is
    rehearsed over its whole sequences, may need more memory than there is for those above ``LONGEST``.
    """
    if is_path(config.mixer) and config.seq_len > LONGEST:
        return None
    try:
        found = trajectory(_narrow(config), options)
    except Exception:  # a user's layer may need a GPU, or memory may be short; the run needs no rehearsal
        return None
    return found if all(map(math.isfinite, found)) else None


def _narrow(config: Config) -> Config:
    """Return the configuration with at most ``WIDEST`` channels: of a wider model a rehearsal would take minutes."""
    shape = config.shape()
    if shape.width <= WIDEST:
        return replace(config, width=shape.width, mlp_width=shape.mlp_width, heads=config.heads)
    heads = config.heads and max(1, config.heads * WIDEST // shape.width)
    return replace(config, width=WIDEST, mlp_width=max(1, shape.mlp_width * WIDEST // shape.width), heads=heads)


def _downstream(
    folder: Path, config: Config, items: dict[str, list[Item]], world: World, watchers: Sequence[Watcher]
) -> dict[str, Any]:
    """Return the scores of the last checkpoint by set; reuse stored scores if questions and fields are the same."""
    # The digest changes with the questions and with the fields of the scores.
    path = folder / "downstream.json"
    figures = [field.name for field in fields(Scores)]
    digest = sha256(repr((figures, items)).encode()).hexdigest()
    known = read_record(path)
    world.wait()

    if known is None or known["items"] != digest:
        scores = _evaluate(folder, config, items, world, watchers)
        if world.is_first:
            write_json(path, {"items": digest, "scores": scores})
        world.wait()
        known = read_record(path)
    assert known is not None
    return dict(known["scores"])


def _evaluate(
    folder: Path, config: Config, items: dict[str, list[Item]], world: World, watchers: Sequence[Watcher]
) -> dict[str, Any]:
    """Evaluate the last checkpoint on each set of questions; an earlier checkpoint would give other scores."""
    model, tokenizer = checkpoints.load_model(checkpoints.newest(folder) or folder)
    model.to(world.device)
    batch = config.sequences_at_once(world.size)

    scores = {}
    try:
        for number, (name, questions) in enumerate(items.items(), start=1):
            for watcher in watchers if world.is_first else ():
                watcher.evaluating(name, number, len(items))
            scores[name] = asdict(evaluate_items(model, tokenizer, questions, batch, config.seq_len, world.device))
    except KeyboardInterrupt:
        raise EvaluationStoppedError(config.steps, [signal.SIGINT]) from None
    return scores


@contextmanager
def _errors_of_tokenizers(folder: Path) -> Iterator[None]:
    """Turn the plain Exception that the library of tokenizers raises if it cannot write a file into an OSError."""
    try:
        yield
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if type(error) is not Exception or number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error


@contextmanager
def _only_one(folder: Path, world: World) -> Iterator[None]:
    """Keep other commands out of a run's folder, and delete the temporary files of a killed one.

    Raises:
        BusyError: another command uses the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        busy = 0.0
        if world.is_first:
            try:
                stack.enter_context(FileLock(folder / LOCK, timeout=0))
                for place in (folder, folder / "checkpoints"):
                    clear_leftovers(place)
            except Timeout:
                busy = 1.0

        # The first process tells the others.
        if world.mean(torch.tensor(busy, device=world.device)) > 0:
            raise BusyError(f"another process is training {folder}: wait for it, or give another --seed or --out")
        yield
