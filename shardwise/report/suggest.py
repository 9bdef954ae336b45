# SPDX-License-Identifier: Apache-2.0
"""Suggestions for a plan that does not fit: alternatives, each of them planned, least change first.

A suggestion is a sentence with the bytes that it would take; where nothing fits, the best that was
found is said, and by how much it misses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from shardwise.placements import SHARD, STRATEGIES
from shardwise.precision import Precision
from shardwise.report.figures import Plan
from shardwise.report.planned import Mesh, Options
from shardwise.words import size_text

MAX_RANKS = 1 << 16
MAX_SEQUENCES = 1 << 20


def largest(total: Callable[[int], int], memory: int, first: int, none: int = 0) -> int:
    """The most sequences whose ``total`` bytes fit, from ``first`` on up or down; 0: not even one.

    Bytes grow with sequences, at first slower than later. A guess is where a line through the two
    counts that come closest meets the memory; if that does not find the place soon, every other
    guess is halfway between a count that fits and one that does not. ``none``: at most what no
    sequences take. The first line begins there, so it is too steep, and its guess is rounded up.
    """
    known = {first: total(first)}
    for attempt in range(2 * MAX_SEQUENCES.bit_length()):
        low = max((count for count, held in known.items() if held <= memory), default=0)
        high = min((count for count, held in known.items() if held > memory), default=None)
        if high == low + 1 or low >= MAX_SEQUENCES:
            return low
        near, *others = sorted(known, key=lambda count: (abs(known[count] - memory), -count))
        end = others[0] if others else 0
        rise = (known[near] - known.get(end, none)) / (near - end)
        if high is not None and attempt > 2 and attempt % 2:
            guess = (low + high) // 2
        elif rise > 0:
            beyond = (memory - known[near]) / rise
            guess = near + (math.floor(beyond) if others else math.ceil(beyond))
        else:
            guess = 2 * low if high is None else (low + high) // 2
        guess = min(max(guess, low + 1), 64 * low if high is None else high - 1)
        known[guess] = total(guess)
    return low


def suggest(plan: Plan, again: Callable[..., Plan]) -> list[str]:
    """Sentences for the first change of each kind that fits, then for the best that does not."""
    options = plan.options
    assert options.memory is not None
    misses: list[tuple[int, str]] = []
    found: list[str] = []
    also = ""
    if plan.largest is not None and options.batch is not None:
        size = f"{plan.largest or 1} x {options.batch[1]} tokens"
        also = "" if plan.largest else f", with microbatches of {size}"
        if plan.largest:
            found.append(f"use microbatches of at most {size}: fits")
    kinds: tuple[Callable[[Options], Changes], ...]
    kinds = (_strategies, _weights, _optimizers, _more_ranks)
    if found and plan.activations > options.memory:  # these would be as large with less beside them
        kinds = (_weights,)
    for kind in kinds:
        for words, changes in kind(options):
            total = again(**changes).total
            if total <= options.memory:
                found.append(f"{words}{also}: {size_text(total)} per rank, fits")
                break
            misses.append((total, words))
    if found or not misses:
        return found
    total, words = min(misses)
    over = size_text(total - options.memory)
    return [f"nothing tried here fits; the least is {words}: {size_text(total)}, {over} too much"]


Changes = Iterator[tuple[str, dict[str, Any]]]


def _strategies(options: Options) -> Changes:
    """More sharding on the ranks that are there, one stage at a time."""
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
        words = "release the root's weights after forward too (reshard_after_forward=True)"
        yield words, {"reshard_after_forward": True}


def _weights(options: Options) -> Changes:
    """Narrower transient buffers: main weights and optimizer state stay as they are."""
    old = options.precision
    if old.weights is None:
        narrow = Precision(weights="bf16", main=old.main, outputs=old.outputs)
        yield "compute and reduce in bf16 (Precision(weights='bf16'))", {"precision": narrow}


def _optimizers(options: Options) -> Changes:
    if options.optimizer == "adamw":
        yield "train matrices with muon: one state tensor instead of two", {"optimizer": "muon"}


def _more_ranks(options: Options) -> Changes:
    """Twice as many ranks on the innermost axis that is sharded, again and again."""
    mesh = options.mesh
    if SHARD not in options.placements.main:
        return
    sizes = list(mesh.sizes)
    while sizes[-1] * 2 * mesh.num_ranks // mesh.sizes[-1] <= MAX_RANKS:
        sizes[-1] *= 2
        larger = Mesh(names=mesh.names, sizes=tuple(sizes))
        yield f"use {larger.num_ranks} ranks ({larger})", {"mesh": larger}
