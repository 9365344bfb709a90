"""Compile-time settings of the fused kernels, chosen for a GPU and the sizes of a layer."""

from typing import NamedTuple

import torch
import triton

from mixers.ops.kernels.common import GpuLimits, Settings, gpu_limits
from mixers.rt.fused.padding import CHUNK, PaddedSizes


class Tiles(NamedTuple):
    """Compile-time settings of each kernel, named after the kernel."""

    rt_fwd: Settings
    rt_bwd: Settings
    past_fwd: Settings
    past_bwd: Settings
    query_bwd: Settings


def choose_tiles(B: int, R: int, sizes: PaddedSizes, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Return the settings for R runs of B sequences. The kernels' modules explain their names.

    Tiles of 16 rows are the fastest while there are no more programs than multiprocessors. With half as many programs
    or fewer, several share a tile. With more, the forward loop is faster with tiles of 32 rows; the backward loop,
    which then spills registers, is faster in several waves of tiles of 16.
    """
    K, block = sizes.K, sizes.block
    limits = gpu_limits(device)
    tiles = R * triton.cdiv(B * sizes.step, 16)

    # Kernels are launched early if all programs fit on the GPU at once.
    early = limits.early_launch and tiles <= limits.multiprocessors
    launch: Settings = {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
    shape = {"D": sizes.D, "K": K, "UNIT": sizes.head_dim**-0.5, "C": CHUNK}

    # Loops over positions.
    loop = {**shape, **_mlp_settings(tiles, sizes, dtype, limits), **launch}
    M = 16 if tiles <= limits.multiprocessors else 32

    # Attention to earlier chunks.
    G = 2 if K == 8 else 1
    heads = {**shape, "G": G, "E": G * K, "J": 32}
    past = {**heads, "num_warps": 1, **launch}
    return Tiles(
        rt_fwd={**loop, "M": M, "J": 128 // M},
        rt_bwd={**loop, "M": 16, "J": 4},
        past_fwd={**past, "BLOCK": block},
        past_bwd=past,
        query_bwd={**heads, "C": 32, "num_warps": 2, "BLOCK": block},
    )


def _mlp_settings(tiles: int, sizes: PaddedSizes, dtype: torch.dtype, limits: GpuLimits) -> Settings:
    """Return how the loops hold weights and divide the MLP between programs.

    Square weights are pinned if the three of them fit into half of the shared memory.
    """
    D, F = sizes.D, sizes.F
    wide = dtype == torch.float32
    pinned = 6 * D * D * (4 if wide else 2) <= limits.memory

    # Parts wait for each other, so all must be on the GPU at once. They do so in PTX. A thread awaits no more than
    # 8 words, all of them in registers, which is n * D <= 1024.
    fitting = [n for n in (2, 4, 8) if n * tiles <= limits.multiprocessors and n * D <= 1024 and F % (64 * n) == 0]
    parts = 1 if wide or torch.version.hip else max(fitting, default=1)

    # If the square weights are pinned and a part's slice of the MLP is small, the part holds the slice, too.
    W = 32 if wide else 64
    if pinned and parts > 1 and F // parts <= 128:
        W = F // parts

    warps = 4 if D == 64 and not wide else 8  # so that a thread has a head of 8 channels
    settings: Settings = {
        "F": F,
        "WIDTH": sizes.width,
        "STEP": sizes.step,
        "W": W,
        "STAGES": 3 if pinned else 2,
        "PINNED": pinned,
        "PARTS": parts,
        "WARPS": warps,
        "num_warps": warps,
    }
    if parts > 1:
        settings["launch_cooperative_grid"] = True
    return settings
