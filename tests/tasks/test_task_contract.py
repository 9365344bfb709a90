"""What every task must hold, whatever it asks for."""

import ast
import inspect
import random
import re
from dataclasses import FrozenInstanceError, fields, replace
from functools import cache
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
import torch

from tasks import TASKS
from tasks.base import FRESH, IGNORE, LONG, Accuracy, Batch, Split, SplitOverlapError, Task

pytestmark = pytest.mark.usefixtures("small_blocks")
SPLITS: tuple[Split, ...] = get_args(Split)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in TASKS},
    "copying, prefix-ngram": ("copying", {"variant": "prefix-ngram"}),
    "copying, suffix-ngram": ("copying", {"variant": "suffix-ngram"}),
    "modular-arithmetic, brackets": ("modular-arithmetic", {"brackets": True}),
}
LETTERS = {
    "copying": "abcdefghijklmnopqrstuvwxyz$|.*",
    "modular-arithmetic": "01234+-*()= ",
    "flip-flop": "01wri",
}
"""Characters of tokens in worked examples."""

# Origin: first generation, numpy >= 2.0 PCG64 streams. A change means that results before and after do not compare.
FINGERPRINTS = {
    "in-context-recall": "d3a65c4284f06afd0d9100644fa097a318c6da47e042d442eb640782f752c06f",
    "noisy-in-context-recall": "53f1e4482f41c56d7460ce1071c4443ba8b62cf71dd670a008e311d18d062696",
    "fuzzy-in-context-recall": "48d3f069153486f59fdfe99330bd8c99e2fc7b2c2030fe2d0c09c45c1f56b523",
    "selective-copying": "58eea80fef6222ae50ab65052e21e94d53bf9e8956d1163792dd1fd575cbcc8b",
    "compression": "72a50207e38d98d684edbdf0739d0a8a21f0f563eb9df06d6f56437d6c9c31cd",
    "memorization": "afd23513ca6318f8ac1e262b84038fe81beaa652fb6add3859dfd2888ee5abe2",
    "copying": "492a1efaf901d3339e0830a8a833b148ea6c5383ab69604389fe40a93005726f",
    "copying, prefix-ngram": "5006dc449c5879e4d6db653c601234c38389dbc55d107c91739232762ff9407e",
    "copying, suffix-ngram": "5b3ea3461402e97393eead71b59ec67f3a05430c8ef825d583b1a073fbee208a",
    "mqar": "3e08262b58a23c1decf5e83b177401607ad5d77275010a124ff46d6ebde06c73",
    "parity": "7d86f6380ea5b8f6cc4aeb0af1ed2e32d4db900479cf926e7d29cd319cfadcae",
    "s5-permutations": "a696acd5cf4d15a4116ea106322ba970bf9a2e16b5e887cc6cadaba9b1d642d0",
    "modular-arithmetic": "d09be742abb37d2741d0ed56d8ee0c1fc9ecf7a2dccda81f954f59c510bfe69f",
    "modular-arithmetic, brackets": "3737b3058af663e9f5e4fec5abcb526ea87cc8821c8d7303424abc22a0730ee9",
    "group-words": "362282eb512db9c5beea59ceb803a24bff55709aaec26927a9cfa937db8c75fc",
    "forgetting-mqar": "adb3552d047444e32fe4c7149872cfac102136a7ec95f2b45cf1599096f51f6a",
    "joint-keys": "95630e1df1d73923a115cf0c07ea3fec7ff60d6edd342de71c9141fd4eed42a1",
    "flip-flop": "2929f878579fe312b53fb7c8fb32a51d5ee8897477834913420660c60fad1729",
    "multi-hop": "7ac7cf65ab8e8496585cbaf597f80e54276f63a4cfc015fa301ac2744a1449cb",
}


def make(variant: str, **settings: Any) -> Task:
    name, fixed = VARIANTS[variant]
    return TASKS[name](TASKS[name].Config(**{**fixed, **settings}))


def small(variant: str, **settings: Any) -> Task:
    shorter = {"extrapolation_lengths": (30,)} if variant.startswith("copying") else {}
    return make(variant, **{"train_examples": 200, "eval_examples": 100, **shorter, **settings})


@cache
def read(variant: str) -> Task:
    """A small task of which tests read what another one has drawn."""
    return small(variant)


def everything(task: Task) -> dict[str, Batch]:
    return {**{name: task.split(name) for name in SPLITS}, **task.extrapolation_sets()}


def assert_equal(first: Batch, second: Batch) -> None:
    np.testing.assert_array_equal(first.inputs_ST, second.inputs_ST)
    np.testing.assert_array_equal(first.targets_ST, second.targets_ST)
    np.testing.assert_array_equal(first.scored_ST, second.scored_ST)


def test_registry_keys_are_the_names() -> None:
    assert {name: task.name for name, task in TASKS.items()} == {name: name for name in TASKS}


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_types_and_ranges(variant: str) -> None:
    task = read(variant)
    for name, batch in everything(task).items():
        assert len(batch) == (200 if name == "train" else 100)
        assert batch.inputs_ST.shape == batch.targets_ST.shape == batch.scored_ST.shape
        assert batch.inputs_ST.dtype == batch.targets_ST.dtype == np.int64
        assert batch.scored_ST.dtype == np.bool_
        assert batch.inputs_ST.min() >= 0
        assert batch.inputs_ST.max() < task.vocab_size
        targets = batch.targets_ST[batch.targets_ST != IGNORE]
        assert targets.min() >= 0
        assert targets.max() < task.vocab_size
        assert (batch.targets_ST[batch.scored_ST] != IGNORE).all()
        assert batch.scored_ST.any(axis=1).all(), "a sequence without a scored position is right by definition"


@pytest.mark.parametrize("variant", VARIANTS)
def test_lengths_are_known_before_anything_is_drawn(variant: str) -> None:
    """Memory is checked by them."""
    task = small(variant)
    lengths = {name: batch.inputs_ST.shape[1] for name, batch in everything(read(variant)).items()}
    assert task.config.train_length == lengths["train"]
    assert task.config.longest_length == max(lengths.values())


@pytest.mark.parametrize("variant", [name for name in VARIANTS if re.search("recall|^copying|flip-flop", name)])
def test_targets_are_the_next_inputs(variant: str) -> None:
    for batch in everything(read(variant)).values():
        has_target = batch.targets_ST != IGNORE
        assert not has_target[:, -1].any()
        next_ST = np.roll(batch.inputs_ST, -1, axis=1)
        np.testing.assert_array_equal(batch.targets_ST[has_target], next_ST[has_target])


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_config_gives_same_data_in_any_order_of_reading(variant: str) -> None:
    first, second = read(variant), small(variant)
    backwards = {name: second.batch(name) for name in reversed([*SPLITS, *second.extrapolation_names])}
    for name, batch in everything(first).items():
        assert_equal(batch, backwards[name])
        assert first.batch(name) is batch, "drawn once"
    assert first.fingerprint() == second.fingerprint()


@pytest.mark.parametrize("variant", VARIANTS)
def test_data_seed_changes_every_split(variant: str) -> None:
    first, second = everything(read(variant)), everything(small(variant, data_seed=1))
    for name in first:
        assert not np.array_equal(first[name].inputs_ST, second[name].inputs_ST)


@pytest.mark.parametrize("variant", VARIANTS)
def test_more_training_examples_begin_with_the_fewer_and_change_no_other_split(variant: str) -> None:
    few, many = (everything(small(variant, train_examples=count)) for count in (101, 209))
    train = many.pop("train")
    prefix = Batch(
        inputs_ST=train.inputs_ST[:101],
        targets_ST=train.targets_ST[:101],
        scored_ST=train.scored_ST[:101],
    )
    for name, batch in ({"train": prefix} | many).items():
        assert_equal(few[name], batch)


@pytest.mark.parametrize("variant", VARIANTS)
def test_global_random_state_is_neither_read_nor_changed(variant: str) -> None:
    def state() -> str:
        return repr((np.random.get_state(), random.getstate(), torch.get_rng_state().tolist()))  # noqa: NPY002

    drawn_under_another_state = read(variant).fingerprint()
    np.random.seed([*VARIANTS].index(variant))  # noqa: NPY002
    random.seed(variant)
    before = state()
    assert small(variant).fingerprint() == drawn_under_another_state
    assert state() == before


@pytest.mark.parametrize("variant", VARIANTS)
def test_fingerprint_is_stable(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # whole blocks
    found = make(variant).fingerprint()
    line = f'    "{variant}": "{found}",'
    assert FINGERPRINTS.get(variant) == found, f"a new task, or data changed on purpose: FINGERPRINTS needs\n{line}"


def test_a_long_training_split_counts_by_its_first_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # whole blocks
    found = [make("mqar", train_examples=n, data_seed=seed) for n, seed in ((LONG + 1, 0), (FRESH, 0), (FRESH, 1))]
    first, longer, other = (task.fingerprint() for task in found)
    assert first == longer != other
    assert not any("_train" in vars(task) for task in found)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bounds_are_shares_and_chance_is_below_the_ceiling(variant: str) -> None:
    task = read(variant)
    for name in everything(task):
        ceiling, chance = task.ceiling(name), task.chance(name)
        assert 0 <= chance.sequence <= chance.token <= 1
        assert 0 < ceiling.sequence <= ceiling.token <= 1
        assert chance.token < ceiling.token


@pytest.mark.parametrize("name", TASKS)
def test_every_setting_is_documented_and_frozen(name: str) -> None:
    config = TASKS[name].Config()
    documented = set()
    for owner in type(config).__mro__[:-1]:
        documented |= set(re.findall(r"^\s+(\w+): ", (inspect.getdoc(owner) or "").partition("Attributes:")[2], re.M))
    assert {field.name for field in fields(config)} <= documented
    with pytest.raises(FrozenInstanceError):
        config.data_seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", TASKS)
def test_sweeps_are_valid_settings_beside_the_baseline(name: str) -> None:
    config = TASKS[name].Config()
    for field, values in TASKS[name].sweeps.items():
        for value in values:
            assert getattr(replace(config, **{field: value}), field) == value != getattr(config, field)


@pytest.mark.parametrize("name", TASKS)
def test_a_ladder_is_six_rungs_of_data_that_ask_for_more_than_chance(name: str) -> None:
    for task in rungs(name, train_examples=100, eval_examples=100):
        assert task.chance("test").token < task.ceiling("test").token


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_rung_has_100_000_different_training_sequences_and_others_in_its_test_split(name: str) -> None:
    for task in rungs(name):
        assert len(set(map(bytes, task.split("train").inputs_ST))) >= 100_000


def rungs(name: str, **settings: int) -> list[Task]:
    kind = TASKS[name]
    found = kind.ladder.settings
    assert [*found] == sorted(found)
    assert len(found) == 6
    return [kind(kind.Config(**{**rung, **settings})) for rung in found.values()]


@pytest.mark.parametrize("name", TASKS)
def test_worked_example_of_the_docstring(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # whole blocks
    task_class = TASKS[name]
    doc = inspect.getdoc(task_class) or ""
    assert re.search(r"arXiv:\S|doi:\S|https?://|new here", doc), "cites its source, or says that it is new here"
    setting = re.search(r"``Config\((.*?)\)``", doc, re.S)
    assert setting is not None, "no worked example for a ``Config(...)``: see tasks/parity.py"
    pairs = (pair.split("=") for pair in re.split(r",\s*", setting[1]))
    values: dict[str, Any] = {key: ast.literal_eval(value) for key, value in pairs}
    task = task_class(task_class.Config(**values))
    rows = {
        row[0]: row[1:] for row in map(str.split, doc.splitlines()) if row and row[0] in ("inputs", "targets", "scored")
    }

    def spell(token: int) -> str:
        return "_" if token == IGNORE else LETTERS[name][token] if name in LETTERS else str(token)

    batch = task.split("test")
    assert rows["inputs"] == [spell(token) for token in batch.inputs_ST[0]]
    assert rows["targets"] == [spell(token) for token in batch.targets_ST[0]]
    assert rows["scored"] == ["^" if scored else "." for scored in batch.scored_ST[0]]


class Coin(Task):
    """A user's own task, too small for its splits: one token of a few sides."""

    sides: ClassVar[dict[str, int]] = {"train": 1000, "validation": 1000, "test": 1000, "extra": 1000}
    name = "coin"
    vocab_size = answer_count = 4000
    extrapolation_names = ("extra",)

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        offset = 0 if self.sides[split] < 1000 else 1000 * list(self.sides).index(split)
        tokens = offset + rng.integers(self.sides[split], size=(n, 1))
        return Batch(inputs_ST=tokens, targets_ST=tokens, scored_ST=np.ones((n, 1), dtype=np.bool_))

    def ceiling(self, split: str) -> Accuracy:
        return Accuracy(sequence=1.0, token=1.0)


@pytest.mark.parametrize(
    "pair", [("train", "validation"), ("train", "test"), ("validation", "test"), ("train", "extra")]
)
def test_overlap_of_two_splits_is_an_error_that_says_what_to_do(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Task.Config(train_examples=500, eval_examples=500)
    Coin(config).fingerprint()  # disjoint by construction
    monkeypatch.setattr(Coin, "sides", {**Coin.sides, **dict.fromkeys(pair, 2)})
    with pytest.raises(SplitOverlapError, match=f"^coin: {pair[0]} and {pair[1]} share 2 examples: .*; use .*$"):
        Coin(config).fingerprint()


class Blind(Coin):
    """Scores a position that has no target."""

    name = "blind"

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        return replace(super().sample(rng, n, split), targets_ST=np.full((n, 1), IGNORE))


def test_tokens_outside_of_the_vocabulary_and_scores_without_targets_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Task.Config(train_examples=500, eval_examples=500)
    with pytest.raises(ValueError, match=r"^blind: train scores positions without a target: correct sample$"):
        Blind(config).split("train")
    monkeypatch.setattr(Coin, "vocab_size", 3000)
    with pytest.raises(
        ValueError, match=r"^coin: extra has tokens outside of \[0, 3000\): correct sample or vocab_size$"
    ):
        Coin(config).fingerprint()


def test_packed_examples_count_as_overlap() -> None:
    lengths = {"min_length": 2, "max_length": 2, "eval_length": 2, "extrapolation_lengths": ()}
    settings: dict[str, Any] = {**lengths, "context": 14, "ngram": 1}
    with pytest.raises(SplitOverlapError, match=r"^copying: train and validation share"):
        make("copying", **settings).split("train")
    task = small("copying")
    letters = "".join("abcdefghijklmnopqrstuvwxyz$|.*"[token] for token in task.split("train").inputs_ST[0])
    found = {
        bytes("abcdefghijklmnopqrstuvwxyz$|.*".index(c) for c in text) for text in re.findall(r"\$(.*?)\.", letters)
    }
    assert len(found) > 4
    assert found <= task.examples(task.split("train"))


def test_tiny_tasks_are_rejected_for_overlap() -> None:
    for name, settings in {
        "in-context-recall": {"vocab_size": 4, "length": 4},
        "compression": {"vocab_size": 3, "length": 4},
        "memorization": {"vocab_size": 8, "length": 4},
        "mqar": {"vocab_size": 6, "length": 8, "pairs": 2},
        "parity": {"length": 20},
        "s5-permutations": {"length": 3},
        "modular-arithmetic": {"length": 10},
        "group-words": {"group": "Z2"},
        "forgetting-mqar": {"vocab_size": 8, "length": 10, "pairs": 2, "updates": 1},
        "joint-keys": {"vocab_size": 6, "length": 6, "grid": 1},
        "flip-flop": {"length": 16},
        "multi-hop": {"nodes": 4, "hops": 1, "queries": 1},
    }.items():
        with pytest.raises(SplitOverlapError):
            make(name, **settings).split("train")


@pytest.mark.parametrize("name", ["mqar", "parity", "s5-permutations", "group-words"])
def test_an_extrapolation_sequence_that_begins_with_a_training_sequence_is_an_overlap(name: str) -> None:
    task = small(name)
    train = task.split("train")
    twice = Batch(
        inputs_ST=np.concatenate([train.inputs_ST] * 2, axis=1),
        targets_ST=np.concatenate([train.targets_ST] * 2, axis=1),
        scored_ST=np.concatenate([train.scored_ST] * 2, axis=1),
    )
    assert task.examples(twice) == task.examples(train)
