# SPDX-License-Identifier: Apache-2.0
"""``ShardedModule``: the methods of a wrapped module, named as in torch's ``FSDPModule``.

Wrapping changes the class of a module in place, to ``FSDP<Class>(ShardedModule, FSDPModule,
Class)``. So ``isinstance`` checks of accelerate, Lightning Fabric and torch pipelining hold, and
names of parameters do not change. Methods that cannot work raise ``NotImplementedError`` with the
reason.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.moe.grouped_mlp import GroupedMLP
from shardwise.shard.model import Model
from shardwise.shard.unit import Unit


def unit_of(module: nn.Module) -> Unit | None:
    """The unit of a wrapped module, or None."""
    # vars, because a CheckpointWrapper or an OptimizedModule returns attributes of the one inside.
    return vars(module).get("_shardwise_unit")


def units_of(module: nn.Module) -> Iterator[Unit]:
    """The units of a module tree, each once, outer before inner."""
    units = (unit_of(inner) for inner in module.modules())
    yield from dict.fromkeys(unit for unit in units if unit is not None)


class UnshardHandle:
    """The handle of ``unshard(async_op=True)``: ``wait`` makes the whole weights usable."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.expose()


class ShardedModule(FSDPModule):
    """Mixed into the class of a wrapped module."""

    # [FSDP<Class>, ShardedModule, FSDPModule, Class, ...]
    _orig_cls_mro_index: int = 3
    _shardwise_unit: Unit

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Slicing a container makes a new container. It gets the original class: it is not wrapped.
        original = cls.__mro__[cls._orig_cls_mro_index]
        module = original.__new__(original, *args, **kwargs)  # type: ignore[call-overload]
        module.__init__(*args, **kwargs)
        return module

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise AssertionError(
            "FSDP does not support deepcopy: parameters are views of shared buffers. "
            "Copy the model before fully_shard (for an average of weights: AveragedModel(model), "
            "then wrap model and average.module alike), or load its state_dict into a second one"
        )

    def __copy__(self) -> Any:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotImplementedError(
            "a wrapped module cannot be pickled: each rank has only pieces of its parameters. Save "
            "sw.full_state_dict(model), or the whole state of training with sw.save"
        )

    # ------------------------------------------------------------------ weights by hand

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gather this module's parameters, but not those of wrapped modules inside it.

        With ``async_op`` the gather runs in the background; call ``wait()`` on the returned handle.
        """
        unit = self._ready_unit()
        unit.runtime.lanes.refuse_capture(f"unshard() of '{unit.name}'")
        if not async_op:
            unit.expose()
            return None
        unit.gather()
        return UnshardHandle(unit)

    def reshard(self) -> None:
        """Release this module's gathered parameters."""
        self._shardwise_unit.put_away()

    def reset_iter_state(self) -> None:
        """Drop an iteration that raised in forward or backward, with its gradients."""
        unit = self._ready_unit()
        if not unit.is_root:
            raise RuntimeError(
                f"reset_iter_state resets a whole model, and '{unit.name}' is a part of one: call "
                f"it on the root module"
            )
        unit.runtime.reset()
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, GroupedMLP):
                module.delayed.forget()

    def _ready_unit(self) -> Unit:
        unit = self._shardwise_unit
        if unit.model is None:
            Model.start(unit, self)  # type: ignore[arg-type]
        return unit

    def _get_fsdp_state(self) -> Unit:  # type: ignore[override]
        return self._shardwise_unit

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        """``.to()``, ``.half()``, ``to_empty()``: the flat buffer follows, and parameters with it.
        A unit of several modules moves when its last module has moved."""
        unit = self._shardwise_unit
        unit.put_away()
        if not recurse:  # parameters move one by one, and are packed again once all have moved
            return super(FSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]
        parameters = [(place, place[0][place[1]]) for place in unit.places]
        for place, _ in parameters:  # past torch's own loop, which would move each by itself
            place[0][place[1]] = None
        try:
            # Not FSDPModule's version, which handles torch's flat buffers.
            result = super(FSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]
        finally:
            for place, parameter in parameters:
                place[0][place[1]] = parameter
        unit.moved.add(id(self))
        if len(unit.moved) == len(unit.modules):
            unit.moved.clear()
            for group in unit.groups:
                group.apply(fn)
            unit.connect()
        return result

    # ------------------------------------------------------------------ gradient accumulation

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last one of a step. Reductions that are due once a step
        (zero(0), zero(1), the outer axis of hsdp and hfsdp) happen only in the last backward."""
        self._set(True, last=is_last_backward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients. Without reductions, whole gradients are added up on
        every rank."""
        self._set(recurse, sync=requires_gradient_sync)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients: also those of microbatches that are not reduced yet, and those of
        modules that hold whole weights after ``unshard()``."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for unit in units_of(self):  # type: ignore[arg-type]
            for group in unit.groups:
                group.gradients.forget()
                for parameter in group.sharded:
                    if set_to_none:
                        parameter.grad = None
                    elif parameter.grad is not None:
                        parameter.grad.zero_()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward also reduces over the outer axis."""
        self._set(recurse, reduce_outer=requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of the number of ranks."""
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor({factor}): the factor must be positive")
        for group in self._shardwise_unit.groups:
            group.gradients.divisor = float(factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let collectives only sum, and divide afterwards, even if the backend could average."""
        for group in self._shardwise_unit.groups:
            group.gradients.sum_only = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether a parameter without a gradient gets zeros. Otherwise ``.grad`` stays None."""
        self._set(recurse, unused="zeros" if reduce_scatter_unused_params else "none")

    # ------------------------------------------------------------------ gather and release

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the whole weights are released after forward and gathered again in backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward takes a bool, not {reshard_after_forward!r}: pass a "
                f"number of ranks to fully_shard, which makes the groups of ranks"
            )
        self._set(recurse, release_after_forward=reshard_after_forward, kept_axis=None)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether the whole weights are released after backward."""
        self._set(recurse, release_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether weights are gathered for backward. Pass False if backward does not read them (an
        embedding)."""
        self._shardwise_unit.gather_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather the weights of ``modules``, and not of the next module, during this forward."""
        self._shardwise_unit.forward_prefetch = _references(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather the weights of ``modules``, and not of the next module, during this backward."""
        self._shardwise_unit.backward_prefetch = _references(modules)

    def set_post_optim_event(self, event: Any) -> None:
        """Let the gathers of the next forward wait for ``event``, which you recorded after the
        optimizer's step, and not for everything issued before that forward."""
        self._ready_unit().runtime.await_writers(event)

    # ------------------------------------------------------------------ communication

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many gradient buffers may be in memory; by default one. Two help if the reduction
        of a unit takes longer than the backward of the next unit."""
        if type(max_input_buffers) is not int or max_input_buffers < 1:
            kind = TypeError if type(max_input_buffers) is not int else ValueError
            raise kind(f"max_input_buffers={max_input_buffers!r}: pass an int of 1 or more")
        self._ready_unit().runtime.max_reductions = max_input_buffers

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Use separate communicators for reductions, so that NCCL can overlap them with gathers."""
        runtime = self._ready_unit().runtime
        groups = [group for unit in units_of(self) for group in unit.groups]  # type: ignore[arg-type]
        axes = [axis for group in groups for axis in group.ranks.axes]
        runtime.separate_reductions(axes if enable else [])

    def _set(self, recurse: bool, **settings: Any) -> None:
        for unit in units_of(self) if recurse else [self._shardwise_unit]:  # type: ignore[arg-type]
            vars(unit).update(settings)


# Methods of torch's FSDPModule that cannot work.
REFUSED = (
    "set_all_reduce_hook",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_symm_mem_for_comm",
    "set_allocate_memory_from_process_group_for_comm",
    "set_keep_unsharded_storage",  # since torch 2.15
    "set_manual_backward_finalization",
    "finalize_backward",
)


def _refused(self: ShardedModule, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        f"{', '.join(REFUSED)}: sw.comm issues all collectives, and memory comes and goes by "
        f"resizing storages. Choose the communicator by the mesh (DeviceMesh.from_group), give "
        f"reductions their own with set_separate_reduce_scatter_group(), and express an outer "
        f"reduction as a mesh axis (placements=sw.hsdp()). Every backward is finalized by autograd"
    )


for _name in REFUSED:
    setattr(ShardedModule, _name, _refused)


def _references(modules: list[Any]) -> list[weakref.ref[Unit]]:
    units = [unit_of(module) for module in modules]
    plain = [type(m).__name__ for m, unit in zip(modules, units, strict=True) if unit is None]
    if plain:
        raise ValueError(
            f"{plain} are not wrapped by fully_shard and cannot be prefetched: pass wrapped modules"
        )
    return [weakref.ref(unit) for unit in units if unit is not None]


def mark_written(model: nn.Module) -> None:
    """Mark the main weights of a wrapped model as written, so that the next forward gathers them.

    Call it on every rank after a write that torch does not see as an operation on a parameter at
    rest: to ``p.to_local()``, by numpy, DLPack or a foreign kernel. Otherwise weights that stay
    gathered (``zero(0)`` to ``zero(2)``, ``reshard_after_forward=False``) keep their old values.
    Operations on a parameter, all ``torch.optim`` optimizers and all loads are seen without it.
    """
    units = list(units_of(model))
    if not units:
        raise ValueError(
            f"mark_written: nothing of this {type(model).__name__} is wrapped by fully_shard or "
            f"data_parallel, so there are no gathered weights to make anew: leave the call out"
        )
    for unit in units:
        for group in unit.groups:
            group.main.wrote()
