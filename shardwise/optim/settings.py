# SPDX-License-Identifier: Apache-2.0
"""The values that an optimizer's settings may have, and settings as a parameter group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from numbers import Real
from typing import Any

from torch import Tensor

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
    problems = [_problem(entry.name, getattr(settings, entry.name)) for entry in fields(settings)]
    return [problem for problem in problems if problem is not None]


def _problem(name: str, value: Any) -> str | None:
    """Why no optimizer can step with a setting of this value, or None."""
    if name in _FLAGS:
        fits = any(value is flag for flag in _FLAGS[name])
        return None if fits else f"{name}={value!r} must be one of {_FLAGS[name]}"
    if name not in RANGES:
        return None
    below, count = RANGES[name]
    bound = "0 or more, and finite" if below == math.inf else f"in [0, {below:g})"
    if count == 1:
        return None if _is_number(value, below) else f"{name}={value!r} must be {bound}"
    several = isinstance(value, list | tuple) and len(value) == count
    fits = several and all(_is_number(number, below) for number in value)
    return None if fits else f"{name}={value!r} must be two numbers {bound}"


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
    known = [entry.name for entry in fields(settings) if entry.init and entry.name != "optimizer"]
    options = getattr(settings, "options", {})
    known = [name for name in (*known, *options) if name != "options"]
    if unknown := [name for name in changes if name not in known]:
        raise ValueError(f"{', '.join(unknown)} is unknown; there are {', '.join(known)}")
    if options:
        own = {name: changes.pop(name) for name in [*changes] if name in options}
        changes["options"] = {**options, **own}
    return replace(settings, **changes)
