"""The training loop: evaluation, best parameters, resumption."""

import errno
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from mixers import MIXERS
from mixers.base import Shape
from mixers.models import BACKBONES, Backbone
from runners.files import save_tensors
from runners.interrupt import StoppedError
from runners.mad.training import ensemble as evaluate_module
from runners.mad.training import loop as train_module
from runners.mad.training.ensemble import Ensemble, Resident, evaluate
from runners.mad.training.loop import CurvePoint, Result, train
from runners.mad.training.protocol import Protocol, Run
from runners.mad.training.step import data_order
from tasks import TASKS
from tasks.base import Split
from tasks.metrics import Counts, count, score

CPU = torch.device("cpu")
TASK = TASKS["in-context-recall"](TASKS["in-context-recall"].Config(length=16, train_examples=40, eval_examples=30))
PROTOCOL = Protocol(batch_size=16, steps=20, evaluations=5)
RUNS = [Run(lr=1e-3, weight_decay=0.0, seed=0), Run(lr=5e-4, weight_decay=0.1, seed=1)]


def build() -> Backbone:
    mixer = MIXERS["transformer"]
    return BACKBONES[TASK.backbone](mixer, mixer.Config(heads=2), Shape(width=16, mlp_width=32), TASK.vocab_size)


def paths(folder: Path, count: int = 2) -> list[Path]:
    return [folder / f"{r}.safetensors" for r in range(count)]


def counted(parameters: dict[str, Tensor], split: Split) -> Counts:
    """Counts of one model on a whole split at once."""
    model, batch = build(), TASK.split(split)
    model.load_state_dict(parameters)
    with torch.no_grad():
        logits_STV = model(torch.from_numpy(batch.inputs_ST))
    return count(logits_STV[None], torch.from_numpy(batch.targets_ST), torch.from_numpy(batch.scored_ST))


class Killed(Exception):
    pass


def kill_at_step_12(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train with a checkpoint after each evaluation and die after that of the third."""
    monkeypatch.setattr(train_module, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)

    def kill(step: int, points: list[CurvePoint]) -> None:
        if step == 12:
            raise Killed

    with pytest.raises(Killed):
        train(build, TASK, PROTOCOL, RUNS, CPU, paths(folder), kill)


def test_evaluations_are_even_and_end_with_the_last_step() -> None:
    assert PROTOCOL.evaluation_steps(20) == [4, 8, 12, 16, 20]
    assert Protocol(evaluations=40).evaluation_steps(3) == [1, 2, 3]
    assert Protocol(batch_size=128, epochs=200).total_steps(12_800) == 20_000
    assert Protocol(batch_size=128, epochs=200).total_steps(800) == 1_400


def test_a_killed_training_goes_on_bitwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(build, TASK, PROTOCOL, RUNS, CPU, paths(tmp_path / "whole"))
    kill_at_step_12(tmp_path, monkeypatch)
    seen: list[int] = []
    before: list[list[int]] = []
    resumed = train(
        build,
        TASK,
        PROTOCOL,
        RUNS,
        CPU,
        paths(tmp_path),
        lambda step, points: seen.append(step),
        lambda step, curves: before.append([step, *(point.step for point in curves[0])]),
    )
    assert before == [[12, 4, 8, 12]]
    assert seen == [16, 20]
    assert_equal(whole, resumed)


def test_a_checkpoint_of_parameters_in_another_order_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an edit of the layer: the rows of all runs hold its parameters one after another."""

    def reordered() -> Backbone:
        model = build()
        parts = model.stack[0]._modules
        first = next(iter(parts))
        parts[first] = parts.pop(first)
        return model

    assert [n for n, _ in reordered().named_parameters()] != [n for n, _ in build().named_parameters()]
    whole = train(reordered, TASK, PROTOCOL, RUNS, CPU, [])
    kill_at_step_12(tmp_path, monkeypatch)
    again = train(reordered, TASK, PROTOCOL, RUNS, CPU, paths(tmp_path), resumed=lambda *_: pytest.fail("resumed"))
    assert_equal(whole, again)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_after_the_step_and_training_goes_on_bitwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    whole = train(build, TASK, PROTOCOL, RUNS, CPU, paths(tmp_path / "whole"))
    before = signal.getsignal(number)
    steps_taken: list[int] = []
    train_step = Ensemble.train_step

    def signalled(members: Ensemble, *batch: Tensor) -> Tensor:
        steps_taken.append(1)
        if len(steps_taken) == 6:
            os.kill(os.getpid(), number)
        return train_step(members, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(Ensemble, "train_step", signalled)
        with pytest.raises(StoppedError, match="after step 6:") as stop:
            train(build, TASK, PROTOCOL, RUNS, CPU, paths(tmp_path))
    assert stop.value.status == status
    assert signal.getsignal(number) == before
    resumed_at: list[int] = []
    resumed = train(build, TASK, PROTOCOL, RUNS, CPU, paths(tmp_path), resumed=lambda step, _: resumed_at.append(step))
    assert resumed_at == [6]
    assert_equal(whole, resumed)


def test_progress_is_told_between_evaluations_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = train(build, TASK, PROTOCOL, RUNS, CPU, paths(tmp_path / "silent"))
    monkeypatch.setattr(train_module, "SECONDS_BETWEEN_REPORTS", -1.0)
    seen: list[int] = []
    told = train(build, TASK, PROTOCOL, RUNS, CPU, paths(tmp_path), progressed=seen.append)
    assert seen == [step for step in range(1, 20) if step % 4]
    assert_equal(silent, told)


def test_a_checkpoint_of_a_step_with_an_evaluation_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else runs with one and runs without could be taken for equally far."""
    monkeypatch.setattr(train_module, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    seen: list[tuple[int, list[int]]] = []

    def spy(path: Path, tensors: object, info: dict[str, Any]) -> None:
        seen.append((info["step"], [point["step"] for point in info["curve"]]))

    monkeypatch.setattr(train_module, "save_tensors", spy)
    train(build, TASK, PROTOCOL, RUNS[:1], CPU, paths(tmp_path)[:1])
    assert {step for step, _ in seen} == set(range(1, 21))
    for step, curve in seen:
        assert curve == [evaluation for evaluation in (4, 8, 12, 16, 20) if evaluation <= step]


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        OSError("No space left on device"),
        SafetensorError("No space left on device"),
    ],
)
def test_a_full_disk_names_the_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr("runners.files.save_file", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        save_tensors(tmp_path / "model.safetensors", {}, {})
    assert str(tmp_path / "model.safetensors") in str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert not any(tmp_path.iterdir())


def test_seconds_are_those_of_training_and_its_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def pass_time(step: int, points: list[CurvePoint]) -> None:
        now[0] += 1000.0

    def take_step(members: Ensemble, *batch: Tensor) -> Tensor:
        now[0] += 1.0
        return train_step(members, *batch)

    train_step = Ensemble.train_step
    monkeypatch.setattr(train_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Ensemble, "train_step", take_step)
    for result in train(build, TASK, PROTOCOL, RUNS, CPU, paths(tmp_path), pass_time):
        assert (result.seconds, result.steps_per_second) == (20.0, 1.0)


def assert_equal(whole: Sequence[Result], resumed: Sequence[Result]) -> None:
    for a, b in zip(whole, resumed, strict=True):
        assert a.curve == b.curve
        assert (a.best_step, a.validation) == (b.best_step, b.validation)
        assert all(torch.equal(a.parameters[name], b.parameters[name]) for name in a.parameters)


def test_a_checkpointed_run_can_go_on_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(build, TASK, PROTOCOL, RUNS, CPU, paths(tmp_path / "whole"))
    kill_at_step_12(tmp_path, monkeypatch)
    (alone,) = train(build, TASK, PROTOCOL, RUNS[1:], CPU, paths(tmp_path)[1:])
    for a, b in zip(whole[1].curve, alone.curve, strict=True):
        assert b.train_loss == pytest.approx(a.train_loss, rel=1e-5)


def test_kept_parameters_are_those_of_the_best_evaluation_and_measured_again(tmp_path: Path) -> None:
    """Learning rates so high that training gets worse again: the last parameters are not the best."""
    runs = [Run(lr=lr, weight_decay=0.0, seed=0) for lr in (0.3, 3.0)]
    results = train(build, TASK, Protocol(batch_size=16, steps=6, evaluations=6), runs, CPU, paths(tmp_path))
    assert any(result.best_step < 6 for result in results)
    for result in results:
        scores = {point.step: point.validation.score for point in result.curve if point.validation}
        assert result.best_step == max(scores, key=scores.__getitem__)
        counts, metrics = counted(result.parameters, "validation"), result.validation
        expected = counts.sequence_accuracy, counts.token_accuracy, counts.loss, score(counts)
        got = metrics.sequence_accuracy, metrics.token_accuracy, metrics.loss, metrics.score
        assert got == pytest.approx([value.item() for value in expected], rel=1e-4)
        assert metrics.score == pytest.approx(max(scores.values()), abs=1e-6)


def test_an_evaluation_in_chunks_counts_every_sequence_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the scored positions are left out, though most of them have a target."""
    sevenfold = 7 * len(RUNS) * 16 * evaluate_module.ELEMENTS_PER_TOKEN
    monkeypatch.setitem(evaluate_module.ELEMENTS_PER_FORWARD, "cpu", sevenfold)
    sizes, logits = [], Ensemble.logits

    def recorded(self: Ensemble, params_RP: Tensor, tokens_BT: Tensor) -> Tensor:
        sizes.append(len(tokens_BT))
        return logits(self, params_RP, tokens_BT)

    monkeypatch.setattr(Ensemble, "logits", recorded)
    members = Ensemble(build, RUNS, PROTOCOL.optimizer, 20, CPU)
    validation = Resident.of(TASK.split("validation"), CPU)
    got = evaluate(members, members.params_RP, validation, TASK.vocab_size)
    assert sizes == [7, 7, 7, 7, 2]
    assert got.sequences_R.tolist() == [30, 30]
    for r in range(len(RUNS)):
        whole = counted({name: rows[r] for name, rows in members.named(members.params_RP).items()}, "validation")
        for name in ("sequences_R", "correct_sequences_R", "tokens_R", "correct_tokens_R"):
            assert getattr(got, name)[r] == getattr(whole, name)[0], name
        torch.testing.assert_close(got.loss_sum_R[r], whole.loss_sum_R[0], rtol=1e-5, atol=0)


def test_batches_follow_the_order_of_each_epoch_and_the_curve_has_their_mean_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 examples in batches of 16: the third batch of an epoch is filled up from the epoch's start."""
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    train_step = Ensemble.train_step

    def recorded(self: Ensemble, inputs_RBT: Tensor, targets_RBT: Tensor) -> Tensor:
        loss_R = train_step(self, inputs_RBT, targets_RBT)
        steps.append((inputs_RBT, targets_RBT, loss_R))
        return loss_R

    monkeypatch.setattr(Ensemble, "train_step", recorded)
    protocol, data = Protocol(batch_size=16, epochs=2, evaluations=3), TASK.split("train")
    results = train(build, TASK, protocol, RUNS, CPU, paths(tmp_path))
    assert len(steps) == 6
    for r, (run, result) in enumerate(zip(RUNS, results, strict=True)):
        seen = []
        for epoch in range(2):
            order = data_order(run.seed, epoch, 40)
            seen += [order[:16], order[16:32], np.concatenate([order[32:], order[:8]])]
        for (inputs_RBT, targets_RBT, _), here in zip(steps, seen, strict=True):
            np.testing.assert_array_equal(inputs_RBT[r], data.inputs_ST[here])
            np.testing.assert_array_equal(targets_RBT[r], data.targets_ST[here])
        losses = [loss_R[r].item() for _, _, loss_R in steps]
        means = [(first + second) / 2 for first, second in zip(losses[::2], losses[1::2], strict=True)]
        assert [point.train_loss for point in result.curve] == pytest.approx(means, rel=1e-6)


def test_a_diverging_run_says_at_which_step_and_the_other_is_as_without_it(tmp_path: Path) -> None:
    wild = Run(lr=1e38, weight_decay=0.0, seed=3)
    with_it = train(build, TASK, PROTOCOL, [*RUNS, wild], CPU, paths(tmp_path, 3))
    without = train(build, TASK, PROTOCOL, RUNS, CPU, paths(tmp_path / "without"))
    assert with_it[2].diverged_step is not None
    assert with_it[2].validation is None
    assert with_it[2].curve[-1].validation is None
    for a, b in zip(with_it, without, strict=False):
        assert [p.train_loss for p in a.curve] == pytest.approx([p.train_loss for p in b.curve], rel=1e-5)


def test_runs_that_have_all_diverged_are_not_trained_further_by_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_module, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    runs = [replace(run, lr=1e38) for run in RUNS]
    whole = train(build, TASK, PROTOCOL, runs, CPU, paths(tmp_path / "whole"))
    assert [len(result.curve) for result in whole] == [1, 1]

    def kill(step: int, points: list[CurvePoint]) -> None:
        raise Killed

    with pytest.raises(Killed):
        train(build, TASK, PROTOCOL, runs, CPU, paths(tmp_path), kill)
    assert_equal(whole, train(build, TASK, PROTOCOL, runs, CPU, paths(tmp_path), kill))


def test_every_example_is_seen_once_an_epoch_in_an_order_of_its_own() -> None:
    orders = [data_order(seed, epoch, 50).tolist() for seed in range(2) for epoch in range(2)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_training_does_not_read_the_test_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = type(TASK).split
    monkeypatch.setattr(type(TASK), "split", lambda self, name: read.append(name) or original(self, name))
    train(build, TASK, PROTOCOL, RUNS, CPU, paths(tmp_path))
    assert set(read) == {"train", "validation"}


@pytest.mark.slow
def test_one_rt_layer_recalls_where_one_transformer_layer_does_not(tmp_path: Path) -> None:
    task = TASKS["in-context-recall"](TASKS["in-context-recall"].Config(length=48, eval_examples=320))
    results: dict[str, Result] = {}
    for name in ("rt", "transformer"):
        mixer = MIXERS[name]

        def build(mixer: type = mixer) -> Backbone:
            return BACKBONES[task.backbone](mixer, mixer.Config(), Shape(), task.vocab_size)

        protocol = Protocol(batch_size=64, steps=250, evaluations=5)
        run = Run(lr=1e-3, weight_decay=0.0, seed=0)
        (results[name],) = train(build, task, protocol, [run], CPU, paths(tmp_path / name, 1))
    rt, transformer = results["rt"].validation, results["transformer"].validation
    assert rt.sequence_accuracy >= 0.95
    assert transformer.sequence_accuracy <= 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", MIXERS)
def test_gpu_every_layer_trains_in_one_graph(mixer: str, tmp_path: Path, device: torch.device) -> None:
    """Training and validation losses are those of a CPU in float32, up to what bfloat16 adds in 20 steps."""

    def build() -> Backbone:
        layer = MIXERS[mixer]
        return BACKBONES[TASK.backbone](layer, layer.Config(), Shape(width=64, mlp_width=128), TASK.vocab_size)

    ends = []
    for place in (CPU, device):
        results = train(build, TASK, PROTOCOL, RUNS, place, paths(tmp_path / place.type))
        ends.append([[p.train_loss, p.validation and p.validation.loss] for r in results for p in r.curve])
    torch.testing.assert_close(torch.tensor(ends[1]), torch.tensor(ends[0]), rtol=0, atol=0.03)


def test_a_run_ends_at_the_accuracy_that_it_is_trained_to_in_any_company() -> None:
    """The better of two runs ends before the other, and keeps what it has then."""
    whole = train(build, TASK, PROTOCOL, RUNS, CPU, [])
    accuracies = [[point.validation.token_accuracy for point in run.curve if point.validation] for run in whole]
    until = min(map(max, accuracies))
    for run, accuracy, ended in zip(
        whole, accuracies, train(build, TASK, PROTOCOL, RUNS, CPU, [], until=until), strict=True
    ):
        first = next(i for i, y in enumerate(accuracy) if y >= until)
        assert ended.curve == run.curve[: first + 1]
        assert ended.best_step <= ended.curve[-1].step
    assert len(train(build, TASK, PROTOCOL, RUNS, CPU, [], until=0.0)[0].curve) == 1
