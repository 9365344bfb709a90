"""What Weights & Biases is told of a search."""

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runners.mad import __main__ as mad
from tests.runners.mad.commands import HEADS, TINY

pytestmark = pytest.mark.usefixtures("wide_terminal")


@pytest.mark.usefixtures("undiagnosed")
def test_wandb_offline_writes_runs_without_a_network(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    command = ["--mixer", "transformer", "--task", "in-context-recall", *HEADS, *TINY, "--lr", "1e-3"]
    logging = ["--wandb", "offline", "--wandb-project", "mine", "--wandb-entity", "us", "--wandb-tags", "first", "try"]
    mad.main([*command, *logging, "--out", str(tmp_path)])
    assert capsys.readouterr().out.endswith(f"upload them: wandb sync {tmp_path}/wandb/offline-run-*\n")

    runs = [Logged.read(path) for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb")]
    assert len(runs) == 2
    for run in runs:
        assert (run.project, run.entity, run.job_type, run.tags) == ("mine", "us", "diagnostics", ["first", "try"])
        assert run.group.startswith("transformer in-context-recall custom ")
        assert run.config.keys() >= {"mixer", "lr", "seed", "parameters", "state", "flops_per_token"}
        assert run.config["family"] == "attention"
        assert {"kept/token_accuracy", "kept/loss", "train_loss", "validation/score"} <= run.summary.keys()


@dataclass
class Logged:
    """What an offline run of Weights & Biases holds."""

    project: str
    entity: str
    job_type: str
    group: str
    tags: list[str]
    config: dict[str, Any]
    summary: dict[str, Any]

    @staticmethod
    def read(path: Path) -> "Logged":
        from wandb.proto.wandb_internal_pb2 import Record

        run, summary = None, {}
        for data in log_records(path.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run"):
                run = record.run
            for item in record.summary.update:
                summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
        assert run is not None
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        return Logged(run.project, run.entity, run.job_type, run.run_group, list(run.tags), config, summary)


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of a log in LevelDB's format, behind W&B's header of 7 bytes."""
    at, block, head, record = 7, 2**15, 7, b""
    while at + head <= len(data):
        if (left := block - at % block) < head:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + head])
        record += data[at + head : at + head + length]
        at += head + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


@pytest.mark.usefixtures("logged_out")
def test_wandb_online_without_a_login_is_refused(refused: Callable[..., str]) -> None:
    command = ["--mixer", "transformer", "--task", "in-context-recall", *HEADS, *TINY, "--lr", "1e-3"]
    assert "run wandb login, or give --wandb offline" in refused(*command, "--wandb", "online")
