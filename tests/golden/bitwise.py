"""Hashes of short trainings on the CPU, equal before and after an edit on one machine if it changes no number.

    python -m tests.golden.bitwise --write FILE    # before the edit
    python -m tests.golden.bitwise --check FILE    # after it; exit status 1 if a training differs

Other processors and versions of PyTorch round differently, so that the file belongs to one machine.
"""

import json
import sys
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from mixers import MIXERS
from mixers.base import Shape
from mixers.models import LanguageModel
from runners.c4.config import Config
from runners.mad.training.protocol import Protocol, Run
from tasks import TASKS
from tests.golden.rehearsal import CPU, pretrain
from tests.runners.mad.training.whole import train

STEPS = 24


def demo(mixer: str) -> str:
    """Train a layer as the preset demo does, with fewer steps."""
    layer, kind = MIXERS[mixer], TASKS["in-context-recall"]
    task = kind(kind.Config(length=48, eval_examples=320))
    protocol = Protocol(batch_size=64, steps=STEPS, evaluations=3)
    runs = [Run(lr=1e-3, weight_decay=decay, seed=seed) for seed, decay in enumerate((0.0, 0.1))]
    results = train(
        lambda: LanguageModel(layer, layer.Config(), Shape(), task.vocab_size), task, protocol, runs, CPU, ()
    )
    return digest([y for result in results for y in result.parameters.values()], [r.curve for r in results])


def language_model(mixer: str) -> str:
    """Train a small language model on random tokens."""
    config = Config(mixer=mixer, layers=2, width=64, heads=4, seq_len=32, batch_size=8, steps=STEPS, lr=1e-2)
    model, losses = pretrain(config, {}, STEPS)
    return digest(model.parameters(), losses)


def digest(tensors: Iterable[Tensor], figures: object) -> str:
    """Return a hash of the bits of tensors and of figures, of which Python writes every digit."""
    found = sha256(repr(figures).encode())
    for y in tensors:
        found.update(y.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> int:
    """Run the command line; return the exit status."""
    action, file = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    found = {"demo rt": demo("rt"), "demo transformer": demo("transformer"), "language model": language_model("rt")}
    if action == "--write":
        file.write_text(json.dumps(found, indent=1) + "\n")

    stored = json.loads(file.read_text())
    for name, value in found.items():
        print(name, "equal" if stored.get(name) == value else "differs")
    return found != stored


if __name__ == "__main__":
    sys.exit(main())
