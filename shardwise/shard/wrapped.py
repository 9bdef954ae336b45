# SPDX-License-Identifier: Apache-2.0
"""Wrapped: the modules and groups of one call, the user's settings, the runtime they share, and the
whole weights of the groups:

    at rest   the modules hold DTensors over the main weight
    shown     the modules hold whole parameters, views of gathered memory

Nothing of the settings changes within a step. The facts that do are in ``unit.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise import comm
from shardwise.holders import storage_of
from shardwise.precision import Precision
from shardwise.precision.fp8_tensor import Reads
from shardwise.precision.policy import Stored
from shardwise.shard.containers import look_into
from shardwise.shard.flow import SharedLanes
from shardwise.shard.group import Group
from shardwise.shard.members import Members, refuse, refuse_swapped
from shardwise.shard.runtime import Runtime
from shardwise.shard.whole_parameter import LOST, Whole
from shardwise.streams import annotate

# (a module's parameter dictionary, name in it, group, index): the dictionary, not the module, so
# that nothing here keeps a model alive
Place = tuple[dict[str, Any], str, int, int]


class Held(NamedTuple):
    """The elements of a memory that a parameter or a buffer holds."""

    name: str
    memory: StorageWeakRef
    begin: int
    end: int
    trained: bool


class Wrapped:
    """The modules and groups that one call wrapped. Modules are held weakly: they hold this."""

    by_group = False  # whether groups, listed as backward fills them, are reduced one by one

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
        """``staged``: modules wait for their own weights, not for all."""
        self.name = name
        self.modules = [weakref.ref(module) for module in modules]
        self.groups, self.places = list(groups), list(places)
        self._staged, self.shown = staged, False
        self._here = [False] * len(groups)  # by group: whether the modules hold its whole weights
        self._lent: list[weakref.ref[Tensor]] = []  # outputs of this forward in memory of weights
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
        # The parameters as they were before wrapping, by name: nobody should train those any more.
        self.originals: list[tuple[str, weakref.ref[Tensor]]] = []
        self.held: list[Held] = []  # by the parameters before wrapping
        self.members: Members | None = None  # of the modules, once they are wrapped
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
        """The root's first forward: this unit gets its name in the model, lanes and memory."""
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
            group.awaited = None  # by other lanes, perhaps
            group.gradients.source = runtime.source
            if group.offload:
                runtime.offloads = True

    # ------------------------------------------------------------------ whole weights

    @property
    def versions(self) -> list[tuple[int, int]]:
        """The versions of the main weights."""
        return [group.main.state for group in self.groups]

    def gather(self, reads: Reads) -> None:
        """Begin to bring what forward or backward reads; by groups, what forward reads first."""
        for group in reversed(self.groups) if self.by_group else self.groups:
            group.gather(self.runtime, reads)

    def wait(self) -> None:
        """Wait for the gathers that were begun."""
        for group in self.groups:
            group.wait(self.runtime)

    def show(self) -> None:
        """Put the weights in the modules' hands; where these wait for their own, what is here."""
        self.shown = True
        groups = enumerate(self.groups)
        self.show_groups([n for n, one in groups if not (self._staged and one.pending)])

    def show_groups(self, numbers: Sequence[int]) -> None:
        """Put the whole weights of these groups in the modules' hands, once they are there."""
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
            held, ours = parameters.get(name), self.groups[number].sharded[index]
            if held is not None and held is not ours:
                parameters[name] = ours
                self.groups[number].assign(index, held)
        self.adopt()  # type: ignore[attr-defined]

    def take_trainability(self) -> None:
        """``requires_grad_`` on whole parameters, outside of forward, reaches those at rest."""
        for group in self.groups:
            group.take_trainability()

    def lost_writes(self) -> RuntimeError | None:
        """The error for whole weights that somebody wrote to; asked before their release."""
        names = [name for group in self.groups for name in group.lost_writes()]
        return RuntimeError(f"{', '.join(names)}: {LOST}") if names else None

    def left(self, output: Any) -> None:
        """A forward of this unit is over; note what of its output lies in the memory of weights."""
        self.runtime.order.left(self)  # type: ignore[arg-type]
        coming = [group for group in self.groups if group.comes_and_goes]
        memory = {storage_of(block.tensor) for group in coming for block in group.blocks}
        for found in look_into(output, set()) if memory and self.releases_after_forward else ():
            values = found.memory if isinstance(found, Whole) else found
            stored = isinstance(values, Tensor) and torch._C._has_storage(values)  # type: ignore[attr-defined]
            if stored and storage_of(values) in memory:
                self._lent.append(weakref.ref(found))

    def lent(self) -> RuntimeError | None:
        """The error for outputs of forward, of any module of a list, that lie in weights which are
        released next, and that somebody still has."""
        found = [one for reference in self._lent if (one := reference()) is not None]
        self._lent.clear()
        if not found:
            return None
        return RuntimeError(
            f"the forward of {self.groups[0].label} returns a tensor of shape "
            f"{list(found[0].shape)} that lies in the memory of its weights, which is released "
            f"now: return a clone, or wrap with reshard_after_forward=False"
        )

    def release(self, kept_axis: comm.Axis | None = None, *, for_good: bool = False) -> None:
        """Give the memory back; 1/k of it stays on each of the k ranks of ``kept_axis``."""
        for group in self.groups:
            if kept_axis is not None:
                group.keep_part(self.runtime, kept_axis)
            group.release(self.runtime, for_good=for_good)

    def follow_moves(self) -> None:
        """Take over parameters at rest that a module inside the unit moved to other memory by
        itself: ``model.head.to(dtype)``, ``to_empty(recurse=False)``."""
        if any(group.moved for group in self.groups):
            refuse(self._rest())  # type: ignore[attr-defined]
            refuse_swapped(self)  # type: ignore[arg-type]
            self.adopt()  # type: ignore[attr-defined]

    def before_step(self) -> None:
        """An optimizer writes next. Where a forward that no backward followed, or that was
        interrupted, left whole weights in the modules, their readers would see old values."""
        if self.shown and not self.runtime.in_backward:
            self.drop_dead_calls(entering=False)  # type: ignore[attr-defined]
            self.hide_at_rest()  # type: ignore[attr-defined]

    def refuse_changes(self) -> None:
        """Raise where the modules hold other parameters than they were wrapped with, or moved only
        some of them."""
        for group in self.groups:
            group.refuse_moved_apart()
        if self.members is not None:
            self.members.refuse_replaced(self)  # type: ignore[arg-type]

    def release_until_backward(self, kept: bool) -> None:
        """Give the whole weights back after a forward. ``kept``: one that a backward may follow;
        where that will not gather them, autograd raises if it reads them after all."""
        for_good = not kept and not self.calls.awaited  # type: ignore[attr-defined]
        self.release(self.kept_axis if kept else None, for_good=for_good)
        if kept and not self.gather_in_backward:
            for group in (group for group in self.groups if group.comes_and_goes):
                for parameter in group.unsharded:
                    parameter.outdate()

    @property
    def releases_after_forward(self) -> bool:
        if self.release_after_forward is None:
            return not self.is_root
        return self.release_after_forward

    def _prefetch(
        self, guess: Any, wanted: list[weakref.ref[Any]] | None, reads: Reads = "forward"
    ) -> None:
        """Prefetch the units that the user listed, or else the one that the recorded order
        expects."""
        units = [reference() for reference in wanted] if wanted is not None else [guess]
        for unit in units:
            if unit is not None and unit is not self:
                unit.prefetch(reads)

    # ------------------------------------------------------------------ reductions

    def reduce(self) -> None:
        """Reduce the gradients: every unit before this one has."""
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

    # Torch's ``register_fsdp_forward_method``, ``share_comm_ctx`` and pipeline stages reach for
    # these. Torch does nothing for groups of parameters: the runtime does all.
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
