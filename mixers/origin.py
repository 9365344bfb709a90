"""The place in a user's code where an error arose."""

import dis
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import FrameType

from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
OWN = tuple(f"{ROOT / package}/" for package in ("mixers", "tasks", "runners"))
NEEDS_GPU = ("active drivers", "NVIDIA driver", "not compiled with CUDA", "cpu tensor?")
"""Parts of what Triton and PyTorch say where kernels find no GPU."""


def is_library(file: str) -> bool:
    """Return whether a file belongs to Python or to an installed library, wherever pip has put it."""
    return file.startswith(LIBRARIES) or any(map(_is_pips, [Path(file), *Path(file).parents]))


@cache
def _is_pips(folder: Path) -> bool:
    """Return whether pip installs into a folder: one of the usual names that holds the metadata of a library."""
    usual = folder.name in ("site-packages", "dist-packages")
    return usual and any(any(folder.glob(pattern)) for pattern in ("*.dist-info", "*.egg-info"))


def origin(error: BaseException) -> str | None:
    """Return the place of an error in a user's code, as ``file:line, in Class.forward(x (2, 32, 128))``.

    The place is the innermost frame in a file that belongs neither to this project nor to a library. Without such a
    frame, it is the innermost call of a module of a library other than PyTorch.

    Returns:
        The place; None if no such code was involved.
    """
    frames = [*traceback.walk_tb(error.__traceback__)]
    found = [place for place in frames if _is_users(place[0])] or [place for place in frames if _is_module(place[0])]
    if not found:
        return None

    frame, line = found[-1]
    code = frame.f_code
    values = {name: frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]}
    inputs = ", ".join(f"{name} {tuple(value.shape)}" for name, value in values.items() if isinstance(value, Tensor))
    return f"{code.co_filename}:{line}, in {code.co_qualname}" + (f"({inputs})" if inputs else "")


def is_raised_by_user(error: BaseException) -> bool:
    """Return whether an error that ends programs comes from a user's code, or a library's that a user has named.

    Ctrl-C raises a KeyboardInterrupt in whatever code runs, but not by a statement of it.
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or origin(error) is None:
        return False
    raises = last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    own = last.tb_frame.f_code.co_filename.startswith(OWN)
    return not own and (raises or not isinstance(error, KeyboardInterrupt))


def advice_on_gpus(error: BaseException) -> str:
    """Return what to do where kernels miss a GPU, as the end of a message; empty for other errors."""
    missing = any(sign in str(error) for sign in NEEDS_GPU)
    return "; its kernels need a GPU: train it on one, or choose its plain form if it has one" if missing else ""


def where(error: BaseException) -> str:
    """Return ``origin`` as the beginning of a message; empty without a place."""
    place = origin(error)
    return "" if place is None else f"{place}: "


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith(("<", *OWN)) and not is_library(file)


def _is_module(frame: FrameType) -> bool:
    owner = frame.f_locals.get("self")
    file = frame.f_code.co_filename
    return isinstance(owner, nn.Module) and not file.startswith(OWN) and "/torch/" not in file
