"""Triton's interpreter without what takes most of its time and changes no result.

It runs a kernel operation by operation in NumPy. On blocks as small as those of the tests, NumPy takes a tenth of the
time; the rest is work on types, which repeats itself.
"""

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
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    core._unwrap_if_constexpr = _unwrap_values(core._unwrap_if_constexpr)
    core.block_type.__init__ = _remember_blocks(core.block_type.__init__)
    core.tensor.__init__ = _remember_shapes(core.tensor.__init__)
    TritonSemantic.broadcast_impl_value = _leave_equal_shapes(TritonSemantic.broadcast_impl_value)
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


def _leave_equal_shapes(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Compare the shapes of two blocks as a whole first."""

    def broadcast_unequal(self: TritonSemantic, lhs: core.tensor, rhs: core.tensor) -> tuple[core.tensor, core.tensor]:
        if lhs.handle.data.shape == rhs.handle.data.shape and lhs.type.is_block() and rhs.type.is_block():
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcast_unequal


ARITHMETIC = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv}
COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
OPERATORS = {
    **{f"__{name}__": function for name, function in (ARITHMETIC | COMPARISONS).items()},
    **{f"__r{name}__": lambda x, y, f=function: f(y, x) for name, function in ARITHMETIC.items()},
}


def _compute_in_numpy(name: str, operation: Callable[[Any, Any], Any]) -> None:
    """Hand an operator of tensors straight to NumPy if no side has to change its type, or one side is a number."""
    slow = getattr(core.tensor, name)
    adds, divides, compares = name in ("__add__", "__radd__"), "div" in name, name.strip("_") in COMPARISONS

    def compute(self: core.tensor, other: Any) -> Any:
        kind, left = self.dtype, self.handle.data
        if kind is core.float32:
            if (right := _as_float(other)) is not None:
                return _tensor(operation(left, right), core.int1 if compares else kind, self, other)

        elif kind is core.int32 or kind is core.int64:
            if not divides and (right := _as_int(other)) is not None:
                data = operation(left.astype(np.int64), right)
                if compares:
                    return _tensor(data, core.int1, self, other)
                if kind is core.int64 or getattr(other, "dtype", None) is core.int64:
                    return _tensor(data, core.int64, self, other)
                narrow = data.astype(np.int32)
                assert np.array_equal(narrow, data), f"int32 overflow in {name}"
                return _tensor(narrow, kind, self, other)

        elif adds and type(kind) is core.pointer_type and (right := _as_int(other)) is not None:
            bytes = np.uint64(max(1, kind.element_ty.primitive_bitwidth // 8))
            return _tensor(left + bytes * right.astype(np.uint64), kind, self, other)

        return slow(self, other, _semantic=interpreter.interpreter_semantic)

    setattr(core.tensor, name, compute)


def _as_float(side: Any) -> Any:
    if type(side) is core.tensor:
        return side.handle.data if side.dtype is core.float32 else None
    return np.float32(side) if type(side) in (int, float) else None


def _as_int(side: Any) -> Any:
    if type(side) is core.tensor:
        return side.handle.data.astype(np.int64) if side.dtype is core.int32 or side.dtype is core.int64 else None
    return np.int64(side) if type(side) is int and -(2**31) <= side < 2**31 else None


def _tensor(data: Any, kind: core.dtype, *sides: Any) -> core.tensor:
    """A tensor of the shape that NumPy's broadcasting has found; numbers have one entry, and no shape in Triton."""
    block = any(type(y) is core.tensor and y.shape.values for y in sides)
    return core.tensor(interpreter.TensorHandle(data, kind), core.block_type(kind, list(data.shape)) if block else kind)
