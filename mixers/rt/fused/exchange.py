"""Sums over Triton programs of one kernel that run at the same time: each sends its part and receives the sum.

All programs must be on the GPU at once (``launch_cooperative_grid``). There is no barrier. As in the protocols LL and
LL128 of NCCL (https://github.com/NVIDIA/nccl), data and the flag that marks their arrival share one word of 16 bytes,
which is written and read as a whole:

1. ``send`` packs eight values as bfloat16 into each word, replaces the lowest bit of the word by the phase of the sum,
   and writes the word to the part's own mail.
2. ``receive`` reads the words of all parts repeatedly until all have the phase of the sum, and adds them up.

Successive sums alternate between two sets of words. Hence a word holds a value of the current sum, or of the sum two
before it, which the sender of the new value has already received. The phase, a single bit, distinguishes the two.

    name      shape                                      written by    read by
    mail      (tiles, 2 turns, PARTS, M * D / 8) words   send          receive, of every part of the tile

Here a tensor of suffix E has one element of 32 bits per two channels. A thread holds the four elements of a word.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def mailbox(programs: int, values: int, parts: int, device: torch.device) -> Tensor:
    """Return words in phase 0 for programs that send ``values`` values each; with one part, an unused tensor."""
    turns, values_of_element = 2, 2
    elements = programs * turns * values // values_of_element if parts > 1 else 1
    return torch.zeros(elements, dtype=torch.int32, device=device)


@triton.constexpr_function
def _check(at):
    """PTX that stops the kernel unless the four elements of a word are adjacent in memory."""
    tests = "".join(f"sub.u32 x, ${at + i}, ${at}; setp.ne.or.u32 apart, x, {i}, apart; " for i in (1, 2, 3))
    return f"setp.ne.u32 apart, ${at}, ${at}; {tests} @apart trap; "


@triton.constexpr_function
def _send(elements):
    """PTX that writes every four elements as a word with the phase as its lowest bit, and returns their offsets."""
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
    """PTX that reads the words of all parts, ``stride`` bytes apart, until all have the phase."""
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
    """Constraints of inline PTX: that of each output, then ``elements`` times that of each input."""
    return ",".join([*["=&r"] * outputs, *(c for c in constraints for _ in range(elements))])


@triton.jit
def send(
    y_MD: tl.tensor,
    mail_ptr: tl.tensor,
    number: tl.tensor,
    part: tl.tensor,
    M: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Send y to all parts as bfloat16, and return the offsets (M, D / 2) of the elements in a part's mail.

    1. Pack each two channels into an element.
    2. Find the offsets: lanes and words are in the same order.
    3. Write the words to the part's own mail.

    Sums are numbered from 0. The offsets are correct for the layout of a product of 16 rows; with any other layout the
    kernel traps. The phase replaces the lowest bit of one of the eight values of a word.
    """
    # 1. Elements.
    tl.static_assert(M == 16)
    left_ME, right_ME = tl.split(tl.reshape(y_MD, [M, D // 2, 2]))
    left_ME = left_ME.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    right_ME = right_ME.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)

    # 2. Offsets. A column is 8 channels; the columns of a warp are WARPS apart.
    m = tl.arange(0, M)[:, None]
    e = tl.arange(0, D // 2)[None, :]
    column = e // 4
    word_ME = (column // WARPS // 2 * WARPS + column % WARPS) * 32 + m % 8 * 4 + e % 4
    at_ME = word_ME * 4 + column // WARPS % 2 * 2 + m // 8

    # 3. Words.
    elements: tl.constexpr = M * D // 2 // (32 * WARPS)
    own_ptr = mail_ptr + (number % 2 * PARTS + part) * (M * D // 2)
    return tl.inline_asm_elementwise(
        _send(elements),
        _operands(elements, elements, "rrlr"),
        [at_ME, left_ME | (right_ME << 16), own_ptr, _phase(number)],
        tl.int32,
        is_pure=False,
        pack=elements,
    )


@triton.jit
def receive(
    at_ME: tl.tensor,
    mail_ptr: tl.tensor,
    number: tl.tensor,
    M: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Sum (M, D) of what the parts sent, bitwise the same for all of them.

    1. Wait for the words of all parts.
    2. Unpack the elements and add them up, part after part.
    """
    # 1. Words.
    elements: tl.constexpr = M * D // 2 // (32 * WARPS)
    pairs = tl.inline_asm_elementwise(
        _await(PARTS, elements, M * D * 2),
        _operands(PARTS * elements, elements, "rlr"),
        [at_ME, mail_ptr + number % 2 * PARTS * (M * D // 2), _phase(number)],
        (tl.uint32,) * PARTS,
        is_pure=False,
        pack=elements,
    )

    # 2. Sum.
    left_ME = tl.zeros([M, D // 2], tl.float32)
    right_ME = tl.zeros([M, D // 2], tl.float32)
    for part in tl.static_range(PARTS):
        left_ME += (pairs[part] << 16).to(tl.float32, bitcast=True)
        right_ME += (pairs[part] & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(left_ME, right_ME), [M, D])


@triton.jit
def _phase(number: tl.tensor):
    """Phase of a sum: 1 for the first two sums, 0 for the next two, and so on."""
    return (number // 2 + 1) % 2
