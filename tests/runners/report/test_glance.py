"""The answers at the top of the page."""

from runners.report.glance import Own, glance
from runners.report.ranks import Ranks
from runners.report.speed import Anchor
from tests.runners.report.made_up import language_model


def anchor(gain: str, is_speed: bool = True) -> Anchor:
    texts = dict.fromkeys(("what", "paper", "limit", "file", "date", "device"), "")
    return Anchor(**texts, authors=("", ""), ours=("", ""), gain=gain, is_speed=is_speed)


def test_the_first_places_and_those_of_rt_and_the_transformer_are_named() -> None:
    rows = ("mamba", "gla", "rt", "lstm", "hyena", "transformer")
    ranks = Ranks(
        means={row: 1.0 + n for n, row in enumerate(reversed(rows))},
        intervals=dict.fromkeys(rows, (0.5, 7.25)),
        behind_first={row: (n - 1.5, n + 1.0) for n, row in enumerate(reversed(rows))},
    )
    models = [language_model(row, 3 + n / 10) for n, row in enumerate(rows)]
    of_ranks, of_models, predicts, speed = glance(
        [], ranks, models, "Not shown.", [anchor("–"), anchor("14.8×"), anchor("2.5×"), anchor("99×", is_speed=False)]
    )
    assert of_ranks.text == (
        "Mean ranks among 6 layers under the published protocol, with 95% intervals: "
        "1. transformer 1.0 (0.5–7.2); 2. hyena 2.0 (0.5–7.2); 3. lstm 3.0 (0.5–7.2); 4. rt 4.0 (0.5–7.2). "
        "In the same samples of tasks and seeds, the first is clearly ahead of all but hyena."
    )
    assert of_models.text == (
        "Validation losses in nats per token, by place among 6: 1. mamba 3.010; 2. gla 3.110; 3. rt 3.210; "
        "6. transformer 3.510."
    )
    assert predicts.text == "Not shown."
    assert speed.text == "2.5 to 14.8 times as fast as the authors’ code on one GPU, by measurement."


def test_an_unfinished_model_that_is_ahead_is_named_apart() -> None:
    models = [
        language_model("rt", 3.0),
        language_model("gla", 3.5),
        language_model("lstm", 2.8, finished=False),
        language_model("lru", 3.1, finished=False),
    ]
    (found,) = (answer for answer in glance([], None, models, "", []))
    assert found.text.endswith(": 1. rt 3.010; 2. gla 3.510. Lower, but not finished: lstm 2.810.")


def test_equal_values_share_a_place_and_a_layer_of_ones_own_counts() -> None:
    losses = {"rt": 3.0, "mamba": 3.1, "gla": 3.2, "lru": 3.2, "hyena": 3.3, "a.module:Own": 2.9}
    (found,) = glance([], None, [language_model(layer, loss) for layer, loss in losses.items()], "", [])
    places = "1. a.module:Own 2.910; 2. rt 3.010; 3. mamba 3.110."
    assert found.text.endswith(f"among 6: {places}")

    means = {"a": 2.0, "b": 3.0, "c": 5.5, "d": 5.5, "e": 6}
    same = dict.fromkeys("abcde", (1.0, 9.0))
    (found,) = glance([], Ranks(means=means, intervals=same, behind_first=same), [], "", [])
    leaders, ahead = found.text.split(". In the same samples")
    assert leaders.endswith("1. a 2.0 (1.0–9.0); 2. b 3.0 (1.0–9.0); 3. c 5.5 (1.0–9.0); 3. d 5.5 (1.0–9.0)")
    assert ahead.endswith("the first is clearly ahead of all others.")

    level = dict.fromkeys("abcde", (-1.0, 9.0))
    (found,) = glance([], Ranks(means=means, intervals=same, behind_first=level), [], "", [])
    assert found.text.endswith("the first is clearly ahead of none.")


def test_questions_without_results_are_left_out() -> None:
    assert glance([], None, [language_model("rt", 3.0, finished=False)], "", [anchor("–")]) == []


def test_ones_own_layers_come_first() -> None:
    same = dict.fromkeys(("a", "mine", "b", "third"), (1.0, 9.0))
    ranks = Ranks(means={"a": 2.0, "mine": 3.25, "b": 5.0}, intervals=same, behind_first=same)
    some = Ranks(means={"a": 2.0, "third": 1.5}, intervals=same, behind_first=same)
    own = [
        Own(title="published protocol", ranks=None, counts={"mine": 0}),
        Own(title="quick preset", ranks=ranks, counts={"mine": 10, "other": 2, "third": 3}, of_some={"third": some}),
    ]
    first, _ = glance(own, ranks, [], "", [])
    assert first.text == (
        "mine: 2nd of 3, with a mean rank of 3.2 (quick preset); other: 2 of 10 tasks (quick preset); "
        "third: 1st of 2, with a mean rank of 1.5 over 3 of 10 tasks (quick preset)."
    )
