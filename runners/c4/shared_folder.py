"""Check that all processes of a run share one results folder, including processes on other machines."""

import socket
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist

from runners.c4.distributed import World


def require_shared(folder: Path, world: World) -> None:
    """Check that all processes see the same results folder: the first writes a file, and the others look for it.

    The folder holds the corpus and the checkpoints. A process that saw another folder would resume from another step.

    Args:
        folder: results folder.
        world: the processes; all must call this.

    Raises:
        ValueError: a process sees another folder; raised in all of them.
    """
    if world.size == 1:
        return

    # Use a new name, because network file systems cache for a while which files do not exist.
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
