# SPDX-License-Identifier: Apache-2.0
"""Member: a unit as its parts, its runtime and the other units see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import ref

from torch import Tensor, nn

from shardwise.precision import Precision
from shardwise.precision.fp8_tensor import Reads
from shardwise.precision.policy import Stored


class Member(Protocol):
    """See :class:`~shardwise.shard.unit.Unit` and its base."""

    name: str
    modules: list[ref[nn.Module]]
    places: list[tuple[dict[str, Any], str, int, int]]
    precision: Precision
    unused: str
    sync: bool
    last: bool
    reduce_outer: bool
    options: dict[str, Any]
    shared: Any  # the runtime's SharedLanes
    stored: dict[tuple[int, int], Stored]
    originals: list[tuple[str, ref[Tensor]]]
    members: Any  # ``Members`` of the modules, once they are wrapped

    @property
    def groups(self) -> Sequence[Any]: ...

    @property
    def arrivals(self) -> Any: ...

    @property
    def expects_backward(self) -> bool: ...

    @property
    def gathers_in_backward(self) -> bool: ...

    @property
    def holds_turn(self) -> bool: ...

    @property
    def shows_at_rest(self) -> bool: ...

    @property
    def waits_for_delayed(self) -> bool: ...

    def begin(self, runtime: Any, name: str, is_root: bool) -> None: ...

    def tidy(self) -> None: ...

    def prefetch(self, reads: Reads) -> None: ...

    def end_forward(self) -> None: ...

    def pre_backward(self, call: Any) -> None: ...

    def arrived(self, key: tuple[int, int]) -> None: ...

    def inputs_done(self, call: Any) -> None: ...

    def pass_by(self, ended: bool = False) -> None: ...

    def end_backward(self) -> None: ...

    def reduce(self) -> None: ...

    def expect_waiting(self) -> None: ...

    def reduce_waiting(self) -> None: ...

    def release_unused(self, graph_kept: bool) -> None: ...

    def drop_dead_calls(self, entering: bool) -> None: ...

    def hide(self, force: bool = False) -> None: ...

    def reset(self) -> None: ...
