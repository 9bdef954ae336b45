# SPDX-License-Identifier: Apache-2.0
"""Torch ops on a ShardedTensor: a table from op to handler, filled on first use.

    kind          examples                              what runs
    alias         detach, view of the same shape        the same local memory and buffer
    factory       zeros_like, new_empty                 on the local, same cut (NaN: to_empty)
    pointwise     add_, where, lerp                     on the locals, same cut (else gathered)
    foreach       _foreach_addcmul_                     on lists of locals
    fused         _fused_adamw_                         the same, without empty locals
    reduction     linalg_vector_norm, sum, equal        on the locals, then over the sharded axes
    random        uniform_, normal_                     all numbers on each rank, which keeps a part
    copy          copy_                                 from any tensor of the same global shape
    view          view(-1), [3], chunk                  a run of elements, the same memory
    the rest      t, std, sum(dim), matmul              on the gathered tensor, which is only read

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
from shardwise.core.agreement import differ
from shardwise.core.compat import tree_flatten
from shardwise.core.cut import Cut, Rows
from shardwise.core.tensor_whole import (
    CUT_OTHERWISE,
    PAST_FORWARD,
    VIEWS,
    checksum_of_generator,
    gathered,
    into_plain,
    norms,
    on_the_whole,
    recorded_with_own,
    recorded_with_plain,
    records,
    same_shape,
    spans,
    stretches,
    viewed,
    warn_gathered,
    whole,
    whole_value,
)

Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]

_ALIASES = {"detach", "alias", "expand", "view_as", "lift_fresh"}
_FILLED = ("empty", "zeros", "ones", "full")
_FACTORIES = {f"{filled}_like" for filled in _FILLED} | {f"new_{filled}" for filled in _FILLED}
# Pointwise ops that torch does not tag as such.
_POINTWISE = {"_to_copy", "zero_", "fill_", "fill", "masked_fill_", "_pin_memory", "clone"}
_RANDOM = {"uniform_", "normal_", "bernoulli_", "random_", "exponential_", "log_normal_"}
_RANDOM |= {"cauchy_", "geometric_", "rand_like", "randn_like", "randint_like"}
_FUSED = {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"}
_VALUES = {"sum", "mean", "max", "min", "amax", "amin", "any", "all", "count_nonzero", "dot"}
_FOREACH_REDUCTIONS = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}
_FORMATS = (None, torch.preserve_format, torch.contiguous_format)


class Operations:
    """The op table of one DTensor subclass. ``wrap(local, cut, buffer)`` makes its instances."""

    def __init__(self, kind: type[Any], wrap: Callable[..., Any]) -> None:
        self.kind, self.wrap = kind, wrap
        self.handlers: dict[Any, Handler] = {}
        self.special: dict[str, Handler] = {
            "copy_": self._copy,
            "_foreach_copy_": self._foreach_copy,
            "_foreach_norm": self._foreach_norm,
            "equal": self._equal,
            # fill_diagonal_ writes to such a view inside torch, where a copy could not refuse it.
            "as_strided": self._refuse,
            # nn.init.orthogonal_ does this to wide matrices.
            "t_": partial(
                self._refuse,
                why="a shard is not transposed in place",
                fix="initialise values = torch.empty(p.shape), as nn.init.orthogonal_ does, on "
                "every rank alike, and p.copy_(values)",
            ),
            "_local_scalar_dense": self._item,
            "is_pinned": lambda func, args, kwargs: args[0]._local_tensor.is_pinned(),
            "record_stream": lambda func, args, kwargs: func(args[0]._local_tensor, *args[1:]),
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
        if name in self.special:
            return self.special[name]
        if name in _ALIASES:
            return self._alias
        if name in VIEWS:
            return partial(self._view, name)
        if name in _FACTORIES:
            return self._factory
        if name in ("linalg_vector_norm", "norm"):
            return self._norm
        if name in _VALUES:
            return partial(self._value, name)
        if name in _RANDOM:
            return self._random
        if name in _FUSED:
            return partial(self._foreach, True, skip_empty=True)
        writes = any(map(_is_written, func._schema.arguments))
        if name.startswith("_foreach_") and name not in _FOREACH_REDUCTIONS:
            single = getattr(torch.ops.aten, name.removeprefix("_foreach_").rstrip("_"), None)
            if name.rstrip("_") == "_foreach_zero" or (single is not None and _pointwise(single)):
                return partial(self._foreach, writes)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if name in _POINTWISE or (torch.Tag.pointwise in func.tags and not seeded):
            out = [a.name for a in func._schema.arguments if a.kwarg_only and _is_written(a)]
            if len(out) > 1:
                return self._refuse
            return partial(self._pointwise, writes and not out, out[0] if out else None)
        return self._refuse if seeded else self._gather

    # ------------------------------------------------------------------ refusing

    def _refuse(self, func: Any, args: Any, kwargs: Any, why: str = "", fix: str = "") -> NoReturn:
        _refuse_cut(func, next(self._cuts((args, kwargs))), why, fix)

    def _refuse_own(self, func: Any, args: Any, kwargs: Any) -> None:
        if recorded_with_own(args):
            why = "this rank computed the other operand, whose gradient would not be reduced"
            self._refuse(func, args, kwargs, why)

    def _into_plain(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if any(type(arg) is self.kind and arg.requires_grad for arg in args):
            self._refuse_own(func, args, kwargs)
        return into_plain(func, args, kwargs)

    def _gather(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute on gathered operands, for an op that only reads them or fills an ``out=``."""
        cut = next(self._cuts((args, kwargs)))
        written = [argument for argument in func._schema.arguments if _is_written(argument)]
        outs = [argument.name for argument in written if argument.kwarg_only]
        if len(outs) != len(written) or cut.ranks.others is not None or recorded_with_plain(args):
            _refuse_cut(func, cut)
        return on_the_whole(func, cut.name, args, kwargs, outs, cut.full_mesh)

    def _cuts(self, value: Any) -> Iterator[Cut]:
        """The cuts of the ShardedTensors in nested arguments, in order."""
        leaves = tree_flatten(value)[0]
        return (leaf.cut for leaf in leaves if type(leaf) is self.kind)

    # ------------------------------------------------------------------ element by element

    def _align(self, func: Any, cut: Cut, operand: Any) -> Any:
        """The part of an operand that belongs to this rank's piece."""
        operand = self._ours(operand)
        if type(operand) is self.kind:
            if cut.is_part_of(operand.cut):
                return cut.within(operand.cut, operand._local_tensor)
            why = f"it is cut in another way than '{operand.cut.name}'"
            fix = "use full_tensor() of one of them"
            divided = cut.division != operand.cut.division
            if divided:  # the gradient of another optimizer's matrix
                why += ", of which each replica has a part since sw.optimizer was built"
                fix = "build the next optimizer with sw.optimizer too (AdamW for all: matrix=None, "
                fix += "elementwise=sw.adamw()), or use full_tensor() of both"
            # A gradient would come back in such pieces; a write to a gathered copy would be lost.
            if divided or records(operand) or any(map(_is_written, func._schema.arguments[1:])):
                _refuse_cut(func, cut, why, fix)
            warn_gathered(func, operand.cut.name, operand.device_mesh, CUT_OTHERWISE)
        operand = gathered(operand) if isinstance(operand, DTensor) else operand
        fills = func is torch.ops.aten.masked_fill_.Tensor  # its operand is one number
        if operand.shape == cut.shape and (operand.ndim or not fills):
            return cut.take(operand)
        if operand.numel() == 1 and operand.ndim <= len(cut.shape):
            return operand.reshape(1) if operand.ndim > 1 else operand
        if operand.ndim <= len(cut.shape) and stretches(operand.shape, cut.shape):
            return cut.take(operand.expand(cut.shape))
        why = (
            f"an operand of shape {list(operand.shape)} fits neither the whole tensor "
            f"{list(cut.shape)} nor every element of it"
        )
        fix = f"expand it to {list(cut.shape)}, or use full_tensor()"
        _refuse_cut(func, cut, why, fix)

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
        kind = self.kind
        cut: Cut | None = None
        mixed = False  # the operands are not all pieces of this cut and plain values
        operands: list[Any] = []
        for operand in args:
            if type(operand) is kind:
                if cut is None:
                    cut = operand.cut
                elif operand.cut is not cut:
                    mixed = True
                operand = operand._local_tensor
            elif isinstance(operand, Tensor):
                mixed = True
            operands.append(operand)
        if writes and type(args[0]) is not kind:
            return self._into_plain(func, args, kwargs)
        if mixed and not writes:
            self._refuse_own(func, args, kwargs)
        keywords = kwargs
        if kwargs:
            keywords, cut = self._keywords(func, kwargs, cut)
        assert cut is not None, "torch calls this for operations on a ShardedTensor"
        if mixed:
            operands = [
                self._align(func, cut, arg) if isinstance(arg, Tensor) else operand
                for arg, operand in zip(args, operands, strict=True)
            ]
        if writes:
            self._write(args[:1])
            func(*operands, **keywords)
            return args[0]
        if out is not None:
            target = keywords.pop(out)
            if type(target) is not kind:
                _refuse_cut(func, cut, "it can't be written into a plain tensor")
            self._write([target])
            func(*operands, **keywords, **{out: self._align(func, cut, target)})
            return target
        result = func(*operands, **keywords)
        if isinstance(result, Tensor):
            return self.wrap(result, cut)
        return tuple(self.wrap(local, cut) for local in result)

    def _keywords(
        self, func: Any, kwargs: dict[str, Any], cut: Cut | None
    ) -> tuple[dict[str, Any], Cut]:
        if cut is None:
            cut = next(self._cuts(kwargs))
        if kwargs.get("memory_format") not in _FORMATS:
            _refuse_cut(func, cut, "pieces of a row-major buffer have no other memory format")
        plain = {}
        for name, value in kwargs.items():
            if name == "memory_format":
                continue
            keep = name == "out" or not isinstance(value, Tensor)
            plain[name] = value if keep else self._align(func, cut, value)
        return plain, cut

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
        cuts: list[Cut | None] | None = None
        operands: list[Any] = []
        for operand in args:
            if isinstance(operand, (list, tuple)) and operand and isinstance(operand[0], Tensor):
                its_cuts = [x.cut if type(x) is kind else None for x in operand]
                if cuts is None:
                    cuts = its_cuts
                if its_cuts == cuts:  # Cuts compare by identity
                    operand = [x._local_tensor if type(x) is kind else x for x in operand]
                else:
                    operand = self._align_list(func, cuts, operand)
            elif isinstance(operand, Tensor) and (operand.numel() != 1 or type(operand) is kind):
                self._refuse(func, args, kwargs, "one tensor for a list must have one element")
            operands.append(operand)
        assert cuts is not None
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
        pairs = zip(result, cuts, strict=True)
        return [local if cut is None else self.wrap(local, cut) for local, cut in pairs]

    def _align_list(
        self, func: Any, cuts: list[Cut | None], operand: Sequence[Any]
    ) -> list[Tensor]:
        result = []
        for cut, tensor in zip(cuts, operand, strict=True):
            if type(tensor) is self.kind:
                if cut is None:
                    _refuse_cut(func, tensor.cut, "the other list has a plain tensor in its place")
                same = tensor.cut is cut
                tensor = tensor._local_tensor if same else self._align(func, cut, tensor)
            elif cut is not None and tensor.ndim:
                tensor = self._align(func, cut, tensor)
            result.append(tensor)
        return result

    # ------------------------------------------------------------------ making and copying

    def _alias(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        if len(args) > 1 and not same_shape(args[1], source.cut):
            self._refuse(func, args, kwargs)
        return self.wrap(source._local_tensor, source.cut, source.buffer)

    def _view(self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        if name in ("view", "_unsafe_view") and same_shape(args[1], source.cut):
            return self.wrap(source._local_tensor, source.cut, source.buffer)
        runs = spans(func, source.cut.shape, source.dtype, args[1:], kwargs)
        # In a tile, or where replicas divide a tensor, a rank's elements are no run of the whole.
        if runs is None or source.cut.division is not None or source.cut.tile is not None:
            return self._gather(func, args, kwargs)
        parts = [viewed(source.cut, span, source._local_tensor) for span in runs]
        views = [self.wrap(local, cut, source.buffer) for local, cut in parts]
        return views if name in ("split", "split_with_sizes", "unbind") else views[0]

    def _factory(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        source, rest = args[0], list(args[1:])
        kwargs, cut = self._keywords(func, kwargs, source.cut)
        if func._schema.name.startswith("aten::new_"):
            if not same_shape(rest[0], cut):  # a tensor of another shape is a plain one
                return whole(func(source._local_tensor, *rest, **kwargs))
            rest[0] = list(cut.local_shape)
        local = func(source._local_tensor, *rest, **kwargs)
        if "empty_like" in func._schema.name and source.is_meta and local.is_floating_point():
            local.fill_(
                torch.nan
            )  # to_empty: the first forward finds weights that were not written
        return self.wrap(local, cut)

    def _copy(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        target, source, *rest = args
        if type(target) is not self.kind:
            return self._into_plain(func, args, kwargs)
        cut, source = target.cut, self._ours(source)
        if type(source) is self.kind and cut.matches(source.cut):
            local = source._local_tensor
        elif source.shape != cut.shape and source.numel() != 1:
            why = f"the source has shape {list(source.shape)}"
            self._refuse(func, args, kwargs, why, f"copy from a tensor of shape {list(cut.shape)}")
        else:
            # Another cut, or another library's DTensor. Every rank copies, so all may gather.
            full = gathered(source) if isinstance(source, DTensor) else source
            local = self._align(func, cut, full)
        self._write([target])
        func(target._local_tensor, local, *rest, **kwargs)
        return target

    def _foreach_copy(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        copy, rest = torch.ops.aten.copy_.default, args[2:]
        for target, source in zip(args[0], args[1], strict=True):
            if type(target) is self.kind or type(source) is self.kind:
                self._copy(copy, (target, source, *rest), kwargs)
            else:
                copy(target, source, *rest, **kwargs)

    def _random(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Every rank draws all numbers and keeps its piece, so one seed gives one model. If the
        generators of replicas differ, all take the values of the first replica (collective); a
        model that was made on meta does so in its first forward."""
        target, *rest = args
        if type(target) is not self.kind or any(isinstance(arg, Tensor) for arg in rest):
            self._refuse(func, args, kwargs)
        cut, local, buffer = target.cut, target._local_tensor, target.buffer
        seed = checksum_of_generator(local, kwargs.get("generator"))
        full = torch.empty(cut.shape, dtype=local.dtype, device=local.device)
        drawn = func(full, *rest, **kwargs)
        if func._schema.is_mutable:
            self._write([target])
            local.copy_(cut.take(full))
        else:
            target = self.wrap(cut.take(drawn).clone(), cut)
        unsynced = buffer is not None and buffer.unsynced
        for axis in () if local.is_meta or unsynced else cut.replica_axes:
            if differ(seed, axis):
                comm.broadcast(target._local_tensor, axis).wait()
        return target

    # ------------------------------------------------------------------ one value of all pieces

    def _whole(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> dict[str, Any] | None:
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
            return self._gather(func, args, kwargs)
        order = given.get("ord", given.get("p"))
        return norms([given["self"]], 2 if order is None else order, given.get("dtype"))[0]

    def _foreach_norm(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        given = _arguments(func, args, kwargs)
        return norms(given["self"], given.get("ord", 2), given.get("dtype"))

    def _value(self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = self._whole(func, args, kwargs)
        with_indices = name in ("max", "min") and func._overloadname != "default"
        if given is None or with_indices or given["self"].is_complex():
            return self._gather(func, args, kwargs)
        cut, local = given["self"].cut, given["self"]._local_tensor
        if name == "dot":
            self._refuse_own(func, args, kwargs)
            other = self._align(func, cut, given["tensor"])
            return whole_value("sum", local.double() * other, cut, None).to(local.dtype)
        return whole_value(name, local, cut, given.get("dtype"))

    def _equal(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        cut = next(self._cuts(args))
        if args[0].shape != args[1].shape:
            return False
        first, second = (self._align(func, cut, operand) for operand in args)
        equal = torch.tensor([int(torch.equal(first, second))], device=first.device)
        return bool(cut.reduce(equal, "min").item())

    def _item(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if tensor.numel() != 1:
            self._refuse(func, args, kwargs, f"it has {tensor.numel()} elements and not one")
        return tensor.cut.gather(tensor._local_tensor).item()

    def _unscale(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Unscale local gradients. An inf on one rank stops the step on all ranks.

        An expert mesh has only some of the ranks. The ranks with other experts learn of an inf over
        the axis of the experts, or on the widest mesh of the list.
        """
        tensors, found_inf, *rest = args
        locals_ = [t._local_tensor if type(t) is self.kind else t for t in tensors]
        self._write(tensors)
        func([local for local in locals_ if local.numel()], found_inf, *rest, **kwargs)
        # One collective for each kind of cut, in order of first appearance.
        cuts = {(cut.mesh, cut.axes): cut for cut in self._cuts(list(tensors))}.values()
        widest = max(cuts, key=lambda cut: cut.mesh.size())
        for cut in cuts:
            within = cut.ranks.others is None and cut.mesh.size() < widest.mesh.size()
            over = widest if within else cut
            axes = over.ranks.axes if within else over.norm_axes
            value = over.reduce(found_inf.reshape(1), "max", axes)
            found_inf.copy_(value.view_as(found_inf))


def _refuse_cut(func: Any, cut: Cut, why: str = "", fix: str = "") -> NoReturn:
    lo, hi = cut.piece
    held = f"this rank holds elements {lo} to {hi} of {cut.numel}"
    if hi - lo == cut.numel:
        held = "this rank holds all of it, but nothing reduces its gradient outside of forward"
    why = why or f"this tensor is a shard of {list(cut.shape)}"
    fix = fix or f"call full_tensor() first, or {PAST_FORWARD}"
    raise NotImplementedError(f"{func} on '{cut.name}': {why} ({held}); {fix}")


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _pointwise(packet: Any) -> bool:
    return any(torch.Tag.pointwise in getattr(packet, name).tags for name in packet.overloads())
