# SPDX-License-Identifier: Apache-2.0
"""Precision: one frozen value that says in which format each of the three buffers is kept, and the
rules by which a weight is stored in fp8. Names and shapes decide; no tensor is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import nn

from shardwise.precision.fp8 import (
    FP8Error,
    Rounding,
    rounding_of,
    shape_problems,
    side_of,
    step_of,
)
from shardwise.precision.fp8_functions import DECODED, Recipe
from shardwise.precision.fp8_tensor import FORMATS, LOOKUPS, Format, Matrices

_NAMES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}
DtypeLike = str | torch.dtype | None
Products = Literal["emulated", "native", "fp8"]
Scales = Literal["fp32", "power_of_two"]
WeightGradient = Literal["fp8", "bf16"]
ShownGradients = Literal["main", "computed"]
_FORMATS = ", ".join(map(repr, get_args(Matrices)))
# The products of each format; the first is the default.
_PRODUCTS: dict[Matrices, tuple[Products, ...]] = {
    "mxfp8": ("emulated", "native"),
    "mxfp8_rowcol": ("emulated", "native"),
    "mxfp8_2d": ("emulated", "native"),
    "fp8_block": ("fp8", "emulated"),
}
# Names of other libraries' recipes, and why there is none of that name.
_ELSEWHERE = {
    "blockwise": "'fp8_block' is that recipe",
    **dict.fromkeys(("nvfp4", "mxfp4"), "the GPUs that the kernels are for multiply no fp4"),
} | dict.fromkeys(
    ("fp8", "float8", "tensorwise", "rowwise", "delayed"),
    "one scale for a whole tensor or row needs all its parts, which ranks hold; choose 'fp8_block'",
)


def as_dtype(value: DtypeLike, field: str) -> torch.dtype | None:
    """The dtype that ``value`` names: ``None``, a torch floating dtype, or a short name."""
    if value is None:
        return None
    dtype = _NAMES.get(value) if isinstance(value, str) else value
    known = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2
    if not known:
        raise ValueError(
            f"Precision({field}={value!r}): use one of {', '.join(_NAMES)} or a torch dtype of "
            f"16, 32 or 64 bits, or None to keep the parameter's own"
            + (f"; or one of {_FORMATS}" if field == "weights" else "")
            + (f". {value!r}: {_ELSEWHERE[value]}" if value in tuple(_ELSEWHERE) else "")
        )
    return dtype


def short_name(dtype: torch.dtype) -> str:
    """bf16, fp32, ...; torch's own name where there is no short one."""
    names = {known: name for name, known in _NAMES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes in which weights are computed with, summed and kept; ``None`` keeps the
    parameter's own dtype, except for ``main``.

    Args:
        weights: dtype of the compute weights that forward and backward read. ``"mxfp8"`` (one plane
            of 1x32 blocks) and ``"mxfp8_2d"`` (32x32) store the weights of linear layers in MXFP8
            where both sides are multiples of 32, and compute in bf16. ``"mxfp8_rowcol"`` has a
            second plane of 32x1 blocks for backward: what hardware with MXFP8 products reads, and
            what ``products="native"`` makes of ``"mxfp8"``. ``"fp8_block"`` (one plane of 128x128
            blocks with fp32 scales; sides of 128 or more that are multiples of 16, of experts
            multiples of 128) multiplies in fp8 too.
            Embeddings are stored so where ``include`` names them, and with ``"fp8_block"`` output
            heads; all other weights stay bf16. ``sw.precision_report(model)`` lists the choice and
            its reasons.
        reduce: dtype of gradients on the wire. ``None``: the dtype of ``weights``.
        main: dtype of the main weights, their gradients and (through them) the optimizer state.
            ``None``: fp32 for a trained parameter that came in bf16 or fp16 (as in Hugging Face
            models), because those dtypes would round small steps away; any other parameter keeps
            its own. The choice is made when the module is wrapped; ``.to(dtype)`` afterwards
            changes main weights too.
        outputs: dtype to which the floating-point outputs of a wrapped module are cast.
        cast_inputs: whether floating-point inputs of a wrapped module are cast to ``weights``.
        include, exclude: shell patterns of the parameters to store in fp8, by their names in the
            module that is wrapped; ``exclude`` wins. ``"*"`` means every linear; an embedding is
            included by any other pattern that matches its name: ``("*", "embedding.weight")``. An
            embedding is kept as one plane of rows, which backward does not gather; an embedding
            that is tied to a linear is stored as the linear is.
        products: how weights in fp8 are multiplied. ``"emulated"`` (MXFP8's default): decoded to
            bf16, on any device. ``"native"``: by hardware with MXFP8 products (compute capability
            10.0), which rounds the activations to MXFP8 too: the numbers differ, so it is never a
            default. ``"fp8"`` (the default of ``"fp8_block"``): activations and gradients are
            rounded to fp8 in 1x128 blocks, and Hopper multiplies them; other devices give the same
            numbers by decoding.
        scales: of ``"fp8_block"``: ``"fp32"``, or ``"power_of_two"``, rounded up.
        weight_gradient: with products in fp8, whether the weight's gradient is one of them
            (``"fp8"``; activations are then saved for backward as codes) or ``"bf16"``.
        gradients: ``"main"``: ``.grad`` has the dtype of the main weight. ``"computed"``: where one
            rank has all of it and one backward brings it, ``.grad`` is the tensor that autograd
            computed, in the dtype of ``weights``: the same values without a copy, in half of the
            memory. For ``sw.optimizer``, whose steps read either; torch's own need ``"main"``.
    """

    weights: DtypeLike = None
    reduce: DtypeLike = None
    main: DtypeLike = None
    outputs: DtypeLike = None
    cast_inputs: bool = True
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    products: Products | None = None
    scales: Scales = "fp32"
    weight_gradient: WeightGradient = "fp8"
    gradients: ShownGradients = "main"

    def __post_init__(self) -> None:
        if not isinstance(self.cast_inputs, bool):  # "no" would be true
            raise ValueError(f"Precision(cast_inputs={self.cast_inputs!r}): True or False")
        known = _PRODUCTS[self.format] if self.format else ("emulated",)
        if self.products not in (None, *known):
            raise ValueError(
                f"Precision(weights={self.weights!r}, products={self.products!r}): choose from "
                + "; ".join(f"{', '.join(map(repr, p))} for {f!r}" for f, p in _PRODUCTS.items())
            )
        choices = {"scales": Scales, "weight_gradient": WeightGradient, "gradients": ShownGradients}
        for field, kinds in choices.items():
            value, default = getattr(self, field), get_args(kinds)[0]
            if value not in get_args(kinds):
                raise ValueError(
                    f"Precision({field}={value!r}): one of {', '.join(get_args(kinds))}"
                )
            if value != default and self.format != "fp8_block" and field != "gradients":
                raise ValueError(
                    f"Precision(weights={self.weights!r}, {field}={value!r}): a choice that only "
                    f"weights='fp8_block' leaves"
                )
        for field in ("include", "exclude"):
            object.__setattr__(self, field, patterns_of(getattr(self, field), field))
        for field in ("reduce", "main", "outputs"):
            object.__setattr__(self, field, as_dtype(getattr(self, field), field))
        if self.format is not None and not self.include:
            raise FP8Error(
                f"include=(): nothing would be stored in {self.format}; leave it out (every "
                f"linear), name weights, or choose weights='bf16'"
            )
        if self.format is None:
            object.__setattr__(self, "weights", as_dtype(self.weights, "weights"))
            if (self.include, self.exclude) != (("*",), ()):
                raise ValueError(
                    f"Precision(weights={self.weights}) with include={self.include}, "
                    f"exclude={self.exclude}: they say which weights are stored in fp8; "
                    f"choose weights from {_FORMATS}, or leave them out"
                )

    @classmethod
    def from_torch(cls, policy: Any) -> Precision:
        """The same policy as a ``torch.distributed.fsdp.MixedPrecisionPolicy``."""
        return cls(
            weights=policy.param_dtype,
            reduce=policy.reduce_dtype,
            outputs=policy.output_dtype,
            cast_inputs=policy.cast_forward_inputs,
        )

    @property
    def format(self) -> Matrices | None:
        """The fp8 format of the weights of linear layers; None where they have a dtype."""
        if self.weights == "mxfp8" and self.products == "native":
            return "mxfp8_rowcol"
        return self.weights if self.weights in get_args(Matrices) else None  # type: ignore[return-value]

    @property
    def rounding(self) -> Rounding:
        """The rounding of the scales of weights in fp8."""
        exact = self.format is not None and self.scales == "fp32"
        return rounding_of(FORMATS[self.format]) if exact and self.format else "rceil"

    @property
    def recipe(self) -> Recipe:
        """How weights in fp8 are multiplied."""
        if self.format is None or (self.products or _PRODUCTS[self.format][0]) != "fp8":
            return DECODED
        return Recipe(self.rounding, self.weight_gradient)

    def names(self, name: str) -> bool:
        """Whether a pattern of ``include`` means this weight in particular."""
        return any(fnmatchcase(name, pattern) for pattern in self.include if pattern != _EVERYTHING)

    def keeps_head(self, name: str) -> bool:
        """Whether an output head of this name stays in a dtype: fp8 products round too much."""
        return self.format is not None and "fp8" in _PRODUCTS[self.format] and not self.names(name)

    def unmatched(self, names: Sequence[str]) -> list[str]:
        """Problems: the patterns that match no parameter, given all names in a model."""
        return [
            f"Precision({field}=...): {pattern!r} matches none of the {len(names)} parameters"
            for field, patterns in (("include", self.include), ("exclude", self.exclude))
            for pattern in patterns
            if names and not any(fnmatchcase(name, pattern) for name in names)
        ]

    @property
    def weights_dtype(self) -> torch.dtype | None:
        """The dtype in which weights are computed with: bf16 for weights in fp8."""
        return torch.bfloat16 if self.format else as_dtype(self.weights, "weights")

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype to which floating-point inputs of a wrapped module are cast."""
        return self.weights_dtype if self.cast_inputs else None

    @property
    def output_dtype(self) -> torch.dtype | None:
        """The dtype to which floating-point outputs of a wrapped module are cast."""
        return as_dtype(self.outputs, "outputs")

    def compute_dtype(self, parameter: torch.dtype) -> torch.dtype:
        """The dtype of a parameter's compute weight; integer parameters are never cast."""
        return _choose(self.weights_dtype, parameter, parameter)

    def main_dtype(self, parameter: torch.dtype, trainable: bool = True) -> torch.dtype:
        """The dtype of a parameter's main weight, and of its gradient as the optimizer sees it."""
        narrow = trainable and parameter.itemsize < torch.float32.itemsize
        return _choose(self.main, torch.float32 if narrow else parameter, parameter)

    def wire_dtype(self, parameter: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter's gradient is reduced."""
        return _choose(self.reduce, self.compute_dtype(parameter), parameter)


def _choose(wanted: DtypeLike, default: torch.dtype, parameter: torch.dtype) -> torch.dtype:
    assert not isinstance(wanted, str)
    if not parameter.is_floating_point:
        return parameter
    return default if wanted is None else wanted


# -------------------------------------------------------------------- which weights are in fp8


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The format of one parameter's compute weight."""

    name: str
    shape: tuple[int, ...]
    format: Format | None  # None: stored in ``dtype``
    dtype: torch.dtype  # the dtype that is computed in
    why: str  # under an fp8 precision: the reason why this weight stays in a dtype
    products: str = ""  # how linear layers multiply by it, once its device is known


def patterns_of(value: Sequence[str], field: str) -> tuple[str, ...]:
    """Shell patterns of whole parameter names; a single string would be read letter by letter."""
    many = isinstance(value, Iterable) and not isinstance(value, str)
    patterns = tuple(value) if many else ()
    if not many or not all(isinstance(each, str) and each for each in patterns):
        raise FP8Error(
            f"{field}={value!r}: give a sequence of patterns, such as ('*.mlp.*', '*.wo.weight')"
        )
    return patterns


HEAD = "an output head"  # why a weight stays in a dtype
TILED = "it is a DTensor of tensor parallelism"


def stores_nothing(format: Matrices | None, rows: Sequence[Stored]) -> list[str]:
    """A problem: ``rows`` are all parameters of a model, and none of them is stored in fp8."""
    if format is None or not rows or any(row.format for row in rows):
        return []
    reasons = [f"'{row.name}' {list(row.shape)}: {row.why}" for row in rows]
    more = f", and {len(reasons) - 4} more" if len(reasons) > 4 else ""
    return [
        f"nothing would be stored in {format} ({'; '.join(reasons[:4])}{more}): both sides of a "
        f"weight are {sides_in(format)}. Change them or the patterns, or train with weights='bf16'"
    ]


def ineligible(
    name: str,
    shape: Sequence[int],
    precision: Precision,
    owners: Sequence[type[nn.Module]],
    head: bool = False,
) -> str | None:
    """The reason why a weight is not stored in fp8; None if it is. ``exclude`` beats ``include``.

    ``head``: whether it makes the model's logits, which fp8 products round too much by default.
    """
    for pattern in precision.exclude:
        if fnmatchcase(name, pattern):
            return f"excluded by {pattern!r}"
    wanted, format = precision.include, precision.format
    assert format is not None, "a precision with weights in fp8"
    if not any(fnmatchcase(name, pattern) for pattern in wanted):
        return f"not in include={wanted}"
    # A norm, for one, neither multiplies by a decoded matrix nor looks rows up.
    others = sorted(
        {owner.__name__ for owner in owners if not _multiplies(owner) and not _looks_up(owner)}
    )
    if others:
        return f"read by {', '.join(others)}, not only by linears"
    if any(map(_looks_up, owners)) and not precision.names(name):
        return f"read by an embedding; include={(*wanted, name)} stores it too"
    if len(shape) <= 2 and name.rpartition(".")[2].startswith("bias"):
        return "a bias" if len(shape) < 2 else "a bias, a row for each expert"
    if head and precision.keeps_head(name):
        return f"{HEAD}; include={(*wanted, name)} stores it too, and multiplies in fp8"
    # Each matrix of a stack [experts, rows, columns] is stored separately.
    stack = len(shape) == 3 and all(map(multiplies_stacks, owners))
    sides, blocks = shape[-2:] if stack else shape, FORMATS[format]
    side = side_of(blocks)
    problems = shape_problems(sides, blocks)
    if not problems and min(sides) < side:
        problems = [f"shape {tuple(shape)}: a side of {min(sides)} is less than a block of {side}"]
    if not problems and stack and any(size % side for size in sides):
        problems = [f"shape {tuple(shape)}: experts have no partial blocks of {side}"]
    return "; ".join(problems) or None


def sides_in(format: Matrices) -> str:
    """The sides that linear layers' weights have in a format, in words."""
    step, side = step_of(FORMATS[format]), side_of(FORMATS[format])
    return f"multiples of {step}" + (f", {side} or more" if step < side else "")


def format_of(owners: Sequence[type[nn.Module]], matrices: Matrices) -> Format:
    """The format of a weight in fp8; one that only embeddings read serves no backward."""
    return LOOKUPS[matrices] if all(map(_looks_up, owners)) else matrices


_EVERYTHING = "*"  # names no weight in particular: embeddings must be named


def _looks_up(owner: type[nn.Module]) -> bool:
    return issubclass(owner, nn.Embedding)


def _multiplies(owner: type[nn.Module]) -> bool:
    return issubclass(owner, nn.Linear) or multiplies_stacks(owner)


def multiplies_stacks(owner: type[nn.Module]) -> bool:
    return getattr(owner, "multiplies_decoded", False)
