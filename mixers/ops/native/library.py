"""Compile a C file at its first use on a machine, which takes one to three seconds; later uses load the library."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from mixers.ops.cache import from_cache

_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")

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
        The library; None if there is no compiler, or the compiler fails. A debug message in the log says why.
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
    program, *options = shlex.split(os.environ.get("CC", "")) or ["cc"]
    compiler = shutil.which(program)
    if compiler is None:
        raise FileNotFoundError(f"no C compiler {program}")

    native = ["-march=native"] if platform.machine() in ("x86_64", "AMD64") else []
    precision = ["-DDOUBLE"] if dtype == torch.float64 else []
    return [compiler, *options, *_FLAGS, *native, *precision, *(f"-D{name}={n}" for name, n in constants.items())]


def _compile(source: Path, command: list[str], path: Path) -> None:
    subprocess.run(
        [*command, str(source), "-o", str(path), "-lm"],
        check=True,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )


def _key(source: Path, command: list[str]) -> str:
    """Return a hash of everything that determines the library's content."""
    compiler, cpu = Path(command[0]).stat(), Path("/proc/cpuinfo")
    features = [line for line in cpu.read_text().splitlines() if line.startswith("flags")] if cpu.exists() else []
    texts = [file.read_text() for file in (source, *sorted(Path(__file__).parent.glob("*.h")))]
    parts = (texts, command, compiler.st_size, compiler.st_mtime_ns, platform.platform(), features[:1])
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
