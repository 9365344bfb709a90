"""optuna-dashboard reads our studies back over its own API."""

import json
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna_dashboard import wsgi

from runners.mad import __main__ as mad


@pytest.mark.filterwarnings("ignore")  # Optuna, of few trials
@pytest.mark.usefixtures("undiagnosed")
def test_the_dashboard_shows_name_parameters_curves_and_settings(tmp_path: Path) -> None:
    mad.main(
        [
            *("--mixer", "transformer", "--task", "in-context-recall", "--mixer.heads", "2", "--lr", "1e-3"),
            *("--task.length", "16", "--task.train-examples", "64", "--task.eval-examples", "30"),
            *("--batch-size", "16", "--width", "16", "--mlp-width", "32", "--steps", "6", "--evaluations", "3"),
            *("--device", "cpu", "--out", str(tmp_path)),
        ]
    )
    dashboard = wsgi(JournalStorage(JournalFileBackend(str(tmp_path / "optuna.journal"))))

    def get(path: str) -> Any:
        environment: dict[str, Any] = {"PATH_INFO": f"/api/studies{path}"}
        setup_testing_defaults(environment)
        return json.loads(b"".join(dashboard(environment, lambda *_: None)))

    (study,) = get("")["study_summaries"]
    assert study["study_name"].startswith("transformer-heads-2 in-context-recall custom ")
    detail = get(f"/{study['study_id']}")
    importances = get(f"/{study['study_id']}/param_importances")
    assert detail["objective_names"] == ["validation token accuracy"]
    assert {entry["name"] for entry in importances["param_importances"][0]} == {"weight_decay"}

    attributes = {entry["key"]: entry["value"] for entry in detail["user_attrs"]}
    assert attributes["steps"] == "6"
    assert (Path(attributes["folder"].strip('"')) / "lr0.001-wd0.0-seed0" / "record.json").exists()
    assert [[point["step"] for point in trial["intermediate_values"]] for trial in detail["trials"]] == [[2, 4, 6]] * 2
