# SPDX-License-Identifier: Apache-2.0
"""The format of each parameter, what the format asks of the layout, and how weights are sent.

    blocks of rows (32 in MXFP8, or 128) stay together, so each shard can be encoded where it is:

    shard 0  main |w rows 0-63  |   --encode-->  codes |w 0-63  |  scales |w|   --all-gather-->
    shard 1  main |w rows 64-127|   --encode-->  codes |w 64-127|  scales |w|       1.03 bytes

    blocks are cut, or two planes are needed at once (2.06 bytes, where bf16 takes 2):

    shard 0  main |w rows 0-40  |   --cast-->  bf16 |w 0-40  |   --all-gather-->  encode everywhere
    shard 1  main |w rows 41-127|   --cast-->  bf16 |w 41-127|

Scales lie behind the codes, that of a code at address / share, so that a range of codes has a range
of scales. ``share`` is the number of elements of a block, or less where blocks are partial: a row
of blocks then has more addresses than it needs.

Only names, shapes and layouts decide; no tensor is read, so every rank decides alike.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from shardwise.layout import Grain, Item, Layout, rows
from shardwise.notices import warn_once
from shardwise.optim.routing import names_head
from shardwise.precision import Precision
from shardwise.precision.fp8 import SCALES, SQUARE_128, Block, scale_shape, side_of
from shardwise.precision.fp8_block import scaled_problem
from shardwise.precision.fp8_functions import lookup_problem
from shardwise.precision.fp8_products import native_problem
from shardwise.precision.fp8_tensor import FORMATS, READS, Format, Reads
from shardwise.precision.policy import (
    TILED,
    Stored,
    format_of,
    ineligible,
    multiplies_stacks,
    short_name,
)
from shardwise.shard.members import stored_in
from shardwise.shard.wrapping import Found, GrainChoice, grain_of
from shardwise.words import aligned, size_text

logger = logging.getLogger(__name__)


def stored_as(found: Found, precision: Precision) -> Stored:
    """The format of one parameter."""
    shape = found.shape
    dtype = precision.compute_dtype(found.parameter.dtype)
    if precision.format is None:
        return Stored(name=found.name, shape=shape, format=None, dtype=dtype, why="")
    reason = ineligible(found.name, shape, precision, found.owners, names_head(found.name))
    if reason is None and found.local is not found.parameter:
        reason = TILED
    if reason is None and not found.parameter.is_floating_point():
        reason = f"its dtype is {found.parameter.dtype}"
    for module in found.modules:
        if reason is None and isinstance(module, nn.Embedding):
            reason = lookup_problem(max_norm=module.max_norm, sparse=module.sparse)
    wanted = None if reason else format_of(found.owners, precision.format)
    return Stored(name=found.name, shape=shape, format=wanted, dtype=dtype, why=reason or "")


def item_of(found: Found, choice: GrainChoice | None, format: Format | None) -> Item:
    """The parameter as the layout planner takes it; in fp8, the rows of a block stay together."""
    grain, shape = grain_of(found, choice), found.shape
    # A row of a stack [experts, rows, columns] is a whole matrix: its blocks are together anyway.
    grain = in_blocks(grain, format) if len(shape) == 2 else grain
    return Item(found.name, shape, grain, side_in(format))


def in_blocks(grain: Grain, format: Format | None = "mxfp8") -> Grain:
    return rows(math.lcm(grain.count, side_in(format))) if grain.kind == "rows" else grain


def side_in(format: Format | None) -> int:
    """The side of the blocks of a format; 1 where it has none."""
    return side_of(FORMATS[format]) if format else 1


def one_scale_each(item: Item, blocks: Sequence[Block]) -> bool:
    """Whether a weight is a stack of which each matrix has one scale for all its blocks, as grouped
    products in fp8 ask (``moe/coded.py``)."""
    return len(item.shape) == 3 and tuple(blocks) == (SQUARE_128,)


# ------------------------------------------------------------------------------------ transport


def planes_of(format: Format, phase: Reads, persistent: bool) -> tuple[Block, ...]:
    """The planes of one gather: those of the phase, or all where weights are kept between steps."""
    if persistent:
        return FORMATS[format]
    return (READS[format][phase],) if phase in READS[format] else ()


LEAST_SHARE = 256  # addresses for each scale: below, scales would take over 1/64 of the bytes


def share_of(layout: Layout, block: Block) -> int:
    """The number of addresses for each scale, the largest with which the scales of every row of
    blocks have a place of their own, in the shard of their codes; 0: there is none."""
    share = math.prod(block)
    least = LEAST_SHARE if any(map(has_partial_blocks, layout.items)) else share
    while share >= least and not _has_places(layout, block, share):
        share //= 2
    return share if share >= least else 0


def _has_places(layout: Layout, block: Block, share: int) -> bool:
    step = share * max(block) // min(block)  # parameters and shards begin at whole squares
    if layout.num_shards > 1 and layout.shard_size % step:
        return False
    ends = -(-layout.numel // share)
    for start, item in sorted(zip(layout.starts, layout.items, strict=True), reverse=True):
        columns = item.shape[-1]
        bands, strips = scale_shape((item.numel // columns, columns), block)
        last = start + (bands - 1) * block[0] * columns  # the last row of blocks
        shard = (last // layout.shard_size + 1) * layout.shard_size
        behind = min(ends, -(-shard // share))
        if start % step or block[0] * columns % share or last // share + strips > behind:
            return False
        ends = start // share
    return True


def has_partial_blocks(item: Item) -> bool:
    return any(size % item.side for size in item.shape[-2:])


def encodes_locally(layout: Layout, format: Format = "mxfp8") -> bool:
    """Whether every shard holds whole blocks, at addresses that scales have too; of a stack whose
    matrices have one scale each, whole matrices."""
    blocks = FORMATS[format]
    if not all(share_of(layout, block) for block in blocks):
        return False
    for index, item in enumerate(layout.items):
        stack = one_scale_each(item, blocks)
        together = (item.shape[-2] if stack else side_of(blocks)) * item.shape[-1]
        if any(layout.piece(index, shard)[0] % together for shard in layout.holders(index)):
            return False
    return True


def sends_codes(layout: Layout, format: Format, persistent: bool) -> bool:
    """Whether codes are gathered, rather than bf16 that is encoded afterwards: where shards can be
    encoded and codes take fewer bytes."""
    if not encodes_locally(layout, format):
        return False
    planes = planes_of(format, "forward", persistent)
    nbytes = sum(1 + SCALES[block].itemsize / share_of(layout, block) for block in planes)
    return layout.num_shards == 1 or nbytes < torch.bfloat16.itemsize


def staged_because(layout: Layout, format: Format | None, persistent: bool) -> str:
    """Why weights in fp8 are gathered as bf16 and encoded afterwards; empty where they are not."""
    if format is None or sends_codes(layout, format, persistent):
        return ""
    if encodes_locally(layout, format):
        return "two planes have more bytes"
    if any(one_scale_each(item, FORMATS[format]) for item in layout.items):
        return "a rank's shard cuts an expert, which has one scale"
    return "a rank's shard cuts a block"


def plane_layout(layout: Layout, direct: bool) -> Layout:
    """The layout of the codes: main's if codes are sent, else one matrix after the other."""
    if direct:
        return layout
    *starts, end = accumulate((item.room for item in layout.items), initial=0)
    return Layout(layout.items, 1, end, tuple(starts))


def plane_bytes(layout: Layout, block: Block, parts: int) -> int:
    """The bytes of a plane of all weights: codes and scales, padded to ``parts`` equal parts."""
    nbytes = layout.numel + -(-layout.numel // share_of(layout, block)) * SCALES[block].itemsize
    return -(-nbytes // parts) * parts


# --------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class PrecisionReport:
    """The format of every parameter of a wrapped model, in registration order; printable."""

    rows: tuple[Stored, ...]
    notes: tuple[str, ...] = ()  # why hardware makes no fp8 products; what travels as bf16

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
        """Plain values for logs; layers that are alike share a name, ``blocks.*.norm.weight``.

        Empty under a precision without fp8.
        """
        if not self.stored and not self.kept:
            return {}
        held, total = self.elements
        kept: dict[str, list[str]] = {}
        for name, why in self.kept.items():
            alike = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
            if alike not in kept.setdefault(why, []):
                kept[why].append(alike)
        return {
            "format": " + ".join(sorted({row.format for row in self.rows if row.format})) or "none",
            "stored": len(self.stored),
            "parameters": len(self.rows),
            "share": held / total,
            "kept": kept,
        }

    def __str__(self) -> str:
        table = [("parameter", "shape", "stored as", "products", "why")]
        for row in self.rows:
            shape = "x".join(map(str, row.shape)) or "scalar"
            kind = row.format or short_name(row.dtype)
            table.append((row.name, shape, kind, row.products, row.why))
        count, (held, total) = f"{len(self.stored)} of {len(self.rows)}", self.elements
        last = f"{count} parameters, {held} of {total} elements, are stored in fp8"
        return "\n".join([*aligned(table), last, *self.notes])


def precision_report(model: nn.Module) -> PrecisionReport:
    """The format of each parameter of a wrapped model, by its name in the model."""
    every = (getattr(module, "_shardwise_unit", None) for module in model.modules())
    units = [unit for unit in every if unit is not None]
    if not units:
        raise ValueError(
            f"no module of this {type(model).__name__} is wrapped yet: call fully_shard or "
            f"data_parallel, which decide how weights are stored, before precision_report"
        )
    notes: dict[str, None] = {}
    staged: dict[str, list[Stored]] = {}
    found: list[Stored] = []
    for full, module, one, group in stored_in(model, units):
        products, note = _products(module, one, group.precision, group.device)
        found.append(replace(one, name=full, products=products))
        notes |= {f"products: {note}": None} if note else {}
        if why := staged_because(group.layout, one.format, group.persistent):
            staged.setdefault(why, []).append(found[-1])
    for why, those in staged.items():
        nbytes = sum(math.prod(one.shape) for one in those) * torch.bfloat16.itemsize
        names = ", ".join(one.name for one in those)
        notes[f"gathered as bf16 ({size_text(nbytes)}), because {why}: {names}"] = None
    return PrecisionReport(tuple(found), tuple(notes))


def _products(
    module: nn.Module, one: Stored, precision: Precision, device: torch.device
) -> tuple[str, str | None]:
    """How a module multiplies by a weight on a device, and why not in fp8 by its hardware."""
    if one.format is None or "backward" not in READS[one.format]:
        return "", None
    if multiplies_stacks(type(module)) and len(one.shape) == 2:
        return "decoded", "experts with a parameter each multiply by decoded weights"
    if isinstance(module, NonDynamicallyQuantizableLinear):  # its forward is never called
        return "decoded", "nn.MultiheadAttention multiplies by decoded weights"
    if len(one.shape) == 3 and precision.recipe.activations is None:
        return "decoded", "experts multiply by decoded weights"
    if precision.products == "native":
        return "mxfp8", None
    if precision.recipe.activations is None:
        return "decoded", None
    gradient = "" if precision.weight_gradient == "fp8" else ", dW in bf16"
    if (problem := scaled_problem(device)) is None:
        return f"fp8{gradient}", None
    return f"fp8 by decoding{gradient}", f"{problem}; the same numbers are made by decoding"


def warn_of_decoding(precision: Precision, device: torch.device, mesh: DeviceMesh) -> None:
    """Say in one line that a device makes no products in fp8: not those of the format, and where
    the format leaves that open, none at all."""
    if precision.products in ("emulated", "native") or device.type == "meta":
        return
    problem = scaled_problem(device)
    if problem and (precision.recipe.activations is not None or native_problem(device)):
        text = "Precision(weights=%r): %s; products are made by decoding, no faster than bf16's"
        warn_once(logger, text, precision.weights, problem, mesh=mesh)
