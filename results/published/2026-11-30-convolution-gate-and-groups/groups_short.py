"""DeltaProduct on words of S3 of 16 elements, with and without its short convolution and output gate, on a CPU.

    PYTHONPATH=.:results/replications python groups_short.py 4 yes with.csv      # positions of the convolution, gate
    PYTHONPATH=.:results/replications python groups_short.py 1 no without.csv

One layer as in ``results/replications/replicate.py groups``: width 128, 8 heads, two pairs, negative eigenvalues, no
decays. 600 steps of 128 sequences, three seeds, four evaluations; token accuracy on the validation split, and at the
end on sequences of 64 elements.
"""

import csv
import sys
from pathlib import Path

from runners import records
from runners.mad import study

if __name__ == "__main__":
    span, gate, path = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    layer = {"heads": 8, "householders": 2, "negative_eigenvalues": True, "gated": False, "convolution": span}
    words = {"group": "S3", "length": 16, "begin": True, "train_examples": 76_800, "extrapolation_factors": (4,)}
    found = study(
        "deltaproduct" if gate == "yes" else "ungated:UngatedDeltaProduct",
        mixer_options=layer,
        task="group-words",
        task_options=words,
        lr=[1e-3],
        weight_decay=[0.01],
        seeds=3,
        steps=600,
        batch_size=128,
        evaluations=4,
        reference="none",
        keep="none",
        quiet=True,
        device="cpu",
        out=path.with_suffix(""),
    )
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["convolution", "gate", "seed", "step", "elements", "token_accuracy"])
        for _, record in sorted(records.read_all(*found.table["file"]), key=lambda item: item[1].seed):
            for step, accuracy in zip(record.curve["step"], record.curve["token_accuracy"], strict=True):
                table.writerow([span, gate, record.seed, int(step), 16, f"{accuracy:.4f}"])
            longer = record.metrics["length 64"]["token_accuracy"]
            table.writerow([span, gate, record.seed, record.steps, 64, f"{longer:.4f}"])
