# SPDX-License-Identifier: Apache-2.0
"""Wrapped: the modules and groups of one call, the user's settings, the runtime of the model, and
the whole weights of the groups:

    at rest   the modules hold DTensors over the main weight
    shown     the modules hold whole parameters, views of gathered memory

Settings do not change within a step. The facts that change are in ``unit.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise import comm
from shardwise.precision import Precision
from shardwise.precision.fp8_tensor import Reads
from shardwise.precision.policy import Stored
from shardwise.shard.flow import SharedLanes
from shardwise.shard.group import Group
from shardwise.shard.members import Members, refuse, refuse_swapped
from shardwise.shard.runtime import Runtime
from shardwise.shard.whole_parameter import LOST
from shardwise.streams import annotate

# (the parameter dictionary of a module, name in it, group, index). The dictionary, not the module,
# so that no place keeps a model alive.
Place = tuple[dict[str, Any], str, int, int]


class Held(NamedTuple):
    """The elements of a memory that a parameter or a buffer holds."""

    name: str
    memory: StorageWeakRef
    begin: int
    end: int
    trained: bool


class Wrapped:
    """The modules and groups that one call wrapped. References to modules are weak, because modules
    refer to this object."""

    by_group = False  # whether groups, listed as backward fills them, are reduced one by one
    members: Members  # set once the modules are wrapped

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        groups: Sequence[Group],
        places: Sequence[Place],
        *,
        precision: Precision,
        release_after_forward: bool | None,
        kept_axis: comm.Axis | None,
        unused: str,
        options: dict[str, Any],
        staged: bool = False,
        early: bool = False,
    ) -> None:
        """``staged``: each module waits for its own weights, not for all."""
        self.name = name
        self.modules = [weakref.ref(module) for module in modules]
        self.groups, self.places = list(groups), list(places)
        self._staged, self.shown = staged, False
        self._here = [False] * len(groups)  # by group: whether the modules hold its whole weights
        self.precision = precision
        self.release_after_forward = release_after_forward
        self.release_after_backward = True
        self.gather_in_backward = True
        self.kept_axis = kept_axis
        self.unused = unused
        self.options = options
        self._runtime: Runtime | None = None
        self._comm_ctx = SharedLanes()  # torch's name: its ``share_comm_ctx`` sets it
        # By (group, index): how each parameter is stored, for reports.
        self.stored: dict[tuple[int, int], Stored] = {}
        # The parameters of before wrapping, by name. They should get no gradients any more.
        self.originals: list[tuple[str, weakref.ref[Tensor]]] = []
        self.held: list[Held] = []  # the memory of the parameters of before wrapping
        self.is_root = False
        self.sync = True
        self.last = True
        self.reduce_outer = True
        self.forward_prefetch: list[weakref.ref[Any]] | None = None
        self.backward_prefetch: list[weakref.ref[Any]] | None = None
        self.assigns = False  # whether the load that runs now puts tensors in place of parameters
        self.early = early  # whether weights are gathered as soon as the optimizer is done

    @property
    def runtime(self) -> Runtime:
        assert self._runtime is not None, "the root's first forward makes the runtime"
        return self._runtime

    def begin(self, runtime: Runtime, name: str, is_root: bool) -> None:
        """The first forward of the root begins: take a name in the model, lanes and memory."""
        if self._runtime is not None:
            self._runtime.give_up(self)  # type: ignore[arg-type]
        self.name, self.is_root = name, is_root
        self.adopt_runtime(runtime)
        for number, group in enumerate(self.groups):
            group.label = f"'{name}'" + (f" buffer {number}" if number else "")
            group.gradients.label = group.label
            group.sync_initial_values()

    def adopt_runtime(self, runtime: Runtime) -> None:
        self._runtime = runtime
        for group in self.groups:
            group.awaited = None  # other lanes may have waited for the last write
            group.gradients.source = runtime.source
            if group.offload:
                runtime.offloads = True

    # ------------------------------------------------------------------ whole weights

    @property
    def versions(self) -> list[tuple[int, int]]:
        """The versions of the main weights."""
        return [group.main.state for group in self.groups]

    def gather(self, reads: Reads) -> None:
        """Begin to gather what forward or backward reads. Buckets, which are listed in the order of
        backward, are gathered in the order of forward."""
        for group in reversed(self.groups) if self.by_group else self.groups:
            group.gather(self.runtime, reads)

    def wait(self) -> None:
        """Wait for the gathers that were begun."""
        for group in self.groups:
            group.wait(self.runtime)

    def show(self) -> None:
        """Show the whole weights to the modules; if staged, the weights that have arrived."""
        self.shown = True
        groups = enumerate(self.groups)
        self.show_groups([n for n, group in groups if not (self._staged and group.pending)])

    def show_groups(self, numbers: Sequence[int]) -> None:
        """Wait for the whole weights of these groups, and show them to the modules."""
        missing = [number for number in numbers if not self._here[number]]
        for number in missing:
            self.groups[number].wait(self.runtime)
            self._here[number] = True
        for parameters, name, number, index in self.places if missing else ():
            if number in missing:
                parameters[name] = self.groups[number].unsharded[index]

    def assign(self) -> None:
        """Take over values that ``load_state_dict(assign=True)`` put in place of the parameters."""
        for parameters, name, number, index in self.places:
            value, sharded = parameters.get(name), self.groups[number].sharded[index]
            if value is not None and value is not sharded:
                parameters[name] = sharded
                self.groups[number].assign(index, value)
        self.adopt()  # type: ignore[attr-defined]

    def take_trainability(self) -> None:
        """``requires_grad_`` on whole parameters, outside of forward, reaches those at rest."""
        for group in self.groups:
            group.take_trainability()

    def lost_writes(self) -> RuntimeError | None:
        """The error for writes to whole weights, which their release would lose."""
        names = [name for group in self.groups for name in group.lost_writes()]
        return RuntimeError(f"{', '.join(names)}: {LOST}") if names else None

    def release(self, kept_axis: comm.Axis | None = None) -> None:
        """Give the memory back. Each of the k ranks of ``kept_axis`` keeps 1/k of the weights."""
        for group in self.groups:
            if kept_axis is not None:
                group.keep_part(self.runtime, kept_axis)
            group.release(self.runtime)

    def follow_moves(self) -> None:
        """Take over parameters at rest that a module inside the unit has moved to other memory
        (``model.head.to(dtype)``, ``to_empty(recurse=False)``)."""
        if any(group.moved for group in self.groups):
            refuse(self._rest())  # type: ignore[attr-defined]
            refuse_swapped(self)  # type: ignore[arg-type]
            self.adopt()  # type: ignore[attr-defined]

    def before_step(self) -> None:
        """An optimizer writes next. Hide whole weights that stayed in the modules after a forward
        without a backward, or after an interrupt: they would show the old values."""
        if self.shown and not self.runtime.in_backward:
            self.drop_dead_calls(entering=False)  # type: ignore[attr-defined]
            self.hide_at_rest()  # type: ignore[attr-defined]

    def refuse_changes(self) -> None:
        """Raise if the modules hold other parameters than they were wrapped with, or if only some
        parameters of a group were moved."""
        for group in self.groups:
            group.refuse_moved_apart()
        self.members.refuse_replaced(self)  # type: ignore[arg-type]

    def release_until_backward(self, kept: bool) -> None:
        """Give the whole weights back after a forward. ``kept``: a backward may follow the forward.
        If that backward does not gather the weights, autograd raises if it reads them."""
        self.release(self.kept_axis if kept else None)
        if kept and not self.gather_in_backward:
            for group in self.groups:
                for parameter in group.unsharded if group.comes_and_goes else ():
                    parameter.outdate()

    @property
    def releases_after_forward(self) -> bool:
        if self.release_after_forward is None:
            return not self.is_root
        return self.release_after_forward

    def _prefetch(
        self, guess: Any, wanted: list[weakref.ref[Any]] | None, reads: Reads = "forward"
    ) -> None:
        """Prefetch the units that the user listed (``wanted``), else the unit that is expected next
        (``guess``)."""
        units = [guess] if wanted is None else [reference() for reference in wanted]
        for unit in units:
            if unit is not None and unit is not self:
                unit.prefetch(reads)

    # ------------------------------------------------------------------ reductions

    def reduce(self) -> None:
        """Reduce the gradients. All units before this one have reduced theirs."""
        with annotate(self.name, "reduce gradients"):
            for group in self.groups:
                if group.trainable:
                    group.gradients.reduce(self.runtime)

    def expect_waiting(self) -> None:
        """Prepare to reduce, without a backward, the gradients that earlier backwards left."""
        for group in self.groups:
            if group.trainable or group.gradients.waits:
                group.gradients.begin(sync=True, last=True, zeros=self.unused == "zeros")
                group.gradients.count_waiting()

    def reduce_waiting(self) -> None:
        """Reduce the gradients that earlier backwards left."""
        for group in self.groups:
            if group.gradients.waits:
                group.gradients.reduce(self.runtime)

    # ------------------------------------------------------------------ torch's names

    # Torch's ``register_fsdp_forward_method``, ``share_comm_ctx`` and pipeline stages use these
    # names. The tuple is empty, so torch does nothing for groups of parameters.
    _fsdp_param_groups: tuple[()] = ()
    _fsdp_param_group: None = None  # torch 2.11 had one

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.post_forward(output)  # type: ignore[attr-defined]

    @property
    def _state_ctx(self) -> Runtime:
        return self.runtime

    def _root_post_backward_final_callback(self) -> None:
        """A pipeline schedule ends a step."""
        self.runtime.reduce_waiting()
