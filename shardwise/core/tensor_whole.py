# SPDX-License-Identifier: Apache-2.0
"""Operations on a ShardedTensor: views of its memory, and whole values made from pieces.

    p.view(-1), p[2:5], ...        keep the elements in order. A piece is a run of elements, so the
                                   piece of such a view is a run too (empty on some ranks)

    p.sum(), p.norm()              one value from all pieces, on every rank

        rank 0   piece  ->  partial \\
        rank 1   piece  ->  partial  >  one collective per sharded axis  ->  the value
        rank 2   (none) ->  neutral /

    p.detach().t(), p.std(), ...   the pieces are gathered, and torch computes on the whole

Partials travel in float64 (or int64): the square of a float32 norm is exact there, and
half-precision partials would be rounded, or overflow, before they are combined.

A gather is expensive, so each kind of operation that gathers warns once. Transposed and cut-out
parts are copies here and views in torch: a write to such a copy does not reach the parameter.
"""

from __future__ import annotations

import copy
import logging
import math
import zlib
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, _redistribute, distribute_tensor
from torch.overrides import get_default_nowrap_functions

from shardwise.core.compat import plain_attributes, tree_flatten, tree_map_only
from shardwise.core.cut import Cut, Op
from shardwise.notices import warn_once

logger = logging.getLogger(__name__)
PAST_FORWARD = (
    "run it inside the forward of a wrapped module; a module that is called by itself needs "
    "fully_shard of its own, another method register_fsdp_forward_method"
)
CUT_OTHERWISE = (
    "it is cut in another way than the other operand (if these are two models, wrap both alike and "
    "freeze one after that)"
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


def _tensors(args: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(args)[0] if isinstance(leaf, Tensor)]


def records(args: Any) -> bool:
    """Whether autograd would record an operation on these arguments."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(args))


def recorded_with_plain(args: Any) -> bool:
    """Whether autograd would record an operation on a parameter at rest and a rank's own values:
    forward was called past the hooks, and the gradient would reach the parameter unreduced."""
    return records(args) and not all(isinstance(tensor, DTensor) for tensor in _tensors(args))


def recorded_with_own(args: Any) -> bool:
    """Whether autograd would record an operation with a tensor of this rank alone (computed, or a
    gathered weight): its gradient would come from pieces, and a parameter at rest would get one
    rank's gradient."""
    if not torch.is_grad_enabled():
        return False
    trained = (arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad)
    return not all(isinstance(arg, (DTensor, WholeTensor)) for arg in trained)


def warn_gathered(func: Any, name: str, mesh: Any, why: str) -> None:
    text = "%s on '%s' gathers the whole tensor on every rank: %s"
    warn_once(logger, text, func, name, why, about=f"{func} {why}", mesh=mesh)


def on_the_whole(
    func: Any,
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    outs: Iterable[str],
    mesh: Any,
) -> Any:
    """Gather the operands (collective), compute, and return whole tensors. ``outs``: the keyword
    arguments that receive results.

    If autograd records the operation, the result is a replicated DTensor: torch refuses to mix it
    with a rank's activations, whose gradients would reach the parameter unreduced.
    """
    if torch.is_inference_mode_enabled() and _is_view(func):
        with torch.inference_mode(False):  # a view must be a normal tensor, as its base is
            return on_the_whole(func, name, args, kwargs, outs, mesh)
    recorded = records((args, kwargs))
    why = "it can't be computed on pieces"
    if recorded:
        why += "; to mix the result with a rank's own tensors (torch says 'mixed torch.Tensor and "
        why += f"DTensor'), compute with full_tensor() instead, or {PAST_FORWARD}"
    warn_gathered(func, name, mesh, why)
    targets = {key: kwargs[key] for key in outs if key in kwargs}
    plain = tree_map_only(DTensor, gathered, (list(args), kwargs))
    fresh = {key: torch.empty_like(plain[1][key]) for key in targets}
    replicated = partial(
        DTensor.from_local, device_mesh=mesh, placements=[Replicate()] * mesh.ndim, run_check=False
    )
    with torch.no_grad():
        result = func(*plain[0], **(plain[1] | fresh))
        if not targets:
            kind = replicated if recorded else whole
            return tree_map_only(Tensor, kind, result)
    for key, target in targets.items():
        target.copy_(fresh[key])
    return next(iter(targets.values()))


def into_plain(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Write into a plain tensor or into torch's DTensor, with gathered operands (collective)."""
    target = args[0]
    operands, keywords = tree_map_only(DTensor, gathered, (list(args[1:]), kwargs))
    if isinstance(target, DTensor):
        mesh, everywhere = target.device_mesh, [Replicate()] * target.device_mesh.ndim

        def placed(value: Tensor) -> DTensor:  # like the target: torch moves no rows in place
            placements = target.placements if value.shape == target.shape else everywhere
            return distribute_tensor(value, mesh, placements, src_data_rank=None)

        operands, keywords = tree_map_only(Tensor, placed, (operands, keywords))
    func(target, *operands, **keywords)
    return target


def _is_view(func: Any) -> bool:
    return any(returned.alias_info is not None for returned in func._schema.returns)


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
    local_only: list[int] = []
    meshes: dict[Any, list[int]] = {}
    for index, cut in enumerate(cuts):
        if cut is None or not cut.norm_axes:
            local_only.append(index)
        else:
            meshes.setdefault((cut.mesh, cut.norm_axes), []).append(index)
    if local_only:
        norms = torch._foreach_norm([locals_[index] for index in local_only], order, dtype=dtype)
        for index, norm in zip(local_only, norms, strict=True):
            result[index] = norm if cuts[index] is None else whole(norm)
    for (_, axes), members in meshes.items():
        cut = cuts[members[0]]
        assert cut is not None
        partials = _partial_norms([locals_[index] for index in members], order)
        op: Op = "max" if order == math.inf else "min" if order == -math.inf else "sum"
        power = order if order and math.isfinite(order) else 1.0
        values = cut.reduce(partials.pow_(power), op, axes).pow_(1 / power)
        targets = [dtype or locals_[index].dtype.to_real() for index in members]
        if len(set(targets)) == 1:
            values = values.to(targets[0])
        for index, norm, target in zip(members, values.unbind(), targets, strict=True):
            result[index] = whole(norm.to(target))
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
        if name == "mean" and not floating:
            raise ValueError(f"mean of '{cut.name}' in {local.dtype}: give a floating dtype")
    elif name in ("any", "all", "count_nonzero"):
        partial = torch.count_nonzero(local)
    else:
        op, dtype = ("max" if name.endswith("max") else "min"), local.dtype
        partial = _extreme(local, op, wide)
    total = cut.reduce(partial.reshape(1), op)[0]
    if name == "any":
        return whole(total > 0)
    if name == "all":
        return whole(total == cut.numel)
    if name == "mean":
        total = total / cut.numel
    return whole(total if dtype is None else total.to(dtype))


def _extreme(local: Tensor, op: str, wide: torch.dtype) -> Tensor:
    if local.numel():
        return (local.amax() if op == "max" else local.amin()).to(wide)
    if wide.is_floating_point:
        neutral: float = -math.inf if op == "max" else math.inf
    else:
        neutral = torch.iinfo(wide).min if op == "max" else torch.iinfo(wide).max
    return torch.full((), neutral, dtype=wide, device=local.device)


Span = tuple[int, tuple[int, ...]]  # the first element, and the shape


VIEWS = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"}
VIEWS |= {"select", "slice", "split", "split_with_sizes", "unbind"}


def spans(
    func: Any, shape: Sequence[int], dtype: torch.dtype, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Span] | None:
    """The runs of elements that a view operation on a whole tensor returns, found by running it on
    a meta tensor; None if a result is no run."""
    like = torch.empty(shape, dtype=dtype, device="meta")
    views = tree_flatten(func(like, *args, **kwargs))[0]
    # A tensor without elements has no layout.
    runs = all(view.is_contiguous() and view.numel() and view.dtype == dtype for view in views)
    if not (runs and shape):
        return None
    return [(view.storage_offset(), tuple(view.shape)) for view in views]


def viewed(cut: Cut, span: Span, local: Any) -> tuple[Any, Cut]:
    """The local piece of a view, and its cut."""
    first, shape = span
    part = cut.viewed(first, shape)
    (lo, hi), begin = part.piece, cut.piece[0] - first
    if lo == hi:
        return local.new_empty(part.local_shape), part
    return local.reshape(-1)[lo - begin : hi - begin].view(part.local_shape), part


def stretches(small: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a tensor of shape ``small`` can be broadcast to ``shape``."""
    ends = zip(reversed(small), reversed(shape), strict=False)
    return all(size in (1, wanted) for size, wanted in ends)


def same_shape(size: Any, cut: Cut) -> bool:
    """Whether a view to ``size`` changes nothing; -1 stands for the size that fits."""
    if not isinstance(size, (list, tuple)) or len(size) != len(cut.shape):
        return False
    return all(wanted in (have, -1) for wanted, have in zip(size, cut.shape, strict=True))


def checksum_of_generator(tensor: Tensor, generator: torch.Generator | None) -> int:
    """A checksum of the state of the generator that a random op on ``tensor`` uses."""
    if generator is not None:
        state = generator.get_state()
    elif tensor.device.type == "cuda":
        state = torch.cuda.get_rng_state(tensor.device)
    else:
        state = torch.get_rng_state()
    return zlib.crc32(state.numpy().tobytes())
