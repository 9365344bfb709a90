"""Chunk kernels of matrix_recurrence on a GPU: errors against float64, then times beside the loop, then settings.

    cd REPOSITORY && PYTHONPATH=. python .../chunks-bench.py [check] [time] [kernels] [settings]

Without a word, all four. Kernels are compiled by processes of their own into Triton's cache, for the timings first.
"us" of kernels are sums of what the GPU computes; "ms" also hold gaps in which it waits for launches.
"""
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch.nn import functional as F

START = time.time()
LIMIT = 140
KINDS = ("DeltaNet", "delta", "Gated DeltaNet", "gated DeltaProduct", "KDA", "GLA", "RWKV-6", "RWKV-7", "everything")
NAMES = ["o", "dq", "dk", "dv", "dg", "da", "db", "dbonus"]
TIMED = ("delta", "delta rule as layers call it", "gated delta", "KDA", "GLA", "RWKV-7", "DeltaProduct 2")
VARIED = ("delta", "KDA", "RWKV-7")
SHAPES = ((32, 512), (8, 2048), (2, 8192))
SETTINGS = [
    ("as they are", {}),
    ("within 8 warps", {"WITHIN": {"num_warps": 8}}),
    ("outputs 8 warps", {"OUTPUTS": {"num_warps": 8}}),
    ("products 8 warps", {"PRODUCTS": {"num_warps": 8}}),
    ("rows 4 warps", {"ROWS": {"num_warps": 4}}),
    ("rows 8 warps", {"ROWS": {"num_warps": 8}}),
    ("states J 16", {"STATES": {"J": 16}}),
    ("states J 64", {"STATES": {"J": 64}}),
    ("states 2 warps", {"STATES": {"num_warps": 2}}),
    ("states 3 stages", {"STATES": {"num_stages": 3}}),
    ("states 2 stages", {"STATES": {"num_stages": 2}}),
    ("within bf16 inverse", {"WITHIN": {"PRECISION": "bf16"}}),
    ("within 168 registers", {"WITHIN": {"maxnreg": 168}}),
    ("within 128 registers", {"WITHIN": {"maxnreg": 128}}),
    ("rows 4 w 168 registers", {"ROWS": {"num_warps": 4, "maxnreg": 168}}),
    ("rows 8 w 128 registers", {"ROWS": {"num_warps": 8, "maxnreg": 128}}),
]


def cases():
    from tests.mixers.ops import test_recurrence_kernels as t

    kinds = {**t.KINDS, "delta": t.Case(8, 8, pairs=1)}
    return t, kinds


def check(job):
    """Errors of one kind, in one process: (kind, dtype, K, V)."""
    kind, name, K, V = job
    import warnings

    warnings.simplefilter("ignore")
    t, kinds = cases()
    from mixers.ops.kernels.matrix_chunks import matrix_chunks_method

    dtype, case, lines = getattr(torch, name), kinds[kind]._replace(K=K, V=V), []
    shapes = [(2, 2, 150, 2), (1, 1, 300, 1), (1, 2, 63, 1), (1, 2, 64, 2)]
    for n, (shape, scale) in enumerate([(shapes[0], s) for s in (1, 4, 8, 32)] + [(s, 1) for s in shapes[1:]]):
        if n and case.G == 0 and scale > 1:
            continue
        try:
            tensors = t.draw(case, *shape)
            tensors[3] = None if tensors[3] is None else tensors[3] * scale
            if dtype == torch.bfloat16:
                tensors = [y if y is None else y.bfloat16().double() for y in tensors]
            want = t.results(tensors, None)
            got = t.results(tensors, dtype, matrix_chunks_method)
            again = t.results(tensors, dtype, matrix_chunks_method)
            found = t.errors(got, want)
            names = ["o", *(w for w, y in zip(NAMES[1:], tensors) if y is not None)]
            loop = ""
            if max(K, V) <= 64:
                loop = f"   loop {max(t.errors(t.results(tensors, dtype), want)):.1e}"
            same = all(torch.equal(a, b) for a, b in zip(got, again))
            one = [y if y is None else y[:1] for y in tensors]
            alone = t.results(one, dtype, matrix_chunks_method)[0]
            company = torch.equal(alone, got[0][:1])
            most = 1e-4 if dtype == torch.float32 else 2**-5
            bad = not max(found) <= most
            worst = " ".join(f"{w} {e:.1e}" for w, e in zip(names, found))
            lines.append(
                f"{'BAD ' if bad else 'ok  '} {kind:20} {name:8} K {K} V {V} {shape} decays x{scale}: {worst}{loop}"
                + ("" if same else "   NOT REPEATED") + ("" if company else "   OTHER IN COMPANY")
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
    def half(y):
        return y if y is None else y.bfloat16().requires_grad_()
    g = g if g is None else g.requires_grad_()
    return [half(q), half(k), half(v), g, half(a), half(b), None]


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


def methods():
    from mixers.ops.kernels.linear_recurrence import recurrence_method
    from mixers.ops.kernels.matrix_chunks import matrix_chunks_method

    return {"loop": recurrence_method(torch.bfloat16), "chunks": matrix_chunks_method(torch.bfloat16)}


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
            if name == "chunks" or setting == 0:
                once(method, tensors, do)
        torch.cuda.synchronize()
    except Exception as error:
        return f"FAIL {kind} {SETTINGS[setting][0]}: {type(error).__name__} {str(error)[:200]}"
    finally:
        restore(before)
    return ""


def clock():
    return f"[{time.time() - START:.0f} s]"


def main():
    words = set(sys.argv[1:]) or {"check", "time", "kernels", "settings"}
    with ProcessPoolExecutor(max(2, min(14, (os.cpu_count() or 4) - 2)), mp_context=get_context("spawn")) as pool:
        jobs = [(kind, 0) for kind in TIMED]
        if "settings" in words:
            jobs += [(kind, n) for kind in VARIED for n in range(1, len(SETTINGS))]
        warmed = [pool.submit(warm, job) for job in jobs] if words & {"time", "kernels", "settings"} else []
        checks = []
        if "check" in words:
            jobs = [(kind, "float32", 64, 64) for kind in KINDS]
            jobs += [("Gated DeltaNet", "float32", 20, 12), ("RWKV-7", "float32", 32, 16)]  # which failed once
            jobs += [(kind, "bfloat16", 64, 64) for kind in KINDS]
            jobs += [(kind, "bfloat16", 128, 128) for kind in ("Gated DeltaNet", "KDA", "RWKV-7")]
            jobs += [("RWKV-7", "bfloat16", 256, 128), ("KDA", "bfloat16", 32, 32), ("everything", "bfloat16", 100, 40)]
            checks = [pool.submit(check, job) for job in jobs]
        for future in checks:
            print(*future.result(), sep="\n", flush=True)
        for future in warmed:
            if future.result():
                print(future.result(), flush=True)
    print(clock(), "checked and compiled", flush=True)

    known = methods()
    if "time" in words:
        for kind in TIMED:
            line = f"{kind:30}"
            for B, T in SHAPES:
                tensors = given(kind, B, T)
                line += f"  {T}: " + " / ".join(f"{milliseconds(m, tensors):.2f}" for m in known.values())
            print(line, " ms, loop / chunks", clock(), flush=True)

    if "kernels" in words:
        from torch.profiler import ProfilerActivity, profile

        for kind in TIMED:
            for B, T in SHAPES[1:]:
                tensors = given(kind, B, T)
                do = torch.randn(*tensors[0].shape, device="cuda").bfloat16()
                once(known["chunks"], tensors, do)
                with profile(activities=[ProfilerActivity.CUDA]) as seen:
                    for _ in range(5):
                        once(known["chunks"], tensors, do)
                    torch.cuda.synchronize()
                parts = {}
                for event in seen.key_averages():
                    if event.device_time_total:
                        key = event.key if event.key.startswith("chunks_") else "other"
                        parts[key] = parts.get(key, 0.0) + event.device_time_total / 5
                total = sum(parts.values())
                print(f"{kind} {B} x {T}, us: all {total:.0f};",
                      ", ".join(f"{k.removeprefix('chunks_').removesuffix('_kernel')} {u:.0f}" for k, u in parts.items()),
                      clock(), flush=True)

    if "settings" in words:
        for kind in VARIED:
            for name, settings in SETTINGS:
                if time.time() - START > LIMIT:
                    print("not measured for want of time:", kind, name)
                    continue
                before = with_settings(settings)
                try:
                    found = [milliseconds(known["chunks"], given(kind, B, T)) for B, T in SHAPES]
                    print(f"{kind} {name:20}", " ".join(f"{ms:.2f}" for ms in found), clock(), flush=True)
                except Exception as error:
                    print(f"FAIL {kind} {name}: {type(error).__name__} {str(error)[:120]}", flush=True)
                finally:
                    restore(before)


if __name__ == "__main__":
    main()
