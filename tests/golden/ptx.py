"""PTX of the Triton kernels: equal PTX shows that an edit leaves what the kernels compute on a GPU as it was.

    python -m tests.golden.ptx --check    # compare with tests/golden/ptx.json; exit status 1 if a kernel differs
    python -m tests.golden.ptx --write    # replace the file after a wanted change
    python -m tests.golden.ptx --fits     # exit status 1 if a kernel needs more shared memory than other GPUs have

No GPU is needed. Models are called on fake tensors of a Hopper GPU, or a smaller one, forward and backward. Each launch
of a Triton kernel compiles it to PTX instead, for its first two specialisations. The layers that the file names come
first, so that a new layer changes no specialisation of an old kernel. PTX depends on Triton's version, so that only PTX
of the stored version is compared.
"""

import ctypes
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.runtime.jit import MockTensor

from mixers import MIXERS
from mixers.base import Shape
from mixers.decoding import Decoder
from mixers.models import LanguageModel
from mixers.ops import runs
from mixers.ops.kernels.chunked_recurrence import LEAST_SEGMENTS, SHORTEST
from mixers.ops.kernels.common import gpu_limits
from mixers.ops.linear_recurrence import MANY
from mixers.ops.method import Method
from runners.mad.training.ensemble import Ensemble, mean_cross_entropy
from runners.mad.training.protocol import Optimizer, Run

FILE = Path(__file__).with_name("ptx.json")
SPECIALISATIONS = 2
"""Largest number of specialisations of a kernel that are compiled."""
GPU = torch.device("cuda", 0)


class Kind(NamedTuple):
    """Compute capability of a GPU, its multiprocessors, and the largest shared memory of a program in bytes."""

    capability: tuple[int, int]
    multiprocessors: int
    memory: int


H100 = Kind((9, 0), 132, 232448)
OTHERS = {"A100": Kind((8, 0), 108, 166912), "RTX 4090": Kind((8, 9), 128, 101376)}


def layers() -> list[str]:
    """Return the registered layers, first those of the stored file in its order."""
    return list(dict.fromkeys([*json.loads(FILE.read_text())["layers"], *MIXERS]))


def models() -> Iterator[tuple[str, dict[str, Any], int, int]]:
    """Layer, options, width and length of models that, with those of ``decode``, launch every kernel."""
    for mixer in layers():
        yield mixer, {"heads": 8} if mixer == "feedback-transformer" else {}, 128, 64
    for block in (1, 4):
        yield "rt", {"block": block}, 512, 16
    for mixer in ("kda", "rwkv7"):
        yield mixer, {}, 128, MANY
    for mixer, width in (("lstm", 96), ("transformer-fam", 256)):
        yield mixer, {}, width, 64
    yield "linear-attention", {"heads": 2}, 128, LEAST_SEGMENTS * SHORTEST


def train(mixer: str, options: dict[str, Any], width: int, positions: int) -> None:
    """Take a training step of two runs of a model, whose gradients ``forward_and_backward`` computes."""
    runs = [Run(lr=1e-3, weight_decay=0.1, seed=seed) for seed in (0, 1)]
    ensemble = Ensemble(lambda: build(mixer, options, width), runs, Optimizer(), 10, GPU)
    tokens_RBT = torch.empty(2, 16, positions, dtype=torch.int64, device=GPU)
    loss_R = mean_cross_entropy(ensemble.logits(ensemble.params_RP, tokens_RBT), tokens_RBT)
    ensemble.optimizer.update(ensemble.params_RP, torch.empty_like(ensemble.params_RP), loss_R)


def build(mixer: str, options: dict[str, Any], width: int) -> LanguageModel:
    """Build a model with 64 tokens on the GPU."""
    layer, shape = MIXERS[mixer], Shape(width=width, mlp_width=4 * width, layers=2)
    with GPU:
        return LanguageModel(layer, layer.Config(**options), shape, 64)


def forward_and_backward(method: Method, tensors: Any) -> Any:
    """Compute an operation and its gradients: PyTorch's CPU build has no autograd for tensors of a GPU."""
    outputs, saved = method.forward(*tensors)
    method.backward(tuple(map(torch.empty_like, outputs)), tensors, outputs, saved)
    return outputs, saved


def compiled_kernels(gpu: Kind) -> dict[str, dict[str, int]]:
    """Return bytes of shared memory by the hash of the PTX, of each kernel by the name of its file and its own."""
    gpu_limits.cache_clear()
    found: dict[str, dict[str, int]] = {}
    run, (major, minor) = triton.JITFunction.run, gpu.capability

    def compile(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        sizes = found.setdefault(f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}", {})
        if len(sizes) < SPECIALISATIONS:
            mocked = tree_map_only(Tensor, lambda y: MockTensor(y.dtype), (arguments, settings))
            compiled = run(kernel, *mocked[0], grid=grid, warmup=True, **mocked[1])
            sizes[sha256(plain(compiled.asm["ptx"]).encode()).hexdigest()] = compiled.metadata.shared

    properties = SimpleNamespace(
        multi_processor_count=gpu.multiprocessors, shared_memory_per_block_optin=gpu.memory, major=major, minor=minor
    )
    number = 10 * major + minor
    asked = SimpleNamespace(  # what Triton asks of a driver before it compiles
        get_current_target=lambda: GPUTarget("cuda", number, 32),
        get_current_device=lambda: number,  # Triton keeps what it compiled for a device
        get_current_stream=lambda device: 0,
    )

    # PyTorch's CPU build lacks the device guard of CUDA. That of meta tensors, which does nothing, stands for it.
    if torch.version.cuda is None:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        guards = (ctypes.c_void_p * 15).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
        guards[1] = guards[14]

    with (
        tempfile.TemporaryDirectory() as triton.knobs.cache.dir,
        patch.object(triton.knobs.compilation, "disable_line_info", True),
        patch.object(driver, "_active", asked),
        patch.object(CUDABackend, "make_cubin", lambda *_: b""),
        patch.object(triton.JITFunction, "run", compile),
        patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
        patch.object(torch.cuda, "get_device_capability", lambda *_: gpu.capability),
        patch.object(torch.cuda, "is_bf16_supported", lambda *_: True),
        patch("runners.mad.training.ensemble.equal", lambda *_: True),  # fake buffers have no values
        patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        patch.object(nn.Module, "to", lambda model, device: model),
        patch.object(runs, "run_forward", forward_and_backward),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
    ):
        for model in models():
            train(*model)
        for mixer, batch in product(("transformer", "rt"), (1, 4)):
            Decoder(build(mixer, {}, 128), batch, 64).compute()
    return dict(sorted(found.items()))


def ptx_of_kernels() -> dict[str, list[str]]:
    """Return the hashes of each kernel's PTX."""
    return {name: [*sizes] for name, sizes in compiled_kernels(H100).items()}


def too_large() -> list[str]:
    """Return a line for each kernel that needs more shared memory than one of the other GPUs has."""
    return [
        f"{name} needs {max(sizes.values()):,} bytes of shared memory, of which {gpu} has {kind.memory:,}"
        for gpu, kind in OTHERS.items()
        for name, sizes in compiled_kernels(kind).items()
        if max(sizes.values()) > kind.memory
    ]


def plain(ptx: str) -> str:
    """Return PTX without comments and directives for debuggers."""
    return re.sub(r"^\s*(//|\.loc|\.file).*\n|//.*", "", ptx, flags=re.MULTILINE)


def main() -> int:
    """Run the command line; return the exit status."""
    if sys.argv[1:] == ["--write"]:
        found = {"triton": triton.__version__, "layers": layers(), "kernels": ptx_of_kernels()}
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        return 0

    if sys.argv[1:] == ["--fits"]:
        lines = too_large()
        print(f"{len(lines)} kernels are too large", *lines, sep="\n")
        return len(lines) > 0

    stored = json.loads(FILE.read_text())
    if stored["triton"] != triton.__version__:
        print(f"not compared: {FILE.name} is of Triton {stored['triton']}, and {triton.__version__} is installed")
        return 0
    found, then = ptx_of_kernels(), stored["kernels"]
    differing = sorted(name for name in {*found, *then} if found.get(name) != then.get(name))
    print(f"{len(found)} kernels, {len(differing)} with other PTX than stored", *differing, sep="\n")
    return len(differing) > 0


if __name__ == "__main__":
    sys.exit(main())
