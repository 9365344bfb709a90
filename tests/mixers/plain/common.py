"""What the plain forms of the layers share: functions of NumPy arrays in float64, written for one sequence."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixers import Shape

Array = NDArray[Any]
Parameters = dict[str, Array]
PlainForm = Callable[[Parameters, Any, Array], Array]
"""Outputs (T, D) from a layer's parameters, its config, and one sequence (T, D)."""

WIDTH, LENGTH = 8, 12
SHAPE = Shape(width=WIDTH, mlp_width=12, layers=2)
SCALE = 2**-0.5
"""Factor of the residual branches of two layers."""

erf = np.vectorize(math.erf)


def part(p: Parameters, prefix: str) -> Parameters:
    """The parameters of a submodule."""
    return {key.removeprefix(prefix): value for key, value in p.items() if key.startswith(prefix)}


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    return np.log(1 + np.exp(x))


def gelu(x: Array) -> Array:
    return x * (1 + erf(x / 2**0.5)) / 2


def softmax(x: Array) -> Array:
    return np.exp(x) / np.exp(x).sum()


def rms(x: Array, gain: Array | float = 1.0, eps: float = 1e-6) -> Array:
    return gain * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def finish(p: Parameters, x: Array, y: Array) -> Array:
    """The layer's output from its input and the output of its mixer: residual branches and MLP."""
    u = x + SCALE * y
    hidden = gelu(p["mlp.up.weight"] @ rms(u, p["mlp_norm.gain"]))
    return u + SCALE * p["mlp.down.weight"] @ hidden


def sinusoid(position: int) -> Array:
    """Sines, then cosines, of a position (Vaswani et al. 2017, section 3.5)."""
    angle = position / 10_000 ** (np.arange(WIDTH // 2) / (WIDTH // 2))
    return np.concatenate([np.sin(angle), np.cos(angle)])
