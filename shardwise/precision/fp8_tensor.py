# SPDX-License-Identifier: Apache-2.0
"""FP8Tensor: a matrix and the planes that hold it, to print, save, load and decode.

An FP8Tensor is no ``torch.Tensor``, so that no torch function computes with codes as if they were
numbers. To recognise one, use ``isinstance(value, FP8Tensor)``.
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

# Of weights that are multiplied, both ways. "mxfp8_rowcol" is "mxfp8" for products of hardware,
# which sum over what a block lies along.
Matrices = Literal["mxfp8", "mxfp8_rowcol", "mxfp8_2d", "fp8_block"]
Lookups = Literal["mxfp8_rows", "fp8_block_rows"]  # of weights whose rows are looked up
Format = Literal[Matrices, Lookups]
Reads = Literal["forward", "backward"]

FORMATS: dict[Format, tuple[Block, ...]] = {
    "mxfp8": (ROW,),
    "mxfp8_rowcol": (ROW, COLUMN),
    "mxfp8_2d": (SQUARE,),
    "mxfp8_rows": (ROW,),
    "fp8_block": (SQUARE_128,),
    "fp8_block_rows": (SQUARE_128,),
}
LOOKUPS: dict[Matrices, Format] = {
    "mxfp8": "mxfp8_rows",
    "mxfp8_rowcol": "mxfp8_rows",
    "mxfp8_2d": "mxfp8_rows",
    "fp8_block": "fp8_block_rows",
}
# The plane that each phase reads. The gradient of a lookup needs no weight.
READS: dict[Format, dict[Reads, Block]] = {
    "mxfp8": {"forward": ROW, "backward": ROW},
    "mxfp8_rowcol": {"forward": ROW, "backward": COLUMN},
    "mxfp8_2d": {"forward": SQUARE, "backward": SQUARE},
    "mxfp8_rows": {"forward": ROW},
    "fp8_block": {"forward": SQUARE_128, "backward": SQUARE_128},
    "fp8_block_rows": {"forward": SQUARE_128},
}
NAMES: dict[Block, str] = {ROW: "row", COLUMN: "column", SQUARE: "square", SQUARE_128: "block"}


class FP8Tensor:
    """[rows, columns] of bf16 values as fp8 planes: row and column, or one of squares or blocks.

    ``planes`` may hold only the plane that a phase reads (a row plane in forward). Planes are never
    copied: a plane that is a view of gathered memory changes with that memory.
    """

    __slots__ = ("__weakref__", "planes")

    planes: dict[Block, Plane]

    def __init__(self, *planes: Plane) -> None:
        found = {plane.block: plane for plane in planes}
        shapes = {tuple(plane.codes.shape) for plane in planes}
        devices = {str(plane.codes.device) for plane in planes}
        problems = []
        if not planes:
            problems.append("no planes: give at least one")
        if len(found) != len(planes):
            problems.append(f"two planes in the same blocks: {[p.block for p in planes]}")
        if found and not any(set(found) <= set(blocks) for blocks in FORMATS.values()):
            both = " and of ".join(sorted({_format_of([block]) for block in found}))
            problems.append(f"planes of {both}: a matrix is stored in one of them")
        for what, values in (("shapes", shapes), ("devices", devices)):
            if len(values) > 1:
                problems.append(f"planes of {what} {sorted(values)}: they hold one matrix")
        if problems:
            raise FP8Error("; ".join(problems))
        self.planes = found

    @classmethod
    def encode(
        cls, x: Tensor, format: Format = "mxfp8", *, rounding: Rounding | None = None
    ) -> FP8Tensor:
        """Encode all planes of ``x`` [rows, columns], rounded to bf16 first."""
        if not isinstance(x, Tensor):
            raise FP8Error(f"a {type(x).__name__} to encode: give a tensor [rows, columns]")
        if format not in tuple(FORMATS):  # a tuple: ``format`` may be unhashable, such as a list
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
        """The format of matrices that holds these planes."""
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
                f"missing plane first, it can't be made from another"
            )
        return self.planes[block]

    def joined(self, others: Sequence[FP8Tensor], phase: Reads) -> Plane | None:
        """One plane of this matrix and ``others`` below it; None where their memory does not lie
        so."""
        return None

    # ------------------------------------------------------------------ values

    def dequantise(
        self, phase: Reads = "forward", *, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """The values that ``phase`` computes with."""
        return decode(self.plane(phase), dtype=dtype)

    def to(self, device: torch.device | str) -> FP8Tensor:
        return FP8Tensor(
            *(
                Plane(
                    codes=plane.codes.to(device), scales=plane.scales.to(device), block=plane.block
                )
                for plane in self.planes.values()
            )
        )

    def __repr__(self) -> str:
        names = "+".join(NAMES[block] for block in self.planes) or "no plane here"
        each = self.nbytes / max(1, self.shape.numel())
        head = (
            f"FP8Tensor({'x'.join(map(str, self.shape))}, {self.format}, {names}, "
            f"{each:.3f} bytes an element, device='{self.device}'"
        )
        if not self.planes:  # a gathered weight after its release
            return f"{head})"
        plane = self._any
        if plane.codes.is_meta or plane.codes.untyped_storage().nbytes() < plane.codes.nbytes:
            return f"{head}, no values in memory)"
        return f"{head},\n{decode(plane).view(self.shape)})"  # a stack as [experts, rows, columns]

    # ------------------------------------------------------------------ state dicts

    def state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """Tensors by name (``row.codes``, ``row.scales``, ...), for safetensors or torch."""
        return {
            f"{prefix}{NAMES[block]}.{part}": tensor
            for block, plane in self.planes.items()
            for part, tensor in (("codes", plane.codes), ("scales", plane.scales))
        }

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, Tensor], prefix: str = "") -> FP8Tensor:
        """The tensor of a :meth:`state_dict`; names without ``prefix`` are ignored."""
        if not isinstance(tensors, Mapping):
            raise FP8Error(f"a {type(tensors).__name__} to load: give tensors by name, a dict")
        every = {name: t for name, t in tensors.items() if name.startswith(prefix)}
        parts = {
            block: (f"{prefix}{name}.codes", f"{prefix}{name}.scales")
            for block, name in NAMES.items()
        }
        held = {
            block: names for block, names in parts.items() if not every.keys().isdisjoint(names)
        }
        known = [name for names in held.values() for name in names]
        problems = [f"{name} is missing" for name in known if name not in every]
        problems += [f"{name}: no part of a plane" for name in every if name not in known]
        problems += [
            f"{name} is a {type(every[name]).__name__}: give the uint8 tensor of state_dict()"
            for name in known
            if not isinstance(every.get(name, torch.empty(0)), Tensor)
        ]
        if problems or not held:
            found = ", ".join(sorted(tensors)[:5]) or "nothing there"
            raise FP8Error("; ".join(sorted(problems)) or f"no planes under {prefix!r}: {found}")
        return cls(
            *(
                Plane(codes=every[codes], scales=every[scales], block=block)
                for block, (codes, scales) in held.items()
            )
        )

    def __getstate__(self) -> dict[str, Tensor]:
        return self.state_dict()

    def __setstate__(self, state: Mapping[str, Tensor]) -> None:
        self.planes = FP8Tensor.from_state_dict(state).planes


def _format_of(blocks: Collection[Block]) -> Format:
    """The first format of matrices that has all of these planes."""
    known = (each for each in get_args(Matrices) if set(blocks) <= set(FORMATS[each]))
    return next(known, "fp8_block")


def restored(tensors: Mapping[str, Tensor]) -> FP8Tensor:
    """Unpickle a subclass that can't be loaded itself; pickle finds this function by its name."""
    return FP8Tensor.from_state_dict(tensors)


# So that torch.load(weights_only=True) accepts both; loaded planes are checked like any others.
torch.serialization.add_safe_globals([FP8Tensor, restored])
