"""Chunk kernels: all positions of a chunk in one launch, on Hopper GPUs, for narrow models in bfloat16.

A position of the wavefront takes nine launches, and narrow models with few sequences wait for them. A chunk kernel
takes the place of a chunk's loop over positions, forward or backward. It reads and writes the same buffers.
``chunk_forward.cu`` and ``chunk_backward.cu`` explain it.

A cluster of programs shares a layer's matrices, and takes 16, 32 or 64 sequences at a time. The fewest are best for
which all clusters fit on the GPU at once. If some must wait for others, the kernel is slower than the loop, except in
the forward with two turns (measured on an H100: ``results/notes/2026-11-27.md``, seventh part).
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mixers.ops.cuda import Kernel, compiled
from mixers.ops.numerics import NORM_EPS
from mixers.rt.wavefront.buffers import BackwardScratch, ForwardScratch, Kept
from mixers.rt.wavefront.schedule import CHUNK
from mixers.rt.wavefront.setup import Pass, Sizes
from mixers.rt.wavefront.weights import Operands

Direction = Literal["forward", "backward"]

PROGRAMS = {256: 8, 384: 16}
"""Programs of a cluster by model width."""

THREADS = 256
"""Threads of a program."""

HEAD_DIMS = (16, 32, 64)

ROW_TILES = (1, 2, 4)
"""Numbers of 16 sequences that a cluster can take at a time."""

MOST_TURNS = {"forward": 2, "backward": 1}
"""Turns of clusters, one after the other, up to which a chunk kernel is no slower than the loop."""

_KEPT = ("q", "k", "v", "a", "n_u", "n_z", "lse", "r_u", "r_z", "r_k")
_MATRICES = ("out", "up", "down", "kv")


def _fields(*pointers: str) -> list[tuple[str, Any]]:
    """Fields of a kernel's arguments."""
    return [
        *((name, ctypes.c_void_p) for name in pointers),
        *((name, ctypes.c_int64) for name in ("kept_stride", "group_stride", "kv_stride", "room_stride")),
        *((name, ctypes.c_int) for name in ("B", "tiles")),
        ("scale", ctypes.c_float),
    ]


class ForwardArguments(ctypes.Structure):
    """``struct Arguments`` of chunk_forward.cu."""

    _fields_ = _fields("x", "m", "l", "o", "slopes", *_MATRICES, *_KEPT, "z", "room")


class BackwardArguments(ctypes.Structure):
    """``struct Arguments`` of chunk_backward.cu."""

    _fields_ = _fields(
        "dk", "dv", "slopes", *_MATRICES, *_KEPT, "da", "delta", "d", "dkv", "dy", "h", "dh", "du", "room"
    )


class ChunkKernel:
    """The chunk kernel of a pass in one direction, with the memory that its programs exchange.

    Args:
        owner: the pass.
        direction: forward or backward.
        row_tiles: number of 16 sequences that a cluster takes at a time.
        kernel: the compiled kernel.
    """

    def __init__(self, owner: Pass, direction: Direction, row_tiles: int, kernel: Kernel) -> None:
        sizes = owner.sizes
        self.sizes, self.scale, self.slopes_H = sizes, owner.setting.scale, owner.slopes_H
        self.arguments = ForwardArguments if direction == "forward" else BackwardArguments
        self.row_tiles, self.kernel = row_tiles, kernel
        clusters = max(kernel.fit, sizes.schedule.most)
        self.room = torch.empty(clusters, room_bytes(sizes.D, row_tiles), dtype=torch.uint8, device=sizes.device)

    @staticmethod
    def of(owner: Pass, direction: Direction) -> "ChunkKernel | None":
        """Return the chunk kernel of a pass; None if there is none, or the loop over positions is faster."""
        sizes, norms = owner.sizes, (owner.qk_norm, owner.setting.persistent_norm)
        if not supported(sizes):
            return None
        for row_tiles in ROW_TILES:
            kernel = chunk_kernel(direction, sizes.D, sizes.K, row_tiles, *norms, sizes.device)
            if kernel is None or not kernel.fit:
                return None
            turns = -(-sizes.schedule.most * _tiles(sizes.B, row_tiles) // kernel.fit)
            if turns <= (MOST_TURNS[direction] if row_tiles == ROW_TILES[-1] else 1):
                return ChunkKernel(owner, direction, row_tiles, kernel)
        return None

    def launch(self, layers: int, tensors: dict[str, Tensor], kept_stride: int) -> None:
        """Compute a chunk of the layers at work.

        Args:
            layers: number of layers at work.
            tensors: tensors from the chunk and the first layer at work on, by the names in the kernel's arguments.
            kept_stride: rows between the layers of kept tensors.
        """
        sizes, tiles = self.sizes, _tiles(self.sizes.B, self.row_tiles)
        values: dict[str, Tensor | float] = {
            **tensors,
            "slopes": self.slopes_H,
            "room": self.room,
            "kept_stride": kept_stride,
            "group_stride": sizes.schedule.group * sizes.B,
            "kv_stride": tensors["kv"].stride(0),
            "room_stride": self.room.stride(0),
            "B": sizes.B,
            "tiles": tiles,
            "scale": self.scale,
        }
        clusters = min(tiles, max(1, self.kernel.fit // layers))
        self.kernel.launch(self.arguments, values, (clusters, layers))


def supported(sizes: Sizes) -> bool:
    """Return whether there is a chunk kernel for a case."""
    return (
        sizes.device.type == "cuda"
        and torch.cuda.get_device_capability(sizes.device) == (9, 0)
        and (sizes.low, sizes.wide) == (torch.bfloat16, torch.float32)
        and sizes.block == 1
        and sizes.D in PROGRAMS
        and sizes.F == 4 * sizes.D
        and sizes.K in HEAD_DIMS
    )


def forward_tensors(
    chunk: int, x: Tensor, z: Tensor, kept: Kept, scratch: ForwardScratch, operands: Operands
) -> dict[str, Tensor]:
    """Tensors of the forward at the chunk that begins at position ``chunk`` of a group."""
    return {
        **_common(chunk, kept, operands),
        "x": x[:, chunk],
        "z": z[:, chunk],
        **{name: getattr(scratch, name)[:, chunk] for name in ("m", "l", "o")},
    }


def backward_tensors(
    chunk: int, d: Tensor, da: Tensor, delta: Tensor, kept: Kept, scratch: BackwardScratch, operands: Operands
) -> dict[str, Tensor]:
    """Tensors of the backward at the chunk that begins at position ``chunk``, with transposed ``operands``."""
    return {
        **_common(chunk, kept, operands),
        "d": d[:, chunk],
        "da": da[:, chunk],
        "delta": delta[:, chunk],
        **{name: getattr(scratch, name)[:, chunk] for name in ("dk", "dv", "dkv", "dy", "h", "dh", "du")},
    }


def _common(chunk: int, kept: Kept, operands: Operands) -> dict[str, Tensor]:
    return {
        **{name: getattr(kept, name)[:, chunk] for name in _KEPT},
        **{name: getattr(operands, name) for name in _MATRICES},
    }


def _tiles(B: int, row_tiles: int) -> int:
    """Number of tiles of B sequences."""
    return -(-B // (16 * row_tiles))


def shared_bytes(D: int, row_tiles: int) -> int:
    """Shared memory of a program: slices of the matrices, parts of sums, hidden columns, and numbers of rows."""
    slices, parts, hidden = 22 * D * D, 512 * (D // 4) * (8 - row_tiles), 32 * row_tiles * 4 * D
    return (slices + parts + hidden) // PROGRAMS[D] + 2048


def room_bytes(D: int, row_tiles: int) -> int:
    """Memory that the programs of a cluster exchange: rows, parts of the MLP's product, sums of rows."""
    rows, C = 16 * row_tiles, PROGRAMS[D]
    return rows * (2 * D * (4 + C) + 4 * 16 * C)


@cache
def chunk_kernel(
    direction: Direction,
    D: int,
    K: int,
    row_tiles: int,
    qk_norm: bool,
    persistent_norm: bool,
    device: torch.device,
) -> Kernel | None:
    """Return a compiled kernel; None if it cannot be compiled on this machine.

    Args:
        direction: forward or backward.
        D: model width.
        K: head dim.
        row_tiles: number of 16 sequences that a cluster takes at a time.
        qk_norm: whether queries and keys have a norm.
        persistent_norm: whether outputs have a norm before their persistent pairs.
        device: the GPU.
    """
    return compiled(
        source(direction),
        constants_of(D, K, row_tiles, qk_norm, persistent_norm),
        device,
        name=f"chunk_{direction}",
        programs=PROGRAMS[D],
        threads=THREADS,
        shared_bytes=shared_bytes(D, row_tiles),
    )


def source(direction: Direction) -> str:
    """The complete source of a kernel."""
    folder = Path(__file__).parent
    return "".join((folder / f"chunk_{name}").read_text() for name in ("common.cuh", f"{direction}.cu"))


def constants_of(D: int, K: int, row_tiles: int, qk_norm: bool, persistent_norm: bool) -> dict[str, float]:
    """Constants of the source by name; arguments as ``chunk_kernel``."""
    return {
        "WIDTH": D,
        "HEAD_DIM": K,
        "ROW_TILES": row_tiles,
        "QK_NORM": int(qk_norm),
        "PERSISTENT_NORM": int(persistent_norm),
        "CHUNK": CHUNK,
        "PROGRAMS": PROGRAMS[D],
        "THREADS": THREADS,
        "NORM_EPS": NORM_EPS,
    }
