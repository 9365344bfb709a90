"""Make a layer from any ``nn.Module`` that maps (B, T, D) to (B, T, D), or to a tuple that begins with that shape."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from inspect import Parameter
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from mixers.base import ContractError, Shape
from mixers.parts import MixerLayer

WIDTH_NAMES = ("d_model", "hidden_size", "dim", "width", "embed_dim", "n_embd")
"""Names of the argument that takes the model width, in order of preference."""
OPTION_TYPES = (bool, int, float, str)


class AdaptedLayer(MixerLayer):
    """Pre-norm layer around a module from outside this project, with the MLP that all layers share."""

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        """Settings of an adapted module: the arguments of its constructor, and which of them takes the model width.

        Attributes:
            width_argument: argument that takes the model width, if it does not have one of the usual names.
        """

        width_argument: str | None = None

    module_class: ClassVar[type[nn.Module]]

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.mixer = self.module_class(**_arguments(self.module_class, config, shape.width))

    def mix(self, x_BTD: Tensor) -> Tensor:
        y = self.mixer(x_BTD)
        y = y[0] if isinstance(y, tuple) else y

        if not (isinstance(y, Tensor) and y.shape == x_BTD.shape):
            found = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ContractError(
                f"{self.module_class.__name__} must return a tensor of the shape of its inputs, or a tuple that begins "
                f"with it: for {tuple(x_BTD.shape)} it returned {found}"
            )
        if not y.is_floating_point() or (y.dtype == torch.float64 != x_BTD.dtype):
            raise ContractError(
                f"{self.module_class.__name__} must return the type of its inputs: for {x_BTD.dtype} it returned "
                f"{y.dtype}"
            )
        return y

    def _no_step_form(self) -> NotImplementedError:
        return NotImplementedError(
            f"{self.module_class.__name__} has no step form: a class derived from mixers.parts.MixerLayer has one, in "
            "init_state and mix_one"
        )


def adapt(module_class: type[nn.Module]) -> type[AdaptedLayer]:
    """Return the layer class around a module class; repeated calls in a process return the same class.

    The arguments of the constructor become options. ``*args``, ``**kwargs`` and arguments of types that a command line
    cannot give keep their defaults.
    """
    if module_class not in _adapted:
        _adapted[module_class] = _layer_class(module_class)
    return _adapted[module_class]


_adapted: dict[type[nn.Module], type[AdaptedLayer]] = {}


def _layer_class(module_class: type[nn.Module]) -> type[AdaptedLayer]:
    parameters = _parameters(module_class)
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
        ValueError: it is not clear which argument takes the model width, another one has no default, or an option
            gives that argument another value.
    """
    parameters = _parameters(module_class)
    name = config.width_argument or _usual_width(parameters)
    usual = [name for name in WIDTH_NAMES if name in parameters]
    if name is None and usual and (needed := _needed(parameters)):
        raise ValueError(
            f"argument {needed[0]!r} of {module_class.__name__} has no default: give it one, or name it by "
            "--mixer.width-argument if it takes the model width"
        )
    if name is None and usual:
        raise ValueError(
            f"{' and '.join(usual)} of {module_class.__name__} may both take the model width: name one of them by "
            "--mixer.width-argument"
        )
    if name is None:
        raise ValueError(
            f"no argument of {module_class.__name__} takes the model width: call it {', '.join(WIDTH_NAMES[:-1])} or "
            f"{WIDTH_NAMES[-1]}, or name it by --mixer.width-argument; if it takes a configuration object, "
            "write a subclass whose __init__ takes the width and makes the object"
        )
    if name not in parameters:
        raise ValueError(
            f"width_argument: {module_class.__name__} has no argument {name!r}: choose from {', '.join(parameters)}"
        )

    if needed := [needed for needed in _needed(parameters) if needed != name]:
        raise ValueError(
            f"argument {needed[-1]!r} of {module_class.__name__} has no default: give it one; only the argument that "
            "takes the model width needs none"
        )

    own = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "width_argument"}
    if own.get(name, parameters[name].default) != parameters[name].default:
        raise ValueError(f"{name}: it takes the model width: leave it out, and give the width")
    return {**own, name: width}


def _parameters(module_class: type[nn.Module]) -> dict[str, Parameter]:
    """Return the named arguments of the constructor, with their types resolved."""
    _self, *parameters = inspect.signature(module_class.__init__).parameters.values()
    try:
        hints = get_type_hints(module_class.__init__)
    except Exception:  # a name that exists only for type checkers
        hints = {}

    named = [p for p in parameters if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    return {p.name: p.replace(annotation=hints.get(p.name, type(p.default))) for p in named}


def _usual_width(parameters: Mapping[str, Parameter]) -> str | None:
    """Return the argument that takes the model width by its name, if this is clear.

    It is the first usual name among the arguments without a default. If all have one, it is the only usual name.
    """
    needed, usual = _needed(parameters), [name for name in WIDTH_NAMES if name in parameters]
    if needed:
        return next((name for name in usual if name in needed), None)
    return usual[0] if len(usual) == 1 else None


def _needed(parameters: Mapping[str, Parameter]) -> list[str]:
    """Return the names of the arguments without a default."""
    return [name for name, parameter in parameters.items() if parameter.default is Parameter.empty]


def _config_class(module_class: type[nn.Module], parameters: Mapping[str, Parameter], usual: str | None) -> type:
    """Return the dataclass of the options of a module."""
    options = [
        (p.name, p.annotation if p.default is not None else p.annotation | None, field(default=p.default))
        for p in parameters.values()
        if p.name != usual and _is_option(p)
    ]

    def reduce(self: Any) -> tuple[Any, ...]:
        """Pickle by the module class, because each process creates its own class of options."""
        return _restored, (module_class, {f.name: getattr(self, f.name) for f in fields(self)})

    namespace = {"__module__": module_class.__module__, "__reduce__": reduce}
    bases = (AdaptedLayer.Config,)
    return make_dataclass("Config", options, bases=bases, namespace=namespace, frozen=True, kw_only=True)


def _restored(module_class: type[nn.Module], values: dict[str, Any]) -> Any:
    return adapt(module_class).Config(**values)


def _is_option(parameter: Parameter) -> bool:
    """Return whether a command line can set an argument: a number, text, or a choice of these, optionally None."""
    if parameter.default is Parameter.empty:
        return False
    kinds = get_args(parameter.annotation) if get_origin(parameter.annotation) in (Union, UnionType) else ()
    known = [kind in OPTION_TYPES or get_origin(kind) is Literal for kind in kinds or (parameter.annotation,)]
    optional = [kind is NoneType for kind in kinds or (parameter.annotation,)]
    return any(known) and all(a or b for a, b in zip(known, optional, strict=True))
