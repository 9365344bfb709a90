"""Weights & Biases: its options, login, and opening a run. Nothing is sent anywhere unless the mode is ``online``."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Options of Weights & Biases, which programs inherit.

    Attributes:
        out: folder of results.
        wandb: Weights & Biases mode.
        wandb_project: W&B project, that of the program (mad or c4) unless given.
        wandb_entity: W&B user or team, the default of your login unless given.
        wandb_tags: W&B tags of each run.
    """

    out: Path = Path("results")
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: str | None = None
    wandb_entity: str | None = None
    wandb_tags: tuple[str, ...] = ()

    def check_tracking(self) -> None:
        """Raise ValueError if there are settings of logs that nobody writes."""
        for name in ("project", "entity", "tags"):
            if self.wandb == "disabled" and getattr(self, f"wandb_{name}"):
                raise ValueError(f"--wandb-{name} has no effect without --wandb online or --wandb offline: give one")

    def log_in(self) -> None:
        """Log in where the mode is ``online``; ask for a key if there is a terminal.

        Raises:
            ValueError: no login is possible; the message says what to do.
        """
        if self.wandb != "online":
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

        self.out.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project=self.wandb_project or project,
            entity=self.wandb_entity,
            tags=list(self.wandb_tags),
            dir=self.out,
            mode=self.wandb,
            job_type=job_type,
            group=group,
            name=name,
            id=run_id,
            resume="allow" if self.wandb == "online" else None,
            config=filled(config),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def advice(self) -> str | None:
        """Return a line on offline logs, if there are any: where they are, and how to upload them."""
        logs = self.out / "wandb"
        if self.wandb != "offline" or not logs.exists():
            return None
        return f"curves: {logs}; upload them: wandb sync {logs}/offline-run-*"


def filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields without those that are None or NaN, also within fields that are mappings."""
    known = {name: value for name, value in fields.items() if value is not None and value == value}
    return {name: filled(value) if isinstance(value, Mapping) else value for name, value in known.items()}
