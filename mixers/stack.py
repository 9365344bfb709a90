"""Stacks of different layers: ``3*gated-deltanet+transformer``, repeated to the depth of a model."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields, make_dataclass
from functools import cache
from typing import Any, ClassVar, get_type_hints

import docstring_parser
from torch import Tensor

from mixers.base import Layer, Shape, State
from mixers.deep import DeepLayer
from mixers.models import Stack
from mixers.named import members_of
from mixers.options import BETWEEN


class StackLayer(Layer):
    """All L layers of a model as one module: the layers of a pattern one after another, as often as L asks for.

    Each layer is built, computed and decoded as it is without the stack, with the residual scale of all L layers. A
    model (``mixers.models.Backbone``) holds the layers themselves. Settings are those of all members, of which each
    name begins with the member's: ``transformer__heads``. State: the states of all layers.

    ``stack_of`` makes the subclasses.
    """

    pattern: ClassVar[tuple[str, ...]]
    """Members in their order, by the names that their settings begin with."""
    kinds: ClassVar[Mapping[str, type[Layer]]]
    """Class of each member."""

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__(config, shape)
        self.layers = Stack(kind(own, shape) for kind, own in self.members(config, shape.layers))

    @classmethod
    def members(cls, config: Any, layers: int) -> list[tuple[type[Layer], Any]]:
        rounds, rest = divmod(layers, depth := len(cls.pattern))
        if rest or not rounds:
            raise ValueError(f"its {depth} layers cannot be repeated to {layers}: give --layers {depth * (rounds + 1)}")
        own = cls.settings(config)
        return [(cls.kinds[name], own[name]) for name in cls.pattern] * rounds

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        """Return the settings of each member."""
        return {
            name: kind.Config(**{f.name: getattr(config, name + BETWEEN + f.name) for f in fields(kind.Config)})
            for name, kind in cls.kinds.items()
        }

    def forward(self, x_BTD: Tensor) -> Tensor:
        z_BTD: Tensor = self.layers(x_BTD)
        return z_BTD

    def init_state(self, batch: int) -> State:
        states = [layer.init_state(batch) for layer in self.layers]
        return {f"{i}.{name}": y for i, state in enumerate(states) for name, y in state.items()}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        after: State = {}
        for i, layer in enumerate(self.layers):
            first = f"{i}."
            own = {name.removeprefix(first): y for name, y in state.items() if name.startswith(first)}
            x_BD, own = layer.step(x_BD, own)
            after |= {first + name: y for name, y in own.items()}
        return x_BD, after

    @classmethod
    def remark(cls, config: Any, length: int) -> str | None:
        remarks = {name: cls.kinds[name].remark(own, length) for name, own in cls.settings(config).items()}
        return "; ".join(f"{name}: {remark}" for name, remark in remarks.items() if remark) or None

    @classmethod
    def plain_config(cls, config: Any) -> Any:
        plain = {name: cls.kinds[name].plain_config(own) for name, own in cls.settings(config).items()}
        return cls.Config(**{name + BETWEEN + key: y for name, own in plain.items() for key, y in vars(own).items()})


@cache
def stack_of(name: str, classes: tuple[type[Layer], ...], restored: Callable[..., Any]) -> type[StackLayer]:
    """Return the class of a stack; each is made once per process.

    Args:
        name: name of the stack.
        classes: classes of ``members_of(name)``.
        restored: returns settings from the name of a stack and their values; they are pickled by it.

    Raises:
        ValueError: a member cannot be one, or two members have the same name.
    """
    # A member is named as its layer is registered, or as its class.
    pattern = tuple(member.rpartition(":")[2].replace("-", "_") for member in members_of(name))
    kinds: dict[str, type[Layer]] = {}
    for member, kind in zip(pattern, classes, strict=True):
        if issubclass(kind, DeepLayer):
            raise ValueError(f"{member.replace('_', '-')} holds all layers of a model itself, so no stack can hold it")
        if kinds.setdefault(member, kind) is not kind:
            raise ValueError(f"two classes have the name {member}: rename one, because options begin with it")

    families = {kind.family for kind in classes}
    attributes = {
        "pattern": pattern,
        "kinds": kinds,
        "family": families.pop() if len(families) == 1 else "stack",
        "Config": _config_class(name, kinds, restored),
    }
    return type(name, (StackLayer,), attributes)


def _config_class(name: str, kinds: Mapping[str, type[Layer]], restored: Callable[..., Any]) -> type:
    """Return the dataclass of the settings of all members."""
    entries: list[Any] = []
    texts: list[str] = []
    for member, kind in kinds.items():
        hints = get_type_hints(kind.Config)
        for f in fields(kind.Config):
            default = {"default_factory": f.default_factory} if f.default is MISSING else {"default": f.default}
            entries.append((member + BETWEEN + f.name, hints[f.name], field(**default, metadata=f.metadata)))
        described = docstring_parser.parse(kind.Config.__doc__ or "").params
        texts += [f"    {member}{BETWEEN}{p.arg_name}: {' '.join((p.description or '').split())}" for p in described]

    def reduce(self: Any) -> tuple[Any, ...]:
        """Pickle by the name of the stack, because each process creates its own class of settings."""
        return restored, (name, vars(self))

    made = make_dataclass("Config", entries, namespace={"__reduce__": reduce}, frozen=True, kw_only=True)
    made.__doc__ = "\n".join([f"Settings of {name}.", "", "Attributes:", *texts])
    return made
