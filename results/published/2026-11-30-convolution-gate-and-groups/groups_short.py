"""DeltaProduct on words of 16 elements, with and without its short convolution and output gate, on a CPU.

    PYTHONPATH=.:results/replications python groups_short.py S3 4 yes both.csv     # positions of the convolution, gate
    PYTHONPATH=.:results/replications python groups_short.py S4 1 no neither.csv
    PYTHONPATH=.:results/replications python groups_short.py S4 1 no longer.csv 4  # 8,000 steps, with 4 heads

One layer as in ``results/replications/replicate.py groups``: width 128, 8 heads, two pairs, negative eigenvalues, no
decays. Batches of 128 sequences, three seeds, two with 8,000 steps; token accuracy on the validation split, and at the
end on sequences of 64 elements.
"""

import csv
import sys
from pathlib import Path

from runners import records
from runners.mad import study

CASES = {"S3": (600, 4, 76_800), "S4": (1600, 8, 256_000), "A5": (1600, 8, 256_000)}
"""Steps, evaluations and training sequences, by group."""
LONGER = (8000, 20, 1_024_000)

if __name__ == "__main__":
    group, span, gate, path = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    longer = sys.argv[5:]
    heads, (steps, evaluations, examples) = (int(longer[0]), LONGER) if longer else (8, CASES[group])
    layer = {"heads": heads, "householders": 2, "negative_eigenvalues": True, "gated": False, "convolution": span}
    words = {"group": group, "length": 16, "begin": True, "train_examples": examples, "extrapolation_factors": (4,)}
    found = study(
        "deltaproduct" if gate == "yes" else "ungated:UngatedDeltaProduct",
        mixer_options=layer,
        task="group-words",
        task_options=words,
        lr=[1e-3],
        weight_decay=[0.01],
        seeds=2 if longer else 3,
        steps=steps,
        batch_size=128,
        evaluations=evaluations,
        reference="none",
        keep="none",
        quiet=True,
        device="cpu",
        out=path.with_suffix(""),
    )
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["group", "convolution", "gate", "seed", "step", "elements", "token_accuracy"])
        for _, record in sorted(records.read_all(*found.table["file"]), key=lambda item: item[1].seed):
            for step, accuracy in zip(record.curve["step"], record.curve["token_accuracy"], strict=True):
                table.writerow([group, span, gate, record.seed, int(step), 16, f"{accuracy:.4f}"])
            longer = record.metrics["length 64"]["token_accuracy"]
            table.writerow([group, span, gate, record.seed, record.steps, 64, f"{longer:.4f}"])
