"""The command line, generated from dataclasses: options of the runner, of the chosen mixers and of the chosen tasks."""

import argparse
import contextlib
import io
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields, make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

import docstring_parser
import tyro

from mixers import MIXERS
from mixers.find import find_mixer
from runners.interrupt import INTERRUPTED, StoppedError
from tasks import TASKS, find_task


def fail(message: str) -> NoReturn:
    """One line on standard error, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def run_command(main: Callable[[], None], interrupted: str) -> None:
    """Run a program; Ctrl-C ends it with the line ``interrupted``, a wish to stop with a line that names the step, and
    a reader who stops reading silently.
    """
    try:
        try:
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


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed that PyTorch's generators do not take, or take for another one."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"--seed {seed} must be 0 or more, and below 2**64")


def check_out(out: Path) -> None:
    """Raise ValueError if ``out`` is a file, not a folder of results."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a folder")


@contextlib.contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors that a person can mend into one line and exit status 2."""
    try:
        yield
    except BrokenPipeError:  # nobody reads on: see ``run_command``
        raise
    except kinds as error:
        fail(" ".join(str(error).split()))


def parse(base: type, preset: Any, arguments: Sequence[str]) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Parse ``arguments`` into an instance of ``base`` and the nested ``--mixer.*`` and ``--task.*`` options.

    Returns:
        The options, and for each of the fields ``mixer`` and ``task`` that ``base`` has the nested ones that were set.

    Raises:
        ValueError: an unknown name, or an option that applies to none of the chosen mixers or tasks.
    """
    groups = [f.name for f in fields(base) if f.name in FIND]
    given = [argument.partition("=")[0] for argument in arguments]
    if repeated := [group for group in groups if given.count(f"--{group}") > 1]:
        raise ValueError(f"--{repeated[0]} is given more than once: give it once, with all names")
    names = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for group in groups:
        default = getattr(preset, group)
        names.add_argument(f"--{group}", nargs="*", default=[default] if isinstance(default, str) else list(default))
    chosen, _ = names.parse_known_args(arguments)
    configs = {
        group: {name: find(name).Config for name in expand(getattr(chosen, group), registry)}
        for group, (registry, find) in FIND.items()
        if group in groups
    }
    options_of = {group: _nested_options(group, classes) for group, classes in configs.items()}
    hints, texts = get_type_hints(base), _texts(base)
    names_of = {group: f" Names: {', '.join(FIND[group][0])}." for group in groups}
    helps = {f.name: texts[f.name] + names_of.get(f.name, "") for f in fields(base)}
    described = [
        (name, Annotated[hints[name], tyro.conf.arg(help=text, help_behavior_hint=_hint)])
        for name, text in helps.items()
    ]
    nested = [
        (f"{group}_options", Annotated[made, tyro.conf.arg(name=group)], field(default_factory=made))
        for group, made in options_of.items()
    ]
    extended = make_dataclass("Options", [*described, *nested], bases=(base,), frozen=True, kw_only=True)
    extended.__doc__ = base.__doc__
    inherited = {f.name: getattr(preset, f.name) for f in fields(base)}
    options, unknown = cli(extended, extended(**inherited), arguments)
    if unknown:
        raise ValueError(_explain_unknown(unknown[0], configs))
    plain = base(**{f.name: getattr(options, f.name) for f in fields(base)})
    return plain, {group: _given(group, getattr(options, f"{group}_options"), arguments) for group in groups}


def expand(names: Sequence[str], registry: dict[str, Any]) -> list[str]:
    """``all`` stands for the whole registry; each name once, in order."""
    return list(dict.fromkeys(n for name in names for n in (registry if name == "all" else [name])))


FIND: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "mixer": (MIXERS, find_mixer),
    "task": (TASKS, find_task),
}

"""What nested options belong to, by field: the registry, and how a name is found."""


def override(config_class: type, values: dict[str, Any]) -> Any:
    """``config_class`` with its defaults, but for ``values``.

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
    """Those of a group's options ``values`` that each of its members has; says to which members one does not apply."""
    for option in values:
        if lacking := [member for member, config in configs.items() if option not in _defaults(config)]:
            say(f"{_flag(group, option)} does not apply to {group} {', '.join(lacking)}")
    return {
        member: {option: value for option, value in values.items() if option in _defaults(config)}
        for member, config in configs.items()
    }


def _nested_options(group: str, classes: dict[str, type]) -> type:
    """Dataclass of the options that any of ``classes`` has, with the first one's default, but for those whose types
    differ.
    """
    made = []
    for name in dict.fromkeys(f.name for config in classes.values() for f in fields(config)):
        owners = {member: config for member, config in classes.items() if name in _defaults(config)}
        first, *others = owners.values()
        kind = get_type_hints(first)[name]
        if any(get_type_hints(other)[name] != kind for other in others):
            continue
        defaults = ", ".join(dict.fromkeys(str(_defaults(config)[name]) for config in owners.values()))
        whose = "" if len(owners) == len(classes) else f"; {group} {', '.join(owners)} alone"
        hint = f"(default: {defaults}{whose})"
        about = tyro.conf.arg(help=_texts(first).get(name, ""), help_behavior_hint=hint)
        default = field(default_factory=partial(getattr, first(), name))  # it may be a list
        made.append((name, Annotated[kind, about, tyro.conf.FlagConversionOff], default))
    return make_dataclass(f"{group.capitalize()}Options", made, frozen=True, kw_only=True)


def _texts(options_class: type) -> dict[str, str]:
    """What the docstrings of a class and of its base classes say about each of its fields."""
    return {
        param.arg_name: param.description or ""
        for ancestor in reversed(options_class.__mro__)
        for param in docstring_parser.parse(ancestor.__doc__ or "").params
    }


def _hint(default: str) -> str:
    """What the help says of a default: nothing where an option is not given by default."""
    return "" if default in ("", "None") else f"(default: {default})"


def _defaults(config_class: type) -> dict[str, Any]:
    instance = config_class()
    return {f.name: getattr(instance, f.name) for f in fields(instance)}


def cli(options_class: type, default: Any, arguments: Sequence[str], subcommand: str = "") -> tuple[Any, list[str]]:
    """``tyro.cli`` with its error box folded into one line; ``subcommand`` is the word before ``arguments``, if any."""
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
        _title, *rows = (line.strip("│╭╮╰╯ ") for line in box.getvalue().splitlines())
        texts = itertools.dropwhile(_is_rule, rows)  # drawn in ASCII, the box has a rule under its title
        message = itertools.takewhile(lambda row: not _is_rule(row), texts)
        raise ValueError(" ".join(message).rstrip(".") + "; see --help") from stop


def _command() -> str:
    """How this program was started, for its help: by the name of its module."""
    spec = sys.modules["__main__"].__spec__
    return sys.argv[0] if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"


def _is_rule(row: str) -> bool:
    return "──" in row or "---" in row or not row


def not_understood(argument: str) -> str:
    """Why an argument is refused that no option takes."""
    return f"{'unknown option' if argument.startswith('-') else 'no option takes'} {argument}: see --help"


def _explain_unknown(option: str, configs: dict[str, dict[str, type]]) -> str:
    """Why an argument was not understood."""
    group, _, name = option.removeprefix("--").partition("=")[0].partition(".")
    if group not in configs or not name:
        return not_understood(option)
    field_name = name.replace("-", "_")
    if not configs[group]:
        return f"--{group} has no value: name one"
    members = configs[group]
    if having := [member for member, config in members.items() if field_name in _defaults(config)]:
        return f"{option} means different things to {group} {', '.join(having)}: give them one at a time"
    known = ", ".join(dict.fromkeys(_flag(group, name) for config in members.values() for name in _defaults(config)))
    return f"{option} does not apply to {group} {', '.join(members)}: the options are {known or 'none'}"


def _flag(group: str, option: str) -> str:
    return f"--{group}.{option.replace('_', '-')}"


def _given(group: str, options: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """Those of a group's options that ``arguments`` name; the others are left to each class."""
    names = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    return {f.name: getattr(options, f.name) for f in fields(options) if _flag(group, f.name) in names}
