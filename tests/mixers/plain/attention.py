"""Every layer with softmax attention, position by position in NumPy, from its paper's equations and its parameters."""

from typing import Any

import numpy as np

from tests.mixers.plain.common import (
    LENGTH,
    SHAPE,
    WIDTH,
    Array,
    Parameters,
    finish,
    part,
    rms,
    sigmoid,
    silu,
    sinusoid,
    softmax,
)

Pair = tuple[Array, Array, int]
"""Key and value (D,), and the positions from them to the query."""


def query(p: Parameters, x: Array) -> Array:
    return rms(p["q.weight"] @ rms(x, p["attention_norm.gain"]), p["q_norm.gain"])


def key_value(p: Parameters, x: Array, norm: str | None = "attention_norm.gain") -> tuple[Array, Array]:
    normed = rms(x, p[norm]) if norm else x
    return rms(p["k.weight"] @ normed, p["k_norm.gain"]), p["v.weight"] @ normed


def attend(q: Array, pairs: list[Pair], heads: int) -> Array:
    """Attention (D,) of one query to pairs, head by head, with ALiBi: the slope of head h = 1, ..., H is 2^(-8h/H)."""
    outputs = []
    for h in range(heads):
        at = slice(h * WIDTH // heads, (h + 1) * WIDTH // heads)
        slope = 2.0 ** (-8 * (h + 1) / heads)
        logits = [q[at] @ k[at] / (WIDTH // heads) ** 0.5 - slope * distance for k, _, distance in pairs]
        outputs.append(softmax(np.array(logits)) @ np.array([v[at] for _, v, _ in pairs]))
    return np.concatenate(outputs)


def after(p: Parameters, x: Array, attended: Array) -> Array:
    """What follows attention in a layer."""
    return finish(p, x, p["out.weight"] @ attended)


def windowed(p: Parameters, heads: int, x: Array, window: int) -> Array:
    """A Transformer layer in which a query sees the last ``window`` positions."""
    z = np.zeros_like(x)
    for t in range(len(x)):
        seen = range(max(0, t - window + 1), t + 1)
        z[t] = after(p, x[t], attend(query(p, x[t]), [(*key_value(p, x[j]), t - j) for j in seen], heads))
    return z


def stack(p: Parameters, heads: int, x: Array) -> Array:
    """The Transformer layers of a layer that holds them all."""
    for n in range(SHAPE.layers):
        x = windowed(part(p, f"stack.blocks.{n}."), heads, x, len(x))
    return x


def transformer(p: Parameters, config: Any, x: Array) -> Array:
    """Oncescu et al. 2026, section 2.1."""
    return windowed(p, config.heads, x, LENGTH)


def sliding_attention(p: Parameters, config: Any, x: Array) -> Array:
    """Beltagy et al. 2020, section 3.1, without the positions behind a query."""
    return windowed(p, config.heads, x, config.window)


def recurrent_transformer(p: Parameters, config: Any, x: Array) -> Array:
    """Oncescu et al. 2026, section 2.2: pairs of earlier positions come from the outputs z, those of blocks from x."""
    z, norm = np.zeros_like(x), "attention_norm.gain" if config.persistent_norm else None
    for t in range(LENGTH):
        first = t // config.block * config.block
        persistent = [(*key_value(p, z[j], norm), t - j) for j in range(first)]
        temporary = [(*key_value(p, x[j]), t - j) for j in range(first, t + 1)]
        z[t] = after(p, x[t], attend(query(p, x[t]), persistent + temporary, config.heads))
    return z


def transformer_xl(p: Parameters, config: Any, x: Array) -> Array:
    """Dai et al. 2019, section 3.3, terms (a) to (d): logits (q_i + u) k_j + (q_i + v) W r_{i-j}."""
    size, z = WIDTH // config.heads, np.zeros_like(x)
    for i in range(LENGTH):
        js = range(max(0, i // config.segment - 1) * config.segment, i + 1)
        q, pairs, outputs = query(p, x[i]), [key_value(p, x[j]) for j in js], []
        for h in range(config.heads):
            at, logits = slice(h * size, (h + 1) * size), []
            for j, (k, _) in zip(js, pairs, strict=True):
                code = p["r.weight"] @ sinusoid(i - j)
                logits.append((q + p["u_D"])[at] @ k[at] + (q + p["v_D"])[at] @ code[at])
            outputs.append(softmax(np.array(logits) / size**0.5) @ np.array([v[at] for _, v in pairs]))
        z[i] = after(p, x[i], np.concatenate(outputs))
    return z


def forgetting_transformer(p: Parameters, config: Any, x: Array) -> Array:
    """Lin et al. 2025, section 3: the weight of pair j is exp(q_i k_j) times the gates f of the positions after j."""
    size, z = WIDTH // config.heads, np.zeros_like(x)
    gates = [sigmoid(p["forget.weight"] @ rms(y, p["attention_norm.gain"]) + p["forget.bias"]) for y in x]
    for i in range(LENGTH):
        q, pairs, outputs = query(p, x[i]), [key_value(p, x[j]) for j in range(i + 1)], []
        for h in range(config.heads):
            at = slice(h * size, (h + 1) * size)
            left = [np.prod([gates[s][h] for s in range(j + 1, i + 1)]) for j in range(i + 1)]
            weights = np.array([f * np.exp(q[at] @ k[at] / size**0.5) for f, (k, _) in zip(left, pairs, strict=True)])
            outputs.append(weights / weights.sum() @ np.array([v[at] for _, v in pairs]))
        z[i] = after(p, x[i], np.concatenate(outputs))
    return z


def path(p: Parameters, config: Any, x: Array) -> Array:
    """Yang et al. 2025, section 3: logits q_i H_i ... H_{j+1} k_j with H = I - beta w w^T, written out as matrices."""
    size, z, taps = WIDTH // config.heads, np.zeros_like(x), p["convolution.weight_DW"].T
    normed = [rms(y, p["attention_norm.gain"]) for y in x]
    low = [np.zeros(WIDTH)] * (len(taps) - 1) + [p["w.1.weight"] @ (p["w.0.weight"] @ y) for y in normed]
    directions = [silu(sum(tap * low[t + n] for n, tap in enumerate(taps))) for t in range(len(x))]
    strengths = [2 * sigmoid(p["strength.weight"] @ y + p["strength.bias"]) for y in normed]
    gates = [sigmoid(p["forget.weight"] @ y + p["forget.bias"]) for y in normed] if config.forget_gate else None
    for i in range(LENGTH):
        q, pairs, outputs = query(p, x[i]), [key_value(p, x[j]) for j in range(i + 1)], []
        for h in range(config.heads):
            at = slice(h * size, (h + 1) * size)
            logits = []
            for j, (k, _) in enumerate(pairs):
                product = np.eye(size)
                for s in range(j + 1, i + 1):
                    w = directions[s][at] / np.sqrt((directions[s][at] ** 2).sum() + 1e-6)
                    product = (np.eye(size) - strengths[s][h] * np.outer(w, w)) @ product
                passed = sum(np.log(gates[s][h]) for s in range(j + 1, i + 1)) if gates else 0.0
                logits.append(q[at] @ product @ k[at] / size**0.5 + passed)
            outputs.append(softmax(np.array(logits)) @ np.array([v[at] for _, v in pairs]))
        z[i] = after(p, x[i], np.concatenate(outputs))
    return z


def feedback_transformer(p: Parameters, config: Any, x: Array) -> Array:
    """Fan et al. 2020, section 3.2: all layers attend to m_t = sum_l softmax(w)_l h_t^l of earlier t, and to zeros."""
    z, memory = np.zeros_like(x), []
    for t in range(LENGTH):
        pairs = [(*key_value(p, m, "memory_norm.gain"), t - j) for j, m in enumerate(memory)]
        pairs.append((np.zeros(WIDTH), np.zeros(WIDTH), 0))
        hidden = [x[t]]
        for n in range(SHAPE.layers):
            block = part(p, f"blocks.{n}.")
            hidden.append(after(block, hidden[-1], attend(query(block, hidden[-1]), pairs, config.heads)))
        memory.append(softmax(p["depth"]) @ np.array(hidden))
        z[t] = hidden[-1]
    return z


def staircase(p: Parameters, config: Any, x: Array) -> Array:
    """Ju et al. 2021: before each pass of the layers a chunk enters the window; it leaves after its last pass."""
    waiting = [x[first : first + config.chunk] for first in range(0, LENGTH, config.chunk)]
    window: list[tuple[int, Array]] = []  # passes of a chunk, and what they gave
    done = []
    while waiting or window:
        if waiting:
            window.append((0, waiting.pop(0)))
        ends = np.cumsum([len(chunk) for _, chunk in window])[:-1]
        y = stack(p, config.heads, np.concatenate([chunk for _, chunk in window]))
        window = [(passes + 1, chunk) for (passes, _), chunk in zip(window, np.split(y, ends), strict=True)]
        if window[0][0] == config.steps:
            done.append(window.pop(0)[1])
    return np.concatenate(done)


def recurrent_memory(p: Parameters, config: Any, x: Array) -> Array:
    """Bulatov et al. 2022, section 3.2: memory, segment, memory; what the last tokens give is the next memory."""
    memory, z, count = p["memory_MD"], [], config.memory
    for first in range(0, LENGTH, config.segment):
        memory = rms(memory, p["memory_norm.gain"])
        y = stack(p, config.heads, np.concatenate([memory, x[first : first + config.segment], memory]))
        z.append(y[count:-count])
        memory = y[-count:]
    return np.concatenate(z)


def transformer_fam(p: Parameters, config: Any, x: Array) -> Array:
    """Hwang et al. 2024, figure 2: queries see their block, earlier ones, and memory, which sees block and itself."""
    memory, z = p["memory_MD"], np.zeros_like(x)
    for first in range(0, LENGTH, config.block):
        memory = rms(memory, p["memory_norm.gain"])
        held = [(*key_value(p, m), 0) for m in memory]
        here = range(first, min(first + config.block, LENGTH))
        for t in here:
            seen = range(max(0, first - config.earlier * config.block), t + 1)
            pairs = held + [(*key_value(p, x[j]), t - j) for j in seen]
            z[t] = after(p, x[t], attend(query(p, x[t]), pairs, config.heads))
        pairs = held + [(*key_value(p, x[j]), here[-1] - j) for j in here]
        memory = np.stack([after(p, m, attend(query(p, m), pairs, config.heads)) for m in memory])
    return z
