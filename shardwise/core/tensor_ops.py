# SPDX-License-Identifier: Apache-2.0
"""Torch ops on a ShardedTensor: a table from op to handler, filled on first use.

    kind          examples                              what runs
    alias         detach, view of the same shape        the same local memory and buffer
    factory       zeros_like, new_empty                 on the local, same cut (NaN: to_empty)
    pointwise     add_, where, lerp, copy_              on the locals of one cut (else gathered)
    foreach       _foreach_addcmul_                     on lists of locals
    fused         _fused_adamw_                         the same, without empty locals
    reduction     linalg_vector_norm, sum               on the locals, then over the sharded axes
    random        uniform_, normal_                     all numbers on each rank, which keeps a part
    the rest      t, [3], std, sum(dim), matmul         on the gathered tensor, which is only read

Any other op that writes would be wrong on a piece, and is refused by name. The handler of an op is
chosen once and not at each call: optimizers call ops for every parameter in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.core import comm
from shardwise.core.compat import tree_flatten
from shardwise.core.cut import Cut, Rows
from shardwise.core.tensor_whole import (
    PAST_FORWARD,
    WholeTensor,
    gathered,
    norms,
    on_the_whole,
    whole,
    whole_value,
)

Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]

_ALIASES = {"detach", "alias", "expand", "view", "_unsafe_view", "reshape", "lift_fresh"}
_FILLED = ("empty", "zeros", "ones", "full")
_FACTORIES = {f"{filled}_like" for filled in _FILLED} | {f"new_{filled}" for filled in _FILLED}
# Pointwise ops that torch does not tag as such, and ops that take operands as copy_ does.
_POINTWISE = {"_to_copy", "zero_", "fill_", "fill", "masked_fill_", "_pin_memory", "clone"}
_COPIES = {"copy_", "_foreach_copy_"}
_RANDOM = {"uniform_", "normal_", "bernoulli_", "random_", "exponential_", "log_normal_"}
_RANDOM |= {"cauchy_", "geometric_", "rand_like", "randn_like", "randint_like"}
_FUSED = {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"}
_VALUES = {"sum", "mean", "max", "min", "amax", "amin", "any", "all", "count_nonzero"}
_FOREACH = {"_foreach_zero_", "_foreach_zero", "_foreach_copy_"}  # others: as the op of one tensor
_FORMATS = (None, torch.preserve_format, torch.contiguous_format)


class Operations:
    """The op table of one DTensor subclass. ``wrap(local, cut, buffer)`` makes its instances."""

    def __init__(self, kind: type[Any], wrap: Callable[..., Any]) -> None:
        self.kind, self.wrap = kind, wrap
        self.handlers: dict[Any, Handler] = {}
        self.special: dict[str, Handler] = {
            "_foreach_norm": self._foreach_norm,
            # fill_diagonal_ writes to such a view inside torch, where a copy could not refuse it.
            "as_strided": self._refuse,
            "equal": partial(self._gather, []),
            "is_pinned": lambda func, args, kwargs: args[0]._local_tensor.is_pinned(),
            "_amp_foreach_non_finite_check_and_unscale_": self._unscale,
        }

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        handler = self.handlers.get(func)
        if handler is None:
            handler = self.handlers[func] = self._choose(func)
        return handler(func, args, kwargs)

    def _choose(self, func: Any) -> Handler:
        namespace, _, name = func._schema.name.partition("::")
        if namespace != "aten":
            return self._refuse
        for names, handler in (
            (self.special, self.special.get(name)),
            (_ALIASES, self._alias),
            (_FACTORIES, self._factory),
            ({"linalg_vector_norm", "norm"}, self._norm),
            (_VALUES, partial(self._value, name)),
            (_RANDOM, self._random),
            (_FUSED, partial(self._foreach, True, skip_empty=True)),
        ):
            if name in names and handler is not None:
                return handler
        written = [argument for argument in func._schema.arguments if _is_written(argument)]
        outs = [argument.name for argument in written if argument.kwarg_only]
        single = getattr(torch.ops.aten, name.removeprefix("_foreach_").rstrip("_"), None)
        if name in _FOREACH or (name.startswith("_foreach_") and _is_pointwise(name, single)):
            return partial(self._foreach, bool(written))
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        tagged = torch.Tag.pointwise in func.tags and not seeded
        if (tagged or name in _POINTWISE | _COPIES) and len(outs) <= 1:
            return partial(self._pointwise, bool(written), outs[0] if outs else None)
        reads = len(outs) == len(written) and not seeded
        return partial(self._gather, outs) if reads else self._refuse

    # ------------------------------------------------------------------ refusing and gathering

    def _cuts(self, value: Any) -> Iterator[Cut]:
        """The cuts of the ShardedTensors in nested arguments, in order."""
        leaves = tree_flatten(value)[0]
        return (leaf.cut for leaf in leaves if type(leaf) is self.kind)

    def _refuse(self, func: Any, args: Any, kwargs: Any, why: str = "") -> NoReturn:
        _refuse_cut(func, next(self._cuts((args, kwargs))), why)

    def _gather(
        self, outs: Sequence[str], func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Compute on gathered operands, for an op that only reads them or fills an ``out=``."""
        cut = next(self._cuts((args, kwargs)))
        if cut.ranks.others is not None or _mixes((args, kwargs)):
            _refuse_cut(func, cut)
        return on_the_whole(func, cut, args, kwargs, outs, _records((args, kwargs)))

    # ------------------------------------------------------------------ element by element

    def _piece(self, func: Any, cut: Cut | None, operand: Any) -> Tensor:
        """The part of an operand that belongs to this rank's piece; without a cut all of it."""
        operand, copies = self._ours(operand), _name_of(func) in _COPIES
        if type(operand) is self.kind:
            if cut is not None and cut.is_part_of(operand.cut):
                return cut.within(operand.cut, operand._local_tensor)
            # A gradient would come back in such pieces; a write to a gathered copy would be lost.
            divided = cut is None or cut.division != operand.cut.division
            lost = _records(operand) or any(map(_is_written, func._schema.arguments[1:]))
            if not copies and (divided or lost):
                why = f"it is cut in another way than '{operand.cut.name}' (two models are wrapped "
                why += "alike; one optimizer divides matrices between replicas and one does not)"
                _refuse_cut(func, cut or operand.cut, why)
        operand = gathered(operand) if isinstance(operand, DTensor) else operand
        # The operand of masked_fill_ is one number, also where the tensor is a scalar.
        if cut is None or (not operand.ndim and func is torch.ops.aten.masked_fill_.Tensor):
            return operand  # type: ignore[no-any-return]
        if operand.shape != cut.shape:
            if operand.numel() == 1 and operand.ndim <= len(cut.shape):
                return operand.reshape(1) if operand.ndim > 1 else operand  # type: ignore[no-any-return]
            ends = zip(reversed(operand.shape), reversed(cut.shape), strict=False)
            if operand.ndim > len(cut.shape) or any(size not in (1, all_) for size, all_ in ends):
                why = f"an operand of shape {list(operand.shape)} does not fit {list(cut.shape)}"
                _refuse_cut(func, cut, why)
        return cut.take(operand.expand(cut.shape))

    def _ours(self, operand: Any) -> Any:
        """A ShardedTensor for a DTensor that ``distribute_tensor`` or ``from_local`` made over our
        placements, as frameworks do that load a parameter."""
        if isinstance(operand, DTensor) and type(operand) is not self.kind:
            cut = next((one.cut for one in operand.placements if isinstance(one, Rows)), None)
            if cut is not None and cut.local_shape == operand._local_tensor.shape:
                return self.wrap(operand._local_tensor, cut)
        return operand

    def _pointwise(
        self, writes: bool, out: str | None, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        kind, target = self.kind, kwargs[out] if out else args[0] if writes else None
        if writes and type(target) is not kind:
            return self._into_plain(func, args, kwargs, target)
        if not writes and _mixes((args, kwargs), trained=True):
            why = "its gradient from a rank's own values would not be reduced"
            self._refuse(func, args, kwargs, why)
        cut = next(self._cuts((args, kwargs))) if target is None else target.cut
        operands = [self._operand(func, cut, value) for value in args]
        keywords = self._keywords(func, cut, kwargs) if kwargs else kwargs
        if writes:
            self._write([target])
            func(*operands, **keywords)
            return target
        result = func(*operands, **keywords)
        if isinstance(result, Tensor):
            return self.wrap(result, cut)
        return tuple(self.wrap(local, cut) for local in result)

    def _operand(self, func: Any, cut: Cut | None, value: Any) -> Any:
        if type(value) is self.kind and value.cut is cut:
            return value._local_tensor
        return self._piece(func, cut, value) if isinstance(value, Tensor) else value

    def _keywords(self, func: Any, cut: Cut, kwargs: dict[str, Any]) -> dict[str, Any]:
        if kwargs.get("memory_format") not in _FORMATS:
            _refuse_cut(func, cut, "pieces of a row-major buffer have no other memory format")
        plain = {name: value for name, value in kwargs.items() if name != "memory_format"}
        return {name: self._operand(func, cut, value) for name, value in plain.items()}

    def _into_plain(self, func: Any, args: Any, kwargs: Any, target: Any) -> Any:
        """Write into a plain tensor, with gathered operands (collective)."""
        trained = [x for x in args if type(x) is self.kind and x.requires_grad]
        if isinstance(target, DTensor) or (trained and _mixes(args, trained=True)):
            self._refuse(func, args, kwargs, "its pieces cannot be written into another tensor")
        plain = [gathered(x) if isinstance(x, DTensor) else x for x in args]
        func(*plain, **kwargs)
        return target

    def _write(self, targets: Sequence[Any]) -> None:
        """Count a write that comes next, to targets that are weights and gradients."""
        for target in targets:
            if type(target) is self.kind and target.buffer is not None:
                target.buffer.wrote()

    def _foreach(
        self,
        writes: bool,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        skip_empty: bool = False,
    ) -> Any:
        kind = self.kind
        cuts = [x.cut if type(x) is kind else None for x in args[0]]
        operands: list[Any] = []
        for operand in args:
            if isinstance(operand, (list, tuple)) and operand and isinstance(operand[0], Tensor):
                pairs = zip(operand, cuts, strict=True)
                operand = [self._of_list(func, cut, x) for x, cut in pairs]
            elif isinstance(operand, Tensor) and (operand.numel() != 1 or type(operand) is kind):
                self._refuse(func, args, kwargs, "one tensor for a list must have one element")
            operands.append(operand)
        if skip_empty and not all(local.numel() for local in operands[0]):
            # A kernel may write even when it gets no elements; this has corrupted other libraries.
            keep = [index for index, local in enumerate(operands[0]) if local.numel()]
            operands = [[x[index] for index in keep] if x else x for x in operands]
        if writes:
            # Only the first list of a fused optimizer holds weights, whose writes are counted.
            self._write(args[0])
        result: Any = func(*operands, **kwargs) if not skip_empty or operands[0] else None
        if writes:
            return None
        made = zip(result, cuts, strict=True)
        return [local if cut is None else self.wrap(local, cut) for local, cut in made]

    def _of_list(self, func: Any, cut: Cut | None, x: Any) -> Tensor:
        if type(x) is self.kind and x.cut is cut:
            return x._local_tensor  # type: ignore[no-any-return]
        # A number (a step) is the same for all pieces.
        return x if type(x) is Tensor and not (cut and x.ndim) else self._piece(func, cut, x)

    # ------------------------------------------------------------------ views, factories, numbers

    def _alias(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A view of the same shape shares the memory; any other is a gathered copy."""
        source = args[0]
        if len(args) > 1 and not _same_shape(args[1], source.cut):
            return self._gather([], func, args, kwargs)
        return self.wrap(source._local_tensor, source.cut, source.buffer)

    def _factory(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        source, rest = args[0], list(args[1:])
        cut, kwargs = source.cut, self._keywords(func, source.cut, kwargs)
        if func._schema.name.startswith("aten::new_"):
            if not _same_shape(rest[0], cut):  # a tensor of another shape is a plain one
                return whole(func(source._local_tensor, *rest, **kwargs))
            rest[0] = list(cut.local_shape)
        local = func(source._local_tensor, *rest, **kwargs)
        if "empty_like" in func._schema.name and source.is_meta and local.is_floating_point():
            local.fill_(torch.nan)  # to_empty: weights that nobody wrote are seen in a forward
        return self.wrap(local, cut)

    def _random(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Every rank draws all numbers and keeps its piece, so one seed gives one model. Replicas
        take the values of the first (collective); a model that was made on meta does so in its
        first forward."""
        target, *rest = args
        if type(target) is not self.kind or any(isinstance(arg, Tensor) for arg in rest):
            self._refuse(func, args, kwargs)
        cut, local, buffer = target.cut, target._local_tensor, target.buffer
        full = torch.empty(cut.shape, dtype=local.dtype, device=local.device)
        drawn = func(full, *rest, **kwargs)
        if func._schema.is_mutable:
            self._write([target])
            local.copy_(cut.take(full))
        else:
            target = self.wrap(cut.take(drawn).clone(), cut)
        unsynced = buffer is not None and buffer.unsynced
        for axis in () if local.is_meta or unsynced else cut.replica_axes:
            comm.broadcast(target._local_tensor, axis).wait()
        return target

    # ------------------------------------------------------------------ one value of all pieces

    def _whole(self, func: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
        """The arguments by name if the op reduces the whole tensor, else None."""
        given = _arguments(func, args, kwargs)
        if type(given["self"]) is not self.kind or "out" in given or given.get("keepdim"):
            return None
        dims, ndim = given.get("dim"), len(given["self"].cut.shape)
        dims = [dims] if isinstance(dims, int) else dims
        over_some = dims and len({dim % max(ndim, 1) for dim in dims}) < ndim
        return None if over_some else given

    def _norm(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = self._whole(func, args, kwargs)
        if given is None:
            return self._gather([], func, args, kwargs)
        order = given.get("ord", given.get("p"))
        return norms([given["self"]], 2 if order is None else order, given.get("dtype"))[0]

    def _foreach_norm(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        given = _arguments(func, args, kwargs)
        return norms(given["self"], given.get("ord", 2), given.get("dtype"))

    def _value(self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = self._whole(func, args, kwargs)
        with_indices = name in ("max", "min") and func._overloadname != "default"
        if given is None or with_indices:
            return self._gather([], func, args, kwargs)
        tensor = given["self"]
        return whole_value(name, tensor._local_tensor, tensor.cut, given.get("dtype"))

    def _unscale(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Unscale local gradients. An inf on one rank stops the step on all ranks: those that hold
        other pieces, and, where some tensors lie on a part of the mesh (experts), the whole mesh.
        """
        tensors, found_inf, *rest = args
        locals_ = [t._local_tensor if type(t) is self.kind else t for t in tensors]
        self._write(tensors)
        func([local for local in locals_ if local.numel()], found_inf, *rest, **kwargs)
        cuts = list(self._cuts(list(tensors)))
        widest = max(cuts, key=lambda cut: cut.mesh.size())
        everyone = any(cut.mesh.size() < widest.mesh.size() for cut in cuts)
        axes = [axis for cut in cuts for axis in cut.norm_axes]
        axes = list(dict.fromkeys([*(widest.ranks.axes if everyone else ()), *axes]))
        value = widest.reduce(found_inf.reshape(1), "max", tuple(axes))
        found_inf.copy_(value.view_as(found_inf))


def _refuse_cut(func: Any, cut: Cut, why: str = "") -> NoReturn:
    lo, hi = cut.piece
    held = f"this rank holds elements {lo} to {hi} of {cut.numel}"
    why = why or f"this tensor is a shard of {list(cut.shape)}"
    raise NotImplementedError(
        f"{func} on '{cut.name}': {why} ({held}); call full_tensor() first, or {PAST_FORWARD}. To "
        f"write new values, make them on every rank alike and call copy_(values)"
    )


def _records(args: Any) -> bool:
    """Whether autograd records an operation on these arguments."""
    leaves = tree_flatten(args)[0] if torch.is_grad_enabled() else ()
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def _mixes(args: Any, trained: bool = False) -> bool:
    """Whether autograd records an operation on a parameter at rest and a rank's own values
    (``trained``: which need a gradient): the gradient would reach the parameter unreduced."""
    if not _records(args):
        return False
    own = [x for x in tree_flatten(args)[0] if isinstance(x, Tensor) and not isinstance(x, DTensor)]
    return any(not isinstance(x, WholeTensor) and (x.requires_grad or not trained) for x in own)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _name_of(func: Any) -> str:
    return func._schema.name.partition("::")[2]  # type: ignore[no-any-return]


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _is_pointwise(name: str, single: Any) -> bool:
    """Whether an op of lists is: the op of one tensor is. (max may be a reduction.)"""
    overloads = single.overloads() if single is not None and name != "_foreach_max" else ()
    return any(torch.Tag.pointwise in getattr(single, each).tags for each in overloads)


def _same_shape(size: Any, cut: Cut) -> bool:
    """Whether a view to ``size`` changes nothing; -1 stands for the size that fits."""
    if not isinstance(size, (list, tuple)) or len(size) != len(cut.shape):
        return False
    return all(wanted in (have, -1) for wanted, have in zip(size, cut.shape, strict=True))
