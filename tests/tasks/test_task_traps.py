"""Mistakes of earlier generators of these tasks; each test fails if one of them comes back."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from tasks import TASKS
from tasks.base import IGNORE, Task
from tasks.memorization import Memorization
from tasks.running_product import RunningProduct

LETTERS = "abcdefghijklmnopqrstuvwxyz$|.*"


def make(name: str, **settings: Any) -> Task:
    return TASKS[name](TASKS[name].Config(**{"train_examples": 500, "eval_examples": 500, **settings}))


def texts(task: Task, split: str) -> list[str]:
    return ["".join(LETTERS[token] for token in row) for row in task.batch(split).inputs_ST]


@pytest.mark.parametrize("name", ["in-context-recall", "noisy-in-context-recall", "fuzzy-in-context-recall"])
def test_every_next_token_of_recall_is_a_target_and_noise_is_never_scored(name: str) -> None:
    """As in MAD, whose loss is that of all next tokens, answers or not, noise included; padding is at the left."""
    task = make(name, **{"noise_fraction": 0.6} if name.startswith("noisy") else {})
    for split in ("train", "validation", "test"):
        batch = task.batch(split)
        has_target = batch.targets_ST != IGNORE
        np.testing.assert_array_equal(batch.targets_ST[has_target], np.roll(batch.inputs_ST, -1, axis=1)[has_target])
        is_padding = batch.inputs_ST[:, :-1] == task.vocab_size - 1 if name.startswith("fuzzy") else False
        np.testing.assert_array_equal(has_target[:, :-1], ~np.broadcast_to(is_padding, has_target[:, 1:].shape))
        assert not has_target[:, -1].any()
        assert batch.targets_ST[batch.scored_ST].max() < 16
        assert (batch.targets_ST >= 16).any() == name.startswith("noisy")


@pytest.mark.parametrize("fraction", [0.2, 0.4, 0.6, 0.8])
def test_noise_fills_its_share_of_the_slots(fraction: float) -> None:
    batch = make("noisy-in-context-recall", noise_fraction=fraction, length=256).batch("train")
    noise = batch.inputs_ST >= 16
    np.testing.assert_array_equal(noise[:, 0::2], noise[:, 1::2])
    # Of 128 slots, the last and one more never hold noise.
    assert noise.mean() == pytest.approx(fraction * 126 / 128, abs=4 * np.sqrt(0.25 / (500 * 126)))


@pytest.mark.parametrize("length", [4, 6, 10])
def test_some_slot_shows_the_key_that_the_last_slot_asks_for_however_much_noise_there_is(length: int) -> None:
    batch = make("noisy-in-context-recall", vocab_size=4112, noise_fraction=0.95, length=length).batch("train")
    keys, values = batch.inputs_ST[:, 0::2], batch.inputs_ST[:, 1::2]
    shown = (keys[:, :-1] == keys[:, -1:]) & (values[:, :-1] == values[:, -1:])
    assert shown.any(axis=1).all()
    assert (keys[:, -1] < 2048).all()
    assert batch.scored_ST[:, -2].all()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("in-context-recall", {"vocab_size": 128}),
        ("noisy-in-context-recall", {"vocab_size": 144, "noise_fraction": 0.0}),
    ],
)
def test_the_last_slot_of_recall_asks_for_each_shown_key_equally_often(name: str, settings: dict[str, Any]) -> None:
    keys = make(name, length=8, train_examples=2000, **settings).batch("train").inputs_ST[:, 0::2]
    distinct = keys[(np.diff(np.sort(keys[:, :-1], axis=1), axis=1) > 0).all(axis=1)]
    shares = (distinct[:, :-1] == distinct[:, -1:]).mean(axis=0)
    assert len(distinct) > 1800
    assert shares == pytest.approx([1 / 3] * 3, abs=4.5 * np.sqrt(2 / 9 / len(distinct)))


def test_values_of_recall_do_not_depend_on_the_key_alone() -> None:
    batch = make("in-context-recall").batch("train")
    after_key_0 = batch.inputs_ST[:, 1::2][batch.inputs_ST[:, 0::2] == 0]
    assert set(after_key_0) == set(range(8, 16))


def test_compression_asks_for_every_data_token_and_not_for_the_constant() -> None:
    batch = make("compression").batch("test")
    np.testing.assert_array_equal(batch.targets_ST[:, :-1], batch.inputs_ST[:, :-1])
    assert batch.scored_ST[:, :-1].all()
    assert not batch.scored_ST[:, -1].any()
    assert (batch.inputs_ST[:, -1] == 15).all()
    assert batch.inputs_ST[:, :-1].max() < 15


def test_blanks_stand_anywhere_before_the_copy_token_also_right_before_it() -> None:
    batch = make("selective-copying", length=64).batch("train")
    places = 64 - 16 - 1
    blank = batch.inputs_ST[:, :places] == 14
    assert (batch.inputs_ST[:, places] == 15).all()
    assert (blank.sum(axis=1) == places - 16).all()
    share = (places - 16) / places
    assert blank.mean(axis=0) == pytest.approx(share, abs=4.5 * np.sqrt(share * (1 - share) / 500))
    assert (batch.inputs_ST[:, places + 1 :] == 14).all(), "no teacher forcing"


def test_fuzzy_sets_ask_only_for_keys_that_were_shown() -> None:
    task = make("fuzzy-in-context-recall", vocab_size=32)
    for split in ("train", "test", "longest keys"):
        batch = task.batch(split)
        for row, scored in zip(batch.inputs_ST.tolist(), batch.scored_ST.tolist(), strict=True):
            data = [token for token in row if token != 31]
            assert row[len(row) - len(data) :] == data, "padding at the left only"
            runs: list[tuple[bool, list[int]]] = []
            for token in data:
                if not runs or runs[-1][0] != (token < 15):
                    runs.append((token < 15, []))
                runs[-1][1].append(token)
            keys = [tuple(run) for is_key, run in runs if is_key]
            assert [is_key for is_key, _ in runs] == [True, False] * len(keys)
            assert keys[-1] in keys[:-1]
            assert scored[-1 - len(runs[-1][1])], "the last key is asked"
            for key, other in zip(sorted(set(keys)), sorted(set(keys))[1:], strict=False):
                assert other[: len(key)] != key, "no key begins another"
            lengths = {len(key) for key in keys}
            assert lengths == {3} if split == "longest keys" else lengths <= {1, 2, 3}


@pytest.mark.parametrize(("first", "stop"), [(0, 7), (7, 15)], ids=["keys", "values"])
def test_fuzzy_motifs_have_all_lengths_about_equally_often(first: int, stop: int) -> None:
    inputs_ST = make("fuzzy-in-context-recall").batch("train").inputs_ST
    in_motif = ((first <= inputs_ST) & (inputs_ST < stop)).astype(np.int64)
    starts, ends = (np.argwhere(np.diff(in_motif, axis=1, prepend=0, append=0) == sign)[:, 1] for sign in (1, -1))
    shares = np.bincount(ends - starts)[1:] / len(starts)
    assert shares == pytest.approx([1 / 3] * 3, abs=0.03)


def test_memorization_map_uses_no_special_token_and_is_the_same_everywhere() -> None:
    task = make("memorization", vocab_size=64)
    pairs: Counter[tuple[int, int]] = Counter()
    for split in ("train", "validation", "test"):
        batch = task.batch(split)
        assert (batch.inputs_ST[:, 1::2] == 63).all()
        assert batch.inputs_ST[:, 0::2].max() < 31
        pairs.update(
            zip(batch.inputs_ST[:, 0::2].ravel().tolist(), batch.targets_ST[:, 1::2].ravel().tolist(), strict=True)
        )
    keys, values = zip(*sorted(pairs), strict=True)
    assert keys == tuple(range(31))
    assert sorted(values) == list(range(31, 62))
    assert not np.array_equal(task.values_K, Memorization(Memorization.Config(vocab_size=64, data_seed=1)).values_K)


def test_a_cut_off_example_is_neither_a_target_nor_scored() -> None:
    task = make("copying")
    batch = task.batch("train")
    cut = 0
    for text, targets, scored in zip(texts(task, "train"), batch.targets_ST, batch.scored_ST, strict=True):
        assert len(text) == 220
        assert text[0] == "$"
        whole = text.rfind(".") + 1
        assert (targets[whole:] == IGNORE).all()
        assert not scored[whole:].any()
        cut += "|" in text[whole:]
        for example in text[:whole].removesuffix(".").split("."):
            string, answer = example.removeprefix("$").split("|")
            assert string == answer
            assert 5 <= len(string) <= 20
        # The answers and their dots are targets, only the letters are scored.
        count = text[:whole].count(".")
        assert (targets != IGNORE).sum() == scored.sum() + count
        assert scored.sum() == (whole - 3 * count) // 2
    assert cut > 100, "some answers are cut off"


def test_training_strings_have_all_lengths_and_letters_equally_often() -> None:
    examples = [e.split("|")[0] for text in texts(make("copying"), "train") for e in text.split("$")[1:4]]
    lengths = Counter(map(len, examples))
    assert sorted(lengths) == list(range(5, 21))
    for tally, share in ((lengths, 1 / 16), (Counter("".join(examples)), 1 / 26)):
        for value in tally.values():
            assert value == pytest.approx(tally.total() * share, abs=4.5 * np.sqrt(tally.total() * share))


def test_evaluation_holds_one_string_of_the_stated_length_per_row() -> None:
    task = make("copying")
    assert task.extrapolation_names == (*(f"length {n}" for n in range(30, 101, 10)), "duplicate-ngram")
    for split in ("validation", "test", *task.extrapolation_names):
        length = int(split.split()[1]) if split.startswith("length") else 20
        for text in texts(task, split):
            string, answer = text.removeprefix("$").removesuffix(".").split("|")
            assert len(string) == length
            assert string == answer


@pytest.mark.parametrize("variant", ["prefix-ngram", "suffix-ngram"])
def test_blocks_without_a_query_at_the_start_are_as_wide_as_others(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.base.BLOCK", 2)
    task = make("copying", variant=variant, eval_examples=40, extrapolation_lengths=(30,))
    separators = 3 if variant == "prefix-ngram" else 2
    for split, letters in (("validation", 20), ("test", 20), ("length 30", 30)):
        batch = task.batch(split)
        assert batch.inputs_ST.shape == (40, 1 + 2 * letters + separators)
        lengths = {len(text.rstrip("*")) for text in texts(task, split)}
        assert len(lengths) > 10, "most blocks have no example of this width"


@pytest.mark.parametrize("variant", ["prefix-ngram", "suffix-ngram"])
def test_the_queried_ngram_occurs_once(variant: str) -> None:
    # With 2-grams of 60 letters, most strings have a 2-gram that occurs twice.
    task = make("copying", variant=variant, ngram=2, eval_length=60, extrapolation_lengths=(80,))
    repeats = 0
    for text in texts(task, "test") + texts(task, "length 80"):
        first, second = text.removeprefix("$").split(".")[0].split("|")[:2]
        string, query = (second, first) if variant == "prefix-ngram" else (first, second[:2])
        grams = Counter(string[i : i + 2] for i in range(len(string) - 1))
        assert grams[query] == 1
        assert not string.endswith(query), "there is something to answer"
        repeats += max(grams.values()) > 1
    assert repeats > 500


@pytest.mark.parametrize("ngram", [1, 2, 3, 10])
def test_one_ngram_of_the_duplicate_set_occurs_twice(ngram: int) -> None:
    length = 6 if ngram == 1 else 20
    task = make("copying", ngram=ngram, eval_length=length)
    for text in texts(task, "duplicate-ngram"):
        string = text[1 : length + 1]
        grams = Counter(string[i : i + ngram] for i in range(length - ngram + 1))
        assert sorted(grams.values())[-2:] == [1, 2]


def test_each_key_is_asked_once_behind_the_pairs_and_fillers_are_no_keys() -> None:
    task = make("mqar", vocab_size=40, length=64, pairs=8)
    assert task.extrapolation_names == ("length 128", "length 256", "pairs 16")
    for split in ("train", "test", *task.extrapolation_names):
        pairs = 16 if split == "pairs 16" else 8
        batch = task.batch(split)
        assert batch.inputs_ST.shape[1] == (int(split.split()[1]) if split.startswith("length") else 64)
        pairs_SP2 = batch.inputs_ST[:, : 2 * pairs].reshape(-1, pairs, 2)
        keys_SP, values_SP = np.sort(pairs_SP2, axis=1).transpose(2, 0, 1)
        assert (np.diff(keys_SP) > 0).all(), "different keys"
        assert (np.diff(values_SP) > 0).all(), "different values"
        assert (set(np.unique(keys_SP)), set(np.unique(values_SP))) == (set(range(1, 20)), set(range(20, 40)))
        rest_ST, scored_ST = batch.inputs_ST[:, 2 * pairs :], batch.scored_ST[:, 2 * pairs :]
        assert not batch.scored_ST[:, : 2 * pairs].any()
        np.testing.assert_array_equal(np.sort(rest_ST[scored_ST].reshape(-1, pairs)), keys_SP)
        assert (rest_ST[~scored_ST] == 0).all()
        np.testing.assert_array_equal(batch.targets_ST == IGNORE, ~batch.scored_ST)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_queries_follow_the_power_law(alpha: float) -> None:
    """The first key's place by the law itself; the second one's by what remains of it."""
    task = make("mqar", length=24, pairs=2, alpha=alpha, train_examples=20_000)
    batch = task.batch("train")
    law = np.arange(1, 11) ** (alpha - 1)
    law /= law.sum()
    second = law * (np.sum(law / (1 - law)) - law / (1 - law))
    for pair, shares in enumerate((law, second)):
        is_query = batch.inputs_ST[:, 4:] == batch.inputs_ST[:, 2 * pair, None]
        assert not is_query[:, 1::2].any()
        assert is_query[:, 0::2].mean(axis=0) == pytest.approx(shares, abs=4.5 * np.sqrt(0.25 / 20_000))


def test_keys_and_values_are_drawn_uniformly_whatever_their_order() -> None:
    batch = make("mqar", vocab_size=20, length=32, pairs=4, train_examples=20_000).batch("train")
    for column, choices in enumerate([9, 10] * 4):
        shares = np.bincount(batch.inputs_ST[:, column])[-choices:] / 20_000
        assert shares == pytest.approx([1 / choices] * choices, abs=4.5 * np.sqrt(0.1 / 20_000))


def test_no_single_bit_tells_a_parity() -> None:
    batch = make("parity", length=32, train_examples=10_000).batch("train")
    bound = 4.5 * np.sqrt(0.25 / 10_000)
    assert batch.inputs_ST.mean(axis=0) == pytest.approx(0.5, abs=bound)
    assert batch.targets_ST.mean(axis=0) == pytest.approx(0.5, abs=bound)
    np.testing.assert_array_equal(batch.targets_ST[:, 0], batch.inputs_ST[:, 0])
    assert (batch.targets_ST == batch.inputs_ST)[:, 1:].mean(axis=0) == pytest.approx(0.5, abs=bound)


@pytest.mark.parametrize(
    ("task", "size", "classes"),
    [
        *((make("s5-permutations", degree=degree), *rest) for degree, *rest in ((3, 6, 3), (4, 24, 5), (5, 120, 7))),
        *(
            (make("group-words", group=group), *rest)
            for group, *rest in (("Z60", 60, 60), ("A4", 12, 4), ("A4xZ5", 60, 20), ("A5", 60, 5), ("S5", 120, 7))
        ),
    ],
)
def test_products_are_those_of_a_group(task: RunningProduct, size: int, classes: int) -> None:
    products = task.products_GG
    elements = np.arange(size)
    assert products.shape == (size, size)
    np.testing.assert_array_equal(products[0], elements)
    np.testing.assert_array_equal(products[:, 0], elements)
    np.testing.assert_array_equal(np.sort(products, axis=0), np.tile(elements[:, None], size))
    np.testing.assert_array_equal(np.sort(products, axis=1), np.tile(elements, (size, 1)))
    np.testing.assert_array_equal(products[products], products[:, products])
    # As many pairs commute as there are classes of conjugate elements times elements.
    assert (products == products.T).sum() == size * classes


@pytest.mark.parametrize(("name", "length"), [("parity", 40), ("s5-permutations", 16), ("group-words", 16)])
def test_state_tracking_asks_at_every_position_of_longer_sequences_too(name: str, length: int) -> None:
    task = make(name)
    assert task.extrapolation_names == (f"length {2 * length}", f"length {4 * length}")
    for split, factor in zip(("train", "validation", "test", *task.extrapolation_names), (1, 1, 1, 2, 4), strict=True):
        batch = task.batch(split)
        assert batch.inputs_ST.shape == (500, factor * length)
        assert batch.scored_ST.all()
