"""Nested options: the command line of a program, and the options of the layers and tasks that it names."""

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

from mixers import MIXERS
from mixers.named import is_path
from mixers.registry import find_mixer
from runners.cli import defaults_of, expand, parse_known
from runners.guidance import closest, default_hint, flag_of, in_groups, not_understood, texts_of
from runners.provenance import keep_sources
from runners.task_names import find_task
from tasks import TASKS

FIND: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "mixer": (MIXERS, find_mixer),
    "task": (TASKS, find_task),
}
"""Fields that have nested options: the registry of each, and the function that finds a name."""


def parse(
    base: Any,
    preset: Any,
    arguments: Sequence[str],
    own: Collection[str] = (),
    of_preset: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Parse ``arguments`` into an instance of ``base`` and the nested ``--mixer.*`` and ``--task.*`` options.

    Args:
        base: dataclass of the program's own options; its ``groups`` names the first field of each group of the help.
        preset: instance of ``base`` with the defaults.
        arguments: words of the command line.
        own: fields of ``base`` that the program hands to layers and tasks, so that they are no nested options.
        of_preset: settings that the preset gives to mixers or tasks, by their names; the help shows them as defaults.

    Returns:
        The options; and the nested options that were given, by name, for each of the fields ``mixer`` and ``task`` that
        ``base`` has.

    Raises:
        ValueError: an unknown name, or an option that applies to none of the chosen mixers or tasks.
    """
    configs = _chosen_configs(base, preset, arguments)
    made = _with_nested(base, preset, configs, own, of_preset)
    options, unknown = parse_known(made, made(), arguments)
    if unknown:
        raise ValueError(_explain_unknown(unknown[0], configs, own, _helps(made), arguments))

    parts = {title: getattr(options, title) for title in in_groups(base)}
    plain = base(**{name: getattr(parts[title], name) for title, names in in_groups(base).items() for name in names})
    return plain, {group: _given(group, getattr(options, f"{group}_options"), arguments) for group in configs}


def _chosen_configs(base: type, preset: Any, arguments: Sequence[str]) -> dict[str, dict[str, type]]:
    """Return the ``Config`` classes of the chosen mixers and tasks by name, for each field that ``base`` has.

    Raises:
        ValueError: an option that takes several values is given twice, or ``--mixer`` or ``--task`` names what does not
            exist.
    """
    groups = [f.name for f in fields(base) if f.name in FIND]
    given = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    several = [name for name, hint in get_type_hints(base).items() if get_origin(hint) is tuple]
    if repeated := [name for name in dict.fromkeys([*groups, *several]) if given.count(flag_of(name)) > 1]:
        what = "names" if repeated[0] in groups else "values"
        raise ValueError(f"{flag_of(repeated[0])} is given more than once: give it once, with all {what}")

    # A first look at the arguments, for the names alone.
    names = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for group in groups:
        default = getattr(preset, group)
        names.add_argument(f"--{group}", nargs="*", default=[default] if isinstance(default, str) else list(default))
    chosen, _ = names.parse_known_args(arguments)

    found = {
        group: {name: find(name) for name in expand(getattr(chosen, group), registry)}
        for group, (registry, find) in FIND.items()
        if group in groups
    }
    keep_sources(*(kind for of_group in found.values() for name, kind in of_group.items() if is_path(name)))
    return {group: {name: kind.Config for name, kind in of_group.items()} for group, of_group in found.items()}


def _with_nested(
    base: Any,
    preset: Any,
    configs: Mapping[str, dict[str, type]],
    own: Collection[str],
    of_preset: Mapping[str, Mapping[str, Any]],
) -> type:
    """Make a dataclass with a part for each group of ``base``, and a part of nested options for each registry."""
    hints, texts = get_type_hints(base), texts_of(base)
    names_of = {group: f" Names: {', '.join(FIND[group][0])}." for group in configs}

    # The fields of base in their groups, with their docstrings and registered names as help.
    parts = []
    for title, names in in_groups(base).items():
        described = []
        for name in names:
            about = tyro.conf.arg(
                help=texts[name] + names_of.get(name, ""),
                help_behavior_hint=default_hint,
                metavar=_metavar(hints[name]),
            )
            described.append((name, Annotated[hints[name], about], field(default=getattr(preset, name))))
        part = make_dataclass(title, described, frozen=True, kw_only=True)
        about = tyro.conf.arg(help="")  # else tyro looks for a docstring
        parts.append((title, Annotated[part, tyro.conf.OmitArgPrefixes, about], field(default_factory=part)))

    # Nested options.
    for group, classes in configs.items():
        part = _nested_options(group, classes, own, of_preset)
        about = tyro.conf.arg(name=group, help="")
        parts.append((f"{group}_options", Annotated[part, about], field(default_factory=part)))

    made = make_dataclass("Options", parts, frozen=True, kw_only=True)
    made.__doc__ = base.__doc__.partition("Attributes:")[0]  # an attribute may be called like a group
    return made


def _metavar(kind: Any) -> str | None:
    """Return the placeholder of a value that may be absent, such as INT; None where tyro's own is good."""
    kinds = get_args(kind)
    return kinds[0].__name__.upper() if kinds[1:] == (type(None),) and isinstance(kinds[0], type) else None


def _nested_options(
    group: str, classes: dict[str, type], own: Collection[str], of_preset: Mapping[str, Mapping[str, Any]]
) -> type:
    """Make a dataclass of the options that any of ``classes`` has, except ``own`` and those whose types differ.

    The default is that of the first class that has the option.
    """
    made = []
    for name in dict.fromkeys(f.name for config in classes.values() for f in fields(config) if f.name not in own):
        owners = {member: config for member, config in classes.items() if name in defaults_of(config)}
        first, *others = owners.values()
        kind = get_type_hints(first)[name]
        if any(get_type_hints(other)[name] != kind for other in others):
            continue

        # Help: the defaults of all owners, and the owners unless all have the option.
        values = [(defaults_of(config) | dict(of_preset.get(member, {})))[name] for member, config in owners.items()]
        defaults = ", ".join(dict.fromkeys(map(str, values)))
        whose = "" if len(owners) == len(classes) else f"; {group} {', '.join(owners)} alone"
        hint = f"(default: {defaults}{whose})"
        about = tyro.conf.arg(help=texts_of(first).get(name, ""), help_behavior_hint=hint)
        default = field(default_factory=partial(getattr, first(), name))  # it may be a list
        made.append((name, Annotated[kind, about, tyro.conf.FlagConversionOff], default))

    return make_dataclass(f"{group.capitalize()}Options", made, frozen=True, kw_only=True)


def _helps(made: type) -> dict[str, str]:
    """Return the help of all options of a class that ``_with_nested`` has made, by their spelling."""
    helps = {}
    for part in fields(made):
        group = part.name.removesuffix("_options") if part.name.endswith("_options") else ""
        for name, hint in get_type_hints(part.default_factory, include_extras=True).items():
            helps[flag_of(name, group)] = hint.__metadata__[0].help or ""
    return helps


def _explain_unknown(
    option: str,
    configs: dict[str, dict[str, type]],
    own: Collection[str],
    known: Mapping[str, str],
    arguments: Sequence[str],
) -> str:
    """Return the message on an option that is unknown or does not apply."""
    group, _, name = option.removeprefix("--").partition("=")[0].partition(".")
    if group not in configs or not name:
        return not_understood(option, known, arguments)
    if not configs[group]:
        return f"--{group} has no value: name one"

    members = configs[group]
    field_name = name.replace("-", "_")
    having = [member for member, config in members.items() if field_name in defaults_of(config)]
    if having and field_name in own:
        return f"{option} is the option {flag_of(field_name)} here: give that one"
    if having:
        return f"{option} means different things to {group} {', '.join(having)}: give them one at a time"

    # Another group's option of the same name may be meant, but hardly one of a similar name.
    lacking = f"{option} does not apply to {group} {', '.join(members)}"
    nested = {flag: text for flag, text in known.items() if flag.startswith(f"--{group}.")}
    same = {flag: "" for flag in known if flag.rpartition(".")[2].removeprefix("--") == name}
    if (meant := closest(f"--{name}", nested | same)) is not None:
        return f"{lacking}: did you mean {meant}?"
    return f"{lacking}: the options are {', '.join(nested) or 'none'}"


def _given(group: str, options: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options of a group that ``arguments`` name; each class has its own defaults for the others."""
    names = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    return {f.name: getattr(options, f.name) for f in fields(options) if flag_of(f.name, group) in names}
