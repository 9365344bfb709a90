"""Random letter strings whose n-grams occur as often as a copying task needs.

Dimensions: N strings, C characters of a string, W windows (n-grams) of a string.
"""

from collections.abc import Callable

import numpy as np

from tasks.base import Mask, Tokens
from tasks.slots import choose, first_occurrence

LETTERS = 26
ROUNDS = 100
"""Draws of unfit strings before giving up; enough if one string in four fits."""


def draw_with_unique_ngram(rng: np.random.Generator, lengths_N: Tokens, ngram: int) -> tuple[Tokens, Tokens]:
    """Draw strings that each have an n-gram which occurs once and does not end them; choose one such n-gram uniformly.

    Args:
        rng: source of randomness.
        lengths_N: length of each string, above ``ngram``.
        ngram: n.

    Returns:
        The letters, shape (N, C) with C the largest length (letters beyond a string's length mean nothing), and the
        start of the chosen n-gram in each string, shape (N,).

    Raises:
        ValueError: if strings of some length hardly ever have one.
    """
    width = int(lengths_N.max())

    def draw(todo_N: Tokens) -> tuple[Tokens, Tokens, Mask]:
        lengths_M = lengths_N[todo_N]
        letters_MC = rng.integers(LETTERS, size=(len(todo_N), width))

        # Windows with a unique n-gram and a letter behind it.
        start_W = np.arange(width - ngram + 1)
        eligible_MW: Mask = ~repeated_ngrams(letters_MC, lengths_M, ngram) & (start_W < lengths_M[:, None] - ngram)
        return letters_MC, choose(rng, eligible_MW), np.any(eligible_MW, axis=1)

    return _redraw(draw, len(lengths_N), width, f"strings of {int(lengths_N.max())} letters with a unique {ngram}-gram")


def draw_with_repeated_ngram(rng: np.random.Generator, n: int, length: int, ngram: int) -> Tokens:
    """Draw strings in which exactly one n-gram occurs twice, without overlap, and every other one once.

    Args:
        rng: source of randomness.
        n: number N of strings.
        length: length C of each, at least ``2 * ngram``.
        ngram: n.

    Returns:
        The letters, shape (N, C).

    Raises:
        ValueError: if strings of this length hardly ever come out so.
    """

    def draw(todo_N: Tokens) -> tuple[Tokens, Tokens, Mask]:
        letters_MC = rng.integers(LETTERS, size=(len(todo_N), length))

        # Two starts without overlap; the n-gram of the first is copied to the second.
        starts_M2 = np.sort(rng.integers(length - 2 * ngram + 1, size=(len(todo_N), 2)), axis=1)
        starts_M2[:, 1] += ngram
        window = np.arange(ngram)
        rows = np.arange(len(todo_N))[:, None]
        letters_MC[rows, starts_M2[:, 1:] + window] = letters_MC[rows, starts_M2[:, :1] + window]

        repeated_MW = repeated_ngrams(letters_MC, np.full(len(todo_N), length), ngram)
        return letters_MC, starts_M2[:, 0], repeated_MW.sum(axis=1) == 2

    return _redraw(draw, n, length, f"strings of {length} letters with one repeated {ngram}-gram")[0]


def repeated_ngrams(letters_NC: Tokens, lengths_N: Tokens, ngram: int) -> Mask:
    """Return whether the n-gram at each window also occurs elsewhere in its string, shape (N, W).

    Args:
        letters_NC: the strings.
        lengths_N: their lengths; letters beyond do not count.
        ngram: n.
    """
    # A number for each n-gram.
    windows = letters_NC.shape[1] - ngram + 1
    codes_NW = np.zeros((len(letters_NC), windows), dtype=np.int64)
    for position in range(ngram):
        codes_NW = codes_NW * LETTERS + letters_NC[:, position : position + windows]

    # Windows beyond the end of a string get codes of their own.
    start_W = np.arange(windows)
    codes_NW = np.where(start_W <= lengths_N[:, None] - ngram, codes_NW, LETTERS**ngram + start_W)

    # Later occurrences, and the first of each.
    first_NW = first_occurrence(codes_NW)
    repeated_NW: Mask = first_NW != start_W
    rows, starts = np.nonzero(repeated_NW)
    repeated_NW[rows, first_NW[rows, starts]] = True
    return repeated_NW


def _redraw(
    draw: Callable[[Tokens], tuple[Tokens, Tokens, Mask]], n: int, width: int, what: str
) -> tuple[Tokens, Tokens]:
    """Draw strings, and those that do not fit again, until all of them do.

    Args:
        draw: draws the strings with the given numbers; returns letters, starts, and which of them fit.
        n: number N of strings.
        width: letters of a string.
        what: names the strings in an error.

    Returns:
        Letters (N, width) and starts (N,).

    Raises:
        ValueError: some did not fit in any of ``ROUNDS`` draws.
    """
    letters_NC = np.empty((n, width), dtype=np.int64)
    start_N = np.empty(n, dtype=np.int64)
    todo_N = np.arange(n)

    for _ in range(ROUNDS):
        letters_NC[todo_N], start_N[todo_N], fits_N = draw(todo_N)
        todo_N = todo_N[~fits_N]
        if not len(todo_N):
            return letters_NC, start_N

    raise ValueError(f"{what} are too rare to draw: use a larger ngram or shorter strings")
