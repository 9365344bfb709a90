"""Chunk kernels of matrix_recurrence on a GPU: errors against float64, times beside those of main, and settings.

    PYTHONPATH=. python tests/bench_chunks.py [check] [time] [kernels] [settings]

Without a word, all four, within LIMIT seconds on an idle card. Kernels are compiled by processes of their own into
Triton's cache, for the timings first. A case that fails prints a line that begins with FAIL, and the others go on.
Pairs of numbers are main's and the new ones, and what is wrong has a line that begins with BAD. "ms" are medians of 20
forward and backward passes, with gaps in which the GPU waits for launches; "us" of kernels are sums of what the GPU
computes. ``tests/old_matrix_chunks.py`` is main's file.
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


def quiet():
    """Let the compiler not print the kernels that it does not compile; Python's errors are told in results."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")


def failure(*what):
    """One line about the exception that is being handled."""
    error = sys.exc_info()[1]
    return " ".join(["FAIL", *map(str, what), type(error).__name__, *str(error).split()])[:200]


def check(job):
    """Errors of one kind, in one process: (kind, dtype, K, V). Returns lines, and the largest errors of old and new."""
    quiet()
    kind, name, K, V = job
    lines, largest = [], {"old": 0.0, "new": 0.0}
    shapes = [(2, 2, 150, 2), (1, 1, 300, 1), (1, 2, 63, 1), (1, 2, 64, 2)]
    for shape, scale in [(shapes[0], s) for s in (1, 8, 32)] + [(s, 1) for s in shapes[1:]]:
        said = f"{kind:20} {name:8} K {K} V {V} {shape} decays x{scale}:"
        try:
            line, found = checked(kind, getattr(torch, name), K, V, shape, scale)
            lines.append(line.format(said))
            largest = {which: max(y, found[which]) for which, y in largest.items()}
        except Exception:  # the other cases still run
            lines.append(failure(said))
            largest["new"] = float("nan")
    return lines, largest


def checked(kind, dtype, K, V, shape, scale):
    from tests.mixers.ops import test_recurrence_kernels as t

    case = {**t.KINDS, "delta": t.Case(8, 8, pairs=1)}[kind]._replace(K=K, V=V)
    tensors = t.draw(case, *shape)
    tensors[3] = None if tensors[3] is None else tensors[3] * scale
    if dtype == torch.bfloat16:
        tensors = [y if y is None else y.bfloat16().double() for y in tensors]
    want = t.results(tensors, None)
    new = methods()["new"]
    got, again = (t.results(tensors, dtype, new) for _ in range(2))
    errors = {"old": t.errors(t.results(tensors, dtype, methods()["old"]), want), "new": t.errors(got, want)}
    names = ["o", *(w for w, y in zip(NAMES[1:], tensors, strict=True) if y is not None)]
    bad = not max(errors["new"]) <= (1e-4 if dtype == torch.float32 else 2**-5)
    line = f"{'BAD ' if bad else 'ok  '} {{}} "
    line += "  ".join(f"{w} {x:.0e} / {y:.0e}" for w, x, y in zip(names, *errors.values(), strict=True))
    if not all(torch.equal(a, b) for a, b in zip(got, again, strict=True)):
        line += "   NOT REPEATED"
    if not torch.equal(t.results([y if y is None else y[:1] for y in tensors], dtype, new)[0], got[0][:1]):
        line += "   OTHER IN COMPANY"
    return line, {which: max(y) for which, y in errors.items()}


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


def outputs(tensors):
    """A tensor like the outputs, of numbers that no kernel has written."""
    return torch.randn(*tensors[0].shape[:-1], tensors[2].shape[-1], device=tensors[0].device).bfloat16()


def milliseconds(method, tensors, runs=20):
    do = outputs(tensors)
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
    """Compile what the timings need; returns a line if that fails."""
    quiet()
    kind, setting = job
    before = with_settings(SETTINGS[setting][1])
    try:
        tensors = given(kind, 1, 128)
        do = torch.randn(1, 128, 16, 64, device="cuda").bfloat16()
        for name, method in methods().items():
            if name == "new" or setting == 0:
                once(method(torch.bfloat16), tensors, do)
        torch.cuda.synchronize()
    except Exception:
        return failure(kind, SETTINGS[setting][0])
    finally:
        restore(before)
    return ""


def clock():
    return f"[{time.time() - START:.0f} s]"


def profiled(method, tensors):
    """Microseconds of each kernel of a forward and a backward pass."""
    from torch.profiler import ProfilerActivity, profile

    do = outputs(tensors)
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
        checks = {}
        if "check" in words:
            jobs = [(kind, "bfloat16", 64, 64) for kind in KINDS]
            jobs += [(kind, "bfloat16", 128, 128) for kind in ("KDA", "RWKV-7")]
            jobs += [("RWKV-7", "bfloat16", 256, 128), ("everything", "bfloat16", 100, 40)]
            jobs += [(kind, "float32", 64, 64) for kind in KINDS]
            jobs += [("Gated DeltaNet", "float32", 20, 12), ("RWKV-7", "float32", 32, 16)]  # which failed once
            checks = {job: pool.submit(check, job) for job in jobs}
        if "settings" in words:
            jobs = [(kind, n) for n in range(1, len(SETTINGS)) for kind in VARIED]
            warmed |= {job: pool.submit(warm, job) for job in jobs}
        summary = []
        for job, future in checks.items():
            try:
                lines, largest = future.result()
            except Exception:  # the process died
                lines, largest = [failure(*job)], {"old": float("nan"), "new": float("nan")}
            print(*lines, sep="\n", flush=True)
            kind, name, K, V = job
            summary.append(f"{kind:20} {name:8} {K:3} {V:3}: {largest['old']:.1e} / {largest['new']:.1e}")
        print(clock(), "checked; largest errors, old / new:", flush=True)
        print(*summary, sep="\n", flush=True)
        failed = set()
        for job, future in warmed.items():  # nothing else may run on the card while it is timed
            try:
                said = future.result()
            except Exception:
                said = failure(*job)
            if said:
                failed.add(job)
                print(said, flush=True)
    print(clock(), "compiled", flush=True)

    known = {name: method(torch.bfloat16) for name, method in methods().items()}
    if "time" in words:
        print("old / new ms, ratio, and how far new results are from old ones, by length")
        for kind in TIMED:
            line = f"{kind:30}"
            for B, T in SHAPES:
                try:
                    tensors = given(kind, B, T)
                    old, new = (once(m, tensors, outputs(tensors).fill_(1)) for m in known.values())
                    apart = max(float((y - x).norm() / x.norm()) for x, y in zip(old, new, strict=True))
                    before, after = (milliseconds(m, tensors) for m in known.values())
                    line += f"  {T}: {before:.2f} / {after:.2f} x{before / after:.2f} {apart:.0e}"
                except Exception:
                    line += f"  {T}: {failure()}"
            print(line, clock(), flush=True)

    if "kernels" in words:
        for kind in TIMED:
            for name, method in known.items():
                try:
                    print(f"{kind} 8 x 2048, {name}, us:", profiled(method, given(kind, 8, 2048)), clock(), flush=True)
                except Exception:
                    print(failure(kind, name), flush=True)

    firsts = {}
    if "settings" in words:
        for n, (name, settings) in enumerate(SETTINGS):
            for kind in VARIED:
                if time.time() - START > LIMIT or (kind, n) in failed:
                    print("not measured:", kind, name)
                    continue
                before = with_settings(settings)
                try:
                    tensors = given(kind, 8, 2048)
                    gradients = once(known["new"], tensors, outputs(tensors).fill_(1))
                    first = firsts.setdefault(kind, gradients)
                    apart = max(float((y - x).norm() / x.norm()) for x, y in zip(first, gradients, strict=True))
                    ms = milliseconds(known["new"], tensors)
                    print(f"{kind:12} {name:25} {ms:.2f} ms, {apart:.0e} from the first", clock(), flush=True)
                except Exception:
                    print(failure(kind, name), flush=True)
                finally:
                    restore(before)


if __name__ == "__main__":
    main()
