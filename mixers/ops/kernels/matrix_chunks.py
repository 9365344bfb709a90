"""The recurrence of linear-attention layers as products of chunks of positions in tensor cores.

    S_t = exp(g_t) S_{t-1} + a_t u_t^T + k_t v_t^T,   u_t = S_{t-1}^T b_t          o_t = S_t^T q_t

With a bonus, o_t = S_{t-1}^T q_t + ((bonus k_t) . q_t) v_t. The delta rule has b, but no a, and a position may have N
pairs; see ``mixers.ops.linear_recurrence``, whose loop over positions is better where positions are few. Yang et al.
2024, arXiv:2406.06484 (section 3.2) and 2412.06464 (section 3.3), and Kimi Team 2025, arXiv:2510.26692 (section 3)
derive these forms.

A chunk has C pairs. Let S be the state before it and c_i the sums of g from its start to pair i. Rows x are those of a,
or those of k if there is no a; by the delta rule, b stands for -b. A product of two kinds of rows has the decays
between them, and only earlier rows on its right; those with queries have q_i . r_i, or its bonus, on their diagonal:

    (l r)_ij = sum over the channels of l_i r_j exp(c_i - c_j)    for j < i

    q_in = exp(c) q    b_in = exp(c) b    x_out = exp(c_C - c) x    k_out = exp(c_C - c) k
    X = (1 - (b x))^-1    W = X b_in    U = X V + W S    or    U = X (b k) V + W S    or, without b, U = V
    O = q_in S + (q x) U          S <- exp(c_C) S + x_out^T U          with a, + (q k) V and + k_out^T V

With a, the left rows b see the decays before their position: b exp(-g) stands for b, and with a bonus q exp(-g) for q.
With dS the gradient of the state after the chunk,

    dU = (q x)^T dO + x_out dS    dY = X^T dU    dS <- exp(c_C) dS + q_in^T dO + W^T dU
    dV = dY    or    dV = (b k)^T dY + (q k)^T dO + k_out dS    or, without b, dV = dU
    d(q x) = dO U^T    d(b x) = dY U^T    d(q k) = dO V^T    d(b k) = dY V^T
    dq_in = dO S^T    db_in = dY S^T    dx_out = U dS^T    dk_out = V dS^T

The gradient of g_t is the sum of q dq + b db - x dx - k dk over the later pairs of the chunk, and what goes through its
end: exp(c_C) S . dS, and the sums of x . dx_out and k . dk_out, without the exponentials.

With a decay per channel, no single pair of factors of l_i and r_j would be bounded. A chunk has blocks of M rows, and
the product of two blocks has the factors exp(c_i - m) and exp(m - c_j), where m is the sum before the later block. The
pairs (i, j) of one block fall into two levels. On level 1, i is in the second half and j in the first, and m is the sum
at the end of the first half. On level 0, both are in the same half, of NEAR rows, and m is the sum in its middle.
Factors are at most 1, and on level 0 at most exp(-STRONGEST NEAR / 2); stronger decays count as STRONGEST, which is
float32's epsilon. In the kernels, all logarithms are to base 2.

    name           shape                written by      read by
    q              (R, B, T, H, K)      caller          ends, products, rows_bwd
    k              (R, B, T N, H, K)    caller          ends, products, rows_bwd
    v              (R, B, T N, H, V)    caller          solve, states_fwd, outputs, products_bwd, rows_bwd
    g              (R, B, T, H, G)      caller          ends, products, rows_bwd       G = K or 1, float32
    a, b           (R, B, T N, H, K)    caller          ends, products, rows_bwd
    bonus          (R, H, K)            caller          products, rows_bwd             float32
    c              (tiles, C, G)        ends            products, states, rows_bwd     float32
    q_in           (tiles, C, K)        ends            outputs, states_bwd            these four with decays;
    b_in           (tiles, C, K)        ends            solve                          without, rows of the caller
    x_out          (tiles, C, K)        ends            states, products_bwd           stand for them
    k_out          (tiles, C, K)        ends            states_fwd, products_bwd       with a
    qx             (tiles, C, C)        products        outputs, states_bwd, products_bwd
    bx             (tiles, C, C)        products        solve                          with b; float32
    qk             (tiles, C, C)        products        outputs, products_bwd          with a
    bk             (tiles, C, C)        products        solve, products_bwd            with a
    inverse        (tiles, C, C)        solve           solve, products_bwd            X; with b; kept
    w              (tiles, C, K)        solve           states                         with b
    u              (tiles, C, V)        solve           states_fwd                     X V or X (b k) V; with b
                                        states_fwd      outputs, products_bwd, rows_bwd   U, in its place; kept
    S              (tiles, V, K)        states_fwd      outputs, rows_bwd              before a chunk; kept
    o              (R, B, T, H, V)      outputs         caller
    do             (R, B, T, H, V)      caller          states_bwd, products_bwd, rows_bwd
    dS             (tiles, V, K)        states_bwd      products_bwd, rows_bwd         after a chunk
    du             (tiles, C, V)        states_bwd      products_bwd                   with b
                                        products_bwd    rows_bwd                       dY, in its place
    dqx .. dbk     (tiles, C, C)        products_bwd    rows_bwd
    dv             (R, B, T N, H, V)    products_bwd    caller
    dq .. dbonus   like q .. bonus      rows_bwd        caller                         dbonus (tiles, K), dg of a block

A tile is a chunk of a head of a sequence. Only the states go from chunk to chunk, in programs of J of the V channels;
all else is computed for all chunks at once, in blocks of E channels. The backward pass is given what the forward pass
has kept, each part about as large as the values, and calls ``ends``, ``products`` and ``solve`` again for the others.

Without decays ``ends`` is not needed. Linear attention and the delta rule without decays need no ``products`` and no
``rows_bwd`` either: ``products_bwd``, which also reads q, k, b and S, writes dq, dk and db. The delta rule's qx is
written by ``solve``, which reads q, k and b; linear attention's is computed where it is read. bx and the gradients of
products stay on the chip. Queries may then be float32, as in ``mixers.ops.kernels.chunked_recurrence``.

Kernels with decays between rows have one warp and blocks of M rows: they hold few numbers at once, so that registers
suffice, warps need not wait for one another, and pairs of blocks of which the right one is later are left out. Programs
of one tile are neighbours, as they read the same rows.
Products of 64 rows have at least 64 columns: with fewer, compiled kernels were wrong on Hopper (see
``mixers.ops.kernels.chunked_recurrence``).

Here are the launches; the kernels are in ``matrix_chunks_forward`` and ``matrix_chunks_backward``, and what both need,
M, NEAR and STRONGEST among it, in ``matrix_chunks_tiles``.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from mixers.ops.kernels.common import contiguous, gpu_limits, kernels_take
from mixers.ops.kernels.matrix_chunks_backward import (
    chunks_products_bwd_kernel,
    chunks_rows_bwd_kernel,
    chunks_states_bwd_kernel,
)
from mixers.ops.kernels.matrix_chunks_forward import (
    chunks_ends_kernel,
    chunks_outputs_kernel,
    chunks_products_kernel,
    chunks_solve_kernel,
    chunks_states_fwd_kernel,
)
from mixers.ops.kernels.matrix_chunks_tiles import M
from mixers.ops.method import Method, Optionals, Tensors

CHUNK = 64
BLOCK = 64
"""Channels of a block, E."""
ENDS: dict[str, Any] = {"num_warps": 4}
PRODUCTS: dict[str, Any] = {"num_stages": 1}
SOLVE: dict[str, Any] = {"num_warps": 4, "num_stages": 1}
STATES: dict[str, Any] = {"J": 32, "num_warps": 4}
OUTPUTS: dict[str, Any] = {"num_warps": 4, "num_stages": 1}
PRODUCTS_BWD: dict[str, Any] = {"num_warps": 4, "num_stages": 1}
ROWS_BWD: dict[str, Any] = {"E": 32, "num_warps": 1, "num_stages": 1}
"""Settings of the kernels. Those of states, outputs and products_bwd are the fastest of eight on an H200."""
MOST_CHANNELS = 256
"""Largest width of keys for which a block of the state fits into registers."""


def matrix_chunks_method(dtype: torch.dtype) -> Method:
    """``mixers.ops.linear_recurrence.matrix_recurrence`` with outputs in ``dtype``, for many positions.

    Tensors: q (R, B, T, H, K), k (R, B, T N, H, K), v (R, B, T N, H, V); g (R, B, T, H, K or 1) float32, a and b (R, B,
    T N, H, K), and the bonus (R, H, K) float32, each of which may be None. N is 1 but for the delta rule. Without g, a
    and the bonus, queries may be float32, which is the type of their gradient, too.
    """

    def forward(*tensors: Tensor | None) -> tuple[Tensors, Tensors]:
        given = contiguous(*tensors)
        q, k, v = given[:3]
        sizes, _, parts = _parts(given)

        # States.
        tiles = _tiles(q, k)
        S = v.new_empty(tiles, v.shape[-1], q.shape[-1])
        grid, settings = _of_states(v, sizes)
        used = [parts[name] for name in ("c", "x_out", "k_out", "w", "u")]
        chunks_states_fwd_kernel[grid](v, *used, S, **settings)

        # Outputs.
        o = v.new_empty(*q.shape[:-1], v.shape[-1], dtype=dtype)
        settings = {**sizes, "E": BLOCK, **OUTPUTS}
        blocks = (tiles, triton.cdiv(v.shape[-1], BLOCK))
        used = [parts[name] for name in ("q_in", "qx", "qk", "u")]
        chunks_outputs_kernel[blocks](k, v, *used, S, o, **settings)
        return (o,), tuple(y for y in (parts["inverse"], parts["u"], S) if y is not None)

    def backward(gradients: Tensors, tensors: Sequence[Tensor | None], outputs: Tensors, saved: Tensors) -> Optionals:
        (do,), given = contiguous(*gradients), contiguous(*tensors)
        q, _, v, g, a, b, bonus = given
        *solved, S = saved
        sizes, levels, parts = _parts(given, *solved)
        tiles, K = S.shape[0], q.shape[-1]

        # States.
        dS, du = torch.empty_like(S), None if b is None else torch.empty_like(parts["u"])
        grid, settings = _of_states(v, sizes)
        used = [parts[name] for name in ("c", "q_in", "x_out", "qx", "w")]
        chunks_states_bwd_kernel[grid](do, *used, du, dS, **settings)

        # Values and products, and rows where there are no decays.
        found: list[Any] = [y if y is None else torch.empty_like(y) for y in given]
        is_plain = _is_plain(given)
        products = [None if is_plain or y is None else torch.empty_like(parts["qx"]) for y in (q, b, a, a)]
        rows = (q, given[1], v, b) if is_plain else (None, None, v, None)
        drows = (*found[:3], found[5]) if is_plain else (None, None, found[2], None)
        settings = {**sizes, "E": BLOCK, **PRODUCTS_BWD}
        used = [parts[name] for name in ("x_out", "k_out", "qx", "qk", "bk", "inverse", "u")]
        chunks_products_bwd_kernel[(tiles,)](*rows, *used, S, do, du, dS, *drows, *products, **settings)
        if is_plain:
            return found

        # Rows.
        settings = {**sizes, **levels, "sequences": q.shape[1], **ROWS_BWD}
        blocks = triton.cdiv(K, settings["E"])
        scalar = g is not None and g.shape[-1] == 1
        if scalar:
            found[3] = g.new_empty(*g.shape[:-1], blocks)
        if bonus is not None:
            found[6] = bonus.new_empty(tiles, K)
        written = *found[:2], *found[3:]
        chunks_rows_bwd_kernel[(tiles * blocks,)](
            *given, parts["c"], parts["u"], S, do, du, dS, *products, *written, **settings
        )

        # Sums over blocks, and over chunks and sequences.
        if scalar and blocks > 1:
            found[3] = found[3].sum(-1, keepdim=True)
        if bonus is not None:
            found[6] = found[6].view(*q.shape[:2], q.shape[3], -1, K).sum((1, 3))
        return found

    return Method(forward, backward)


def _parts(given: tuple[Any, ...], *solved: Tensor) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return sizes of all launches, settings of products, and the parts that are computed for all chunks at once.

    With b, the backward pass has ``solved`` two of them, X and U.
    """
    q, k, v, g, a, b, bonus = given
    _, B, T, H, K = q.shape
    V, N = v.shape[-1], v.shape[2] // T
    tiles = _tiles(q, k)
    G = 0 if g is None else g.shape[-1]
    sizes = {"T": T, "H": H, "K": K, "V": V, "G": G, "N": N, "C": CHUNK}
    precision = "tf32" if q.dtype == torch.bfloat16 else "tf32x3"
    levels = {"LEVELS": 2 if G > 1 else 1, "PRECISION": precision}

    # Parts of each chunk.
    widths = dict.fromkeys(("q_in", "b_in", "x_out", "k_out", "w"), K) | {"u": V}
    widths |= dict.fromkeys(("qx", "qk", "bk", "inverse"), CHUNK)
    absent = {"k_out", "qk", "bk"} if a is None else set()
    absent |= {"b_in", "inverse", "w", "u"} if b is None else {"inverse", "u"} if solved else set()
    absent |= {"q_in", "b_in", "x_out", "k_out"} if g is None else set()
    is_plain = _is_plain(given)
    absent |= {"qx"} if is_plain and b is None else set()
    parts = {
        "c": None if g is None else g.new_empty(tiles, CHUNK, G),
        "bx": None if b is None or solved or is_plain else v.new_empty(tiles, CHUNK, CHUNK, dtype=torch.float32),
        **{name: None if name in absent else v.new_empty(tiles, CHUNK, width) for name, width in widths.items()},
    }
    parts |= dict(zip(("inverse", "u"), solved, strict=False))

    # Kernels.
    settings = {"T": T, "H": H, "K": K, "G": G, "N": N, "C": CHUNK}
    if g is None:
        parts |= {"q_in": q, "b_in": b, "x_out": k if a is None else a, "k_out": None if a is None else k}
    else:
        used = [parts[name] for name in ("c", "q_in", "b_in", "x_out", "k_out")]
        blocks = (tiles, triton.cdiv(K, BLOCK))
        chunks_ends_kernel[blocks](q, k, g, a, b, bonus, *used, **settings, E=BLOCK, **ENDS)

    if not is_plain:
        used = [parts[name] for name in ("c", "qx", "bx", "qk", "bk")]
        E = max(M.value, triton.next_power_of_2(K))
        settings |= {"sequences": B, "E": E, "LEVELS": levels["LEVELS"], "num_warps": max(1, E // BLOCK), **PRODUCTS}
        chunks_products_kernel[(tiles * (CHUNK // M.value),)](q, k, g, a, b, bonus, *used, **settings)

    if b is not None:
        rows = (q, k) if is_plain else (None, None)
        used = [parts[name] for name in ("b_in", "bx", "bk", "qx", "inverse", "w", "u")]
        settings = {**sizes, "E": BLOCK, "SOLVED": bool(solved), "PRECISION": precision, **SOLVE}
        chunks_solve_kernel[(tiles,)](*rows, v, *used, **settings)
    return sizes, levels, parts


def _tiles(q: Tensor, k: Tensor) -> int:
    """Return the number of chunks of all heads."""
    return q.shape[:2].numel() * q.shape[3] * triton.cdiv(k.shape[2], CHUNK)


def _is_plain(given: tuple[Any, ...]) -> bool:
    """Whether this is linear attention or the delta rule without decays, whose rows need no factors."""
    _, _, _, g, a, _, bonus = given
    return g is None and a is None and bonus is None


def _of_states(v: Tensor, sizes: dict[str, Any]) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return grid and settings of the kernels that go from chunk to chunk.

    Rows in float32 leave no room to wait, and a GPU with less than 128 KiB for a program half of it.
    """
    I = max(BLOCK, triton.next_power_of_2(sizes["K"]))
    stages = 1 if v.dtype == torch.float32 else 4 if I == BLOCK else 2
    if stages > 1 and gpu_limits(v.device).memory < 131072:
        stages //= 2
    settings = {**sizes, "I": I, "num_stages": stages, **STATES}
    return (v.shape[:2].numel() * sizes["H"], triton.cdiv(sizes["V"], settings["J"])), settings


@kernels_take("linear recurrence", f"keys and values of up to {MOST_CHANNELS} channels a head")
def fits_chunks(key_channels: int, value_channels: int) -> bool:
    """Return whether the kernels take heads of these sizes."""
    return max(key_channels, value_channels) <= MOST_CHANNELS
