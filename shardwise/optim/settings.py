# SPDX-License-Identifier: Apache-2.0
"""The values that an optimizer's settings may have.

One table serves the constructor and every step, because parameter groups are dictionaries that
schedulers, and users, change between steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
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
_UNKNOWN = ("maximize", "amsgrad")  # torch's switches, which add_param_group refuses too
_IMMUTABLE = {float, int, bool, str, type(None)}


def range_problems(settings: Any) -> list[str]:
    """A sentence for each field of ``settings`` whose value no optimizer can step with."""
    problems = [_problem(entry.name, getattr(settings, entry.name)) for entry in fields(settings)]
    return [problem for problem in problems if problem is not None]


def _problem(name: str, value: Any) -> str | None:
    """Why no optimizer can step with a setting of this value, or None."""
    if name in _FLAGS:
        fits = type(value) in _IMMUTABLE and value in _FLAGS[name]
        return None if fits else f"{name}={value!r} must be one of {_FLAGS[name]}"
    if name == "step_bytes":
        fits = value is None or (_is_number(value, math.inf) and value > 0)
        return None if fits else f"{name}={value!r} must be more than 0, and finite"
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
    """A parameter group that holds the settings under their names, as values for a checkpoint."""
    values = {entry.name: getattr(settings, entry.name) for entry in fields(settings)}
    values |= values.pop("options", {})
    return {"params": list(parameters), "kind": settings.kind} | values


class GroupSettings:
    """The settings of an optimizer's parameter groups, checked when they have changed since the
    last step."""

    def __init__(self, classes: Mapping[str, Any]) -> None:
        """``classes``: the class of settings, by the kind of a group."""
        self.classes = classes
        self._checked: list[dict[str, Any]] = []  # by group: values that were found good

    def names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of a group's settings."""
        return (*_names(self.classes[group["kind"]]), *_options(group))

    def own(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a group that the class of its kind takes."""
        names = _names(self.classes[group["kind"]])
        return {name: group[name] for name in names if name in group}

    def problem(self, groups: Sequence[Mapping[str, Any]]) -> str | None:
        """Why the groups as they are now allow no step, or None."""
        current = [self._values(group) for group in groups]
        if current == self._checked:
            return None
        if not self._only_numbers_changed(current):
            problems = [
                f"param_groups[{number}]: {problem}"
                for number, group in enumerate(groups)
                if (problem := self._group_problem(group)) is not None
            ]
            if problems:
                return "nothing was updated: " + "; ".join(problems)
        self._checked = current
        return None

    def _values(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a group as values to compare in the next step."""
        return {
            name: group[name] if type(group[name]) in _IMMUTABLE else _version(group[name])
            for name in (*self.names(group), *_UNKNOWN)
            if name in group
        }

    def _only_numbers_changed(self, current: Sequence[dict[str, Any]]) -> bool:
        """Whether the only changes are numbers within their ranges, as schedulers make them."""
        if len(current) != len(self._checked):
            return False
        return all(
            values.keys() == before.keys()
            and all(
                type(value) is float and name in RANGES and _problem(name, value) is None
                for name, value in values.items()
                if value is not before[name] and value != before[name]
            )
            for values, before in zip(current, self._checked, strict=True)
        )

    def _group_problem(self, group: Mapping[str, Any]) -> str | None:
        """Why the settings of one group allow no step, or None."""
        names, options = self.names(group), _options(group)
        missing = [name for name in names if name not in group and name != "options"]
        if missing:
            return f"{', '.join(missing)} was taken out: set it again"
        unknown = [name for name in _UNKNOWN if group.get(name) and name not in options]
        if unknown:
            return (
                f"{unknown[0]}=True is a setting that this optimizer does not know: take it out "
                f"(to maximize, change the sign of the loss)"
            )
        devices = {"cpu", *(parameter.device.type for parameter in group["params"])}
        for name, value in group.items():
            if isinstance(value, Tensor) and value.device.type not in devices:
                return f"{name} is a tensor on {value.device}: move it to the parameters' device"
        try:
            self.classes[group["kind"]](**self.own(group))
        except (ValueError, TypeError) as error:
            return str(error)
        return None


@cache
def _names(settings: Any) -> tuple[str, ...]:
    return tuple(entry.name for entry in fields(settings))


def _options(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the options of a matrix optimizer that is a function."""
    function = getattr(group.get("function"), "optimizer", None)
    return () if function is None else tuple(function.options)


def _version(value: Any) -> Any:
    """A value that changes when ``value`` is written in place."""
    if isinstance(value, Tensor):
        return id(value), value._version
    return tuple(map(_version, value)) if isinstance(value, list | tuple) else value
