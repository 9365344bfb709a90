"""Set-up and checks of cases in several processes at a time: what they compile stays in the caches on disk."""

import gc
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from unittest.mock import patch

import torch

from runners.bench.measure import Case, Outcome, set_up
from runners.device import MOST_PROCESSES
from runners.interrupt import end_at_once, end_with_parent


def prepared(cases: Sequence[Case], device: torch.device) -> list[Case]:
    """Set up and check each case in another process; return the cases with the seconds and the outcomes.

    The caller's own set-up then finds everything compiled. The cases of an implementation share kernels and a check,
    so one process takes them one after another. What it cannot do, as for lack of memory, is left to the caller.
    """
    found, jobs = [*cases], dict[str, dict[int, Case]]()
    for n, case in enumerate(cases):
        jobs.setdefault(case.place["implementation"], {})[n] = case
    cores = len(os.sched_getaffinity(0))
    count = max(1, min(MOST_PROCESSES, cores // 2, len(jobs)))
    print(f"{len(cases)} cases are set up in {count} processes first", end="\n\n", flush=True)

    # Where TorchInductor compiles for the first time, it would move Triton's cache.
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.expanduser("~/.triton/cache"))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), str(max(1, cores // count)))
    with patch.dict(os.environ, threads), ProcessPoolExecutor(count, get_context("spawn"), end_with_parent) as pool:
        futures = [pool.submit(set_up_and_check, job, device) for job in jobs.values()]
    for future in futures:
        for n, seconds, outcome in () if future.exception() else future.result():
            check = partial(tuple[float | None, str | None], outcome)
            found[n] = cases[n]._replace(setup_seconds=seconds, check=check)
    return found


def set_up_and_check(job: dict[int, Case], device: torch.device) -> list[tuple[int, float, Outcome]]:
    """Set up and check cases, in silence; return their numbers, seconds and outcomes, without those that fail."""
    end_at_once()
    logging.disable()
    from torch._inductor import config  # takes a second to import

    config.autotune_local_cache = False  # beside other processes, times say little about the fastest settings
    results = []
    for n, case in job.items():
        with suppress(Exception):
            results.append((n, set_up(case.build, device)[1], case.check()))
        gc.collect()
        torch.cuda.empty_cache()
    return results
