"""Fused kernels of Mamba's selective scan: discretisation, scan, output map, skip and gate in one walk over positions.

name       shape                        written by         read by
u          (R, B, T, E)                 caller             both kernels        inputs of the scan
z          (R, B, T, E)                 caller             both kernels        gates before their SiLU
dt         (R, B, T, E)                 caller             both kernels        time steps before bias and softplus
b, c       (R, B, T, N)                 caller             both kernels        input and output maps
A          (R, N, E)                    caller             both kernels        rates, float32
skip, bias (R, E)                       caller             both kernels        float32
y          (R, B, T, E)                 scan_fwd           caller
dy         (R, B, T, E)                 caller             scan_bwd
du, dz     (R, B, T, E)                 scan_bwd           caller
ddt        (R, B, T, E)                 scan_bwd           caller
past       (R, B, T, E)                 scan_bwd           scan_bwd            P below, float32
dmaps      (R, parts, 2, B, T, N)       scan_bwd           group_sum           of b and c, float32
dsums      (R, B, N + 2, E)             scan_bwd           group_sum           of A, skip and bias, float32

u, z, dt, b and c have rows at equal distances (``evenly_spaced``). A program walks through one sequence with the states
of W channels, a part of E, in its registers. It is one warp, so sums over its channels need no barrier. No state is
ever written, in either pass. In kernels V is N padded to a power of two.

The gradient of the logarithm of a decay, dt_t A, needs the state before it and the gradient of the state after it,
which walks in opposite directions know. But it is also the sum over s >= t of ``c_s h_s do_s - dh_s i_s``, for outputs
o = c h and inputs i = dt b u. (Scaling h_s and all earlier states by a factor and their inputs by its inverse changes
nothing but decays.) So a forward walk sums up the first term, and a backward walk the second.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import LOG2E, evenly_spaced, sigmoid
from mixers.ops.kernels.products import group_sum
from mixers.ops.runs import Method, Optionals, Tensors

STATES = 1024
"""Numbers of a program's state: W channels of V states, 32 a thread."""

SCAN = {"num_warps": 1}


@triton.jit
def _softplus(y: tl.tensor):
    """log(1 + exp(y)), exact also where exp(y) is small (Kahan's log1p)."""
    tail = tl.exp2(tl.abs(y) * -LOG2E)
    one = 1.0 + tail
    lost = one == 1.0
    return tl.maximum(y, 0.0) + tl.where(lost, tail, tl.log(one) * tail / tl.where(lost, 1.0, one - 1.0))


@triton.jit
def _position(
    u_ptr: tl.tensor,
    z_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    row: tl.tensor,
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
    """What a step of the walk reads from a row."""
    u_E = tl.load(u_ptr + row * u_row + e, e < E, 0.0)
    z_E = tl.load(z_ptr + row * z_row + e, e < E, 0.0)
    dt_E = tl.load(dt_ptr + row * dt_row + e, e < E, 0.0)
    b_V = tl.load(b_ptr + row * b_row + v, v < N, 0.0)
    c_V = tl.load(c_ptr + row * c_row + v, v < N, 0.0)
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
):
    """Walk through one sequence with W channels.

    1. Read rates, skip and bias of the channels.
    2. For t = 0, ..., T - 1:
       a. read the position, one step ahead;
       b. discretise: step = softplus(dt + bias), decay = exp(step A), input = step b u;
       c. update the states: h = decay h + input;
       d. write y = (c h + skip u) silu(z).
    """
    # 1. Channels.
    sequence = tl.program_id(0).to(tl.int64)
    run = sequence // B
    e = tl.program_id(1) * W + tl.arange(0, W)
    v = tl.arange(0, V)
    here_VE = (v < N)[:, None] & (e < E)[None, :]
    A_VE = tl.load(A_ptr + run * N * E + v[:, None] * E + e[None, :], here_VE, 0.0) * LOG2E
    skip_E = tl.load(skip_ptr + run * E + e, e < E, 0.0)
    bias_E = tl.load(bias_ptr + run * E + e, e < E, 0.0)

    row = sequence * T
    ahead = _position(u_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, row, e, v, u_row, z_row, dt_row, b_row, c_row, E, N)
    h_VE = tl.zeros([V, W], tl.float32)
    for t in range(T):
        # 2a. Position.
        u_E, z_E, dt_E, b_V, c_V = ahead
        later = row + tl.minimum(t + 1, T - 1)
        ahead = _position(u_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, later, e, v, u_row, z_row, dt_row, b_row, c_row, E, N)

        # 2b. Discretisation.
        u_E = u_E.to(tl.float32)
        step_E = _softplus(dt_E.to(tl.float32) + bias_E)
        decay_VE = tl.exp2(step_E[None, :] * A_VE)

        # 2c. States.
        h_VE = decay_VE * h_VE + b_V.to(tl.float32)[:, None] * (step_E * u_E)[None, :]

        # 2d. Output.
        z_E = z_E.to(tl.float32)
        y_E = tl.sum(c_V.to(tl.float32)[:, None] * h_VE, 0) + skip_E * u_E
        tl.store(y_ptr + (row + t) * E + e, y_E * z_E * sigmoid(z_E), e < E)


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
    dy_ptr: tl.tensor,
    du_ptr: tl.tensor,
    dz_ptr: tl.tensor,
    ddt_ptr: tl.tensor,
    past_ptr: tl.tensor,
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
):
    """Walk through one sequence with W channels, forward and then backward.

    1. Read rates, skip and bias of the channels.
    2. For t = 0, ..., T - 1:
       a. read the position, one step ahead;
       b. compute the states again, and time, the sum of the steps so far;
       c. go back through the gate: write dz; do is the gradient of the scan's output o = c h;
       d. write dc = h do, summed over the channels;
       e. write P = sum over states of A c h do; add time c h do to dA.
    3. For t = T - 1, ..., 0:
       a. read the position and P, one step ahead;
       b. compute the gradient of the states: dh = c do + dh from the position after;
       c. write db = step u dh, summed over the channels;
       d. total += P - sum over states of A dh input; subtract time dh input from dA;
       e. write du = step b dh + skip do, and ddt, the gradient u b dh + total of the step through its softplus;
       f. pass on decay dh.
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
    part = run * tl.num_programs(1) + tl.program_id(1)
    db_ptr = dmaps_ptr + (part * 2 * B + sequence % B) * T * N
    dc_ptr = db_ptr + B * T * N
    ahead = _position(u_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, row, e, v, u_row, z_row, dt_row, b_row, c_row, E, N)
    dy_ahead_E = tl.load(dy_ptr + row * E + e, e < E, 0.0)
    h_VE = tl.zeros([V, W], tl.float32)
    dA_VE = tl.zeros([V, W], tl.float32)
    time_E = tl.zeros([W], tl.float32)
    dskip_E = tl.zeros([W], tl.float32)
    for t in range(T):
        # 2a. Position.
        u_E, z_E, dt_E, b_V, c_V = ahead
        dy_E = dy_ahead_E.to(tl.float32)
        later = row + tl.minimum(t + 1, T - 1)
        ahead = _position(u_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, later, e, v, u_row, z_row, dt_row, b_row, c_row, E, N)
        dy_ahead_E = tl.load(dy_ptr + later * E + e, e < E, 0.0)

        # 2b. States.
        u_E = u_E.to(tl.float32)
        step_E = _softplus(dt_E.to(tl.float32) + bias_E)
        h_VE = tl.exp2(step_E[None, :] * A_VE) * h_VE + b_V.to(tl.float32)[:, None] * (step_E * u_E)[None, :]
        time_E += step_E

        # 2c. Gate.
        ch_VE = c_V.to(tl.float32)[:, None] * h_VE
        z_E = z_E.to(tl.float32)
        open_E = sigmoid(z_E)
        o_E = tl.sum(ch_VE, 0) + skip_E * u_E
        tl.store(dz_ptr + (row + t) * E + e, dy_E * o_E * open_E * (1.0 + z_E * (1.0 - open_E)), e < E)
        do_E = dy_E * z_E * open_E
        dskip_E += do_E * u_E

        # 2d. Output map.
        tl.store(dc_ptr + t * N + v, tl.sum(h_VE * do_E[None, :], 1), v < N)

        # 2e. First term of the gradient of the decays.
        tl.store(past_ptr + (row + t) * E + e, do_E * tl.sum(A_VE * ch_VE, 0), e < E)
        dA_VE += ch_VE * (time_E * do_E)[None, :]

    tl.debug_barrier()
    last = row + T - 1
    ahead = _position(u_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, last, e, v, u_row, z_row, dt_row, b_row, c_row, E, N)
    dy_ahead_E = tl.load(dy_ptr + last * E + e, e < E, 0.0)
    past_ahead_E = tl.load(past_ptr + last * E + e, e < E, 0.0)
    dh_VE = tl.zeros([V, W], tl.float32)
    total_E = tl.zeros([W], tl.float32)
    dbias_E = tl.zeros([W], tl.float32)
    for back in range(T):
        # 3a. Position.
        t = T - 1 - back
        u_E, z_E, dt_E, b_V, c_V = ahead
        dy_E = dy_ahead_E.to(tl.float32)
        past_E = past_ahead_E
        earlier = row + tl.maximum(t - 1, 0)
        ahead = _position(u_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, earlier, e, v, u_row, z_row, dt_row, b_row, c_row, E, N)
        dy_ahead_E = tl.load(dy_ptr + earlier * E + e, e < E, 0.0)
        past_ahead_E = tl.load(past_ptr + earlier * E + e, e < E, 0.0)

        # 3b. States.
        z_E = z_E.to(tl.float32)
        do_E = dy_E * z_E * sigmoid(z_E)
        dh_VE += c_V.to(tl.float32)[:, None] * do_E[None, :]

        # 3c. Input map.
        u_E = u_E.to(tl.float32)
        raw_E = dt_E.to(tl.float32) + bias_E
        step_E = _softplus(raw_E)
        input_E = step_E * u_E
        tl.store(db_ptr + t * N + v, tl.sum(dh_VE * input_E[None, :], 1), v < N)

        # 3d. Second term of the gradient of the decays.
        bdh_VE = b_V.to(tl.float32)[:, None] * dh_VE
        total_E += past_E - input_E * tl.sum(A_VE * bdh_VE, 0)
        dA_VE -= bdh_VE * (time_E * input_E)[None, :]
        time_E -= step_E

        # 3e. Input and time step.
        bdh_E = tl.sum(bdh_VE, 0)
        tl.store(du_ptr + (row + t) * E + e, step_E * bdh_E + skip_E * do_E, e < E)
        ddt_E = (u_E * bdh_E + total_E / LOG2E) * sigmoid(raw_E)
        tl.store(ddt_ptr + (row + t) * E + e, ddt_E, e < E)
        dbias_E += ddt_E

        # 3f. Position before.
        dh_VE *= tl.exp2(step_E[None, :] * A_VE)

    # 4. Sums of the sequence.
    dsums_ptr += sequence * (N + 2) * E
    tl.store(dsums_ptr + at_VE, dA_VE, here_VE)
    tl.store(dsums_ptr + N * E + e, dskip_E, e < E)
    tl.store(dsums_ptr + (N + 1) * E + e, dbias_E, e < E)


def fits_selective_scan(N: int) -> bool:
    """Whether ``selective_scan_method`` takes this number of states of a channel."""
    return N <= 32


def selective_scan_method(dtype: torch.dtype) -> Method:
    """``(c_t h_t + skip u_t) silu(z_t)`` (R, B, T, E) in ``dtype``, h the states of E channels.

    Tensors: u, z and dt (R, B, T, E), b and c (R, B, T, N), A (R, E, N), skip and bias (R, E).
    """

    def forward(*tensors: Tensor) -> tuple[Tensors, Tensors]:
        rows, distances, parameters, sizes = _arguments(tensors)
        u = rows[0]
        y = u.new_empty(u.shape, dtype=dtype)
        scan_fwd_kernel[_grid(u, sizes)](*rows, *parameters, y, *u.shape[1:3], *distances, **sizes, **SCAN)
        return (y,), ()

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        rows, distances, parameters, sizes = _arguments(tensors)
        u, b = rows[0], rows[3]
        R, batch, T, E = u.shape
        grid = _grid(u, sizes)

        du, dz, ddt = (y.new_empty(y.shape) for y in rows[:3])
        past = u.new_empty(u.shape, dtype=torch.float32)
        dmaps = past.new_empty(R, grid[1], 2, *b.shape[1:])
        dsums = past.new_empty(R, batch, b.shape[-1] + 2, E)
        outputs = du, dz, ddt, past, dmaps, dsums
        dy = gradients[0].contiguous()
        scan_bwd_kernel[grid](*rows, *parameters, dy, *outputs, batch, T, *distances, **sizes, **SCAN)

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
