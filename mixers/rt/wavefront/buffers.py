"""Memory of the wavefront: every buffer with its shape, who writes it and who reads it.

L is the number of layers of a stack, or of runs of one layer; T the number of positions with zeros at the end; W the
largest number of layers of a wave; S the number of positions of a group. ``low`` is the dtype of matrix products; all
other buffers are float32. The line of a buffer reads "shape, meaning. writers -> readers". Kernels are named without
``_kernel``, products as in ``Operands``. A chunk kernel takes the place of the kernels and products of positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mixers.rt.wavefront.launch import BEGIN_BWD
from mixers.rt.wavefront.schedule import Schedule, Wave
from mixers.rt.wavefront.setup import Sizes


@dataclass(frozen=True)
class Kept:
    """Tensors that the forward pass keeps for the backward pass, 18 bytes per channel in bfloat16 (L, T, B, ...)."""

    n_x: Tensor
    """(L, T, B, D) low, normed inputs. add_norm_fwd -> product qkv, add_norm_bwd, gradient of qkv."""
    n_z: Tensor
    """(L, T, B, D) low, normed outputs; if chained, n_x of the next layer. add_norm_fwd -> product kv, add_norm_bwd."""
    r_x: Tensor
    """(L, T, B, 1), reciprocal root mean squares of inputs. add_norm_fwd -> add_norm_bwd."""
    r_z: Tensor
    """(L, T, B, 1), those of outputs; if chained, r_x of the next layer. add_norm_fwd -> add_norm_bwd."""
    raw: Tensor
    """(L, T, B, 3 D) low, queries and temporary pairs before their norms. product qkv -> begin_fwd, begin_bwd."""
    q: Tensor
    """(L, T, B, D) low, queries. begin_fwd -> attend_fwd, past_fwd, attend_bwd, past_bwd, query_bwd."""
    lse: Tensor
    """(L, T, B, H), base-2 logarithm of the softmax's denominator. attend_fwd -> all attention of the backward."""
    a: Tensor
    """(L, T, B, D) low, attention outputs. attend_fwd -> product out, attend_bwd, gradient of out."""
    r_u: Tensor
    """(L, T, B, 1), reciprocal root mean squares of the MLP's inputs. add_norm_fwd -> add_norm_bwd."""
    n_u: Tensor
    """(L, T, B, D) low, normed inputs of the MLP. add_norm_fwd -> product up, add_norm_bwd, gradient of up."""
    r_k: Tensor
    """(L, T, B, 1), reciprocal root mean squares of persistent keys. pair_fwd -> pair_bwd."""
    k: Tensor
    """(L, T, B, D) low, persistent keys. pair_fwd -> all attention, pair_bwd."""
    v: Tensor
    """(L, T, B, D) low, persistent values. pair_fwd -> all attention."""
    kt: Tensor | None = None
    """(L, T, B, D) low, temporary keys, in blocks of several positions alone. begin_fwd -> past_fwd, query_bwd."""
    vt: Tensor | None = None
    """(L, T, B, D) low, temporary values, in such blocks alone. begin_fwd -> past_fwd, query_bwd."""

    @staticmethod
    def saved(sizes: Sizes) -> tuple[Tensor, ...]:
        """Allocate memory in few tensors: normed inputs and outputs of a chained stack overlap."""
        L, T, B, D, H = sizes.L, sizes.schedule.length, sizes.B, sizes.D, sizes.H
        both = (L + 1,) if sizes.chained else (2, L)
        pairs = 2 if sizes.block == 1 else 4
        return (
            sizes.new_low(*both, T, B, D),  # n_x and n_z
            sizes.new_wide(*both, T, B, 1),  # r_x and r_z
            sizes.new_low(L, T, B, 3 * D),  # raw
            sizes.new_low(L, T, B, D),  # q
            sizes.new_wide(L, T, B, H),  # lse
            sizes.new_low(L, T, B, D),  # a
            sizes.new_wide(L, T, B, 1),  # r_u
            sizes.new_low(L, T, B, D),  # n_u
            sizes.new_wide(L, T, B, 1),  # r_k
            *(sizes.new_low(L, T, B, D) for _ in range(pairs)),  # k, v, kt, vt
        )

    @staticmethod
    def named(sizes: Sizes, saved: Sequence[Tensor]) -> "Kept":
        """The tensors of ``saved`` by name."""
        n_xz, r_xz, *others = saved
        if sizes.chained:
            return Kept(n_xz[:-1], n_xz[1:], r_xz[:-1], r_xz[1:], *others)
        return Kept(n_xz[0], n_xz[1], r_xz[0], r_xz[1], *others)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Kept":
        """``function`` of each tensor."""
        mapped: list[Any] = [None if y is None else function(y) for y in vars(self).values()]
        return Kept(*mapped)

    def at(self, i: int, count: int) -> "Kept":
        """Rows (n, count * B, ...) of ``count`` positions from i on, of groups (n, S, B, ...)."""
        return self.map(lambda y: rows_at(y, i, count))


@dataclass(frozen=True)
class ForwardScratch:
    """Scratch memory of the forward pass for one wave."""

    x: Tensor
    """(L + 1, S, B, D), inputs of each layer; swaps places with z after each wave. run, or z -> add_norm_fwd."""
    z: Tensor
    """(L + 1, S, B, D), outputs of layer i at i + 1, where they are the next layer's inputs. add_norm_fwd -> x."""
    m: Tensor
    """(W, S, B, H), largest logit so far. begin_fwd, past_fwd -> past_fwd, attend_fwd."""
    l: Tensor
    """(W, S, B, H), softmax's denominator so far. begin_fwd, past_fwd -> past_fwd, attend_fwd."""
    o: Tensor
    """(W, S, B, D), softmax's numerator so far. begin_fwd, past_fwd -> past_fwd, attend_fwd."""
    u: Tensor
    """(W, block * B, D), residual stream before the MLP, in one block. add_norm_fwd -> add_norm_fwd."""
    y: Tensor
    """(W, block * B, D) low, residual branch in one block. products out and down -> add_norm_fwd."""
    h: Tensor
    """(W, block * B, F) low, hidden layer in one block. product up; gelu_fwd in place -> product down."""
    kv: Tensor
    """(W, block * B, 2 D) low, persistent pairs before the norm, in one block. product kv -> pair_fwd."""

    @staticmethod
    def new(sizes: Sizes) -> "ForwardScratch":
        """Uninitialised memory."""
        L, B, D, H, S, W = sizes.L, sizes.B, sizes.D, sizes.H, sizes.schedule.group, sizes.schedule.most
        rows = sizes.block * B
        return ForwardScratch(
            x=sizes.new_wide(L + 1, S, B, D),
            z=sizes.new_wide(L + 1, S, B, D),
            m=sizes.new_wide(W, S, B, H),
            l=sizes.new_wide(W, S, B, H),
            o=sizes.new_wide(W, S, B, D),
            u=sizes.new_wide(W, rows, D),
            y=sizes.new_low(W, rows, D),
            h=sizes.new_low(W, rows, sizes.F),
            kv=sizes.new_low(W, rows, 2 * D),
        )


@dataclass(frozen=True)
class BackwardScratch:
    """Scratch memory of the backward pass: gradients of kept tensors, and of a wave's activations."""

    da: Tensor
    """(L, T, B, D) low, gradients of attention outputs. product out -> all attention of the backward, begin_bwd."""
    delta: Tensor
    """(L, T, B, H), inner products of a and da. attend_bwd -> all attention of the backward, begin_bwd."""
    dz: Tensor
    """(L + 1, S, B, D), gradients of outputs of layer i at i + 1, later of u. run, dx, add_norm_bwd -> add_norm_bwd."""
    dx: Tensor
    """(L + 1, S, B, D), gradients of inputs; swaps places with dz after each wave. add_norm_bwd -> dz."""
    dq: Tensor
    """(W, S, B, D) low, gradients of queries from persistent pairs. query_bwd -> begin_bwd."""
    dn_x: Tensor
    """(W, S, B, D) low, gradients of normed inputs; shares the memory of dq. product qkv -> add_norm_bwd."""
    dy: Tensor
    """(W, S, B, D) low, gradients of the MLP's output. add_norm_bwd -> product down, gradient of down."""
    du: Tensor
    """(W, S, B, D) low, gradients of the output projection's output. add_norm_bwd -> product out, gradient of out."""
    h: Tensor
    """(W, S, B, F) low, hidden layer. product up; gelu_bwd in place -> gradient of down."""
    dh: Tensor
    """(W, S, B, F) low, gradients of the hidden layer before GELU. gelu_bwd -> product up, gradient of up."""
    dkv: Tensor
    """(W, S, B, 2 D) low, gradients of pairs. attend_bwd; pair_bwd in place -> product kv, gradient of kv."""
    draw: Tensor
    """(W, S, B, 3 D) low, gradients of raw. begin_bwd -> product qkv, gradient of qkv."""
    dk: Tensor
    """(W, S, B, D), gradients of keys from later chunks. past_bwd -> attend_bwd."""
    dv: Tensor
    """(W, S, B, D), gradients of values from later chunks. past_bwd -> attend_bwd."""
    dkt: Tensor | None
    """(W, S, B, D) low, gradients of temporary keys, in blocks of several positions alone. query_bwd -> begin_bwd."""
    dvt: Tensor | None
    """(W, S, B, D) low, gradients of temporary values, in such blocks alone. query_bwd -> begin_bwd."""
    dn: Tensor
    """(W, block * B, D) low, gradients of normed rows in one block. products kv and up -> add_norm_bwd."""
    dg: Tensor
    """(W, block * B, F) low, gradients of GELU's output in one block. product down -> gelu_bwd."""
    dgain: Tensor
    """(L, S / C, B, D), sums of the gradients of ``key_gain``, C positions of ``BEGIN_BWD`` each. begin_bwd -> end."""

    @staticmethod
    def new(sizes: Sizes) -> "BackwardScratch":
        """Uninitialised memory, except sums, which are zero."""
        L, T, B, D, H, F = sizes.L, sizes.schedule.length, sizes.B, sizes.D, sizes.H, sizes.F
        S, W = sizes.schedule.group, sizes.schedule.most
        dq = sizes.new_low(W, S, B, D)
        return BackwardScratch(
            da=sizes.new_low(L, T, B, D),
            delta=sizes.new_wide(L, T, B, H),
            dz=sizes.new_wide(L + 1, S, B, D),
            dx=sizes.new_wide(L + 1, S, B, D),
            dq=dq,
            dn_x=dq,
            dy=sizes.new_low(W, S, B, D),
            du=sizes.new_low(W, S, B, D),
            h=sizes.new_low(W, S, B, F),
            dh=sizes.new_low(W, S, B, F),
            dkv=sizes.new_low(W, S, B, 2 * D),
            draw=sizes.new_low(W, S, B, 3 * D),
            dk=sizes.new_wide(W, S, B, D),
            dv=sizes.new_wide(W, S, B, D),
            dkt=sizes.new_low(W, S, B, D) if sizes.block > 1 else None,
            dvt=sizes.new_low(W, S, B, D) if sizes.block > 1 else None,
            dn=sizes.new_low(W, sizes.block * B, D),
            dg=sizes.new_low(W, sizes.block * B, F),
            dgain=torch.zeros(L, S // BEGIN_BWD["C"], B, D, dtype=sizes.wide, device=sizes.device),
        )


def rows_at(y_nSBX: Tensor, i: int, count: int) -> Tensor:
    """View (n, count * B, X) of ``count`` positions from i on."""
    return y_nSBX[:, i : i + count].view(len(y_nSBX), -1, y_nSBX.shape[-1])  # flatten might copy


def at_work(y_LTBX: Tensor, wave: Wave, schedule: Schedule) -> Tensor:
    """View (n, S, B, X) of a wave's groups, each ``skew`` positions earlier than that of the layer before."""
    _, T, B, X = y_LTBX.shape
    offset = y_LTBX.storage_offset() + (wave.lo * T + wave.base) * B * X
    stride = ((T - schedule.skew) * B * X, B * X, X, 1)
    return y_LTBX.as_strided((wave.n, schedule.group, B, X), stride, offset)
