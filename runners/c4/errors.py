"""Reasons why a run ends before its result; each message is one line and says what to do."""

from runners.interrupt import StoppedError


class RunError(RuntimeError):
    """A run cannot continue."""


class DivergedError(RunError):
    """The loss or the gradient of a run was not finite."""


class BusyError(RunError):
    """Another process is training the run."""


class DiskFullError(RunError, OSError):
    """The disk is full, so that no other run can be stored either."""


def out_of_memory(micro_batch_size: int) -> RunError:
    """Return the error for too little memory, with ``micro_batch_size`` sequences per forward pass."""
    return RunError(f"out of memory: lower --micro-batch-size (now {micro_batch_size}) or give --recompute")


class EvaluationStoppedError(StoppedError):
    """Ctrl-C while a trained run was evaluated on downstream sets."""

    def __str__(self) -> str:
        return "interrupted: the run is trained, the same command continues with the downstream sets"
