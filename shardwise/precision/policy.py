# SPDX-License-Identifier: Apache-2.0
"""Precision: one frozen value that says in which format each of the three buffers lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch

from shardwise.precision.mxfp8_choice import patterns_of
from shardwise.precision.mxfp8_tensor import Matrices

_NAMES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}
DtypeLike = str | torch.dtype | None
Products = Literal["emulated", "native"]


def as_dtype(value: DtypeLike, field: str) -> torch.dtype | None:
    """``None``, a torch floating dtype, or one of the short names."""
    if value is None:
        return None
    dtype = _NAMES.get(value) if isinstance(value, str) else value
    known = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2
    if not known:
        raise ValueError(
            f"Precision({field}={value!r}): use one of {', '.join(_NAMES)} or a torch dtype of "
            f"16, 32 or 64 bits, or None to keep what the parameter has"
            + ("; or 'mxfp8' or 'mxfp8_2d'" if field == "weights" else "")
        )
    return dtype


def short_name(dtype: torch.dtype) -> str:
    """bf16, fp32, ...; torch's own name where there is none."""
    names = {known: name for name, known in _NAMES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What is computed, summed and kept in which dtype; ``None`` keeps the parameter's own, except
    for ``main``.

    Args:
        weights: the compute weights that forward and backward read. ``"mxfp8"`` (a plane of 1x32
            blocks for each direction) and ``"mxfp8_2d"`` (one plane of 32x32 blocks) store those of
            linear layers so, where both sides are multiples of 32, and compute in bf16; an
            embedding too where ``include`` names it; whatever else there is stays bf16.
            ``sw.precision_report(model)`` lists which, and why.
        reduce: gradients on the wire. ``None``: the dtype of ``weights``.
        main: the main weights, their gradients and (by way of them) the optimizer state. ``None``:
            fp32 for a parameter that is trained and came in bf16 or fp16 (as Hugging Face models
            do), whose steps those dtypes would round away; any other keeps its own. Decided when
            the module is wrapped; ``.to(dtype)`` afterwards changes main weights too.
        outputs: floating-point outputs of a wrapped module are cast to it.
        cast_inputs: whether floating-point inputs of a wrapped module are cast to ``weights``.
        include, exclude: shell patterns of the parameters that MXFP8 is for, by their names in the
            module that is wrapped; ``exclude`` wins. ``"*"`` is every linear; an embedding is
            meant by any other pattern that it matches: ``("*", "embedding.weight")``. It is kept as
            one plane of rows, which backward does not gather; tied to a linear, as that one is.
        products: of MXFP8 weights. ``"emulated"``: exact, decoded to bf16, on any device.
            ``"native"``: by hardware that has them (compute capability 10.0), which rounds the
            other operand to MXFP8 too: other numbers, so never chosen unasked.
    """

    weights: DtypeLike = None
    reduce: DtypeLike = None
    main: DtypeLike = None
    outputs: DtypeLike = None
    cast_inputs: bool = True
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    products: Products = "emulated"

    def __post_init__(self) -> None:
        if self.products not in get_args(Products) or (
            self.products == "native" and self.format is None
        ):
            raise ValueError(
                f"Precision(weights={self.weights!r}, products={self.products!r}): 'emulated', or "
                f"'native' for weights in 'mxfp8' or 'mxfp8_2d'"
            )
        for field in ("include", "exclude"):
            object.__setattr__(self, field, patterns_of(getattr(self, field), field))
        for field in ("reduce", "main", "outputs"):
            object.__setattr__(self, field, as_dtype(getattr(self, field), field))
        if self.format is None:
            object.__setattr__(self, "weights", as_dtype(self.weights, "weights"))
            if (self.include, self.exclude) != (("*",), ()):
                raise ValueError(
                    f"Precision(weights={self.weights}) with include={self.include}, "
                    f"exclude={self.exclude}: they say which weights are stored in MXFP8; "
                    f"choose weights='mxfp8' or 'mxfp8_2d', or leave them out"
                )

    @classmethod
    def from_torch(cls, policy: Any) -> Precision:
        """From ``torch.distributed.fsdp.MixedPrecisionPolicy``."""
        return cls(
            weights=policy.param_dtype,
            reduce=policy.reduce_dtype,
            outputs=policy.output_dtype,
            cast_inputs=policy.cast_forward_inputs,
        )

    @property
    def format(self) -> Matrices | None:
        """How the weights of linear layers are stored, where that is no dtype."""
        return self.weights if self.weights in get_args(Matrices) else None  # type: ignore[return-value]

    def unmatched(self, names: Sequence[str]) -> list[str]:
        """Problems, of all names in a model: a pattern that matches none was meant for some."""
        return [
            f"Precision({field}=...): {pattern!r} matches none of the {len(names)} parameters"
            for field, patterns in (("include", self.include), ("exclude", self.exclude))
            for pattern in patterns
            if names and not any(fnmatchcase(name, pattern) for name in names)
        ]

    @property
    def weights_dtype(self) -> torch.dtype | None:
        """In which they are computed with: bf16 for those in MXFP8."""
        return torch.bfloat16 if self.format else as_dtype(self.weights, "weights")

    @property
    def input_dtype(self) -> torch.dtype | None:
        """To which floating-point inputs of a wrapped module are cast."""
        return self.weights_dtype if self.cast_inputs else None

    @property
    def output_dtype(self) -> torch.dtype | None:
        """To which its floating-point outputs are."""
        return as_dtype(self.outputs, "outputs")

    def compute_dtype(self, parameter: torch.dtype) -> torch.dtype:
        """Of the compute weight of a parameter; integer parameters are never cast."""
        return _choose(self.weights_dtype, parameter, parameter)

    def main_dtype(self, parameter: torch.dtype, trainable: bool = True) -> torch.dtype:
        """Of the main weight of a parameter, and of its gradient as the optimizer sees it."""
        narrow = trainable and parameter.itemsize < torch.float32.itemsize
        return _choose(self.main, torch.float32 if narrow else parameter, parameter)

    def wire_dtype(self, parameter: torch.dtype) -> torch.dtype:
        """Of the gradient while it is reduced."""
        return _choose(self.reduce, self.compute_dtype(parameter), parameter)


def _choose(wanted: DtypeLike, default: torch.dtype, parameter: torch.dtype) -> torch.dtype:
    assert not isinstance(wanted, str)
    if not parameter.is_floating_point:
        return parameter
    return default if wanted is None else wanted
