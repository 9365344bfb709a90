"""Every recurrence, position by position in NumPy, from its paper's equations and the layer's parameters alone.

Vectors are columns; S has keys as rows, unless a paper's equation is quoted otherwise.
"""

from typing import Any

import numpy as np

from tests.mixers.plain.common import (
    LENGTH,
    WIDTH,
    Array,
    Parameters,
    PlainForm,
    finish,
    gelu,
    part,
    rms,
    sigmoid,
    silu,
    sinusoid,
    softplus,
)


def in_its_layer(mix: PlainForm) -> PlainForm:
    """The layer around a mixer: norm before it, residual branches and MLP behind it."""

    def layer(p: Parameters, config: Any, x: Array) -> Array:
        y = mix(p, config, rms(x, p["mixer_norm.gain"]))
        return np.stack([finish(p, x[t], y[t]) for t in range(LENGTH)])

    return layer


def head(y: Array, h: int, heads: int) -> Array:
    """Head h of a vector of all heads, as a view."""
    return np.split(y, heads)[h]


def head_norm(p: Parameters, o: Array, heads: int, eps: float) -> Array:
    """Each head minus its mean, over its standard deviation; then gains and biases of the channels."""
    normed = [(y - y.mean()) / np.sqrt(y.var() + eps) for y in np.split(o, heads)]
    return p["norm.weight"] * np.concatenate(normed) + p.get("norm.bias", 0)


def convolve(p: Parameters, x: Array) -> Array:
    """y_t = bias + sum_w weight_w x_{t-W+1+w}, with zeros before the first position."""
    weight = p["convolution.weight_DW"]
    size = weight.shape[1]
    y = np.tile(p.get("convolution.bias_D", np.zeros(len(weight))), (len(x), 1))
    for t in range(len(x)):
        for w in range(size):
            if t - size + 1 + w >= 0:
                y[t] += weight[:, w] * x[t - size + 1 + w]
    return y


@in_its_layer
def linear_attention(p: Parameters, config: Any, x: Array) -> Array:
    """Katharopoulos et al. 2020, equations 16 to 20: s += φ(k) v^T, z += φ(k), y = φ(q)^T s / φ(q)^T z."""
    heads, y = config.heads, np.zeros_like(x)
    s, z = np.zeros((heads, WIDTH // heads, WIDTH // heads)), np.zeros((heads, WIDTH // heads))
    for t in range(LENGTH):
        coded = x[t] + sinusoid(t) * (config.positions == "sinusoidal")
        q, k, v = (p[f"{name}.weight"] @ coded for name in "qkv")
        phi_q, phi_k = (np.where(f > 0, f + 1, np.exp(f)) for f in (q, k))
        for h in range(heads):
            q_h, k_h, v_h = (head(f, h, heads) for f in (phi_q, phi_k, v))
            s[h] += np.outer(k_h, v_h)
            z[h] += k_h
            head(y[t], h, heads)[:] = q_h @ s[h] / (q_h @ z[h])
    return y @ p["out.weight"].T


@in_its_layer
def retnet(p: Parameters, config: Any, x: Array) -> Array:
    """Sun et al. 2023, equations 3, 6 and 8: S = γ S + K^T V, O = Q S, with Q and K rotated in opposite directions."""
    heads, y = config.heads, np.zeros_like(x)
    half = WIDTH // heads // 2
    theta = 10_000.0 ** -np.linspace(0, 1, half)
    S = np.zeros((heads, half, 2 * half), complex)
    for t in range(LENGTH):
        o = np.zeros(WIDTH)
        for h in range(heads):
            q, k, v = (head(p[f"{name}.weight"] @ x[t], h, heads) for name in "qkv")
            Q = (q[:half] + 1j * q[half:]) * np.exp(1j * t * theta) / (2 * half) ** 0.5
            K = (k[:half] - 1j * k[half:]) * np.exp(-1j * t * theta)
            S[h] = (1 - 2.0 ** (-5 - h)) * S[h] + np.outer(K, v)
            head(o, h, heads)[:] = (Q @ S[h]).real
        y[t] = p["out.weight"] @ (silu(p["gate.weight"] @ x[t]) * head_norm(p, o, heads, 1e-5))
    return y


@in_its_layer
def gla(p: Parameters, config: Any, x: Array) -> Array:
    """Yang et al. 2023, section 4: S = diag(α) S + k v^T, o = q^T S / √K, α = sigmoid(low-rank map)^(1/16)."""
    heads, y = config.heads, np.zeros_like(x)
    S = np.zeros((heads, WIDTH // heads // 2, WIDTH // heads))
    for t in range(LENGTH):
        logits = p["decay.1.weight"] @ p["decay.0.weight"] @ x[t] + p["decay.1.bias"]
        alpha, o = sigmoid(logits) ** (1 / 16), np.zeros(WIDTH)
        for h in range(heads):
            q, k, v = (head(p[f"{name}.weight"] @ x[t], h, heads) for name in "qkv")
            S[h] = head(alpha, h, heads)[:, None] * S[h] + np.outer(k, v)
            head(o, h, heads)[:] = rms(q @ S[h] / len(q) ** 0.5, p["norm.gain"])
        y[t] = p["out.weight"] @ (silu(p["gate.weight"] @ x[t]) * o)
    return y


def low_rank(p: Parameters, name: str, x: Array, f: Any = np.tanh) -> Array:
    return p[f"{name}.bias_D"] + p[f"{name}.up.weight"] @ f(p[f"{name}.down.weight"] @ x)


@in_its_layer
def rwkv6(p: Parameters, config: Any, x: Array) -> Array:
    """Peng et al. 2024, section 4: o = r^T (S + diag(u) k v^T), then S = diag(w) S + k v^T."""
    heads, y, before = config.heads, np.zeros_like(x), np.zeros(WIDTH)
    S = np.zeros((heads, WIDTH // heads, WIDTH // heads))
    for t in range(LENGTH):
        change = before - x[t]
        guide = x[t] + change * p["shift_D"]
        shifted = {n: x[t] + change * low_rank(p, f"shifts.{n}", guide) for n in ("r", "k", "v", "gate", "decay")}
        r, k, v, g = (p[f"{n}.weight"] @ shifted[n] for n in ("r", "k", "v", "gate"))
        w, o = np.exp(-np.exp(low_rank(p, "decay", shifted["decay"]))), np.zeros(WIDTH)
        for h in range(heads):
            r_h, k_h, v_h, w_h, u_h = (head(f, h, heads) for f in (r, k, v, w, p["bonus_D"]))
            head(o, h, heads)[:] = r_h @ (S[h] + np.outer(u_h * k_h, v_h))
            S[h] = w_h[:, None] * S[h] + np.outer(k_h, v_h)
        y[t] = p["out.weight"] @ (head_norm(p, o, heads, 64e-5) * silu(g))
        before = x[t]
    return y


@in_its_layer
def rwkv7(p: Parameters, config: Any, x: Array) -> Array:
    """Peng et al. 2025, section 4: S = S (diag(w) - κ̂ (a κ̂)^T) + v k̃^T with values as rows, o = S r, bonus ρ."""
    heads, y, before = config.heads, np.zeros_like(x), np.zeros(WIDTH)
    S = np.zeros((heads, WIDTH // heads, WIDTH // heads))
    for t in range(LENGTH):
        mixed = {n: x[t] + (before - x[t]) * mu for n, mu in part(p, "shifts_D.").items()}
        r, k, v = (p[f"{n}.weight"] @ mixed[n] for n in "rkv")
        w = np.exp(-np.exp(-0.5) * sigmoid(low_rank(p, "decay", mixed["decay"])))
        a = sigmoid(low_rank(p, "rate", mixed["rate"], lambda z: z)) * (1 + w if config.negative_eigenvalues else 1)
        g = p["gate.2.weight"] @ sigmoid(p["gate.0.weight"] @ mixed["gate"])
        kappa, k = k * p["removal_D"], k * (1 + (a - 1) * p["replacement_D"])
        o, bonus = np.zeros(WIDTH), np.zeros(WIDTH)
        for h in range(heads):
            r_h, k_h, v_h, w_h, a_h, c, rho = (head(f, h, heads) for f in (r, k, v, w, a, kappa, p["bonus_D"]))
            c = c / np.sqrt(c @ c + 1e-6)
            S[h] = S[h] @ (np.diag(w_h) - np.outer(c, a_h * c)) + np.outer(v_h, k_h)
            head(o, h, heads)[:] = S[h] @ r_h
            head(bonus, h, heads)[:] = (r_h * rho) @ k_h * v_h
        y[t] = p["out.weight"] @ (g * (head_norm(p, o, heads, 64e-5) + bonus))
        before = x[t]
    return y


@in_its_layer
def deltanet(p: Parameters, config: Any, x: Array) -> Array:
    """Yang et al. 2024, arXiv:2406.06484 and arXiv:2412.06464: S = α S (I - β k k^T) + β v k^T with values as rows.

    Without the maps of a decay, α is 1 and there is no gate. As in the authors' code, o = S q / √K, and ε is 1e-5.
    """
    heads, y = config.heads, np.zeros_like(x)
    qkv = silu(convolve(p, x @ p["qkv.weight"].T))
    S = np.zeros((heads, WIDTH // heads, WIDTH // heads))
    for t in range(LENGTH):
        beta = sigmoid(p["strength.weight"] @ x[t]) * (2 if config.negative_eigenvalues else 1)
        alpha, gate, o = np.ones(heads), 1.0, np.zeros(WIDTH)
        if "gate.weight" in p:
            step = softplus(p["step_size.weight"] @ x[t] + p["decay.bias_H"])
            alpha, gate = np.exp(-np.exp(p["decay.log_rate_H"]) * step), silu(p["gate.weight"] @ x[t])
        for h in range(heads):
            q, k, v = (head(f, h, heads) for f in np.split(qkv[t], 3))
            q, k = (f / np.sqrt(f @ f + 1e-6) for f in (q, k))
            S[h] = alpha[h] * S[h] @ (np.eye(len(k)) - beta[h] * np.outer(k, k)) + beta[h] * np.outer(v, k)
            head(o, h, heads)[:] = rms(S[h] @ q / len(q) ** 0.5, p["norm.gain"], 1e-5)
        y[t] = p["out.weight"] @ (gate * o)
    return y


def channel_decays(p: Parameters, y: Array, heads: int) -> Array:
    """α = exp(-exp(a) softplus(W y + b)), with one a a head."""
    rates = np.repeat(np.exp(p["decay.log_rate_H"]), WIDTH // heads)
    return np.exp(-rates * softplus(p["decay.up.weight"] @ y + p["decay.bias_D"]))


@in_its_layer
def kda(p: Parameters, config: Any, x: Array) -> Array:
    """Kimi Team 2025, equation 1: S = (I - β k k^T) diag(α) S + β k v^T; o = S^T q / √K, sigmoid gate."""
    heads, y = config.heads, np.zeros_like(x)
    qkv = silu(convolve(p, x @ p["qkv.weight"].T))
    S = np.zeros((heads, WIDTH // heads, WIDTH // heads))
    for t in range(LENGTH):
        decay_low, gate_low = np.split(p["low.weight"] @ x[t], 2)
        alpha, o = channel_decays(p, decay_low, heads), np.zeros(WIDTH)
        beta = sigmoid(p["strength.weight"] @ x[t]) * (2 if config.negative_eigenvalues else 1)
        for h in range(heads):
            q, k, v = (head(f, h, heads) for f in np.split(qkv[t], 3))
            q, k = (f / np.sqrt(f @ f + 1e-6) for f in (q, k))
            transition = (np.eye(len(k)) - beta[h] * np.outer(k, k)) @ np.diag(head(alpha, h, heads))
            S[h] = transition @ S[h] + beta[h] * np.outer(k, v)
            head(o, h, heads)[:] = rms(S[h].T @ q / len(q) ** 0.5, p["norm.gain"], 1e-5)
        gate = sigmoid(p["gate.weight"] @ gate_low + p["gate.bias"])
        y[t] = p["out.weight"] @ (gate * o)
    return y


@in_its_layer
def gdn2(p: Parameters, config: Any, x: Array) -> Array:
    """Hatamizadeh et al. 2026: S = (I - k (e ⊙ k)^T) diag(α) S + k (w ⊙ v)^T; o = S^T q / √K, SiLU gate."""
    heads, y = config.heads, np.zeros_like(x)
    qkv = silu(convolve(p, x @ p["qkv.weight"].T))
    S = np.zeros((heads, WIDTH // heads, WIDTH // heads))
    for t in range(LENGTH):
        decay_low, gate_low = np.split(p["low.weight"] @ x[t], 2)
        alpha, o = channel_decays(p, decay_low, heads), np.zeros(WIDTH)
        erase, write = np.split(sigmoid(p["strength.weight"] @ x[t]), 2)
        erase = erase * (2 if config.negative_eigenvalues else 1)
        for h in range(heads):
            q, k, v = (head(f, h, heads) for f in np.split(qkv[t], 3))
            q, k = (f / np.sqrt(f @ f + 1e-6) for f in (q, k))
            D = np.diag(head(alpha, h, heads)) @ S[h]
            S[h] = D - np.outer(k, D.T @ (head(erase, h, heads) * k)) + np.outer(k, head(write, h, heads) * v)
            head(o, h, heads)[:] = rms(S[h].T @ q / len(q) ** 0.5, p["norm.gain"], 1e-5)
        y[t] = p["out.weight"] @ (silu(p["gate.weight"] @ gate_low + p["gate.bias"]) * o)
    return y


@in_its_layer
def deltaproduct(p: Parameters, config: Any, x: Array) -> Array:
    """Siems et al. 2025, section 3: S = A S + B, A = α ∏ (I - β k k^T), B = ∑ (∏ of later I - β k k^T) β k v^T."""
    heads, N, y = config.heads, config.householders, np.zeros_like(x)
    size = WIDTH // heads
    projected = silu(convolve(p, x @ p["qkv.weight"].T))
    S = np.zeros((heads, size, size))
    for t in range(LENGTH):
        beta = sigmoid(p["strength.weight"] @ x[t]).reshape(N, heads) * (2 if config.negative_eigenvalues else 1)
        alpha, o = np.ones(heads), np.zeros(WIDTH)
        if config.gated:
            step = softplus(p["step_size.weight"] @ x[t] + p["decay.bias_H"])
            alpha = np.exp(-np.exp(p["decay.log_rate_H"]) * step)
        q = projected[t, :WIDTH].reshape(heads, size)
        keys, values = projected[t, WIDTH:].reshape(2, N, heads, size)
        for h in range(heads):
            A, B = alpha[h] * np.eye(size), np.zeros((size, size))
            for j in range(N):
                k = keys[j, h] / np.sqrt(keys[j, h] @ keys[j, h] + 1e-6)
                householder = np.eye(size) - beta[j, h] * np.outer(k, k)
                A, B = householder @ A, householder @ B + beta[j, h] * np.outer(k, values[j, h])
            S[h] = A @ S[h] + B
            o_h = S[h].T @ q[h] / np.sqrt(q[h] @ q[h] + 1e-6) / size**0.5
            head(o, h, heads)[:] = rms(o_h, p["norm.gain"], 1e-5)
        y[t] = p["out.weight"] @ (silu(p["gate.weight"] @ x[t]) * o)
    return y


@in_its_layer
def mamba(p: Parameters, config: Any, x: Array) -> Array:
    """Gu & Dao 2023, algorithm 2, each channel by itself: h = exp(Δ A) h + Δ B u, y = C h + D u."""
    inner, states = config.expand * WIDTH, config.state_size
    u, z = np.split(x @ p["project.weight"].T, 2, axis=1)
    u, A = silu(convolve(p, u)), -np.exp(p["A_log"].reshape(inner, states))
    h, y = np.zeros((inner, states)), np.zeros_like(x)
    for t in range(LENGTH):
        selected = p["select.weight"] @ u[t]
        low, B, C = selected[: -2 * states], selected[-2 * states : -states], selected[-states:]
        delta, o = softplus(p["dt.weight"] @ low + p["dt.bias"]), np.zeros(inner)
        for e in range(inner):
            h[e] = np.exp(delta[e] * A[e]) * h[e] + delta[e] * B * u[t, e]
            o[e] = C @ h[e] + p["skip"][e] * u[t, e]
        y[t] = p["out.weight"] @ (o * silu(z[t]))
    return y


@in_its_layer
def mamba2(p: Parameters, config: Any, x: Array) -> Array:
    """Dao & Gu 2024, section 7: h = exp(Δ A) h + Δ B x^T, y = C^T h + D x, with one A, Δ and D a head."""
    heads, states, inner = config.heads, config.state_size, config.expand * WIDTH
    projected, y = x @ p["inputs.weight"].T, np.zeros_like(x)
    convolved = silu(convolve(p, projected[:, inner:-heads]))
    S = np.zeros((heads, states, inner // heads))
    for t in range(LENGTH):
        u, B, C = convolved[t, :inner], convolved[t, inner : inner + states], convolved[t, inner + states :]
        delta, o = softplus(projected[t, -heads:] + p["decay.bias_H"]), np.zeros(inner)
        for h in range(heads):
            u_h, A = head(u, h, heads), -np.exp(p["decay.log_rate_H"][h])
            S[h] = np.exp(A * delta[h]) * S[h] + delta[h] * np.outer(B, u_h)
            head(o, h, heads)[:] = C @ S[h] + p["skip_H"][h] * u_h
        y[t] = p["out.weight"] @ rms(o * silu(projected[t, :inner]), p["norm.gain"])
    return y


@in_its_layer
def mamba3(p: Parameters, config: Any, x: Array) -> Array:
    """Lahoti et al. 2026, the complex state before its rotations are moved to B and C, and the trapezoidal rule.

    h turns by -π tanh(θ) Δ at each position, h = α h + α (1 - λ) Δ B x^T + λ Δ B x^T with the pair before and the pair;
    y = Re(C^T h) + D x. Rows i and i + N/2 are one complex row; those without an angle do not turn. The code has the
    MIMO form, with R pairs and queries, values and gates times learned numbers, and a learned sum.
    """
    heads, N, R, inner = config.heads, config.state_size, config.rank, config.expand * WIDTH
    angles = int(config.rotated * N) // 2
    z, u, B, C = np.split(x @ p["inputs.weight"].T, np.cumsum([inner, inner, R * N]), axis=1)
    controls = np.split(x @ p["controls.weight"].T, [heads, 2 * heads, 3 * heads], axis=1)
    one = np.ones((R, heads, inner // heads))
    of_x, of_z, of_y = (p.get(name, one) for name in ("value_RHV", "gate_RHV", "output_RHV"))

    def complex_rows(y: Array, name: str, h: int) -> Array:
        """Rows (R, N/2) of B or C, after norm and bias."""
        rows = rms(y.reshape(R, N), p[f"{name}_norm.gain"]) + p[f"{name}_bias_RHN"][:, h]
        return rows[:, : N // 2] + 1j * rows[:, N // 2 :]

    state, y = np.zeros((heads, N // 2, inner // heads), complex), np.zeros_like(x)
    pair = np.zeros_like(state)
    for t in range(LENGTH):
        dt, rate, trap, theta = (f[t] for f in controls)
        delta, lam, o = softplus(dt + p["step_bias_H"]), sigmoid(trap), np.zeros(inner)
        for h in range(heads):
            alpha = np.exp(-max(softplus(rate[h]), 1e-4) * delta[h])
            turn = np.pad(np.pi * np.tanh(theta) * delta[h], (0, N // 2 - angles))
            state[h] = np.exp(-1j * turn)[:, None] * alpha * (state[h] + (1 - lam[h]) * delta[h] * pair[h])

            v = head(u[t], h, heads) * of_x[:, h]
            pair[h] = complex_rows(B[t], "k", h).T @ v
            state[h] += lam[h] * delta[h] * pair[h]
            read = (complex_rows(C[t], "q", h).conj() @ state[h]).real + p["skip_H"][h] * v
            head(o, h, heads)[:] = (read * silu(head(z[t], h, heads) * of_z[:, h]) * of_y[:, h]).sum(0)
        y[t] = p["out.weight"] @ o
    return y


@in_its_layer
def mlstm(p: Parameters, config: Any, x: Array) -> Array:
    """Beck et al. 2024, equations 19 to 27, without the stabiliser: C = f C + i k v^T, n = f n + i k."""
    heads, inner = config.heads, config.expand * WIDTH
    u, z = np.split(x @ p["inputs.weight"].T, 2, axis=1)
    convolved, y = silu(convolve(p, u)), np.zeros_like(x)
    C, n = np.zeros((heads, inner // heads, inner // heads)), np.zeros((heads, inner // heads))
    for t in range(LENGTH):
        sources = (convolved[t], convolved[t], u[t])
        q, k, v = (
            np.concatenate([W @ part for W, part in zip(blocks, np.split(source, len(blocks)), strict=True)])
            for blocks, source in zip(p["qkv"], sources, strict=True)
        )
        i, f = np.split(p["gates"] @ np.concatenate([q, k, v]), 2)
        i, f, h_all = np.exp(i + p["input_bias_H"]), sigmoid(f + p["forget_bias_H"]), np.zeros(inner)
        for h in range(heads):
            q_h, k_h, v_h = (head(a, h, heads) for a in (q, k, v))
            k_h = k_h / len(k_h) ** 0.5
            C[h], n[h] = f[h] * C[h] + i[h] * np.outer(k_h, v_h), f[h] * n[h] + i[h] * k_h
            read = q_h @ C[h] / max(abs(q_h @ n[h]), 1)
            head(h_all, h, heads)[:] = (read - read.mean()) / np.sqrt(read.var() + 1e-5)
        y[t] = p["out.weight"] @ ((p["gain"] * h_all + p["skip"] * convolved[t]) * silu(z[t]))
    return y


def diagonal(p: Parameters, decay: Array, gain: Array, x: Array) -> Array:
    """h = decay h + gain B x, y = Re(C h) + skip x over complex states, of which B and C hold two real parts each."""
    B_real, B_imaginary = np.split(p["B.weight"], 2)
    C_real, C_imaginary = np.split(p["C.weight"], 2, axis=1)
    h, y = np.zeros(len(decay), complex), np.zeros_like(x)
    for t in range(LENGTH):
        h = decay * h + gain * (B_real @ x[t] + 1j * B_imaginary @ x[t])
        y[t] = ((C_real - 1j * C_imaginary) @ h).real + p["skip"] * x[t]
    return y


@in_its_layer
def s5(p: Parameters, config: Any, x: Array) -> Array:
    """Smith et al. 2022, equation 6 (zero-order hold), then GELU and a gate."""
    eigenvalue = -np.exp(p["log_decay"]) + 1j * p["frequency"]
    decay = np.exp(eigenvalue * np.exp(p["log_dt"]))
    y = gelu(diagonal(p, decay, (decay - 1) / eigenvalue, x))
    return y * sigmoid(y @ p["gate.weight"].T)


@in_its_layer
def lru(p: Parameters, config: Any, x: Array) -> Array:
    """Orvieto et al. 2023, appendix A."""
    return diagonal(p, np.exp(-np.exp(p["nu"]) + 1j * np.exp(p["theta"])), np.exp(p["gamma"]), x)


@in_its_layer
def lstm(p: Parameters, config: Any, x: Array) -> Array:
    """The equations of torch.nn.LSTM, in its order of the gates: input, forget, cell, output."""
    c, h, y = np.zeros(WIDTH), np.zeros(WIDTH), np.zeros_like(x)
    for t in range(LENGTH):
        i, f, g, o = np.split(p["input.weight"] @ x[t] + p["recurrent.weight"] @ h + p["bias"], 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        y[t] = p["out.weight"] @ h
    return y


@in_its_layer
def slstm(p: Parameters, config: Any, x: Array) -> Array:
    """Beck et al. 2024, equations 8 to 17: c and n over exp(m), where m is the maximum of the logarithms of f and i."""
    heads, y, convolved = config.heads, np.zeros_like(x), silu(convolve(p, x))
    c, n, m, h = np.zeros(WIDTH), np.zeros(WIDTH), np.full(WIDTH, -np.inf), np.zeros(WIDTH)
    for t in range(LENGTH):
        for j in range(heads):
            W, R, b = p["input_HGK"][j], p["recurrent_HGK"][j], head(p["bias"], j, heads)
            c_j, n_j, m_j, h_j = (head(f, j, heads) for f in (c, n, m, h))
            x_j, convolved_j, size = head(x[t], j, heads), head(convolved[t], j, heads), WIDTH // heads
            gates = np.concatenate([W[: 2 * size] @ convolved_j, W[2 * size :] @ x_j]) + R @ h_j + b
            i, f, z, o = np.split(gates, 4)
            scale = np.maximum(np.log(sigmoid(f)) + m_j, i)
            forget, write = sigmoid(f) * np.exp(m_j - scale), np.exp(i - scale)
            c_j[:] = forget * c_j + write * np.tanh(z)
            n_j[:] = forget * n_j + write
            m_j[:], h_j[:] = scale, sigmoid(o) * c_j / n_j
        y[t] = head_norm(p, h, heads, 1e-5)
    return y


@in_its_layer
def m2rnn(p: Parameters, config: Any, x: Array) -> Array:
    """Mishra et al. 2026: S = f S + (1 - f) tanh(S W + k v^T), y = S^T q + D v; q and k of all heads."""
    heads, keys, y = config.heads, config.key_size, np.zeros_like(x)
    projected = x @ p["inputs.weight"].T
    convolved = silu(convolve(p, projected[:, : 2 * keys + WIDTH]))
    S = np.zeros((heads, keys, WIDTH // heads))
    for t in range(LENGTH):
        q, k, v = np.split(convolved[t], [keys, 2 * keys])
        step, gate = np.split(projected[t, 2 * keys + WIDTH :], [heads])
        f, o = np.exp(-np.exp(p["decay.log_rate_H"]) * softplus(step + p["decay.bias_H"])), np.zeros(WIDTH)
        for h in range(heads):
            new = np.tanh(S[h] @ p["state_HVV"][h] + np.outer(k, head(v, h, heads)))
            S[h] = f[h] * S[h] + (1 - f[h]) * new
            head(o, h, heads)[:] = S[h].T @ q
        y[t] = p["out.weight"] @ rms((o + p["skip_D"] * v) * silu(gate), p["norm.gain"])
    return y


def hyena_filter(p: Parameters, config: Any, distance: int) -> list[Array]:
    """The filters' values (D,) at a distance."""
    phase = 2 * np.pi * distance / 2.0 ** np.arange(2, 2 + config.bands)
    z = np.concatenate([np.cos(phase), np.sin(phase)])
    for n in range(3):
        z = np.sin(p["frequency"] * (p[f"layers.{n}.weight"] @ z + p[f"layers.{n}.bias"]))
    window = 0.01 ** (distance / config.reach * np.linspace(1, 5, WIDTH))
    return [window * h for h in np.split(p["out.weight"] @ z, config.order - 1)]


@in_its_layer
def hyena(p: Parameters, config: Any, x: Array) -> Array:
    """Poli et al. 2023, definition 3.1, as a double loop over positions: v <- h * (gate v) + skip (gate v)."""
    v, *gates = np.split(convolve(p, x @ p["project.weight"].T), config.order + 1, axis=1)
    for n, skip in enumerate(np.split(p["skip"], config.order - 1)):
        gated = gates[n] * v
        v = skip * gated
        for t in range(LENGTH):
            for s in range(t + 1):
                v[t] += hyena_filter(part(p, "filters."), config, t - s)[n] * gated[s]
    return (gates[-1] * v) @ p["out.weight"].T
