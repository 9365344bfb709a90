# ruff: noqa: RUF005  (Triton takes sums of tuples, but no starred ones)
# mypy: disable-error-code="assignment"
"""Fused kernels of Mamba's selective scan: discretisation, scan, output map, skip and gate in one loop over positions.

name       shape                        written by         read by
u          (R, B, T, E)                 caller             both kernels        inputs of the scan
z          (R, B, T, E)                 caller             both kernels        gates before their SiLU
dt         (R, B, T, E)                 caller             both kernels        time steps before bias and softplus
b, c       (R, B, T, N)                 caller             both kernels        input and output maps
A          (R, N, E)                    caller             both kernels        rates, float32
skip, bias (R, E)                       caller             both kernels        float32
y          (R, B, T, E)                 scan_fwd           caller
states     (R, B, chunks, parts, V W)   scan_fwd           scan_bwd            before each chunk, in the type of u
dy         (R, B, T, E)                 caller             scan_bwd
du, dz     (R, B, T, E)                 scan_bwd           caller
ddt        (R, B, T, E)                 scan_bwd           caller
dmaps      (R, parts, 2, B, T, N)       scan_bwd           group_sum           of b and c, float32
dsums      (R, B, N + 2, E)             scan_bwd           group_sum           of A, skip and bias, float32

u, z, dt, b and c have rows at equal distances (``evenly_spaced``). A program loops over one sequence with the states of
W channels, a part of E, in its registers. It is one warp, so sums over its channels need no barrier. The forward pass
writes the states before each chunk of C positions. The backward pass recomputes the states inside the chunk and keeps
them in registers. In kernels V is N padded to a power of two.

The order of a part's states in memory decides which numbers a thread holds, because Triton's compiler lets threads
access 16 bytes at a time. With all channels side by side and states of 16 bits, a thread would hold eight channels, and
sums over the states would take more shuffles. Four channels side by side are best (``_held``).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import LOG2E, evenly_spaced, kernels_take, sigmoid, sum_columns, sum_rows
from mixers.ops.kernels.products import group_sum
from mixers.ops.method import Method, Optionals, Tensors

STATES = 512
"""Size of a program's state: W channels of V states, 16 numbers per thread."""

SCAN = {"C": 2, "num_warps": 1}

REGISTERS = 128
"""Largest number of registers per thread in the backward pass, so that four warps share a scheduler."""


@triton.jit
def _softplus(y: tl.tensor):
    """log(1 + exp(y)), exact also where exp(y) is small (Kahan's log1p)."""
    tail = tl.exp2(tl.abs(y) * -LOG2E)
    one = 1.0 + tail
    lost = one == 1.0
    return tl.maximum(y, 0.0) + tl.where(lost, tail, tl.log(one) * tail / tl.where(lost, 1.0, one - 1.0))


@triton.jit
def _held(V: tl.constexpr, W: tl.constexpr):
    """Places of a part's states (V, W) in memory: four channels side by side, then the states, then other channels."""
    v = tl.arange(0, V)
    w = tl.arange(0, W)
    return (w // 4 * 4 * V + w % 4)[None, :] + v[:, None] * 4


@triton.jit
def _position(
    u_ptr: tl.tensor,
    z_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    t: tl.tensor,
    e: tl.tensor,
    v: tl.tensor,
    u_row: tl.tensor,
    z_row: tl.tensor,
    dt_row: tl.tensor,
    b_row: tl.tensor,
    c_row: tl.tensor,
    E: tl.constexpr,
    N: tl.constexpr,
):
    """What a step of the walk reads; the pointers are those of its sequence."""
    u_E = tl.load(u_ptr + t * u_row + e, e < E, 0.0)
    z_E = tl.load(z_ptr + t * z_row + e, e < E, 0.0)
    dt_E = tl.load(dt_ptr + t * dt_row + e, e < E, 0.0)
    b_V = tl.load(b_ptr + t * b_row + v, v < N, 0.0)
    c_V = tl.load(c_ptr + t * c_row + v, v < N, 0.0)
    return u_E, z_E, dt_E, b_V, c_V


@triton.jit
def scan_fwd_kernel(
    u_ptr: tl.tensor,
    z_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    A_ptr: tl.tensor,
    skip_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    states_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    u_row: tl.tensor,
    z_row: tl.tensor,
    dt_row: tl.tensor,
    b_row: tl.tensor,
    c_row: tl.tensor,
    E: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    NEGATIVE: tl.constexpr,
):
    """Walk through one sequence with W channels.

    1. Read rates, skip and bias of the channels.
    2. For t = 0, ..., T - 1:
       a. read the position, one step ahead; at the start of a chunk write the states;
       b. discretise: step = softplus(dt + bias), decay = exp(step A) or 2 exp(step A) - 1, input = step b u;
       c. update the states: h = decay h + input;
       d. write y = (c h + skip u) silu(z).
    """
    # 1. Channels.
    sequence = tl.program_id(0).to(tl.int64)
    run = sequence // B
    e = tl.program_id(1) * W + tl.arange(0, W)
    v = tl.arange(0, V)
    here_VE = (v < N)[:, None] & (e < E)[None, :]
    at_VE = v[:, None] * E + e[None, :]
    A_VE = tl.load(A_ptr + run * N * E + at_VE, here_VE, 0.0) * LOG2E
    skip_E = tl.load(skip_ptr + run * E + e, e < E, 0.0)
    bias_E = tl.load(bias_ptr + run * E + e, e < E, 0.0)

    row = sequence * T
    u_ptr += row * u_row
    z_ptr += row * z_row
    dt_ptr += row * dt_row
    b_ptr += row * b_row
    c_ptr += row * c_row
    y_ptr += row * E
    states_ptr += (sequence * tl.cdiv(T, C) * tl.num_programs(1) + tl.program_id(1)) * V * W
    ahead = _position(u_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, 0, e, v, u_row, z_row, dt_row, b_row, c_row, E, N)
    h_VE = tl.zeros([V, W], tl.float32)
    for t in range(T):
        # 2a. Position.
        u_E, z_E, dt_E, b_V, c_V = ahead
        later = tl.minimum(t + 1, T - 1)
        ahead = _position(u_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, later, e, v, u_row, z_row, dt_row, b_row, c_row, E, N)

        if t % C == 0:
            tl.store(states_ptr + t // C * tl.num_programs(1) * V * W + _held(V, W), h_VE)

        # 2b. Discretisation.
        u_E = u_E.to(tl.float32)
        step_E = _softplus(dt_E.to(tl.float32) + bias_E)
        decay_VE = tl.exp2(step_E[None, :] * A_VE)
        if NEGATIVE:
            decay_VE = 2.0 * decay_VE - 1.0

        # 2c. States.
        h_VE = decay_VE * h_VE + b_V.to(tl.float32)[:, None] * (step_E * u_E)[None, :]

        # 2d. Output.
        z_E = z_E.to(tl.float32)
        y_E = sum_rows(c_V.to(tl.float32)[:, None] * h_VE, V, W) + skip_E * u_E
        tl.store(y_ptr + t * E + e, y_E * z_E * sigmoid(z_E), e < E)


@triton.jit
def scan_bwd_kernel(
    u_ptr: tl.tensor,
    z_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    A_ptr: tl.tensor,
    skip_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    states_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    du_ptr: tl.tensor,
    dz_ptr: tl.tensor,
    ddt_ptr: tl.tensor,
    dmaps_ptr: tl.tensor,
    dsums_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    u_row: tl.tensor,
    z_row: tl.tensor,
    dt_row: tl.tensor,
    b_row: tl.tensor,
    c_row: tl.tensor,
    E: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    NEGATIVE: tl.constexpr,
):
    """Loop backward over one sequence with W channels, chunk by chunk; positions after the end have no effect.

    1. Read rates, skip and bias of the channels.
    2. For each chunk, the last one first: read the states before it, and compute those inside it again.
    3. For each position of the chunk, the last one first:
       a. read the position again, and discretise it;
       b. go back through the gate: write dz; do is the gradient of the scan's output o = c h;
       c. write dc = h do, summed over the channels;
       d. complete the gradient of the states: dh += c do;
       e. write db = input dh, summed over the channels, with input = step u;
       f. pass on dh = decay dh; with exp(step A) dh, or twice that, get the gradient dlog of step A from the states;
       g. write du = step b dh + skip do, and ddt, the gradient u b dh + A dlog of the step through its softplus.
    4. Write the sums of the sequence.
    """
    # 1. Channels.
    sequence = tl.program_id(0).to(tl.int64)
    run = sequence // B
    e = tl.program_id(1) * W + tl.arange(0, W)
    v = tl.arange(0, V)
    here_VE = (v < N)[:, None] & (e < E)[None, :]
    at_VE = v[:, None] * E + e[None, :]
    A_VE = tl.load(A_ptr + run * N * E + at_VE, here_VE, 0.0) * LOG2E
    skip_E = tl.load(skip_ptr + run * E + e, e < E, 0.0)
    bias_E = tl.load(bias_ptr + run * E + e, e < E, 0.0)

    row = sequence * T
    u_ptr += row * u_row
    z_ptr += row * z_row
    dt_ptr += row * dt_row
    b_ptr += row * b_row
    c_ptr += row * c_row
    dy_ptr += row * E
    du_ptr += row * E
    dz_ptr += row * E
    ddt_ptr += row * E
    part = run * tl.num_programs(1) + tl.program_id(1)
    db_ptr = dmaps_ptr + (part * 2 * B + sequence % B) * T * N
    dc_ptr = db_ptr + B * T * N
    chunks = tl.cdiv(T, C)
    states_ptr += (sequence * chunks * tl.num_programs(1) + tl.program_id(1)) * V * W
    dh_VE = tl.zeros([V, W], tl.float32)
    dA_VE = tl.zeros([V, W], tl.float32)
    dskip_E = tl.zeros([W], tl.float32)
    dbias_E = tl.zeros([W], tl.float32)
    for back in range(chunks):
        # 2. States.
        chunk = chunks - 1 - back
        h_VE = tl.load(states_ptr + chunk * tl.num_programs(1) * V * W + _held(V, W)).to(tl.float32)
        states = (h_VE,)
        for i in tl.static_range(C):
            t = tl.minimum(chunk * C + i, T - 1)
            u_E, _, dt_E, b_V, _ = _position(
                u_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, t, e, v, u_row, z_row, dt_row, b_row, c_row, E, N
            )
            step_E = _softplus(dt_E.to(tl.float32) + bias_E)
            input_E = step_E * u_E.to(tl.float32)
            decay_VE = tl.exp2(step_E[None, :] * A_VE)
            if NEGATIVE:
                decay_VE = 2.0 * decay_VE - 1.0
            h_VE = decay_VE * h_VE + b_V.to(tl.float32)[:, None] * input_E[None, :]
            states = states + (h_VE,)

        for i in tl.static_range(C):
            # 3a. Position.
            t = chunk * C + C - 1 - i
            here_E = (t * E + e < T * E) & (e < E)
            here_V = (t * N + v < T * N) & (v < N)
            at_E = t * E + e
            u_E, z_E, dt_E, b_V, c_V = _position(
                u_ptr,
                z_ptr,
                dt_ptr,
                b_ptr,
                c_ptr,
                tl.minimum(t, T - 1),
                e,
                v,
                u_row,
                z_row,
                dt_row,
                b_row,
                c_row,
                E,
                N,
            )
            u_E = u_E.to(tl.float32)
            raw_E = dt_E.to(tl.float32) + bias_E
            step_E = _softplus(raw_E)

            # 3b. Gate.
            z_E = z_E.to(tl.float32)
            open_E = sigmoid(z_E)
            dy_E = tl.load(dy_ptr + at_E, here_E, 0.0).to(tl.float32)
            c_V = c_V.to(tl.float32)
            h_VE = states[C - i]
            o_E = sum_rows(c_V[:, None] * h_VE, V, W) + skip_E * u_E
            tl.store(dz_ptr + at_E, dy_E * o_E * open_E * (1.0 + z_E * (1.0 - open_E)), here_E)
            do_E = dy_E * z_E * open_E
            dskip_E += do_E * u_E

            # 3c. Output map.
            tl.store(dc_ptr + t * N + v, sum_columns(h_VE * do_E[None, :], V, W), here_V)

            # 3d, 3e. States and input map.
            dh_VE += c_V[:, None] * do_E[None, :]
            tl.store(db_ptr + t * N + v, sum_columns(dh_VE * (step_E * u_E)[None, :], V, W), here_V)
            bdh_E = sum_rows(b_V.to(tl.float32)[:, None] * dh_VE, V, W)

            # 3f. Decay.
            if NEGATIVE:
                twice_VE = 2.0 * tl.exp2(step_E[None, :] * A_VE) * dh_VE
                dlog_VE = twice_VE * states[C - 1 - i]
                dh_VE = twice_VE - dh_VE
            else:
                dh_VE *= tl.exp2(step_E[None, :] * A_VE)
                dlog_VE = dh_VE * states[C - 1 - i]
            dA_VE += dlog_VE * step_E[None, :]

            # 3g. Input and time step.
            tl.store(du_ptr + at_E, step_E * bdh_E + skip_E * do_E, here_E)
            ddt_E = (u_E * bdh_E + sum_rows(A_VE * dlog_VE, V, W) / LOG2E) * sigmoid(raw_E)
            tl.store(ddt_ptr + at_E, ddt_E, here_E)
            dbias_E += ddt_E

    # 4. Sums of the sequence.
    dsums_ptr += sequence * (N + 2) * E
    tl.store(dsums_ptr + at_VE, dA_VE, here_VE)
    tl.store(dsums_ptr + N * E + e, dskip_E, e < E)
    tl.store(dsums_ptr + (N + 1) * E + e, dbias_E, e < E)


@kernels_take("selective scan", "up to 32 states of a channel")
def fits_selective_scan(N: int) -> bool:
    """Whether ``selective_scan_method`` takes this number of states of a channel."""
    return N <= 32


def selective_scan_method(dtype: torch.dtype, negative: bool = False) -> Method:
    """``(c_t h_t + skip u_t) silu(z_t)`` (R, B, T, E) in ``dtype``, h the states of E channels.

    With ``negative``, states decay by 2 exp(step A) - 1.

    Tensors: u, z and dt (R, B, T, E), b and c (R, B, T, N), A (R, E, N), skip and bias (R, E).
    """

    settings = {**SCAN, "NEGATIVE": negative}

    def forward(*tensors: Tensor) -> tuple[Tensors, Tensors]:
        rows, distances, parameters, sizes = _arguments(tensors)
        u = rows[0]
        R, B, T, _ = u.shape
        grid = _grid(u, sizes)
        y = u.new_empty(u.shape, dtype=dtype)
        states = u.new_empty(R, B, triton.cdiv(T, SCAN["C"]), grid[1], sizes["V"] * sizes["W"])
        scan_fwd_kernel[grid](*rows, *parameters, y, states, B, T, *distances, **sizes, **settings)
        return (y,), (states,)

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        rows, distances, parameters, sizes = _arguments(tensors)
        u, b = rows[0], rows[3]
        R, B, T, E = u.shape
        grid = _grid(u, sizes)

        du, dz, ddt = (y.new_empty(y.shape) for y in rows[:3])
        (states,) = saved
        dmaps = parameters[0].new_empty(R, grid[1], 2, *b.shape[1:])
        dsums = parameters[0].new_empty(R, B, b.shape[-1] + 2, E)
        inputs = *rows, *parameters, states, gradients[0].contiguous()
        results = du, dz, ddt, dmaps, dsums
        scan_bwd_kernel[grid](*inputs, *results, B, T, *distances, **sizes, **settings, maxnreg=REGISTERS)

        db, dc = group_sum(dmaps).to(b.dtype).unbind(1)
        dA, dskip, dbias = group_sum(dsums).split([b.shape[-1], 1, 1], 1)
        return du, dz, ddt, db, dc, dA.mT, dskip[:, 0], dbias[:, 0]

    return Method(forward, backward)


def _arguments(tensors: Tensors) -> tuple[Tensors, tuple[int, ...], Tensors, dict[str, int]]:
    """Tensors of rows and their rows' distances, parameters, and compile-time settings."""
    rows, distances = zip(*map(evenly_spaced, tensors[:5]), strict=True)
    A, skip, bias = tensors[5:]
    E, N = A.shape[1:]
    V = triton.next_power_of_2(N)
    return rows, distances, (A.mT.contiguous(), skip.contiguous(), bias.contiguous()), _sizes(E, N, V)


def _sizes(E: int, N: int, V: int) -> dict[str, int]:
    return {"E": E, "N": N, "V": V, "W": STATES // V}


def _grid(u: Tensor, sizes: dict[str, int]) -> tuple[int, int]:
    """Sequences of all runs, and parts of the channels."""
    return u.shape[0] * u.shape[1], triton.cdiv(sizes["E"], sizes["W"])
