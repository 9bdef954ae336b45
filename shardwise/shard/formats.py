# SPDX-License-Identifier: Apache-2.0
"""Which parameters are stored in fp8, what this requires of the layout, and the report of it.

Only names, shapes and layouts decide; no tensor is read. So all ranks decide alike.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from shardwise.core.layout import Grain, Item, rows
from shardwise.notices import warn_once
from shardwise.optim.routing import names_head
from shardwise.precision import Precision
from shardwise.precision.fp8 import BLOCKS, Format, side_of
from shardwise.precision.fp8_block import scaled_problem
from shardwise.precision.fp8_codec import FP8
from shardwise.precision.fp8_native import native_problem
from shardwise.precision.policy import Stored, ineligible, multiplies_stacks, short_name
from shardwise.shard.found import Found
from shardwise.shard.group import Group
from shardwise.shard.module import units_of
from shardwise.shard.unit import Unit
from shardwise.words import aligned, size_text

logger = logging.getLogger(__name__)


def stored_as(found: Found, precision: Precision) -> Stored:
    """The format of one parameter."""
    name, shape, parameter = found.name, found.shape, found.parameter
    owners = [type(module) for module in found.modules]
    reason = ""
    if precision.format is not None:
        reason = ineligible(name, shape, precision, owners, names_head(name)) or ""
        if not reason and found.local is not parameter:
            reason = "it is a DTensor of tensor parallelism"
        if not reason and not parameter.is_floating_point():
            reason = f"its dtype is {parameter.dtype}"
    format = None if reason else precision.format
    dtype = precision.compute_dtype(parameter.dtype)
    return Stored(name=name, shape=shape, format=format, dtype=dtype, why=reason)


def codec_of(stored: Stored, precision: Precision) -> FP8 | None:
    """The codec of a group of such parameters; None for numbers."""
    return FP8(stored.format, precision.multiplied) if stored.format else None


def side_in(format: Format | None) -> int:
    """The side of the blocks of a format; 1 for a weight that is not in fp8."""
    return side_of([BLOCKS[format]]) if format else 1


def item_of(stored: Stored, grain: Grain) -> Item:
    """A parameter for the layout planner. In fp8, the rows of a block stay together. (A row of a
    stack [experts, rows, columns] is a whole matrix, with all its blocks.)"""
    side = side_in(stored.format)
    if grain.kind == "rows" and len(stored.shape) == 2:
        grain = rows(math.lcm(grain.count, side))
    return Item(stored.name, stored.shape, grain, side)


# --------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class PrecisionReport:
    """How every parameter of a wrapped model is stored, in the order of registration; printable."""

    rows: tuple[Stored, ...]
    notes: tuple[str, ...] = ()  # why products are not in fp8; which weights are sent as bf16

    @property
    def stored(self) -> tuple[str, ...]:
        """The names of the parameters in fp8."""
        return tuple(row.name for row in self.rows if row.format)

    @property
    def kept(self) -> dict[str, str]:
        """Under an fp8 precision: the parameters that are not in fp8, and the reasons."""
        return {row.name: row.why for row in self.rows if row.why}

    @property
    def elements(self) -> tuple[int, int]:
        """(number of elements in fp8, number of all elements)."""
        sizes = [(math.prod(row.shape), row.format) for row in self.rows]
        return sum(size for size, format in sizes if format), sum(size for size, _ in sizes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for logs. Layers of equal name but for their number share an entry,
        ``blocks.*.norm.weight``. Empty under a precision without fp8.
        """
        if not self.stored and not self.kept:
            return {}
        in_fp8, total = self.elements
        kept: dict[str, list[str]] = {}  # by reason
        for name, why in self.kept.items():
            pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
            if pattern not in kept.setdefault(why, []):
                kept[why].append(pattern)
        return {
            "format": " + ".join(sorted({row.format for row in self.rows if row.format})) or "none",
            "stored": len(self.stored),
            "parameters": len(self.rows),
            "share": in_fp8 / total,
            "kept": kept,
        }

    def __str__(self) -> str:
        table = [("parameter", "shape", "stored as", "products", "why")]
        for row in self.rows:
            shape = "x".join(map(str, row.shape)) or "scalar"
            kind = row.format or short_name(row.dtype)
            table.append((row.name, shape, kind, row.products, row.why))
        count, (in_fp8, total) = f"{len(self.stored)} of {len(self.rows)}", self.elements
        last = f"{count} parameters, {in_fp8} of {total} elements, are stored in fp8"
        return "\n".join([*aligned(table), last, *self.notes])


def precision_report(model: nn.Module) -> PrecisionReport:
    """How each parameter of a wrapped model is stored and multiplied, and why."""
    units = list(units_of(model))
    if not units:
        raise ValueError(
            f"no module of this {type(model).__name__} is wrapped yet: call fully_shard or "
            f"data_parallel, which decide how weights are stored, before precision_report"
        )
    notes: dict[str, None] = {}  # an ordered set
    staged: dict[str, list[Stored]] = {}  # weights that are gathered as bf16, by reason
    rows: list[Stored] = []
    for full_name, module, stored, group in _stored_in(model, units):
        products, note = _products(module, stored, group.precision, group.device)
        rows.append(replace(stored, name=full_name, products=products))
        if note:
            notes[f"products: {note}"] = None
        reason = group.codec.staged_because(group.layout) if stored.format else ""
        if reason:
            staged.setdefault(reason, []).append(rows[-1])
    for reason, weights in staged.items():
        nbytes = sum(math.prod(weight.shape) for weight in weights) * torch.bfloat16.itemsize
        names = ", ".join(weight.name for weight in weights)
        notes[f"gathered as bf16 ({size_text(nbytes)}), because {reason}: {names}"] = None
    return PrecisionReport(tuple(rows), tuple(notes))


def _stored_in(
    model: nn.Module, units: list[Unit]
) -> Iterator[tuple[str, nn.Module, Stored, Group]]:
    """(full name, module, how it is stored, group) of each parameter, in the order of registration;
    a parameter with several places is listed at its first."""
    where = {
        (id(parameters), name): (unit, number, index)
        for unit in units
        for parameters, name, number, index in unit.places
    }
    seen = set()
    for path, module in model.named_modules():
        for name in module._parameters:
            place = where.get((id(module._parameters), name))
            if place is not None and place not in seen:
                seen.add(place)
                unit, number, index = place
                full_name = f"{path}.{name}" if path else name
                yield full_name, module, unit.stored[number, index], unit.groups[number]


def _products(
    module: nn.Module, stored: Stored, precision: Precision, device: torch.device
) -> tuple[str, str | None]:
    """(how a module multiplies by a weight, why the device does not do so in fp8)."""
    if stored.format is None:
        return "", None
    products = precision.multiplied
    if multiplies_stacks(type(module)) and len(stored.shape) == 2:
        return "decoded", "experts with a parameter each multiply by decoded weights"
    if isinstance(module, NonDynamicallyQuantizableLinear):  # its forward is never called
        return "decoded", "nn.MultiheadAttention multiplies by decoded weights"
    if len(stored.shape) == 3:
        return "decoded", "experts multiply by decoded weights"
    if products == "native":
        return "mxfp8", None
    if products == "emulated":
        return "decoded", None
    problem = scaled_problem(device)
    if problem is None:
        return "fp8", None
    return "fp8 by decoding", f"{problem}; the same numbers are made by decoding"


def warn_of_decoding(precision: Precision, device: torch.device, mesh: DeviceMesh) -> None:
    """Warn if products are made by decoding and the user may not expect this: the device cannot
    make the fp8 products of the recipe, or the recipe decodes and the device has no fp8 at all."""
    if precision.products in ("emulated", "native") or device.type == "meta":
        return
    problem = scaled_problem(device)
    if problem and (precision.multiplied == "fp8" or native_problem(device)):
        text = "Precision(weights=%r): %s; products are made by decoding, no faster than in bf16"
        warn_once(logger, text, precision.weights, problem, mesh=mesh)
