"""The wavefront's backward: the forward's waves, groups, chunks and positions from the last to the first."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mixers.ops.weights import LayerWeights
from mixers.rt.past_kernels import past_bwd_kernel, query_bwd_kernel
from mixers.rt.wavefront.backward_kernels import (
    add_norm_bwd_kernel,
    attend_bwd_kernel,
    begin_bwd_kernel,
    gelu_bwd_kernel,
    pair_bwd_kernel,
)
from mixers.rt.wavefront.buffers import BackwardScratch, Kept, at_work, rows_at
from mixers.rt.wavefront.chunk import ChunkKernel, backward_tensors
from mixers.rt.wavefront.launch import (
    ATTEND,
    BEGIN_BWD,
    CHUNK_TILE,
    GELU,
    add_outer_products,
    copy_positions,
    group_tile,
    position_tile,
    product,
    strided,
)
from mixers.rt.wavefront.schedule import CHUNK, Wave
from mixers.rt.wavefront.setup import Pass, WavefrontSetting
from mixers.rt.wavefront.weights import Operands, weight_gradients


class _Groups(NamedTuple):
    """The tensors of a wave: one group of positions of each of n layers.

    Attributes:
        wave: the layers and their groups.
        d: gradients of outputs (n, S, B, D), which become those of u, the residual stream before the MLP, in place.
        dx: gradients of inputs (n, S, B, D).
        kept: tensors that the forward pass kept of the groups (n, S, B, ...).
        da: gradients of attention outputs (n, S, B, D).
        delta: inner products of attention outputs and their gradients (n, S, B, H).
        operands: matrices (n, outputs, inputs).
    """

    wave: Wave
    d: Tensor
    dx: Tensor
    kept: Kept
    da: Tensor
    delta: Tensor
    operands: Operands


class Backward(Pass):
    """Backward pass of a stack of layers (R = 1), or of one layer of R runs.

    Args:
        dz_RBTD: gradients of the outputs.
        weights: weights with a leading axis of layers or runs.
        setting: settings that layers share.
        saved: tensors of ``Forward.run``.
    """

    def __init__(
        self, dz_RBTD: Tensor, weights: LayerWeights, setting: WavefrontSetting, saved: tuple[Tensor, ...]
    ) -> None:
        super().__init__(dz_RBTD, weights, setting)
        self.dz_RBTD = dz_RBTD
        self.weights = weights
        self.kept = Kept.named(self.sizes, saved)
        self.scratch = BackwardScratch.new(self.sizes)
        self.doperands = Operands(*(torch.zeros_like(w, dtype=dz_RBTD.dtype) for w in self.operands))
        self.chunk_kernel = ChunkKernel.of(self, "backward")
        self.transposed = self.operands
        if self.chunk_kernel is not None:
            self.transposed = Operands(*(w.mT.contiguous() for w in self.operands))

    def run(self) -> tuple[Tensor, LayerWeights]:
        """Gradients of inputs (R, B, T, D) and of weights, all float32; None where a weight is None."""
        R, L, schedule = self.sizes.R, self.sizes.L, self.sizes.schedule
        dx_RBTD = torch.empty_like(self.dz_RBTD)
        dz, dx = self.scratch.dz, self.scratch.dx

        for wave in reversed(schedule.waves()):
            if wave.hi == L:  # the group enters the last layer
                copy_positions(out=dz[-R:], y=self.dz_RBTD[:, :, schedule.group_of_last(wave)].transpose(1, 2))

            self.compute(self.groups_of(wave, dz, dx))

            if wave.lo == 0:  # the group leaves the first layer
                group = slice(wave.base, wave.base + schedule.group)
                copy_positions(out=dx_RBTD[:, :, group].transpose(1, 2), y=dx[:R])
            dz, dx = dx, dz  # inputs are the outputs of the layer before

        dgain_LD = self.scratch.dgain.sum((1, 2))
        return dx_RBTD, weight_gradients(self.weights, self.setting.persistent_norm, dgain_LD, self.doperands)

    def groups_of(self, wave: Wave, dz: Tensor, dx: Tensor) -> _Groups:
        """Views of a wave's groups."""
        lo, hi, _ = wave
        schedule = self.sizes.schedule
        return _Groups(
            wave=wave,
            d=dz[lo + 1 : hi + 1],
            dx=dx[lo:hi],
            kept=self.kept.map(lambda y: at_work(y, wave, schedule)),
            da=at_work(self.scratch.da, wave, schedule),
            delta=at_work(self.scratch.delta, wave, schedule),
            operands=self.operands.layers(lo, hi),
        )

    def compute(self, groups: _Groups) -> None:
        """Compute the gradients of one group of each layer of the wave.

        1. The hidden layer of the group, computed again.
        2. Gradients that the group's pairs get from all later groups.
        3. For each chunk, last first:
           a. gradients that the chunk's pairs get from the group's later chunks;
           b. for each block, last first: gradients that its pairs get from the chunk's later positions, and the steps
              from there to the gradients of its attention outputs; a chunk kernel does all blocks at once.
        4. Gradients on which no position depends: weights, then queries, temporary pairs and inputs.
        """
        (_, _, base), n, sizes = groups.wave, groups.wave.n, self.sizes
        group, block = sizes.schedule.group, sizes.block

        # 1. Hidden layer.
        product(groups.kept.n_u, groups.operands.up.mT, out=self.scratch.h[:n])

        # 2. Later groups. Their end is after the last position of every layer of the wave.
        end = sizes.schedule.length + sizes.L * sizes.schedule.skew
        self.pull_past(groups, start=base, stop=base + group, end=end, first=True, tile=group_tile(group, sizes.K))

        # 3. Chunks.
        for chunk in reversed(range(0, group, CHUNK)):
            if chunk + CHUNK < group:
                # a. Later chunks.
                start, end = base + chunk, base + group
                self.pull_past(groups, start=start, stop=start + CHUNK, end=end, first=False, tile=CHUNK_TILE)

            # b. Blocks. The last call only computes delta of the first block.
            if self.chunk_kernel is not None:
                self.finish_chunk(self.chunk_kernel, groups, chunk)
                continue
            pull = self.pull_in_chunk(groups, chunk)
            for t in reversed(range(0, CHUNK, block)):
                pull(t=t, J=position_tile(CHUNK - 2 * block - t), QUERY=t + block < CHUNK, PULL=True)
                self.finish_block(groups, chunk + t)
            pull(t=-block, J=2, QUERY=True, PULL=False)

        # 4. Weights, queries, temporary pairs and inputs.
        self.add_weight_gradients(groups)
        self.finish_inputs(groups)

    def pull_past(self, groups: _Groups, *, start: int, stop: int, end: int, first: bool, tile: dict[str, Any]) -> None:
        """Gradients that the pairs start..stop get from the queries stop..end, positions of layer ``lo``.

        The kernel finds the other layers at work by their distance from ``lo``. The ``first`` call for a pair starts
        from zero.
        """
        (lo, _, base), sizes = groups.wave, self.sizes

        past_bwd_kernel[(groups.wave.n * sizes.B * sizes.H,)](
            q_ptr=self.kept.q[lo],
            k_ptr=self.kept.k[lo],
            v_ptr=self.kept.v[lo],
            da_ptr=self.scratch.da[lo],
            lse_ptr=self.kept.lse[lo],
            delta_ptr=self.scratch.delta[lo],
            dk_ptr=self.scratch.dk,
            dv_ptr=self.scratch.dv,
            start=start,
            stop=stop,
            begin=stop,
            end=end,
            base=base,
            FIRST=first,
            **self.past_arguments,
            **tile,
        )

    def pull_in_chunk(self, groups: _Groups, chunk: int) -> Callable[..., Any]:
        """Launch of the gradients of the pairs of the block at ``t`` of its chunk, from the chunk's later queries.

        The chunk begins at position ``chunk`` of the group. ``attend_bwd_kernel`` explains J, QUERY and PULL.
        """
        scratch, sizes = self.scratch, self.sizes
        first = groups.kept.at(chunk, sizes.block)

        return partial(
            attend_bwd_kernel[groups.wave.n * sizes.block * sizes.B, triton.cdiv(sizes.H, ATTEND["G"])],
            q_ptr=first.q,
            k_ptr=first.k,
            v_ptr=first.v,
            a_ptr=first.a,
            da_ptr=groups.da[:, chunk],
            lse_ptr=first.lse,
            delta_ptr=groups.delta[:, chunk],
            dk_ptr=scratch.dk[0, chunk],
            dv_ptr=scratch.dv[0, chunk],
            slopes_ptr=self.slopes_H,
            dkv_ptr=scratch.dkv[0, chunk],
            B=sizes.B,
            N=first.q.stride(0) // sizes.D,
            D=sizes.D,
            K=sizes.K,
            C=CHUNK,
            S=sizes.schedule.group,
            BLOCK=sizes.block,
            **ATTEND,
        )

    def finish_chunk(self, kernel: ChunkKernel, groups: _Groups, chunk: int) -> None:
        """Compute what ``pull_in_chunk`` and ``finish_block`` do for all positions of a chunk in one launch."""
        (lo, hi, _), kept, d, da, delta = groups.wave, groups.kept, groups.d, groups.da, groups.delta
        tensors = backward_tensors(chunk, d, da, delta, kept, self.scratch, self.transposed.layers(lo, hi))
        kernel.launch(groups.wave.n, tensors, kept.q.stride(0) // self.sizes.D)

    def finish_block(self, groups: _Groups, i: int) -> None:
        """Compute the gradients of a block's attention outputs from those of its outputs and persistent pairs.

        The block begins at position i of the group.
        """
        n, block, rows, F = groups.wave.n, self.sizes.block, self.sizes.block * self.sizes.B, self.sizes.F
        scratch, operands = self.scratch, groups.operands
        kept, d, da = groups.kept.at(i, block), rows_at(groups.d, i, block), rows_at(groups.da, i, block)
        wide = scratch.dkv, scratch.dy, scratch.h, scratch.dh, scratch.du
        dkv, dy, h, dh, du = (rows_at(y[:n], i, block) for y in wide)
        dn, dg = scratch.dn[:n], scratch.dg[:n]

        # Persistent pair.
        if self.qk_norm:
            pair_bwd_kernel[rows, n](**strided(dkv=dkv, k=kept.k, r=kept.r_k), **self.row_arguments)
        product(dkv, operands.kv, out=dn)
        add_norm_bwd_kernel[rows, n](
            **strided(d=d, dn=dn, n=kept.n_z, r=kept.r_z, du=d, dy=dy),
            scale=self.setting.scale,
            NORM=self.setting.persistent_norm,
            **self.row_arguments,
        )

        # z = u + scale * down GELU(up RMS(u))
        product(dy, operands.down, out=dg)
        gelu_bwd_kernel[rows, triton.cdiv(F, GELU["W"]), n](**strided(dg=dg, h=h, dh=dh), F=F, **GELU)
        product(dh, operands.up, out=dn)
        add_norm_bwd_kernel[rows, n](
            **strided(d=d, dn=dn, n=kept.n_u, r=kept.r_u, du=d, dy=du),
            scale=self.setting.scale,
            NORM=True,
            **self.row_arguments,
        )

        # u = x + scale * out a
        product(du, operands.out, out=da)

    def add_weight_gradients(self, groups: _Groups) -> None:
        """Add the group's contribution to the gradients of the matrices, except ``qkv`` (see ``finish_inputs``)."""
        n, kept, scratch = groups.wave.n, groups.kept, self.scratch
        doperands = self.doperands.layers(groups.wave.lo, groups.wave.hi)

        add_outer_products(doperands.up, scratch.dh[:n], kept.n_u)
        add_outer_products(doperands.down, scratch.dy[:n], scratch.h[:n])
        add_outer_products(doperands.out, scratch.du[:n], kept.a)
        add_outer_products(doperands.kv, scratch.dkv[:n], kept.n_z)

    def finish_inputs(self, groups: _Groups) -> None:
        """Compute the gradients of a group's queries and temporary pairs, and from them those of its inputs."""
        (lo, hi, _), n, kept, sizes = groups.wave, groups.wave.n, groups.kept, self.sizes
        scratch, group = self.scratch, sizes.schedule.group

        self.query_gradients(groups)
        begin_bwd_kernel[sizes.B, group // BEGIN_BWD["C"], n](
            **strided(raw=kept.raw, da=groups.da),
            gain_ptr=self.key_gain[lo:hi],
            lse_ptr=kept.lse,
            delta_ptr=groups.delta,
            dq_ptr=scratch.dq[:n],
            dkt_ptr=scratch.dkt,
            dvt_ptr=scratch.dvt,
            draw_ptr=scratch.draw[:n],
            dgain_ptr=scratch.dgain[lo:hi],
            B=sizes.B,
            K=sizes.K,
            S=group,
            NORM=self.qk_norm,
            **{**self.row_arguments, **BEGIN_BWD},
        )

        # Through the product with qkv and the norm before it.
        add_outer_products(self.doperands.qkv[lo:hi], scratch.draw[:n], kept.n_x)
        product(scratch.draw[:n], groups.operands.qkv, out=scratch.dn_x[:n])
        add_norm_bwd_kernel[group * sizes.B, n](
            **strided(d=groups.d, dn=scratch.dn_x[:n], n=kept.n_x, r=kept.r_x, du=groups.dx, dy=None),
            scale=self.setting.scale,
            NORM=True,
            **self.row_arguments,
        )

    def query_gradients(self, groups: _Groups) -> None:
        """Gradients that the group's queries get from all earlier persistent pairs.

        In blocks of several positions, also those that queries and temporary pairs of a block get from each other.
        """
        (lo, _, base), sizes, kept, scratch = groups.wave, self.sizes, self.kept, self.scratch

        query_bwd_kernel[groups.wave.n * sizes.B * sizes.H, 1](
            q_ptr=kept.q[lo],
            kt_ptr=(kept.q if kept.kt is None else kept.kt)[lo],  # without kt, begin_bwd_kernel does temporary pairs
            vt_ptr=(kept.q if kept.vt is None else kept.vt)[lo],
            k_ptr=kept.k[lo],
            v_ptr=kept.v[lo],
            da_ptr=scratch.da[lo],
            lse_ptr=kept.lse[lo],
            delta_ptr=scratch.delta[lo],
            dq_ptr=scratch.dq,
            dkt_ptr=scratch.dq if scratch.dkt is None else scratch.dkt,
            dvt_ptr=scratch.dq if scratch.dvt is None else scratch.dvt,
            base=base,
            TEMPORARY=sizes.block > 1,
            BLOCK=sizes.block,
            **self.past_arguments,
            **group_tile(sizes.schedule.group, sizes.K),
        )
