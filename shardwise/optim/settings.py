# SPDX-License-Identifier: Apache-2.0
"""Settings of an optimizer: the values that they may have, as a parameter group, and the checks
when an optimizer is built. All problems are raised together, on every rank."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from numbers import Real
from typing import Any

from torch import Tensor

from shardwise.core.agreement import raise_together
from shardwise.optim.routing import Route, route_problems
from shardwise.optim.storage import axes_of, cut_along_rows, sharding_of, storage_problem

# By name: the numbers are 0 or more and below this bound; how many numbers there are.
RANGES = {
    "lr": (math.inf, 1),
    "weight_decay": (math.inf, 1),
    "eps": (math.inf, 1),
    "momentum": (1.0, 1),
    "betas": (1.0, 2),
}
_FLAGS: dict[str, tuple[Any, ...]] = {"nesterov": (True, False), "fused": (True, False, None)}


def range_problems(settings: Any) -> list[str]:
    """A sentence for each field of ``settings`` whose value no optimizer can step with."""
    problems = []
    for name, value in ((entry.name, getattr(settings, entry.name)) for entry in fields(settings)):
        if name in _FLAGS and not any(value is flag for flag in _FLAGS[name]):
            problems.append(f"{name}={value!r} must be one of {_FLAGS[name]}")
        if name in RANGES:
            below, count = RANGES[name]
            numbers = [value] if count == 1 else value if isinstance(value, list | tuple) else []
            if len(numbers) != count or not all(_is_number(one, below) for one in numbers):
                several = "" if count == 1 else f"{count} numbers, each "
                bound = "finite" if below == math.inf else f"below {below:g}"
                problems.append(f"{name}={value!r} must be {several}0 or more, and {bound}")
    return problems


def _is_number(value: Any, below: float) -> bool:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_meta or value.is_complex():
            return False
        value = value.item()
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < below


def group_of(settings: Any, parameters: Sequence[Tensor]) -> dict[str, Any]:
    """A parameter group that holds the settings under their names, as values for a checkpoint; and
    the settings themselves as "rule", which the optimizer takes out."""
    values = {entry.name: getattr(settings, entry.name) for entry in fields(settings)}
    if values.pop("optimizer", None) is not None:
        values |= {"function": settings.function} | values.pop("options")
    return {"params": list(parameters), "kind": settings.kind, "rule": settings} | values


def changed(settings: Any, changes: dict[str, Any]) -> Any:
    """The settings with some changed; raises what no optimizer can step with."""
    options = getattr(settings, "options", {})
    known = [entry.name for entry in fields(settings) if entry.init]
    known = [name for name in (*known, *options) if name not in ("optimizer", "options")]
    if unknown := [name for name in changes if name not in known]:
        raise ValueError(f"{', '.join(unknown)} is unknown; there are {', '.join(known)}")
    if options:
        own = {name: changes.pop(name) for name in [*changes] if name in options}
        changes["options"] = {**options, **own}
    return replace(settings, **changes)


# ------------------------------------------------------------------------------ construction


def refuse(
    what: str,
    problems: Sequence[str],
    facts: Sequence[Any],
    named: Sequence[tuple[str, Tensor]],
    matrices: Iterable[tuple[str, Tensor, Route]],
    parameters: Sequence[Tensor] | None = None,
) -> None:
    """Raise on every rank the problems of any rank, those of the parameters included, and where
    ranks build different optimizers (collective over the axes of ``parameters``, or of all
    ``named``). ``facts``: settings, then a list."""
    *settings, last = facts
    texts = [*map(str, settings), f"{len(last)} parameters ({zlib.crc32(repr(last).encode()):08x})"]
    found = [*problems, *_parameter_problems(named, matrices)]
    axes = axes_of([p for _, p in named] if parameters is None else parameters)
    raise_together(f"{what} cannot work", found, texts, axes, same="build the same optimizer")


def _parameter_problems(
    parameters: Iterable[tuple[str, Tensor]], matrices: Iterable[tuple[str, Tensor, Route]]
) -> list[str]:
    """Why these parameters cannot be optimized, or the matrices among them orthogonalised."""
    problems = [storage_problem(name, parameter) for name, parameter in parameters]
    for name, parameter, chosen in matrices:
        shape, sharding = tuple(parameter.shape), sharding_of(parameter)
        if not parameter.is_floating_point():
            problems.append(f"'{name}' is {parameter.dtype}, which has no orthogonal form")
        if wrong_route := route_problems(name, shape, chosen):
            problems += wrong_route
            continue
        problems.append(storage_problem(name, parameter, matrix=True))
        if chosen.flat and not cut_along_rows(parameter):
            problems.append(
                f"'{name}' of shape {list(shape)} is one matrix [out, rest], and "
                f"{parameter.placements} cut another dimension than the first"  # type: ignore[attr-defined]
            )
        elif chosen.split is not None and any(sharding.blocked):
            side, count = sharding.block_dim, sharding.count(sharding.blocked)
            if chosen.split.within(shape, side, count, sharding.block) is None:
                problems.append(
                    f"'{name}' has a split {chosen.split}, and tensor parallelism cuts its "
                    f"{shape[-2 + side]} {('rows', 'columns')[side]} into {count} blocks inside "
                    f"the matrices: choose a size whose cuts fall between the matrices"
                )
    return list(dict.fromkeys(problem for problem in problems if problem))
