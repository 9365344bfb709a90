"""Weights & Biases: modes, login, and opening a run. Nothing is sent anywhere unless the mode is ``online``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

Mode = Literal["disabled", "offline", "online"]


def check_login(mode: Mode) -> None:
    """Log in where ``mode`` is ``online``; ask for a key if there is a terminal.

    Raises:
        ValueError: no login is possible; the message says what to do.
    """
    if mode != "online":
        return
    import wandb  # takes a second to import, and few commands need it

    reason = "no key was given, or WANDB_MODE is set"
    try:
        if wandb.login():
            return
    except wandb.Error as error:
        reason = str(error)
    raise ValueError(f"--wandb online cannot log in ({reason}): run wandb login, or give --wandb offline")


def open_run(
    mode: Mode,
    folder: Path,
    *,
    project: str,
    name: str,
    run_id: str,
    config: Mapping[str, Any],
    group: str | None = None,
) -> Any:
    """Open a W&B run beside others; an online run with a known id continues.

    Args:
        mode: ``offline`` or ``online``.
        folder: results folder; the logs lie in its subfolder ``wandb``.
        project: W&B project.
        name: name shown for the run.
        run_id: identity of the run within the project.
        config: settings of the run.
        group: runs that are shown together.
    """
    import wandb  # takes a second to import, and few commands need it

    folder.mkdir(parents=True, exist_ok=True)
    return wandb.init(
        project=project,
        dir=folder,
        mode=mode,
        group=group,
        name=name,
        id=run_id,
        resume="allow" if mode == "online" else None,
        config=dict(config),
        reinit="create_new",
        settings=wandb.Settings(silent=True),
    )
