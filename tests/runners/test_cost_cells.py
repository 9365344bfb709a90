"""Costs of a layer in tables and in words."""

import pytest

from mixers.costs import Costs
from runners.cost_cells import cells_of, sentence_of
from runners.tables import abbreviated


def test_costs_as_cells_and_in_words() -> None:
    costs = Costs(parameters=544, state_floats={128: 2048, 1024: 16_384}, flops_per_token={128: 5120})
    assert cells_of(costs) == ["544", "2,048", "16,384", "5,120"]
    assert cells_of(costs, abbreviated) == ["544", "2.05k", "16.4k", "5.12k"]
    assert sentence_of(costs) == (
        "544 parameters; state 2,048 floats after 128 positions, 16,384 floats after 1024 positions; "
        "5,120 FLOPs per token at N = 128"
    )


def test_what_could_not_be_counted_is_unknown() -> None:
    assert cells_of(Costs(parameters=7, state_floats=None, flops_per_token=None)) == ["7", "?", "?", "?"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00k"),
        (9999, "10.0k"),
        (99_999, "100k"),
        (999_999, "1.00M"),
        (1_234_567, "1.23M"),
    ],
)
def test_short_numbers_have_three_digits(number: int, text: str) -> None:
    assert abbreviated(number) == text
