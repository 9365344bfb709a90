"""Sums over Triton programs that work at the same time, inside a kernel: each sends its part and receives the sum.

The programs must all be on the GPU at once (``launch_cooperative_grid``). There is no barrier: data and the sign that
they have arrived are one word of 16 bytes, written and read whole, as in the protocols LL and LL128 of NCCL
(https://github.com/NVIDIA/nccl). Two sums take turns with the words, so a word holds a value of this sum or of the one
before the last, which whoever sends has read; a single bit, the phase, tells them apart.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def mailbox(programs: int, values: int, parts: int, device: torch.device) -> Tensor:
    """Words for programs that send so many values each, in phase 0; where all is one part, none is used."""
    turns, values_of_element = 2, 2
    return torch.zeros(
        programs * turns * values // values_of_element if parts > 1 else 1, dtype=torch.int32, device=device
    )


@triton.constexpr_function
def _check(at):
    """PTX that stops the kernel unless the four elements of a word lie behind each other."""
    tests = "".join(f"sub.u32 x, ${at + i}, ${at}; setp.ne.or.u32 apart, x, {i}, apart; " for i in (1, 2, 3))
    return f"setp.ne.u32 apart, ${at}, ${at}; {tests} @apart trap; "


@triton.constexpr_function
def _send(elements):
    """PTX that writes each four elements as a word with the phase as its lowest bit, and hands on where they lie."""
    at, values, base, phase = (elements * n for n in (1, 2, 3, 4))
    body = ""
    for i in range(0, elements, 4):
        body += _check(at + i)
        body += f"and.b32 x, ${values + i}, 0xfffffffe; or.b32 x, x, ${phase}; "
        body += f"mov.b64 low, {{x, ${values + i + 1}}}; mov.b64 high, {{${values + i + 2}, ${values + i + 3}}}; "
        body += f"mov.b128 word, {{low, high}}; mad.wide.u32 to, ${at + i}, 4, ${base}; "
        body += "st.relaxed.gpu.global.b128 [to], word; "
        body += "".join(f"mov.b32 ${i + n}, ${at + i + n}; " for n in range(4))
    return f"{{ .reg .pred apart; .reg .b32 x; .reg .b64 low, high, to; .reg .b128 word; {body} }}"


@triton.constexpr_function
def _await(parts, elements, stride):
    """PTX that reads words of all parts, which lie ``stride`` bytes behind each other, until all have the phase."""
    at, base, phase = (parts * elements + elements * n for n in (0, 1, 2))
    checks, starts, loads, tests, words = "", "", "", "", []
    for i in range(0, elements, 4):
        checks += _check(at + i)
        starts += f"mad.wide.u32 from{i}, ${at + i}, 4, ${base}; "
        for part in range(parts):
            first = part * elements + i
            words.append(f"word{first}")
            loads += f"ld.relaxed.gpu.global.b128 word{first}, [from{i} + {part * stride}]; "
            tests += f"mov.b128 {{low, high}}, word{first}; "
            tests += f"mov.b64 {{${first}, ${first + 1}}}, low; mov.b64 {{${first + 2}, ${first + 3}}}, high; "
            tests += f"xor.b32 x, ${first}, ${phase}; or.b32 other, other, x; "
    froms = ", ".join(f"from{i}" for i in range(0, elements, 4))
    return f"""{{
        .reg .pred apart, late; .reg .b32 x, other; .reg .b64 low, high, {froms}; .reg .b128 {", ".join(words)};
        {checks} {starts} again: {loads} mov.b32 other, 0; {tests} and.b32 other, other, 1; setp.ne.u32 late, other, 0;
        @late bra again;
    }}"""


@triton.constexpr_function
def _operands(outputs, elements, constraints):
    return ",".join([*["=&r"] * outputs, *(c for c in constraints for _ in range(elements))])


@triton.jit
def send(y_MD, mail_ptr, number, part, M: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr):
    """Hand y to all parts as bfloat16, and return where the first part's is (M, D / 2); sums are numbered from 0 on.

    An element is two channels, a word the four elements that a thread holds of a product of 16 rows: where that were
    not so, the kernel would stop. Lanes and words are in the same order. The phase takes the lowest bit of one of the
    eight values of a word.
    """
    tl.static_assert(M == 16)
    left_ME, right_ME = tl.split(tl.reshape(y_MD, [M, D // 2, 2]))
    left_ME = left_ME.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    right_ME = right_ME.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    m = tl.arange(0, M)[:, None]
    e = tl.arange(0, D // 2)[None, :]
    column = e // 4  # of 8 channels; those of a warp are WARPS apart
    word_ME = (column // WARPS // 2 * WARPS + column % WARPS) * 32 + m % 8 * 4 + e % 4
    at_ME = word_ME * 4 + column // WARPS % 2 * 2 + m // 8
    elements: tl.constexpr = M * D // 2 // (32 * WARPS)
    own_ptr = mail_ptr + (number % 2 * PARTS + part) * (M * D // 2)
    return tl.inline_asm_elementwise(
        _send(elements), _operands(elements, elements, "rrlr"),
        [at_ME, left_ME | (right_ME << 16), own_ptr, _phase(number)], tl.int32, is_pure=False, pack=elements,
    )  # fmt: skip


@triton.jit
def receive(
    at_ME, mail_ptr, number, M: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    """Sum (M, D) of what the parts sent, the same to the last bit for all of them."""
    elements: tl.constexpr = M * D // 2 // (32 * WARPS)
    pairs = tl.inline_asm_elementwise(
        _await(PARTS, elements, M * D * 2), _operands(PARTS * elements, elements, "rlr"),
        [at_ME, mail_ptr + number % 2 * PARTS * (M * D // 2), _phase(number)],
        (tl.uint32,) * PARTS, is_pure=False, pack=elements,
    )  # fmt: skip
    left_ME = tl.zeros([M, D // 2], tl.float32)
    right_ME = tl.zeros([M, D // 2], tl.float32)
    for part in tl.static_range(PARTS):
        left_ME += (pairs[part] << 16).to(tl.float32, bitcast=True)
        right_ME += (pairs[part] & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(left_ME, right_ME), [M, D])


@triton.jit
def _phase(number):
    """1 for the first two sums, then 0 for two, and so on."""
    return (number // 2 + 1) % 2
