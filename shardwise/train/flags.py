# SPDX-License-Identifier: Apache-2.0
"""Flags of a configuration: every field of a dataclass as an option that may be left out.

TrainConfig.steps            --steps 300
TrainConfig.model.dim        --model.dim 512

The fields, their types and their descriptions are those of the dataclass. A flag that is left out
changes nothing: the value comes from the recipe, or from the run that is resumed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import tyro

T = TypeVar("T")


def flags_of(kind: type, default: Any) -> type:
    """A dataclass with the fields of ``kind``, all optional; ``default`` is shown in the help."""
    fields: list[Any] = []
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint, value = hints[field.name], getattr(default, field.name, None)
        inner = next(
            (one for one in (hint, *get_args(hint)) if dataclasses.is_dataclass(one)), None
        )
        if inner is not None:  # a configuration inside: --model.dim
            nested = flags_of(inner, value)  # type: ignore[arg-type]
            fields.append((field.name, nested, dataclasses.field(default_factory=nested)))
            continue
        shown = "" if value is None else f"({value})"
        words = tyro.conf.arg(help_behavior_hint=shown, metavar=_metavar(hint))
        option = Annotated[hint | None, words]  # type: ignore[valid-type]
        fields.append((field.name, option, dataclasses.field(default=None)))
    made = dataclasses.make_dataclass(f"{kind.__name__}Flags", fields, frozen=True, kw_only=True)
    made.__doc__ = kind.__doc__
    return made


def _metavar(hint: Any) -> str:
    """``INT`` or ``{muon,adamw}``, without the None that stands for a flag that is left out."""
    kinds = [one for one in get_args(hint) if one is not type(None)] or [hint]
    if kinds == [bool]:
        return "{True,False}"
    return kinds[0].__name__.upper() if isinstance(kinds[0], type) else f"{{{','.join(kinds)}}}"


def given(flags: Any) -> dict[str, Any]:
    """The flags that were given, by field; a dictionary for a configuration inside."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        value = given(value) if dataclasses.is_dataclass(value) else value
        if value is not None and value != {}:
            found[field.name] = value
    return found


def changed(config: T, changes: Mapping[str, Any]) -> T:
    """A configuration with some values replaced; a mapping replaces values of the one inside."""
    values = {
        name: changed(getattr(config, name), value)
        if isinstance(value, Mapping) and getattr(config, name) is not None
        else value
        for name, value in changes.items()
    }
    return dataclasses.replace(config, **values)  # type: ignore[type-var]
