"""Recall with the delta rule, with and without decays, and Mamba-2, at several rates, on a CPU.

    PYTHONPATH=. python gates.py gated-deltanet 2 3e-2 1e-2 3e-3 1e-3 > gated-deltanet.csv
    PYTHONPATH=. python gates.py hyena+gated-deltanet 2 1e-2 3e-3 > hyena-gated-deltanet.csv
    PYTHONPATH=. python gates.py deltanet 2 1e-2 3e-3 > deltanet.csv
    PYTHONPATH=. python gates.py mamba2 8 1e-2 3e-3 > mamba2.csv

Two layers of width 64 without MLP as in ``results/replications/replicate.py mqar``, but 2,048 tokens, sequences of 64
with 4 pairs, 1,200 steps of 64 sequences, one seed. Token accuracy and loss on the validation split.
"""

import csv
import sys
import tempfile

from runners import records
from runners.mad import study

STEPS, BATCH = 1200, 64

if __name__ == "__main__":
    mixer, heads, *rates = sys.argv[1:]
    states = {"state_size": 16} if mixer == "mamba2" else {}
    of_heads = "gated-deltanet.heads" if "+" in mixer else "heads"
    size = {"vocab_size": 2048, "length": 64, "pairs": 4, "train_examples": STEPS * BATCH, "extrapolation_factors": ()}
    found = study(
        mixer,
        mixer_options={of_heads: int(heads), **states},
        layers=2,
        width=64,
        mlp_width=0,
        task="mqar",
        task_options={**size, "alpha": 0.01, "random_filler": True},
        lr=[float(rate) for rate in rates],
        weight_decay=[0.1],
        seeds=1,
        steps=STEPS,
        batch_size=BATCH,
        evaluations=8,
        reference="none",
        keep="none",
        quiet=True,
        device="cpu",
        out=tempfile.mkdtemp(),
    )
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["layer", "lr", "step", "token_accuracy", "loss"])
    for _, record in sorted(records.read_all(*found.table["file"]), key=lambda item: -item[1].lr):
        curve = record.curve
        for step, accuracy, loss in zip(curve["step"], curve["token_accuracy"], curve["loss"], strict=True):
            table.writerow([mixer, record.lr, int(step), f"{accuracy:.4f}", f"{loss:.4f}"])
