# SPDX-License-Identifier: Apache-2.0
"""Whole values made from the pieces of a ShardedTensor.

    p.sum(), p.norm()              one value from all pieces, on every rank

        rank 0   piece  ->  partial \\
        rank 1   piece  ->  partial  >  one collective per sharded axis  ->  the value
        rank 2   (none) ->  neutral /

    p.detach().t(), p.std(), ...   the pieces are gathered, and torch computes on the whole

Partials travel in float64 (or int64): the square of a float32 norm is exact there, and
half-precision partials would be rounded, or overflow, before they are combined.

Transposed and cut-out parts are copies here and views in torch: a write to such a copy does not
reach the parameter.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, _redistribute
from torch.overrides import get_default_nowrap_functions

from shardwise.core.compat import plain_attributes, tree_map_only
from shardwise.core.cut import Cut, Op

PAST_FORWARD = (
    "run it inside the forward of a wrapped module; a module that is called by itself needs "
    "fully_shard of its own, another method register_fsdp_forward_method"
)


class WholeTensor(Tensor):
    """A plain tensor that every rank has whole; scripts for FSDP2 call ``full_tensor()`` on it."""

    placements: tuple[()] = ()  # on no mesh

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch's own operation. A plain tensor that it returns is whole too."""
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented  # the other class knows more, for example that it holds codes
        with plain_attributes():
            result = func(*args, **(kwargs or {}))
            wraps = type(result) is Tensor and func not in get_default_nowrap_functions()
            return whole(result) if wraps else result

    def full_tensor(self) -> Tensor:
        with plain_attributes():
            return self.as_subclass(Tensor)  # type: ignore[no-any-return]

    def to_local(self) -> Tensor:
        return self.full_tensor()

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeTensor:
        return whole(copy.deepcopy(self.full_tensor(), memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor, because ``torch.load`` refuses other classes."""
        return self.full_tensor().__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        """For ``f"{norm:.3f}"``, which torch gives to no subclass."""
        return format(self.full_tensor(), spec)


def whole(value: Tensor) -> WholeTensor:
    """``value`` as a WholeTensor, with the same memory and the same graph."""
    return value.as_subclass(WholeTensor)  # type: ignore[no-any-return]


def gathered(source: DTensor) -> Tensor:
    """The whole of a DTensor. Two axes that both cut the same rows are gathered one after the
    other: torch 2.13's one gather over both takes padding for rows (see mesh.flattened). Detached
    first: inside an operation torch 2.11 cannot gather a tensor that requires gradients."""
    one_by_one = getattr(_redistribute, "disable_redistribute_transform_optimization", nullcontext)
    with torch.no_grad(), one_by_one():
        return source.detach().full_tensor()  # type: ignore[attr-defined,no-any-return]


def on_the_whole(
    func: Any,
    cut: Cut,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    outs: Iterable[str],
    recorded: bool,
) -> Any:
    """Gather the operands (collective), compute, and return whole tensors. ``outs``: the keyword
    arguments that receive results.

    If autograd has ``recorded`` the operation, the result is a replicated DTensor: torch refuses to
    mix it with a rank's activations, whose gradients would reach the parameter unreduced.
    """
    views = any(returned.alias_info is not None for returned in func._schema.returns)
    if views and torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # a view must be a normal tensor, as its base is
            return on_the_whole(func, cut, args, kwargs, outs, recorded)
    mesh = cut.full_mesh
    targets = {key: kwargs[key] for key in outs if key in kwargs}
    plain = tree_map_only(DTensor, gathered, (list(args), kwargs))
    fresh = {key: torch.empty_like(plain[1][key]) for key in targets}
    replicated = partial(
        DTensor.from_local, device_mesh=mesh, placements=[Replicate()] * mesh.ndim, run_check=False
    )
    with torch.no_grad():
        result = func(*plain[0], **(plain[1] | fresh))
        if not targets:
            return tree_map_only(Tensor, replicated if recorded else whole, result)
    for key, target in targets.items():
        target.copy_(fresh[key])
    return next(iter(targets.values()))


def norms(tensors: Sequence[Any], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each whole tensor; a tensor without a cut is whole already.

    One collective for each sharded axis serves the whole list. Meshes come in order of first
    appearance, which is the same on every rank.
    """
    order = float(order)
    cuts: list[Cut | None] = [getattr(tensor, "cut", None) for tensor in tensors]
    pairs = zip(tensors, cuts, strict=True)
    locals_ = [tensor if cut is None else tensor._local_tensor for tensor, cut in pairs]
    result: list[Any] = [None] * len(locals_)
    alike: dict[Any, list[int]] = {}  # by the axes over which pieces are combined
    for index, cut in enumerate(cuts):
        alike.setdefault(cut and cut.norm_axes and (cut.mesh, cut.norm_axes), []).append(index)
    for key, members in alike.items():
        held = [locals_[index] for index in members]
        if not key:  # this rank has them whole
            values = torch._foreach_norm(held, order, dtype=dtype)
            for index, norm in zip(members, values, strict=True):
                result[index] = norm if cuts[index] is None else whole(norm)
            continue
        cut = cuts[members[0]]
        assert cut is not None
        op: Op = "max" if order == math.inf else "min" if order == -math.inf else "sum"
        power = order if order and math.isfinite(order) else 1.0
        total = cut.reduce(_partial_norms(held, order).pow_(power), op, key[1]).pow_(1 / power)
        wanted = [dtype or local.dtype.to_real() for local in held]
        if len(set(wanted)) == 1:
            total = total.to(wanted[0])  # in one pass
        for index, norm, its_dtype in zip(members, total.unbind(), wanted, strict=True):
            result[index] = whole(norm.to(its_dtype))
    return result


def _partial_norms(locals_: Sequence[Tensor], order: float) -> Tensor:
    """The norm of each local piece in float64; for an empty piece the neutral value."""
    neutral = math.inf if order < 0 else 0.0
    held = [local for local in locals_ if local.numel()]
    if not held:
        device = locals_[0].device
        return torch.full((len(locals_),), neutral, dtype=torch.float64, device=device)
    narrow = any(local.dtype.itemsize < 4 for local in held)
    held_norms = torch._foreach_norm(held, order, dtype=torch.float32 if narrow else None)
    empty = torch.full_like(held_norms[0], neutral)  # no host value goes to the device in a step
    at = iter(held_norms)
    norms = [next(at) if local.numel() else empty for local in locals_]
    return torch.stack([norm.double() for norm in norms] if narrow else norms).double()


def whole_value(name: str, local: Tensor, cut: Cut, dtype: torch.dtype | None) -> Tensor:
    """``sum``, ``mean``, ``max``, ``amin``, ``any``, ... of the whole tensor, as a plain tensor."""
    floating = local.is_floating_point() or (dtype is not None and dtype.is_floating_point)
    wide = torch.float64 if floating else torch.int64
    op: Op = "sum"
    if name in ("sum", "mean"):
        partial = local.sum(dtype=wide)
        dtype = dtype or (local.dtype if floating else torch.int64)
    elif name in ("any", "all", "count_nonzero"):
        partial = torch.count_nonzero(local)
    else:
        op, dtype = ("max" if name.endswith("max") else "min"), local.dtype
        least, most = (-math.inf, math.inf) if floating else (-(1 << 63), (1 << 63) - 1)
        partial = local.new_full((), least if op == "max" else most, dtype=wide)
        if local.numel():
            partial = (local.amax() if op == "max" else local.amin()).to(wide)
    total = cut.reduce(partial.reshape(1), op)[0]
    if name == "any":
        return whole(total > 0)
    if name == "all":
        return whole(total == cut.numel)
    if name == "mean":
        total = total / cut.numel
    return whole(total if dtype is None else total.to(dtype))
