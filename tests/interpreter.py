"""Triton's interpreter without what takes most of its time and changes no result.

It runs a kernel operation by operation in NumPy. On blocks as small as those of the tests, NumPy takes a tenth of the
time; the rest is work on types, which repeats itself.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def quicken_interpreter() -> None:
    """Replace functions of Triton by quicker ones that return the same."""
    interpreter._patch_lang = _patch_once_a_module(interpreter._patch_lang)
    interpreter._patch_attr = _patch_directly
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    core._unwrap_if_constexpr = _unwrap_values(core._unwrap_if_constexpr)
    core.block_type.__init__ = _remember_blocks(core.block_type.__init__)
    core.tensor.__init__ = _remember_shapes(core.tensor.__init__)
    core.tensor.__getitem__ = _insert_axes
    TritonSemantic.broadcast_impl_value = _broadcast
    for name, operation in OPERATORS.items():
        _compute_in_numpy(name, operation)


def _patch_once_a_module(patch: Callable[..., object]) -> Callable[..., object]:
    """Replace the functions of ``triton.language`` once a module of kernels.

    The interpreter does it at each launch and at each call of a function within a kernel, after a search of the whole
    language.
    """
    patched = set[str]()

    def patch_new(kernel: Callable[..., object]) -> interpreter._LangPatchScope:
        if kernel.__module__ not in patched:
            patch(kernel)
            patched.add(kernel.__module__)
        return interpreter._LangPatchScope()

    return patch_new


def _patch_directly(
    module: object, name: str, member: Callable[..., Any], builder: object, scope: interpreter._LangPatchScope
) -> None:
    """Call a function of the language itself, not by way of one that looks for the semantics."""
    function = getattr(member, "__wrapped__", member)

    def interpreted(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return function(*arguments, **options)

    scope.set_attr(module, name, interpreted)


def _by_name(find: Callable[[core.dtype], np.dtype[Any]]) -> Callable[[core.dtype], np.dtype[Any]]:
    """Find NumPy's type once for every name of a type."""
    known = dict[str, np.dtype[Any]]()

    def find_new(kind: core.dtype) -> np.dtype[Any]:
        if kind.name not in known:
            known[kind.name] = find(kind)
        return known[kind.name]

    return find_new


def _unwrap_values(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Look into lists and tuples only where there is one."""
    others = (core.constexpr, list, tuple, core.tuple)

    def unwrap_value(value: Any) -> Any:
        if type(value) is core.constexpr:
            return value.value
        return unwrap(value) if isinstance(value, others) else value

    return unwrap_value


def _remember_blocks(init: Callable[..., None]) -> Callable[..., None]:
    """Check the shape of a block, and write its name, once for all blocks of one type; nothing changes them."""
    known = dict[object, dict[str, object]]()

    def init_block(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        key = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
        if key not in known:
            init(self, element_ty, shape)
            known[key] = self.__dict__
        self.__dict__ = known[key]

    return init_block


def _remember_shapes(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap the sizes of a tensor once for all tensors of one type; nothing changes them."""

    def init_tensor(self: core.tensor, handle: object, type: core.dtype) -> None:
        known = type.__dict__.get("of_tensors")
        if known is None:
            init(self, handle, type)
            type.of_tensors = {name: value for name, value in self.__dict__.items() if name != "handle"}
        else:
            self.__dict__.update(known)
            self.handle = handle

    return init_tensor


def _broadcast(_: TritonSemantic, left: core.tensor, right: core.tensor) -> tuple[core.tensor, core.tensor]:
    """Bring two tensors to one shape in one step."""
    shapes = [y.handle.data.shape if y.type.is_block() else None for y in (left, right)]
    if shapes[0] == shapes[1]:
        return left, right

    shape = np.broadcast_shapes(*(known for known in shapes if known is not None))
    return _spread(left, shape), _spread(right, shape)


def _spread(y: core.tensor, shape: tuple[int, ...]) -> core.tensor:
    data = np.empty(shape, y.handle.data.dtype)
    data[...] = y.handle.data
    return core.tensor(_handle(data, y.dtype), _block(y.dtype, shape))


def _quotient(x: Any, y: Any) -> Any:
    """C's division of integers, which truncates towards zero."""
    return (x - _remainder(x, y)) // y


def _remainder(x: Any, y: Any) -> Any:
    return int(math.fmod(x, y)) if type(x) is int and type(y) is int else np.fmod(x, y)


ARITHMETIC = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv}
COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
LOGIC = {"and": operator.and_, "or": operator.or_}
OF_INTEGERS = {"floordiv": _quotient, "mod": _remainder}
OPERATORS = {
    **{f"__{name}__": function for name, function in (ARITHMETIC | COMPARISONS | LOGIC | OF_INTEGERS).items()},
    **{f"__r{name}__": lambda x, y, f=function: f(y, x) for name, function in ARITHMETIC.items()},
}


def _compute_in_numpy(name: str, operation: Callable[[Any, Any], Any]) -> None:
    """Hand an operator of tensors straight to NumPy if no side has to change its type, or one side is a number."""
    slow = getattr(core.tensor, name)
    adds, divides, compares = name in ("__add__", "__radd__"), "truediv" in name, name.strip("_") in COMPARISONS
    logic, of_integers = name.strip("_") in LOGIC, name.strip("_") in OF_INTEGERS

    def compute(self: core.tensor, other: Any) -> Any:
        kind, left = self.dtype, self.handle.data
        if logic:
            if kind is core.int1 and getattr(other, "dtype", None) is core.int1:
                return _tensor(operation(left, other.handle.data), kind, self, other)

        elif kind is core.float32 or kind is core.float64:
            if not of_integers and (right := _as_float(other, kind)) is not None:
                return _tensor(operation(left, right), core.int1 if compares else kind, self, other)

        elif kind is core.int32 or kind is core.int64:
            if not divides and (right := _as_int(other)) is not None:
                if compares:
                    return _tensor(operation(left, right), core.int1, self, other)
                if kind is core.int64 or getattr(other, "dtype", None) is core.int64:
                    return _tensor(operation(left.astype(np.int64), right), core.int64, self, other)
                return _tensor(_narrow(name, operation, left, right), kind, self, other)

        elif adds and type(kind) is core.pointer_type and (right := _as_int(other)) is not None:
            bytes = max(1, kind.element_ty.primitive_bitwidth // 8)
            return _tensor(left + (np.int64(bytes) * right).astype(np.uint64), kind, self, other)

        return slow(self, other, _semantic=interpreter.interpreter_semantic)

    setattr(core.tensor, name, compute)


def _narrow(name: str, operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Compute in int32, and in Python where both sides are one number."""
    if left.shape == (1,) and (type(right) is int or right.shape == (1,)):
        value = operation(left.item(), right if type(right) is int else right.item())
        assert -(2**31) <= value < 2**31, f"int32 overflow in {name}"
        return np.array([value], np.int32)

    data = operation(left.astype(np.int64), right)
    narrow = data.astype(np.int32)
    assert (narrow == data).all(), f"int32 overflow in {name}"
    return narrow


def _as_float(side: Any, kind: core.dtype) -> Any:
    if type(side) is core.tensor:
        return side.handle.data if side.dtype is kind else None
    if type(side) not in (int, float):
        return None
    return np.float32(side) if kind is core.float32 else np.float64(side)


def _as_int(side: Any) -> Any:
    if type(side) is core.tensor:
        return side.handle.data if side.dtype is core.int32 or side.dtype is core.int64 else None
    return side if type(side) is int and -(2**31) <= side < 2**31 else None


def _tensor(data: Any, kind: core.dtype, left: core.tensor, right: Any) -> core.tensor:
    """A tensor of the shape that NumPy's broadcasting has found; numbers have one entry, and no shape in Triton."""
    block = left.type.is_block() or (type(right) is core.tensor and right.type.is_block())
    return core.tensor(_handle(data, kind), _block(kind, data.shape) if block else kind)


def _handle(data: Any, kind: core.dtype) -> interpreter.TensorHandle:
    """A handle of data that have the size of their type, which is not checked."""
    handle = interpreter.TensorHandle.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, kind, {}
    return handle


def _block(kind: core.dtype, shape: tuple[int, ...]) -> core.block_type:
    """The type of a block, made once a shape and remembered by the type of its entries."""
    blocks = kind.__dict__.setdefault("blocks", {})
    block = blocks.get(shape)
    if block is None:
        block = blocks[shape] = core.block_type(kind, list(shape))
    return block


TUPLES = (tuple, core.tuple)


def _insert_axes(self: core.tensor, slices: Any, _semantic: object = None) -> core.tensor:
    """Index a tensor by ``None`` and ``:`` in one step."""
    data, sizes = self.handle.data, list(self.type.get_block_shapes())
    for axis, index in enumerate(slices if isinstance(slices, TUPLES) else (slices,)):
        if index is None or core._unwrap_if_constexpr(index) is None:
            sizes.insert(axis, 1)
        else:
            assert index == slice(None), f"unsupported tensor index: {index}"
    return core.tensor(_handle(data.reshape(sizes), self.dtype), _block(self.dtype, tuple(sizes)))
