"""The common part of the two loops over positions: their tensors and addresses.

Tensors of R runs, B sequences and T positions; scratch memory holds the C positions of a chunk. ``past_*`` and
``query_bwd`` are kernels of ``mixers.rt.past_kernels``; ``fwd`` is ``rt_fwd_kernel`` and ``bwd`` is ``rt_bwd_kernel``;
``pass`` is the code around them in ``mixers.rt.fused.passes``.

    name      shape              written by   read by                 meaning
    x         (R, B, T, D)       pass         fwd                     input of the layer, float32
    q         (R, B, T, D)       pass         past_*, fwd, bwd        queries
    w         (R, 3DD + 2FD)     pass         fwd, bwd                weights wo, wk, wv, up, down, flat
    *_norm    (R, D)             pass         fwd, bwd                gains of three norms, float32
    share     (R,)               pass         fwd, bwd                share of z in the memory, float32; or None
    slopes    (H,)               pass         past_*, fwd, bwd        ALiBi
    m, l      (R, B, C, H)       past_fwd     fwd                     softmax maximum and sum, float32
    o         (R, B, C, D)       past_fwd     fwd                     softmax numerator, float32
    k, v      (R, B, T, D)       fwd          past_*, fwd, bwd        persistent pairs
    z         (R, B, T, D)       fwd          pass                    output of the layer, float32
    change    (R, B, T, D)       fwd          bwd                     z - x; None without a share
    a         (R, B, T, D)       fwd          bwd, pass               output of the attention
    lse       (R, B, T, H)       fwd          past_bwd, bwd           log2 of the sum of attention weights, float32
    n         (R, B, T, D)       fwd          bwd, pass               normed input of the MLP, before the gain
    nz        (R, B, T, D)       fwd          bwd, pass               normed input of keys and values, before the gain
    nk        (R, B, T, D)       fwd          bwd                     normed keys, before the gain
    r         (R, B, T, 3)       fwd          bwd                     1 / rms of the three norms, float32
    g         (R, B, T, F)       fwd          pass                    hidden layer after its GELU
    slope     (R, B, T, F)       fwd          bwd                     slope of this GELU
    dz        (R, B, T, D)       pass         bwd                     gradient of z, float32
    dk, dv    (R, B, C, D)       past_bwd     bwd                     gradients of pairs from later chunks, float32
    da        (R, B, T, D)       bwd          past_bwd, bwd           gradient of a
    delta     (R, B, T, H)       bwd          past_bwd, bwd           da . a of each head, float32
    dx        (R, B, T, D)       bwd          pass                    gradient of x, float32
    du        (R, B, T, D)       bwd          pass                    gradient of Wo a
    dh        (R, B, T, F)       bwd          pass                    gradient of the hidden layer before its GELU
    dy        (R, B, T, D)       bwd          pass                    gradient of the MLP's output
    dkv       (R, B, T, 2D)      bwd          pass                    gradients of the products with Wk and Wv
    dgain     (R, tiles, D)      bwd          pass                    sums of a tile and a chunk for the keys' gain
    dshare    (R, tiles, D)      bwd          pass                    the same for the share, channel by channel
    mail      words              both loops   both loops              sums over PARTS, see ``mixers.rt.fused.exchange``

Tensors without "float32" have the dtype of the products. Logits are in units of log2. A persistent pair is made
of its position's memory m = x + share (z - x); without a share this is z.

Compile-time settings of both loops:
    D, K, F: width, head dim and hidden width of the MLP. A layer may be smaller (``mixers.rt.fused.padding``).
    WIDTH, UNIT: the layer's own width, which divides the sums of norms, and 1 / sqrt(its own head dim).
    C: positions of a chunk.
    M: rows of a tile: STEP positions of each of M / STEP sequences.
    J: pairs or queries of the chunk that are attended to at a time.
    STEP: positions that a step of the loop takes. They do not attend to each other's persistent pairs.
    W, STAGES: columns of the hidden layer at a time, and stages of the pipeline that reads their weights.
    KV_NORM, K_NORM: whether the input of keys and values, and the keys, are normed.
    PINNED: whether the square weights stay on the chip.
    PARTS: programs that share a tile. Each has F / PARTS columns of the hidden layer and repeats all other work. A
        tensor that all of them compute is written by one of them.
    WARPS: warps of a program.
    EARLY: whether the launch is a programmatic dependent one.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Addresses(NamedTuple):
    """Indices of a tile's rows and their offsets in the tensors at position 0, or at the first of a chunk.

    Attributes:
        place_M: position of a row within its step.
        first_M: number of a row among all positions.
        d_D, head_H, w_W: channels, heads, and the first columns of this part's slice of the hidden layer.
        at_HM, at_HMK: offsets of heads, and of channels with heads first, in tensors of all positions.
        sequence_HM, sequence_HMK: offsets of the first position of a row's sequence, in the same tensors.
        state_HM, state_HMK: as ``at_*``, in tensors of the positions of a chunk.
        live_M, live_1M, live_1M1, live_M1: whether a row belongs to a sequence of the batch, in several shapes.
        at_M, at_MD, at_MW: offsets in r, in tensors of D channels and in tensors of F channels.
    """

    place_M: tl.tensor
    first_M: tl.tensor
    d_D: tl.tensor
    head_H: tl.tensor
    w_W: tl.tensor
    at_HM: tl.tensor
    at_HMK: tl.tensor
    sequence_HM: tl.tensor
    sequence_HMK: tl.tensor
    state_HM: tl.tensor
    state_HMK: tl.tensor
    live_M: tl.tensor
    live_1M: tl.tensor
    live_1M1: tl.tensor
    live_M1: tl.tensor
    at_M: tl.tensor
    at_MD: tl.tensor
    at_MW: tl.tensor


@triton.jit
def program(
    mail_ptr: tl.tensor,
    D: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Run, tile and part of this program, and the mail of its tile."""
    run = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    mail_ptr += (run * (tl.num_programs(0) // PARTS) + tile) * (PARTS * M * D)
    return run, tile, part, mail_ptr


@triton.jit
def addresses(
    run: tl.tensor,
    tile: tl.tensor,
    part: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    STEP: tl.constexpr,
    W: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``Addresses`` of a part's rows."""
    # Rows. Rows beyond the last sequence repeat it and are not written.
    H: tl.constexpr = D // K
    sequence_M = (tile * M + tl.arange(0, M)) // STEP
    place_M = tl.arange(0, M) % STEP
    row_M = run * B + tl.minimum(sequence_M, B - 1)
    first_M = row_M * T + place_M
    d_D = tl.arange(0, D)

    # In-chunk attention has heads first and claims no contiguity over them: Triton then gives a thread whole heads of
    # one sequence and all J keys, so its sums over K and J stay inside the thread.
    head_H = tl.max_contiguous(tl.arange(0, H), [1])
    hk_H1K = head_H[:, None, None] * K + tl.arange(0, K)[None, None, :]
    at_HM = (first_M * H)[None, :] + head_H[:, None]
    at_HMK = (first_M * D)[None, :, None] + hk_H1K
    sequence_HM = (row_M * T * H)[None, :] + head_H[:, None]
    sequence_HMK = (row_M * T * D)[None, :, None] + hk_H1K
    state_HM = ((row_M * C + place_M) * H)[None, :] + head_H[:, None]
    state_HMK = ((row_M * C + place_M) * D)[None, :, None] + hk_H1K

    live_M = sequence_M < B
    live_1M = live_M[None, :]
    live_1M1 = live_M[None, :, None]
    live_M1 = live_M[:, None]

    # Elsewhere rows come first.
    w_W = part * (F // PARTS) + tl.arange(0, W)
    at_M = first_M * 3
    at_MD = (first_M * D)[:, None] + d_D[None, :]
    at_MW = (first_M * F)[:, None] + w_W[None, :]
    return Addresses(
        place_M=place_M,
        first_M=first_M,
        d_D=d_D,
        head_H=head_H,
        w_W=w_W,
        at_HM=at_HM,
        at_HMK=at_HMK,
        sequence_HM=sequence_HM,
        sequence_HMK=sequence_HMK,
        state_HM=state_HM,
        state_HMK=state_HMK,
        live_M=live_M,
        live_1M=live_1M,
        live_1M1=live_1M1,
        live_M1=live_M1,
        at_M=at_M,
        at_MD=at_MD,
        at_MW=at_MW,
    )


@triton.jit
def weights(
    w_ptr: tl.tensor,
    run: tl.tensor,
    D: tl.constexpr,
    F: tl.constexpr,
):
    """Pointers to the five matrices of a run."""
    wo_ptr = w_ptr + run * (3 * D * D + 2 * F * D)
    wk_ptr = wo_ptr + D * D
    wv_ptr = wk_ptr + D * D
    up_ptr = wv_ptr + D * D
    down_ptr = up_ptr + F * D
    return wo_ptr, wk_ptr, wv_ptr, up_ptr, down_ptr


@triton.jit
def writes(tensor: tl.constexpr, part: tl.tensor, PARTS: tl.constexpr):
    """Whether a part writes a tensor that all parts have. Parts write different tensors, because stores take time."""
    return part == tensor % PARTS
