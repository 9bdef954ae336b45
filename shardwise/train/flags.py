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
from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypedDict, TypeVar, get_args, get_type_hints

from tyro.conf import FlagConversionOff, OmitArgPrefixes, arg

from shardwise.train.config import IDLE, TrainConfig
from shardwise.words import flattened

T = TypeVar("T")


def flags_of(
    kind: type,
    default: Any,
    groups: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
) -> Any:
    """A ``TypedDict`` with the fields of ``kind``, all optional; ``default`` is shown in the help.

    Args:
        groups: the title of the group in the help that a field begins, by the field's name. Flags
            of a group are those of a ``TypedDict`` inside; their names have no prefix.
        only: the fields that become flags; ``None``: all.
    """
    hints = get_type_hints(kind)
    fields: dict[str, Any] = {}
    inside = fields  # where the next flag goes: to the group that was begun last
    nested: dict[str, Any] = {}
    grouped: dict[str, dict[str, Any]] = {}
    for name in hints if only is None else only:
        hint, value = hints[name], getattr(default, name, None)
        if name in (groups or ()):
            inside = grouped[groups[name]] = {}  # type: ignore[index]
        inner = next((i for i in (hint, *get_args(hint)) if dataclasses.is_dataclass(i)), None)
        if inner is not None:  # a configuration inside: --model.dim
            nested[name] = flags_of(inner, value)  # type: ignore[arg-type]
            continue
        shown = arg(help_behavior_hint="" if value is None else f"({value})")
        words = (shown, FlagConversionOff) if hint is bool else (shown,)
        inside[name] = Annotated[(hint, *words)]  # type: ignore[valid-type]
    for title, flags in grouped.items():
        fields[title] = Annotated[_flags(kind, flags), OmitArgPrefixes, arg(help="")]
    return _flags(kind, fields | nested)


def _flags(kind: type, fields: dict[str, Any]) -> Any:
    made: Any = TypedDict(f"{kind.__name__}Flags", fields, total=False)  # type: ignore[misc, operator]
    made.__doc__ = re.sub(r":\w+:`([^`]+)`|``([^`]+)``", r"\1\2", kind.__doc__ or "")
    return made


def given(flags: Mapping[str, Any], groups: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The flags that were given, by field; a dictionary for a configuration inside."""
    titles = [] if groups is None else groups.values()
    found = {name: value for name, value in flags.items() if name not in titles}
    for title in titles:
        found |= flags.get(title, {})
    inside = {name: given(value) for name, value in found.items() if isinstance(value, Mapping)}
    return {name: value for name, value in (found | inside).items() if value != {}}


def changed(config: T, changes: Mapping[str, Any]) -> T:
    """A configuration with some values replaced; a mapping replaces values of the one inside."""
    values = {
        name: changed(getattr(config, name), value)
        if isinstance(value, Mapping) and getattr(config, name) is not None
        else value
        for name, value in changes.items()
    }
    return dataclasses.replace(config, **values)  # type: ignore[type-var]


def refuse_idle(config: TrainConfig, changes: Mapping[str, Any]) -> None:
    """Raise where one of the changes that were made has no effect in the configuration."""
    values = flattened(config.to_json())
    foreign = (config.module or "").startswith("hf:")  # its config.json describes the model
    for name, value in flattened(changes).items():
        other, idle = IDLE.get(name, ("", ()))
        if foreign and name.startswith("model.") and name != "model.context":
            other, idle = "module", (config.module,)
        if other and values[other] in idle:
            raise ValueError(
                f"{name}={value!r} has no effect with {other}={values[other]!r}: leave it out, or "
                f"choose another {other}"
            )
