"""Weights & Biases: modes and login."""

from typing import Literal

Mode = Literal["disabled", "offline", "online"]

PROJECT = "mad"


def check_login(mode: Mode) -> None:
    """Log in where ``mode`` is ``online``, asking for a key if there is a terminal.

    Raises:
        ValueError: that is not possible; the message says what to do.
    """
    if mode != "online":
        return
    import wandb  # slow to import, and seldom wanted

    reason = "no key was given, or WANDB_MODE is set"
    try:
        if wandb.login():
            return
    except wandb.Error as error:
        reason = str(error)
    raise ValueError(f"--wandb online cannot log in ({reason}): run wandb login, or give --wandb offline")
