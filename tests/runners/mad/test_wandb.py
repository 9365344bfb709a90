"""What Weights & Biases is told of a search."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runners.mad import __main__ as mad
from tests.runners.mad.commands import HEADS, TINY

COMMAND = ["--mixer", "transformer", "--task", "in-context-recall", *HEADS, *TINY, "--lr", "1e-3"]
pytestmark = pytest.mark.usefixtures("wide_terminal")


@pytest.mark.usefixtures("undiagnosed")
def test_wandb_offline_writes_runs_without_a_network(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    logging = ["--wandb", "offline", "--wandb-project", "mine", "--wandb-entity", "us", "--wandb-tags", "first", "try"]
    mad.main([*COMMAND, "--weight-decay", "0", "--seeds", "2", *logging, "--out", str(tmp_path)])
    assert capsys.readouterr().out.endswith(f"upload them: wandb sync {tmp_path}/wandb/offline-run-*\n")

    logs = [path.read_bytes() for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb")]
    assert len(logs) == 3
    settings = (b"mine", b"us", b"first", b"try", b"transformer-heads-2 in-context-recall custom ")
    config = (b"mixer_config", b"weight_decay", b"parameters", b"flops_per_token")
    figures = (b"diagnostics", b"train_loss", b"validation/token_accuracy", b"kept/token_accuracy")
    means = (b"mean/test.token_accuracy", b"mean/validation.loss", b"mean/test.loss.low")
    (of_chosen,) = [log for log in logs if b"chosen point" in log]
    for log in logs:
        words = means if log is of_chosen else figures
        assert [word for word in (*settings, *config, *words) if word not in log] == []
        assert [
            word for word in (b"diverged_step", b"remark", b"NaN", b"null", b"loading settings") if word in log
        ] == []
        assert not [*tmp_path.rglob("output.log")]


@pytest.mark.usefixtures("logged_out")
def test_wandb_online_without_a_login_is_refused(refused: Callable[..., str]) -> None:
    assert "run wandb login, or give --wandb offline" in refused(*COMMAND, "--wandb", "online")
