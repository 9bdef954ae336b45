# SPDX-License-Identifier: Apache-2.0
"""A plan for people: plain text."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.report.orthogonalisation import Orthogonalisation
from shardwise.report.planned import Plan
from shardwise.report.shard_map import map_text
from shardwise.words import aligned, count_text, flops_text, size_text

KINDS = {
    "main": "main weights",
    "compute": "compute weights",
    "staging": "weights on their way to MXFP8",
    "workspace": "one matrix, decoded",
    "grad": "gradients",
    "grad_transient": "gradients on their way",
    "grad_accumulator": "gradients that wait",
    "receive": "messages of peers",
    "step": "the optimizer's step",
    "pool_idle": "memory pool, idle",
}


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
        (f"gathered in {phase}", f"{count:,}", size_text(nbytes), size_text(sent))
        for phase, (count, nbytes, sent) in plan.gathered.items()
    ]
    return _table(
        "Compute weights",
        ("", "count", "whole", "sent"),
        rows,
        "MXFP8 has a plane for forward and one for backward, or one of 32x32 blocks for both.",
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
    return _table("Newton-Schulz per optimizer step", ("", "per rank"), rows)


def plan_text(plan: Plan, *, shard_map: bool = False) -> str:
    """Plain text, aligned, for logs and ``print``."""
    lines = heading(plan) + _bytes(plan) + _weights(plan) + _collectives(plan)
    if plan.matrices is not None:
        lines += _orthogonalisation(plan.matrices)
    if told := verdict(plan):
        lines += ["", *told]
    if shard_map:
        lines += ["", "Shard map (main weights)", map_text(plan)]
    return "\n".join(lines)
