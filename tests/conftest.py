"""Threads of a process that runs tests, and what stays in its memory to the end."""

import gc
import logging
import os

import pytest

from tests import workers


def pytest_addoption(parser: pytest.Parser) -> None:
    """``-n 2``; pytest keeps short options for plugins, and ``addoption`` refuses them."""
    parser.getgroup("workers")._addoption(
        "-n", dest="workers", default="0", help="processes that share the tests; auto: one a processor"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Divide the processors among the workers, before PyTorch, NumPy and SciPy are imported."""
    if count := workers.count(config):
        for library in ("OMP", "OPENBLAS"):
            os.environ.setdefault(f"{library}_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    config.pluginmanager.import_plugin("tests.devices")
    config.pluginmanager.register(workers)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the test that takes longest, which would be the last one, with one processor at work.

    Then come the modules whose processes are forks: one worker takes them, and one server imports what they need.
    """
    items.sort(key=lambda item: ("test_an_installed_wheel" not in item.name, not hasattr(item.module, "forks")))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave out of garbage collection what stays to the end: a million objects of libraries and of tests.

    What tests make is collected less often, because 20,000 collections take 4% of their time.
    """
    if workers.count(session.config):
        import torch._dynamo  # noqa: F401  # which every worker imports sooner or later, a third of all objects

    # Before and after each part of a test, pytest attends to every logger that does not pass its records on.
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch."):
            logger.propagate = True

    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
