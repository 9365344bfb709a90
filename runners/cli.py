"""The command line, generated from dataclasses, and checks of its values."""

import contextlib
import io
import itertools
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import tyro

from runners.ending import command_name
from runners.guidance import flag_of, not_understood, short_help, texts_of

WITH_COMMA = re.compile(r"Could not find valid parse for arguments: .*,['\w]")
"""What the parser says of a list whose values are separated by commas."""
NOT_READ = re.compile(r"Error parsing (--\S+): (.*?)\[?('.*')\]?")
"""What the parser says of a value that it cannot read: the option, the reason in Python's words, the value."""

LARGEST_LR = 10.0
"""Largest learning rate that the programs accept; AdamW changes each parameter by about this much in a step."""


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed that PyTorch's generators refuse or map to another seed."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"--seed {seed} must be 0 or more, and below 2**64")


def shown_as(metavar: str | None = None) -> Any:
    """Return how the help shows a field: under a name for its values, and without its default, which is empty."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


def check_out(out: Path, option: str = "--out", writes: bool = True) -> None:
    """Check that ``out``, the value of ``option``, is no file, and that files can be written there; nothing is made.

    Args:
        out: the folder, which need not exist.
        option: its option.
        writes: whether the command writes files; one that only reads, as with ``--dry-run``, needs no such folder.

    Raises:
        ValueError: it is a file, or the command writes and the nearest parent folder that exists takes no files.
    """
    try:
        if out.exists() and not out.is_dir():
            raise ValueError(f"{option} {out} is a file: name a folder")
        reason = unwritable(out) if writes else None
    except OSError as error:
        reason = f"it cannot be read ({error.strerror})"
    if reason is not None:
        raise ValueError(f"{option} {out}: {reason}: name another folder")


def unwritable(folder: Path) -> str | None:
    """Return why no file can be written into ``folder``, which need not exist, or None; nothing is made."""
    existing = folder
    try:
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return f"nothing can be written into {existing} ({error.strerror})"


def print_short_help(documentation: str | None, options_class: type | None = None) -> NoReturn:
    """Print what a program is and what its options are called, and exit with status 2, because nothing was done.

    Args:
        documentation: docstring of the program.
        options_class: dataclass of the program's own options; None if each of its commands has options of its own.
    """
    print(short_help(documentation or "", options_class))
    raise SystemExit(2)


def expand(names: Sequence[str], registry: dict[str, Any]) -> list[str]:
    """Return each name once, in order, with the whole registry in place of ``all``."""
    return list(dict.fromkeys(n for name in names for n in (registry if name == "all" else [name])))


def as_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by the names of their fields: with underscores in place of the dashes of a command line."""
    return {option.replace("-", "_"): value for option, value in values.items()}


def applicable(
    group: str, values: dict[str, Any], configs: Mapping[str, type], say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Select for each member of a group the options that it has.

    Args:
        group: ``mixer`` or ``task``.
        values: options of the group, with dashes as on a command line or with underscores.
        configs: ``Config`` class of each member.
        say: prints a line for each option that does not apply to all members.

    Returns:
        Options by member.

    Raises:
        ValueError: an option applies to none of the members.
    """
    values = as_fields(values)
    for option in values:
        lacking = [member for member, config in configs.items() if option not in defaults_of(config)]
        message = f"{flag_of(option, group)} does not apply to {group} {', '.join(lacking)}"
        if len(lacking) == len(configs):
            known = dict.fromkeys(flag_of(name, group) for config in configs.values() for name in defaults_of(config))
            raise ValueError(f"{message}: the options are {', '.join(known) or 'none'}")
        if lacking:
            say(message)

    return {
        member: {option: value for option, value in values.items() if option in defaults_of(config)}
        for member, config in configs.items()
    }


def defaults_of(config_class: type) -> dict[str, Any]:
    """Return the fields of a ``Config`` class with their defaults."""
    instance = config_class()
    return {f.name: getattr(instance, f.name) for f in fields(instance)}


def cli(options_class: type, default: Any, arguments: Sequence[str], subcommand: str = "") -> Any:
    """Parse options with ``tyro.cli``, whose error box becomes the one line of a ValueError.

    Args:
        options_class: dataclass of the options.
        default: instance with the defaults.
        arguments: words of the command line.
        subcommand: word before ``arguments``, if any.

    Raises:
        ValueError: an option is unknown, has no value, or a wrong one.
    """
    hints = get_type_hints(options_class, include_extras=True)
    unnamed = {flag_of(name) for name, hint in hints.items() if tyro.conf.Positional in get_args(hint)}
    if named := unnamed.intersection(argument.partition("=")[0] for argument in arguments):
        raise ValueError(f"{named.pop()} is no option: give its value alone, in its place; see --help")

    options, unknown = parse_known(options_class, default, arguments, subcommand)
    if unknown:
        flags = {flag_of(name): text for name, text in texts_of(options_class).items()}
        raise ValueError(
            not_understood(unknown[0], {f: text for f, text in flags.items() if f not in unnamed}, arguments)
        )
    return options


def parse_known(
    options_class: type, default: Any, arguments: Sequence[str], subcommand: str = ""
) -> tuple[Any, list[str]]:
    """Return the options, and the arguments that no option takes; arguments and errors as ``cli``."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            parsed: tuple[Any, list[str]] = tyro.cli(
                options_class,
                default=default,
                args=list(arguments),
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff),
                prog=f"{command_name()} {subcommand}".rstrip(),
            )
    except SystemExit as stop:
        if not stop.code:
            raise

        # The text stands between the box's title and the first rule.
        _title, *rows = (line.strip("│╭╮╰╯ ") for line in box.getvalue().splitlines())
        texts = itertools.dropwhile(_is_rule, rows)  # drawn in ASCII, the box has a rule under its title
        message = itertools.takewhile(lambda row: not _is_rule(row), texts)
        text = " ".join(message).rstrip(".")
        advice = "separate values by spaces" if WITH_COMMA.search(text) else "see --help"
        raise ValueError(f"{_in_plain_words(text)}; {advice}") from stop

    if empty := _without_values(parsed[0], arguments):
        raise ValueError(f"what follows {empty[0]} is missing: give at least one value")
    return parsed


def _in_plain_words(text: str) -> str:
    """Return what the parser says of a value that it cannot read, without the names of Python's types."""
    if (found := NOT_READ.fullmatch(text)) is None:
        return text
    flag, reason, value = found.groups()
    kinds = {"int": "no whole number", "float": "no number"}
    kind = next((kind for name, kind in kinds.items() if re.search(rf"\b{name}\b", reason, re.IGNORECASE)), None)
    return f"{flag}: cannot read {value}" if kind is None else f"{flag}: {value} is {kind}"


def _without_values(options: Any, arguments: Sequence[str]) -> list[str]:
    """Return the options that stand in ``arguments`` without any of the several values that they can have.

    They would else mean what they mean when they are left out: their default, or all there is.
    """
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    inside = [name for part in values.values() if is_dataclass(part) for name in _without_values(part, arguments)]
    return [flag for name, value in values.items() if value == () and (flag := flag_of(name)) in arguments] + inside


def _is_rule(row: str) -> bool:
    return "──" in row or "---" in row or not row
