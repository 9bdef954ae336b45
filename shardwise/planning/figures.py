# SPDX-License-Identifier: Apache-2.0
"""A plan: its figures, the text that prints them, and the receipt of a step that ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.core.comm import Call
from shardwise.core.division import Division
from shardwise.core.memory import Ledger
from shardwise.planning.activations import WORKSPACE
from shardwise.planning.matrices import MatrixWork
from shardwise.planning.planned import (
    Collective,
    Measured,
    Mesh,
    Options,
    PlannedUnit,
    Traffic,
    collectives_of,
    strategy_name,
)
from shardwise.planning.shard_map import map_text
from shardwise.words import aligned, count_text, size_text

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

HELD = "bytes of buffers at the peak"  # a row of a receipt


@dataclass(frozen=True, kw_only=True)
class Plan(Measured):
    """Bytes and collectives of one step of one rank."""

    model: str
    options: Options
    units: tuple[PlannedUnit, ...]
    elements: dict[str, int] = field(repr=False, default_factory=dict)  # by optimizer and format
    matrices: MatrixWork | None = None
    traffic: Traffic = field(repr=False, default_factory=Traffic)  # of routers and rows
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
    def num_parameters(self) -> int:
        return sum(unit.copies * one.payload for unit in self.units for one in unit.layouts)

    @property
    def num_elements(self) -> int:
        """Elements of all buffers, padding included."""
        return sum(unit.copies * one.numel for unit in self.units for one in unit.layouts)

    @property
    def padding(self) -> int:
        """Elements of padding in all buffers, over all shards."""
        return self.num_elements - self.num_parameters

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives of a step: of forward and backward, of the matrix optimizer, and of
        routing."""
        known = collectives_of(self.calls + self.exchanged + self.traffic.known)
        return *known, *collectives_of(self.traffic.even, even=True)

    def check(self, calls: Iterable[Call], ledger: Ledger | None = None) -> list[str]:
        """The receipt of a step: what this rank did differently, in words; empty: as planned.

        with sw.comm.record() as calls:    # of all microbatches, without clipping
            train_one_step()
        assert not plan.check(calls, sw.ledger)

        Args:
            ledger: ``sw.ledger`` after the step, whose ``reset_peak`` was called before it. Its
                peak, of buffers without activations, may be 5 % off, as a plan promises. All
                else is compared exactly.
        """
        return [
            f"{what}: {found:,}, planned {own:,}"
            for what, (own, found) in self.compared(calls, ledger).items()
            if abs(found - own) > (0.05 * own if what == HELD else 0)
        ]

    def compared(
        self, calls: Iterable[Call], ledger: Ledger | None = None
    ) -> dict[str, tuple[int, int]]:
        """The figures that :meth:`check` compares: (planned, found)."""
        rows: dict[str, tuple[int, int]] = {}
        sides: dict[str, tuple[list[Collective], list[Collective]]] = {}
        for side, done in enumerate((self.collectives, collectives_of(Counter(calls)))):
            for one in done:
                what = f"{one.operation} over {one.axis} ({one.size} ranks)"
                sides.setdefault(what, ([], []))[side].append(one)
        for what, (own, found) in sorted(sides.items()):
            rows[f"{what}, calls"] = sum(one.count for one in own), sum(one.count for one in found)
            if not any(one.even for one in own):  # their bytes depend on the tokens
                sizes = [sum(one.nbytes for one in side) for side in (own, found)]
                rows[f"{what}, bytes"] = sizes[0], sizes[1]
        if ledger is not None:
            rows[HELD] = self.peak_total, ledger.peak_total
        return rows

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
        lines = _verdict(self) + _heading(self) + _bytes(self) + _collectives(self)
        if self.matrices is not None:
            lines += ["", str(self.matrices)]
        if shard_map:
            lines += ["", "Shard map (main weights)", map_text(self.units, self.options)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


# ------------------------------------------------------------------------------ the text


def _table(title: str, rows: Sequence[tuple[str, ...]], *notes: str) -> list[str]:
    """A table of a label and figures; the first row is its head."""
    lines = ["", title, *(f"  {row}" for row in aligned(rows, numbers=True))]
    return [*lines, f"  ({' '.join(filter(None, notes))})"]


def _verdict(plan: Plan) -> list[str]:
    """Whether the plan fits; no lines if ``memory`` was not given."""
    memory = plan.options.memory
    if memory is None:
        return []
    left = size_text(abs(memory - plan.total))
    if not plan.fits:
        return [f"does not fit {size_text(memory)} per rank: {left} too much"]
    rest = "left" if plan.followed is not None else "left for activations"
    return [f"fits {size_text(memory)} per rank; {left} are {rest}"]


def _heading(plan: Plan) -> list[str]:
    options = plan.options
    microbatches = f"{options.microbatches} microbatch{'es' if options.microbatches > 1 else ''}"
    share = 100 * plan.padding / plan.num_elements
    spread = f", experts over ep={options.ep}" if options.ep > 1 else ""
    if options.bucket_mb is not None:
        spread += f", buckets of {options.bucket_mb:g} MB"
    return [
        f"{plan.model}: {count_text(plan.num_parameters)} parameters, {plan.strategy} over "
        f"{plan.mesh} ({plan.mesh.num_ranks:,} ranks){spread}, {options.optimizer}, {microbatches}",
        f"padding {plan.padding:,} of {plan.num_elements:,} elements ({share:.2f} %), for "
        f"{options.device} devices",
    ]


def _bytes(plan: Plan) -> list[str]:
    moments = (plan.rest, plan.loaded, plan.peak)
    kinds = [*KINDS, *(kind for kind in plan.peak if kind not in KINDS)]
    held = {
        KINDS.get(kind, kind): [moment.get(kind, 0) for moment in moments]
        for kind in kinds
        if kind in plan.peak
    }
    always = {"optimizer state": plan.optimizer_bytes, "workspaces of cuBLAS": plan.workspace}
    held |= {name: [size] * 3 for name, size in always.items() if size}
    sums = [sum(sizes[at] for sizes in held.values()) for at in (0, 1)]
    if plan.followed is not None:
        held["activations"] = [0, 0, plan.activations]
    held["together"] = [*sums, plan.total]
    rows = [(name, *map(size_text, sizes)) for name, sizes in held.items()]
    return _table(
        "Bytes per rank",
        [("", "at rest", "after backward", "peak"), *rows],
        "Kinds peak at different moments. The last line is the largest sum at one moment.",
        "" if plan.followed is not None else "Activations are not included.",
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
        [("", "count", "buffers", "sent"), *(rows or [("none", "0", "0 B", "0 B")])],
        "buffers: bytes of whole buffers, as comm.record() counts; sent: bytes that leave the "
        "rank.",
        "Rows of experts: as if all experts got as many." if plan.traffic.even else "",
    )
