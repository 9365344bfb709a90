"""The wavefront's forward: waves, groups, chunks and positions; ``passes`` has a drawing."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mixers.ops.weights import LayerWeights
from mixers.rt.past_kernels import past_fwd_kernel
from mixers.rt.wavefront.buffers import ForwardScratch, Kept, at_work, rows_at
from mixers.rt.wavefront.chunk import ChunkKernel, forward_tensors
from mixers.rt.wavefront.forward_kernels import (
    add_norm_fwd_kernel,
    attend_fwd_kernel,
    begin_fwd_kernel,
    gelu_fwd_kernel,
    pair_fwd_kernel,
)
from mixers.rt.wavefront.launch import (
    ATTEND,
    CHUNK_TILE,
    GELU,
    copy_positions,
    group_tile,
    position_tile,
    product,
    strided,
)
from mixers.rt.wavefront.schedule import CHUNK, Wave
from mixers.rt.wavefront.setup import Pass, WavefrontSetting
from mixers.rt.wavefront.weights import Operands


class _Groups(NamedTuple):
    """The tensors of a wave: one group of positions of each of n layers.

    Attributes:
        wave: the layers and their groups.
        x: inputs (n, S, B, D).
        z: outputs (n, S, B, D).
        kept: tensors of the groups that are kept for the backward pass (n, S, B, ...).
        operands: transposed matrices (n, inputs, outputs).
    """

    wave: Wave
    x: Tensor
    z: Tensor
    kept: Kept
    operands: Operands


class Forward(Pass):
    """Forward pass of a stack of layers (R = 1), or of one layer of R runs.

    Args:
        x_RBTD: inputs.
        weights: weights with a leading axis of layers or runs.
        setting: settings that layers share.
    """

    def __init__(self, x_RBTD: Tensor, weights: LayerWeights, setting: WavefrontSetting) -> None:
        super().__init__(x_RBTD, weights, setting)
        self.x_RBTD = x_RBTD
        self.saved = Kept.saved(self.sizes)
        self.kept = Kept.named(self.sizes, self.saved)
        self.scratch = ForwardScratch.new(self.sizes)
        self.chunk_kernel = ChunkKernel.of(self, "forward")

    def run(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Outputs (R, B, T, D), and tensors that the backward takes as ``saved``."""
        R, L, schedule = self.sizes.R, self.sizes.L, self.sizes.schedule
        z_RBTD = torch.empty_like(self.x_RBTD)
        x, z = self.scratch.x, self.scratch.z

        for wave in schedule.waves():
            if wave.lo == 0:  # the group enters the first layer
                group = slice(wave.base, wave.base + schedule.group)
                copy_positions(out=x[:R], y=self.x_RBTD[:, :, group].transpose(1, 2))

            self.compute(self.groups_of(wave, x, z))

            if wave.hi == L:  # the group leaves the last layer
                copy_positions(out=z_RBTD[:, :, schedule.group_of_last(wave)].transpose(1, 2), y=z[-R:])
            x, z = z, x  # outputs are the next layer's inputs

        return z_RBTD, self.saved

    def groups_of(self, wave: Wave, x: Tensor, z: Tensor) -> _Groups:
        """Views of a wave's groups."""
        lo, hi, _ = wave
        return _Groups(
            wave=wave,
            x=x[lo:hi],
            z=z[lo + 1 : hi + 1],
            kept=self.kept.map(lambda y: at_work(y, wave, self.sizes.schedule)),
            operands=Operands(*(w.mT for w in self.operands.layers(lo, hi))),
        )

    def compute(self, groups: _Groups) -> None:
        """Compute the outputs of one group of each layer of the wave.

        1. Queries and temporary pairs of the group.
        2. Attention of the group to all earlier groups.
        3. For each chunk:
           a. attention of the chunk to the group's earlier chunks;
           b. for each block, attention to the chunk's earlier positions, and the steps from there to its pairs; a chunk
              kernel does all blocks at once.
        """
        base, group, block = groups.wave.base, self.sizes.schedule.group, self.sizes.block

        # 1. Queries and temporary pairs.
        self.begin(groups)

        # 2. Earlier groups, and the temporary pairs of blocks of several positions.
        tile = group_tile(group, self.sizes.K)
        self.attend_past(groups, begin=0, start=base, stop=base + group, block=block, tile=tile)

        # 3. Chunks.
        for chunk in range(0, group, CHUNK):
            start = base + chunk
            if chunk:
                # a. Earlier chunks.
                self.attend_past(groups, begin=base, start=start, stop=start + CHUNK, tile=CHUNK_TILE)

            # b. Blocks.
            if self.chunk_kernel is not None:
                self.finish_chunk(self.chunk_kernel, groups, chunk)
                continue
            attend = self.attention_in_chunk(groups, chunk)
            for t in range(0, CHUNK, block):
                attend(t=t, J=position_tile(t))
                self.finish_block(groups, chunk + t)

    def begin(self, groups: _Groups) -> None:
        """Normed inputs, queries, and the softmax state over temporary pairs, for a whole group.

        Temporary pairs of blocks of several positions are stored instead, for ``attend_past``.
        """
        (lo, hi, _), n, kept = groups.wave, groups.wave.n, groups.kept
        rows = self.sizes.schedule.group * self.sizes.B

        # Normed inputs. In a chained stack, later layers use the normed outputs of the layer before.
        to_norm = n if not self.sizes.chained else int(lo == 0)
        if to_norm:
            add_norm_fwd_kernel[rows, to_norm](
                **strided(x=groups.x, y=None, u=None, n=kept.n_x, r=kept.r_x),
                scale=self.setting.scale,
                NORM=True,
                **self.row_arguments,
            )

        product(kept.n_x, groups.operands.qkv, out=kept.raw)
        begin_fwd_kernel[rows, n](
            **strided(raw=kept.raw, q=kept.q),
            gain_ptr=self.key_gain[lo:hi],
            m_ptr=self.scratch.m,
            l_ptr=self.scratch.l,
            o_ptr=self.scratch.o,
            kt_ptr=kept.kt,
            vt_ptr=kept.vt,
            rows=rows,
            K=self.sizes.K,
            NORM=self.qk_norm,
            **self.row_arguments,
        )

    def attend_past(
        self, groups: _Groups, *, begin: int, start: int, stop: int, block: int = 1, tile: dict[str, Any]
    ) -> None:
        """Let the queries start..stop attend to the pairs begin..start, positions of layer ``lo``.

        With blocks of several positions, also to the temporary pairs of their blocks; this starts the softmax state.
        The kernel finds the other layers at work by their distance from ``lo``.
        """
        (lo, _, base), sizes = groups.wave, self.sizes
        q, kt, vt = self.kept.q, self.kept.kt, self.kept.vt

        past_fwd_kernel[(groups.wave.n * sizes.B * sizes.H,)](
            q_ptr=q[lo],
            kt_ptr=(q if kt is None else kt)[lo],  # without kt, temporary pairs are in the state already
            vt_ptr=(q if vt is None else vt)[lo],
            k_ptr=self.kept.k[lo],
            v_ptr=self.kept.v[lo],
            m_ptr=self.scratch.m,
            l_ptr=self.scratch.l,
            o_ptr=self.scratch.o,
            begin=begin,
            start=start,
            stop=stop,
            base=base,
            FIRST=block > 1,
            BLOCK=block,
            **self.past_arguments,
            **tile,
        )

    def attention_in_chunk(self, groups: _Groups, chunk: int) -> Callable[..., Any]:
        """Launch of the attention of the block at ``t`` of its chunk, which begins at position ``chunk`` of the group.

        ``J`` is the number of earlier positions that a tile takes.
        """
        scratch, sizes = self.scratch, self.sizes
        first = groups.kept.at(chunk, sizes.block)

        return partial(
            attend_fwd_kernel[groups.wave.n * sizes.block * sizes.B, triton.cdiv(sizes.H, ATTEND["G"])],
            q_ptr=first.q,
            k_ptr=first.k,
            v_ptr=first.v,
            m_ptr=scratch.m[0, chunk],
            l_ptr=scratch.l[0, chunk],
            o_ptr=scratch.o[0, chunk],
            slopes_ptr=self.slopes_H,
            a_ptr=first.a,
            lse_ptr=first.lse,
            B=sizes.B,
            N=first.q.stride(0) // sizes.D,
            D=sizes.D,
            K=sizes.K,
            S=sizes.schedule.group,
            BLOCK=sizes.block,
            **ATTEND,
        )

    def finish_chunk(self, kernel: ChunkKernel, groups: _Groups, chunk: int) -> None:
        """Compute outputs and persistent pairs of all positions of a chunk in one launch."""
        (lo, hi, _), kept = groups.wave, groups.kept
        tensors = forward_tensors(chunk, groups.x, groups.z, kept, self.scratch, self.operands.layers(lo, hi))
        kernel.launch(groups.wave.n, tensors, kept.q.stride(0) // self.sizes.D)

    def finish_block(self, groups: _Groups, i: int) -> None:
        """Compute outputs and persistent pairs of the block at position i of a group from its attention outputs."""
        n, block, rows = groups.wave.n, self.sizes.block, self.sizes.block * self.sizes.B
        scratch, operands = self.scratch, groups.operands
        kept, x, z = groups.kept.at(i, block), rows_at(groups.x, i, block), rows_at(groups.z, i, block)
        u, y, h, kv = scratch.u, scratch.y[:n], scratch.h[:n], scratch.kv[:n]

        # u = x + scale * out a
        product(kept.a, operands.out, out=y)
        add_norm_fwd_kernel[rows, n](
            **strided(x=x, y=y, u=u, n=kept.n_u, r=kept.r_u), scale=self.setting.scale, NORM=True, **self.row_arguments
        )

        # z = u + scale * down GELU(up RMS(u))
        product(kept.n_u, operands.up, out=h)
        gelu_fwd_kernel[(triton.cdiv(h.numel(), GELU["W"]),)](h_ptr=h, total=h.numel(), **GELU)
        product(h, operands.down, out=y)
        add_norm_fwd_kernel[rows, n](
            **strided(x=u, y=y, u=z, n=kept.n_z, r=kept.r_z),
            scale=self.setting.scale,
            NORM=self.setting.persistent_norm,
            **self.row_arguments,
        )

        # Persistent pair.
        product(kept.n_z, operands.kv, out=kv)
        pair_fwd_kernel[rows, n](
            **strided(raw=kv, r=kept.r_k),
            k_ptr=kept.k,
            v_ptr=kept.v,
            pair_stride=kept.k.stride(0),
            NORM=self.qk_norm,
            **self.row_arguments,
        )
