# SPDX-License-Identifier: Apache-2.0
"""Flags of a configuration: every field of a dataclass as an option that may be left out.

TrainConfig.steps            --steps 300
TrainConfig.model.dim        --model.dim 512

The fields, their types and their descriptions are those of the dataclass. A flag that is left out
changes nothing: the value comes from the recipe, or from the run that is resumed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

T = TypeVar("T")


def flags_of(kind: type, default: Any, groups: Mapping[str, str] | None = None) -> type:
    """A dataclass with the fields of ``kind``, all optional; ``default`` is shown in the help.

    ``groups``: the title of the group in the help that a field begins, by the field's name. Flags
    of a group are fields of a dataclass inside; their names have no prefix.
    """
    groups = {} if groups is None else groups
    hints = get_type_hints(kind)
    fields: list[Any] = []
    inside: list[Any] = fields  # where the next flag goes: to the group that was begun last
    nested: list[Any] = []
    for field in dataclasses.fields(kind):
        hint, value = hints[field.name], getattr(default, field.name, None)
        if field.name in groups:
            inside = []
            fields.append((groups[field.name], inside))
        inner = next(
            (one for one in (hint, *get_args(hint)) if dataclasses.is_dataclass(one)), None
        )
        if inner is not None:  # a configuration inside: --model.dim
            made = flags_of(inner, value)  # type: ignore[arg-type]
            nested.append((field.name, made, dataclasses.field(default_factory=made)))
            continue
        shown = "" if value is None else f"({value})"
        words = tyro.conf.arg(help_behavior_hint=shown, metavar=_metavar(hint))
        option = Annotated[(hint | None, words, *one_of(hint))]  # type: ignore[valid-type]
        inside.append((field.name, option, dataclasses.field(default=None)))
    for at, item in enumerate(fields):
        if len(item) == 2:
            fields[at] = _group(kind, *item)
    return _flags(kind, fields + nested)


def one_of(hint: Any) -> tuple[PrimitiveConstructorSpec[Any], ...]:
    """For a flag that may be left out and whose words are those of a Literal: the words in their
    order. tyro itself would list them in any order, with None. Empty for another hint."""
    words = get_args(hint)
    if get_origin(hint) is not Literal:
        return ()
    spec = PrimitiveConstructorSpec(
        nargs=1,
        metavar=_metavar(hint),
        instance_from_str=lambda given: given[0],
        is_instance=lambda value: value is None or value in words,
        str_from_instance=lambda value: [str(value)],
        choices=words,
    )
    return (spec,)


def _group(kind: type, title: str, fields: list[Any]) -> tuple[str, Any, Any]:
    made = _flags(kind, fields)
    words = (tyro.conf.OmitArgPrefixes, tyro.conf.arg(help=""))
    return (
        title,
        Annotated[(made, *words)],  # type: ignore[valid-type]
        dataclasses.field(default_factory=made, metadata={"group": True}),
    )


def _flags(kind: type, fields: list[Any]) -> type:
    made = dataclasses.make_dataclass(f"{kind.__name__}Flags", fields, frozen=True, kw_only=True)
    made.__doc__ = re.sub(r":\w+:`([^`]+)`|``([^`]+)``", r"\1\2", kind.__doc__ or "")
    return made


def _metavar(hint: Any) -> str:
    """``INT``, ``INT|auto`` or ``{muon,adamw}``, without the None that stands for a flag that is
    left out."""
    if hint is bool:
        return "{True,False}"
    if isinstance(hint, type):
        return hint.__name__.upper()
    kinds = [one for one in get_args(hint) if one is not type(None)]
    if all(isinstance(one, str) for one in kinds):  # a Literal
        return kinds[0] if len(kinds) == 1 else f"{{{','.join(kinds)}}}"
    return "|".join(_metavar(one) for one in kinds)


def given(flags: Any) -> dict[str, Any]:
    """The flags that were given, by field; a dictionary for a configuration inside."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        value = given(value) if dataclasses.is_dataclass(value) else value
        if "group" in field.metadata:
            found |= value
        elif value is not None and value != {}:
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
