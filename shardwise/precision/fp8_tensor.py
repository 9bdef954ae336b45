# SPDX-License-Identifier: Apache-2.0
"""``FP8Tensor``: a matrix in fp8 planes, to print, save, load and decode.

An FP8Tensor is not a ``torch.Tensor``, so no torch function can compute with codes as if they were
numbers. To recognise an FP8Tensor, use ``isinstance(value, FP8Tensor)``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from shardwise.precision.fp8 import (
    COLUMN,
    ROW,
    SQUARE,
    SQUARE_128,
    Block,
    FP8Error,
    Plane,
    Rounding,
    decode,
    encode,
)

# Formats of weights that are multiplied in forward and backward. "mxfp8_rowcol" is "mxfp8" for
# products by hardware, which need blocks along the dimension that is summed over.
Matrices = Literal["mxfp8", "mxfp8_rowcol", "mxfp8_2d", "fp8_block"]
Lookups = Literal["mxfp8_rows", "fp8_block_rows"]  # formats of weights whose rows are looked up
Format = Literal[Matrices, Lookups]
Reads = Literal["forward", "backward"]

# The plane that each phase reads. The backward of a lookup reads no weight.
READS: dict[Format, dict[Reads, Block]] = {
    "mxfp8": {"forward": ROW, "backward": ROW},
    "mxfp8_rowcol": {"forward": ROW, "backward": COLUMN},
    "mxfp8_2d": {"forward": SQUARE, "backward": SQUARE},
    "mxfp8_rows": {"forward": ROW},
    "fp8_block": {"forward": SQUARE_128, "backward": SQUARE_128},
    "fp8_block_rows": {"forward": SQUARE_128},
}
# The planes of each format.
FORMATS: dict[Format, tuple[Block, ...]] = {
    format: tuple(dict.fromkeys(blocks.values())) for format, blocks in READS.items()
}
# The format of embeddings beside linear layers of each format.
LOOKUPS: dict[Matrices, Format] = {
    "mxfp8": "mxfp8_rows",
    "mxfp8_rowcol": "mxfp8_rows",
    "mxfp8_2d": "mxfp8_rows",
    "fp8_block": "fp8_block_rows",
}
NAMES: dict[Block, str] = {ROW: "row", COLUMN: "column", SQUARE: "square", SQUARE_128: "block"}


class FP8Tensor:
    """A matrix [rows, columns] of bf16 values as fp8 planes: a row and a column plane, or one plane
    of squares or blocks.

    ``planes`` may hold only the plane that one phase reads (a row plane in forward). Planes are not
    copied: a plane that is a view of gathered memory changes with that memory.
    """

    __slots__ = ("__weakref__", "planes")

    planes: dict[Block, Plane]

    def __init__(self, *planes: Plane) -> None:
        by_block = {plane.block: plane for plane in planes}
        shapes = {tuple(plane.codes.shape) for plane in planes}
        devices = {str(plane.codes.device) for plane in planes}
        problems = []
        if not planes:
            problems.append("no planes: give at least one plane")
        if len(by_block) != len(planes):
            problems.append(f"two planes in the same blocks: {[p.block for p in planes]}")
        if by_block and not any(set(by_block) <= set(blocks) for blocks in FORMATS.values()):
            formats = " and of ".join(sorted({_format_of([block]) for block in by_block}))
            problems.append(f"planes of {formats}: a matrix is stored in one format")
        for noun, values in (("shapes", shapes), ("devices", devices)):
            if len(values) > 1:
                problems.append(f"planes of {noun} {sorted(values)}: all planes hold one matrix")
        if problems:
            raise FP8Error("; ".join(problems))
        self.planes = by_block

    @classmethod
    def encode(
        cls, x: Tensor, format: Format = "mxfp8", *, rounding: Rounding | None = None
    ) -> FP8Tensor:
        """Encode ``x`` [rows, columns], rounded to bf16 first, into all planes of the format."""
        if not isinstance(x, Tensor):
            raise FP8Error(f"a {type(x).__name__} to encode: give a tensor [rows, columns]")
        if format not in tuple(FORMATS):  # a tuple, because ``format`` may be an unhashable list
            raise FP8Error(f"format {format!r}: choose from {', '.join(FORMATS)}")
        return cls(*encode(x, FORMATS[format], rounding=rounding))

    # ------------------------------------------------------------------ properties

    @property
    def _any(self) -> Plane:
        return next(iter(self.planes.values()))

    @property
    def shape(self) -> torch.Size:
        return self._any.codes.shape

    @property
    def device(self) -> torch.device:
        return self._any.codes.device

    @property
    def format(self) -> Format:
        """The format that has these planes."""
        return _format_of(self.planes)

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes.values())

    def plane(self, phase: Reads) -> Plane:
        """The plane that ``phase`` reads."""
        if phase not in get_args(Reads):
            raise FP8Error(f"phase {phase!r}: choose from {', '.join(get_args(Reads))}")
        block = READS[_format_of(self.planes)][phase]
        if block not in self.planes:
            raise FP8Error(
                f"the {phase} of a matrix of shape {tuple(self.shape)} reads its {NAMES[block]} "
                f"plane, but only {', '.join(NAMES[b] for b in self.planes)} is here: gather the "
                f"missing plane first, because it cannot be made from another plane"
            )
        return self.planes[block]

    def joined(self, others: Sequence[FP8Tensor], phase: Reads) -> Plane | None:
        """One plane of this matrix with ``others`` below it; None if they do not lie in memory
        like this."""
        return None

    # ------------------------------------------------------------------ values

    def dequantise(
        self, phase: Reads = "forward", *, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """The values that ``phase`` computes with, decoded to ``dtype``."""
        return decode(self.plane(phase), dtype=dtype)

    def to(self, device: torch.device | str) -> FP8Tensor:
        """The same matrix on ``device``."""
        planes = [
            Plane(codes=p.codes.to(device), scales=p.scales.to(device), block=p.block)
            for p in self.planes.values()
        ]
        return FP8Tensor(*planes)

    def __repr__(self) -> str:
        names = "+".join(NAMES[block] for block in self.planes) or "no plane here"
        bytes_each = self.nbytes / max(1, self.shape.numel())
        head = (
            f"FP8Tensor({'x'.join(map(str, self.shape))}, {self.format}, {names}, "
            f"{bytes_each:.3f} bytes an element, device='{self.device}'"
        )
        if not self.planes:  # a weight whose planes are released
            return f"{head})"
        plane = self._any
        if plane.codes.is_meta or plane.codes.untyped_storage().nbytes() < plane.codes.nbytes:
            return f"{head}, no values in memory)"
        return f"{head},\n{decode(plane).view(self.shape)})"  # a stack as [experts, rows, columns]

    # ------------------------------------------------------------------ state dicts

    def state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """The tensors by name (``row.codes``, ``row.scales``, ...), for safetensors or torch."""
        return {
            f"{prefix}{NAMES[block]}.{part}": tensor
            for block, plane in self.planes.items()
            for part, tensor in (("codes", plane.codes), ("scales", plane.scales))
        }

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, Tensor], prefix: str = "") -> FP8Tensor:
        """The matrix of a :meth:`state_dict`. Names without ``prefix`` are ignored."""
        if not isinstance(tensors, Mapping):
            raise FP8Error(f"a {type(tensors).__name__} to load: give tensors by name, a dict")
        given = {name: value for name, value in tensors.items() if name.startswith(prefix)}
        names: dict[Block, tuple[str, str]] = {}  # (codes, scales) of the planes that are there
        for block, name in NAMES.items():
            pair = f"{prefix}{name}.codes", f"{prefix}{name}.scales"
            if not given.keys().isdisjoint(pair):
                names[block] = pair
        expected = [name for pair in names.values() for name in pair]
        problems = [f"{name}: no part of a plane" for name in given if name not in expected]
        for name in expected:
            if name not in given:
                problems.append(f"{name} is missing")
            elif not isinstance(given[name], Tensor):
                problems.append(
                    f"{name} is a {type(given[name]).__name__}: give the uint8 tensor of "
                    f"state_dict()"
                )
        if problems:
            raise FP8Error("; ".join(sorted(problems)))
        if not names:
            first_names = ", ".join(sorted(tensors)[:5]) or "the dict is empty"
            raise FP8Error(f"no planes under {prefix!r}: {first_names}")
        planes = [
            Plane(codes=given[codes], scales=given[scales], block=block)
            for block, (codes, scales) in names.items()
        ]
        return cls(*planes)

    def __getstate__(self) -> dict[str, Tensor]:
        return self.state_dict()

    def __setstate__(self, state: Mapping[str, Tensor]) -> None:
        self.planes = FP8Tensor.from_state_dict(state).planes


def _format_of(blocks: Collection[Block]) -> Format:
    """The first format of matrices that has all of these planes."""
    for format in get_args(Matrices):
        if set(blocks) <= set(FORMATS[format]):
            return format  # type: ignore[no-any-return]
    return "fp8_block"


def restored(tensors: Mapping[str, Tensor]) -> FP8Tensor:
    """Unpickle a weight of a group as an ``FP8Tensor``. Pickle finds this function by its name."""
    return FP8Tensor.from_state_dict(tensors)


# So that torch.load(weights_only=True) accepts both. Loaded planes are checked like all others.
torch.serialization.add_safe_globals([FP8Tensor, restored])
