# SPDX-License-Identifier: Apache-2.0
"""Checks when an optimizer is built: all problems are raised together, on every rank."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from shardwise.core.agreement import raise_together
from shardwise.optim.routing import Route, route_problems
from shardwise.optim.storage import axes_of, cut_along_rows, sharding_of, storage_problem


def raise_unless_same(
    what: str, problems: Sequence[str], facts: Sequence[str], parameters: Iterable[Tensor]
) -> None:
    """Raise on every rank the problems of any rank, and where ranks build different optimizers
    (collective over the axes of ``parameters``)."""
    raise_together(what, problems, facts, axes_of(parameters), same="build the same optimizer")


def summary(facts: Sequence[Any]) -> str:
    """A short text that differs if the fact of any parameter differs."""
    return f"{len(facts)} parameters (checksum {zlib.crc32(repr(facts).encode()):08x})"


def parameter_problems(
    parameters: Iterable[tuple[str, Tensor]], matrices: Iterable[tuple[str, Tensor, Route]]
) -> list[str]:
    """Why these parameters cannot be optimized, or the matrices among them orthogonalised."""
    problems = [storage_problem(name, parameter) for name, parameter in parameters]
    for name, parameter, chosen in matrices:
        shape = tuple(parameter.shape)
        if not parameter.is_floating_point():
            problems.append(f"'{name}' is {parameter.dtype}, which has no orthogonal form")
        wrong_route = route_problems(name, shape, chosen)
        if wrong_route:
            problems += wrong_route
            continue
        problems.append(storage_problem(name, parameter, matrix=True))
        sharding = sharding_of(parameter)
        if chosen.flat and not cut_along_rows(parameter):
            problems.append(
                f"'{name}' of shape {list(shape)} is one matrix [out, rest], and "
                f"{parameter.placements} cut another dimension than the first"  # type: ignore[attr-defined]
            )
        elif chosen.split is not None and any(sharding.blocked):
            side, count = sharding.block_dim, sharding.count(sharding.blocked)
            if chosen.split.within(shape, side, count, sharding.block) is None:
                lines = ("rows", "columns")[side]
                problems.append(
                    f"'{name}' has a split {chosen.split}, and tensor parallelism cuts its "
                    f"{shape[-2 + side]} {lines} into {count} blocks inside the matrices: choose "
                    f"a size whose cuts fall between the matrices, or store them separately"
                )
    return list(dict.fromkeys(problem for problem in problems if problem))
