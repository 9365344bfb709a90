"""Make a layer from any ``nn.Module`` that maps (B, T, D) to (B, T, D), or to a collection that begins with that."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from inspect import Parameter
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from mixers.base import ContractError, Layer, Shape
from mixers.options import switch
from mixers.parts import MixerLayer

WIDTH_NAMES = ("d_model", "hidden_size", "dim", "width", "embed_dim", "embedding_dim", "n_embd")
"""Names of the argument that takes the model width, in order of preference."""
SCALARS = (bool, int, float, str)
"""Types of options, also of the entries of tuples."""
ANY = bool | int | float | str
"""Type of an option without one."""
OWN = ("width_argument", "whole_layer")
"""Options of the layer around the module."""


class AdaptedLayer(MixerLayer):
    """Pre-norm layer around a module from outside this project, with the MLP that all layers share."""

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        """Settings of an adapted module: the arguments of its constructor, and which of them takes the model width.

        Attributes:
            width_argument: argument that takes the model width, if it does not have one of the usual names.
            whole_layer: whether the module has norm, residual branches and MLP of its own, so that it is used as it is;
                a class may say so itself, by an attribute of this name.
        """

        width_argument: str | None = None
        whole_layer: bool | None = switch(None)

    module_class: ClassVar[type[nn.Module]]

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        Layer.__init__(self, config, shape) if config.whole_layer else super().__init__(config, shape)
        self.mixer = self.module_class(**_arguments(self.module_class, config, shape.width))

        # Train the real and the imaginary part of a complex parameter.
        for module in [*self.mixer.modules()]:
            for name, parameter in [*module.named_parameters(recurse=False)]:
                if parameter.is_complex() and parameter.requires_grad:
                    register_parametrization(module, name, _AsComplex(), unsafe=True)
                    for part in module.get_submodule(f"parametrizations.{name}").parameters():
                        part._no_weight_decay = getattr(parameter, "_no_weight_decay", False)  # type: ignore[attr-defined]

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.mix(x_BTD) if self.config.whole_layer else super().forward(x_BTD)

    def mix(self, x_BTD: Tensor) -> Tensor:
        y = returned = self.mixer(x_BTD)
        if isinstance(y, Mapping | tuple | list):
            y = next(iter(y.values() if isinstance(y, Mapping) else y), None)

        if not (isinstance(y, Tensor) and y.shape == x_BTD.shape):
            found = f"{tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            if y is not returned:
                found = (
                    f"a {type(returned).__name__} that begins with {'shape ' * isinstance(y, Tensor)}{found}"
                    if len(returned)
                    else f"an empty {type(returned).__name__}"
                )
            raise ContractError(
                f"{self.module_class.__name__} must return a tensor of the shape of its inputs, or a tuple, list or "
                f"dict that begins with it: for {tuple(x_BTD.shape)} it returned {found}"
            )
        if not y.is_floating_point() or (y.dtype in (torch.float64, torch.float16) and y.dtype != x_BTD.dtype):
            raise ContractError(
                f"{self.module_class.__name__} must return the type of its inputs: for {x_BTD.dtype} it returned "
                f"{y.dtype}"
            )
        return y

    @torch.no_grad()
    def seems_whole(self, x_BTD: Tensor) -> bool:
        """Return whether the module looks like a whole layer, with norms, residual branches and MLP of its own.

        It does if large inputs (B, T, D) come out almost as they are, or if it holds two norms of the model width and a
        pair of linear maps to a greater width and back.
        """
        far_BTD = 1e4 * x_BTD
        if (self.mix(far_BTD) - far_BTD).norm() < 0.01 * far_BTD.norm():
            return True
        width, parts = self.shape.width, [*self.mixer.modules()]
        maps = {(part.in_features, part.out_features) for part in parts if isinstance(part, nn.Linear)}
        norms = [
            part
            for part in parts
            if "norm" in type(part).__name__.lower()
            and any(p.shape == (width,) for p in part.parameters(recurse=False))
        ]
        return len(norms) > 1 and any(a == width < b and (b, a) in maps for a, b in maps)

    def _no_step_form(self) -> NotImplementedError:
        return NotImplementedError(
            f"{self.module_class.__name__} has no step form: a class derived from mixers.parts.MixerLayer has one, in "
            "init_state and mix_one"
        )


class _AsComplex(nn.Module):
    """A complex parameter made of two real ones."""

    def forward(self, real: Tensor, imaginary: Tensor) -> Tensor:
        return torch.complex(real, imaginary)

    def right_inverse(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two parts."""
        return parameter.real.clone(), parameter.imag.clone()


def adapt(module_class: type[nn.Module]) -> type[AdaptedLayer]:
    """Return the layer class around a module class; repeated calls in a process return the same class.

    The arguments of the constructor become options, and so do those of a configuration object that it takes.
    ``*args``, ``**kwargs`` and arguments of types that a command line cannot give keep their defaults.

    Raises:
        ValueError: the constructor names no argument.
    """
    if module_class not in _adapted:
        _adapted[module_class] = _layer_class(module_class)
    return _adapted[module_class]


_adapted: dict[type[nn.Module], type[AdaptedLayer]] = {}


def _layer_class(module_class: type[nn.Module]) -> type[AdaptedLayer]:
    parameters = _parameters(module_class)
    if not parameters:
        raise ValueError(
            f"the constructor of {module_class.__name__} names no argument for the model width: write a subclass whose "
            "__init__(self, dim) calls super().__init__ with all that it needs"
        )
    usual = _usual_width(parameters)

    # ``__module__`` names the module's own file, so that its code belongs to the code version of results.
    members = {
        "__module__": module_class.__module__,
        "__qualname__": module_class.__qualname__,
        "__doc__": module_class.__doc__,
        "module_class": module_class,
        "Config": _config_class(module_class, parameters, usual),
    }
    return type(module_class.__name__, (AdaptedLayer,), members)


def _arguments(module_class: type[nn.Module], config: AdaptedLayer.Config, width: int) -> dict[str, Any]:
    """Return the arguments of the constructor.

    Raises:
        ValueError: it is not clear which argument takes the model width, one without a default is not given, or an
            option gives the width's argument another value.
    """
    parameters, name_of_class = _parameters(module_class), module_class.__name__
    name = config.width_argument or _usual_width(parameters)
    usual = [name for name in WIDTH_NAMES if name in parameters]
    if name is None and len(usual) > 1 and not _needed(parameters):
        raise ValueError(
            f"{' and '.join(usual)} of {name_of_class} may both take the model width: name one of them by "
            "--mixer.width-argument"
        )
    if name is None:
        raise ValueError(
            f"no argument of {name_of_class} takes the model width: call it {', '.join(WIDTH_NAMES[:-1])} or "
            f"{WIDTH_NAMES[-1]}, or name it by --mixer.width-argument: {', '.join(parameters)}; if it takes a "
            "configuration object, write a subclass whose __init__ takes the width and makes the object"
        )
    if name not in parameters:
        raise ValueError(
            f"width_argument: {name_of_class} has no argument {name!r}: choose from {', '.join(parameters)}"
        )

    # None stands for a default that a command line cannot give. An optional argument without a default, which inspect
    # marks by a class, is None.
    own = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in OWN}
    given = {
        key: value
        for key, value in own.items()
        if value is not None
        or (default := parameters[key].default) is None
        or (NoneType in get_args(parameters[key].annotation) and isinstance(default, (*SCALARS, tuple, type)))
    }
    if name in given and given[name] != parameters[name].default:
        raise ValueError(f"{name}: it takes the model width: leave it out, and give the width")
    given[name] = width
    if lacking := [needed for needed in _needed(parameters) if needed not in given]:
        flag = f"--mixer.{lacking[0].replace('_', '-')}"
        how = f"give {flag}" if lacking[0] in own else "write a subclass whose __init__ takes the width and makes it"
        if parameters[name].default is not Parameter.empty and config.width_argument is None:
            how += f", or --mixer.width-argument {lacking[0]} if it takes the model width, and not {name!r}"
        raise ValueError(f"argument {lacking[0]!r} of {name_of_class} has no default: {how}")

    kind, argument = _config_object(module_class)
    if kind is None:
        return given
    of_object = {key: given.pop(key) for key in [*given] if key in inspect.signature(kind).parameters}
    return {**given, argument: kind(**of_object)}


def _parameters(module_class: type[nn.Module]) -> dict[str, Parameter]:
    """Return the named arguments of the constructor, and of a configuration object, with their types resolved."""
    own, (kind, argument) = _named(module_class), _config_object(module_class)
    if kind is None:
        return own
    return {**_named(kind), **{name: p for name, p in own.items() if name != argument}}


def _config_object(module_class: type[nn.Module]) -> tuple[type | None, str]:
    """Return the class of the configuration object that a constructor takes, and the argument; None if it takes none.

    It is a class other than a module, with an argument of its own of a usual name of the width.
    """
    own = _named(module_class)
    for name, parameter in own.items() if not any(width in own for width in WIDTH_NAMES) else ():
        kind = parameter.annotation
        plain = inspect.isclass(kind) and not issubclass(kind, nn.Module) and inspect.isfunction(kind.__init__)
        if plain and any(width in _named(kind) for width in WIDTH_NAMES):
            return kind, name
    return None, ""


def _named(of_class: Any) -> dict[str, Parameter]:
    """Return the named arguments of a constructor with their types; without one, the type of the default counts."""
    _self, *parameters = inspect.signature(of_class.__init__).parameters.values()
    try:
        hints = get_type_hints(of_class.__init__)
    except Exception:  # a name that exists only for type checkers
        hints = {}

    def of(p: Parameter) -> Any:
        untyped = ANY if p.default is Parameter.empty or p.annotation is Parameter.empty else NoneType
        return hints.get(p.name, untyped if p.default in (None, Parameter.empty) else type(p.default))

    named = [p for p in parameters if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    return {p.name: p.replace(annotation=of(p)) for p in named}


def _usual_width(parameters: Mapping[str, Parameter]) -> str | None:
    """Return the argument that takes the model width by its name, if this is clear.

    It is the first usual name among the arguments without a default. If there is none, it is the only usual name.
    """
    needed, usual = _needed(parameters), [name for name in WIDTH_NAMES if name in parameters]
    if first := next((name for name in usual if name in needed), None):
        return first
    return usual[0] if len(usual) == 1 else None


def _needed(parameters: Mapping[str, Parameter]) -> list[str]:
    """Return the names of the arguments without a default."""
    return [name for name, parameter in parameters.items() if parameter.default is Parameter.empty]


def _config_class(module_class: type[nn.Module], parameters: Mapping[str, Parameter], usual: str | None) -> type:
    """Return the dataclass of the options of a module."""
    options: list[Any] = [("whole_layer", bool | None, switch(getattr(module_class, "whole_layer", None)))]
    for p in parameters.values():
        kind = _option_type(p.annotation)
        if kind is None or p.name in (usual, *OWN) or p.name.startswith("_"):
            continue
        if isinstance(p.default, (*SCALARS, tuple)):
            options.append((p.name, kind, field(default=p.default)))
        else:
            options.append((p.name, kind | None, field(default=None) if p.default is None else switch(None)))

    def reduce(self: Any) -> tuple[Any, ...]:
        """Pickle by the module class, because each process creates its own class of options."""
        return _restored, (module_class, {f.name: getattr(self, f.name) for f in fields(self)})

    namespace = {"__module__": module_class.__module__, "__reduce__": reduce, "width_name": usual or ""}
    bases = (AdaptedLayer.Config,)
    return make_dataclass("Config", options, bases=bases, namespace=namespace, frozen=True, kw_only=True)


def _restored(module_class: type[nn.Module], values: dict[str, Any]) -> Any:
    return adapt(module_class).Config(**values)


def _option_type(hint: Any) -> Any:
    """Return the type of an option: what a command line can give of numbers, text, choices and tuples; None if nothing.

    ``int | tuple`` becomes ``int | tuple[int, ...]``, and what has other members keeps those that can be given.
    """
    if get_origin(hint) in (Union, UnionType):
        known = [kind for member in get_args(hint) if (kind := _option_type(member)) is not None]
        return Union[*known, NoneType] if known and NoneType in get_args(hint) else Union[*known] if known else None
    if hint in (tuple, list):
        return tuple[int, ...]
    if get_origin(hint) in (tuple, list):
        return hint if all(kind in (*SCALARS, ...) for kind in get_args(hint)) else None
    return hint if hint in SCALARS or get_origin(hint) is Literal else None
