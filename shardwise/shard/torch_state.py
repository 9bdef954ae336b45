# SPDX-License-Identifier: Apache-2.0
"""The names under which torch reaches into the state of its own wrapped modules, for a unit."""

from __future__ import annotations

from shardwise.shard.runtime import Runtime, SharedLanes


class TorchState:
    """A unit as torch's ``register_fsdp_forward_method``, ``share_comm_ctx`` and pipeline stages
    see it. Torch does nothing for groups of parameters: the runtime does all."""

    shared: SharedLanes
    _runtime: Runtime | None
    _fsdp_param_groups: tuple[()] = ()
    _fsdp_param_group: None = None  # torch 2.11 had one

    @property
    def runtime(self) -> Runtime:
        assert self._runtime is not None, "the root's first forward makes the runtime"
        return self._runtime

    @property
    def _comm_ctx(self) -> SharedLanes:
        return self.shared

    @_comm_ctx.setter
    def _comm_ctx(self, shared: SharedLanes) -> None:
        self.shared = shared

    @property
    def _state_ctx(self) -> Runtime:
        return self.runtime

    def _root_post_backward_final_callback(self) -> None:
        """A pipeline schedule ends a step."""
        self.runtime.reduce_waiting()
