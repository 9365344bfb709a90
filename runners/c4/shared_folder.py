"""The results folder that all processes of a run must share, also those on other machines."""

import socket
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist

from runners.c4.distributed import World


def require_shared(folder: Path, world: World) -> None:
    """Check that all processes see one results folder: the first writes a file there, and the others look for it.

    The corpus and the checkpoints lie there. A process that saw another folder would resume from another step.

    Args:
        folder: results folder.
        world: the processes; all must call this.

    Raises:
        ValueError: a process sees another folder; raised in all of them.
    """
    if world.size == 1:
        return

    # A new name, because network file systems remember for a while which files they did not find.
    name = [f".shared-{uuid4().hex}"]
    dist.broadcast_object_list(name)
    mark = folder / name[0]
    if world.is_first:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    world.wait()

    lacking: list[str | None] = [None] * world.size
    dist.all_gather_object(lacking, None if mark.exists() else f"process {world.rank} on {socket.gethostname()}")
    if world.is_first:
        mark.unlink()
    if found := [process for process in lacking if process is not None]:
        raise ValueError(
            f"--out {folder} is not one folder for all: {', '.join(found)} does not see what process 0 writes there: "
            "give a folder on a file system that the machines share"
        )
