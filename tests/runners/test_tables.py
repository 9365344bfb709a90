"""Names, numbers and costs in the cells of tables."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from runners.tables import Name, abbreviated, cost_cells, ordinal


def test_costs_are_cells_whether_counted_or_read_from_a_record() -> None:
    expected = ["544", "2.05k", "16.4k", "5.12k"]
    assert cost_cells(544, {128: 2048, 1024: 16_384}, {128: 5120}) == expected
    assert cost_cells(544, {"128": 2048, "1024": 16_384}, {"128": 5120}) == expected
    assert cost_cells(7, None, None) == ["7", "?", "?", "?"]


@pytest.mark.parametrize(
    ("write", "number", "text"),
    [
        *((abbreviated, *pair) for pair in ((0, "0"), (999, "999"), (1000, "1.00k"), (99_999, "100k"))),
        *((abbreviated, *pair) for pair in ((999_999, "1.00M"), (1_234_567, "1.23M"))),
        *((ordinal, *pair) for pair in ((1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"))),
        *((ordinal, *pair) for pair in ((11, "11th"), (13, "13th"), (22, "22nd"))),
    ],
)
def test_numbers_have_three_digits_and_places_their_endings(
    write: Callable[[int], str], number: int, text: str
) -> None:
    assert write(number) == text


@pytest.mark.parametrize(
    ("name", "width", "lines"),
    [
        ("→ my_package.my_module:MyLayer", 24, ["→ my_package.my_module:", "    MyLayer"]),
        ("my_package.my_module:MyLayer-alpha-0.05", 20, ["my_package.", "  my_module:MyLayer-", "  alpha-0.05"]),
        ("m:ExtraordinarilyLongLayer", 12, ["m:", "Extraordinar", "ilyLongLayer"]),
    ],
)
def test_a_narrow_column_breaks_a_name_before_words_alone(name: str, width: int, lines: list[str]) -> None:
    console = Console(width=width, file=io.StringIO())
    console.print(Name(name), overflow="fold")
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == lines
