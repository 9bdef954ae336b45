# SPDX-License-Identifier: Apache-2.0
"""The ranks that save or load together, and how they come to one mind: one small object each."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise import comm
from shardwise.checkpoint import errors
from shardwise.checkpoint.errors import CheckpointError

T = TypeVar("T")
_MAX_TEXT = 20_000  # characters of one rank's problem


@dataclass(frozen=True)
class World:
    """All ranks of the job, or this process alone."""

    rank: int
    size: int
    _axis: comm.Axis | None = None

    @staticmethod
    def now() -> World:
        if not (dist.is_available() and dist.is_initialized()):
            return World(0, 1)
        axis = comm.as_axis(dist.group.WORLD)  # type: ignore[arg-type]
        if axis.pretends:
            raise CheckpointError(
                f"one process poses as rank {axis.rank} of {axis.size} (the fake backend): "
                f"the other ranks' shards do not exist, so no checkpoint can be made or read"
            )
        return World(axis.rank, axis.size, axis)

    def agree(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order (collective)."""
        return [value] if self._axis is None else comm.agree(value, self._axis)

    def together(
        self, work: Callable[[], T], *, facts: Callable[[], Any] = lambda: None
    ) -> list[Any]:
        """Run ``work`` on every rank; return everybody's ``facts``, or raise everybody's problems.

        One exchange, whether it went well or not: a rank that fails alone leaves no other waiting.
        """
        problem: tuple[str, str] | None = None
        value: Any = None
        cause: Exception | None = None
        try:
            work()
            value = facts()
        except Exception as error:
            cause = error
            problem = (type(error).__name__, str(error)[:_MAX_TEXT])
        everyone = self.agree((problem, value))
        found = {rank: failed for rank, (failed, _) in enumerate(everyone) if failed is not None}
        if found:
            raise _joint_error(found, self.size) from cause
        return [fact for _, fact in everyone]


def _joint_error(found: dict[int, tuple[str, str]], world_size: int) -> Exception:
    """One error for all ranks. Damage comes before all else: whatever the others have seen of that
    checkpoint says nothing about the next older one."""
    kinds = {kind for kind, _ in found.values()}
    texts = {text for _, text in found.values()}
    name = kinds.pop() if len(kinds) == 1 else "CheckpointError"
    if kinds & {"DamagedError", "UnsafeError"}:
        name = "DamagedError"
    if len(texts) == 1 and len(found) == world_size:
        message = texts.pop()
    else:
        message = "\n".join(f"rank {rank}: {text}" for rank, (_, text) in sorted(found.items()))
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return CheckpointError(f"{name}: {message}")
    return kind(message)


def share(items: Sequence[T], weights: Sequence[int], rank: int, size: int) -> list[T]:
    """This rank's part of a list, the heavy ones dealt out first; every item has one rank."""
    load = [(0, other) for other in range(size)]  # a heap: who has least comes first
    mine = []
    for index in sorted(range(len(items)), key=lambda i: (-weights[i], i)):
        weight, lightest = load[0]
        heapq.heapreplace(load, (weight + weights[index] + 1, lightest))
        if lightest == rank:
            mine.append(items[index])
    return mine
