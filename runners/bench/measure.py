"""What the benchmarks share: passes of layers, the comparison with float64, the clock, and the record.

Cases that are compared take turns: after a warm-up, each is timed once in every round. Then their memory is freed, and
each implementation is compared with the plain form of its layer, in float64 on the CPU; what is wrong gets no figures.
The comparison comes last, so that the seconds of set-up contain the compilation of kernels.
"""

import contextlib
import gc
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, TypeVar

import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from mixers.base import Shape
from mixers.contract import CLOSED
from mixers.models import Stack
from mixers.ops.numerics import product_precision
from mixers.options import option_of, override
from mixers.registry import find_mixer
from mixers.rt.dispatch import Chosen, choose
from runners.device import captured, device_name, find_devices, lacks_memory
from runners.ending import user_errors
from runners.files import write_json
from runners.options import flag_of, parse, peek
from runners.records import versions

REPEAT_MS = 20.0
"""A repeat consists of the passes that fill this time."""
CHECK_LENGTH, CHECK_RUNS, CHECK_BATCH = 100, 2, 4
UNREAD = 4
"""First positions whose outputs get no gradient: a read of few pairs may be next to 0, and a norm divides by it."""
FLOAT32_BOUND = 1e-5
"""Relative error that is accepted in float32."""
LOW_FACTOR = 2.0
"""Relative error that is accepted otherwise, in errors of the plain form in the same precision."""
FEW = 16
"""Numbers of a run's tensor up to which its error is mostly chance, so that twice as much is accepted.

Over 14 samples, the plain form of Mamba-2 under autocast has an error of 0.3e-2 to 5.8e-2 in the gradient of its step
size's bias (4 numbers per run; root mean square 1.9e-2). With its kernels' roundings: 0.7e-2 to 4.0e-2 (1.7e-2).
"""
TRANSFORMER = "transformer"
"""The layer that the others are relative to."""
OUT_OF_MEMORY = "skipped: out of memory"
TIMES = (
    *("median_ms", "min_ms", "max_ms", "spread", "relative"),
    *("tokens_per_second", "peak_gib", "setup_seconds", "repeats"),
)
"""Entries of a row that is timed; None in the others."""
SHOWN: dict[str, Callable[[Any], str]] = {
    "median_ms": "{:.4g}".format,
    "relative": "{:.3g}".format,
    "spread": "{:.1%}".format,
    "tokens_per_second": "{:,.0f}".format,
    "peak_gib": "{:.3g}".format,
    "setup_seconds": "{:.3g}".format,
    "error": "{:.1e}".format,
    "methods": ", ".join,
    "compiled": str,
}
"""Formats of the figures that are printed."""

Outcome = tuple[float | None, str | None]
"""Of a check: the largest relative error, None if it is not finite; and what is wrong, if anything."""


# Options.


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every benchmark.

    Attributes:
        repeats: repeats of each figure, at least 5.
        limit: seconds; what takes longer in one pass is skipped.
        device: auto takes a GPU if there is one.
        out: folder of results.
    """

    repeats: int = 5
    limit: float = 2.0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("results")

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            for value in values if isinstance(values, tuple) else (values,):
                if isinstance(value, int | float) and value is not False and not value > 0:
                    raise ValueError(f"{flag_of(name)} {value} must be more than 0")
        if self.repeats < 5:
            raise ValueError(f"--repeats {self.repeats} must be at least 5")


O = TypeVar("O", bound=Common)


def options_and_device(
    options_class: type[O], presets: Mapping[str, O], arguments: Sequence[str]
) -> tuple[O, torch.device]:
    """Return the options of a command line, with the defaults for the type of device, and the device.

    Raises:
        ValueError: an option does not fit.
    """
    device = find_devices(peek(arguments, device="auto")["device"] or "auto")[0]
    return parse(options_class, arguments, presets[device.type]), device


# Passes.


class Pass(NamedTuple):
    """A pass to time.

    Attributes:
        run: runs it once.
        is_finite: returns whether the results of the last one are finite.
        tokens: tokens that it reads.
        facts: what else the record holds.
        held: what a CUDA graph reads, and nothing else would keep.
    """

    run: Callable[[], object]
    is_finite: Callable[[], bool]
    tokens: int
    facts: Mapping[str, Any] = {}
    held: object = None


class Skipped(Exception):
    """Why something is not timed."""


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A way to compute a layer.

    Attributes:
        mixer: name of the layer.
        method: method of RT's recurrence; None for the layer's default.
        graph: whether a pass is captured as one CUDA graph.
    """

    mixer: str
    method: Chosen | None = None
    graph: bool = False

    def config(self, heads: int | None) -> Any:
        """Return the ``Config`` of the layer, with this number of heads if it has heads; None for its default."""
        kind = find_mixer(self.mixer).Config
        given = {"heads": heads, "implementation": self.method}
        values = {entry.name: given.get(option_of(entry.name)) for entry in fields(kind)}
        return override(kind, {name: value for name, value in values.items() if value is not None})

    def build(self, shape: Shape, heads: int | None, device: torch.device, plain: bool = False) -> nn.Module:
        """Return the layer, or the layers of a stack; with ``plain`` in the form that ``Layer.plain_config`` names.

        Raises:
            Skipped: RT has no kernel of this method for this shape; another method would run.
            ValueError: there is no such layer.
        """
        layer, config = find_mixer(self.mixer), self.config(heads)
        if plain:
            config = layer.plain_config(config)
        elif self.method is not None:
            q_BTD = torch.empty(1, 1, shape.width, dtype=getattr(torch, product_precision(device)), device=device)
            if choose(self.method, q_BTD, shape.mlp_width, config.heads, 1) != self.method:
                raise Skipped("no kernel for this shape")

        layers = [kind(own, shape) for kind, own in layer.members(config, shape.layers)]
        return (layers[0] if len(layers) == 1 else Stack(layers)).to(device)


def draw(
    build: Callable[[], nn.Module], runs: int, batch: int, length: int, width: int, device: torch.device
) -> tuple[nn.Module, list[Tensor]]:
    """Return a layer, and random inputs, gradients of the outputs, and parameters, all with a leading run axis.

    Parameters are as at the start of training, because decays mean little at other values. Those of one value or next
    to zero, as gains and closed gates, get random numbers added: they would hide what they multiply.
    """
    on_cpu, on_device = torch.Generator().manual_seed(0), torch.Generator(device).manual_seed(0)

    def opened(p: Tensor) -> Tensor:
        hides = p.numel() > 0 and (p.min() == p.max() or p.abs().max() < CLOSED)
        return p.detach() + (0.1 * torch.randn(p.shape, generator=on_cpu).to(device) if hides else 0)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        modules = [build() for _ in range(runs)]
    params = [torch.stack([*map(opened, ps)]) for ps in zip(*(module.parameters() for module in modules), strict=True)]
    x, dz = (torch.randn(runs, batch, length, width, device=device, generator=on_device) for _ in range(2))
    return modules[0], [x, dz, *params]


def layer_pass(
    module: nn.Module, sample: Sequence[Tensor], *, stacked: bool, backward: bool, autocast: bool
) -> tuple[Callable[[], None], list[Tensor]]:
    """Return a function that runs a pass, and a list for its output and the gradients of inputs and parameters.

    Args:
        module: the layer of one run.
        sample: as of ``draw``; without the run axis unless ``stacked``.
        stacked: whether ``vmap`` adds the run axis to the layer, as in ``runners.mad.training.ensemble``.
        backward: whether to compute gradients. A forward pass alone also saves what they need.
        autocast: whether products run in bfloat16.
    """
    names = [name for name, _ in module.named_parameters()]
    x, dz, *params = sample
    results: list[Tensor] = []

    def call(params: list[Tensor], x_BTD: Tensor) -> Tensor:
        return functional_call(module, dict(zip(names, params, strict=True)), (x_BTD,))

    def run() -> None:
        results.clear()
        leaves = [y.detach().requires_grad_() for y in (x, *params)]
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            z = (vmap(call) if stacked else call)(leaves[1:], leaves[0])
        results[:] = (z.detach(), *(torch.autograd.grad(z, leaves, dz.to(z.dtype)) if backward else ()))

    return run, results


def random_pass(
    implementation: Implementation,
    shape: Shape,
    heads: int | None,
    runs: int | None,
    device: torch.device,
    *,
    batch: int,
    length: int,
    backward: bool,
) -> Pass:
    """Return passes of a layer, or of a stack of layers, over random inputs, in the precision of training.

    Args:
        implementation: how the layer is computed.
        shape: its shape; ``shape.layers`` are stacked.
        heads: its heads; None for its default.
        runs: number of runs that are computed together; None for a single one without run axis.
        device: where it is computed.
        batch: sequences of each run.
        length: their length.
        backward: whether to compute gradients.
    """
    build = partial(implementation.build, shape, heads, device)
    module, sample = draw(build, runs or 1, batch, length, shape.width, device)
    given = [y[0] for y in sample] if runs is None else sample
    run, results = layer_pass(
        module,
        given,
        stacked=runs is not None,
        backward=backward,
        autocast=product_precision(device) == "bfloat16",
    )
    return Pass(
        captured(run) if implementation.graph else run,
        lambda: all(bool(y.isfinite().all()) for y in results),
        tokens=(runs or 1) * batch * length,
        held=run,
    )


# The comparison with float64.


@lru_cache(maxsize=2)
def oracle(
    mixer: str, shape: Shape, heads: int | None, runs: int, low: bool
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Compute the plain form of a layer, or of a stack of layers, in float64, run by run.

    It runs on the CPU, where no kernel of a GPU runs.

    Args:
        mixer: name of the layer.
        shape: its shape; ``shape.layers`` are stacked.
        heads: its heads; None for its default.
        runs: number of runs in the sample.
        low: whether bfloat16 is accepted, up to twice the error of the plain form in bfloat16.

    Returns:
        A sample as of ``draw``; the output and gradients for it; and the relative error that is accepted in each.
    """
    build = partial(Implementation(mixer=mixer).build, shape, heads, torch.device("cpu"), plain=True)
    module, sample = draw(build, runs, CHECK_BATCH, CHECK_LENGTH, shape.width, torch.device("cpu"))
    sample[1][:, :, :UNREAD] = 0

    def computed(dtype: torch.dtype, autocast: bool) -> list[Tensor]:
        by_run = []
        for one in zip(*sample, strict=True):
            given = [y.to(dtype) for y in one]
            run, results = layer_pass(module.to(dtype), given, stacked=False, backward=True, autocast=autocast)
            run()
            by_run.append(results)
        return [torch.stack(ys) for ys in zip(*by_run, strict=True)]

    exact = computed(torch.float64, autocast=False)
    errors = [relative_error(y, e) for y, e in zip(computed(torch.float32, autocast=low), exact, strict=True)]

    # Small tensors may have a small error by chance, so no bound is below twice the median of all.
    factors = [LOW_FACTOR * (2 if y[0].numel() <= FEW else 1) for y in exact]
    bounds = [max(FLOAT32_BOUND, f * max(e, median(errors))) for f, e in zip(factors, errors, strict=True)]
    return sample, exact, bounds


@cache
def check(
    implementation: Implementation, shape: Shape, heads: int | None, runs: int | None, device: torch.device
) -> Outcome:
    """Compare output and gradients of an implementation with the oracle, computed as it is timed.

    Args:
        implementation: how the layer is computed.
        shape: its shape; ``shape.layers`` are stacked.
        heads: its heads; None for its default.
        runs: number of runs that are computed together; None for a single one without run axis.
        device: where it is computed.
    """
    low = product_precision(device) == "bfloat16"
    sample, exact, bounds = oracle(implementation.mixer, shape, heads, runs or 1, low)
    given = [(y[0] if runs is None else y).to(device) for y in sample]
    module = implementation.build(shape, heads, device)
    run, results = layer_pass(module, given, stacked=runs is not None, backward=True, autocast=low)
    if implementation.graph:
        run = captured(run)
        for y in results:
            y.fill_(torch.nan)  # so that a graph that writes nothing is found
    run()

    names = ["z", "dx", *(f"d{name}" for name, _ in module.named_parameters())]
    errors = [relative_error(y.cpu().view_as(e), e) for y, e in zip(results, exact, strict=True)]
    excess = [e / bound if math.isfinite(e) else math.inf for e, bound in zip(errors, bounds, strict=True)]
    worst = excess.index(max(excess))
    said = f"error {errors[worst]:.1e} > {bounds[worst]:.1e} in {names[worst]} at N = {CHECK_LENGTH}"
    return max(errors) if math.isfinite(sum(errors)) else None, said if excess[worst] > 1 else None


def relative_error(y: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over the norm of ``exact``."""
    return float((y.double() - exact).norm() / exact.norm().clamp_min(1e-30))


# The clock and the record.


def pass_ms(run: Callable[[], object], expected: float, device: torch.device) -> float:
    """Return the milliseconds of a pass, of which about as many run as fill ``REPEAT_MS``.

    On a GPU short passes are timed by Triton, which empties the L2 cache before each. It runs every pass eight times at
    least, too often for long ones. These, and all passes on a CPU, are timed by the clock of the machine.

    Args:
        run: runs a pass.
        expected: milliseconds that it is expected to take.
        device: where it runs.
    """
    if device.type == "cuda" and expected < REPEAT_MS:
        from triton.testing import do_bench  # Triton does not exist on every platform

        return float(do_bench(run, warmup=1, rep=REPEAT_MS, return_mode="median"))

    passes = max(1, math.ceil(REPEAT_MS / expected))
    started = _now(device)
    for _ in range(passes):
        run()
    return 1e3 * (_now(device) - started) / passes


class Case(NamedTuple):
    """One figure to measure.

    Attributes:
        place: what is measured, by the names of the record, with the name of the implementation.
        build: builds the pass.
        check: compares the implementation with the oracle.
        setup_seconds: seconds of the set-up by a process that has prepared the case, beside other processes; None if
            there was none.
    """

    place: dict[str, Any]
    build: Callable[[], Pass]
    check: Callable[[], Outcome]
    setup_seconds: float | None = None


def set_up(build: Callable[[], Pass], device: torch.device) -> tuple[Pass, float]:
    """Build a pass and run it once; return it with the seconds that this took."""
    started = _now(device)
    work = build()
    work.run()
    return work, _now(device) - started


class Record:
    """What was measured, printed and stored group by group.

    The file holds benchmark, command, device, versions, precision, options, seconds, and ``cells``, a dict for each
    case. ``runners.benchmarks`` reads it.

    Args:
        benchmark: name of the benchmark.
        options: its options.
        device: where it runs.
        arguments: the command line.
    """

    def __init__(self, benchmark: str, options: Common, device: torch.device, arguments: Sequence[str]) -> None:
        self.options = options
        self.device = device
        self.started = time.monotonic()
        self.cells: list[dict[str, Any]] = []
        self.head = {
            "benchmark": benchmark,
            "command": shlex.join(["python", "-m", "runners.bench", benchmark, *arguments]),
            "device": device_name(device),
            "versions": versions(),
            "precision": product_precision(device),
            "options": {**asdict(options), "out": str(options.out)},
        }
        where, when = device_name(device).lower().replace(" ", "-"), time.strftime("%Y-%m-%d-%H%M%S")
        self.path = options.out / "bench" / f"{benchmark}-{where}-{when}.json"
        with user_errors(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def measure(self, cases: Sequence[Case]) -> list[dict[str, Any]]:
        """Time cases in turns, and check them; print, store and return their rows.

        An error becomes the status of its row: "skipped: ...", "wrong: ..." or "failed: ...". What has too little
        memory beside the others is timed alone.
        """
        rows = self._take_turns(cases)
        for i, case in enumerate(cases):
            if rows[i]["status"] == OUT_OF_MEMORY and len(cases) > 1:
                (rows[i],) = self._take_turns([case])

        for case, row in zip(cases, rows, strict=True):
            if row["status"] == "timed":
                with _errors_in(row):
                    row["error"], problem = case.check()
                    row["status"] = "timed" if problem is None else f"wrong: {problem}"
            if row["status"] != "timed":
                row |= dict.fromkeys(TIMES)

        # Times relative to that of the Transformer at the same place, if it is timed by now.
        self.cells += rows
        for case, row in zip(cases, rows, strict=True):
            at = {**case.place, "implementation": TRANSFORMER}.items()
            theirs = [cell["median_ms"] for cell in self.cells if at <= cell.items() and cell["median_ms"]]
            if row["median_ms"] and theirs:
                row["relative"] = row["median_ms"] / theirs[0]

        texts = [
            row | {name: text(row[name]) for name, text in SHOWN.items() if row.get(name) is not None} for row in rows
        ]
        table = pd.DataFrame(texts, columns=[*cases[0].place, *SHOWN, "status"]).dropna(axis="columns", how="all")
        print(table.to_string(index=False, na_rep=""), end="\n\n", flush=True)
        self._store(complete=False)
        return rows

    def finish(self) -> None:
        """Store the record as complete, and end the program if something was wrong or failed.

        Raises:
            SystemExit: status 1, if a row is wrong or failed, lack of memory excepted.
        """
        self._store(complete=True)
        print(f"stored in {self.path}")
        if any(row["status"].startswith(("wrong", "failed")) for row in self.cells):
            raise SystemExit(1)

    def _store(self, complete: bool) -> None:
        content = {
            **self.head,
            "complete": complete,
            "elapsed_seconds": round(time.monotonic() - self.started, 1),
            "cells": self.cells,
        }
        with user_errors(OSError):
            write_json(self.path, content)

    def _take_turns(self, cases: Sequence[Case]) -> list[dict[str, Any]]:
        """Build and warm up cases, time each once a round, and return their rows."""
        gc.collect()
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # of an earlier case, which has the error as its status
                torch.cuda.empty_cache()

        # Warm up.
        rows = [{**case.place, "status": "timed", "error": None, **dict.fromkeys(TIMES)} for case in cases]
        ready: list[tuple[dict[str, Any], Pass, float, list[float]]] = []
        for case, row in zip(cases, rows, strict=True):
            with _errors_in(row):
                ready.append((row, *self._warmed_up(case, row), []))

        # Rounds.
        for _ in range(self.options.repeats):
            for row, work, once, times in ready:
                with _errors_in(row):
                    if row["status"] == "timed":
                        times.append(pass_ms(work.run, once, self.device))

        # Figures.
        for row, work, _, times in ready:
            with _errors_in(row):
                if row["status"] == "timed" and not work.is_finite():
                    row["status"] = "wrong: not finite"
            if row["status"] == "timed":
                middle, low, high = median(times), min(times), max(times)
                row |= {"median_ms": middle, "min_ms": low, "max_ms": high, "spread": (high - low) / middle}
                row |= {"tokens_per_second": 1e3 * work.tokens / middle, "repeats": len(times), **work.facts}
        return rows

    def _warmed_up(self, case: Case, row: dict[str, Any]) -> tuple[Pass, float]:
        """Return the pass of a case, and the milliseconds of one; set-up and peak memory go into the row.

        Raises:
            Skipped: a pass takes longer than the limit.
        """
        cuda = self.device.type == "cuda"
        before = torch.cuda.memory_allocated(self.device) if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

        work, seconds = set_up(case.build, self.device)
        row["setup_seconds"] = case.setup_seconds or seconds

        # The third pass of a layer of many launches is captured, and later ones are replayed.
        once = pass_ms(work.run, math.inf, self.device)
        if cuda and once <= 1e3 * self.options.limit:
            once = [pass_ms(work.run, math.inf, self.device) for _ in range(2)][-1]
        if once > 1e3 * self.options.limit:
            raise Skipped(f"over {self.options.limit:g} s")
        row["peak_gib"] = (torch.cuda.max_memory_allocated(self.device) - before) / 2**30 if cuda else None
        return work, once


@contextlib.contextmanager
def _errors_in(row: dict[str, Any]) -> Iterator[None]:
    """Turn an error into the status of a row."""
    try:
        yield
    except Skipped as reason:
        row["status"] = f"skipped: {reason}"
    except Exception as error:
        described = " ".join(f"failed: {type(error).__name__}: {error}".split())[:160]
        row["status"] = OUT_OF_MEMORY if lacks_memory(error) else described


def _now(device: torch.device) -> float:
    """Return the seconds of the clock when the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
