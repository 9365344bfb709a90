"""The common part of the two loops of ``mixers.ops.kernels.memory``: a program's rows, and the matrices of its run."""

import triton
import triton.language as tl


@triton.jit
def program_rows(B: tl.tensor, D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, M: tl.constexpr):
    """Run of a program, sequence and memory token of its M rows, whether they belong to the batch, and the heads.

    Rows beyond the last sequence repeat it and must not be written. Heads are said to have no contiguity, so that a
    thread has whole heads; see ``mixers.rt.fused.loops``.
    """
    run = tl.program_id(1).to(tl.int64)
    row_M = tl.program_id(0) * M + tl.arange(0, M)
    sequence_M = run * B + tl.minimum(row_M // P, B - 1)
    head_H = tl.max_contiguous(tl.arange(0, D // K), [1])
    return run, sequence_M, row_M % P, row_M < B * P, head_H


@triton.jit
def matrices(w_ptr: tl.tensor, run: tl.tensor, D: tl.constexpr, F: tl.constexpr):
    """Pointers to the matrices wq, wk, wv, wo, up and down of a run."""
    wq_ptr = w_ptr + run * (4 * D * D + 2 * F * D)
    up_ptr = wq_ptr + 4 * D * D
    return wq_ptr, wq_ptr + D * D, wq_ptr + 2 * D * D, wq_ptr + 3 * D * D, up_ptr, up_ptr + F * D
