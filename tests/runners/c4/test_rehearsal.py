"""What the rehearsal of a reference language model shows."""

from dataclasses import replace

import pytest
from torch import Tensor, nn

from runners.c4 import rehearsal
from runners.c4.model import build
from runners.c4.reference.experiments import EXPERIMENTS
from runners.c4.rehearsal import agree, trajectory

PARTS = [(name, *item) for name, row in EXPERIMENTS["ranking"].rows.items() for item in row.options.items()]


@pytest.mark.parametrize(("name", "option", "part"), PARTS)
def test_a_rehearsal_shows_what_parts_of_a_sequence_do(
    name: str, option: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With half and with twice the part, sequences of the same length have other losses."""
    config = replace(EXPERIMENTS["ranking"].config(name), width=16, heads=2)
    length = rehearsal.length(config, {option: part})
    assert 2 * part < length < 3 * part
    monkeypatch.setattr(rehearsal, "length", lambda *_: length)
    here, half, twice = (trajectory(config, {option: n}) for n in (part, part // 2, 2 * part))
    assert not agree(here, half)
    assert not agree(here, twice)


@pytest.mark.parametrize("name", ["transformer", "mamba2", "rt"])
def test_a_layer_without_parts_is_rehearsed_on_20_tokens(name: str) -> None:
    """As when the first model was trained (results/notes/2026-11-23.md)."""
    assert rehearsal.length(EXPERIMENTS["ranking"].config(name), {}) == 20


def test_a_users_layer_is_rehearsed_on_sequences_as_long_as_the_runs() -> None:
    config = replace(EXPERIMENTS["ranking"].config("transformer"), mixer=f"{__name__}:Own")
    assert rehearsal.length(config, {}) == config.seq_len == 512


class Own(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.map = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x)


def test_the_runs_of_a_model_share_one_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(rehearsal, "build", lambda *arguments: built.append(arguments) or build(*arguments))
    config = replace(EXPERIMENTS["ranking"].config("rt"), width=16, heads=2)
    runs = [replace(config, lr=lr, seed=seed) for lr, seed in ((3e-3, 0), (1e-2, 0), (1e-2, 1))]
    losses = [trajectory(run, {}) for run in runs]
    assert len(built) == 1
    assert losses[0] == losses[1] == losses[2]
    losses[0].clear()
    assert trajectory(config, {}) == losses[1]

    assert trajectory(config, {"block": 4}) != losses[1]
    assert trajectory(replace(config, beta2=0.99), {}) != losses[1]
    assert len(built) == 3


def test_the_transformer_trains_as_on_2026_11_23() -> None:
    """The losses were stored with the first reference language model (results/notes/2026-11-23.md)."""
    then = [5.446728008298437, 5.756670725014847, 5.047540194818689, 4.709131937684395, 4.521850725197291]
    assert agree(then, trajectory(EXPERIMENTS["ranking"].config("transformer"), {}))
