# SPDX-License-Identifier: Apache-2.0
"""A plan: its figures, and the text that prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.core.comm import Call
from shardwise.core.division import Division
from shardwise.planning.activations import WORKSPACE
from shardwise.planning.orthogonalisation import Orthogonalisation
from shardwise.planning.planned import (
    Collective,
    Measured,
    Mesh,
    Options,
    PlannedUnit,
    Traffic,
    strategy_name,
)
from shardwise.planning.shard_map import map_text
from shardwise.words import aligned, count_text, flops_text, size_text

KINDS = {
    "main": "main weights",
    "compute": "compute weights",
    "staging": "weights before fp8 encoding",
    "workspace": "one decoded matrix",
    "grad": "gradients",
    "grad_transient": "gradients in reduction",
    "grad_accumulator": "accumulated gradients",
    "receive": "received messages",
    "step": "optimizer step",
    "pool_idle": "idle memory pool",
}


@dataclass(frozen=True, kw_only=True)
class Plan(Measured):
    """Bytes per rank and collectives per step. ``optimizer_bytes`` is the state on the rank that
    holds most. The measured bytes do not include it."""

    model: str
    num_parameters: int
    options: Options
    units: tuple[PlannedUnit, ...]
    optimizer_bytes: int
    matrices: Orthogonalisation | None = None
    traffic: Traffic | None = field(repr=False, default=None)  # of routers and rows, with tokens
    # By name: the elements that each replica updates, for matrices that replicas divide.
    divisions: dict[str, Division] = field(repr=False, default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.options.mesh

    @property
    def strategy(self) -> str:
        return strategy_name(self.options.placements)

    @property
    def total(self) -> int:
        """The bytes that a rank needs at the peak."""
        peak = self.peak_total if self.followed is None else self.followed
        return peak + self.optimizer_bytes + self.workspace

    @property
    def workspace(self) -> int:
        """The bytes of cuBLAS workspaces, which are part of torch's memory."""
        return 0 if self.followed is None or self.options.device == "cpu" else WORKSPACE

    @property
    def fits(self) -> bool | None:
        """Whether the plan fits the memory of a rank; None if ``memory`` was not given."""
        memory = self.options.memory
        return None if memory is None else self.total <= memory

    @property
    def padding(self) -> int:
        """Elements of padding in all buffers, over all shards."""
        return sum(len(u.names) * u.ep * g.layout.padding for u in self.units for g in u.groups)

    @property
    def num_elements(self) -> int:
        """Elements of all buffers, padding included."""
        return sum(len(u.names) * u.ep * g.layout.numel for u in self.units for g in u.groups)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives of a step: those of forward and backward, of the matrix optimizer (on the
        rank that sends most), and of routing."""
        traffic = self.traffic or Traffic()
        known = self.calls + traffic.known + (self.exchanged if self.matrices else Counter())
        kinds: dict[tuple[str, str, int, bool], list[tuple[Call, int]]] = {}
        for counter, even in ((known, False), (traffic.even, True)):
            for call, count in counter.items():
                key = (call.axis, call.operation, call.size, even)
                kinds.setdefault(key, []).append((call, count))
        return tuple(
            Collective(
                operation=operation,
                axis=axis,
                size=size,
                count=sum(count for _, count in calls),
                nbytes=sum(call.nbytes * count for call, count in calls),
                wire_bytes=sum(call.wire_bytes * count for call, count in calls),
                received_bytes=sum(call.received_bytes * count for call, count in calls),
                even=even,
            )
            for (axis, operation, size, even), calls in sorted(kinds.items())
        )

    @property
    def gathered(self) -> dict[str, tuple[int, int, int]]:
        """Gathers of compute weights by phase: (number, bytes of whole weights, bytes sent)."""
        by_phase = {}
        for phase, calls in self.phases.items():
            weights = [(c, count) for c, count in calls.items() if c.operation == "all_gather"]
            by_phase[str(phase)] = (
                sum(count for _, count in weights),
                sum(call.nbytes * count for call, count in weights),
                sum(call.wire_bytes * count for call, count in weights),
            )
        return by_phase

    @property
    def formats(self) -> dict[str, tuple[int, int, tuple[int, ...]]]:
        """Compute weights by format: (parameters, elements, bytes of each whole plane)."""
        totals: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        for unit in self.units:
            for group in unit.groups:
                name, times = group.stored, len(unit.names)
                planes = tuple(times * nbytes for nbytes in group.planes)
                parameters, elements, before = totals.get(name, (0, 0, (0,) * len(planes)))
                totals[name] = (
                    parameters + times * len(group.layout.items),
                    elements + times * group.layout.payload,
                    tuple(a + b for a, b in zip(before, planes, strict=True)),
                )
        return totals

    def as_dict(self) -> dict[str, Any]:
        """The figures for the report page of a run, as values for JSON."""
        return {
            "num_parameters": self.num_parameters,
            "activations": None if self.followed is None else self.activations,
            "rest": self.rest,
            "loaded": self.loaded,
            "optimizer_bytes": self.optimizer_bytes,
            "total": self.total,
            "text": self.text(shard_map=True),
        }

    def text(self, *, shard_map: bool = False) -> str:
        """Plain text, aligned, for logs and ``print``."""
        lines = verdict(self) + heading(self) + _bytes(self) + _weights(self) + _collectives(self)
        if self.matrices is not None:
            lines += _orthogonalisation(self.matrices)
        if shard_map:
            lines += ["", "Shard map (main weights)", map_text(self.units, self.options)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


# ------------------------------------------------------------------------------ the text


Row = tuple[str, ...]  # a label, then figures


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
        f"padding {plan.padding:,} of {plan.num_elements:,} elements ({share:.2f} %), for "
        f"{options.device} devices",
    ]


def verdict(plan: Plan) -> list[str]:
    """Whether the plan fits; no lines if ``memory`` was not given."""
    memory = plan.options.memory
    if memory is None:
        return []
    left = size_text(abs(memory - plan.total))
    if not plan.fits:
        return [f"does not fit {size_text(memory)} per rank: {left} too much"]
    rest = "left" if plan.followed is not None else "left for activations"
    return [f"fits {size_text(memory)} per rank; {left} are {rest}"]


def _bytes(plan: Plan) -> list[str]:
    kinds = [kind for kind in KINDS if kind in plan.peak]
    kinds += [kind for kind in plan.peak if kind not in KINDS]
    moments = (plan.rest, plan.loaded, plan.peak)
    rows = [
        (KINDS.get(kind, kind), *(size_text(held.get(kind, 0)) for held in moments))
        for kind in kinds
    ]
    state, kept = plan.optimizer_bytes, plan.workspace
    if state:
        rows.append(("optimizer state", *[size_text(state)] * 3))
    if plan.followed is not None:
        rows.append(("activations", size_text(0), size_text(0), size_text(plan.activations)))
    if kept:
        rows.append(("workspaces of cuBLAS", *[size_text(kept)] * 3))
    at_rest, loaded = (sum(held.values()) + state + kept for held in moments[:2])
    rows.append(("together", size_text(at_rest), size_text(loaded), size_text(plan.total)))
    return _table(
        "Bytes per rank",
        ("", "at rest", "after backward", "peak"),
        rows,
        "Kinds peak at different moments. The last line is the largest sum at one moment."
        + (" Activations are not included." if plan.followed is None else ""),
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
        (f"gathered in {phase}", f"{count:,}", size_text(nbytes), size_text(sent))
        for phase, (count, nbytes, sent) in plan.gathered.items()
    ]
    return _table(
        "Compute weights",
        ("", "count", "whole", "sent"),
        rows,
        "whole: bytes of whole weights; sent: bytes that leave the rank.",
    )


def _collectives(plan: Plan) -> list[str]:
    even = plan.traffic is not None and bool(plan.traffic.even)
    note = (
        "buffers: bytes of whole buffers, as comm.record() counts; sent: bytes that leave the rank."
    )
    rows = [
        (
            f"{calls.operation} over {calls.axis} ({calls.size} ranks)"
            + (", if routed evenly" if calls.even else ""),
            f"{calls.count:,}",
            size_text(calls.nbytes),
            size_text(calls.wire_bytes),
        )
        for calls in plan.collectives
    ]
    return _table(
        "Collectives per step and rank",
        ("", "count", "buffers", "sent"),
        rows or [("none", "0", "0 B", "0 B")],
        note + (" Rows of experts: as if all experts got as many." if even else ""),
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
    return _table("Newton-Schulz per optimizer step", ("", "per rank"), rows)
