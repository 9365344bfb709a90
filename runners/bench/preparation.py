"""Preparation of work for timing: build it, warm it up, capture it as a CUDA graph."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

from runners.bench.clock import Clock
from runners.bench.work import Work

WARM_UPS = 2
"""Passes before the first that counts, eager and, if captured, replayed."""
SECONDS_A_REPEAT = 0.02
"""A repeat consists of the number of passes that fill this time."""


class TooSlowError(Exception):
    """One pass takes longer than the limit."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"{seconds:.3g} s a pass")
        self.seconds = seconds


class Prepared(NamedTuple):
    """Work that is ready to be timed.

    Attributes:
        work: the work.
        warm_up: seconds of one eager pass.
        passes: passes in one repeat.
        peak_gib: peak memory of a pass with its inputs and all that it keeps; None on the CPU.
        setup_seconds: seconds of building, of the first pass, and of the capture.
    """

    work: Work
    warm_up: float
    passes: int
    peak_gib: float | None
    setup_seconds: float


def prepare(build: Callable[[], Work], graph: bool, clock: Clock, limit: float) -> Prepared:
    """Build work, warm it up and, with ``graph``, capture it.

    Args:
        build: builds the work.
        graph: whether to capture a pass as one CUDA graph.
        clock: clock of the device.
        limit: seconds that an eager pass may take.

    Raises:
        TooSlowError: an eager pass takes longer than ``limit``.
    """
    before = clock.start_peak()

    # Build.
    started = time.perf_counter()
    work = build()
    setup_seconds = time.perf_counter() - started

    # Warm up.
    with clock.side_stream() if graph else nullcontext():
        warm_ups = [clock.seconds(work.run) for _ in range(WARM_UPS)]
    setup_seconds += warm_ups[0]
    warm_up = min(warm_ups)
    if warm_up > limit:
        raise TooSlowError(warm_up)

    # Capture.
    pass_seconds = warm_up
    if graph:
        started = time.perf_counter()
        work.capture()
        setup_seconds += time.perf_counter() - started
        pass_seconds = min(clock.seconds(work.run) for _ in range(WARM_UPS))

    passes = max(1, math.ceil(SECONDS_A_REPEAT / pass_seconds))
    return Prepared(work, warm_up, passes, clock.peak_gib(before), setup_seconds)
