"""Independent solvers reach exactly the ceiling; uniform guessing reaches the chance floor."""

from itertools import permutations
from typing import Any

import numpy as np
import pytest

from tasks import TASKS
from tasks.base import Accuracy, Batch, Task, Tokens
from tasks.memorization import Memorization
from tests.tasks.solvers import SOLVERS, Answers

pytestmark = pytest.mark.usefixtures("small_blocks")
SMALL = {"train_examples": 200, "eval_examples": 200}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in TASKS),
    ("noisy-in-context-recall", {"noise_fraction": 0.8, "vocab_size": 48}),
    ("noisy-in-context-recall", {"noise_fraction": 0.0, "length": 10}),
    ("in-context-recall", {"vocab_size": 128, "length": 256}),
    ("fuzzy-in-context-recall", {"vocab_size": 17, "max_motif": 2}),
    ("fuzzy-in-context-recall", {"vocab_size": 128, "length": 256}),
    ("fuzzy-in-context-recall", {"vocab_size": 9, "max_motif": 1, "length": 50}),
    ("selective-copying", {"tokens_to_copy": 96}),
    ("selective-copying", {"tokens_to_copy": 15, "length": 32}),
    ("memorization", {"vocab_size": 257}),
    ("memorization", {"vocab_size": 33, "length": 15, "key_pairs": 100}),
    ("copying", {"variant": "prefix-ngram"}),
    ("copying", {"variant": "suffix-ngram"}),
    ("copying", {"variant": "prefix-ngram", "min_length": 2, "ngram": 1, "extrapolation_lengths": (21,)}),
    ("copying", {"variant": "suffix-ngram", "context": 43}),
    ("mqar", {"vocab_size": 12, "length": 22, "pairs": 5, "extrapolation_factors": (3,)}),
    ("mqar", {"alpha": 1.0, "pairs": 32, "extrapolation_factors": ()}),
    ("mqar", {"vocab_size": 64, "length": 64, "random_filler": True, "mixture": ((16, 3), (16, 3), (40, 10))}),
    ("parity", {"length": 33, "extrapolation_factors": (5,)}),
    ("parity", {"min_length": 3, "last_only": True}),
    ("s5-permutations", {"degree": 3, "length": 24}),
    ("s5-permutations", {"degree": 4, "extrapolation_factors": ()}),
    ("modular-arithmetic", {"brackets": True, "min_length": 5, "length": 33, "modulus": 10}),
    ("modular-arithmetic", {"min_length": 20, "length": 20, "modulus": 7}),
    ("modular-arithmetic", {"min_length": 2, "length": 48, "expressions": 4, "extrapolation_factors": (3,)}),
    ("group-words", {"group": "A4xZ5"}),
    ("group-words", {"group": "Z7", "copies": 3}),
    ("group-words", {"group": "S3", "copies": 2, "begin": True}),
    ("forgetting-mqar", {"vocab_size": 20, "length": 25, "pairs": 4, "updates": 4, "alpha": 1.0}),
    ("forgetting-mqar", {"vocab_size": 32, "length": 40, "pairs": 3, "updates": 8}),
    ("joint-keys", {"vocab_size": 40, "length": 64, "grid": 3}),
    ("flip-flop", {"length": 64, "ignore": 0.0}),
]


def ids(setting: Any) -> str:
    return setting if isinstance(setting, str) else ",".join(f"{key}={value}" for key, value in setting.items())


def solve(task: Task, batch: Batch) -> list[Answers]:
    assert task.name in SOLVERS, "write a solver into tests/tasks/solvers.py"
    solver, train = SOLVERS[task.name], task.split("train")
    answers = [solver(row, task.config, train) for row in batch.inputs_ST.tolist()]
    scored = [np.flatnonzero(scored_T).tolist() for scored_T in batch.scored_ST]
    if getattr(task.config, "random_filler", False):  # which repeats a key by chance
        answers = [{at: row[at] for at in asked} for row, asked in zip(answers, scored, strict=True)]
    assert [sorted(row) for row in answers] == scored, "the description tells which positions are scored"
    return answers


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=ids)
def test_solver_reaches_exactly_the_ceiling(name: str, settings: dict[str, Any]) -> None:
    # Memorization keeps its own number of training examples: with it, every key is shown.
    counts = {"eval_examples": 100} if name == "memorization" else SMALL
    task = TASKS[name](TASKS[name].Config(**{**counts, **settings}))
    for split in ("train", "validation", "test", *task.extrapolation_names):
        batch = task.batch(split)
        for row, targets in zip(solve(task, batch), batch.targets_ST.tolist(), strict=True):
            for position, candidates in row.items():
                assert candidates == [targets[position]]
        assert task.ceiling(split) == Accuracy(sequence=1.0, token=1.0)


@pytest.mark.parametrize("train_examples", [1, 2, 3])
def test_memorization_ceiling_is_the_mean_over_all_guesses_of_the_unknown_keys(train_examples: int) -> None:
    config = Memorization.Config(vocab_size=14, length=8, train_examples=train_examples, eval_examples=5)
    task = Memorization(config)
    for split in ("train", "validation", "test"):
        batch = task.batch(split)
        answers = solve(task, batch)
        keys = batch.inputs_ST[:, 0::2].tolist()
        targets = batch.targets_ST[:, 1::2].tolist()
        candidates = {key: row[2 * i + 1] for row, ks in zip(answers, keys, strict=True) for i, key in enumerate(ks)}
        unknown = [key for key in candidates if len(candidates[key]) > 1]
        unused = candidates[unknown[0]] if unknown else []
        sequence, token = [], []
        for guess in permutations(unused, len(unknown)):
            values = {key: values[0] for key, values in candidates.items()} | dict(zip(unknown, guess, strict=True))
            right = np.array([[values[key] for key in ks] for ks in keys]) == targets
            sequence.append(right.all(axis=1).mean())
            token.append(right.mean())
        ceiling = task.ceiling(split)
        assert ceiling.sequence == pytest.approx(np.mean(sequence), rel=1e-12)
        assert ceiling.token == pytest.approx(np.mean(token), rel=1e-12)
        assert (ceiling.token < 1) == bool(unknown)


@pytest.mark.parametrize(
    ("settings", "sequence", "token"),
    [
        ({"vocab_size": 256}, 1.0, 1.0),
        ({"vocab_size": 2048}, 0.7373, 0.9815),
        ({"vocab_size": 4096}, 0.1005, 0.8650),
        ({"vocab_size": 8192}, 0.0007, 0.6325),
        ({"vocab_size": 257, "length": 96, "key_pairs": 8192}, 0.0, 0.6350),  # of 8,192 draws, values one of 128
    ],
)
def test_memorization_states_what_the_training_examples_never_show(
    settings: dict[str, int], sequence: float, token: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # whole blocks
    # 4,096 keys drawn with replacement out of K leave out a share of about exp(-4096 / K).
    task = Memorization(Memorization.Config(**settings, eval_examples=400))
    ceiling = task.ceiling("test")
    assert ceiling.token == pytest.approx(token, abs=0.01)
    assert ceiling.sequence == pytest.approx(sequence, abs=0.05)
    answers = solve(task, task.split("test"))
    right = [[1 / len(candidates) for candidates in row.values()] for row in answers]
    assert ceiling.token == pytest.approx(np.mean(right), rel=1e-12)


CHANCE: list[tuple[str, dict[str, Any]]] = [
    ("in-context-recall", {"vocab_size": 6, "length": 10}),
    ("noisy-in-context-recall", {"vocab_size": 20, "length": 10, "noise_fraction": 0.5}),
    ("fuzzy-in-context-recall", {"vocab_size": 9, "length": 16, "max_motif": 2}),
    ("selective-copying", {"vocab_size": 5, "length": 24, "tokens_to_copy": 3}),
    ("compression", {"vocab_size": 3, "length": 12}),
    ("memorization", {"vocab_size": 12, "length": 10}),
    ("copying", {"eval_length": 2, "ngram": 1, "extrapolation_lengths": (3,), "min_length": 20, "max_length": 20}),
    ("mqar", {"vocab_size": 12, "length": 16, "pairs": 2}),
    ("parity", {"length": 6, "extrapolation_factors": (2,)}),
    ("s5-permutations", {"degree": 3, "length": 3, "extrapolation_factors": (2,)}),
    ("modular-arithmetic", {"length": 8, "extrapolation_factors": (2,)}),
    ("group-words", {"group": "A4", "copies": 2, "length": 3, "extrapolation_factors": (2,)}),
    ("forgetting-mqar", {"vocab_size": 12, "length": 12, "pairs": 2, "updates": 1}),
    ("joint-keys", {"vocab_size": 12, "length": 24, "grid": 2}),
    ("flip-flop", {"length": 24}),
    ("multi-hop", {"nodes": 8, "hops": 2, "queries": 2}),
]


def narrowed(name: str, batch: Batch, s: int, t: int, possible: Tokens) -> Tokens:
    """Return the answers that are possible where a sequence shows which ones it asks for, and not whose they are."""
    if name in {"parity", "s5-permutations", "group-words"} and t == 0:  # the first element is its own product
        return batch.targets_ST[s, :1]
    if name in {"mqar", "forgetting-mqar", "joint-keys"}:  # the values of its keys, each asked for once
        return batch.targets_ST[s][batch.scored_ST[s]]
    if name in {"copying", "selective-copying"} or name.endswith("in-context-recall"):
        return np.intersect1d(possible, batch.inputs_ST[s, : t + 1])
    return possible[possible != batch.inputs_ST[s, t]] if name == "multi-hop" else possible


@pytest.mark.parametrize(("name", "settings"), CHANCE, ids=ids)
def test_chance_is_what_uniform_guessing_reaches(name: str, settings: dict[str, Any]) -> None:
    """Monte Carlo over 800,000 guessed sequences, within four standard errors."""
    task = TASKS[name](TASKS[name].Config(train_examples=2, eval_examples=4, **settings))
    rng = np.random.default_rng(0)
    population = task.sample(rng, 4_000, "test")
    possible = np.unique(population.targets_ST[population.scored_ST])
    assert len(possible) == task.answer_count
    for split in ("test", *task.extrapolation_names):
        batch = task.batch(split)
        rounds = 200_000
        guesses = np.stack(
            [
                rng.choice(narrowed(name, batch, s, t, possible), size=rounds)
                for s, t in np.argwhere(batch.scored_ST).tolist()
            ],
            axis=1,
        )
        right = guesses == batch.targets_ST[batch.scored_ST]
        starts = np.cumsum([0, *batch.scored_ST.sum(axis=1)[:-1]])
        all_right = np.logical_and.reduceat(right, starts, axis=1)
        chance = task.chance(split)
        assert right.mean() == pytest.approx(chance.token, abs=4 * np.sqrt(chance.token / right.size))
        assert all_right.mean() == pytest.approx(chance.sequence, abs=4 * np.sqrt(chance.sequence / all_right.size))
