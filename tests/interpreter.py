"""Triton's interpreter without what takes most of its time and changes no result.

It runs a kernel operation by operation in NumPy. On blocks as small as those of the tests, NumPy takes a tenth of the
time; the rest is work on types, which repeats itself.
"""

import math
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from triton._C.libtriton import interpreter as memory
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def quicken_interpreter() -> None:
    """Replace functions of Triton by quicker ones that return the same."""
    interpreter._patch_lang = _patch_once_a_module(interpreter._patch_lang)
    interpreter._patch_attr = _patch_directly
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter._implicit_cvt = _convert_quickly(interpreter._implicit_cvt)
    interpreter.GridExecutor.__call__ = _launch
    core.tensor.__init__ = _fill_tensor
    core.tensor.__getitem__ = _insert_axes
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.arange = cache(TritonSemantic.arange)
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
    function = QUICK.get(member) or getattr(member, "__wrapped__", member)

    def interpreted(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return function(*arguments, **options)

    scope.set_attr(module, name, interpreted)


def _launch(executor: interpreter.GridExecutor, *arguments: Any, **options: Any) -> None:
    """Run all programs of a launch on tensors that are on the CPU already."""
    given = dict(zip(executor.arg_names, arguments, strict=False)) | options
    values = {
        name: given[name] if name in executor.constexprs else interpreter._implicit_cvt(given[name])
        for name in executor.arg_names
        if name in given
    }
    interpreter._patch_lang(executor.fn)

    grid = executor.grid(values) if callable(executor.grid) else executor.grid
    interpreter.interpreter_builder.set_grid_dim(*grid, *[1] * (3 - len(grid)))
    for program in np.ndindex(interpreter.interpreter_builder.grid_dim):
        interpreter.interpreter_builder.set_grid_idx(*program)
        executor.fn(**values)


def _convert_quickly(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make a pointer of one type of all tensors of one dtype, so that the types of its blocks are remembered, too."""
    types = dict[torch.dtype, core.dtype]()

    def convert_new(argument: Any) -> Any:
        if type(argument) is int and -(2**31) <= argument < 2**31:
            return _new_tensor(np.array([argument], np.int32), core.int32, core.int32)
        if not isinstance(argument, torch.Tensor):
            return convert(argument)
        if argument.dtype not in types:
            types[argument.dtype] = convert(argument).type
        kind = types[argument.dtype]
        return _new_tensor(np.array([argument.data_ptr()], np.uint64), kind, kind)

    return convert_new


def _by_name(find: Callable[[core.dtype], np.dtype[Any]]) -> Callable[[core.dtype], np.dtype[Any]]:
    """Find NumPy's type once for every name of a type."""
    known = dict[str, np.dtype[Any]]()

    def find_new(kind: core.dtype) -> np.dtype[Any]:
        if kind.name not in known:
            known[kind.name] = find(kind)
        return known[kind.name]

    return find_new


def _fill_tensor(self: core.tensor, handle: object, type: core.dtype) -> None:
    """Wrap the sizes of a tensor once for all tensors of one type; nothing changes them."""
    if "of_tensors" not in type.__dict__:
        INIT(self, None, type)
        type.of_tensors = self.__dict__
    self.__dict__ = {**type.of_tensors, "handle": handle}


NEW, INIT = object.__new__, core.tensor.__init__


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
    return _new_tensor(data, y.dtype, _block(y.dtype, shape))


def _load(pointer: core.tensor, mask: Any = None, other: Any = None, *checks: Any, **options: Any) -> core.tensor:
    """Read from memory at once what a tensor of pointers points at."""
    semantic, kind = options["_semantic"], pointer.dtype
    mask, other = (y if y is None else semantic.to_tensor(y) for y in map(core._unwrap_if_constexpr, (mask, other)))
    if not _points(pointer, mask) or checks:
        return core.load.__wrapped__(pointer, mask, other, *checks, **options)

    kind, block = kind.element_ty, pointer.type.is_block()
    if mask is not None:
        pointer, mask = _broadcast(semantic, pointer, mask)
    at, numbers = pointer.handle.data, interpreter._get_np_dtype(kind)
    rest = _fill(at.shape, numbers, 0)
    if other is not None and other.handle.data.any():
        rest = _spread(semantic.cast(other, kind), at.shape).handle.data
    found = memory.load(at, _fill(at.shape, np.bool_, 1) if mask is None else mask.handle.data, rest, numbers)
    return _new_tensor(found, kind, _block(kind, at.shape) if block else kind)


def _store(pointer: core.tensor, value: Any, mask: Any = None, *checks: Any, **options: Any) -> Any:
    """Write to memory at once."""
    semantic = options["_semantic"]
    value, mask = (y if y is None else semantic.to_tensor(y) for y in map(core._unwrap_if_constexpr, (value, mask)))
    if not _points(pointer, mask, value) or checks:
        return core.store.__wrapped__(pointer, value, mask, *checks, **options)

    at, value = pointer.handle.data, semantic.cast(value, pointer.dtype.element_ty)
    value, mask = (y if y is None or y.handle.data.shape == at.shape else _spread(y, at.shape) for y in (value, mask))
    return memory.store(at, value.handle.data, _fill(at.shape, np.bool_, 1) if mask is None else mask.handle.data)


def _points(pointer: core.tensor, *others: core.tensor | None) -> bool:
    """Whether these are pointers to numbers, and blocks go with blocks alone."""
    kind = getattr(pointer.dtype, "element_ty", None)
    blocks = pointer.type.is_block() or not any(y is not None and y.type.is_block() for y in others)
    return blocks and type(kind) is core.dtype and kind is not core.int1


@cache
def _fill(shape: tuple[int, ...], numbers: Any, value: int) -> Any:
    """An array of one number, which is only read."""
    return np.full(shape, value, numbers)


QUICK = {core.load: _load, core.store: _store}


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
        if type(other) is core.constexpr:
            other = other.value
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
    numbers = np.float32 if kind is core.float32 else np.float64
    if type(side) is not core.tensor:
        return numbers(side) if type(side) in (int, float) else None
    if side.dtype is core.int32:
        return side.handle.data.astype(numbers)
    return side.handle.data if side.dtype is kind else None


def _as_int(side: Any) -> Any:
    if type(side) is core.tensor:
        return side.handle.data if side.dtype is core.int32 or side.dtype is core.int64 else None
    return side if type(side) is int and -(2**31) <= side < 2**31 else None


def _tensor(data: Any, kind: core.dtype, left: core.tensor, right: Any) -> core.tensor:
    """A tensor of the shape that NumPy's broadcasting has found; numbers have one entry, and no shape in Triton."""
    block = type(left.type) is core.block_type or (type(right) is core.tensor and right.type.is_block())
    return _new_tensor(data, kind, _block(kind, data.shape) if block else kind)


def _new_tensor(data: Any, kind: core.dtype, whole: core.dtype) -> core.tensor:
    y = NEW(core.tensor)
    _fill_tensor(y, _handle(data, kind), whole)
    return y


def _handle(data: Any, kind: core.dtype) -> interpreter.TensorHandle:
    """A handle of data that have the size of their type, which is not checked."""
    handle = NEW(interpreter.TensorHandle)
    handle.__dict__ = {"data": data, "dtype": kind, "attr": {}}
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
    return _new_tensor(data.reshape(sizes), self.dtype, _block(self.dtype, tuple(sizes)))
