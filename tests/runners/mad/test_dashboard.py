"""optuna-dashboard reads our studies back over its own API, on loopback."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from runners.mad import __main__ as mad


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _get(url: str, patience: float = 60.0) -> Any:
    deadline = time.monotonic() + patience
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return json.load(response)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@pytest.mark.usefixtures("undiagnosed")
def test_the_dashboard_shows_name_parameters_curves_and_settings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mad.main(
        [
            *("--mixer", "transformer", "--task", "in-context-recall", "--mixer.heads", "2", "--lr", "1e-3"),
            *("--task.length", "16", "--task.train-examples", "64", "--task.eval-examples", "30"),
            *("--batch-size", "16", "--width", "16", "--mlp-width", "32", "--steps", "6", "--evaluations", "3"),
            *("--device", "cpu", "--out", str(tmp_path)),
        ]
    )
    capsys.readouterr()
    port = _free_port()
    command = [str(Path(sys.executable).with_name("optuna-dashboard")), str(tmp_path / "optuna.journal")]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    try:
        (study,) = _get(f"http://127.0.0.1:{port}/api/studies")["study_summaries"]
        assert study["study_name"].startswith("transformer-heads-2 in-context-recall custom ")
        detail = _get(f"http://127.0.0.1:{port}/api/studies/{study['study_id']}")
        importances = _get(f"http://127.0.0.1:{port}/api/studies/{study['study_id']}/param_importances")
    finally:
        server.terminate()
        server.wait(timeout=30)
    assert detail["objective_names"] == ["validation token accuracy"]
    assert {entry["name"] for entry in importances["param_importances"][0]} == {"weight_decay"}

    attributes = {entry["key"]: entry["value"] for entry in detail["user_attrs"]}
    assert attributes["steps"] == "6"
    assert (Path(attributes["folder"].strip('"')) / "lr0.001-wd0.0-seed0" / "record.json").exists()
    assert [[point["step"] for point in trial["intermediate_values"]] for trial in detail["trials"]] == [[2, 4, 6]] * 2
