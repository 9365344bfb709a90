"""The command line, generated from dataclasses: options of the runner, of the chosen mixers and of the chosen tasks."""

import argparse
import contextlib
import errno
import io
import itertools
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields, make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

import docstring_parser
import tyro

from mixers import MIXERS
from mixers.origin import origin, where
from mixers.registry import find_mixer
from runners import __version__
from runners.interrupt import INTERRUPTED, StoppedError, heed_interrupts
from tasks import TASKS, find_task


def fail(message: str) -> NoReturn:
    """Print one line to standard error and exit with status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def run_command(main: Callable[[], None], interrupted: str) -> None:
    """Run a program and turn interruptions into exit statuses; with ``--version`` print its version instead.

    Ctrl-C prints ``interrupted``. An orderly stop prints the step at which training stopped. A closed pipe, as of
    ``| head``, prints nothing. An error in a user's code prints one line, with its place and a file with the traceback.

    Args:
        main: the program.
        interrupted: line for Ctrl-C.
    """
    if "--version" in sys.argv[1:]:
        print(f"{_command()} {__version__}")
        return

    try:
        try:
            heed_interrupts()
            main()
        finally:
            sys.stdout.flush()

    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None

    except StoppedError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.status) from None

    except BrokenPipeError:
        # Python flushes once more at its end (https://docs.python.org/3/library/signal.html#note-on-sigpipe)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None

    except Exception as error:
        if (place := origin(error)) is None:
            raise
        print(f"error: {place}: {_described(error)}; traceback: {_traceback_file(error)}", file=sys.stderr)
        raise SystemExit(1) from None


def _described(error: Exception) -> str:
    """Return the type, the message and the notes of an error as one line."""
    message = " ".join(str(error).split())
    return "; ".join([f"{type(error).__name__}: {message}", *getattr(error, "__notes__", [])])


def _traceback_file(error: Exception) -> str:
    """Write the traceback of an error into a temporary file, and return its name."""
    with tempfile.NamedTemporaryFile("w", prefix="traceback-", suffix=".txt", delete=False) as file:
        file.writelines(traceback.format_exception(error))
    return file.name


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed that PyTorch's generators refuse or map to another seed."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"--seed {seed} must be 0 or more, and below 2**64")


def check_out(out: Path) -> None:
    """Raise ValueError if ``out`` is a file instead of a folder."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a folder")


@contextlib.contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors that the user can correct, of these ``kinds``, into one line and exit status 2."""
    try:
        yield
    except BrokenPipeError:  # ``run_command`` handles it
        raise
    except kinds as error:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        advice = ": free some space, then the same command resumes" if full else ""
        fail(" ".join(f"{where(error)}{error}".split()) + advice)


FIND: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "mixer": (MIXERS, find_mixer),
    "task": (TASKS, find_task),
}
"""Fields that have nested options: the registry of each, and the function that finds a name."""


def parse(base: type, preset: Any, arguments: Sequence[str]) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Parse ``arguments`` into an instance of ``base`` and the nested ``--mixer.*`` and ``--task.*`` options.

    Args:
        base: dataclass of the program's own options.
        preset: instance of ``base`` with the defaults.
        arguments: words of the command line.

    Returns:
        The options; and the nested options that were given, by name, for each of the fields ``mixer`` and ``task`` that
        ``base`` has.

    Raises:
        ValueError: an unknown name, or an option that applies to none of the chosen mixers or tasks.
    """
    configs = _chosen_configs(base, preset, arguments)
    extended = _with_nested(base, configs)

    defaults = {f.name: getattr(preset, f.name) for f in fields(base)}
    options, unknown = cli(extended, extended(**defaults), arguments)
    if unknown:
        raise ValueError(_explain_unknown(unknown[0], configs))

    plain = base(**{f.name: getattr(options, f.name) for f in fields(base)})
    groups = [f.name for f in fields(base) if f.name in FIND]
    return plain, {group: _given(group, getattr(options, f"{group}_options"), arguments) for group in groups}


def _chosen_configs(base: type, preset: Any, arguments: Sequence[str]) -> dict[str, dict[str, type]]:
    """Return the ``Config`` classes of the chosen mixers and tasks by name, for each field that ``base`` has.

    Raises:
        ValueError: ``--mixer`` or ``--task`` is given twice, or names what does not exist.
    """
    groups = [f.name for f in fields(base) if f.name in FIND]
    given = [argument.partition("=")[0] for argument in arguments]
    if repeated := [group for group in groups if given.count(f"--{group}") > 1]:
        raise ValueError(f"--{repeated[0]} is given more than once: give it once, with all names")

    # A first look at the arguments, for the names alone.
    names = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for group in groups:
        default = getattr(preset, group)
        names.add_argument(f"--{group}", nargs="*", default=[default] if isinstance(default, str) else list(default))
    chosen, _ = names.parse_known_args(arguments)

    return {
        group: {name: find(name).Config for name in expand(getattr(chosen, group), registry)}
        for group, (registry, find) in FIND.items()
        if group in groups
    }


def _with_nested(base: type, configs: Mapping[str, dict[str, type]]) -> type:
    """Derive from ``base`` a dataclass with help for its fields, and with a field of nested options for each group."""
    hints = get_type_hints(base)
    texts = _texts(base)

    # The fields of base, with their docstrings and registered names as help.
    names_of = {group: f" Names: {', '.join(FIND[group][0])}." for group in configs}
    helps = {f.name: texts[f.name] + names_of.get(f.name, "") for f in fields(base)}
    described = [
        (name, Annotated[hints[name], tyro.conf.arg(help=text, help_behavior_hint=_hint)])
        for name, text in helps.items()
    ]

    options_of = {group: _nested_options(group, classes) for group, classes in configs.items()}
    nested = [
        (f"{group}_options", Annotated[made, tyro.conf.arg(name=group)], field(default_factory=made))
        for group, made in options_of.items()
    ]

    extended = make_dataclass("Options", [*described, *nested], bases=(base,), frozen=True, kw_only=True)
    extended.__doc__ = base.__doc__
    return extended


def expand(names: Sequence[str], registry: dict[str, Any]) -> list[str]:
    """Return each name once, in order, with the whole registry in place of ``all``."""
    return list(dict.fromkeys(n for name in names for n in (registry if name == "all" else [name])))


def override(config_class: type, values: dict[str, Any]) -> Any:
    """Build a ``config_class`` from ``values``, and from defaults for its other fields.

    Raises:
        ValueError: a value is infinite or not a number.
    """
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name.replace('_', '-')} {value} must be a finite number")

    return replace(config_class(), **values)


def applicable(
    group: str, values: dict[str, Any], configs: Mapping[str, type], say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Select for each member of a group the options that it has.

    Args:
        group: ``mixer`` or ``task``.
        values: options of the group.
        configs: ``Config`` class of each member.
        say: prints a line for each option that does not apply to all members.

    Returns:
        Options by member.
    """
    for option in values:
        if lacking := [member for member, config in configs.items() if option not in _defaults(config)]:
            say(f"{_flag(group, option)} does not apply to {group} {', '.join(lacking)}")

    return {
        member: {option: value for option, value in values.items() if option in _defaults(config)}
        for member, config in configs.items()
    }


def _nested_options(group: str, classes: dict[str, type]) -> type:
    """Make a dataclass of the options that any of ``classes`` has, except those whose types differ.

    The default is that of the first class that has the option.
    """
    made = []
    for name in dict.fromkeys(f.name for config in classes.values() for f in fields(config)):
        owners = {member: config for member, config in classes.items() if name in _defaults(config)}
        first, *others = owners.values()
        kind = get_type_hints(first)[name]
        if any(get_type_hints(other)[name] != kind for other in others):
            continue

        # Help: the defaults of all owners, and the owners unless all have the option.
        defaults = ", ".join(dict.fromkeys(str(_defaults(config)[name]) for config in owners.values()))
        whose = "" if len(owners) == len(classes) else f"; {group} {', '.join(owners)} alone"
        hint = f"(default: {defaults}{whose})"
        about = tyro.conf.arg(help=_texts(first).get(name, ""), help_behavior_hint=hint)
        default = field(default_factory=partial(getattr, first(), name))  # it may be a list
        made.append((name, Annotated[kind, about, tyro.conf.FlagConversionOff], default))

    return make_dataclass(f"{group.capitalize()}Options", made, frozen=True, kw_only=True)


def _texts(options_class: type) -> dict[str, str]:
    """Return the texts on a class's fields, from the docstrings of the class and of its base classes."""
    return {
        param.arg_name: param.description or ""
        for ancestor in reversed(options_class.__mro__)
        for param in docstring_parser.parse(ancestor.__doc__ or "").params
    }


def _hint(default: str) -> str:
    """Return the help's text on a default; empty for an option without one."""
    return "" if default in ("", "None") else f"(default: {default})"


def _defaults(config_class: type) -> dict[str, Any]:
    """Return the fields of a ``Config`` class with their defaults."""
    instance = config_class()
    return {f.name: getattr(instance, f.name) for f in fields(instance)}


def cli(options_class: type, default: Any, arguments: Sequence[str], subcommand: str = "") -> tuple[Any, list[str]]:
    """Parse options with ``tyro.cli``, whose error box becomes the one line of a ValueError.

    Args:
        options_class: dataclass of the options.
        default: instance with the defaults.
        arguments: words of the command line.
        subcommand: word before ``arguments``, if any.

    Returns:
        The options, and the arguments that no option takes.

    Raises:
        ValueError: an option has no value or a wrong one.
    """
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            parsed: tuple[Any, list[str]] = tyro.cli(
                options_class,
                default=default,
                args=list(arguments),
                return_unknown_args=True,
                prog=f"{_command()} {subcommand}".rstrip(),
            )
            return parsed

    except SystemExit as stop:
        if not stop.code:
            raise

        # The text stands between the box's title and the first rule.
        _title, *rows = (line.strip("│╭╮╰╯ ") for line in box.getvalue().splitlines())
        texts = itertools.dropwhile(_is_rule, rows)  # drawn in ASCII, the box has a rule under its title
        message = itertools.takewhile(lambda row: not _is_rule(row), texts)
        raise ValueError(" ".join(message).rstrip(".") + "; see --help") from stop


def _command() -> str:
    """Return the command that started this program, by the name of its module."""
    spec = sys.modules["__main__"].__spec__
    return sys.argv[0] if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"


def _is_rule(row: str) -> bool:
    return "──" in row or "---" in row or not row


def not_understood(argument: str) -> str:
    """Return the message on an argument that no option takes."""
    return f"{'unknown option' if argument.startswith('-') else 'no option takes'} {argument}: see --help"


def _explain_unknown(option: str, configs: dict[str, dict[str, type]]) -> str:
    """Return the message on an option that is unknown or does not apply."""
    group, _, name = option.removeprefix("--").partition("=")[0].partition(".")
    if group not in configs or not name:
        return not_understood(option)
    if not configs[group]:
        return f"--{group} has no value: name one"

    members = configs[group]
    field_name = name.replace("-", "_")
    if having := [member for member, config in members.items() if field_name in _defaults(config)]:
        return f"{option} means different things to {group} {', '.join(having)}: give them one at a time"

    known = ", ".join(dict.fromkeys(_flag(group, name) for config in members.values() for name in _defaults(config)))
    return f"{option} does not apply to {group} {', '.join(members)}: the options are {known or 'none'}"


def _flag(group: str, option: str) -> str:
    return f"--{group}.{option.replace('_', '-')}"


def _given(group: str, options: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options of a group that ``arguments`` name; each class has its own defaults for the others."""
    names = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    return {f.name: getattr(options, f.name) for f in fields(options) if _flag(group, f.name) in names}
