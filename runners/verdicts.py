"""Verdicts on reference results, which take long to find."""

from collections.abc import Callable, Sequence

from runners import remembered as facts

CACHE = facts.FOLDER / "reference-verdicts.json"


def remembered_verdicts(keys: Sequence[str], find: Callable[[Sequence[int]], Sequence[bool]]) -> list[bool]:
    """Return the verdict of each key; ``find`` returns those that are not in ``CACHE``, given their places in ``keys``.

    A key is a hash over all that decides the verdict.
    """
    return facts.remembered(CACHE, bool, keys, find)
