"""Memory tokens that pass through a layer after each segment, in two loops over segments; see ``mixers.ops.memory``.

A program serves M rows of one run, which are the P memory tokens of M / P sequences, and walks through all segments.
Tensors of R runs, B sequences, T positions in N segments of C; ``fwd`` is ``memory_fwd_kernel``, ``bwd``
``memory_bwd_kernel``, and ``pass`` the code around them below.

    name              shape                   written by  read by                    meaning
    memory            (R, B, P, D)            caller      fwd                        memory of the first segment
    k, v              (R, B, T, D)            caller      fwd, bwd, pair_gradients   pairs of the positions
    bias              (P + C, P, H)           caller      fwd, bwd, pair_gradients   of logits, float32
    w                 (R, 4 D D + 2 F D)      caller      fwd, bwd                   wq, wk, wv, wo, up, down, flat
    gains             (R, 5, D)               pass        fwd, bwd                   of the norms, see _gains, float32
    memory_k, _v      (R, B, N P, D)          fwd         pass, bwd                  pairs of the memory tokens
    n                 (R, B, N P, D)          fwd         bwd, pass                  normed memory, before the gain
    nq, nk            (R, B, N P, D)          fwd         bwd                        normed queries and keys, likewise
    r                 (R, B, N P, 5)          fwd         bwd                        1 / rms of the norms, float32
    q, a              (R, B, (N - 1) P, D)    fwd         bwd, pass                  queries, attention outputs
    lse               (R, B, (N - 1) P, H)    fwd         bwd, pair_gradients        log2 of the sum of weights, float32
    nu, nz            (R, B, (N - 1) P, D)    fwd         bwd, pass (nu)             normed input of the MLP, and output
    g, slope          (R, B, (N - 1) P, F)    fwd         pass, bwd                  hidden layer after its GELU; slope
    dmemory_k, _v     (R, B, N P, D)          pass        bwd                        gradients of memory_k, memory_v
    dmemory           (R, B, P, D)            bwd         caller                     gradient of memory
    draw              (R, B, N P, 3 D)        bwd         pass                       gradients of the products q, k, v
    da                (R, B, (N - 1) P, D)    bwd         bwd, pair_gradients        gradient of a
    delta             (R, B, (N - 1) P, H)    bwd         bwd, pair_gradients        da . a of each head, float32
    du, dy            (R, B, (N - 1) P, D)    bwd         pass                       gradients of both branches' outputs
    dh                (R, B, (N - 1) P, F)    bwd         pass                       gradient of h before its GELU
    dgain             (R, tiles, 3, D)        bwd         pass                       for queries, keys, output, float32

Tensors without "float32" have the dtype of the products. The memory itself stays on the chip, in float32. Only
gradients of activations are computed in the loop. The gradients of weights, and of the positions' pairs, are products
over all segments after it. There are no atomics, so results are bitwise reproducible.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mixers.ops.kernels.block_attention import block_attention_method, pair_gradients
from mixers.ops.kernels.common import contiguous, gpu_limits, kernels_take
from mixers.ops.kernels.memory_backward import memory_bwd_kernel
from mixers.ops.kernels.memory_forward import memory_fwd_kernel
from mixers.ops.kernels.products import group_sum, rows_products, through_gain
from mixers.ops.method import Method, Optionals, Tensors
from mixers.ops.weights import LayerWeights

PROGRAMS = 132
"""Number of programs that run at the same time on an H200."""


@kernels_take(
    "memory of segments",
    "widths 32, 64 and 128, heads of 8 channels or more, an MLP whose width 64 divides, and 1, 2, 4, 8 or 16 tokens",
)
def fits_memory(D: int, H: int, F: int, P: int) -> bool:
    """Whether ``memory_attention_method`` takes P memory tokens and these widths."""
    fits_heads = D % H == 0 and D // H in (8, 16, 32, 64, 128)
    return D in (32, 64, 128) and fits_heads and F % 64 == 0 and P in (1, 2, 4, 8, 16)


class _Inputs(NamedTuple):
    """Tensors of ``memory_attention_method``; the matrices among the weights stand once more in w."""

    q: Tensor
    k: Tensor
    v: Tensor
    memory: Tensor
    position_bias: Tensor
    bias: Tensor
    output_norm: Tensor
    weights: LayerWeights
    w: Tensor

    @staticmethod
    def of(*tensors: Any) -> "_Inputs":
        return _Inputs._make((*tensors[:7], LayerWeights(*tensors[7:-1]), tensors[-1]))


def memory_attention_method(heads: int, scale: float, earlier: int) -> Method:
    """Attention (R, B, T, D) of positions to the memory of their segment, and to the positions in reach.

    There must be at least two segments. Tensors: q, k, v (R, B, T, D) in the dtype of w, and the memory (R, B, P, D) of
    the first segment; biases (R, P + (E + 1) C, C, H) of the positions, with E ``earlier`` segments in reach, and
    (R, P + C, P, H) of the memory tokens, in float32 and the same in all runs; gain of the norm of the outputs, the
    fields of ``LayerWeights``, and w (R, 4 D D + 2 F D), which holds the matrices among them in the dtype of products.
    The biases and w get no gradient.
    """

    def attention_of(y: _Inputs) -> Method:
        """Attention of the positions, which follows the loop."""
        keys, queries = y.position_bias.shape[1:3]
        return block_attention_method(heads, queries, keys, y.memory.shape[2], earlier)

    def prepared(y: _Inputs) -> tuple[Any, ...]:
        """Tensors as the loops read them; numbers of sequences, positions, segments and of a segment; settings."""
        (_, B, P, D), T, C = y.memory.shape, y.k.shape[2], y.bias.shape[1] - y.memory.shape[2]
        settings = {
            "D": D,
            "K": D // heads,
            "F": y.weights.up_FD.shape[1],
            "P": P,
            "QK_NORM": y.weights.q_norm_D is not None,
        }
        tensors = contiguous(y.memory, y.k, y.v, y.bias[0], y.w)
        return tensors, (B, T, triton.cdiv(T, C), C), settings | _tile(y.w, B * P, D)

    def forward(*tensors: Any) -> tuple[Tensors, Tensors]:
        inputs = _Inputs.of(*tensors)
        (memory, k, v, bias, w), counts, settings = prepared(inputs)
        R, B, P, D = memory.shape
        N, F = counts[2], settings["F"]
        gains = _gains(inputs.weights, inputs.output_norm)

        memory_k, memory_v, n, nq, nk = (w.new_empty(R, B, N * P, D) for _ in range(5))
        r = bias.new_empty(R, B, N * P, gains.shape[1])
        q, a, nu, nz = (w.new_empty(R, B, (N - 1) * P, D) for _ in range(4))
        g, slope = (w.new_empty(R, B, (N - 1) * P, F) for _ in range(2))
        lse = bias.new_empty(R, B, (N - 1) * P, heads)

        saved = n, nq, nk, r, q, a, lse, nu, nz, g, slope
        memory_fwd_kernel[triton.cdiv(B * P, settings["M"]), R](
            memory, k, v, bias, w, gains, memory_k, memory_v, *saved, *counts, scale, **settings
        )
        attended = *inputs[:3], memory_k, memory_v, inputs.position_bias
        outputs, softmax = attention_of(inputs).forward(*attended)
        return outputs, (*softmax, memory_k, memory_v, gains, *saved)

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        inputs = _Inputs.of(*tensors)
        (memory, k, v, bias, w), counts, settings = prepared(inputs)
        *softmax, memory_k, memory_v, gains, n, nq, nk, r, q, a, lse, nu, nz, g, slope = saved
        R, B, P, D = memory.shape
        tiles = triton.cdiv(B * P, settings["M"])

        # Attention of the positions.
        attended = *inputs[:3], memory_k, memory_v, inputs.position_bias
        dq, dk, dv, *dtokens, _ = attention_of(inputs).backward(gradients, attended, outputs, tuple(softmax))

        # The loop.
        dmemory = torch.empty_like(memory)
        draw = w.new_empty(*n.shape[:-1], 3 * D)
        da, du, dy = (torch.empty_like(a) for _ in range(3))
        delta, dh = torch.empty_like(lse), torch.empty_like(g)
        dgain = bias.new_empty(R, tiles, 3, D)
        memory_bwd_kernel[tiles, R](
            *(k, v, bias, w, gains, memory_k, memory_v, n, nq, nk, r, q, a, lse, nu, nz, slope),
            *(*dtokens, dmemory, draw, da, delta, du, dy, dh, dgain),
            *(*counts, scale),
            **settings,
        )

        # Positions as pairs of the memory tokens.
        pair_gradients((k, v), q, bias, (da, lse, delta), size=counts[3], earlier=0, first=P, onto=(dk, dv))

        # Weights.
        weights = inputs.weights
        wqkv = torch.cat([weights.wq_DD, weights.wk_DD, weights.wv_DD], 1)
        dwqkv, dnorm = through_gain(rows_products((draw, n))[0], wqkv, weights.norm_D)
        dwo, dup, ddown = rows_products((du, a), (dh, nu), (dy, g))
        dup, dmlp_norm = through_gain(dup, weights.up_FD, weights.mlp_norm_D)
        dq_norm, dk_norm, doutput = group_sum(dgain).unbind(1)
        dqk_norms = (dq_norm, dk_norm) if settings["QK_NORM"] else (None, None)
        dweights = dnorm, *dwqkv.split(D, dim=1), *dqk_norms, dwo, dmlp_norm, dup, ddown
        return dq, dk, dv, dmemory, None, None, doutput, *dweights, None

    return Method(forward, backward)


def _tile(w: Tensor, rows: int, D: int) -> dict[str, Any]:
    """Tile of both kernels for the runs of w; a program holds the four square matrices, if its memory does.

    Tiles of 32 rows spill registers, but are 10% faster than tiles of 16 with more programs than multiprocessors.
    """
    if w.dtype == torch.float32:
        return {"M": 16, "J": 8, "W": 32, "PINNED": False, "num_warps": 8}
    M = 16 if len(w) * triton.cdiv(rows, 16) <= PROGRAMS else 32
    pinned = 4 * D * D * w.element_size() + 49152 <= gpu_limits(w.device).memory
    return {"M": M, "J": 128 // M, "W": 64, "PINNED": pinned, "num_warps": 8}


def _gains(weights: LayerWeights, output_RD: Tensor) -> Tensor:
    """Gains (R, 5, D) of input, queries, keys, MLP and outputs; in place of an absent gain, any tensor."""
    norm, q_norm, k_norm = weights.norm_D, weights.q_norm_D, weights.k_norm_D
    q_norm, k_norm = (norm if y is None else y for y in (q_norm, k_norm))
    return torch.stack((norm, q_norm, k_norm, weights.mlp_norm_D, output_RD), dim=1)
