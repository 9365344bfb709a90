"""Threads of a process that runs tests, and what stays in its memory to the end."""

import gc
import logging
import os
from pathlib import Path

import pytest

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    for library in ("OMP", "OPENBLAS"):  # before PyTorch, NumPy and SciPy are imported
        os.environ.setdefault(f"{library}_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

gc.set_threshold(50_000, 20, 20)  # 20,000 collections take 4% of the tests' time, and more of that of imports


def pytest_configure(config: pytest.Config) -> None:
    """Import PyTorch where tests run, and not in the process that only hands them to others."""
    if not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.devices")

    # Each worker begins to collect elsewhere: a file that another one has compiled takes a third of the time.
    if workers and all(Path(place).is_dir() for place in config.args):
        files = [str(file) for place in config.args for file in sorted(Path(place).rglob("test_*.py"))]
        first = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) * len(files) // workers
        config.args = files[first:] + files[:first]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the test that takes longest, which would be the last one, with one processor at work.

    Then come the modules whose processes are forks: one worker takes them, and one server imports what they need. The
    order is that of all workers.
    """
    items.sort(
        key=lambda item: ("test_an_installed_wheel" not in item.name, not hasattr(item.module, "forks"), item.path)
    )


def pytest_collection_finish() -> None:
    """Leave out of garbage collection what stays to the end: a million objects of libraries and of tests."""
    if workers:
        import torch._dynamo  # noqa: F401  # which every worker imports sooner or later, a third of all objects

    # Before and after each part of a test, pytest attends to every logger that does not pass its records on.
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch."):
            logger.propagate = True

    gc.collect()
    gc.freeze()
