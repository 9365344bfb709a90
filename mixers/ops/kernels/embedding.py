"""Fused kernels of the token embedding.

name      shape                    written by          read by
tokens    (R, rows)                caller              both kernels        int64, below V
w         (R, V, D)                caller              embed_fwd           the table
x         (R, rows, D)             embed_fwd           caller              its rows at the tokens
dx        (R, rows, D)             caller              embed_bwd
dw        (R, programs, V, D)      embed_bwd           group_sum
"""

import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.products import group_sum
from mixers.ops.method import Method, Optionals, Tensors

# Tiles, the fastest of those tried on an H200 at width 128, length 128, 30 runs.
EMBED_FWD = {"M": 16, "num_warps": 4}

EMBED_BWD = {"M": 32, "num_warps": 4}


@triton.jit
def embed_fwd_kernel(
    tokens_ptr: tl.tensor,
    w_ptr: tl.tensor,
    x_ptr: tl.tensor,
    rows: tl.tensor,
    V: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
):
    """Copy the rows of w at M tokens.

    1. Read the tokens.
    2. Copy the rows.
    """
    # 1. Tokens.
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    e = tl.arange(0, E)
    here_ME = (m < rows)[:, None] & (e < D)[None, :]
    token_M = tl.load(tokens_ptr + run * rows + m, m < rows, 0)

    # 2. Rows.
    w_ME = tl.load(w_ptr + (run * V + token_M)[:, None] * D + e[None, :], here_ME, 0.0)
    tl.store(x_ptr + (run * rows + m)[:, None] * D + e[None, :], w_ME, here_ME)


@triton.jit
def embed_bwd_kernel(
    tokens_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    dw_ptr: tl.tensor,
    rows: tl.tensor,
    V: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    U: tl.constexpr,
):
    """Gradients of U rows of w, summed over every n-th tile of M tokens, for n programs.

    1. For each tile of the program:
       a. read tokens and gradients of their rows;
       b. add the product of one-hot tokens and gradients.
    2. Write the sum.
    """
    run = tl.program_id(2).to(tl.int64)
    u = tl.program_id(1) * U + tl.arange(0, U)
    e = tl.arange(0, E)
    dw_UE = tl.zeros([U, E], tl.float32)
    for first in range(tl.program_id(0) * M, rows, tl.num_programs(0) * M):
        # 1a. Tokens and gradients.
        m = first + tl.arange(0, M)
        here_ME = (m < rows)[:, None] & (e < D)[None, :]
        token_M = tl.load(tokens_ptr + run * rows + m, m < rows, -1)
        dx_ME = tl.load(dx_ptr + (run * rows + m)[:, None] * D + e[None, :], here_ME, 0.0).to(tl.float32)

        # 1b. Product.
        hot_UM = (u[:, None] == token_M[None, :]).to(tl.float32)
        dw_UE = tl.dot(hot_UM, dx_ME, dw_UE, input_precision="tf32x3")

    # 2. Sum of the program.
    at_UE = ((run * tl.num_programs(0) + tl.program_id(0)) * V + u)[:, None] * D + e[None, :]
    tl.store(dw_ptr + at_UE, dw_UE, (u < V)[:, None] & (e < D)[None, :])


def fits_embedding(V: int, D: int) -> bool:
    """Whether ``embedding_method`` takes V rows of this width; it reads all gradients once per 32 rows of the table."""
    return V <= 256 and D <= 256


def embedding_method() -> Method:
    """Rows (R, ..., D) of a table at tokens. Tensors: tokens (R, ...) int64 in [0, V), table (R, V, D)."""

    def width(table: Tensor) -> dict[str, int]:
        return {"D": table.shape[2], "E": max(16, triton.next_power_of_2(table.shape[2]))}

    def forward(tokens: Tensor, table: Tensor) -> tuple[Tensors, Tensors]:
        tokens, table = tokens.contiguous(), table.contiguous()
        R, V, D = table.shape
        x = table.new_empty(*tokens.shape, D)
        rows = tokens[0].numel()
        embed_fwd_kernel[triton.cdiv(rows, EMBED_FWD["M"]), R](tokens, table, x, rows, V, **width(table), **EMBED_FWD)
        return (x,), ()

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        dx, tokens, table = (y.contiguous() for y in (*gradients, *tensors))
        R, V, D = table.shape
        rows = tokens[0].numel()
        U = min(32, max(16, triton.next_power_of_2(V)))
        programs = min(triton.cdiv(rows, EMBED_BWD["M"]), triton.cdiv(512, R))
        dtable = table.new_empty(R, programs, V, D)

        grid = programs, triton.cdiv(V, U), R
        embed_bwd_kernel[grid](tokens, dx, dtable, rows, V, U=U, **width(table), **EMBED_BWD)
        return None, group_sum(dtable)

    return Method(forward, backward)
