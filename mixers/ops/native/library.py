"""Compiles a file in C at its first use on a machine, one to three seconds, and loads it from then on."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import zlib
from pathlib import Path

import torch
from platformdirs import user_cache_path

_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")

log = logging.getLogger(__name__)


def compiled(source: Path, dtype: torch.dtype, **constants: int) -> ctypes.CDLL | None:
    """Return a compiled file in C.

    The compiler is ``$CC``, or ``cc``. The library is kept in the cache folder of the user, under a name that depends
    on source, flags, compiler and processor; processes may write it at the same time.

    Args:
        source: the file.
        dtype: precision, float32 or float64, in which it has ``-DDOUBLE``.
        constants: numbers that the file wants to know, for ``-D``.

    Returns:
        The library; None where there is no compiler, or it fails. The log says why at the level of debug messages.
    """
    try:
        return _loaded(source, _command(dtype, **constants))
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("%s is not used: %s", source.name, getattr(error, "stderr", None) or error)
        return None


def _command(dtype: torch.dtype, **constants: int) -> list[str]:
    """Return the compiler's command line, without input and output."""
    program, *options = shlex.split(os.environ.get("CC", "")) or ["cc"]
    compiler = shutil.which(program)
    if compiler is None:
        raise FileNotFoundError(f"no C compiler {program}")

    native = ["-march=native"] if platform.machine() in ("x86_64", "AMD64") else []
    precision = ["-DDOUBLE"] if dtype == torch.float64 else []
    return [compiler, *options, *_FLAGS, *native, *precision, *(f"-D{name}={n}" for name, n in constants.items())]


def _loaded(source: Path, command: list[str]) -> ctypes.CDLL:
    """Load the library from the cache, or compile it: into the cache, or a temporary folder if that is read-only."""
    folder, name = user_cache_path("recurrent-transformer-diagnostics"), f"{source.stem}-{_key(source, command)}"
    for path in folder.glob(f"{name}-*.so"):
        if path.name == _with_checksum(name, path):
            return ctypes.CDLL(str(path))

    with tempfile.TemporaryDirectory() as temporary:
        built = Path(temporary) / name
        _compile(source, command, built)
        path = folder / _with_checksum(name, built)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            beside = folder / f".{path.name}-{os.getpid()}"
            shutil.copyfile(built, beside)
            beside.replace(path)
        except OSError:
            return ctypes.CDLL(str(built))
    return ctypes.CDLL(str(path))


def _with_checksum(name: str, path: Path) -> str:
    """Return the name that a library has in the cache: damage would give it another one."""
    return f"{name}-{zlib.crc32(path.read_bytes()):08x}.so"


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
    """Hash of what decides the library's content."""
    compiler, cpu = Path(command[0]).stat(), Path("/proc/cpuinfo")
    features = [line for line in cpu.read_text().splitlines() if line.startswith("flags")] if cpu.exists() else []
    texts = [file.read_text() for file in (source, *sorted(Path(__file__).parent.glob("*.h")))]
    parts = (texts, command, compiler.st_size, compiler.st_mtime_ns, platform.platform(), features[:1])
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
