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

from mixers.origin import is_raised_by_user, origin, where
from runners import __version__
from runners.device import lacks_memory
from runners.interrupt import INTERRUPTED, StoppedError, heed_interrupts

LESS_MEMORY = "free some, or lower the sizes; what is stored is kept"
"""What helps when memory runs out."""


def fail(message: str) -> NoReturn:
    """Print one line to standard error and exit with status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def run_command(main: Callable[[], None], interrupted: str) -> None:
    """Run a program and turn interruptions and errors into exit statuses; with ``--version`` print its version instead.

    Ctrl-C prints ``interrupted``. An orderly stop prints the step at which training stopped. A closed pipe, as of
    ``| head``, prints nothing. An error in a user's code prints one line, with its place and a file with the traceback,
    and ends with status 2, as other errors that the user can correct.

    Args:
        main: the program.
        interrupted: line for Ctrl-C.
    """
    if "--version" in sys.argv[1:]:
        print(f"{sys.argv[0]} {__version__}")
        return

    # A character that the terminal's encoding lacks must not end a training.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")

    heed_interrupts()
    try:
        try:
            main()
        finally:
            sys.stdout.flush()

    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None

    except StoppedError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.status) from None

    except BrokenPipeError:
        # Python flushes once more at its end (https://docs.python.org/3/library/signal.html#note-on-sigpipe)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None

    except (Exception, SystemExit) as error:
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
    words = " ".join(str(error).split()).rstrip(".") or traceback.extract_tb(error.__traceback__)[-1].line or ""
    described = "; ".join([f"{type(error).__name__}: {words}", *getattr(error, "__notes__", [])])
    if origin(error) is None and lacks_memory(error):
        return f"too little memory ({described}): {LESS_MEMORY}"

    with tempfile.NamedTemporaryFile("w", prefix="traceback-", suffix=".txt", delete=False) as file:
        file.writelines(traceback.format_exception(error))
    return f"{where(error)}{described}; traceback: {file.name}"
