"""The size of the gradient by distance: against whole Jacobians, and as a command."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mixers import MIXERS
from runners.c4.config import Config
from runners.c4.data.sources import find_files, read
from runners.c4.evaluation.gradients import first_windows, gradient_sizes, main, mean_by_distance
from runners.c4.export import export, load_model
from runners.c4.model import build
from tests.runners.c4.runs import configured, folder_of, run

VOCAB, LENGTH = 20, 7


@pytest.mark.parametrize("mixer", ["rt", "transformer", "gla"])
def test_the_sizes_are_those_of_the_whole_jacobian(mixer: str) -> None:
    options = {"implementation": "naive"} if mixer == "rt" else {}
    config = Config(mixer=mixer, width=8, mlp_width=12, heads=2, layers=2)
    plain, model = (build(config, given, VOCAB).double() for given in (options, {}))
    tokens_BT = torch.randint(VOCAB, (3, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    targets = [1, 4, 6]
    losses_BP, sizes_BPT = gradient_sizes(model, tokens_BT, targets)

    for row, tokens_T in enumerate(tokens_BT):

        def losses(x_TD: torch.Tensor, tokens_T: torch.Tensor = tokens_T) -> torch.Tensor:
            hidden_TD = plain.norm(plain.layers(x_TD[None]))[0]
            return F.cross_entropy(plain.readout(hidden_TD), tokens_T[1:], reduction="none")

        x_TD = plain.embedding(tokens_T[:-1])
        jacobian_TTD = torch.autograd.functional.jacobian(losses, x_TD)
        expected_TT = torch.linalg.vector_norm(jacobian_TTD, dim=-1)
        torch.testing.assert_close(losses_BP[row], losses(x_TD)[targets])
        torch.testing.assert_close(sizes_BPT[row], expected_TT[targets], rtol=1e-7, atol=1e-12)
        assert (sizes_BPT[row, 0, :2] > 0).all()
        assert (sizes_BPT[row, 0, 2:] == 0).all()  # nothing after the target


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_a_target_has_the_gradient_that_it_has_alone(mixer: str, device: str) -> None:
    """Backward passes through one graph one after another: none may change what the next one reads."""
    model = build(Config(mixer=mixer, width=32, mlp_width=48, heads=2, layers=2), {}, VOCAB).to(device)
    model.requires_grad_(False)
    tokens_BT = torch.randint(VOCAB, (3, 19), generator=torch.Generator().manual_seed(0)).to(device)
    targets = [1, 9, 17]
    _, sizes_BPT = gradient_sizes(model, tokens_BT, targets)
    for p, target in enumerate(targets):
        _, alone_B1T = gradient_sizes(model, tokens_BT, [target])
        torch.testing.assert_close(sizes_BPT[:, p], alone_B1T[:, 0], rtol=1e-5, atol=1e-6)


def test_the_mean_at_a_distance_is_over_the_targets_that_have_it() -> None:
    sizes_PT = np.array([[3.0, 5.0, 0.0, 0.0], [2.0, 4.0, 6.0, 8.0]])
    assert mean_by_distance(sizes_PT, [1, 3]).tolist() == [(5 + 8) / 2, (3 + 6) / 2, 4, 2]


@pytest.fixture(scope="module")
def trained(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of an RT and a Transformer."""
    configs = [configured(texts, tmp_path_factory.mktemp("out"), mixer=mixer) for mixer in ("rt", "transformer")]
    for config in configs:
        run(config)
    return [folder_of(config) for config in configs]


@pytest.mark.usefixtures("drawn")
def test_the_command_measures_the_first_windows_with_runs_and_exported_models(
    trained: list[Path], texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(trained[0], tmp_path / "my_model")
    checkpoints = [*map(str, trained), str(tmp_path / "my_model"), str(trained[0])]  # the last is named before
    size = ["--sequences", "3", "--targets", "99", "--batch-size", "2", "--out", str(tmp_path / "out")]
    main([*checkpoints, "--data", str(texts), *size, "--device", "cpu"])
    assert (tmp_path / "out" / "gradients.png").stat().st_size > 10_000
    rt, transformer, exported = json.loads((tmp_path / "out" / "gradients.json").read_text())
    assert {**exported, "checkpoint": rt["checkpoint"]} == rt
    assert (rt["mixer"], transformer["mixer"], rt["sequences"], rt["targets"]) == ("rt", "transformer", 3, [*range(12)])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2", "4", "8", "11"]
    shown = transformer["gradient"][8] / transformer["gradient"][0]
    assert float(rows[4][2]) == pytest.approx(shown, rel=1e-2)

    # Every position is a target, and all sequences are in one batch.
    model, tokenizer = load_model(trained[1])
    documents = (text for _, text in read(find_files([str(texts)])["validation"], [], 0))
    tokens_BT = first_windows(documents, tokenizer, 3, 12)
    losses_BT = F.cross_entropy(model(tokens_BT[:, :-1]).mT, tokens_BT[:, 1:], reduction="none")
    assert transformer["loss"] == pytest.approx(losses_BT.mean().item(), rel=1e-5)
    _, sizes_BTT = gradient_sizes(model, tokens_BT, range(12))
    for d in (0, 1, 7, 11):
        means = [torch.diagonal(sizes_TT, -d).mean().item() for sizes_TT in sizes_BTT]
        half_width = 4.302653 * np.std(means, ddof=1) / 3**0.5  # t, 2 degrees
        assert transformer["gradient"][d] == pytest.approx(np.mean(means), rel=1e-4)
        assert transformer["half_width"][d] == pytest.approx(half_width, rel=1e-4)


def test_windows_follow_each_other_and_texts_end(trained: list[Path]) -> None:
    _, tokenizer = load_model(trained[0])
    end = tokenizer.token_to_id("</s>")
    ids = tokenizer.encode("kan lor mis").ids
    windows = first_windows(iter(["kan lor mis"] * 3), tokenizer, 3, 4)
    assert windows.tolist() == [[end, *ids, end], [end, *ids, end], [end, *ids, end]]
    with pytest.raises(ValueError, match=r"^the validation text fills 3 sequences of 4 tokens: lower --sequences 4$"):
        first_windows(iter(["kan lor mis"] * 3), tokenizer, 4, 4)
