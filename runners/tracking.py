"""Weights & Biases: modes, login, and opening a run. Nothing is sent anywhere unless the mode is ``online``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Where runs are logged.

    Attributes:
        mode: ``disabled``, ``offline`` or ``online``.
        folder: results folder; the logs lie in its subfolder ``wandb``.
        project: W&B project; unless given, that of the program.
        entity: user or team of the project; unless given, the default of the login.
        tags: tags of each run.
    """

    mode: Mode
    folder: Path
    project: str | None = None
    entity: str | None = None
    tags: Sequence[str] = ()

    def check(self) -> None:
        """Raise ValueError if there are settings of logs that nobody writes."""
        if self.mode != "disabled":
            return
        for name, value in {"project": self.project, "entity": self.entity, "tags": self.tags}.items():
            if value:
                raise ValueError(f"--wandb-{name} has no effect without --wandb online or --wandb offline: give one")

    def open_run(
        self, *, project: str, job_type: str, group: str, name: str, run_id: str, config: Mapping[str, Any]
    ) -> Any:
        """Open a W&B run beside others; an online run with a known id continues.

        Args:
            project: project unless another one was given.
            job_type: kind of work.
            group: runs that are shown together.
            name: name shown for the run.
            run_id: identity of the run within the project.
            config: settings of the run, and what is known of it beforehand.
        """
        import wandb  # takes a second to import, and few commands need it

        self.folder.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project=self.project or project,
            entity=self.entity,
            tags=list(self.tags),
            dir=self.folder,
            mode=self.mode,
            job_type=job_type,
            group=group,
            name=name,
            id=run_id,
            resume="allow" if self.mode == "online" else None,
            config=dict(config),
            reinit="create_new",
            settings=wandb.Settings(silent=True),
        )

    def advice(self) -> str | None:
        """Return a line on offline logs, if there are any: where they are, and how to upload them."""
        logs = self.folder / "wandb"
        if self.mode != "offline" or not logs.exists():
            return None
        return f"curves: {logs}; upload them: wandb sync {logs}/offline-run-*"
