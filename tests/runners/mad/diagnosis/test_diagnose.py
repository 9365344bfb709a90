"""Diagnosis of models whose right answers are known: the layer copies one token's embedding, or nothing of use."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import StratifiedGroupKFold
from torch import Tensor

from mixers.base import Layer, Shape, State
from mixers.models import BACKBONES, Backbone
from mixers.transformer import Transformer
from runners.mad.diagnosis.diagnose import Diagnosis, diagnose, draw_figure
from runners.mad.diagnosis.linear_probes import FOLDS, INVERSE_PENALTY, SEED, draw_sample, fit_probes
from runners.mad.diagnosis.outputs import (
    ConfusionMatrix,
    Profile,
    UnreadableError,
    count_confusions,
    predict,
    read_hidden_states,
    sequences_per_forward,
)
from runners.mad.training.ensemble import ELEMENTS_PER_FORWARD, ELEMENTS_PER_TOKEN, Ensemble
from runners.mad.training.protocol import Optimizer, Run
from tasks import TASKS
from tasks.base import IGNORE, Accuracy, BackboneName, Batch, Task, Tokens

WIDTH = 32


class Identity(Layer):
    """Hidden state of a position: the embedding of its token."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD

    def init_state(self, batch: int) -> State:
        return {}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        return x_BD, state


class Previous(Identity):
    """Hidden state of a position: the embedding of the token before it, around the corner at position 0."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.roll(1, dims=1)


class Bounded(Identity):
    """Like a layer with one learned vector for each position, of which there are 12."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + torch.zeros(12, 1)[: x_BTD.shape[1]]


class Noise(Identity):
    """Hidden state of a position: numbers that look random, and are others after another past."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        weight_T1 = torch.arange(1, x_BTD.shape[1] + 1)[:, None].sqrt()
        return torch.sin(50 * (weight_T1 * x_BTD).cumsum(dim=1))


RULES: dict[str, Callable[[Tokens, np.random.Generator, int], Tokens]] = {
    "same": lambda inputs_ST, rng, vocab: inputs_ST,
    "same at even positions": lambda inputs_ST, rng, vocab: np.where(
        np.arange(inputs_ST.shape[1]) % 2 == 0, inputs_ST, (inputs_ST + 1) % vocab
    ),
    "previous": lambda inputs_ST, rng, vocab: np.roll(inputs_ST, 1, axis=1),
    "random": lambda inputs_ST, rng, vocab: rng.integers(vocab, size=inputs_ST.shape),
    "mostly 0": lambda inputs_ST, rng, vocab: (rng.random(inputs_ST.shape) < 0.3).astype(np.int64),
    "constant": lambda inputs_ST, rng, vocab: np.full_like(inputs_ST, vocab - 1),
}


class Toy(Task):
    """Random tokens; the target follows a rule, and a random share of the positions from 2 on is scored."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        rule: str = "same"
        vocab_size: int = 4
        length: int = 12
        scored: float = 0.6
        extrapolation_lengths: tuple[int, ...] = ()
        train_examples: int = 1

    name = "toy"
    config: Config

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def answer_count(self) -> int:
        return self.config.vocab_size

    @property
    def extrapolation_names(self) -> tuple[str, ...]:
        return (
            *(f"length {length}" for length in self.config.extrapolation_lengths),
            *(["odd"] * bool(self.config.extrapolation_lengths)),
        )

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        length = int(split.removeprefix("length ")) if split.startswith("length ") else self.config.length
        inputs_ST = rng.integers(self.vocab_size, size=(n, length))
        scored_ST = (rng.random((n, length)) < self.config.scored) & (np.arange(length) >= 2)
        scored_ST[:, 2] = True
        targets_ST = np.where(scored_ST, RULES[self.config.rule](inputs_ST, rng, self.vocab_size), IGNORE)
        return Batch(inputs_ST=inputs_ST, targets_ST=targets_ST, scored_ST=scored_ST)

    def ceiling(self, split: str) -> Accuracy:
        return Accuracy(sequence=1.0, token=1.0)


class ToyCompression(Toy):
    """The same for an autoencoder."""

    backbone: ClassVar[BackboneName] = "autoencoder"


def build(task: Task, layer: type[Layer] = Identity, seed: int = 0, width: int = WIDTH) -> Backbone:
    torch.manual_seed(seed)
    shape = Shape(width=width, mlp_width=4)
    return BACKBONES[task.backbone](layer, layer.Config(), shape, task.vocab_size)


def repeat_token(model: Backbone) -> Backbone:
    """Make an ``Identity`` language model predict the token that it reads."""
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(*model.embedding.weight.shape))
        model.get_parameter("readout.weight").copy_(model.embedding.weight)
    return model


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Toy, Tokens, Diagnosis, Path]:
    """A model of random weights on a task with more than one length, its predictions and its diagnosis."""
    task = Toy(Toy.Config(rule="random", vocab_size=5, eval_examples=103, extrapolation_lengths=(9, 15)))
    model = build(task)
    folder = tmp_path_factory.mktemp("diagnosis") / "new" / "folder"
    diagnosis = diagnose(model, task, folder, "a title")
    predictions_ST = model(torch.from_numpy(task.split("test").inputs_ST)).argmax(-1).numpy()
    return task, predictions_ST, diagnosis, folder


def test_accuracies_by_position_and_answer_equal_brute_force(
    random_model: tuple[Toy, Tokens, Diagnosis, Path],
) -> None:
    task, predictions_ST, diagnosis, _ = random_model
    batch = task.split("test")
    by_position: dict[int, list[bool]] = {}
    by_answer: dict[int, list[bool]] = {}
    perfect = []
    for predictions, targets, scored in zip(predictions_ST, batch.targets_ST, batch.scored_ST, strict=True):
        right = [bool(predictions[t] == targets[t]) for t in range(len(targets)) if scored[t]]
        perfect.append(all(right))
        for ordinal, (t, one) in enumerate(zip(np.flatnonzero(scored).tolist(), right, strict=True), start=1):
            by_position.setdefault(t, []).append(one)
            by_answer.setdefault(ordinal, []).append(one)
    for profile, expected in ((diagnosis.by_position, by_position), (diagnosis.by_answer, by_answer)):
        assert profile.index == sorted(expected)
        assert profile.sequences == [len(expected[i]) for i in profile.index]
        assert profile.accuracy == pytest.approx([np.mean(expected[i]) for i in profile.index])
    every = [one for rights in by_position.values() for one in rights]
    assert diagnosis.scored_positions == len(every)
    assert diagnosis.accuracy.token == pytest.approx(np.mean(every))
    assert diagnosis.accuracy.sequence == pytest.approx(np.mean(perfect))
    by_luck = [0.2 ** int(scored.sum()) for scored in batch.scored_ST]
    assert diagnosis.chance.sequence == pytest.approx(np.mean(by_luck))
    assert diagnosis.chance.token == pytest.approx(0.2)


def test_confusion_matrix_and_macro_accuracy_equal_brute_force(
    random_model: tuple[Toy, Tokens, Diagnosis, Path],
) -> None:
    task, predictions_ST, diagnosis, _ = random_model
    batch = task.split("test")
    targets_N, predictions_N = batch.targets_ST[batch.scored_ST], predictions_ST[batch.scored_ST]
    expected = np.zeros((5, 5), dtype=int)
    for target, predicted in zip(targets_N, predictions_N, strict=True):
        expected[target, predicted] += 1
    confusion = diagnosis.confusion
    assert (confusion.classes, confusion.occurring) == ([0, 1, 2, 3, 4], 5)
    assert confusion.counts == expected.tolist()
    assert confusion.targets == expected.sum(axis=1).tolist()
    assert diagnosis.macro_accuracy == pytest.approx(balanced_accuracy_score(targets_N, predictions_N))


@pytest.mark.usefixtures("undrawn")
def test_extrapolation_sets_are_those_of_a_model_that_is_right_at_even_positions_only(tmp_path: Path) -> None:
    task = Toy(Toy.Config(rule="same at even positions", vocab_size=8, eval_examples=100, extrapolation_lengths=(6,)))
    diagnosis = diagnose(repeat_token(build(task)), task, tmp_path, "even")
    short = task.batch("length 6")
    assert diagnosis.extrapolation_sets["length 6"].token == pytest.approx(
        short.scored_ST[:, ::2].sum() / short.scored_ST.sum()
    )
    assert diagnosis.extrapolation_sets["length 6"].sequence == pytest.approx(
        1 - short.scored_ST[:, 1::2].any(axis=1).mean()
    )


def test_many_classes_are_reduced_to_the_most_missed() -> None:
    targets_N = np.arange(300).repeat(3)
    predictions_N = targets_N.copy()
    predictions_N[3 * 200 :] = 7
    predictions_N[-2:] = 1_000
    confusion = count_confusions(targets_N, predictions_N)
    assert confusion.occurring == 301
    assert confusion.classes == list(range(200, 264))
    assert np.shape(confusion.counts) == (64, 64)
    assert not np.any(confusion.counts)
    assert confusion.targets == [3] * 64


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_probe_finds_an_answer_that_only_the_layer_holds(scale: float) -> None:
    """Also where it lies in small numbers, whose weights would be penalised more."""
    task = Toy(Toy.Config(rule="previous", eval_examples=250))
    model = build(task, Previous)
    model.norm.gain.data *= scale
    batch = task.split("test")
    (single,) = fit_probes(model, task, batch, predict(model, batch)[0])
    assert single.hidden["mean"] > 0.99
    assert single.hidden["deviation"] < 0.02
    assert single.embedding["mean"] == pytest.approx(single.majority, abs=0.04)
    assert (single.position, single.classes, single.dropped_classes, single.converged) == (None, 4, 0, True)
    assert single.model < 0.6


def test_probe_is_a_regression_on_standardised_features_judged_on_other_sequences() -> None:
    """More features than examples: a regression knows by heart what it was fitted on, and nothing else."""
    task = Toy(Toy.Config(rule="mostly 0", eval_examples=25))
    model, batch = build(task, Noise, width=512), task.split("test")
    (single,) = fit_probes(model, task, batch, np.ones_like(batch.inputs_ST))
    sample, answers_N = draw_sample(batch), batch.targets_ST[batch.scored_ST]
    hidden_ND, _ = read_hidden_states(model, batch, sample.sequence_N, sample.position_N)
    shares = []
    folds = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=SEED)
    for fitted, judged in folds.split(hidden_ND, sample.answer_N, sample.sequence_N):
        assert not set(sample.sequence_N[fitted]) & set(sample.sequence_N[judged])
        mean_D, deviation_D = hidden_ND[fitted].mean(axis=0), hidden_ND[fitted].std(axis=0)
        scaled_ND = (hidden_ND - mean_D) / deviation_D
        regression = LogisticRegression(C=INVERSE_PENALTY, max_iter=200).fit(scaled_ND[fitted], answers_N[fitted])
        assert regression.score(scaled_ND[fitted], answers_N[fitted]) > 0.9
        shares.append(float(np.mean(regression.predict(scaled_ND[judged]) == answers_N[judged])))
    assert single.hidden["mean"] == pytest.approx(fmean(shares), rel=1e-12)
    assert single.hidden["mean"] < 0.8
    assert single.hidden["deviation"] == pytest.approx(stdev(shares), rel=1e-9)
    assert single.majority == pytest.approx(np.mean(answers_N == 0))
    assert single.model == pytest.approx(np.mean(answers_N == 1))


@pytest.mark.usefixtures("undrawn")
def test_autoencoder_is_probed_position_by_position(tmp_path: Path) -> None:
    task = ToyCompression(ToyCompression.Config(rule="previous", eval_examples=200, scored=1.0))
    probes = diagnose(build(task, Previous), task, tmp_path, "compression").probes
    assert [single.position for single in probes] == [2, 4, 6, 9, 11]
    # The encoder's vector is the embedding of the last token but one: the answer at the last position and nowhere else.
    accuracies = [single.hidden["mean"] for single in probes if single.hidden is not None]
    assert max(accuracies[:-1]) < 0.4
    assert accuracies[-1] == 1.0
    assert all(single.embedding is not None and single.embedding["mean"] < 0.4 for single in probes)


@pytest.mark.usefixtures("undrawn")
def test_impossible_probe_is_said_so(tmp_path: Path) -> None:
    task = Toy(Toy.Config(rule="constant", eval_examples=50))
    diagnosis = diagnose(build(task), task, tmp_path, "constant")
    (single,) = diagnosis.probes
    assert "fewer than 2 answers" in str(single.impossible)
    assert (single.hidden, single.majority) == (None, None)
    texts = [text.get_text() for axes in draw_figure(diagnosis).axes for text in axes.texts]
    assert any("not possible" in text for text in texts)


@pytest.mark.usefixtures("undrawn")
def test_a_diagnosis_draws_no_point_of_few_sequences_and_no_row_of_a_token_that_is_no_target(tmp_path: Path) -> None:
    task = Toy(Toy.Config(rule="constant", eval_examples=50))
    few = Profile(index=[0, 1, 2], accuracy=[1.0, 0.5, 0.0], sequences=[50, 20, 19])
    confusion = ConfusionMatrix(occurring=2, classes=[3, 4], counts=[[0, 0], [1, 9]], targets=[0, 10])
    diagnosis = diagnose(build(task), task, tmp_path, "few")
    along, matrix, *_ = draw_figure(replace(diagnosis, by_position=few, by_answer=few, confusion=confusion)).axes
    assert [*along.lines[0].get_xdata()] == [0, 1]
    assert matrix.images[0].get_array().tolist() == [[0.1, 0.9]]
    assert [label.get_text() for label in matrix.get_yticklabels()] == ["4"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("name", "trained"), [("parity", 24), ("copying", 9), ("fuzzy-in-context-recall", None)])
def test_extrapolation_sets_stand_beside_chance_and_the_training_length(
    tmp_path: Path, name: str, trained: int | None
) -> None:
    settings: dict[str, dict[str, Any]] = {"parity": {"length": 24}, "copying": {"max_length": 9}}
    task = TASKS[name](TASKS[name].Config(train_examples=4, eval_examples=40, **settings.get(name, {})))
    diagnosis = diagnose(build(task), task, tmp_path, name)
    assert diagnosis.trained_length == trained
    assert diagnosis.extrapolation_chances == {
        further: task.chance(further) for further in diagnosis.extrapolation_sets
    }
    (axes,) = (a for a in draw_figure(diagnosis).axes if a.get_title() == "Extrapolation sets")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels.count("chance") == 1
    assert (f"longest in training: {trained}" in labels) == (trained is not None)
    if trained is not None:
        lines = {line.get_label(): line for line in axes.lines}
        chances = [
            task.chance(further).token for further in diagnosis.extrapolation_sets if further.startswith("length ")
        ]
        assert list(lines["chance"].get_ydata()) == chances
        assert list(lines[f"longest in training: {trained}"].get_xdata()) == [trained, trained]
        assert axes.get_xlim()[0] < trained


def test_sample_is_bounded_and_drops_rare_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Toy(Toy.Config(rule="same", vocab_size=3, eval_examples=300))
    batch = task.split("test")
    targets_ST = batch.targets_ST.copy()
    # An answer that is frequent, but in fewer sequences than there are folds.
    targets_ST[: FOLDS - 1][batch.scored_ST[: FOLDS - 1]] = 7
    rare = Batch(inputs_ST=batch.inputs_ST, targets_ST=targets_ST, scored_ST=batch.scored_ST)
    whole = draw_sample(rare)
    assert whole.dropped_classes == 1
    assert set(whole.answer_N.tolist()) == {0, 1, 2}
    assert len(whole.answer_N) == batch.scored_ST[FOLDS - 1 :].sum()
    assert (whole.answer_N == targets_ST[whole.sequence_N, whole.position_N]).all()
    monkeypatch.setattr("runners.mad.diagnosis.linear_probes.MAX_EXAMPLES", 100)
    monkeypatch.setattr("runners.mad.diagnosis.linear_probes.MAX_CLASSES", 2)
    part = draw_sample(rare)
    assert len(part.answer_N) <= 100
    assert part.dropped_classes == 2
    assert (draw_sample(rare, position=2).position_N == 2).all()


def test_examples_come_from_all_of_the_pool_and_from_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runners.mad.diagnosis.linear_probes.MAX_EXAMPLES", 100)
    monkeypatch.setattr("runners.mad.diagnosis.linear_probes.POOL", 400)
    batch = Toy(Toy.Config(rule="same", eval_examples=100)).split("test")
    sample, number_ST = draw_sample(batch), batch.scored_ST.cumsum().reshape(batch.scored_ST.shape)
    number_N = number_ST[sample.sequence_N, sample.position_N]
    assert len(set(number_N.tolist())) == 100
    assert number_ST.max() > 600
    quarters = np.bincount((number_N - 1) // 100)
    assert len(quarters) == 4
    assert quarters.min() > 10


def test_batches_do_not_change_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Toy(Toy.Config(rule="previous", eval_examples=60))
    model, batch = build(task, Previous), task.split("test")
    sample = draw_sample(batch)
    hidden_ND, embedding_ND = read_hidden_states(model, batch, sample.sequence_N, sample.position_N)
    tokens_ST = torch.from_numpy(batch.inputs_ST)
    assert np.array_equal(hidden_ND, model.hidden(tokens_ST).detach().numpy()[sample.sequence_N, sample.position_N])
    assert np.array_equal(
        embedding_ND, model.embedding(tokens_ST).detach().numpy()[sample.sequence_N, sample.position_N]
    )
    predictions_ST, accuracy = predict(model, batch)
    monkeypatch.setitem(ELEMENTS_PER_FORWARD, "cpu", 7 * 12 * ELEMENTS_PER_TOKEN)
    assert sequences_per_forward(model, batch) == 7
    assert np.array_equal(read_hidden_states(model, batch, sample.sequence_N, sample.position_N)[0], hidden_ND)
    assert np.array_equal(predict(model, batch)[0], predictions_ST)
    assert predict(model, batch)[1] == accuracy


def test_what_is_read_is_in_the_precision_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU's precision set to that of GPUs."""
    task = Toy(Toy.Config(eval_examples=8))
    run = Run(lr=1e-3, weight_decay=0.0, seed=0)
    members = Ensemble(partial(build, task, Transformer), [run], Optimizer(), 1, torch.device("cpu"))
    model, batch = members.model, task.split("test")
    tokens_ST = torch.from_numpy(batch.inputs_ST)
    every_N, first_N = np.arange(8), np.zeros(8, dtype=np.int64)
    with torch.no_grad():
        single_SD = model.hidden(tokens_ST)[:, 0]
        monkeypatch.setattr("mixers.ops.numerics.product_precision", lambda device: "bfloat16")
        logits_RSTV = members.logits(members.params_RP, tokens_ST)
        with torch.autocast("cpu", torch.bfloat16):
            hidden_SD = model.hidden(tokens_ST)[:, 0]
    assert logits_RSTV.dtype == torch.bfloat16
    assert not torch.equal(hidden_SD, single_SD)
    assert np.array_equal(read_hidden_states(model, batch, every_N, first_N)[0], hidden_SD.double().numpy())
    outputs: list[Tensor] = []
    model.register_forward_hook(lambda module, args, output: outputs.append(output))
    predict(model, batch)
    assert torch.equal(outputs[0], logits_RSTV[0])


def test_files_are_whole_and_equal_each_time(random_model: tuple[Toy, Tokens, Diagnosis, Path], tmp_path: Path) -> None:
    task, _, diagnosis, folder = random_model
    names = ["diagnosis.json", "diagnosis.png"]
    assert sorted(path.name for path in folder.iterdir()) == names
    content = json.loads((folder / names[0]).read_text())
    assert content["title"] == "a title"
    assert content["confusion"]["counts"] == diagnosis.confusion.counts
    assert content["probes"][0]["hidden"] == diagnosis.probes[0].hidden
    assert content["accuracy"] == {"sequence": diagnosis.accuracy.sequence, "token": diagnosis.accuracy.token}
    assert list(content["extrapolation_sets"]) == ["length 9", "length 15", "odd"]
    assert (folder / names[1]).read_bytes().startswith(b"\x89PNG")
    model = build(task)
    assert diagnose(model, task, tmp_path, "a title") == diagnosis
    assert all((tmp_path / name).read_bytes() == (folder / name).read_bytes() for name in names)
    assert model.training


def test_diverged_model_is_an_error_and_leaves_no_files(tmp_path: Path) -> None:
    task = Toy(Toy.Config(eval_examples=8))
    model = build(task)
    torch.nn.init.constant_(model.embedding.weight, torch.nan)
    with pytest.raises(UnreadableError, match="not finite"):
        diagnose(model, task, tmp_path, "diverged")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("undrawn")
def test_sets_that_a_layer_fails_on_are_left_out_with_the_reason(tmp_path: Path) -> None:
    task = Toy(Toy.Config(eval_examples=8, extrapolation_lengths=(9, 15)))
    diagnosis = diagnose(build(task, Bounded), task, tmp_path, "bounded")
    assert list(diagnosis.extrapolation_sets) == ["length 9", "odd"]
    (reason,) = diagnosis.unreadable_sets.values()
    assert reason.startswith("RuntimeError: The size of tensor a (15) must match")
    assert json.loads((tmp_path / "diagnosis.json").read_text())["unreadable_sets"] == {"length 15": reason}
    assert any("the model fails on: length 15" in axes.get_xlabel() for axes in draw_figure(diagnosis).axes)


@pytest.mark.parametrize(("error", "raised"), [(KeyError("size"), UnreadableError), (KeyboardInterrupt(), None)])
def test_what_a_layer_raises_is_one_line_and_interrupts_pass(
    tmp_path: Path, error: BaseException, raised: type[Exception] | None
) -> None:
    class Faulty(Identity):
        def forward(self, x_BTD: Tensor) -> Tensor:
            raise error

    task = Toy(Toy.Config(eval_examples=8))
    model, batch = build(task, Faulty), task.split("test")
    for call in (
        lambda: diagnose(model, task, tmp_path, "faulty"),
        lambda: read_hidden_states(model, batch, np.arange(8), np.zeros(8, dtype=np.int64)),
    ):
        with pytest.raises(raised or type(error)) as caught:
            call()
        assert raised is None or str(caught.value) == "KeyError: 'size'"
    assert not list(tmp_path.iterdir())
