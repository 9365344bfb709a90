"""Train a layer of each of twelve public packages, and of PyTorch, in a small setting; print what became of each.

    python -m tests.packages            # installs the packages in an environment of its own, in a temporary folder
    python -m tests.packages mambapy    # only what has this in its name

The environment sees the present one, and nothing is installed there. Each layer is used as it is published; one that
takes two widths, or names no argument for any, has a module of a few lines.
"""

import os
import site
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SETTING = (
    *("--task", "parity", "--task.length", "16", "--task.train-examples", "64", "--task.eval-examples", "32"),
    *("--steps", "20", "--batch-size", "16", "--evaluations", "1", "--lr", "1e-3", "--weight-decay", "0"),
    *("--width", "32", "--mlp-width", "64", "--device", "cpu", "--reference", "none", "--out"),
)
HEADS = "--mixer.causal True --mixer.heads 2 --mixer.dim-head 16"
SUBCLASS = """import {module}


class {name}({module}.{name}):
    def __init__(self, width: int) -> None:
        super().__init__({arguments})
"""


class Entry(NamedTuple):
    """A layer of a package.

    Attributes:
        requirement: package and version; empty for PyTorch.
        layer: import path.
        options: options of the layer.
        arguments: arguments of its constructor by the width, for a subclass; empty if it needs none.
    """

    requirement: str
    layer: str
    options: str = ""
    arguments: str = ""


ENTRIES = (
    Entry("mambapy==1.2.0", "mambapy.mamba:MambaBlock", "--mixer.n-layers 1"),
    Entry("x-transformers==2.31.10", "x_transformers.x_transformers:Attention", HEADS),
    Entry("performer-pytorch==1.1.4", "performer_pytorch:SelfAttention", HEADS),
    Entry("local-attention==1.11.2", "local_attention.transformer:LocalMHA", f"{HEADS} --mixer.window-size 8"),
    Entry(
        "linear-attention-transformer==0.19.1",
        "linear_attention_transformer.linear_attention_transformer:SelfAttention",
        "--mixer.causal True --mixer.heads 2",
    ),
    Entry("xlstm==2.0.6", "xlstm:mLSTMLayer", "--mixer.context-length 64"),
    Entry("sru==2.6.0", "sru:SRU", arguments="width, width, num_layers=1"),
    Entry("minGRU-pytorch==0.2.1", "minGRU_pytorch.minGRU:minGRU"),
    Entry("transformers==5.24.0", "transformers.models.mamba.modeling_mamba:MambaMixer", "--mixer.layer-idx 0"),
    Entry("flash-linear-attention==0.6.0", "fla.layers:GatedLinearAttention", "--mixer.num-heads 2"),
    Entry("s5-pytorch==0.2.1", "s5:S5"),
    Entry("reformer-pytorch==1.4.4", "reformer_pytorch:LSHSelfAttention", f"{HEADS} --mixer.bucket-size 8"),
    Entry("", "torch.nn:GRU", arguments="width, width, batch_first=True"),
    Entry("", "torch.nn:LSTM", arguments="width, width, batch_first=True"),
    Entry("", "torch.nn:TransformerEncoderLayer", "--mixer.nhead 2 --mixer.batch-first True"),
)


def outcome(entry: Entry, folder: Path, python: Path) -> str:
    """Install a package and train its layer; return the line that says what became of it."""
    if entry.requirement:
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", entry.requirement]
        installed = subprocess.run(pip, capture_output=True, text=True)
        if installed.returncode:
            return f"not installed: {installed.stderr.strip().splitlines()[-1]}"

    # The subclass, in a module of its own.
    layer = entry.layer
    if entry.arguments:
        module, _, name = layer.partition(":")
        text = SUBCLASS.format(module=module, name=name, arguments=entry.arguments)
        (folder / f"{name.lower()}_layer.py").write_text(text)
        layer = f"{name.lower()}_layer:{name}"

    # Training.
    words = ["--mixer", layer, *entry.options.split(), *SETTING, folder / "results" / layer]
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "COLUMNS": "200"}
    try:
        done = subprocess.run(
            [python, "-m", "runners.mad", *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    except subprocess.TimeoutExpired:
        return "not finished after five minutes"
    if done.returncode == 0:
        return "trained" + ", one run after another" * ("one after another" in done.stdout)
    lines = [line.strip("│ ") for line in done.stderr.splitlines() if line.strip("╭╮╰╯─ ")] or ["no word"]
    return lines[1 if "│" in done.stderr else -1]  # tyro draws a box, which begins with a title


def main() -> None:
    """Print the table."""
    chosen = [entry for entry in ENTRIES if not sys.argv[1:] or any(word in str(entry) for word in sys.argv[1:])]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        venv.create(folder / "environment", with_pip=False, symlinks=True)
        (present,) = (folder / "environment").glob("lib/python*/site-packages")
        (present / "present.pth").write_text("\n".join(site.getsitepackages()))
        for entry in chosen:
            line = outcome(entry, folder, folder / "environment" / "bin" / "python")
            print(f"| {entry.requirement or 'torch'} | `{entry.layer}` | {line} |", flush=True)


if __name__ == "__main__":
    main()
