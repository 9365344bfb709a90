"""Tests shared among processes: ``pytest -n 2``, in place of pytest-xdist.

The processes are forks of one that has collected the tests: PyTorch and the tests are imported once, in 14 seconds.
"""

import os
from collections.abc import Iterator
from itertools import chain, groupby, pairwise
from multiprocessing import get_context
from multiprocessing.connection import wait
from types import ModuleType
from typing import Any

import pytest

TOGETHER = 12
"""Tests of a module that a worker takes at a time."""


def count(config: pytest.Config) -> int:
    """Return the number of workers; 0: pytest's own process runs the tests."""
    asked = config.getoption("workers")
    return os.cpu_count() or 1 if asked == "auto" else int(asked)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in workers, and report here what they report."""
    config, hook = session.config, session.config.hook
    if count(config) < 2 or config.option.collectonly or session.testsfailed:
        return None  # pytest goes on by itself

    # Parts of the tests wait for a worker.
    context: Any = get_context("fork")
    parts, reports = context.SimpleQueue(), context.SimpleQueue()
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one folder for all
    running = [context.Process(target=_work, args=(session, parts, reports)) for _ in range(count(config))]
    for part in (*_parts(session.items), *(None for _ in running)):
        parts.put(part)

    try:
        for worker in running:
            worker.start()
        while (alive := [worker.sentinel for worker in running if worker.is_alive()]) or not reports.empty():
            wait([reports._reader, *alive])
            while not reports.empty():
                report = hook.pytest_report_from_serializable(config=config, data=reports.get())
                hook.pytest_runtest_logreport(report=report)
            if any(worker.exitcode for worker in running):
                raise pytest.UsageError(f"a worker has ended: {[worker.exitcode for worker in running]}")
            if reason := session.shouldfail or session.shouldstop:
                raise session.Failed(reason)
    finally:
        for worker in running:
            worker.kill()
    return True


def _parts(items: list[Any]) -> Iterator[tuple[int, int]]:
    """Return where parts of the tests begin and end: few of one module, or all of modules whose processes are forks."""
    begin = 0
    for key, group in groupby(items, lambda item: hasattr(item.module, "forks") or item.module):
        end = begin + len([*group])
        together = end - begin if key is True else TOGETHER
        yield from ((at, min(at + together, end)) for at in range(begin, end, together))
        begin = end


def _work(session: pytest.Session, parts: Any, reports: Any) -> None:
    """Body of a worker: run parts of the tests until none is left."""
    import torch  # which conftest.py of a folder may have imported before the number of threads was known

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    config = session.config
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are those of all workers
    capture.start_global_capturing()
    capture.suspend_global_capture()

    def send(report: pytest.TestReport) -> None:
        reports.put(config.hook.pytest_report_to_serializable(config=config, report=report))

    config.pluginmanager.unregister(name="terminalreporter")
    sender = ModuleType("sender")
    vars(sender)["pytest_runtest_logreport"] = send
    config.pluginmanager.register(sender)
    mine = (item for begin, end in iter(parts.get, None) for item in session.items[begin:end])
    for item, following in pairwise(chain(mine, [None])):
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
