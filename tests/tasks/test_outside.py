"""Tasks from outside the project: how they are found, and what is refused."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

from mixers.named import name_of
from runners.task_names import find_task
from tasks import TASKS
from tasks.base import IGNORE, Accuracy, Batch, Task
from tasks.contract import check_task
from tasks.parity import Parity


class Own(Task):
    """Bits that are repeated; ``change`` is a fault."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        length: int = 12
        train_examples: int = 20
        eval_examples: int = 20

    name = "own"
    vocab_size = 2
    answer_count = 2

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        inputs_ST = rng.integers(2, size=(n, self.config.length))
        return Batch(inputs_ST=inputs_ST, targets_ST=inputs_ST, scored_ST=np.full(inputs_ST.shape, True))

    def ceiling(self, split: str) -> Accuracy:
        return Accuracy(sequence=1.0, token=1.0)


class Lacking(Task):
    name = "lacking"


class WithoutLength(Own):
    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        size: int = 12


class OtherBackbone(Own):
    backbone = "nonsense"  # type: ignore[assignment]


class Sweeping(Own):
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = {"size": (1, 2)}


class WithoutDefault(Own):
    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        length: int


def test_a_class_and_its_import_path_name_a_task() -> None:
    assert find_task(f"{__name__}:Own") is Own
    assert name_of(Own, TASKS) == f"{__name__}:Own"
    assert name_of(Parity, TASKS) == name_of("parity", TASKS) == "parity"
    with pytest.raises(ValueError, match="has no Local, or another one by now: give the class that has this name"):
        name_of(type("Local", (Own,), {}), TASKS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "no task 'nope': choose from in-context-recall"),
        ("own_task.Own", "no task 'own_task.Own': write own_task:Own, with a colon before the class"),
        ("own_task.py", "no task 'own_task.py': give module and class, not the file: own_task:Class"),
        ("parity,mqar", "no task 'parity,mqar': separate names by spaces"),
        ("no_such_module:Own", "cannot import task 'no_such_module:Own': ModuleNotFoundError: No module named"),
        (f"{__name__}:Nope", "AttributeError: module .* has no attribute 'Nope'"),
        (f"{__name__}:find_task", "is no task: it must be a class derived from tasks.base.Task"),
        (f"{__name__}:Lacking", "is no whole task: it lacks answer_count, ceiling, sample, vocab_size"),
        (f"{__name__}:WithoutLength", "lacks length: call the setting so, or state train_length"),
        (f"{__name__}:OtherBackbone", "has the backbone 'nonsense': choose from language-model, autoencoder"),
        (f"{__name__}:Sweeping", "the sweeps of .* name 'size', which its Config lacks"),
        (f"{__name__}:WithoutDefault", "needs a Config whose settings all have defaults: .*'length'"),
    ],
)
def test_what_is_no_task_is_refused_in_a_line_that_says_why(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        find_task(name)
    assert "\n" not in str(error.value)


def faulty(**changes: Any) -> Task:
    """A task that returns other arrays, ceilings or lengths."""

    class Faulty(Own):
        def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
            right = super().sample(np.random.default_rng() if "random" in changes else rng, n, split)
            return Batch(**{**vars(right), **{k: f(right) for k, f in changes.items() if k.endswith("ST")}})

        def ceiling(self, split: str) -> Accuracy:
            return Accuracy(**changes.get("ceiling", {"sequence": 1.0, "token": 1.0}))

    return Faulty(Own.Config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"targets_ST": lambda b: b.inputs_ST[:, :5]},
            r"returned arrays of shapes \(4, 12\), \(4, 5\), \(4, 12\)",
        ),
        (
            {"inputs_ST": lambda b: b.inputs_ST.astype(float)},
            "sample returned inputs_ST of float64",
        ),
        ({"scored_ST": lambda b: b.inputs_ST}, "sample returned scored_ST of int64: it is bool"),
        ({"scored_ST": lambda b: b.inputs_ST < 0}, "test has sequences without a scored position|train has sequences"),
        ({"targets_ST": lambda b: b.inputs_ST + 1}, r"train has tokens outside of \[0, 2\)"),
        ({"targets_ST": lambda b: np.full_like(b.inputs_ST, IGNORE)}, "scores positions without a target"),
        ({"inputs_ST": lambda b: np.zeros_like(b.inputs_ST)}, "train and validation share 1 examples"),
        ({"inputs_ST": lambda b: b.inputs_ST.astype(np.uint8)}, "sample returned inputs_ST of uint8"),
        (
            {
                "inputs_ST": lambda b: b.inputs_ST[:3],
                "targets_ST": lambda b: b.inputs_ST[:3],
                "scored_ST": lambda b: b.scored_ST[:3],
            },
            "sample returned 3 of 4 sequences",
        ),
        ({"random": True}, "sample draws other inputs_ST of train from the same rng"),
        (
            {"targets_ST": lambda b: np.random.default_rng().integers(2, size=b.inputs_ST.shape)},
            "draws other targets_ST",
        ),
        ({"ceiling": {"sequence": 1.0, "token": 1.5}}, "the ceiling of train is"),
        ({"ceiling": {"sequence": 0.0, "token": 0.5}}, "the ceiling of train is"),
        ({"ceiling": {"sequence": 1.5, "token": 1.0}}, "the ceiling of train is"),
        ({"ceiling": {"sequence": 0.5, "token": 0.0}}, "the ceiling of train is"),
    ],
)
def test_a_task_that_breaks_a_rule_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_task(faulty(**changes))


def test_a_table_that_is_drawn_without_a_seed_is_refused() -> None:
    """Each process would have another one."""

    class WithTable(Own):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.table = np.random.default_rng().permutation(1000) % 2

        def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
            right = super().sample(rng, n, split)
            return replace(right, targets_ST=self.table[right.inputs_ST + np.arange(self.config.length)])

    with pytest.raises(ValueError, match=r"draws other targets_ST of train from the same rng: .* self\.stream"):
        check_task(WithTable(Own.Config()))


def of_length(length: int, rng: np.random.Generator, n: int, split: str) -> Batch:
    return Own(Own.Config(length=length)).sample(rng, n, split)


def unscored(rng: np.random.Generator, n: int, split: str) -> Batch:
    right = of_length(12, rng, n, split)
    return replace(right, scored_ST=right.scored_ST & (split != "further"))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        *(
            (
                lambda rng, n, split, wrong=wrong: of_length(
                    12, np.random.default_rng() if split == wrong else rng, n, split
                ),
                f"draws other inputs_ST of {wrong} from the same rng",
            )
            for wrong in ("train", "test")
        ),
        (unscored, "further has sequences without a scored position"),
        (partial(of_length, 14), "training sequences have 14 positions, where Config says 12: correct one"),
        (
            lambda rng, n, split: of_length(30 if split == "further" else 12, rng, n, split),
            "the longest sequences have 30 positions, where longest_length of Config says 12: correct one",
        ),
    ],
)
def test_each_split_is_checked_also_a_set_beyond_training(sample: Callable[..., Batch], message: str) -> None:
    kind = type("Wrong", (Own,), {"sample": lambda self, *of: sample(*of), "extrapolation_names": ("further",)})
    with pytest.raises(ValueError, match=message):
        check_task(kind(Own.Config()))


def test_sequences_may_be_solved_more_often_than_tokens() -> None:
    """Half of the sequences ask one thing that can be answered, the others nine things of which few can."""
    check_task(faulty(ceiling={"sequence": 0.5, "token": 0.2}))


@pytest.mark.parametrize(
    ("name", "count"), [("vocab_size", 2.0), *(("answer_count", count) for count in (0, 2.0, None))]
)
def test_sizes_are_whole_numbers(name: str, count: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is {count}: a whole number, at least 1"):
        check_task(type("Counts", (Own,), {name: count})(Own.Config()))


def test_the_number_of_answers_may_be_one_of_numpy() -> None:
    check_task(type("Counts", (Own,), {"answer_count": np.int64(2)})(Own.Config()))


@pytest.mark.parametrize("name", TASKS)
def test_the_tasks_of_the_project_keep_the_rules(name: str) -> None:
    kind = TASKS[name]
    check_task(kind(kind.Config(train_examples=8, eval_examples=8)))
