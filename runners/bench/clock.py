"""Seconds and peak memory of a device."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Measures seconds and peak memory of a device. Seconds of a GPU are read from its events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"

    def seconds(self, run: Callable[[], None], passes: int = 1) -> float:
        """Call ``run`` ``passes`` times without a pause and return the mean seconds of a call."""
        if not self.cuda:
            started = time.perf_counter()
            for _ in range(passes):
                run()
            return (time.perf_counter() - started) / passes

        # The device works asynchronously and stamps each event when it reaches it.
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(passes):
            run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3 / passes

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Make a stream of its own the current one; on the CPU, do nothing.

        A pass that is captured as a CUDA graph later must be warmed up on a side stream
        (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).
        """
        if not self.cuda:
            yield
            return

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield
        torch.cuda.current_stream().wait_stream(side)

    def start_peak(self) -> int:
        """Start to record the peak of the memory in use; return the bytes in use now, 0 on the CPU."""
        if not self.cuda:
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak_gib(self, before: int) -> float | None:
        """Return the peak since ``start_peak``, less the bytes ``before`` that it returned; None on the CPU."""
        return (torch.cuda.max_memory_allocated() - before) / 2**30 if self.cuda else None
