# SPDX-License-Identifier: Apache-2.0
"""Settings: the numbers that an optimizer may step with, by one table for its construction and for
every step. Parameter groups are dictionaries that anybody may change, as schedulers do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from numbers import Real
from typing import Any

from torch import Tensor

# By name: the bound that a number of 0 or more stays below, and how many numbers there are.
RANGES = {
    "lr": (math.inf, 1),
    "weight_decay": (math.inf, 1),
    "eps": (math.inf, 1),
    "momentum": (1.0, 1),
    "betas": (1.0, 2),
}
_FLAGS: dict[str, tuple[Any, ...]] = {"nesterov": (True, False), "fused": (True, False, None)}
_UNKNOWN = ("maximize", "amsgrad")  # torch's switches, which add_param_group refuses too
_PLAIN = {float, int, bool, str, type(None)}


def range_problems(settings: Any) -> list[str]:
    """A sentence for each field of ``settings`` whose value no optimizer can step with."""
    given = [(entry.name, getattr(settings, entry.name)) for entry in fields(settings)]
    return [problem for name, value in given if (problem := _problem(name, value)) is not None]


def _problem(name: str, value: Any) -> str | None:
    if name in _FLAGS:
        fits = type(value) in _PLAIN and value in _FLAGS[name]
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
    fits = several and all(_is_number(one, below) for one in value)
    return None if fits else f"{name}={value!r} must be two numbers {bound}"


def _is_number(value: Any, below: float) -> bool:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_meta or value.is_complex():
            return False
        value = value.item()
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < below


def group_of(settings: Any, parameters: Sequence[Tensor]) -> dict[str, Any]:
    """A parameter group: the settings, under their names, as values that a checkpoint can keep."""
    values = {entry.name: getattr(settings, entry.name) for entry in fields(settings)}
    values |= values.pop("options", {})
    return {"params": list(parameters), "kind": settings.kind} | values


class GroupSettings:
    """The settings of an optimizer's parameter groups; looked at where they have changed since the
    last step."""

    def __init__(self, classes: Mapping[str, Any]) -> None:
        """``classes``: those of settings, by the kind of a group."""
        self.classes = classes
        self._possible: list[dict[str, Any]] = []

    def names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of a group's settings."""
        return (*_names(self.classes[group["kind"]]), *_options(group))

    def own(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a group, as the class of its kind takes them."""
        known = _names(self.classes[group["kind"]])
        return {name: group[name] for name in known if name in group}

    def problem(self, groups: Sequence[Mapping[str, Any]]) -> str | None:
        """Why no step can be taken with the groups as they are now; None where one can."""
        now = [self._values(group) for group in groups]
        if now == self._possible:
            return None
        if not self._only_numbers_changed(now):
            found = [self._group_problem(group) for group in groups]
            problems = [f"param_groups[{at}]: {one}" for at, one in enumerate(found) if one]
            if problems:
                return "nothing was updated: " + "; ".join(problems)
        self._possible = now
        return None

    def _values(self, group: Mapping[str, Any]) -> dict[str, Any]:
        names = (*self.names(group), *_UNKNOWN)
        values = map(group.get, names)
        return {
            name: value if type(value) in _PLAIN else _version(value)
            for name, value in zip(names, values, strict=True)
            if value is not None or name in group
        }

    def _only_numbers_changed(self, now: Sequence[dict[str, Any]]) -> bool:
        """Whether no more than plain numbers have changed, to possible ones, as by schedulers."""
        if len(now) != len(self._possible):
            return False
        return all(
            mine.keys() == before.keys()
            and all(
                type(value) is float and name in RANGES and _problem(name, value) is None
                for name, value in mine.items()
                if value is not before[name] and value != before[name]
            )
            for mine, before in zip(now, self._possible, strict=True)
        )

    def _group_problem(self, group: Mapping[str, Any]) -> str | None:
        kind, options = group["kind"], _options(group)
        if missing := [
            name for name in self.names(group) if name not in group and name != "options"
        ]:
            return f"{', '.join(missing)} was taken out: set it again"
        if unknown := [name for name in _UNKNOWN if group.get(name) and name not in options]:
            return (
                f"{unknown[0]}=True is a setting that this optimizer does not know: take it out "
                f"(to maximize, turn the sign of the loss)"
            )
        places = {"cpu", *(one.device.type for one in group["params"])}
        for name, value in group.items():
            if isinstance(value, Tensor) and value.device.type not in places:
                return f"{name} is a tensor on {value.device}: put it where its parameters are"
        try:
            self.classes[kind](**self.own(group))
        except (ValueError, TypeError) as error:
            return str(error)
        return None


@cache
def _names(settings: Any) -> tuple[str, ...]:
    return tuple(entry.name for entry in fields(settings))


def _options(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The options of a matrix optimizer that is a function."""
    function = getattr(group.get("function"), "optimizer", None)
    return () if function is None else tuple(function.options)


def _version(value: Any) -> Any:
    """A value that differs once ``value`` was written to in place."""
    if isinstance(value, Tensor):
        return id(value), value._version
    return tuple(map(_version, value)) if isinstance(value, list | tuple) else value
