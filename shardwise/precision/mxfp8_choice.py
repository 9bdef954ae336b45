# SPDX-License-Identifier: Apache-2.0
"""Which weights are stored in MXFP8, and why the others are not: names and shapes, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from shardwise.precision.mxfp8 import MXFP8Error, shape_problems
from shardwise.precision.mxfp8_tensor import Format, Matrices


@dataclass(frozen=True, kw_only=True)
class Stored:
    """How one parameter's compute weight is kept."""

    name: str
    shape: tuple[int, ...]
    format: Format | None  # None: in ``dtype``
    dtype: torch.dtype  # of what is computed with
    why: str  # for those that stay in a dtype under an MXFP8 precision


def patterns_of(value: Sequence[str], field: str) -> tuple[str, ...]:
    """Shell patterns of whole parameter names; a lone string would be read letter by letter."""
    many = isinstance(value, Iterable) and not isinstance(value, str)
    patterns = tuple(value) if many else ()
    if not many or not all(isinstance(each, str) and each for each in patterns):
        raise MXFP8Error(
            f"{field}={value!r}: give a sequence of patterns, such as ('*.mlp.*', '*.wo.weight')"
        )
    return patterns


def stores_nothing(format: Matrices | None, rows: Sequence[Stored]) -> list[str]:
    """A problem, of all parameters of a model: a format that none of them is stored in."""
    if format is None or not rows or any(row.format for row in rows):
        return []
    reasons = [f"'{row.name}' {list(row.shape)}: {row.why}" for row in rows]
    more = f", and {len(reasons) - 4} more" if len(reasons) > 4 else ""
    return [
        f"nothing would be stored in {format} ({'; '.join(reasons[:4])}{more}): both sides of a "
        f"weight are multiples of 32. Change them or the patterns, or train with weights='bf16'"
    ]


def ineligible(
    name: str,
    shape: Sequence[int],
    *,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    owners: Sequence[type[nn.Module]] = (nn.Linear,),
) -> str | None:
    """Why this weight is not stored in MXFP8; None if it is. ``exclude`` wins over ``include``."""
    for pattern in patterns_of(exclude, "exclude"):
        if fnmatchcase(name, pattern):
            return f"excluded by {pattern!r}"
    wanted = patterns_of(include, "include")
    if not any(fnmatchcase(name, pattern) for pattern in wanted):
        return f"not in include={wanted}"
    # A norm scales: it neither multiplies by a decoded matrix nor looks rows up.
    strangers = sorted(
        {owner.__name__ for owner in owners if not _multiplies(owner) and not _looks_up(owner)}
    )
    if strangers:
        return f"read by {', '.join(strangers)}, not by linears alone"
    named = any(fnmatchcase(name, pattern) for pattern in wanted if pattern != _EVERYTHING)
    if any(map(_looks_up, owners)) and not named:
        return f"read by an embedding; include={(*wanted, name)} stores it too"
    if len(shape) <= 2 and name.rpartition(".")[2].startswith("bias"):
        return "a bias" if len(shape) < 2 else "a bias, a row for each expert"
    # Of a stack [experts, rows, columns] each member is stored for itself.
    stack = len(shape) == 3 and all(map(_takes_stacks, owners))
    return "; ".join(shape_problems(shape[-2:] if stack else shape)) or None


def format_of(owners: Sequence[type[nn.Module]], matrices: Matrices) -> Format:
    """Of a weight that is stored so: one that is looked up alone needs no plane for backward."""
    return "mxfp8_rows" if all(map(_looks_up, owners)) else matrices


_EVERYTHING = "*"  # names no weight: embeddings are stored where they are meant


def _looks_up(owner: type[nn.Module]) -> bool:
    return issubclass(owner, nn.Embedding)


def _multiplies(owner: type[nn.Module]) -> bool:
    return issubclass(owner, nn.Linear) or _takes_stacks(owner)


def _takes_stacks(owner: type[nn.Module]) -> bool:
    return getattr(owner, "multiplies_decoded", False)
