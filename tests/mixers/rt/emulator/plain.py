"""A chunk of the wavefront in plain PyTorch: the oracle of the chunk kernels."""

from typing import Any

import torch
from torch import Tensor

from mixers.rt.wavefront.backward import Backward
from mixers.rt.wavefront.forward import Forward
from mixers.rt.wavefront.schedule import CHUNK

LOG2E = 1.4426950408889634


def forward(done: Forward, groups: Any, at: int) -> None:
    """Compute the chunk that begins at position ``at`` of each layer's group, as ``Forward.finish_chunk`` does."""
    n, B, D, K = groups.wave.n, done.sizes.B, done.sizes.D, done.sizes.K
    kept, scratch, scale = groups.kept, done.scratch, done.setting.scale
    operands = done.operands.layers(*groups.wave[:2])
    slopes = done.slopes_H[None, None, :, None] * LOG2E

    for t in range(CHUNK):
        # Attention to earlier pairs of the chunk, on top of that to earlier chunks: m, l and o.
        i = at + t
        q, m, l, o = _heads(kept.q[:, i], K), scratch.m[:n, i], scratch.l[:n, i], _heads(scratch.o[:n, i], K)
        k, v = (_heads(y[:, at:i], K).permute(0, 2, 3, 1, 4) for y in (kept.k, kept.v))  # (n, B, H, t, K)
        s = (k @ q[..., None])[..., 0] * (K**-0.5 * LOG2E) + slopes * (torch.arange(t) - t)
        most = torch.cat([m[..., None], s], -1).amax(-1)
        p, shrink = torch.exp2(s - most[..., None]), torch.exp2(m - most)
        l = l * shrink + p.sum(-1)
        a = ((o * shrink[..., None] + (p[..., None] * v).sum(-2)) / l[..., None]).reshape(n, B, D)
        kept.a[:, i], kept.lse[:, i] = a, most + l.log2()

        # Residual branches.
        u = groups.x[:, i] + scale * a @ operands.out.mT
        kept.r_u[:, i], kept.n_u[:, i] = _root(u), u * _root(u)
        z = u + scale * _gelu(kept.n_u[:, i] @ operands.up.mT)[0] @ operands.down.mT
        groups.z[:, i] = z

        # Pair.
        if done.setting.persistent_norm:
            kept.r_z[:, i] = _root(z)
            z = z * _root(z)
        kept.n_z[:, i] = z
        k, v = (z @ operands.kv.mT).split(D, -1)
        if done.qk_norm:
            kept.r_k[:, i] = _root(k)
            k = k * _root(k)
        kept.k[:, i], kept.v[:, i] = k, v


def backward(done: Backward, groups: Any, at: int) -> None:
    """Compute the gradients of the chunk that begins at ``at``, as ``Backward.finish_chunk`` does."""
    n, B, D, K = groups.wave.n, done.sizes.B, done.sizes.D, done.sizes.K
    kept, scale, scratch = groups.kept, done.setting.scale, done.scratch
    dk, dv, dkv, dy, h, dh, du = (y[:n] for y in _fields(scratch, "dk", "dv", "dkv", "dy", "h", "dh", "du"))
    operands = done.operands.layers(*groups.wave[:2])
    slopes = done.slopes_H[None, None, None, :] * LOG2E

    for t in reversed(range(CHUNK)):
        # Gradients of the pair: from later queries of the chunk, on top of those from later chunks; through its norm.
        i, later = at + t, slice(at + t + 1, at + CHUNK)
        q, da = _heads(kept.q[:, later], K), _heads(groups.da[:, later], K)  # (n, i, B, H, K)
        k, v = _heads(kept.k[:, i : i + 1], K), _heads(kept.v[:, i : i + 1], K)
        distance = torch.arange(1, CHUNK - t)[None, :, None, None]
        p = torch.exp2((q * k).sum(-1) * (K**-0.5 * LOG2E) - slopes * distance - kept.lse[:, later])
        ds = p * ((da * v).sum(-1) - groups.delta[:, later])
        dk_t = (_heads(dk[:, i], K) + (ds[..., None] * q).sum(1)).reshape(n, B, D) * K**-0.5
        dv_t = (_heads(dv[:, i], K) + (p[..., None] * da).sum(1)).reshape(n, B, D)
        if done.qk_norm:
            dk_t = _through_norm(dk_t, kept.k[:, i], kept.r_k[:, i])
        dkv[:, i] = torch.cat([dk_t, dv_t], -1)

        # Residual branches.
        dn = dkv[:, i] @ operands.kv
        d = groups.d[:, i]
        d = d + (_through_norm(dn, kept.n_z[:, i], kept.r_z[:, i]) if done.setting.persistent_norm else dn)
        dy[:, i] = scale * d
        g, slope = _gelu(h[:, i])
        dh[:, i] = dy[:, i] @ operands.down * slope
        h[:, i] = g
        d = d + _through_norm(dh[:, i] @ operands.up, kept.n_u[:, i], kept.r_u[:, i])
        groups.d[:, i] = d
        du[:, i] = scale * d
        groups.da[:, i] = du[:, i] @ operands.out
        groups.delta[:, i] = (_heads(groups.da[:, i], K) * _heads(kept.a[:, i], K)).sum(-1)


def _fields(holder: Any, *names: str) -> list[Tensor]:
    return [getattr(holder, name) for name in names]


def _heads(y: Tensor, K: int) -> Tensor:
    return y.unflatten(-1, (y.shape[-1] // K, K))


def _root(y: Tensor) -> Tensor:
    """Reciprocal of the root mean square of each row."""
    return (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def _through_norm(dn: Tensor, n: Tensor, r: Tensor) -> Tensor:
    return r * (dn - n * (dn * n).mean(-1, keepdim=True))


def _gelu(h: Tensor) -> tuple[Tensor, Tensor]:
    """GELU and its slope."""
    below = torch.special.ndtr(h)
    return h * below, below + h * torch.exp(-h * h / 2) * 0.3989422804014327
