"""optuna-dashboard reads our studies back over its own API, on loopback."""

import json
import os
import re
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
def test_the_dashboard_shows_name_parameters_curves_and_protocol(
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
    command = [str(Path(sys.executable).with_name("optuna-dashboard")), str(tmp_path / "studies.journal")]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    try:
        (study,) = _get(f"http://127.0.0.1:{port}/api/studies")["study_summaries"]
        assert study["study_name"].startswith("transformer in-context-recall (heads 2, width 16, mlp-width 32, ")
        detail = _get(f"http://127.0.0.1:{port}/api/studies/{study['study_id']}")
        importances = _get(f"http://127.0.0.1:{port}/api/studies/{study['study_id']}/param_importances")
    finally:
        server.terminate()
        server.wait(timeout=30)
    assert detail["objective_names"] == ["% of sequences right"]
    assert {entry["name"] for entry in importances["param_importances"][0]} == {"lr", "weight_decay"}

    # The result, in the attributes on the first page and in the note.
    attributes = {entry["key"]: entry["value"] for entry in detail["user_attrs"]}
    assert list(attributes)[:3] == ["chosen", "test", "folder of the best run"]
    assert re.fullmatch(r'"?sequence accuracy 0\.\d{4}, token accuracy 0\.\d{4}"?', attributes["test"])
    assert (Path(attributes["folder of the best run"].strip('"')) / "test.json").exists()
    assert "6 steps of 16 sequences" in detail["note"]["body"]
    for attribute in ("chosen", "test", "folder of the best run"):
        assert attributes[attribute].strip('"') in detail["note"]["body"]
    assert len(detail["trials"]) == 2
    for trial in detail["trials"]:
        assert {p["name"]: float(p["param_external_value"]) for p in trial["params"]}["lr"] == 1e-3
        assert [point["step"] for point in trial["intermediate_values"]] == [2, 4, 6]
        assert trial["state"] == "Complete"
        assert {entry["key"]: entry["value"] for entry in trial["user_attrs"]}["seed"] == "0"

        # 1.782939 is 1.78% of the sequences and 29.39% of the tokens.
        figures = {entry["key"]: float(entry["value"]) for entry in trial["user_attrs"] if "accuracy" in entry["key"]}
        sequences, tokens = f"{trial['values'][0]:.6f}"[:-4], f"{trial['values'][0]:.6f}"[-4:]
        assert float(sequences) == pytest.approx(100 * figures["validation_sequence_accuracy"], abs=0.005)
        assert int(tokens) == int(1e4 * figures["validation_token_accuracy"])
