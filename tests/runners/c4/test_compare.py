"""The comparison of finished runs: means over seeds, what has a row of its own, and what is refused."""

import csv
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import t

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from runners import records  # noqa: E402
from runners.c4.__main__ import main  # noqa: E402
from runners.c4.compare import by_label, loss_table, place_of  # noqa: E402
from runners.c4.train import loss_of  # noqa: E402
from runners.records import Record, read_all  # noqa: E402
from tests.runners.c4.runs import At, Interruption, configured, interrupt, run  # noqa: E402


@pytest.fixture(scope="module")
def trained(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder: three seeds at the rate 0.01, one at 0.02, of the same text; and a run that is not finished."""
    out = tmp_path_factory.mktemp("results")
    for lr, seed in ((0.01, 0), (0.01, 1), (0.01, 2), (0.02, 0)):
        run(configured(texts, out, lr=lr, seed=seed, steps=4, evaluations=2))
    with pytest.raises(Interruption):
        run(configured(texts, out, lr=0.03, steps=4), At(2, interrupt))
    return out


@pytest.fixture
def found(trained: Path) -> list[Record]:
    return [record for _, record in read_all(trained / "c4")]


@pytest.mark.usefixtures("drawn")
def test_runs_that_differ_in_the_seed_alone_share_a_row_with_their_mean(
    trained: Path, found: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Path(shutil.copytree(trained, tmp_path / "results"))
    main(["compare", "--out", str(results)])
    out = capsys.readouterr().out
    losses = {lr: [loss_of(record) for record in found if record.lr == lr] for lr in (0.01, 0.02)}
    mean = sum(losses[0.01]) / 3
    spread = math.sqrt(sum((loss - mean) ** 2 for loss in losses[0.01]) / 2)
    half = float(t.ppf(0.975, 2)) * spread / math.sqrt(3)
    assert f"{mean:.3f} ± {half:.3f}" in out
    assert f"{mean / math.log(2) / found[0].task_config['bytes_per_token']:.3f}" in out
    assert f" {losses[0.02][0]:.3f} " in out
    assert "lr 0.03" not in out

    (chart,) = (results / "figures").glob("c4-comparison-*.png")
    assert f"chart: {chart}, the table is the .csv beside it\n" in out
    assert f", {min(mean, losses[0.02][0]):.3f} nats per token\n" in out
    with chart.with_suffix(".csv").open() as file:
        first, second = sorted(csv.DictReader(file), key=lambda row: row["model"])
    assert (first["model"], second["model"]) == ("transformer, lr 0.01", "transformer, lr 0.02")
    assert (first["seeds"], first["remark"], second["remark"]) == ("3", "3 seeds", "")
    assert (first["tokens"], second["half_width"]) == (str(4 * 4 * 12), "")
    assert float(first["nats_per_token"]) == pytest.approx(mean, rel=1e-12)
    assert float(first["half_width"]) == pytest.approx(half, rel=1e-6)


def test_the_place_of_a_run_is_that_of_its_loss_among_finished_runs_of_as_many_tokens(found: list[Record]) -> None:
    ordered = sorted(found, key=loss_of)
    assert len(set(map(loss_of, ordered))) == 4
    diverged, longer = replace(found[0], metrics={}, diverged_step=3), replace(found[0], steps=5)
    places = [place_of(record, [*found, diverged, longer]) for record in ordered]
    assert places == ["1st of 4", "2nd of 4", "3rd of 4", "4th of 4"]


def test_a_diverged_seed_takes_the_mean_away(found: list[Record]) -> None:
    runs = [replace(r, metrics={}, diverged_step=3) if (r.lr, r.seed) == (0.01, 2) else r for r in found]
    table = loss_table(by_label(runs))
    assert table["model"].tolist() == ["transformer, lr 0.02", "transformer, lr 0.01"]
    assert math.isnan(table["nats_per_token"][1])
    assert table["remark"][1] == "3 seeds, seed 2 diverged at step 3"


def test_runs_of_other_settings_have_rows_of_their_own(found: list[Record]) -> None:
    block = replace(found[0], layer="transformer-no-qk-norm", fingerprint="other")
    same_name = replace(found[0], fingerprint="0123456789")  # another text of a user's module
    labels = by_label([*found, block, same_name])
    ends = [label for label in labels if label.endswith((" (01234567)", f" ({found[0].fingerprint[:8]})"))]
    assert len(labels) == 4
    assert [label for label in labels if "no-qk-norm" in label] == ["transformer-no-qk-norm, lr 0.01"]
    assert len(ends) == 2


def test_texts_whose_bytes_are_not_known_have_no_bits_per_byte(found: list[Record]) -> None:
    runs = [replace(r, metrics={"validation": {**r.metrics["validation"], "bits_per_byte": None}}) for r in found]
    assert loss_table(by_label(runs))["bits_per_byte"].isna().all()


def test_losses_on_less_of_the_validation_text_have_a_table_of_their_own(
    found: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    less = replace(found[-1], task_config={**found[-1].task_config, "validation_tokens": 24})
    for index, record in enumerate([*found, less]):
        records.write(tmp_path / "c4" / str(index), record)
    main(["compare", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert ("loss on 24 tokens" in out, "loss on 48 tokens" in out) == (True, True)
    assert len([*(tmp_path / "figures").glob("c4-comparison-*.png")]) == 2


def test_what_cannot_be_compared_is_one_line_and_status_2(tmp_path: Path, ended: Callable[..., str]) -> None:
    (tmp_path / "empty" / "c4").mkdir(parents=True)
    for out, said in (("empty", "no finished run in "), ("none", f"{tmp_path / 'none' / 'c4'} is not there")):
        assert ended(main, ["compare", "--out", str(tmp_path / out)]).startswith(f"error: {said}")
