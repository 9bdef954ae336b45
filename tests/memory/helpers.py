# SPDX-License-Identifier: Apache-2.0
"""Bytes that a model must hold, computed from nothing but its layouts and placements."""

from __future__ import annotations

import gc
import math

import torch
import torch._dynamo  # its import leaves tracebacks that hold whatever is on the stack: do it here

import shardwise as sw
from shardwise.core.placements import SHARD, Placement
from tests.models import STRATEGIES, Model, loss_of, make_model, mesh_for, shard_model, tokens


def make(strategy: str, world_size: int, *, depth: int = 3, **options: object) -> Model:
    placements = STRATEGIES[strategy]
    mesh = mesh_for(placements, world_size)
    return shard_model(make_model(depth=depth), placements, mesh, **options)


def unit_numels(model: Model) -> list[int]:
    """Elements of each unit's whole buffer: the root's, then each layer's."""
    units = [unit._shardwise_unit for unit in (model, *model.layers)]
    assert all(len(unit.groups) == 1 for unit in units), "one buffer per unit in this model"
    layouts = [unit.groups[0].layout for unit in units]
    assert all(layout.numel == layout.num_shards * layout.shard_size for layout in layouts)
    return [layout.numel for layout in layouts]


def parts(placements: tuple[Placement, ...], world_size: int) -> int:
    """Into how many parts a buffer is cut under these placements on the tests' meshes."""
    sizes = (world_size,) if len(placements) == 1 else (2, world_size // 2)
    return math.prod(n for p, n in zip(placements, sizes, strict=True) if p == SHARD)


def main_bytes(strategy: str, world_size: int, numels: list[int]) -> int:
    return 4 * sum(numels) // parts(STRATEGIES[strategy].main, world_size)


def compute_bytes(strategy: str, world_size: int, numels: list[int], width: int) -> int:
    """Compute weights that are kept between steps: none where main itself, or a gather, serves."""
    placements = STRATEGIES[strategy]
    if placements.compute == placements.main:
        same_bytes = parts(placements.main, world_size) > 1 or width == 4
        return 0 if same_bytes else width * sum(numels)
    return width * sum(numels) // parts(placements.compute, world_size)


def backward(model: Model, rank: int, world_size: int, step: int = 0, microbatch: int = 0) -> None:
    loss_of(model, tokens(step, microbatch, rank, world_size)).backward()


class Books:
    """The ledger's bytes, less those that were there before: other tests ran in this process."""

    def __init__(self) -> None:
        gc.collect()
        self.before = dict(sw.ledger.current)

    def __call__(self) -> dict[str, int]:
        kinds = sorted(sw.ledger.current)
        found = {kind: sw.ledger.current[kind] - self.before.get(kind, 0) for kind in kinds}
        return {kind: nbytes for kind, nbytes in found.items() if nbytes}


class Watch:
    """The most bytes of each kind above where it started, and the most blocks of one kind."""

    def __init__(self, kind: str = "grad_transient") -> None:
        self.kind, self.alive, self.most_alive = kind, 0, 0

    def __enter__(self) -> Watch:
        sw.ledger.reset_peak()
        self._start, self._total = dict(sw.ledger.current), sw.ledger.total
        sw.ledger.watchers.append(self._note)
        return self

    def _note(self, kind: str, nbytes: int) -> None:
        if kind == self.kind and nbytes:
            self.alive += 1 if nbytes > 0 else -1
            self.most_alive = max(self.most_alive, self.alive)

    def __exit__(self, *error: object) -> None:
        sw.ledger.watchers.remove(self._note)
        self.peak = sw.ledger.peak_total - self._total
        self.peaks = {
            kind: nbytes - self._start.get(kind, 0) for kind, nbytes in sw.ledger.peak.items()
        }


def forward_only(model: Model, rank: int, world_size: int) -> None:
    with torch.no_grad():
        model(tokens(0, 0, rank, world_size))
