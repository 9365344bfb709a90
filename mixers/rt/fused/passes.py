"""The Recurrent Transformer's recurrence in fused Triton kernels (Oncescu et al. 2026, arXiv:2604.21215, section 2.2).

For models so small that a step is bound by latency. Time is split in chunks. At the start of a chunk one kernel, spread
over the whole GPU, lets its queries attend to all earlier chunks with matrix products; then one program per (run, tile
of sequences) walks through the positions of the chunk, in which only the keys of the chunk itself remain. The backward
mirrors this from the last chunk to the first: gradients of the persistent pairs are *pulled* from later queries, so
there are no atomics and results repeat bitwise. Only activation gradients are sequential; weight gradients, gradients
of queries and of temporary pairs are products over all positions after the loop.

With blocks of several positions a step of the loop takes a whole block, or the chunk that is a part of a longer one,
and the rows of a tile are positions of the same sequences. Attention inside a block, to temporary pairs, waits for
nothing: it is done with that to earlier chunks.

Few runs have too few tiles to fill a GPU, and the MLP's weights, which do not fit into one multiprocessor, would pass
through each at every position. There several programs, the PARTS, walk through the same sequences: each has a part of
the MLP's hidden layer, whose weights it holds on the chip where they fit, does everything else as the others do, and
sends them its part of the MLP's output. There the kernels of a pass are also launched EARLY (programmatic dependent
launch): a kernel begins while the one ahead of it still runs and waits for its end where it needs what that writes.

Tensors carry a leading run axis R (see ``mixers.base`` for the other dimensions); logits are kept in units of log2.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mixers.ops.kernels.products import group_sum, rows_products, through_gain
from mixers.rt.fused.exchange import mailbox
from mixers.rt.fused.loop_kernels import rt_bwd_kernel, rt_fwd_kernel
from mixers.rt.fused.room import CHUNK, Room
from mixers.rt.naive import Weights
from mixers.rt.past_kernels import past_bwd_kernel, past_fwd_kernel, query_bwd_kernel


def unsupported(D: int, H: int, F: int, block: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernels cannot take this case, in words; None if they can. ``dtype`` is that of q, k and v."""
    if block & (block - 1):
        return f"blocks of {block} positions (kernels: powers of two)"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"{dtype} (kernels compute in float32 or bfloat16)"
    room = Room(1, D, H, F, block)
    if room.K > 64:
        return f"heads of {D // H} channels (kernels: at most 64)"
    if room.D > 256:
        return f"width {D} in {H} heads (kernels: at most 256, with {room.K} channels a head)"
    if room.F > 4 * room.D:
        return f"MLP width {F} at width {D} (kernels: at most {4 * room.D})"
    if room.D == 256 and dtype == torch.float32 and _gpu(device).memory < 163840:
        return f"width {D} in float32 on a GPU with less than 160 KiB of shared memory for a program"
    if device.type != "cuda" and not (triton.knobs.runtime.interpret and dtype == torch.float32):
        return f"{dtype} on {device.type} (kernels: cuda; TRITON_INTERPRET=1 lends them the CPU in float32 alone)"
    return None


class _Gpu(NamedTuple):
    """What tiles depend on.

    Attributes:
        multiprocessors: how many there are.
        memory: bytes of shared memory that a program may have.
        early_launch: whether a kernel can be launched before the one ahead of it has ended.
    """

    multiprocessors: int
    memory: int
    early_launch: bool


@cache
def _gpu(device: torch.device) -> _Gpu:
    """The H200's in the interpreter."""
    if device.type != "cuda":
        return _Gpu(multiprocessors=132, memory=232448, early_launch=False)
    properties = torch.cuda.get_device_properties(device)
    return _Gpu(
        multiprocessors=properties.multi_processor_count,
        memory=getattr(properties, "shared_memory_per_block_optin", 65536),
        early_launch=torch.version.hip is None and properties.major >= 9,
    )


def _tiles(B: int, R: int, room: Room, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, Any], ...]:
    """Compile-time settings of rt_fwd_kernel, rt_bwd_kernel, past_fwd_kernel, past_bwd_kernel, query_bwd_kernel.

    Tiles of 16 rows are the fastest while there are no more programs than multiprocessors; where there are half as
    many or less, several share a tile. Beyond, the forward is faster with tiles of 32; the backward, which spills
    registers with them, in several waves. Square weights are pinned where the three of them fit and leave as much room.
    """
    wide = dtype == torch.float32
    D, K, F = room.D, room.K, room.F
    multiprocessors, memory, early_launch = _gpu(device)
    tiles = R * triton.cdiv(B * room.step, 16)
    early = early_launch and tiles <= multiprocessors
    M = 16 if tiles <= multiprocessors else 32
    pinned = 6 * D * D * (4 if wide else 2) <= memory
    # n * D <= 1024: a thread awaits no more than 8 words, all of them in registers
    fitting = [n for n in (2, 4, 8) if n * tiles <= multiprocessors and n * D <= 1024 and F % (64 * n) == 0]
    parts = 1 if wide or torch.version.hip else max(fitting, default=1)  # they wait for each other in PTX
    W = 32 if wide else 64
    if pinned and parts > 1 and F // parts <= 128:
        W = F // parts  # at once, so that the part holds its slice of the MLP
    shape = {"D": D, "K": K, "UNIT": room.head_dim**-0.5, "C": CHUNK}
    warps = 4 if D == 64 and not wide else 8  # so that a thread has a head of 8 channels
    launch = {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
    loop = {
        **shape, "F": F, "WIDTH": room.width, "STEP": room.step, "W": W, "STAGES": 3 if pinned else 2, "PINNED": pinned,
        "PARTS": parts, "WARPS": warps, "num_warps": warps, **launch,
    }  # fmt: skip
    if parts > 1:
        loop["launch_cooperative_grid"] = True  # parts wait for each other, so all must be on the GPU at once
    G = 2 if K == 8 else 1
    heads = {**shape, "G": G, "E": G * K, "J": 32}
    past = {**heads, "num_warps": 1, **launch}
    return (
        {**loop, "M": M, "J": 128 // M},
        {**loop, "M": 16, "J": 4},
        {**past, "BLOCK": room.block},
        past,
        {**heads, "C": 32, "num_warps": 2, "BLOCK": room.block},
    )


def triton_forward(
    x_RBTD: Tensor,
    q_RBTD: Tensor,
    k_RBTD: Tensor,
    v_RBTD: Tensor,
    weights: Weights,
    slopes_H: Tensor,
    scale: float,
    block: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs z (R, B, T, D) in float32 and what ``triton_backward`` wants as ``saved``.

    Arguments are those of ``naive_recurrence`` with a leading run axis, also on every weight; x and weights float32.
    Products are computed in the dtype of q, k, v (float32 or bfloat16).
    """
    R, B, T, D = x_RBTD.shape
    H, F, dtype = len(slopes_H), weights.up_FD.shape[1], q_RBTD.dtype
    reason = unsupported(D, H, F, block, dtype, x_RBTD.device)
    if reason is not None:
        raise ValueError(f"no kernel for {reason}")
    room = Room(T, D, H, F, block)
    x = room.fill(x_RBTD, "TD")
    q, kt, vt = (room.fill(y, "TK") for y in (q_RBTD, k_RBTD, v_RBTD))
    # In the order of the kernels; a new tensor in any dtype, for the backward is handed it.
    linear = (
        (weights.wo_DD, "DK"),
        (weights.wk_DD, "KD"),
        (weights.wv_DD, "KD"),
        (weights.up_FD, "FD"),
        (weights.down_DF, "DF"),
    )
    w = torch.cat([room.fill(y, axes).flatten(1) for y, axes in linear], 1).to(dtype)
    norms, slopes = _gains(weights, room), room.fill(slopes_H.to(x), "H")
    loop, _, past, *_ = _tiles(B, R, room, dtype, x.device)
    T, D, H, F, C = room.T, room.D, room.H, room.F, loop["C"]
    z = torch.empty_like(x)
    a, n, nz, nk, k, v = (torch.empty_like(q) for _ in range(6))
    r = x.new_empty(R, B, T, 3)
    g, slope = q.new_empty(R, B, T, F), q.new_empty(R, B, T, F)
    lse = x.new_empty(R, B, T, H)
    m, l = x.new_empty(R, B, C, H), x.new_empty(R, B, C, H)
    o = x.new_empty(R, B, C, D)
    programs = triton.cdiv(B * loop["STEP"], loop["M"]) * loop["PARTS"]
    mail = mailbox(R * programs, loop["M"] * D, loop["PARTS"], x.device)
    for start in range(0, T, C):
        stop = min(start + C, T)
        past_fwd_kernel[(R * B * H // past["G"],)](
            q, kt, vt, k, v, slopes, m, l, o, T, 1, 0, start, stop, start, S=C, FIRST=True, SKEW=0, **past
        )  # fmt: skip
        rt_fwd_kernel[programs, R](
            x, q, m, l, o, slopes, w, *norms,
            z, a, lse, n, nz, nk, r, g, slope, k, v, mail, B, T, start, stop, scale,
            KV_NORM=weights.kv_norm_D is not None, K_NORM=weights.k_norm_D is not None, **loop,
        )  # fmt: skip
    return room.cut(z, "TD"), (a, lse, n, nz, nk, r, g, slope, k, v, w)


def triton_backward(
    dz_RBTD: Tensor,
    x_RBTD: Tensor,
    q_RBTD: Tensor,
    k_RBTD: Tensor,
    v_RBTD: Tensor,
    weights: Weights,
    slopes_H: Tensor,
    scale: float,
    block: int,
    z_RBTD: Tensor,
    saved: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Weights]:
    """Gradients of x (float32), q, k, v (their dtype) and of all weights (float32; None where the weight is None)."""
    R, B, T, D = x_RBTD.shape
    H, F, dtype = len(slopes_H), weights.up_FD.shape[1], q_RBTD.dtype
    a, lse, n, nz, nk, r, g, slope, k, v, w = saved
    room = Room(T, D, H, F, block)
    dz = room.fill(dz_RBTD, "TD")
    q, kt, vt = (room.fill(y, "TK") for y in (q_RBTD, k_RBTD, v_RBTD))
    norms, slopes = _gains(weights, room), room.fill(slopes_H.to(dz), "H")
    _, loop, _, past, queries = _tiles(B, R, room, dtype, dz.device)
    T, D, H, C = room.T, room.D, room.H, loop["C"]
    tiles, groups = triton.cdiv(B * loop["STEP"], loop["M"]), R * B * H // past["G"]
    dx = torch.empty_like(dz)
    dq, dkt, dvt, da, du, dy = (torch.empty_like(q) for _ in range(6))
    dh = torch.empty_like(g)
    dkv = q.new_empty(R, B, T, 2 * D)
    delta = torch.empty_like(lse)
    dk, dv = dz.new_empty(R, B, C, D), dz.new_empty(R, B, C, D)
    dgain = dz.new_empty(R, triton.cdiv(T, C) * tiles, D)
    programs = tiles * loop["PARTS"]
    mail = mailbox(R * programs, loop["M"] * D, loop["PARTS"], dz.device)
    for start in reversed(range(0, T, C)):
        stop = min(start + C, T)
        later = max(stop, (start // block + 1) * block)
        past_bwd_kernel[(groups,)](
            q, k, v, da, lse, delta, slopes, dk, dv, T, 1, start, stop, later, T, start,
            S=C, FIRST=True, SKEW=0, **past,
        )  # fmt: skip
        rt_bwd_kernel[programs, R](
            dz, n, nz, k if weights.k_norm_D is None else nk, r, slope, q, k, v, a, lse, slopes, dk, dv,
            w, *norms, dx, da, delta, du, dh, dy, dkv, dgain, mail, B, T, start, stop, scale,
            KV_NORM=weights.kv_norm_D is not None, K_NORM=weights.k_norm_D is not None, **loop,
        )  # fmt: skip
    query_bwd_kernel[groups, triton.cdiv(T, queries["C"])](
        q, kt, vt, k, v, da, lse, delta, slopes, dq, dkt, dvt, T, 1, 0, T, TEMPORARY=True, SKEW=0, **queries
    )  # fmt: skip
    dwo, dup, ddown, dwkv = rows_products((du, a), (dh, n), (dy, g), (dkv, nz))
    dup, dmlp_norm = through_gain(room.cut(dup, "FD"), weights.up_FD, weights.mlp_norm_D)
    dwkv = room.cut(dwkv.unflatten(1, (2, D)), "KD").flatten(1, 2)
    if weights.kv_norm_D is not None:
        dwkv, dkv_norm = through_gain(dwkv, torch.cat([weights.wk_DD, weights.wv_DD], 1), weights.kv_norm_D)
    dwk, dwv = dwkv.chunk(2, dim=1)
    gradients = Weights(
        wo_DD=room.cut(dwo, "DK"),
        mlp_norm_D=dmlp_norm,
        up_FD=dup,
        down_DF=room.cut(ddown, "DF"),
        kv_norm_D=None if weights.kv_norm_D is None else dkv_norm,
        wk_DD=dwk,
        k_norm_D=None if weights.k_norm_D is None else room.cut(group_sum(dgain), "K"),
        wv_DD=dwv,
    )
    return room.cut(dx, "TD"), room.cut(dq, "TK"), room.cut(dkt, "TK"), room.cut(dvt, "TK"), gradients


def _gains(weights: Weights, room: Room) -> tuple[Tensor, Tensor, Tensor]:
    """Gains of the three norms; where a norm is absent, any tensor, for the kernels take a pointer."""
    mlp_norm = room.fill(weights.mlp_norm_D, "D")
    kv_norm = mlp_norm if weights.kv_norm_D is None else room.fill(weights.kv_norm_D, "D")
    k_norm = mlp_norm if weights.k_norm_D is None else room.fill(weights.k_norm_D, "K")
    return mlp_norm, kv_norm, k_norm
