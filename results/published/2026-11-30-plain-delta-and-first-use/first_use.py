"""Seconds of a recurrence's first pass, forward and backward, with empty caches of Triton and of this project.

    PYTHONPATH=.:results/published/2026-11-30-beside-flash-linear-attention python first_use.py first-use.csv

The context of the GPU exists before; modules that are imported at the first use count. The published column
"seconds_side_by_side" is of a change that was not kept, with 8 cores in place of 14.
"""

import csv
import os
import subprocess
import sys
import tempfile

KINDS = ("delta", "linear", "GLA", "KDA", "RWKV-7", "gated delta", "scalar decay")
CHILD = """
import sys
import time
from functools import partial

import beside_fla
import torch

kind, T = sys.argv[1], int(sys.argv[2])
inputs = beside_fla.given(kind, beside_fla.TOKENS // T, T, 64)
upstream = torch.ones_like(inputs["v"])
(inputs["q"] @ inputs["k"].mT).sum().item()
torch.cuda.synchronize()
began = time.perf_counter()
beside_fla.passes(partial(beside_fla.ours, kind), inputs, upstream)
torch.cuda.synchronize()
print(time.perf_counter() - began)
"""

if __name__ == "__main__":
    with open(sys.argv[1], "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["recurrence", "positions", "seconds"])
        for T in (2048, 512):
            for kind in KINDS:
                with tempfile.TemporaryDirectory() as empty:
                    caches = {"TRITON_CACHE_DIR": empty, "XDG_CACHE_HOME": empty}
                    command = [sys.executable, "-c", CHILD, kind, str(T)]
                    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | caches)
                table.writerow([kind, T, f"{float(done.stdout):.1f}"])
                file.flush()
