"""How a program ends: exit statuses, and errors as one line."""

import errno
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from runners import __version__
from runners.interrupt import INTERRUPTED, StoppedError, heed_interrupts, keep_status

LESS_MEMORY = "free some, or lower the sizes; what is stored is kept"
"""What helps when memory runs out."""


def fail(message: str) -> NoReturn:
    """Print one line to standard error and exit with status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def run_command(main: Callable[[], None], interrupted: str) -> None:
    """Run a program and turn interruptions into exit statuses; with ``--version`` print its version instead.

    Ctrl-C prints ``interrupted``. An orderly stop prints the step at which training stopped. A closed pipe, as of
    ``| head``, prints nothing. An error in a user's code prints one line, with its place and a file with the traceback,
    and ends with status 2, as other errors that the user can correct.

    Args:
        main: the program.
        interrupted: line for Ctrl-C.
    """
    _open_closed_streams()
    if "--version" in sys.argv[1:]:
        print(f"{command_name()} {__version__}")
        return

    # A character that the terminal's encoding lacks must not end a training.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")

    status = 1
    try:
        try:
            _run(main)
            status = 0
        except KeyboardInterrupt:
            print(interrupted, file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None

    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise

    finally:
        keep_status(status)


def _open_closed_streams() -> None:
    """Open what the shell has closed, as by ``>&-``, to nowhere; Python has None there, which takes no text."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 stays open to the end of the program


def _run(main: Callable[[], None]) -> None:
    """Run a program and turn its errors into exit statuses, all but Ctrl-C."""
    try:
        try:
            heed_interrupts()
            main()
        finally:
            sys.stdout.flush()

    except StoppedError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.status) from None

    except BrokenPipeError:
        # Python flushes once more at its end (https://docs.python.org/3/library/signal.html#note-on-sigpipe)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None

    except (Exception, SystemExit) as error:
        from mixers.origin import is_raised_by_user, origin  # imports PyTorch, as most programs have done by now
        from runners.memory import lacks_memory

        # The project ends programs, too; a layer that does so would end them with status 0 and no word.
        if isinstance(error, SystemExit) and not is_raised_by_user(error):
            raise
        if origin(error) is not None:
            fail(_unexpected(error))
        if not lacks_memory(error):
            raise
        print(f"stopped: {_unexpected(error)}", file=sys.stderr)
        raise SystemExit(1) from None


@contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors that the user can correct, of these ``kinds``, into one line and exit status 2."""
    try:
        yield
    except BrokenPipeError:  # ``run_command`` handles it
        raise
    except kinds as error:
        from mixers.origin import where

        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        advice = ": free some space, then the same command resumes" if full else ""
        fail(" ".join(f"{where(error)}{error}".split()) + advice)


@contextmanager
def others_continue(name: str, failed: list[str], *expected: type[Exception]) -> Iterator[None]:
    """Turn an error in one of several pieces of work into one line, so that the others are done.

    Ctrl-C, an orderly stop and errors of files still end the program: where the disk is full, no other piece is stored.

    Args:
        name: the piece of work.
        failed: names of the pieces that failed; ``name`` is appended after an error.
        expected: kinds of errors whose message says enough. The line of another error names a file with its traceback.
    """
    try:
        yield
    except (StoppedError, OSError):
        raise
    except Exception as error:
        line = str(error) if isinstance(error, expected) else _unexpected(error)
        print(f"{name} stopped: {line}", file=sys.stderr)
        failed.append(name)


def _unexpected(error: BaseException) -> str:
    """Return an error as one line, with a file of its traceback unless it is a lack of memory."""
    from mixers.origin import origin, where
    from runners.memory import lacks_memory

    if origin(error) is None and lacks_memory(error):
        return f"too little memory ({_described(error)}): {LESS_MEMORY}"
    return f"{where(error)}{_described(error)}; traceback: {_traceback_file(error)}"


def _described(error: BaseException) -> str:
    """Return the type, the message and the notes of an error as one line; an assertion without message is quoted."""
    message = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, AssertionError) and not message:
        message = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return "; ".join([f"{type(error).__name__}: {message}", *getattr(error, "__notes__", [])])


def _traceback_file(error: BaseException) -> str:
    """Write the traceback of an error into a temporary file; return its name, or why it is not written."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="traceback-", suffix=".txt", delete=False) as file:
            file.writelines(traceback.format_exception(error))
    except OSError as reason:
        return f"not written ({reason})"
    return file.name


def command_name() -> str:
    """Return the command that started this program, by the name of its module."""
    spec = sys.modules["__main__"].__spec__
    return sys.argv[0] if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"
