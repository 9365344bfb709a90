"""Compile a C file at its first use on a machine, which takes one to three seconds; later uses load the library."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from mixers.base import log_once
from mixers.ops.cache import from_cache

SECONDS_OF_SILENCE, SECONDS = 1.0, 30.0
"""When a line says that a compiler works, and when it is ended."""
INSTEAD = "slower plain PyTorch runs instead of C; CC names another compiler"
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")

_hanging: set[str] = set()
"""Compilers that were ended, which are not tried again by this process."""

log = logging.getLogger(__name__)


def compiled(source: Path, dtype: torch.dtype, **constants: int) -> ctypes.CDLL | None:
    """Return the library compiled from a C file.

    The compiler is ``$CC``, or ``cc``. The library is stored in the user's cache folder, under a name that depends on
    source, flags, compiler and processor. Several processes may write it at the same time.

    Args:
        source: the C file.
        dtype: precision, float32 or float64; float64 is compiled with ``-DDOUBLE``.
        constants: constants of the file by name, passed with ``-D``.

    Returns:
        The library; None if there is no compiler, or the compiler fails. A debug message in the log says why, or
        a warning if the compiler hangs or ``$CC`` cannot be read.
    """
    try:
        command = _command(dtype, **constants)
        name = f"{source.stem}-{_key(source, command)}"
        return from_cache(
            name, ".so", lambda path: _compile(source, command, path), lambda path: ctypes.CDLL(str(path))
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("%s is not used: %s", source.name, getattr(error, "stderr", None) or error)
        return None


def is_recorded() -> bool:
    """Return whether PyTorch records its operations for later use, as ``torch.export`` and ``make_fx`` do.

    The record would lack what C writes. ``torch.compile`` leaves its graph to call C, so this returns False for it.
    """
    return not torch.compiler.is_dynamo_compiling() and get_proxy_mode() is not None


def _command(dtype: torch.dtype, **constants: int) -> list[str]:
    """Return the compiler's command line, without input and output."""
    given = os.environ.get("CC", "")
    try:
        program, *options = shlex.split(given) or ["cc"]
    except ValueError as error:  # a quotation that does not close
        log_once(f"CC={given} cannot be read ({error}): {INSTEAD}")
        raise FileNotFoundError(f"no C compiler {given}") from error
    compiler = shutil.which(program)
    if compiler is None or compiler in _hanging:
        raise FileNotFoundError(f"no C compiler {program}")

    native = ["-march=native"] if platform.machine() in ("x86_64", "AMD64") else []
    precision = ["-DDOUBLE"] if dtype == torch.float64 else []
    return [compiler, *options, *_FLAGS, *native, *precision, *(f"-D{name}={n}" for name, n in constants.items())]


def _compile(source: Path, command: list[str], path: Path) -> None:
    """Compile a file. If the compiler hangs or this program is interrupted, all of its processes end.

    Raises:
        SubprocessError: the compiler fails or hangs.
    """
    words, pipe = [*command, str(source), "-o", str(path), "-lm"], subprocess.PIPE
    nothing = subprocess.DEVNULL
    with subprocess.Popen(words, stdin=nothing, stdout=nothing, stderr=pipe, start_new_session=True) as compiler:
        try:
            try:
                _, said = compiler.communicate(timeout=SECONDS_OF_SILENCE)
            except subprocess.TimeoutExpired:
                log_once(f"{command[0]} compiles C code for this processor, once: {SECONDS:.0f} s at most")
                _, said = compiler.communicate(timeout=SECONDS - SECONDS_OF_SILENCE)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(compiler.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                _hanging.add(command[0])
                log_once(f"the C compiler {command[0]} has not ended after {SECONDS:.0f} s: {INSTEAD}")
            raise

    if compiler.returncode:
        raise subprocess.CalledProcessError(compiler.returncode, words, stderr=said.decode(errors="replace"))


def _key(source: Path, command: list[str]) -> str:
    """Return a hash of everything that determines the library's content."""
    compiler, cpu = Path(command[0]).stat(), Path("/proc/cpuinfo")
    features = [line for line in cpu.read_text().splitlines() if line.startswith("flags")] if cpu.exists() else []
    texts = [file.read_text() for file in (source, *sorted(Path(__file__).parent.glob("*.h")))]
    parts = (texts, command, compiler.st_size, compiler.st_mtime_ns, platform.platform(), features[:1])
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
