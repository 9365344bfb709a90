"""Sums over Triton programs that work at the same time, inside a kernel: each sends its part and receives the sum.

The programs must all be on the GPU at once (``launch_cooperative_grid``). There is no barrier: a word carries two
values and the number of the sum it belongs to, as in the protocol LL of NCCL (https://github.com/NVIDIA/nccl).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def mailbox(programs: int, values: int, parts: int, device: torch.device) -> Tensor:
    """Words without a number yet for programs that send so many values each; where all is one part, none is used."""
    turns, values_of_word = 2, 2
    words = programs * turns * values // values_of_word if parts > 1 else 1
    return torch.zeros(words, dtype=torch.uint64, device=device)


@triton.constexpr_function
def _await(parts, words, stride):
    """PTX that reads ``words`` words of 8 bytes of each part until the upper half of all is the number awaited.

    The lower halves come back, part by part; the words of a part lie ``stride`` bytes behind those of the part before.
    """
    number = f"${(parts + 1) * words}"
    loads, tests = "", ""
    for i in range(parts * words):
        at = f"${parts * words + i % words} + {i // words * stride}"
        loads += f"ld.relaxed.gpu.global.b64 w{i}, [{at}]; mov.b64 {{${i}, n{i}}}, w{i}; "
        tests += f"setp.ne.or.b32 late, n{i}, {number}, late; "
    return f"""{{
        .reg .pred late; .reg .b64 w<{parts * words}>; .reg .b32 n<{parts * words}>;
        again: {loads} setp.ne.b32 late, n0, n0; {tests} @late bra again;
    }}"""


@triton.constexpr_function
def _await_operands(parts, words):
    return ",".join(["=&r"] * parts * words + ["l"] * words + ["r"] * words)


@triton.jit
def send(y_MD, mail_ptr, number, part, M: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr):
    """Hand y to all parts, and return where the first part's is (M, D / 2).

    Two channels in bfloat16 and the ``number`` of the sum, from 1 on, are one word, which is written and read whole.
    Two sums take turns with the words: who sends to a sum has read the one before the last.
    """
    left_ME, right_ME = tl.split(tl.reshape(y_MD, [M, D // 2, 2]))
    left_ME = left_ME.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint64)
    right_ME = right_ME.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint64)
    word_ME = left_ME | (right_ME << 16) | (number.to(tl.uint64) << 32)
    m = tl.arange(0, M)[:, None]
    e = tl.arange(0, D // 2)[None, :]
    at_ME = (m // 8 * (D // 8) + e // 4) * 32 + m % 8 * 4 + e % 4 + (number % 2 * PARTS) * (M * D // 2)
    # Words lie in the order in which the threads of a warp hold a product, and PTX writes them, for tl.store would ask
    # for another layout: so none is changed between a product and the words, nor behind them.
    return tl.inline_asm_elementwise(
        "st.relaxed.gpu.global.b64 [$1], $3; mov.b64 $0, $2;", "=l,l,l,l",
        [mail_ptr + at_ME + part * (M * D // 2), mail_ptr + at_ME, word_ME], tl.uint64, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def received(from_ME, number, M: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, THREADS: tl.constexpr):
    """Sum (M, D) of what the parts sent, the same to the last bit for all of them."""
    words: tl.constexpr = M * D // 2 // THREADS
    pairs = tl.inline_asm_elementwise(
        _await(PARTS, words, M * D * 4), _await_operands(PARTS, words), [from_ME, number],
        (tl.uint32,) * PARTS, is_pure=False, pack=words,
    )  # fmt: skip
    left_ME = tl.zeros([M, D // 2], tl.float32)
    right_ME = tl.zeros([M, D // 2], tl.float32)
    for part in tl.static_range(PARTS):
        left_ME += (pairs[part] << 16).to(tl.float32, bitcast=True)
        right_ME += (pairs[part] & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(left_ME, right_ME), [M, D])
