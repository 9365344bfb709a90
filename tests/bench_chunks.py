"""Chunk kernels of matrix_recurrence on a GPU: errors against float64, times beside those of main, and settings.

    PYTHONPATH=. python tests/bench_chunks.py [check] [time] [kernels] [settings]

Without a word, all four, within LIMIT seconds on an idle card. Kernels are compiled by processes of their own into
Triton's cache, for the timings first. "ms" are medians of 20 forward and backward passes, with gaps in which the GPU
waits for launches; "us" of kernels are sums of what the GPU computes. ``tests/old_matrix_chunks.py`` is main's file.
"""

import os
import statistics
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch.nn import functional as F

START = time.time()
LIMIT = 110
KINDS = ("DeltaNet", "delta", "Gated DeltaNet", "gated DeltaProduct", "KDA", "GLA", "RWKV-6", "RWKV-7", "everything")
NAMES = ["o", "dq", "dk", "dv", "dg", "da", "db", "dbonus"]
TIMED = ("RWKV-7", "KDA", "GLA", "gated delta", "delta", "delta rule as layers call it", "DeltaProduct 2")
VARIED = ("RWKV-7", "KDA", "gated delta", "delta")
SHAPES = ((8, 2048), (32, 512), (2, 8192))
SETTINGS = [
    ("as they are", {}),
    ("rows E 64", {"ROWS_BWD": {"E": 64}}),
    ("rows E 64 2 warps", {"ROWS_BWD": {"E": 64, "num_warps": 2}}),
    ("rows E 16", {"ROWS_BWD": {"E": 16}}),
    ("rows E 16 128 registers", {"ROWS_BWD": {"E": 16, "maxnreg": 128}}),
    ("rows 168 registers", {"ROWS_BWD": {"maxnreg": 168}}),
    ("rows 128 registers", {"ROWS_BWD": {"maxnreg": 128}}),
    ("rows 2 warps", {"ROWS_BWD": {"num_warps": 2}}),
    ("products 168 registers", {"PRODUCTS": {"maxnreg": 168}}),
    ("products 128 registers", {"PRODUCTS": {"maxnreg": 128}}),
    ("products 2 warps", {"PRODUCTS": {"num_warps": 2}}),
    ("solve 128 registers", {"SOLVE": {"maxnreg": 128}}),
    ("ends 8 warps", {"ENDS": {"num_warps": 8}}),
    ("ends 2 warps", {"ENDS": {"num_warps": 2}}),
]


def methods():
    from mixers.ops.kernels.matrix_chunks import matrix_chunks_method as new
    from tests.old_matrix_chunks import matrix_chunks_method as old

    return {"old": old, "new": new}


def check(job):
    """Errors of one kind, in one process: (kind, dtype, K, V)."""
    kind, name, K, V = job
    warnings.simplefilter("ignore")
    from tests.mixers.ops import test_recurrence_kernels as t

    kinds = {**t.KINDS, "delta": t.Case(8, 8, pairs=1)}
    new, old = methods()["new"], methods()["old"]
    dtype, case, lines = getattr(torch, name), kinds[kind]._replace(K=K, V=V), []
    shapes = [(2, 2, 150, 2), (1, 1, 300, 1), (1, 2, 63, 1), (1, 2, 64, 2)]
    for shape, scale in [(shapes[0], s) for s in (1, 8, 32)] + [(s, 1) for s in shapes[1:]]:
        if case.G == 0 and scale > 1:
            continue
        try:
            tensors = t.draw(case, *shape)
            tensors[3] = None if tensors[3] is None else tensors[3] * scale
            if dtype == torch.bfloat16:
                tensors = [y if y is None else y.bfloat16().double() for y in tensors]
            want = t.results(tensors, None)
            got, again = (t.results(tensors, dtype, new) for _ in range(2))
            found = t.errors(got, want)
            names = ["o", *(w for w, y in zip(NAMES[1:], tensors, strict=True) if y is not None)]
            before = ""
            if (shape, scale) == (shapes[0], 1):
                before = f"   old, largest: {max(t.errors(t.results(tensors, dtype, old), want)):.1e}"
            same = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
            alone = t.results([y if y is None else y[:1] for y in tensors], dtype, new)[0]
            bad = not max(found) <= (1e-4 if dtype == torch.float32 else 2**-5)
            worst = " ".join(f"{w} {e:.1e}" for w, e in zip(names, found, strict=True))
            lines.append(
                f"{'BAD ' if bad else 'ok  '} {kind:20} {name:8} K {K} V {V} {shape} decays x{scale}: {worst}{before}"
                + ("" if same else "   NOT REPEATED")
                + ("" if torch.equal(alone, got[0][:1]) else "   OTHER IN COMPANY")
            )
        except Exception as error:  # the other cases still run
            lines.append(f"FAIL {kind} {name} K {K} V {V} {shape}: {type(error).__name__} {str(error)[:200]}")
            break
    return lines


def given(kind, B, T, H=16, K=64, V=64, device="cuda"):
    """Arguments as layers make them."""
    torch.manual_seed(0)
    N = 2 if kind.endswith("2") else 1

    def rows(width, count=T):
        return torch.randn(B, count, H, width, device=device)

    q, k, v = rows(K), F.normalize(rows(K, T * N), dim=-1), rows(V, T * N)
    beta = torch.sigmoid(rows(1, T * N))
    g1, gK = -0.1 * torch.rand(B, T, H, 1, device=device), -0.1 * torch.rand(B, T, H, K, device=device)
    a = b = g = None
    if kind == "delta" or kind.startswith("DeltaProduct"):
        k, b = beta * k, k
    elif kind.startswith("delta rule"):
        k, a, b = beta * k, -beta * k, k
    elif kind == "gated delta":
        k, g, a, b = beta * k, g1, -beta * k * g1.exp(), k
    elif kind == "KDA":
        k, g, b = beta * k, gK, k
    elif kind == "GLA":
        g = gK
    elif kind == "RWKV-7":
        g, a, b = gK, -k, k * beta
    g = g if g is None else g.requires_grad_()
    q, k, v, a, b = (y if y is None else y.bfloat16().requires_grad_() for y in (q, k, v, a, b))
    return [q, k, v, g, a, b, None]


def once(method, tensors, do):
    from mixers.ops.runs import over_runs

    o = over_runs(method, *tensors)[0]
    return torch.autograd.grad(o, [y for y in tensors if y is not None], do)


def milliseconds(method, tensors, runs=20):
    do = torch.randn(*tensors[0].shape[:-1], tensors[2].shape[-1], device="cuda").bfloat16()
    for _ in range(3):
        once(method, tensors, do)
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * runs)]
    for n in range(runs):
        events[2 * n].record()
        once(method, tensors, do)
        events[2 * n + 1].record()
    torch.cuda.synchronize()
    return statistics.median(events[2 * n].elapsed_time(events[2 * n + 1]) for n in range(runs))


def with_settings(settings):
    from mixers.ops.kernels import matrix_chunks

    before = {name: dict(getattr(matrix_chunks, name)) for name in settings}
    for name, changes in settings.items():
        getattr(matrix_chunks, name).update(changes)
    return before


def restore(before):
    from mixers.ops.kernels import matrix_chunks

    for name, old in before.items():
        getattr(matrix_chunks, name).clear()
        getattr(matrix_chunks, name).update(old)


def warm(job):
    """Compile what the timings need."""
    kind, setting = job
    before = with_settings(SETTINGS[setting][1])
    try:
        tensors = given(kind, 1, 128)
        do = torch.randn(1, 128, 16, 64, device="cuda").bfloat16()
        for name, method in methods().items():
            if name == "new" or setting == 0:
                once(method(torch.bfloat16), tensors, do)
        torch.cuda.synchronize()
    except Exception as error:
        return f"FAIL {kind} {SETTINGS[setting][0]}: {type(error).__name__} {str(error)[:200]}"
    finally:
        restore(before)
    return ""


def clock():
    return f"[{time.time() - START:.0f} s]"


def profiled(method, tensors):
    """Microseconds of each kernel of a forward and a backward pass."""
    from torch.profiler import ProfilerActivity, profile

    do = torch.randn(*tensors[0].shape, device="cuda").bfloat16()
    once(method, tensors, do)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(5):
            once(method, tensors, do)
        torch.cuda.synchronize()
    parts = {}
    for event in seen.key_averages():
        if event.device_time_total:
            key = event.key if event.key.startswith("chunks_") else "other"
            parts[key] = parts.get(key, 0.0) + event.device_time_total / 5
    named = (f"{k.removeprefix('chunks_').removesuffix('_kernel')} {u:.0f}" for k, u in parts.items())
    return f"all {sum(parts.values()):.0f}; " + ", ".join(named)


def main():
    words = set(sys.argv[1:]) or {"check", "time", "kernels", "settings"}
    with ProcessPoolExecutor(max(2, min(15, (os.cpu_count() or 4) - 1)), mp_context=get_context("spawn")) as pool:
        timed = words & {"time", "kernels", "settings"}
        warmed = {(kind, 0): pool.submit(warm, (kind, 0)) for kind in TIMED if timed}
        checks = []
        if "check" in words:
            jobs = [(kind, "bfloat16", 64, 64) for kind in KINDS]
            jobs += [(kind, "bfloat16", 128, 128) for kind in ("KDA", "RWKV-7")]
            jobs += [("RWKV-7", "bfloat16", 256, 128), ("everything", "bfloat16", 100, 40)]
            jobs += [(kind, "float32", 64, 64) for kind in KINDS]
            jobs += [("Gated DeltaNet", "float32", 20, 12), ("RWKV-7", "float32", 32, 16)]  # which failed once
            checks = [pool.submit(check, job) for job in jobs]
        if "settings" in words:
            jobs = [(kind, n) for n in range(1, len(SETTINGS)) for kind in VARIED]
            warmed |= {job: pool.submit(warm, job) for job in jobs}
        for future in checks:
            print(*future.result(), sep="\n", flush=True)
        print(clock(), "checked", flush=True)
        for future in warmed.values():  # nothing else may run on the card while it is timed
            if future.result():
                print(future.result(), flush=True)
    print(clock(), "compiled", flush=True)

    known = {name: method(torch.bfloat16) for name, method in methods().items()}
    if "time" in words:
        for kind in TIMED:
            line = f"{kind:30}"
            for B, T in SHAPES:
                tensors = given(kind, B, T)
                line += f"  {T}: " + " / ".join(f"{milliseconds(m, tensors):.2f}" for m in known.values())
            print(line, " ms, old / new", clock(), flush=True)

    if "kernels" in words:
        for kind in TIMED:
            print(f"{kind} 8 x 2048, us:", profiled(known["new"], given(kind, 8, 2048)), clock(), flush=True)

    firsts = {}
    if "settings" in words:
        for name, settings in SETTINGS:
            for kind in VARIED:
                if time.time() - START > LIMIT:
                    print("not measured for want of time:", kind, name)
                    continue
                before = with_settings(settings)
                try:
                    tensors = given(kind, 8, 2048)
                    gradients = once(known["new"], tensors, torch.ones_like(tensors[2]))
                    first = firsts.setdefault(kind, gradients)
                    apart = max(float((y - x).norm() / x.norm()) for x, y in zip(first, gradients, strict=True))
                    ms = milliseconds(known["new"], tensors)
                    print(f"{kind:12} {name:25} {ms:.2f} ms, {apart:.0e} from the first", clock(), flush=True)
                except Exception as error:
                    print(f"FAIL {kind} {name}: {type(error).__name__} {str(error)[:120]}", flush=True)
                finally:
                    restore(before)


if __name__ == "__main__":
    main()
