# SPDX-License-Identifier: Apache-2.0
"""ShardedModule: what a wrapped module can be asked, with the names of torch's ``FSDPModule``.

A wrapped module changes its class in place to ``FSDP<Class>(ShardedModule, FSDPModule, Class)``, so
``isinstance`` checks of accelerate, Lightning Fabric and torch pipelining hold, and so do names of
parameters. What cannot hold here raises ``NotImplementedError`` with the reason.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.shard.members import EMPTY, refuse
from shardwise.shard.runtime import Runtime
from shardwise.shard.unit import Unit


def unit_of(module: nn.Module) -> Unit | None:
    """The unit of a wrapped module, or None; not that of the module inside a CheckpointWrapper or
    an OptimizedModule, which pass attributes on."""
    return vars(module).get("_shardwise_unit")


def units_of(module: nn.Module) -> Iterator[Unit]:
    """The units of a module tree, each once, outer before inner."""
    found = (unit_of(inner) for inner in module.modules())
    yield from dict.fromkeys(unit for unit in found if unit is not None)


class UnshardHandle:
    """The handle of ``unshard(async_op=True)``: ``wait`` makes the whole weights usable."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.expose("forward")


class ShardedModule(FSDPModule):
    """Mixed into the class of a wrapped module."""

    # [FSDP<Class>, ShardedModule, FSDPModule, Class, ...]
    _orig_cls_mro_index: int = 3
    _shardwise_unit: Unit

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Slicing a container builds a new one: of the original class, not wrapped.
        original = cls.__mro__[cls._orig_cls_mro_index]
        made = original.__new__(original, *args, **kwargs)  # type: ignore[call-overload]
        made.__init__(*args, **kwargs)
        return made

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise NotImplementedError(
            "a wrapped module cannot be deep-copied: its parameters are views of shared buffers. "
            "Copy the model before fully_shard (for an average of weights: AveragedModel(model), "
            "then wrap model and average.module alike), or load its state_dict into a second one"
        )

    def __copy__(self) -> Any:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotImplementedError(
            "a wrapped module cannot be pickled: one rank has pieces of its parameters. Save "
            "sw.full_state_dict(model), or all of training with sw.save"
        )

    # ------------------------------------------------------------------ weights by hand

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gather this module's own parameters (not those of wrapped modules inside it)."""
        unit = self._ready_unit()
        unit.runtime.lanes.refuse_capture(f"unshard() of '{unit.name}'")
        unit.follow_moves()
        unit.refuse_changes()
        if not async_op:
            unit.expose("forward")
            return None
        unit.prefetch("forward")
        return UnshardHandle(unit)

    def reshard(self) -> None:
        """Release them again."""
        refuse(self._shardwise_unit.rest())

    def reset_iter_state(self) -> None:
        """Drop an iteration that raised in forward or backward, gradients included."""
        unit = self._ready_unit()
        if not unit.is_root:
            raise RuntimeError("reset_iter_state is for the root module: call it there")
        unit.runtime.reset()

    def _ready_unit(self) -> Unit:
        unit = self._shardwise_unit
        if unit._runtime is None:
            Runtime.start(unit, self)  # type: ignore[arg-type]
        return unit

    def _get_fsdp_state(self) -> Unit:  # type: ignore[override]
        return self._shardwise_unit

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        """``.to()``, ``.half()``, ``to_empty()``: the new values move into new flat buffers."""
        units = list(units_of(self))  # type: ignore[arg-type]
        for error in [unit.rest() for unit in units]:
            refuse(error)
        held = [(each._buffers, name) for each in self.modules() for name in each._buffers]  # type: ignore[attr-defined]
        meta = [place for place in held if (one := place[0][place[1]]) is not None and one.is_meta]
        # Past FSDPModule, whose own version knows torch's buffers only.
        result = super(FSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]
        for unit in units:
            unit.adopt()
        for buffers, name in meta:
            if not buffers[name].is_meta:  # by to_empty, which has no values
                setattr(buffers[name], EMPTY, buffers[name]._version)
        return result

    # ------------------------------------------------------------------ gradient accumulation

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is a step's last: only then do gradients that wait (zero(0),
        zero(1), the outer axis of hsdp and hfsdp) go the rest of their way."""
        self._set(True, last=is_last_backward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients at all; without, they add up whole on every rank."""
        self._set(recurse, sync=requires_gradient_sync)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients: those of microbatches that wait to be reduced too, and those of
        parameters that are gathered by hand (the module holds whole weights then)."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for group in (group for unit in units_of(self) for group in unit.groups):  # type: ignore[arg-type]
            group.main.version.waiting.clear()
            for parameter in group.sharded:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces over the outer axis too."""
        self._set(recurse, reduce_outer=requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by this instead of the number of ranks."""
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor({factor}): the factor must be positive")
        for group in self._shardwise_unit.groups:
            group.gradients.divisor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Sum on the wire and divide afterwards, where a backend would do both in one pass."""
        for group in self._shardwise_unit.groups:
            group.gradients.sum_only = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether a parameter without a gradient counts as zeros (else ``.grad`` stays None)."""
        self._set(recurse, unused="zeros" if reduce_scatter_unused_params else "none")

    # ------------------------------------------------------------------ when weights are there

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the whole weights are released after forward and gathered again in backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward takes a bool, not {reshard_after_forward!r}: "
                f"a number is for fully_shard itself, where its groups of ranks are made"
            )
        self._set(recurse, release_after_forward=reshard_after_forward, kept_axis=None)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether the whole weights are released after backward."""
        self._set(recurse, release_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False where backward does not read the weights (an embedding). One that reads them after
        all raises: torch takes them for written."""
        self._shardwise_unit.gather_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Whose weights to gather while this module computes forward, instead of the next one's."""
        self._shardwise_unit.forward_prefetch = _references(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The same in backward."""
        self._shardwise_unit.backward_prefetch = _references(modules)

    def set_post_optim_event(self, event: Any) -> None:
        """The next forward's gathers wait for ``event``, recorded after the optimizer's step,
        instead of everything issued before that forward."""
        self._ready_unit().runtime.await_writers(event)

    # ------------------------------------------------------------------ communication

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """How many gradient buffers may be alive; one by default. Two help where the reduction of
        one unit takes longer than the backward of the next."""
        if not isinstance(max_input_buffers, int) or max_input_buffers < 1:
            raise ValueError(
                f"set_reduce_scatter_max_input_buffers({max_input_buffers!r}): at least 1"
            )
        self._ready_unit().runtime.max_reductions = max_input_buffers

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reductions on communicators of their own, so that NCCL can overlap them with gathers."""
        runtime = self._ready_unit().runtime
        if not enable:
            runtime.separate_reduce = False
            return
        groups = [group for unit in units_of(self) for group in unit.groups]  # type: ignore[arg-type]
        runtime.separate_reductions(axis for group in groups for axis in group.ranks.axes)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        if enable:
            raise NotImplementedError(
                "set_allocate_memory_from_process_group_for_comm: buffers keep one storage for "
                "life, so that views saved by autograd survive a release; NCCL's allocator cannot "
                "resize it"
            )

    def _set(self, recurse: bool, **settings: Any) -> None:
        for unit in units_of(self) if recurse else [self._shardwise_unit]:  # type: ignore[arg-type]
            vars(unit).update(settings)


_BY_THE_MESH = (
    "all collectives are issued by shardwise.comm, which counts them and knows the backend. Choose "
    "the communicator by the mesh"
)
# Methods of torch's that cannot hold here, and the reasons.
REFUSED = {
    "set_all_reduce_hook": "gradients go to their main placement in one chain of collectives; "
    "express the outer reduction as a mesh axis (placements=sw.hsdp()) instead of a hook",
    "set_custom_all_gather": f"{_BY_THE_MESH}: pass DeviceMesh.from_group(your_group, ...) as mesh",
    "set_custom_reduce_scatter": f"{_BY_THE_MESH}, or give reductions their own with "
    "set_separate_reduce_scatter_group()",
    "set_symm_mem_for_comm": "symmetric memory cannot be resized, and weights are released by "
    "resizing their storage",
}


def _refusal(name: str, reason: str) -> Callable[..., NoReturn]:
    def refused(self: ShardedModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: {reason}")

    theirs = getattr(FSDPModule, name, None)  # not in every torch that we support
    return refused if theirs is None else functools.wraps(theirs)(refused)


for _name, _reason in REFUSED.items():
    setattr(ShardedModule, _name, _refusal(_name, _reason))


def _references(modules: list[Any]) -> list[weakref.ref[Unit]]:
    units = [unit_of(module) for module in modules]
    strangers = [type(m).__name__ for m, unit in zip(modules, units, strict=True) if unit is None]
    if strangers:
        raise ValueError(f"{strangers} are not wrapped by fully_shard and cannot be prefetched")
    return [weakref.ref(unit) for unit in units if unit is not None]


def mark_written(model: nn.Module) -> None:
    """Tell that main weights of a wrapped model were written where no version counter sees it: by
    numpy, DLPack, ``p.to_local().data`` or a foreign kernel, outside of an optimizer's step.

    Weights that stay gathered (``zero(0)`` to ``zero(2)``, ``reshard_after_forward=False``, MXFP8)
    are made anew by the next forward. Call it after the write, on every rank. Torch's operations on
    a parameter or its ``to_local()``, every ``torch.optim`` optimizer and every load are seen
    without it. A view that was taken before wrapping (``p.data``, a slice, ``state_dict()``, numpy)
    shows the memory of the unwrapped model: what is written there reaches no weight, told or not.
    """
    units = list(units_of(model))
    if not units:
        raise ValueError(
            f"mark_written: nothing of this {type(model).__name__} is wrapped by fully_shard or "
            f"data_parallel, so no weights are kept beside its parameters"
        )
    for unit in units:
        for group in unit.groups:
            group.main.version.write()
