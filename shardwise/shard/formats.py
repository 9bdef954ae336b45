# SPDX-License-Identifier: Apache-2.0
"""The format of each parameter, what the format requires of the layout, and how weights are sent.

    If blocks of rows (32 in MXFP8, or 128) stay together, each rank encodes its own shard:

    shard 0  main |w rows 0-63  |   --encode-->  codes |w 0-63  |  scales |w|   --all-gather-->
    shard 1  main |w rows 64-127|   --encode-->  codes |w 64-127|  scales |w|       1.03 bytes

    If shards cut blocks, or two planes are needed at once (2.06 bytes, and bf16 takes 2):

    shard 0  main |w rows 0-40  |   --cast-->  bf16 |w 0-40  |   --all-gather-->  encode everywhere
    shard 1  main |w rows 41-127|   --cast-->  bf16 |w 41-127|

Scales lie behind the codes. The scale of a code is number address / share, so a range of codes has
a range of scales. ``share`` is the number of elements of a block, or less if blocks are partial: a
row of blocks then has more scale addresses than it needs.

Only names, shapes and layouts decide; no tensor is read. So all ranks decide alike.
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
from shardwise.shard.module import units_of
from shardwise.shard.wrap import Found, GrainChoice, grain_of
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
    """The parameter for the layout planner. In fp8, the rows of a block stay together."""
    grain, shape = grain_of(found, choice), found.shape
    # A row of a stack [experts, rows, columns] is a whole matrix, with all its blocks.
    grain = in_blocks(grain, format) if len(shape) == 2 else grain
    return Item(found.name, shape, grain, side_in(format))


def in_blocks(grain: Grain, format: Format | None = "mxfp8") -> Grain:
    """The grain, enlarged so that it cuts no block of the format."""
    return rows(math.lcm(grain.count, side_in(format))) if grain.kind == "rows" else grain


def side_in(format: Format | None) -> int:
    """The side of the blocks of a format; 1 for a weight that is not in fp8."""
    return side_of(FORMATS[format]) if format else 1


def one_scale_each(item: Item, blocks: Sequence[Block]) -> bool:
    """Whether a weight is a stack in which each matrix has one scale for all its blocks, as grouped
    products in fp8 need (``moe/coded.py``)."""
    return len(item.shape) == 3 and tuple(blocks) == (SQUARE_128,)


# ------------------------------------------------------------------------------------ transport


def planes_of(format: Format, phase: Reads, persistent: bool) -> tuple[Block, ...]:
    """The planes that one gather brings: the plane of the phase, or all planes if weights are kept
    between steps."""
    if persistent:
        return FORMATS[format]
    return (READS[format][phase],) if phase in READS[format] else ()


_LEAST_SHARE = 256  # addresses for each scale: with fewer, scales take more than 1/64 of the bytes


def share_of(layout: Layout, block: Block) -> int:
    """The number of addresses for each scale: the largest for which the scales of each row of
    blocks have separate places, in the shard of their codes. 0: there is no such number."""
    share = math.prod(block)
    least = _LEAST_SHARE if any(map(_has_partial_blocks, layout.items)) else share
    while share >= least:
        if _has_places(layout, block, share):
            return share
        share //= 2
    return 0


def _has_places(layout: Layout, block: Block, share: int) -> bool:
    """Whether scales have separate places, in the shard of their codes, with this share."""
    step = share * max(block) // min(block)  # parameters and shards begin at whole squares
    if layout.num_shards > 1 and layout.shard_size % step:
        return False
    next_scale = -(-layout.numel // share)  # the first scale of the parameter behind
    for start, item in sorted(zip(layout.starts, layout.items, strict=True), reverse=True):
        columns = item.shape[-1]
        bands, strips = scale_shape((item.numel // columns, columns), block)
        last_band = start + (bands - 1) * block[0] * columns  # address of the last row of blocks
        shard_end = (last_band // layout.shard_size + 1) * layout.shard_size
        end = min(next_scale, -(-shard_end // share))
        if start % step or block[0] * columns % share or last_band // share + strips > end:
            return False
        next_scale = start // share
    return True


def _has_partial_blocks(item: Item) -> bool:
    return any(size % item.side for size in item.shape[-2:])


def encodes_locally(layout: Layout, format: Format = "mxfp8") -> bool:
    """Whether each rank can encode its own shard: every shard holds whole blocks, or whole matrices
    of stacks whose matrices have one scale each, and all scales have addresses."""
    blocks = FORMATS[format]
    if not all(share_of(layout, block) for block in blocks):
        return False
    for index, item in enumerate(layout.items):
        rows_together = item.shape[-2] if one_scale_each(item, blocks) else side_of(blocks)
        together = rows_together * item.shape[-1]
        if any(layout.piece(index, shard)[0] % together for shard in layout.holders(index)):
            return False
    return True


def sends_codes(layout: Layout, format: Format, persistent: bool) -> bool:
    """Whether codes are gathered. Otherwise bf16 is gathered and encoded afterwards: if shards
    cannot be encoded locally, or if the codes have more bytes."""
    if not encodes_locally(layout, format):
        return False
    planes = planes_of(format, "forward", persistent)
    nbytes = sum(1 + SCALES[block].itemsize / share_of(layout, block) for block in planes)
    return layout.num_shards == 1 or nbytes < torch.bfloat16.itemsize


def staged_because(layout: Layout, format: Format | None, persistent: bool) -> str:
    """The reason why weights in fp8 are gathered as bf16 and encoded afterwards; "" if they are
    not."""
    if format is None or sends_codes(layout, format, persistent):
        return ""
    if encodes_locally(layout, format):
        return "two planes have more bytes"
    if any(one_scale_each(item, FORMATS[format]) for item in layout.items):
        return "a rank's shard cuts an expert, which has one scale"
    return "a rank's shard cuts a block"


def plane_layout(layout: Layout, direct: bool) -> Layout:
    """The layout of the codes: that of main if codes are sent, else one matrix after the other."""
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
    for full_name, module, stored, group in stored_in(model, units):
        products, note = _products(module, stored, group.precision, group.device)
        rows.append(replace(stored, name=full_name, products=products))
        if note:
            notes[f"products: {note}"] = None
        reason = staged_because(group.layout, stored.format, group.persistent)
        if reason:
            staged.setdefault(reason, []).append(rows[-1])
    for reason, weights in staged.items():
        nbytes = sum(math.prod(weight.shape) for weight in weights) * torch.bfloat16.itemsize
        names = ", ".join(weight.name for weight in weights)
        notes[f"gathered as bf16 ({size_text(nbytes)}), because {reason}: {names}"] = None
    return PrecisionReport(tuple(rows), tuple(notes))


def _products(
    module: nn.Module, stored: Stored, precision: Precision, device: torch.device
) -> tuple[str, str | None]:
    """(how a module multiplies by a weight, why the device does not do so in fp8)."""
    if stored.format is None or "backward" not in READS[stored.format]:
        return "", None
    if multiplies_stacks(type(module)) and len(stored.shape) == 2:
        return "decoded", "experts with a parameter each multiply by decoded weights"
    if isinstance(module, NonDynamicallyQuantizableLinear):  # its forward is never called
        return "decoded", "nn.MultiheadAttention multiplies by decoded weights"
    if len(stored.shape) == 3 and precision.recipe.activations is None:
        return "decoded", "experts multiply by decoded weights"
    if precision.products == "native":
        return "mxfp8", None
    if precision.recipe.activations is None:
        return "decoded", None
    gradient = "" if precision.weight_gradient == "fp8" else ", dW in bf16"
    problem = scaled_problem(device)
    if problem is None:
        return f"fp8{gradient}", None
    return f"fp8 by decoding{gradient}", f"{problem}; the same numbers are made by decoding"


def warn_of_decoding(precision: Precision, device: torch.device, mesh: DeviceMesh) -> None:
    """Warn if products are made by decoding and the user may not expect this: the device cannot
    make the fp8 products of the recipe, or the recipe decodes and the device has no fp8 at all."""
    if precision.products in ("emulated", "native") or device.type == "meta":
        return
    problem = scaled_problem(device)
    if problem and (precision.recipe.activations is not None or native_problem(device)):
        text = "Precision(weights=%r): %s; products are made by decoding, no faster than in bf16"
        warn_once(logger, text, precision.weights, problem, mesh=mesh)
