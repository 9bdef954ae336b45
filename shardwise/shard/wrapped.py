# SPDX-License-Identifier: Apache-2.0
"""Wrapped: the modules and groups of one call, the user's settings, and the runtime they share.

Nothing here changes within a step. The facts that do are in ``unit.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from shardwise import comm
from shardwise.precision import Precision
from shardwise.precision.fp8_tensor import Reads
from shardwise.precision.policy import Stored
from shardwise.shard.group import Group
from shardwise.shard.members import Members
from shardwise.shard.runtime import Runtime, SharedLanes
from shardwise.shard.weights import Place, Weights
from shardwise.streams import annotate


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
        self.name = name
        self.modules = [weakref.ref(module) for module in modules]
        self.weights = Weights(groups, places, staged=staged, last_first=self.by_group)
        self.groups, self.places = self.weights.groups, self.weights.places
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

    def refuse_changes(self) -> None:
        """Raise where the modules hold other parameters than they were wrapped with, or moved only
        some of them."""
        for group in self.groups:
            group.refuse_moved_apart()
        if self.members is not None:
            self.members.refuse_replaced(self)  # type: ignore[arg-type]

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
            if group.trainable:
                group.gradients.begin(sync=True, last=True, zeros=self.unused == "zeros")
                group.gradients.count_waiting()

    def reduce_waiting(self) -> None:
        """Reduce the gradients that earlier backwards left."""
        for group in self.groups:
            if group.trainable and group.gradients.waits:
                group.gradients.reduce(self.runtime)

    # ------------------------------------------------------------------ torch's names

    # Torch's ``register_fsdp_forward_method``, ``share_comm_ctx`` and pipeline stages reach for
    # these. Torch does nothing for groups of parameters: the runtime does all.
    _fsdp_param_groups: tuple[()] = ()
    _fsdp_param_group: None = None  # torch 2.11 had one

    @property
    def _state_ctx(self) -> Runtime:
        return self.runtime

    def _root_post_backward_final_callback(self) -> None:
        """A pipeline schedule ends a step."""
        self.runtime.reduce_waiting()
