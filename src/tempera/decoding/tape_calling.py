"""How a tape repeats an operation: the result is written where the recorded one lay, and as little
Python as possible lies before the kernel.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tempera.decoding.tape_calls import Call, Place, mapped, name_of, script_of, tensors_in

aten = torch.ops.aten

_MODULES = (torch, Tensor, torch._C._nn, torch._C._linalg)  # type: ignore[attr-defined]
"""Where PyTorch's Python functions are."""

_NAMED: dict[tuple[OpOverload, str], Callable[..., Any]] = {}
"""What calls an operation with arguments of some kinds; see `bound`."""

Bound = tuple[OpOverload, list[Any], dict[str, Any]]
"""An operation and its arguments."""


def repeated(call: Call, tensor: Callable[[Place], Tensor]) -> Callable[[], Any]:
    """A function that repeats an operation, with the tensors of its places."""
    args, kwargs = mapped(tensor, call.args, Place), mapped(tensor, call.kwargs, Place)
    made = [tensor(place) for place in call.made]
    if call.name in _NUMBERS and len(args) == 2 and isinstance(args[0], Tensor):
        args = [args[0], _as_tensor(args[1], args[0])]
    if call.is_mutable:
        return bound(call.function, args, kwargs)
    instead = _instead(call.function, args, kwargs, made)
    if instead is not None:
        return bound(*instead)
    found = _writing(call.function)
    if found is not None:
        variant, names = found
        return bound(variant, args, {**kwargs, **dict(zip(names, made, strict=True))})
    results = bound(call.function, args, kwargs)
    return (lambda: made[0].copy_(results())) if len(made) == 1 else partial(_copied, results, made)


def _copied(function: Callable[[], Any], places: list[Tensor]) -> None:
    """Copy the results of an operation to their places."""
    for place, value in zip(places, tensors_in(function()), strict=True):
        place.copy_(value)


@lru_cache(None)
def _writing(function: OpOverload) -> tuple[OpOverload, list[str]] | None:
    """The variant of an operation that writes its results to given tensors, and their names; None
    if there is none.
    """
    wanted = [(one.name, str(one.type)) for one in function._schema.arguments]
    for name in function.overloadpacket.overloads():
        variant = getattr(function.overloadpacket, name)
        arguments = variant._schema.arguments
        out = [one.name for one in arguments if one.alias_info and one.alias_info.is_write]
        rest = [(one.name, str(one.type)) for one in arguments if one.name not in out]
        # generated variants copy, too, but slowly
        made_for_it = torch.Tag.generated not in variant.tags
        if made_for_it and rest == wanted and len(out) == len(function._schema.returns):
            return variant, out
    return None


def _instead(
    function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], made: list[Tensor]
) -> Bound | None:
    """An operation that has no variant that writes as one that has, with the same result to the
    bit; None if there is none.
    """
    if function not in _INSTEAD or len(made) != 1:
        return None
    return _INSTEAD[function](made[0], *args, **kwargs)


def _as_copy(made: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Bound:
    return aten.copy_.default, [made, x], {}


def _as_where(made: Tensor, condition: Tensor, x: Any, y: Any) -> Bound:
    numbers = [_number(one, made) for one in (x, y)]
    return aten.where.self_out, [condition, *numbers], {"out": made}


def _masked_fill(made: Tensor, x: Tensor, mask: Tensor, value: Any) -> Bound:
    return _as_where(made, mask, value, x)


def _rsub(made: Tensor, x: Tensor, other: Any, alpha: Any = 1) -> Bound | None:
    return (aten.sub.out, [_number(other, made), x], {"out": made}) if alpha == 1 else None


def _isnan(made: Tensor, x: Tensor) -> Bound:
    return aten.ne.Tensor_out, [x, x], {"out": made}


def _sum(made: Tensor, x: Tensor, dtype: torch.dtype | None = None) -> Bound:
    kind = {} if dtype is None else {"dtype": dtype}
    return aten.sum.IntList_out, [x, list(range(x.dim())), False], {**kind, "out": made}


def _embedding(made: Tensor, weight: Tensor, tokens: Tensor, *args: Any) -> Bound | None:
    if not tokens.is_contiguous():
        return None
    return (
        aten.index_select.out,
        [weight, 0, tokens.view(-1)],
        {"out": made.view(-1, made.shape[-1])},
    )


def _fill(value: float) -> Callable[..., Bound]:
    return lambda made, *args, **kwargs: (aten.fill_.Scalar, [made, value], {})


def _full(made: Tensor, like: Any, *args: Any, **kwargs: Any) -> Bound:
    return aten.fill_.Scalar, [made, args[-1]], {}


def _binary(variant: OpOverload) -> Callable[..., Bound | None]:
    def instead(made: Tensor, x: Tensor, other: Any) -> Bound | None:
        return (variant, [x, other], {"out": made}) if isinstance(other, Tensor) else None

    return instead


def _swapped(variant: OpOverload) -> Callable[..., Bound | None]:
    """x > y as y < x. Rounds have more of the latter, so its code is more often in the processor's
    cache.
    """
    binary = _binary(variant)
    return lambda made, x, other: binary(made, other, x) if isinstance(other, Tensor) else None


def _as_tensor(number: Any, x: Tensor) -> Any:
    """A number that is combined with x, as a tensor of x's dtype, in which PyTorch computes anyway;
    anything else is returned unchanged.
    """
    kinds = {torch.float32: (int, float), torch.int64: (int,)}
    fits = type(number) in kinds.get(x.dtype, ())
    return torch.tensor(number, dtype=x.dtype) if fits else number


def _number(value: Any, made: Tensor) -> Tensor:
    """A number as a tensor of the result's dtype; tensors stay."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=made.dtype)


_INSTEAD: dict[OpOverload, Callable[..., Bound | None]] = {
    aten.masked_fill.Scalar: _masked_fill,
    aten.where.ScalarOther: _as_where,
    aten.where.ScalarSelf: _as_where,
    aten.where.Scalar: _as_where,
    aten.to.dtype: _as_copy,
    aten._to_copy.default: _as_copy,
    aten.clone.default: _as_copy,
    aten.rsub.Scalar: _rsub,
    aten.isnan.default: _isnan,
    aten.sum.default: _sum,
    aten.embedding.default: _embedding,
    aten.zeros.default: _fill(0),
    aten.new_zeros.default: _fill(0),
    aten.zeros_like.default: _fill(0),
    aten.ones.default: _fill(1),
    aten.new_ones.default: _fill(1),
    aten.ones_like.default: _fill(1),
    aten.full.default: _full,
    aten.new_full.default: _full,
    aten.full_like.default: _full,
    aten.__and__.Tensor: _binary(aten.bitwise_and.Tensor_out),
    aten.__or__.Tensor: _binary(aten.bitwise_or.Tensor_out),
    aten.__xor__.Tensor: _binary(aten.bitwise_xor.Tensor_out),
    aten.eq.Scalar: _binary(aten.eq.Tensor_out),
    aten.ne.Scalar: _binary(aten.ne.Tensor_out),
    aten.lt.Scalar: _binary(aten.lt.Tensor_out),
    aten.le.Scalar: _binary(aten.le.Tensor_out),
    aten.gt.Scalar: _swapped(aten.lt.Tensor_out),
    aten.gt.Tensor: _swapped(aten.lt.Tensor_out),
    aten.ge.Scalar: _swapped(aten.le.Tensor_out),
    aten.ge.Tensor: _swapped(aten.le.Tensor_out),
}

_NUMBERS = {"add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge"}
"""Operations that turn a number into a tensor in every call, and give the same with a tensor."""


def bound(function: OpOverload, args: Any, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """A call of an operation. PyTorch's Python functions take half of the time of `OpOverload`s to
    find out what they are given, but choose the overload themselves.
    """
    kinds = function, str(mapped(_kind, [args, kwargs], object))
    if kinds not in _NAMED:
        _NAMED[kinds] = _named(function, args, kwargs) or function._op
    return partial(_NAMED[kinds], *args, **kwargs)


def _named(function: OpOverload, args: Any, kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """PyTorch's Python function that chooses this operation for such arguments, if there is one."""
    for module in _MODULES:
        named: Callable[..., Any] | None = getattr(module, name_of(function), None)
        with _Ear() as ear, suppress(_HeardError, TypeError):
            if named is not None:
                named(*args, **kwargs)
        if ear.heard == script_of(function, args, kwargs):
            return named
    return None


def _kind(part: Any) -> Any:
    """What Python functions choose an overload by: the types of arguments; a tensor without
    dimensions can stand for a number.
    """
    return type(part), isinstance(part, Tensor) and part.dim() == 0


class _HeardError(Exception):
    """Keeps an operation from running."""


class _Ear(TorchDispatchMode):
    """Hears which operation is called, and with what; it does not run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heard: Any = None

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.heard = script_of(function, args, kwargs or {})
        raise _HeardError
