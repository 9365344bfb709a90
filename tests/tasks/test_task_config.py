"""Impossible settings are rejected in one line that says what to do."""

from typing import Any

import pytest

from tasks import TASKS
from tasks.copying import Copying

REJECTED: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"train_examples": 0}, "train_examples is 0: use at least 1") for name in TASKS),
    *((name, {"eval_examples": 0}, "eval_examples is 0: use at least 1") for name in TASKS),
    *((name, {"data_seed": -1}, "data_seed is -1: use 0 or more") for name in TASKS),
    ("in-context-recall", {"vocab_size": 15}, "vocab_size is 15: use an even number from 4"),
    ("in-context-recall", {"vocab_size": 2}, "vocab_size is 2: use an even number from 4"),
    ("in-context-recall", {"length": 127}, "length is 127: use an even number from 4"),
    ("in-context-recall", {"length": 2}, "length is 2: use an even number from 4"),
    ("noisy-in-context-recall", {"vocab_size": 33}, "vocab_size - noise_vocab_size is 17: use an even number from 4"),
    ("noisy-in-context-recall", {"vocab_size": 18}, "vocab_size - noise_vocab_size is 2: use an even number from 4"),
    ("noisy-in-context-recall", {"noise_vocab_size": 0}, "noise_vocab_size is 0: use at least 1"),
    ("noisy-in-context-recall", {"noise_fraction": 1.0}, "noise_fraction is 1.0: use a value from 0 to below 1"),
    ("noisy-in-context-recall", {"noise_fraction": -0.1}, "noise_fraction is -0.1: use a value from 0 to below 1"),
    ("noisy-in-context-recall", {"length": 3}, "length is 3: use an even number from 4"),
    ("fuzzy-in-context-recall", {"max_motif": 0}, "max_motif is 0: use at least 1"),
    ("fuzzy-in-context-recall", {"max_motif": 8}, "motifs of 8 different tokens need 17 or more"),
    ("fuzzy-in-context-recall", {"vocab_size": 4, "max_motif": 1}, "vocab_size is 4: .* need 5 or more"),
    ("fuzzy-in-context-recall", {"vocab_size": 128, "max_motif": 10}, "max_motif is 10: too many motifs"),
    ("fuzzy-in-context-recall", {"length": 11}, "length is 11: .* need 12 or more"),
    ("selective-copying", {"vocab_size": 3}, "vocab_size is 3: .* need 4 or more"),
    ("selective-copying", {"tokens_to_copy": 0}, "tokens_to_copy is 0: use at least 1"),
    ("selective-copying", {"tokens_to_copy": 128}, "length is 256: 128 tokens to copy.* need 258 or more"),
    ("compression", {"vocab_size": 2}, "vocab_size is 2: .* need 3 or more"),
    ("compression", {"length": 1}, "length is 1: .* need 2 or more"),
    ("memorization", {"vocab_size": 4}, "vocab_size is 4: .* need 5 or more"),
    ("memorization", {"length": 31}, "length is 31: use a multiple of 2"),
    ("memorization", {"vocab_size": 9, "key_pairs": 17}, "key_pairs is 17: use 0 .* at most 16 pairs"),
    ("memorization", {"key_pairs": 9}, "length is 32: use a multiple of 3"),
    ("copying", {"ngram": 0}, "ngram is 0: use 1 to 10"),
    ("copying", {"ngram": 11, "eval_length": 22}, "ngram is 11: use 1 to 10"),
    ("copying", {"min_length": 0}, "min_length is 0: copy needs 1 or more"),
    ("copying", {"variant": "suffix-ngram", "min_length": 3}, "min_length is 3: suffix-ngram needs 4 or more"),
    ("copying", {"max_length": 4}, "max_length is 4: use at least min_length, 5"),
    ("copying", {"context": 42}, "context is 42: the longest example takes 43 tokens"),
    ("copying", {"variant": "prefix-ngram", "context": 43}, "context is 43: the longest example takes 44 tokens"),
    ("copying", {"eval_length": 5}, "eval_length is 5: with 3-grams copy needs 6 or more"),
    ("copying", {"variant": "prefix-ngram", "eval_length": 3}, "eval_length is 3: with 3-grams .* needs 4 or more"),
    ("copying", {"extrapolation_lengths": (20, 30)}, "extrapolation_lengths are .* above eval_length, 20"),
    ("copying", {"extrapolation_lengths": (30, 30)}, "extrapolation_lengths are .* different lengths"),
    ("mqar", {"pairs": 0}, "pairs is 0: use at least 1"),
    ("mqar", {"vocab_size": 32}, "vocab_size is 32: .* need an even number from 34"),
    ("mqar", {"vocab_size": 255}, "vocab_size is 255: .* need an even number from 34"),
    ("mqar", {"length": 62}, "length is 62: 16 pairs and their queries need an even number from 64"),
    ("mqar", {"length": 129}, "length is 129: 16 pairs and their queries need an even number from 64"),
    ("mqar", {"alpha": 0.0}, "alpha is 0.0: use a value above 0, at most 1"),
    ("mqar", {"alpha": 1.5}, "alpha is 1.5: use a value above 0, at most 1"),
    ("parity", {"length": 0}, "length is 0: use at least 1"),
    ("parity", {"extrapolation_factors": (1, 2)}, "extrapolation_factors are .* different whole numbers from 2"),
    ("s5-permutations", {"extrapolation_factors": (2, 2)}, "extrapolation_factors are .* use different"),
    ("s5-permutations", {"degree": 2}, "degree is 2: use 3, 4 or 5"),
    ("s5-permutations", {"degree": 6}, "degree is 6: use 3, 4 or 5"),
    ("modular-arithmetic", {"modulus": 11}, "modulus is 11: use 2 to 10"),
    ("modular-arithmetic", {"min_length": 42}, "min_length is 42: use 2 or more, and at most length / expressions, 40"),
    ("modular-arithmetic", {"expressions": 7}, "expressions is 7: use a number of equal parts of length, 40"),
    (
        "modular-arithmetic",
        {"length": 41},
        "min_length, length / expressions are 4, 41: without brackets use even numbers",
    ),
    *(("group-words", {"group": group}, f"group is {group}: use Z<n>") for group in ("Q8", "Z0", "A2", "S7", "A5xS4")),
    ("group-words", {"copies": 0}, "copies is 0: use at least 1"),
    ("forgetting-mqar", {"pairs": 0}, "pairs is 0: use at least 1"),
    ("forgetting-mqar", {"updates": -1}, "updates is -1: use 0 or more"),
    ("forgetting-mqar", {"vocab_size": 46}, "vocab_size is 46: .* need an even number from 48"),
    ("forgetting-mqar", {"length": 79}, "length is 79: 16 pairs, 8 updates and the queries need 80 or more"),
    ("forgetting-mqar", {"alpha": 0.0}, "alpha is 0.0: use a value above 0, at most 1"),
    ("joint-keys", {"grid": 0}, "grid is 0: use at least 1"),
    ("joint-keys", {"vocab_size": 45}, "vocab_size is 45: a third must hold a filler and 4 different keys, and 16"),
    ("joint-keys", {"length": 95}, "length is 95: 16 pairs of keys and their queries need 96 or more"),
    ("joint-keys", {"alpha": 1.5}, "alpha is 1.5: use a value above 0, at most 1"),
    ("multi-hop", {"hops": 16}, "hops is 16: use at least 1, below nodes, 16"),
    ("multi-hop", {"queries": 0}, "queries is 0: use at least 1"),
    ("flip-flop", {"length": 65}, "length is 65: use an even number from 4"),
    ("flip-flop", {"ignore": 1.0}, "ignore is 1.0: use a value from 0 to below 1"),
]


@pytest.mark.parametrize(("name", "settings", "message"), REJECTED)
def test_rejected(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        TASKS[name].Config(**settings)
    assert "\n" not in str(caught.value)


def test_smallest_settings_draw() -> None:
    """The limits in the messages are the true ones."""
    rejected_below: dict[str, dict[str, Any]] = {
        "in-context-recall": {"vocab_size": 4, "length": 4},
        "noisy-in-context-recall": {"vocab_size": 5, "noise_vocab_size": 1, "length": 4},
        "fuzzy-in-context-recall": {"vocab_size": 7, "length": 12},
        "selective-copying": {"vocab_size": 4, "length": 4, "tokens_to_copy": 1},
        "compression": {"vocab_size": 3, "length": 2},
        "memorization": {"vocab_size": 5, "length": 2},
        "copying": {"min_length": 1, "max_length": 1, "context": 5, "eval_length": 6},
        "mqar": {"vocab_size": 4, "length": 4, "pairs": 1},
        "parity": {"length": 1},
        "s5-permutations": {"degree": 3, "length": 1},
        "modular-arithmetic": {"brackets": True, "min_length": 2, "length": 2},
        "group-words": {"group": "Z2", "length": 1},
        "forgetting-mqar": {"vocab_size": 4, "length": 6, "pairs": 1, "updates": 1},
        "joint-keys": {"vocab_size": 6, "length": 6, "grid": 1},
        "flip-flop": {"length": 4},
        "multi-hop": {"nodes": 2, "hops": 1, "queries": 1},
    }
    for name, settings in rejected_below.items():
        task = TASKS[name](TASKS[name].Config(**settings))
        for split in ("train", "test", *task.extrapolation_names):
            batch = task.sample(task.stream(split), 1000, split)
            assert batch.scored_ST.any(axis=1).all()


def test_strings_that_hardly_exist_are_given_up() -> None:
    task = Copying(Copying.Config(variant="prefix-ngram", ngram=1, eval_length=400, extrapolation_lengths=()))
    with pytest.raises(ValueError, match="400 letters with a unique 1-gram are too rare to draw: use a larger ngram"):
        task.sample(task.stream("test"), 10, "test")
