# SPDX-License-Identifier: Apache-2.0
"""Whole tensors made from pieces: what an operation gives that cannot be computed on a piece.

    p.sum(), p.norm()              one value of all pieces, on every rank (tensor_reduce.py)
    p.detach().t(), p.std(), ...   the pieces are gathered, and torch computes on the whole

The second costs a gather, so each kind of operation says so once. Transposed and cut-out parts are
copies here and views in torch: what would be written to one is refused, not lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, _redistribute
from torch.overrides import get_default_nowrap_functions
from torch.utils._pytree import tree_flatten, tree_map_only

logger = logging.getLogger(__name__)
_told: set[str] = set()


class WholeTensor(Tensor):
    """A plain tensor that every rank has whole; scripts for FSDP2 call ``full_tensor()`` on it."""

    of: str = ""  # the parameter of which this is a copy, where torch would have given a view
    placements: tuple[()] = ()  # on no mesh: every rank has it whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copy_of = getattr(args[0], "of", "") if args else ""
        if copy_of and _writes(func.__name__):
            raise NotImplementedError(
                f"{func.__name__} writes to a gathered copy of '{copy_of}', and not to the "
                f"parameter: write with parameter.copy_(values) under torch.no_grad(), or clone "
                f"this tensor first"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if type(result) is Tensor and func not in get_default_nowrap_functions():
                return whole(result, copy_of if result._is_view() else "")
        return result

    def full_tensor(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)  # type: ignore[no-any-return]

    def to_local(self) -> Tensor:
        return self.full_tensor()


def whole(value: Tensor, of: str = "") -> WholeTensor:
    """``value`` as a WholeTensor: the same memory and the same graph. ``of``: the parameter that a
    copy is taken for a view of."""
    made = value.as_subclass(WholeTensor)
    made.of = of
    return made  # type: ignore[no-any-return]


def gathered(source: DTensor) -> Tensor:
    """All of a DTensor. Two axes that both cut the same rows are gathered one after the other:
    torch 2.13's one gather over both takes padding for rows (see mesh.flattened)."""
    one_by_one = getattr(_redistribute, "disable_redistribute_transform_optimization", nullcontext)
    with one_by_one():
        return source.full_tensor()


def _records(args: Any) -> bool:
    tensors = (one for one in tree_flatten(args)[0] if isinstance(one, Tensor))
    return torch.is_grad_enabled() and any(one.requires_grad for one in tensors)


def recorded_with_plain(args: Any) -> bool:
    """Whether autograd would record an operation on a parameter at rest and a rank's own values: a
    forward past the hooks, whose gradient would reach the parameter unreduced."""
    tensors = [one for one in tree_flatten(args)[0] if isinstance(one, Tensor)]
    return _records(args) and not all(isinstance(one, DTensor) for one in tensors)


def on_the_whole(
    func: Any,
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    outs: Iterable[str],
    mesh: Any,
) -> Any:
    """Gather the operands (collective), compute, and return whole tensors; ``outs``: keyword
    arguments that get the results.

    Where autograd records it, the result is a replicated DTensor: torch refuses to mix those with
    a rank's activations, whose gradients would reach the parameter unreduced.
    """
    if str(func) not in _told:
        _told.add(str(func))
        logger.warning(
            "%s on '%s' gathers the whole tensor on every rank: it can't be computed on pieces",
            func,
            name,
        )
    targets = {key: kwargs[key] for key in outs if key in kwargs}
    plain = tree_map_only(DTensor, gathered, (list(args), kwargs))
    fresh = {key: torch.empty_like(plain[1][key]) for key in targets}
    recorded = _records((args, kwargs))
    replicated = partial(
        DTensor.from_local, device_mesh=mesh, placements=[Replicate()] * mesh.ndim, run_check=False
    )
    with torch.no_grad():
        result = func(*plain[0], **(plain[1] | fresh))
        if not targets:
            kind = replicated if recorded else partial(whole, of=name if _is_view(func) else "")
            return tree_map_only(Tensor, kind, result)
    for key, target in targets.items():
        target.copy_(fresh[key])
    return next(iter(targets.values()))


def into_plain(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Write into a plain tensor, with gathered operands (collective)."""
    plain, keywords = tree_map_only(DTensor, gathered, (list(args), kwargs))
    func(*plain, **keywords)
    return args[0]


def _writes(name: str) -> bool:
    return (
        name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or (name in _INPLACE)
    )


_INPLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod")}


def _is_view(func: Any) -> bool:
    return any(each.alias_info is not None for each in func._schema.returns)
