"""The Recurrent Transformer's recurrence in fused Triton kernels (Oncescu et al. 2026, arXiv:2604.21215, section 2.2).

These kernels are for models so small that a step is bound by latency.

Forward pass. Time is split into chunks. At the start of a chunk, one kernel on the whole GPU lets the queries of the
chunk attend to all earlier chunks by matrix products. Then one program per (run, tile of sequences) loops over the
positions of the chunk, which need only the keys of the chunk itself.

Backward pass. It mirrors the forward pass from the last chunk to the first. Persistent pairs *pull* their gradients
from later queries, so there are no atomics, and results are bitwise reproducible. Only gradients of activations are
sequential. Gradients of weights, queries and temporary pairs are products over all positions after the loop.

Blocks. With blocks of several positions, a step of the loop takes a whole block, or one chunk of a longer block, and
the rows of a tile are positions of the same sequences. Attention to the temporary pairs of a block does not depend on
the loop, so it is computed together with the attention to earlier chunks.

Memory. A Feedback Transformer of one layer is the same recurrence with persistent pairs of mixtures of inputs and
outputs (``Weights.share``), and with zeros for temporary pairs (None).

Parts. A few runs have too few tiles to fill a GPU, and the MLP's weights do not fit into one multiprocessor, which
would have to read them at every position. Therefore several programs, the PARTS, process the same sequences. Each has a
part of the MLP's hidden layer and keeps its weights on the chip if they fit. It sends its part of the MLP's output to
the others and repeats all other work. If all programs fit on the GPU at once, kernels are also launched EARLY
(programmatic dependent launch): a kernel starts while the previous one still runs, and waits for its end before it
reads its results.

Tensors carry a leading run axis R (see ``mixers.base`` for the other dimensions, ``mixers.rt.fused.loops`` for a table
of the tensors). Logits are in units of log2.
"""

import torch
import triton
from torch import Tensor

from mixers.ops.kernels.common import gpu_limits
from mixers.ops.kernels.products import group_sum, rows_products, through_gain
from mixers.rt.fused.backward_loop import rt_bwd_kernel
from mixers.rt.fused.exchange import mailbox
from mixers.rt.fused.forward_loop import rt_fwd_kernel
from mixers.rt.fused.padding import PaddedSizes
from mixers.rt.fused.tiles import choose_tiles
from mixers.rt.naive import Weights
from mixers.rt.past_kernels import past_bwd_kernel, past_fwd_kernel, query_bwd_kernel


def unsupported(D: int, H: int, F: int, block: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernels do not support a case; None if they do. ``dtype`` is the dtype of q, k and v."""
    if block & (block - 1):
        return f"blocks of {block} positions (kernels: powers of two)"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"{dtype} (kernels compute in float32 or bfloat16)"

    sizes = PaddedSizes(1, D, H, F, block)
    if sizes.K > 64:
        return f"heads of {D // H} channels (kernels: at most 64)"
    if sizes.D > 256:
        return f"width {D} in {H} heads (kernels: at most 256, with {sizes.K} channels per head)"
    if sizes.F > 4 * sizes.D:
        return f"MLP width {F} at width {D} (kernels: at most {4 * sizes.D})"

    if sizes.D == 256 and dtype == torch.float32 and gpu_limits(device).memory < 163840:
        return f"width {D} in float32 on a GPU with less than 160 KiB of shared memory for a program"
    if device.type != "cuda" and not (triton.knobs.runtime.interpret and dtype == torch.float32):
        return f"{dtype} on {device.type} (kernels: cuda; with TRITON_INTERPRET=1 also the CPU, in float32 alone)"
    return None


def fused_forward(
    x_RBTD: Tensor,
    q_RBTD: Tensor,
    k_RBTD: Tensor | None,
    v_RBTD: Tensor | None,
    weights: Weights,
    slopes_H: Tensor,
    scale: float,
    block: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs of the recurrence, from chunk to chunk.

    Arguments are those of ``naive_recurrence`` with a leading run axis, also on every weight. x and the weights are
    float32. Products are computed in the dtype of q, k and v, float32 or bfloat16. With blocks of one position, None
    for k and v stands for temporary pairs of zeros.

    Returns:
        Outputs z (R, B, T, D) in float32, and the tensors that ``fused_backward`` takes as ``saved``.

    Raises:
        ValueError: the kernels do not support the case; see ``unsupported``.
    """
    R, B, T, D = x_RBTD.shape
    H, F, dtype = len(slopes_H), weights.up_FD.shape[1], q_RBTD.dtype
    reason = unsupported(D, H, F, block, dtype, x_RBTD.device)
    if reason is not None:
        raise ValueError(f"no kernel for {reason}")

    # Inputs and weights at the kernels' sizes.
    sizes = PaddedSizes(T, D, H, F, block)
    x = sizes.pad(x_RBTD, "TD")
    q = sizes.pad(q_RBTD, "TK")
    kt, vt = (None if y is None else sizes.pad(y, "TK") for y in (k_RBTD, v_RBTD))
    w = _flat_weights(weights, sizes, dtype)
    norms = _gains(weights, sizes)
    slopes = sizes.pad(slopes_H.to(x), "H")
    share = None if weights.share is None else weights.share.contiguous()
    tiles = choose_tiles(B, R, sizes, dtype, x.device)
    loop, past = tiles.rt_fwd, tiles.past_fwd
    T, D, H, F, C = sizes.T, sizes.D, sizes.H, sizes.F, loop["C"]

    # Outputs, and tensors for the backward pass.
    z = torch.empty_like(x)
    a, n, nz, nk, k, v = (torch.empty_like(q) for _ in range(6))
    r = x.new_empty(R, B, T, 3)
    g, slope = (q.new_empty(R, B, T, F) for _ in range(2))
    lse = x.new_empty(R, B, T, H)
    change = None if share is None else torch.empty_like(q)

    # Scratch: the softmax state of a chunk's queries, and the parts' mail.
    m, l = (x.new_empty(R, B, C, H) for _ in range(2))
    o = x.new_empty(R, B, C, D)
    programs = triton.cdiv(B * loop["STEP"], loop["M"]) * loop["PARTS"]
    mail = mailbox(R * programs, loop["M"] * D, loop["PARTS"], x.device)

    for start in range(0, T, C):
        stop = min(start + C, T)
        pairs = q, kt, vt, k, v, slopes
        past_fwd_kernel[(R * B * H // past["G"],)](
            *pairs, m, l, o, T, 1, 0, start, stop, start, S=C, FIRST=True, SKEW=0, **past
        )
        rt_fwd_kernel[programs, R](
            *(x, q, m, l, o, slopes, w, *norms, share),
            *(z, change, a, lse, n, nz, nk, r, g, slope, k, v, mail),
            *(B, T, start, stop, scale),
            KV_NORM=weights.kv_norm_D is not None,
            K_NORM=weights.k_norm_D is not None,
            **loop,
        )
    saved = a, lse, n, nz, nk, r, g, slope, k, v, w
    return sizes.crop(z, "TD"), saved if change is None else (*saved, change)


def fused_backward(
    dz_RBTD: Tensor,
    x_RBTD: Tensor,
    q_RBTD: Tensor,
    k_RBTD: Tensor | None,
    v_RBTD: Tensor | None,
    weights: Weights,
    slopes_H: Tensor,
    scale: float,
    block: int,
    z_RBTD: Tensor,
    saved: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Weights]:
    """Gradients of x (float32), q, k, v (their dtype) and of all weights (float32; None where the weight is None).

    Arguments are the gradient of the outputs, the arguments of ``fused_forward``, its outputs, and its saved tensors.
    """
    R, B, T, D = x_RBTD.shape
    H, F, dtype = len(slopes_H), weights.up_FD.shape[1], q_RBTD.dtype
    a, lse, n, nz, nk, r, g, slope, k, v, w, *optional = saved

    # Inputs at the kernels' sizes.
    sizes = PaddedSizes(T, D, H, F, block)
    dz = sizes.pad(dz_RBTD, "TD")
    q = sizes.pad(q_RBTD, "TK")
    kt, vt = (None if y is None else sizes.pad(y, "TK") for y in (k_RBTD, v_RBTD))
    norms = _gains(weights, sizes)
    slopes = sizes.pad(slopes_H.to(dz), "H")
    share = None if weights.share is None else weights.share.contiguous()
    change = None if share is None else optional[0]
    tiles = choose_tiles(B, R, sizes, dtype, dz.device)
    loop, past, queries = tiles.rt_bwd, tiles.past_bwd, tiles.query_bwd
    T, D, H, C = sizes.T, sizes.D, sizes.H, loop["C"]

    # Gradients to return, and rows whose products are the weights' gradients.
    dx = torch.empty_like(dz)
    dq, da, du, dy = (torch.empty_like(q) for _ in range(4))
    dkt, dvt = (None if y is None else torch.empty_like(q) for y in (kt, vt))
    dh = torch.empty_like(g)
    dkv = q.new_empty(R, B, T, 2 * D)
    delta = torch.empty_like(lse)
    row_tiles = triton.cdiv(B * loop["STEP"], loop["M"])
    dgain = dz.new_empty(R, triton.cdiv(T, C) * row_tiles, D)
    dshare = None if share is None else torch.empty_like(dgain)

    # Scratch: gradients of a chunk's persistent pairs, and the parts' mail.
    dk, dv = (dz.new_empty(R, B, C, D) for _ in range(2))
    programs = row_tiles * loop["PARTS"]
    mail = mailbox(R * programs, loop["M"] * D, loop["PARTS"], dz.device)

    groups = R * B * H // past["G"]
    keys = k if weights.k_norm_D is None else nk
    attention = da, lse, delta, slopes
    for start in reversed(range(0, T, C)):
        stop = min(start + C, T)
        later = max(stop, (start // block + 1) * block)
        past_bwd_kernel[(groups,)](
            q, k, v, *attention, dk, dv, T, 1, start, stop, later, T, start, S=C, FIRST=True, SKEW=0, **past
        )
        rt_bwd_kernel[programs, R](
            *(dz, n, nz, keys, r, slope, q, k, v, a, lse, slopes, dk, dv, w, *norms, share, change),
            *(dx, da, delta, du, dh, dy, dkv, dgain, dshare, mail),
            *(B, T, start, stop, scale),
            KV_NORM=weights.kv_norm_D is not None,
            K_NORM=weights.k_norm_D is not None,
            **loop,
        )
    query_bwd_kernel[groups, triton.cdiv(T, queries["C"])](
        q, kt, vt, k, v, *attention, dq, dkt, dvt, T, 1, 0, T, TEMPORARY=kt is not None, SKEW=0, **queries
    )

    # Gradients of the weights.
    dwo, dup, ddown, dwkv = rows_products((du, a), (dh, n), (dy, g), (dkv, nz))
    gradients = _weight_gradients(weights, sizes, dwo, dup, ddown, dwkv, dgain)
    if dshare is not None:
        gradients = gradients._replace(share=group_sum(dshare).sum(1, keepdim=True))
    dkt, dvt = (None if y is None else sizes.crop(y, "TK") for y in (dkt, dvt))
    return sizes.crop(dx, "TD"), sizes.crop(dq, "TK"), dkt, dvt, gradients


def _flat_weights(weights: Weights, sizes: PaddedSizes, dtype: torch.dtype) -> Tensor:
    """The five matrices (R, 3 D D + 2 F D) in the order that the kernels expect, as a new tensor."""
    matrices = (
        (weights.wo_DD, "DK"),
        (weights.wk_DD, "KD"),
        (weights.wv_DD, "KD"),
        (weights.up_FD, "FD"),
        (weights.down_DF, "DF"),
    )
    return torch.cat([sizes.pad(y, axes).flatten(1) for y, axes in matrices], 1).to(dtype)


def _gains(weights: Weights, sizes: PaddedSizes) -> tuple[Tensor, Tensor, Tensor]:
    """Gains of the three norms. In place of an absent gain, any tensor: the kernels take a pointer."""
    mlp_norm = sizes.pad(weights.mlp_norm_D, "D")
    kv_norm = mlp_norm if weights.kv_norm_D is None else sizes.pad(weights.kv_norm_D, "D")
    k_norm = mlp_norm if weights.k_norm_D is None else sizes.pad(weights.k_norm_D, "K")
    return mlp_norm, kv_norm, k_norm


def _weight_gradients(
    weights: Weights,
    sizes: PaddedSizes,
    dwo: Tensor,
    dup: Tensor,
    ddown: Tensor,
    dwkv: Tensor,
    dgain: Tensor,
) -> Weights:
    """Gradients of all weights.

    Args:
        weights: the weights.
        sizes: sizes of the layer and of the kernels.
        dwo, dup, ddown, dwkv: products over all rows; the right operands of dup and dwkv are normed rows before their
            gain.
        dgain: sums (R, tiles, D) for the gain of the keys.
    """
    dup, dmlp_norm = through_gain(sizes.crop(dup, "FD"), weights.up_FD, weights.mlp_norm_D)

    # Keys and values share one norm.
    dwkv = sizes.crop(dwkv.unflatten(1, (2, sizes.D)), "KD").flatten(1, 2)
    dkv_norm = None
    if weights.kv_norm_D is not None:
        wkv = torch.cat([weights.wk_DD, weights.wv_DD], 1)
        dwkv, dkv_norm = through_gain(dwkv, wkv, weights.kv_norm_D)
    dwk, dwv = dwkv.chunk(2, dim=1)

    return Weights(
        wo_DD=sizes.crop(dwo, "DK"),
        mlp_norm_D=dmlp_norm,
        up_FD=dup,
        down_DF=sizes.crop(ddown, "DF"),
        kv_norm_D=dkv_norm,
        wk_DD=dwk,
        k_norm_D=None if weights.k_norm_D is None else sizes.crop(group_sum(dgain), "K"),
        wv_DD=dwv,
    )
