# SPDX-License-Identifier: Apache-2.0
"""Torch ops on a ShardedTensor: a table from op to handler, filled on first use.

    kind          examples                              what runs
    alias         detach, view of the same shape        the same local memory, the same version
    factory       zeros_like, new_empty                 on the local, same cut (NaN: to_empty)
    pointwise     add_, where, lerp                     on the locals, same cut (else gathered)
    foreach       _foreach_addcmul_                     on lists of locals
    fused         _fused_adamw_                         the same, without empty locals
    reduction     linalg_vector_norm, sum, equal        on the locals, then over the sharded axes
    random        uniform_, normal_                     all numbers on every rank, which keeps its
    copy          copy_                                 from whatever has the same global shape
    view          view(-1), [3], chunk                  a run of elements, the same memory
    the rest      t, std, sum(dim), matmul              on the gathered whole, which is only read

What writes, and is none of these, would be wrong on a piece: it is refused by name. What can be
decided once per op is not decided at each call: optimizers call it for every parameter and step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise import comm
from shardwise.agreement import differ
from shardwise.cut import Cut
from shardwise.tensor_whole import (
    ELSEWHERE,
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
from shardwise.tensor_writes import note, remember, stepping

Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]

_ALIASES = {"detach", "alias", "expand", "view_as", "lift_fresh"}
_FILLED = ("empty", "zeros", "ones", "full")
_FACTORIES = {name for one in _FILLED for name in (f"{one}_like", f"new_{one}")}
# Element by element, though torch does not tag them so.
_POINTWISE = {"_to_copy", "zero_", "fill_", "fill", "masked_fill_", "_pin_memory", "clone"}
_RANDOM = {"uniform_", "normal_", "bernoulli_", "random_", "exponential_", "log_normal_"}
_RANDOM |= {"cauchy_", "geometric_", "rand_like", "randn_like", "randint_like"}
_FUSED = {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"}
_VALUES = {"sum", "mean", "max", "min", "amax", "amin", "any", "all", "count_nonzero", "dot"}
_FOREACH_REDUCTIONS = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}
_FORMATS = (None, torch.preserve_format, torch.contiguous_format)


class Operations:
    """The op table of one DTensor subclass. ``wrap(local, cut, version)`` makes its instances."""

    def __init__(self, kind: type[Any], wrap: Callable[..., Any]) -> None:
        self.kind, self.wrap = kind, wrap
        self.handlers: dict[Any, Handler] = {}
        self.special: dict[str, Handler] = {
            "copy_": self._copy,
            "_foreach_copy_": self._foreach_copy,
            "_foreach_norm": self._foreach_norm,
            "equal": self._equal,
            # fill_diagonal_ writes to such a view inside of torch, where no copy can refuse it.
            "as_strided": self._refuse,
            # nn.init.orthogonal_ does it to what is wide.
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
        made = handler(func, args, kwargs)
        if not stepping:
            remember(func, [*args, *kwargs.values()], args[0] if made is None else made)
        return made

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
            why = "what this rank has computed meets it, and its gradient would not be reduced"
            self._refuse(func, args, kwargs, why)

    def _into_plain(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if any(type(one) is self.kind and one.requires_grad for one in args):
            self._refuse_own(func, args, kwargs)
        return into_plain(func, args, kwargs)

    def _gather(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute on gathered operands what only reads them, or fills an ``out=`` of ours."""
        cut = next(self._cuts((args, kwargs)))
        written = [each for each in func._schema.arguments if _is_written(each)]
        outs = [each.name for each in written if each.kwarg_only]
        if len(outs) != len(written) or cut.ranks.others is not None or recorded_with_plain(args):
            _refuse_cut(func, cut)
        mesh = next(self._ours((args, kwargs))).device_mesh
        return on_the_whole(func, cut.name, args, kwargs, outs, mesh)

    def _cuts(self, value: Any) -> Iterator[Cut]:
        return (one.cut for one in self._ours(value))

    def _ours(self, value: Any) -> Iterator[Any]:
        if type(value) is self.kind:
            yield value
        elif isinstance(value, dict):
            yield from self._ours(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for one in value:
                yield from self._ours(one)

    # ------------------------------------------------------------------ element by element

    def _align(self, func: Any, cut: Cut, operand: Any) -> Any:
        """The part of an operand that goes with this rank's piece."""
        if type(operand) is self.kind:
            if cut.is_part_of(operand.cut):
                return cut.within(operand.cut, operand._local_tensor)
            why = f"its pieces lie otherwise than those of '{operand.cut.name}'"
            fix = "use full_tensor() of one of them"
            divided = cut.division != operand.cut.division
            if divided:  # the gradient of another optimizer's matrix
                why += ", of which each replica has a part since sw.optimizer was built"
                fix = "build the next optimizer with sw.optimizer too (AdamW for all: matrix=None, "
                fix += "elementwise=sw.adamw()), or use full_tensor() of both"
            # A gradient would come back in pieces that lie so; a write to a copy would be lost.
            if divided or records(operand) or any(map(_is_written, func._schema.arguments[1:])):
                _refuse_cut(func, cut, why, fix)
            warn_gathered(func, operand.cut.name, operand.device_mesh, ELSEWHERE)
        operand = gathered(operand) if isinstance(operand, DTensor) else operand  # on every rank
        fills = func is torch.ops.aten.masked_fill_.Tensor  # by one number, no piece of a tensor
        if operand.shape == cut.shape and (operand.ndim or not fills):
            return cut.take(operand)
        if operand.numel() == 1 and operand.ndim <= len(cut.shape):
            return operand.reshape(1) if operand.ndim > 1 else operand
        if operand.ndim <= len(cut.shape) and stretches(operand.shape, cut.shape):
            return cut.take(operand.expand(cut.shape))
        why = (
            f"an operand of shape {list(operand.shape)} goes neither with the whole tensor "
            f"{list(cut.shape)} nor with every element of it"
        )
        fix = f"expand it to {list(cut.shape)}, or use full_tensor()"
        _refuse_cut(func, cut, why, fix)

    def _pointwise(
        self, writes: bool, out: str | None, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        kind = self.kind
        cut: Cut | None = None
        uneven = False  # some operand needs a closer look
        operands: list[Any] = []
        for operand in args:
            if type(operand) is kind:
                if cut is None:
                    cut = operand.cut
                elif operand.cut is not cut:
                    uneven = True
                operand = operand._local_tensor
            elif isinstance(operand, Tensor):
                uneven = True
            operands.append(operand)
        if writes and type(args[0]) is not kind:
            return self._into_plain(func, args, kwargs)
        if uneven and not writes:
            self._refuse_own(func, args, kwargs)
        given = kwargs  # before pieces are taken of them
        if kwargs:
            kwargs, cut = self._keywords(func, kwargs, cut)
        assert cut is not None, "dispatch found one of ours"
        if uneven:
            operands = [
                self._align(func, cut, one) if isinstance(one, Tensor) else local
                for one, local in zip(args, operands, strict=True)
            ]
        if writes:
            self._write(func, args[:1], [*args[1:], *given.values()])
            func(*operands, **kwargs)
            return args[0]
        if out is not None:
            target = kwargs.pop(out)
            if type(target) is not kind:
                _refuse_cut(func, cut, "it can't be written into a plain tensor")
            self._write(func, [target], args)
            func(*operands, **kwargs, **{out: self._align(func, cut, target)})
            return target
        result = func(*operands, **kwargs)
        if isinstance(result, Tensor):
            return self.wrap(result, cut)
        return tuple(self.wrap(one, cut) for one in result)

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

    def _write(self, func: Any, targets: Sequence[Any], operands: Sequence[Any] = ()) -> None:
        """Tell of a write that comes next to weights and gradients."""
        if watched := [t for t in targets if type(t) is self.kind and t.version is not None]:
            note(func, watched, operands)

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
                theirs = [one.cut if type(one) is kind else None for one in operand]
                if cuts is None:
                    cuts = theirs
                if theirs == cuts:  # by identity: Cuts compare no other way
                    operand = [one._local_tensor if type(one) is kind else one for one in operand]
                else:
                    operand = self._align_list(func, cuts, operand)
            elif isinstance(operand, Tensor) and (operand.numel() != 1 or type(operand) is kind):
                self._refuse(func, args, kwargs, "one tensor for a list must have one element")
            operands.append(operand)
        assert cuts is not None
        if skip_empty and not all(one.numel() for one in operands[0]):
            # A kernel that is given nothing may still write: other libraries were corrupted so.
            keep = [index for index, one in enumerate(operands[0]) if one.numel()]
            operands = [[one[index] for index in keep] if one else one for one in operands]
        if writes:
            # Of a fused optimizer's lists only the first is a weight that somebody may be watching.
            self._write(func, args[0], args[1:])
        result: Any = func(*operands, **kwargs) if not skip_empty or operands[0] else None
        if writes:
            return None
        pairs = zip(result, cuts, strict=True)
        return [one if cut is None else self.wrap(one, cut) for one, cut in pairs]

    def _align_list(
        self, func: Any, cuts: list[Cut | None], operand: Sequence[Any]
    ) -> list[Tensor]:
        kind, result = self.kind, []
        for cut, one in zip(cuts, operand, strict=True):
            if type(one) is kind:
                if cut is None:
                    _refuse_cut(func, one.cut, "it meets a plain tensor of the list beside it")
                one = one._local_tensor if cut is one.cut else self._align(func, cut, one)
            elif cut is not None and one.ndim:
                one = self._align(func, cut, one)
            result.append(one)
        return result

    # ------------------------------------------------------------------ making and copying

    def _alias(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        if len(args) > 1 and not same_shape(args[1], source.cut):
            self._refuse(func, args, kwargs)
        return self.wrap(source._local_tensor, source.cut, source.version)

    def _view(self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        if name in ("view", "_unsafe_view") and same_shape(args[1], source.cut):
            return self.wrap(source._local_tensor, source.cut, source.version)
        found = spans(func, source.cut.shape, source.dtype, args[1:], kwargs)
        # A tile's elements, and those that replicas divide, are no run of the whole tensor's.
        if found is None or source.cut.division is not None or source.cut.tile is not None:
            return self._gather(func, args, kwargs)
        parts = [viewed(source.cut, span, source._local_tensor) for span in found]
        views = [self.wrap(local, cut, source.version) for local, cut in parts]
        return views if name in ("split", "split_with_sizes", "unbind") else views[0]

    def _factory(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        source, rest = args[0], list(args[1:])
        kwargs, cut = self._keywords(func, kwargs, source.cut)
        if func._schema.name.startswith("aten::new_"):
            if not same_shape(rest[0], cut):  # a tensor of another shape is a plain one
                return whole(func(source._local_tensor, *rest, **kwargs))
            rest[0] = list(cut.local_shape)
        made = func(source._local_tensor, *rest, **kwargs)
        if "empty_like" in func._schema.name and source.is_meta and made.is_floating_point():
            made.fill_(torch.nan)  # by to_empty: the first forward sees what nobody has written
        return self.wrap(made, cut)

    def _copy(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        target, source, *rest = args
        if type(target) is not self.kind:
            return self._into_plain(func, args, kwargs)
        cut = target.cut
        if type(source) is self.kind and cut.matches(source.cut):
            local = source._local_tensor
        elif source.shape != cut.shape and source.numel() != 1:
            why = f"the source has shape {list(source.shape)}"
            self._refuse(func, args, kwargs, why, f"copy from a tensor of shape {list(cut.shape)}")
        else:
            # Another cut, or another library's DTensor: every rank is here, so all may gather.
            full = gathered(source) if isinstance(source, DTensor) else source
            local = self._align(func, cut, full)
        self._write(func, [target], [source])
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
        """Every rank draws all numbers and keeps its own: one seed gives one model. Replicas whose
        generators differ take the first one's (collective); a model born on meta, in forward."""
        target, *rest = args
        if type(target) is not self.kind or any(isinstance(one, Tensor) for one in rest):
            self._refuse(func, args, kwargs)
        cut, local, version = target.cut, target._local_tensor, target.version
        seed = checksum_of_generator(local, kwargs.get("generator"))
        full = torch.empty(cut.shape, dtype=local.dtype, device=local.device)
        drawn = func(full, *rest, **kwargs)
        if func._schema.is_mutable:
            self._write(func, [target], rest)
            local.copy_(cut.take(full))
        else:
            target = self.wrap(cut.take(drawn).clone(), cut)
        for axis in () if local.is_meta or (version and version.unsynced) else cut.replica_axes:
            comm.purpose = f"a check of random numbers for '{cut.name}'"
            apart = differ(seed, axis)
            comm.purpose = ""
            if apart:
                comm.broadcast(target._local_tensor, axis).wait()
        return target

    # ------------------------------------------------------------------ one value of all pieces

    def _whole(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> dict[str, Any] | None:
        """The arguments by name, where the op reduces the whole tensor; else None."""
        given = _arguments(func, args, kwargs)
        if type(given["self"]) is not self.kind or "out" in given or given.get("keepdim"):
            return None
        dims, ndim = given.get("dim"), len(given["self"].cut.shape)
        dims = [dims] if isinstance(dims, int) else dims
        some = dims and len({dim % max(ndim, 1) for dim in dims}) < ndim
        return None if some else given

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
        arranged = name in ("max", "min") and func._overloadname != "default"
        if given is None or arranged or given["self"].is_complex():
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
        one, other = (self._align(func, cut, operand) for operand in args)
        same = torch.tensor([int(torch.equal(one, other))], device=one.device)
        return bool(cut.reduce(same, "min").item())

    def _item(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if tensor.numel() != 1:
            self._refuse(func, args, kwargs, f"a tensor of {tensor.numel()} elements is no number")
        return tensor.cut.gather(tensor._local_tensor).item()

    def _unscale(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Unscale local gradients; an inf on one rank stops the step on all of them.

        Those of an expert mesh are some of the ranks. Over the axis of the experts, or on the
        widest mesh of the list, the others learn of it, who hold other experts.
        """
        tensors, found_inf, *rest = args
        locals_ = [one._local_tensor if type(one) is self.kind else one for one in tensors]
        self._write(func, tensors, rest)
        func([local for local in locals_ if local.numel()], found_inf, *rest, **kwargs)
        # One collective per kind of cut, in order of first appearance.
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
    here = f"elements {lo} to {hi} of {cut.numel} are here"
    if hi - lo == cut.numel:
        here = "the whole, but outside of forward, where nothing reduces its gradient"
    why = why or f"this tensor is a shard of {list(cut.shape)}"
    fix = fix or f"call full_tensor() first, or {PAST_FORWARD}"
    raise NotImplementedError(f"{func} on '{cut.name}': {why} ({here}); {fix}")


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _pointwise(packet: Any) -> bool:
    return any(torch.Tag.pointwise in getattr(packet, name).tags for name in packet.overloads())
