# SPDX-License-Identifier: Apache-2.0
"""Suggestions for a plan that does not fit: planned alternatives, smallest change first.

A suggestion is a sentence with the bytes that it would take. If nothing fits, the best alternative
is named, with the missing bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from shardwise.core.placements import SHARD, STRATEGIES
from shardwise.planning.figures import Plan
from shardwise.planning.planned import Mesh, Options
from shardwise.precision import Precision
from shardwise.words import size_text

MAX_RANKS = 1 << 16
MAX_SEQUENCES = 1 << 20


def largest(total: Callable[[int], int], memory: int, first: int, none: int = 0) -> int:
    """The largest number of sequences whose ``total`` bytes fit; 0: not even one. ``first``: the
    first number to try.

    Bytes grow with the number of sequences, at first slower than later. The next number to try is
    where a line through the two best numbers meets the memory. If this takes many attempts, every
    other attempt halves the interval between a number that fits and a number that does not.
    ``none``: an upper bound of the bytes without sequences. The first line begins there, so it is
    too steep, and its result is rounded up.
    """
    totals = {first: total(first)}
    for attempt in range(2 * MAX_SEQUENCES.bit_length()):
        low = max((count for count, nbytes in totals.items() if nbytes <= memory), default=0)
        high = min((count for count, nbytes in totals.items() if nbytes > memory), default=None)
        if high == low + 1 or low >= MAX_SEQUENCES:
            return low
        near, *others = sorted(totals, key=lambda count: (abs(totals[count] - memory), -count))
        end = others[0] if others else 0
        rise = (totals[near] - totals.get(end, none)) / (near - end)
        if high is not None and (rise <= 0 or (attempt > 2 and attempt % 2)):
            guess = (low + high) // 2
        elif rise > 0:
            beyond = (memory - totals[near]) / rise
            guess = near + (math.floor(beyond) if others else math.ceil(beyond))
        else:
            guess = 2 * low
        guess = min(max(guess, low + 1), 64 * low if high is None else high - 1)
        totals[guess] = total(guess)
    return low


def suggest(plan: Plan, again: Callable[..., Plan]) -> list[str]:
    """A sentence for the first change of each kind that fits; if no change fits, a sentence for the
    best change."""
    options = plan.options
    assert options.memory is not None
    misses: list[tuple[int, str]] = []
    suggestions: list[str] = []
    also = ""
    if plan.largest is not None and options.batch is not None:
        if plan.largest:
            size = f"{plan.largest} x {options.batch[1]} tokens"
            suggestions.append(f"use microbatches of at most {size}: fits")
        else:
            also = f", with microbatches of 1 x {options.batch[1]} tokens"
    kinds: tuple[Callable[[Options], Changes], ...]
    kinds = (_strategies, _weights, _optimizers, _more_ranks)
    if suggestions and plan.activations > options.memory:  # only _weights makes activations smaller
        kinds = (_weights,)
    for kind in kinds:
        for change, changes in kind(options):
            total = again(**changes).total
            if total <= options.memory:
                suggestions.append(f"{change}{also}: {size_text(total)} per rank, fits")
                break
            misses.append((total, change))
    if suggestions or not misses:
        return suggestions
    total, change = min(misses)
    best = f"{change}: {size_text(total)} per rank, {size_text(total - options.memory)} too much"
    return [f"no change that was tried fits. The best: {best}"]


Changes = Iterator[tuple[str, dict[str, Any]]]  # (sentence, changed options)


def _strategies(options: Options) -> Changes:
    """More sharding on the same ranks, one stage at a time."""
    axes = len(options.mesh.sizes)
    for name in {1: ("zero1", "zero2", "zero3"), 2: ("hsdp", "hfsdp")}.get(axes, ()):
        if options.placements != STRATEGIES[name]:
            changes: dict[str, Any] = {
                "placements": STRATEGIES[name],
                "reshard_after_forward": None,
            }
            yield f"use strategy {name}", changes
    if axes > 1:
        whole = Mesh(names=("dp",), sizes=(options.mesh.num_ranks,))
        changes = {"mesh": whole, "placements": STRATEGIES["zero3"], "reshard_after_forward": None}
        yield f"shard over all ranks on one axis: mesh {whole}, strategy zero3", changes
    if SHARD in options.placements.compute and options.reshard_after_forward is not True:
        change = "release the root's weights after forward too (reshard_after_forward=True)"
        yield change, {"reshard_after_forward": True}


def _weights(options: Options) -> Changes:
    """Narrower temporary buffers; main weights and optimizer state do not change."""
    old = options.precision
    if old.weights is None:
        narrow = Precision(weights="bf16", main=old.main, outputs=old.outputs)
        yield "compute and reduce in bf16 (Precision(weights='bf16'))", {"precision": narrow}


def _optimizers(options: Options) -> Changes:
    if options.optimizer == "adamw":
        yield "train matrices with muon: one state tensor instead of two", {"optimizer": "muon"}


def _more_ranks(options: Options) -> Changes:
    """Repeatedly twice as many ranks on the innermost axis, if main is sharded."""
    mesh = options.mesh
    if SHARD not in options.placements.main:
        return
    sizes = list(mesh.sizes)
    while sizes[-1] * 2 * mesh.num_ranks // mesh.sizes[-1] <= MAX_RANKS:
        sizes[-1] *= 2
        larger = Mesh(names=mesh.names, sizes=tuple(sizes))
        yield f"use {larger.num_ranks} ranks ({larger})", {"mesh": larger}
