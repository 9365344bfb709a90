"""What programs tell their user: the help of options, the short help, advice on unknown options, errors in Python."""

import difflib
import re
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from typing import Any

import docstring_parser

COLUMNS = 79
"""Width of the short help, for terminals of 80 columns."""


@cache
def texts_of(options_class: type) -> dict[str, str]:
    """Return the texts on a class's fields, from the docstrings of the class and of its base classes."""
    return {
        param.arg_name: " ".join((param.description or "").replace("``", '"').split())
        for ancestor in reversed(options_class.__mro__)
        for param in docstring_parser.parse(ancestor.__doc__ or "").params
    }


def default_hint(default: str) -> str:
    """Return the help's text on a default; empty for an option without one."""
    return "" if default in ("", "None") else f"(default: {default})"


def flag_of(name: str, group: str = "") -> str:
    """Return a field of options as the command line spells it: ``--name``, or ``--group.name``."""
    return f"--{group}{'.' * bool(group)}{name.replace('_', '-')}"


def in_groups(options_class: Any) -> dict[str, list[str]]:
    """Return the fields of options by the title of their group.

    ``options_class.groups`` names the first field of each group; the fields after it belong to the same group.
    """
    found: dict[str, list[str]] = {}
    title = ""
    for field in fields(options_class):
        title = options_class.groups.get(field.name, title)
        found.setdefault(title, []).append(field.name)
    return found


def short_help(documentation: str, options_class: type | None) -> str:
    """Return what a command prints when it is given nothing: its purpose, examples, and the names of its options.

    Args:
        documentation: docstring of the program; its first paragraph is the purpose, its second the examples.
        options_class: dataclass of the options, with ``groups``; None if there are none to print.
    """
    purpose, examples, *_ = documentation.strip().split("\n\n")
    if options_class is None:
        return "\n".join([purpose, "", examples, "", "--help, also after the first word, explains more."])

    groups = [
        textwrap.fill(
            f"{title} options: {' '.join(map(flag_of, names))}",
            COLUMNS,
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
        for title, names in in_groups(options_class).items()
    ]
    more = "--help explains them, and the options of layers and tasks named beside it."
    return "\n".join([purpose, "", examples, "", *groups, "", more])


def not_understood(argument: str, known: Mapping[str, str], arguments: Sequence[str]) -> str:
    """Return the message on an argument that no option takes.

    Args:
        argument: word of the command line.
        known: the command's options, as the command line spells them, with their help.
        arguments: the whole command line.
    """
    if not argument.startswith("-"):
        place = max(at for at, word in enumerate(arguments) if word == argument)
        flag, value = ["", "", *arguments][place : place + 2]
        has_value = flag.startswith("--") and "=" not in flag and not value.startswith("--")
        advice = f"{flag} takes one value, so run the command once for each" if has_value else "see --help"
        if flag == "--seeds":
            advice = "--seeds takes the number of seeds: give --seeds 3 for seeds 0, 1 and 2"
        return f"no option takes {argument}: {advice}"

    option = argument.partition("=")[0]
    found = closest(option, known)
    return f"unknown option {option}: " + (f"did you mean {found}?" if found else "see --help")


def row_of(name: str, rows: Iterable[str]) -> str:
    """Return the row of that name.

    Raises:
        ValueError: there is none; the message names the one that was probably meant.
    """
    if name in (rows := tuple(rows)):
        return name
    similar = difflib.get_close_matches(name.lower(), rows, n=1)
    meant = f"did you mean {similar[0]}? The rows are" if similar else "choose from"
    advice = "separate names by spaces" if "," in name else f"{meant} {', '.join(rows)}"
    raise ValueError(f"no row {name!r}: {advice}")


def closest(option: str, known: Mapping[str, str]) -> str | None:
    """Return the option that a user most likely meant, or None.

    It is the one of the same name in another group (``--mixer.heads`` for ``--heads``), or of a similar name, or the
    one whose help says the words of the option (``--lr`` for ``--learning-rate``).

    Args:
        option: unknown option, with its dashes.
        known: options with their help.
    """
    name = _plain(option)
    by_name: dict[str, str] = {}
    for flag in known:
        by_name.setdefault(_plain(flag), flag)
        by_name.setdefault(_plain(flag).rpartition(".")[2], flag)

    # The name itself, without its group, or as the start of one option alone.
    for spelling in (name, name.rpartition(".")[2]):
        if spelling in by_name:
            return by_name[spelling]
    if len(longer := {flag for other, flag in by_name.items() if other.startswith(f"{name}-")}) == 1:
        return longer.pop()

    # A similar name, or the words of the help; a name of several words is rarely there by chance.
    similar = difflib.get_close_matches(name, by_name, n=1, cutoff=0.7)
    by_help = _by_help(name.replace("-", " "), known)
    if by_help is not None and ("-" in name or not similar):
        return by_help
    return by_name[similar[0]] if similar else None


def _by_help(words: str, known: Mapping[str, str]) -> str | None:
    """Return the option with the shortest help that says ``words``, or None."""
    pattern = re.compile(rf"\b{re.escape(words)}", re.IGNORECASE)
    return min(
        (flag for flag, text in known.items() if pattern.search(text)), key=lambda f: len(known[f]), default=None
    )


def _plain(option: str) -> str:
    """Return the name of an option in small letters with dashes between words, without those in front of it."""
    return option.lstrip("-").replace("_", "-").lower()


@contextmanager
def naming_arguments(arguments: Container[str]) -> Iterator[None]:
    """Make errors in the context, which name options of the command, name the arguments of a Python function."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        error.args = tuple(in_python(part, arguments) for part in error.args)
        raise


def in_python(message: Any, arguments: Container[str]) -> Any:
    """Return a message with options of the command as ``arguments``; whole commands and paths stay."""

    def spell(option: re.Match[str]) -> str:
        if option[0].startswith("python"):
            return option[0]
        group, name = option[1], option[2].replace("-", "_")
        if group is not None:
            return f"{group}_options[{name!r}]"
        return name if name in arguments else option[0]

    if not isinstance(message, str):
        return message
    return re.sub(r"python -m [^,;()]*|(?<![\w/.-])--(?:(mixer|task)\.)?([a-z][\w-]*)", spell, message)
