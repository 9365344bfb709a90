"""Forward and backward passes of an RT layer whose recurrence goes over blocks of positions, bfloat16.

    PYTHONPATH=. python blocks_time.py times.csv

Medians of 7 passes in milliseconds, in a loop of one's own, after four others.
"""

import csv
import statistics
import sys
import time

import torch

from mixers import build

CASES = ((128, 8, 8, 128), (128, 8, 960, 128), (640, 10, 8, 512), (640, 10, 64, 512), (1024, 16, 32, 512))
"""Width, heads, sequences, positions."""


def measure(D: int, H: int, B: int, T: int, block: int) -> float:
    """Milliseconds of both passes."""
    torch.manual_seed(0)
    layer = build("rt", width=D, heads=H, block=block).cuda()
    x = torch.randn(B, T, D, device="cuda", requires_grad=True)
    times = []
    for _ in range(11):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            z = layer(x)
        z.sum().backward()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[4:])


if __name__ == "__main__":
    with open(sys.argv[1], "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["width", "heads", "sequences", "positions", "block", "milliseconds"])
        for case in CASES:
            for block in (1, 4, 16):
                table.writerow([*case, block, f"{measure(*case, block):.3f}"])
                file.flush()
