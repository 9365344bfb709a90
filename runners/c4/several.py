"""A command line that names several layers, learning rates or seeds, as the command lines of its runs."""

import sys
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import partial
from itertools import chain, pairwise, product

from mixers import MIXERS, find_mixer
from runners.c4.config import OF_THE_MODEL
from runners.cli import applicable, defaults_of, expand

SEVERAL = ("--mixer", "--lr", "--seed")
"""Options that may have several values."""

Part = list[str]
"""An option with its values."""


def of_each_run(arguments: Sequence[str]) -> list[list[str]]:
    """Return the command line of each layer, learning rate and seed, if one of these options has several values.

    Each has those of the layers' options that its layer has.

    Raises:
        ValueError: there is no such layer, none of several has an option, or one of the three is given twice.
    """
    starts = [place for place, word in enumerate(arguments) if word.startswith("--")]
    parts = [list(arguments[a:b]) for a, b in pairwise([*starts, len(arguments)])]
    flags = [part[0].partition("=")[0] for part in parts]
    if repeated := [flag for flag in SEVERAL if flags.count(flag) > 1]:
        raise ValueError(f"{repeated[0]} is given more than once: give it once, with all values")
    values = dict(zip(flags, map(_words, parts), strict=True))
    names = expand(values.get("--mixer", []), MIXERS)
    lrs, seeds = (_unique(values.get(flag, [])) for flag in ("--lr", "--seed"))
    if len(names) < 2 and all(len(values.get(flag, [])) < 2 for flag in SEVERAL):
        return [list(arguments)]

    kept = _of_each_layer(names, parts) if names else [("", parts)]
    lines = []
    for (name, own), lr, seed in product(kept, lrs or [""], seeds or [""]):
        chosen = {"--mixer": name, "--lr": lr, "--seed": seed}
        flags = [part[0].partition("=")[0] for part in own]
        words = ([flag, chosen[flag]] if chosen.get(flag) else part for flag, part in zip(flags, own, strict=True))
        lines.append([*arguments[: starts[0]], *chain(*words)])
    return lines


def _words(part: Part) -> list[str]:
    """Return the values of an option, also of one that is written with an equals sign."""
    flag, *words = part
    _, equals, value = flag.partition("=")
    return [value, *words] if equals else words


def _unique(words: Iterable[str]) -> list[str]:
    """Return each number once, in order; 1e-3 and 0.001 are one."""
    found: dict[Fraction | str, str] = {}
    for word in words:
        try:
            found.setdefault(Fraction(word), word)
        except ValueError:  # an error of its run
            found.setdefault(word, word)
    return [*found.values()]


def _of_each_layer(names: Iterable[str], parts: Sequence[Part]) -> list[tuple[str, list[Part]]]:
    """Return each layer with the parts of a command line that apply to it."""
    options = {part[0].partition("=")[0].removeprefix("--"): part for part in parts}
    nested = {option.removeprefix("mixer."): part for option, part in options.items() if option.startswith("mixer.")}
    configs = {name: find_mixer(name).Config for name in names}
    say = partial(print, file=sys.stderr)
    own = applicable("mixer", nested, configs, say)
    lacking = {
        name: [part for option, part in nested.items() if option.replace("-", "_") not in own[name]] for name in configs
    }

    # Options of the model that belong to layers.
    for option in OF_THE_MODEL:
        without = [name for name, config in configs.items() if option not in defaults_of(config)]
        if option in options and without:
            message = f"--{option} does not apply to mixer {', '.join(without)}"
            if len(without) == len(configs):
                raise ValueError(f"{message}: leave it out")
            say(message)
            for name in without:
                lacking[name].append(options[option])

    return [(name, [part for part in parts if part not in lacking[name]]) for name in configs]
