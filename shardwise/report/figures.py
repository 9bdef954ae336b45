# SPDX-License-Identifier: Apache-2.0
"""A plan: its figures, and the text that shows them to people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.comm import Call
from shardwise.division import Division
from shardwise.report.orthogonalisation import Orthogonalisation
from shardwise.report.planned import (
    Collective,
    Measured,
    Mesh,
    Options,
    PlannedUnit,
    Traffic,
    strategy_name,
)
from shardwise.report.shard_map import map_text, shard_map
from shardwise.words import aligned, count_text, flops_text, size_text

KINDS = {
    "main": "main weights",
    "compute": "compute weights",
    "staging": "weights on their way to fp8",
    "workspace": "one matrix, decoded",
    "grad": "gradients",
    "grad_transient": "gradients on their way",
    "grad_accumulator": "gradients that wait",
    "receive": "messages of peers",
    "step": "the optimizer's step",
    "pool_idle": "memory pool, idle",
}


@dataclass(frozen=True, kw_only=True)
class Plan(Measured):
    """Bytes per rank and collectives per step. ``optimizer_bytes`` come on top of what was
    measured: the state on the rank that holds most."""

    model: str
    num_parameters: int
    options: Options
    source: str  # "plan", or "dry run"
    units: tuple[PlannedUnit, ...]
    optimizer_bytes: int
    matrices: Orthogonalisation | None = None
    traffic: Traffic = field(repr=False, default_factory=Traffic)
    # By name: the elements of a matrix that each replica works on, where replicas divide it.
    divisions: dict[str, Division] = field(repr=False, default_factory=dict)
    largest: int | None = None  # with a batch: sequences that a microbatch can have in ``memory``
    suggestions: tuple[str, ...] = ()

    @property
    def mesh(self) -> Mesh:
        return self.options.mesh

    @property
    def strategy(self) -> str:
        return strategy_name(self.options.placements)

    @property
    def total(self) -> int:
        """The bytes that a rank needs at the worst moment."""
        peak = self.peak_total if self.followed is None else self.followed
        return peak + self.optimizer_bytes + self.options.workspace

    @property
    def fits(self) -> bool | None:
        """Whether a rank has that much; None where nobody said how much it has."""
        memory = self.options.memory
        return None if memory is None else self.total <= memory

    @property
    def padding(self) -> int:
        """Elements of all buffers that hold nothing, over all shards."""
        return sum(len(u.names) * u.ep * g.layout.padding for u in self.units for g in u.groups)

    @property
    def num_elements(self) -> int:
        """Elements of all buffers, padding included."""
        return sum(len(u.names) * u.ep * g.layout.numel for u in self.units for g in u.groups)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives of a step: of forward and backward, of the matrix optimizer (on the rank
        that sends most), and of routing."""
        known = self.calls + self.traffic.known
        known += self.exchanged if self.matrices else Counter()
        kinds: dict[tuple[str, str, int, bool], list[tuple[Call, int]]] = {}
        for calls, even in ((known, False), (self.traffic.even, True)):
            for call, count in calls.items():
                key = (call.axis, call.operation, call.size, even)
                kinds.setdefault(key, []).append((call, count))
        return tuple(
            Collective(
                operation=operation,
                axis=axis,
                size=size,
                count=sum(count for _, count in found),
                nbytes=sum(call.nbytes * count for call, count in found),
                wire_bytes=sum(call.wire_bytes * count for call, count in found),
                received_bytes=sum(call.received_bytes * count for call, count in found),
                even=even,
            )
            for (axis, operation, size, even), found in sorted(kinds.items())
        )

    @property
    def gathered(self) -> dict[str, tuple[int, int, int]]:
        """Compute weights on the wire, by phase: (gathers, bytes of them whole, bytes sent)."""
        found = {}
        for phase, calls in self.phases.items():
            weights = [(c, count) for c, count in calls.items() if c.operation == "all_gather"]
            found[str(phase)] = (
                sum(count for _, count in weights),
                sum(call.nbytes * count for call, count in weights),
                sum(call.wire_bytes * count for call, count in weights),
            )
        return found

    @property
    def formats(self) -> dict[str, tuple[int, int, tuple[int, ...]]]:
        """How compute weights are stored: (parameters, elements, bytes of each plane, whole)."""
        found: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        for unit in self.units:
            for group in unit.groups:
                name, times = group.stored, len(unit.names)
                planes = tuple(times * nbytes for nbytes in group.planes)
                parameters, elements, held = found.get(name, (0, 0, (0,) * len(planes)))
                found[name] = (
                    parameters + times * len(group.layout.items),
                    elements + times * group.layout.payload,
                    tuple(a + b for a, b in zip(held, planes, strict=True)),
                )
        return found

    @property
    def staged(self) -> dict[str, tuple[int, int]]:
        """Weights in fp8 that are gathered as bf16, by the reason: (parameters, bytes, whole)."""
        found: dict[str, tuple[int, int]] = {}
        for unit in self.units:
            for group in (one for one in unit.groups if one.staged):
                parameters, nbytes = found.get(group.staged, (0, 0))
                found[group.staged] = (
                    parameters + len(unit.names) * len(group.layout.items),
                    nbytes + len(unit.names) * 2 * group.layout.payload,
                )
        return found

    @property
    def shard_map(self) -> dict[str, Any]:
        """Which rank holds which rows, for :func:`map_canvas`."""
        return shard_map(self.units, self.options)

    def as_dict(self) -> dict[str, Any]:
        """The figures that the page of a run shows, as JSON can hold them."""
        return {
            "num_parameters": self.num_parameters,
            "activations": None if self.followed is None else self.activations,
            "rest": self.rest,
            "loaded": self.loaded,
            "optimizer_bytes": self.optimizer_bytes,
            "total": self.total,
            "shard_map": self.shard_map,
            "text": str(self),
        }

    def text(self, *, shard_map: bool = False) -> str:
        """Plain text, aligned, for logs and ``print``."""
        lines = heading(self) + _bytes(self) + _weights(self) + _collectives(self)
        if self.matrices is not None:
            lines += _orthogonalisation(self.matrices)
        if told := verdict(self):
            lines += ["", *told]
        if shard_map:
            lines += ["", "Shard map (main weights)", map_text(self.units, self.options)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


# ------------------------------------------------------------------------------ the text


Row = tuple[str, ...]  # words, then figures


def _table(title: str, headers: Row, rows: Sequence[Row], note: str = "") -> list[str]:
    lines = ["", title, *(f"  {row}" for row in aligned([headers, *rows], numbers=True))]
    return [*lines, f"  ({note})"] if note else lines


def heading(plan: Plan) -> list[str]:
    options = plan.options
    microbatches = f"{options.microbatches} microbatch{'es' if options.microbatches > 1 else ''}"
    share = 100 * plan.padding / plan.num_elements
    spread = f", experts over ep={options.ep}" if options.ep > 1 else ""
    inside = f" x tp={options.tp}" if options.tp > 1 else ""
    if options.bucket_mb is not None:
        spread += f", buckets of {options.bucket_mb:g} MB"
    return [
        f"{plan.model}: {count_text(plan.num_parameters)} parameters, {plan.strategy} over "
        f"{plan.mesh}{inside} ({plan.mesh.num_ranks * options.tp:,} ranks){spread}, "
        f"{options.optimizer}, {microbatches}",
        f"padding {plan.padding:,} of {plan.num_elements:,} elements ({share:.2f} %); "
        f"by {plan.source}, order of a {options.device} device",
    ]


def verdict(plan: Plan) -> list[str]:
    """Does it fit, and what to change."""
    memory = plan.options.memory
    if memory is None:
        return []
    if plan.fits:
        left = size_text(memory - plan.total)
        if plan.largest is None or plan.options.batch is None:
            return [f"fits {size_text(memory)} per rank; {left} are left for activations"]
        most = f"microbatches of up to {plan.largest} x {plan.options.batch[1]} tokens do"
        return [f"fits {size_text(memory)} per rank, {left} are left; {most}"]
    over = size_text(plan.total - memory)
    return [
        f"does not fit {size_text(memory)} per rank: {over} too much. What to change:",
        *(f"  - {suggestion}" for suggestion in plan.suggestions),
    ]


def _bytes(plan: Plan) -> list[str]:
    kinds = [kind for kind in KINDS if kind in plan.peak]
    kinds += [kind for kind in plan.peak if kind not in KINDS]
    rows = [
        (
            KINDS.get(kind, kind),
            *(size_text(held.get(kind, 0)) for held in (plan.rest, plan.loaded, plan.peak)),
        )
        for kind in kinds
    ]
    state, kept = plan.optimizer_bytes, plan.options.workspace
    if state:
        rows.append(("optimizer state", *[size_text(state)] * 3))
    if plan.followed is not None:
        assert plan.options.batch is not None
        words = "activations of {} x {} tokens".format(*plan.options.batch)
        rows.append((words, size_text(0), size_text(0), size_text(plan.activations)))
    if kept:
        rows.append(("workspaces of cuBLAS", *[size_text(kept)] * 3))
    rows.append(
        (
            "together",
            size_text(sum(plan.rest.values()) + state + kept),
            size_text(sum(plan.loaded.values()) + state + kept),
            size_text(plan.total),
        )
    )
    return _table(
        "Bytes per rank",
        ("", "at rest", "after backward", "peak"),
        rows,
        "each kind's own peak; together: the highest sum at one moment, so less than theirs."
        + (" Activations are not in it." if plan.followed is None else ""),
    )


def _weights(plan: Plan) -> list[str]:
    rows = [
        (
            f"stored as {name}",
            f"{parameters:,}",
            " + ".join(size_text(nbytes) for nbytes in planes) or "0 B",
            "",
        )
        for name, (parameters, _, planes) in plan.formats.items()
    ]
    rows += [
        ("in fp8, gathered as bf16", f"{parameters:,}", size_text(nbytes), "")
        for parameters, nbytes in plan.staged.values()
    ]
    rows += [
        (f"gathered in {phase}", f"{count:,}", size_text(nbytes), size_text(sent))
        for phase, (count, nbytes, sent) in plan.gathered.items()
    ]
    return _table(
        "Compute weights",
        ("", "count", "whole", "sent"),
        rows,
        "MXFP8 has a plane for forward and one for backward, or one of 32x32 blocks for both."
        + "".join(f" Gathered as bf16: {why}." for why in plan.staged),
    )


def _collectives(plan: Plan) -> list[str]:
    rows = [
        (
            f"{one.operation} over {one.axis} ({one.size} ranks)"
            + (", if routed evenly" if one.even else ""),
            f"{one.count:,}",
            size_text(one.nbytes),
            size_text(one.wire_bytes),
        )
        for one in plan.collectives
    ]
    return _table(
        "Collectives per step and rank",
        ("", "count", "buffers", "sent"),
        rows or [("none", "0", "0 B", "0 B")],
        "buffers: whole ones, as comm.record() counts; sent: what leaves the rank."
        + (" Rows to experts: as if all got as many." if plan.traffic.even else ""),
    )


def _orthogonalisation(work: Orthogonalisation) -> list[str]:
    rows = [
        ("matrices, all ranks", f"{work.num_matrices:,}"),
        ("of these whole on one rank", f"{work.num_whole:,}"),
        ("busiest rank", flops_text(work.busiest)),
        ("idlest rank", flops_text(work.idlest)),
        ("mean", flops_text(work.total / work.num_ranks)),
        ("balance (mean / busiest)", f"{100 * work.balance:.1f} %"),
    ]
    return _table("Newton-Schulz per optimizer step", ("", "per rank"), rows, work.whole_price)
