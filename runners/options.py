"""Options from dataclasses: the command line, and keyword arguments of Python functions.

An option is a field of a dataclass, whose docstring is its help, and whose ``__post_init__`` checks its value. tyro
makes the command line and prints its own messages.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_origin, get_type_hints

import docstring_parser
import tyro

from mixers.options import BETWEEN, converted, option_of

Options = TypeVar("Options")


def parse(options_class: type[Options], arguments: Sequence[str] | None, default: Any = None) -> Options:
    """Parse a command line.

    Args:
        options_class: dataclass of the options.
        arguments: words of the command line; those of the process if None.
        default: instance with the defaults.

    Raises:
        SystemExit: an option is unknown or cannot be read, with status 2; or the help was asked for.
        ValueError: a value is refused by ``__post_init__``.
    """
    return tyro.cli(options_class, prog=_program(), args=arguments, default=default, config=_CONFIG, registry=_READERS)


def _program() -> str | None:
    """Return what a user types before the options: ``python -m runners.mad``."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else None


def parse_nested(
    options_class: type[Options], arguments: Sequence[str], default: Any, configs: Mapping[str, Mapping[str, type]]
) -> tuple[Options, dict[str, dict[str, Any]]]:
    """Parse a command line with options of the layers and tasks that it names: ``--mixer.block 4``.

    Args:
        options_class: dataclass of the program's own options.
        arguments: words of the command line.
        default: instance with the defaults.
        configs: by group, ``mixer`` or ``task``, the ``Config`` class of each member that the command line names.

    Returns:
        The options; and by group, the options of layers or tasks that were given.

    Raises:
        SystemExit, ValueError: as ``parse``; ValueError also for the argument of a module that takes the model width.
    """
    # The help has the order of the fields.
    entries = vars(options_class)["__dataclass_fields__"]
    for name in names_of(options_class):
        entries[name] = entries.pop(name)

    words = {word.partition("=")[0].replace("_", "-") for word in arguments}
    own: Any = Annotated[options_class, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="")]
    parts: list[Any] = [("own", own, field(default=default))]
    for group, classes in configs.items():
        found: dict[str, Any] = {}
        for config in classes.values():
            if (flag := flag_of(getattr(config, "width_name", ""), group)) in words:
                raise ValueError(f"{flag} takes the model width: give --width")
            texts = {p.arg_name: p.description or "" for p in docstring_parser.parse(config.__doc__ or "").params}
            hints, defaults = get_type_hints(config), config()
            for entry in fields(config):
                default_of = f"(default: {getattr(defaults, entry.name)})"
                flag = flag_of(entry.name).removeprefix("--")
                about = tyro.conf.arg(name=flag, help=texts.get(entry.name, ""), help_behavior_hint=default_of)
                # Any option may be left out; choices are listed without None.
                hint, has_choices = hints[entry.name], get_origin(hints[entry.name]) is Literal
                hint, unset = (hint, getattr(defaults, entry.name)) if has_choices else (hint | None, None)
                found.setdefault(entry.name, (entry.name, Annotated[hint, about], field(default=unset)))
        part = make_dataclass(f"{group.title()}Options", found.values(), frozen=True, kw_only=True)
        parts.append((f"of_{group}", Annotated[part, tyro.conf.arg(name=group)], field(default_factory=part)))
    made = make_dataclass(options_class.__name__, parts, frozen=True, kw_only=True)
    made.__doc__ = options_class.__doc__

    parsed: Any = tyro.cli(made, prog=_program(), args=arguments, config=_CONFIG, registry=_READERS)
    given = {
        group: {n: value for n, value in vars(getattr(parsed, f"of_{group}")).items() if flag_of(n, group) in words}
        for group in configs
    }
    return parsed.own, given


def peek(arguments: Sequence[str], **defaults: Any) -> dict[str, Any]:
    """Return the values of a few options, on which it depends how the rest of a command line is read.

    Args:
        arguments: words of the command line.
        **defaults: by name of the option, its default; a tuple for an option that takes several values.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, value in defaults.items():
        parser.add_argument(flag_of(name), nargs="*" if isinstance(value, tuple) else "?", default=value)
    return vars(parser.parse_known_args(arguments)[0])


def from_keywords(default: Options, function: str, values: Mapping[str, Any]) -> Options:
    """Return options with the keyword arguments of a Python function in place of their defaults.

    Raises:
        TypeError: there is no such option.
        ValueError: a value is of another type than its option, or is refused.
    """
    known = names_of(type(default))
    if unknown := [name for name in values if name not in known]:
        raise TypeError(f"{function}() has no argument {unknown[0]!r}: choose from {', '.join(known)}")

    # A list or a single value becomes a tuple, a text a path.
    plain: dict[str, Any] = {}
    for name, value in values.items():
        hint = get_type_hints(type(default))[name]
        if hint is Path and isinstance(value, str | Path):
            value = path_of(str(value))
        elif getattr(hint, "__origin__", None) is tuple and not isinstance(value, tuple):
            value = tuple(value) if isinstance(value, list) else (value,)
        plain[name] = value
    return replace(default, **converted(type(default), plain))  # type: ignore[type-var]


def applicable(
    group: str, values: Mapping[str, Any], configs: Mapping[str, type], say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Select for each layer or task the options that it has.

    Args:
        group: ``mixer`` or ``task``.
        values: options by name, as in Python or on the command line: ``transformer__heads``, ``transformer.heads``.
        configs: ``Config`` class of each member.
        say: prints a line for each option that does not apply to all members.

    Raises:
        ValueError: an option applies to none of the members.
    """
    values = {name.replace("-", "_").replace(".", BETWEEN): value for name, value in values.items()}
    names = {member: [entry.name for entry in fields(config)] for member, config in configs.items()}
    for option in values:
        lacking = [member for member in configs if option not in names[member]]
        message = f"{flag_of(option, group)} does not apply to {group} {', '.join(lacking)}"
        if len(lacking) == len(configs):
            known = dict.fromkeys(flag_of(name, group) for of_member in names.values() for name in of_member)
            raise ValueError(f"{message}: the options are {', '.join(known) or 'none'}")
        if lacking:
            say(message)
    return {
        member: {option: value for option, value in values.items() if option in names[member]} for member in configs
    }


def heads_of(config: type) -> list[str]:
    """Return the fields of a ``Config`` that are numbers of heads, those of the members of a stack included."""
    return [entry.name for entry in fields(config) if option_of(entry.name) == "heads"]


def expand(names: Sequence[str], registry: Mapping[str, Any]) -> list[str]:
    """Return each name once, in order, with the whole registry in place of ``all``."""
    return list(dict.fromkeys(n for name in names for n in (registry if name == "all" else [name])))


def names_of(options_class: type[Any]) -> list[str]:
    """Return the names of options in the order of their class, inherited ones last."""
    known = [vars(base)["__dataclass_fields__"] for base in options_class.__mro__[:-1]]
    return sorted(known[0], key=lambda name: sum(name in of_base for of_base in known))


def path_of(word: str) -> Path:
    """Return the path that a word names.

    Raises:
        ValueError: it is empty, which would be the current folder.
    """
    if not word:
        raise ValueError("a path is empty: name a file or a folder (. is the current folder)")
    return Path(word)


def flag_of(name: str, group: str = "") -> str:
    """Return an option as the command line spells it: ``--name``, ``--group.name``, or ``--group.member.name``."""
    return f"--{group}{'.' * bool(group)}{name.replace(BETWEEN, '.').replace('_', '-')}"


def print_help(documentation: str | None) -> None:
    """Print the purpose of a program and its examples, and exit with status 2, because nothing was done."""
    purpose, examples, *_ = (documentation or "").strip().split("\n\n")
    print(f"{purpose}\n\n{examples}\n\n--help lists the options.", file=sys.stderr)
    raise SystemExit(2)


_CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff)
_READERS = tyro.constructors.ConstructorRegistry()


@_READERS.primitive_rule
def _reader(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """Return how words become paths and numbers, where tyro's own way is another; -0.0 is 0.0."""
    readers: dict[Any, Callable[[str], Any]] = {Path: path_of, float: lambda word: float(word) + 0.0}
    if info.type not in readers:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=info.type.__name__.upper(),
        instance_from_str=lambda words: readers[info.type](words[0]),
        is_instance=lambda value: isinstance(value, info.type),
        str_from_instance=lambda value: [str(value)],
    )
