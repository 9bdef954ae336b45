# SPDX-License-Identifier: Apache-2.0
"""``Precision``: the dtype or format of the three buffers of a parameter, and the rules that decide
whether a weight is stored in fp8. Only names and shapes decide; no tensor is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, get_args

import torch
from torch import nn

from shardwise.precision.fp8 import (
    BLOCKS,
    Format,
    FP8Error,
    shape_problems,
    side_of,
)
from shardwise.precision.fp8_weight import Products

_NAMES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}
DtypeLike = str | torch.dtype | None
_FORMATS = ", ".join(map(repr, get_args(Format)))
# The products of each format; the first is the default.
_PRODUCTS: dict[Format, tuple[Products, ...]] = {
    "mxfp8": ("emulated", "native"),
    "fp8_block": ("fp8", "emulated"),
}
# Names of recipes in other libraries, and what to use instead or why there is nothing.
_ELSEWHERE = {
    "blockwise": "'fp8_block' is that recipe",
    **dict.fromkeys(("nvfp4", "mxfp4"), "the GPUs that the kernels are for multiply no fp4"),
    **dict.fromkeys(
        ("fp8", "float8", "tensorwise", "rowwise", "delayed"),
        "one scale for a whole tensor or row would need all of it, and each rank holds only a "
        "part; choose 'fp8_block'",
    ),
}


def as_dtype(value: DtypeLike, field: str) -> torch.dtype | None:
    """The torch dtype that ``value`` names. ``value`` is a floating-point dtype, a short name or
    None, which stays None."""
    if value is None:
        return None
    dtype = _NAMES.get(value) if isinstance(value, str) else value
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2:
        return dtype
    message = (
        f"Precision({field}={value!r}): use one of {', '.join(_NAMES)} or a torch dtype of "
        f"16, 32 or 64 bits, or None to keep the parameter's own"
    )
    if field == "weights":
        message += f"; or one of {_FORMATS}"
    if isinstance(value, str) and value in _ELSEWHERE:
        message += f". {value!r}: {_ELSEWHERE[value]}"
    raise ValueError(message)


def short_name(dtype: torch.dtype) -> str:
    """The short name of a dtype (bf16, fp32, ...), or torch's name if there is no short one."""
    names = {known: name for name, known in _NAMES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes and fp8 formats of weights, gradients, inputs and outputs.

    Dtypes are short names (``"bf16"``, ``"fp16"``, ``"fp32"``, ``"fp64"``) or torch dtypes.
    ``None`` keeps the parameter's own dtype, except in ``main``.

    Args:
        weights: the dtype of the compute weights, which forward and backward read, or a format that
            stores the weights of linear layers in fp8:

            - ``"mxfp8"``: 1x32 blocks. For weights whose sides are multiples of 32. Products are
              computed in bf16.
            - ``"fp8_block"``: 128x128 blocks with fp32 scales. For weights whose sides are
              multiples of 128. Products are computed in fp8.

            Embeddings stay bf16, and with ``"fp8_block"`` output heads do unless ``include`` names
            them. ``sw.precision_report(model)`` lists how each weight is stored, and why.
        reduce: the dtype in which gradients are sent and summed. ``None``: that of ``weights``.
        main: the dtype of main weights, of their gradients and thereby of the optimizer state.
            ``None``: fp32 for trained parameters that are bf16 or fp16 when the module is wrapped
            (as in Hugging Face models), because these dtypes would round small steps away. Other
            parameters keep their dtype. A later ``.to(dtype)`` changes main weights too.
        outputs: the dtype to which floating-point outputs of a wrapped module are cast.
        cast_inputs: whether floating-point inputs of a wrapped module are cast to ``weights``.
        include, exclude: shell patterns of the parameters to store in fp8, matched with their names
            in the wrapped module. ``exclude`` wins. ``"*"`` means every linear.
        products: how weights in fp8 are multiplied:

            - ``"emulated"`` (default of MXFP8): weights are decoded to bf16, on any device.
            - ``"native"``: by hardware with MXFP8 products (compute capability 10.0). Activations
              are rounded to MXFP8 too, so the numbers differ. Therefore it is never a default.
              Backward reads 32x1 blocks, and gathers are bf16, because both have more bytes.
            - ``"fp8"`` (default of ``"fp8_block"``): activations and gradients are rounded to fp8
              in 1x128 blocks, and Hopper multiplies them. Other devices decode, and get the same
              numbers.
    """

    weights: DtypeLike = None
    reduce: DtypeLike = None
    main: DtypeLike = None
    outputs: DtypeLike = None
    cast_inputs: bool = True
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    products: Products | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.cast_inputs, bool):  # "no" would be true
            raise ValueError(f"Precision(cast_inputs={self.cast_inputs!r}): True or False")
        allowed = _PRODUCTS[self.format] if self.format else ("emulated",)
        if self.products not in (None, *allowed):
            raise ValueError(
                f"Precision(weights={self.weights!r}, products={self.products!r}): choose from "
                + "; ".join(f"{', '.join(map(repr, p))} for {f!r}" for f, p in _PRODUCTS.items())
            )
        for field in ("include", "exclude"):
            object.__setattr__(self, field, _patterns_of(getattr(self, field), field))
        for field in ("reduce", "main", "outputs"):
            object.__setattr__(self, field, as_dtype(getattr(self, field), field))
        if self.format is not None and not self.include:
            raise FP8Error(
                f"include=(): nothing would be stored in {self.format}; leave include out (every "
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
    def format(self) -> Format | None:
        """The fp8 format of the weights of linear layers; None if they have a dtype."""
        return self.weights if self.weights in get_args(Format) else None  # type: ignore[return-value]

    @property
    def multiplied(self) -> Products:
        """How weights in fp8 are multiplied."""
        return self.products or (_PRODUCTS[self.format][0] if self.format else "emulated")

    def names(self, name: str) -> bool:
        """Whether a pattern of ``include`` other than ``"*"`` matches this name."""
        return any(fnmatchcase(name, pattern) for pattern in self.include if pattern != "*")

    def keeps_head(self, name: str) -> bool:
        """Whether an output head of this name stays in a dtype: fp8 products round too much."""
        return self.format is not None and "fp8" in _PRODUCTS[self.format] and not self.names(name)

    def unmatched(self, names: Sequence[str]) -> list[str]:
        """One problem for each pattern that matches none of ``names``, all names in a model."""
        return [
            f"Precision({field}=...): {pattern!r} matches none of the {len(names)} parameters"
            for field, patterns in (("include", self.include), ("exclude", self.exclude))
            for pattern in patterns
            if names and not any(fnmatchcase(name, pattern) for name in names)
        ]

    @property
    def weights_dtype(self) -> torch.dtype | None:
        """The dtype that weights have in computations: bf16 for weights in fp8."""
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
    """How one parameter's compute weight is stored."""

    name: str
    shape: tuple[int, ...]
    format: Format | None  # None: stored in ``dtype``
    dtype: torch.dtype  # the dtype of the weight in computations
    why: str  # under an fp8 precision: the reason why this weight stays in a dtype
    products: str = ""  # how linear layers multiply by the weight, once its device is known


def _patterns_of(value: Sequence[str], field: str) -> tuple[str, ...]:
    """Shell patterns of whole parameter names. A single string is refused: its letters would be
    taken for patterns."""
    many = isinstance(value, Iterable) and not isinstance(value, str)
    patterns = tuple(value) if many else ()
    if not many or not all(isinstance(each, str) and each for each in patterns):
        raise FP8Error(
            f"{field}={value!r}: give a sequence of patterns, such as ('*.mlp.*', '*.wo.weight')"
        )
    return patterns


def stores_nothing(format: Format | None, rows: Sequence[Stored]) -> list[str]:
    """A problem if none of ``rows``, all parameters of a model, is stored in fp8."""
    if format is None or not rows or any(row.format for row in rows):
        return []
    reasons = [f"'{row.name}' {list(row.shape)}: {row.why}" for row in rows]
    more = f", and {len(reasons) - 4} more" if len(reasons) > 4 else ""
    return [
        f"nothing would be stored in {format} ({'; '.join(reasons[:4])}{more}): both sides of a "
        f"weight must be {sides_in(format)}. Change the sides or the patterns, or train with "
        f"weights='bf16'"
    ]


def ineligible(
    name: str,
    shape: Sequence[int],
    precision: Precision,
    owners: Sequence[type[nn.Module]],
    head: bool = False,
) -> str | None:
    """The reason why a weight is not stored in fp8; None if it is.

    ``owners``: the classes of the modules that register the weight. ``head``: whether the weight
    makes the model's logits, which fp8 products round too much by default.
    """
    for pattern in precision.exclude:
        if fnmatchcase(name, pattern):
            return f"excluded by {pattern!r}"
    include, format = precision.include, precision.format
    assert format is not None, "a precision with weights in fp8"
    if not any(fnmatchcase(name, pattern) for pattern in include):
        return f"not in include={include}"
    # Other modules, such as norms and embeddings, do not multiply by a matrix.
    others = sorted({owner.__name__ for owner in owners if not _multiplies(owner)})
    if others:
        return f"read by {', '.join(others)}, not only by linears"
    if len(shape) <= 2 and name.rpartition(".")[2].startswith("bias"):
        return "a bias" if len(shape) < 2 else "a bias, a row for each expert"
    if head and precision.keeps_head(name):
        return f"an output head; include={(*include, name)} stores it too, and multiplies in fp8"
    # Each matrix of a stack [experts, rows, columns] is stored separately.
    stack = len(shape) == 3 and all(map(multiplies_stacks, owners))
    sides = shape[-2:] if stack else shape
    return "; ".join(shape_problems(sides, [BLOCKS[format]])) or None


def sides_in(format: Format) -> str:
    """The sides that weights of linear layers must have in a format, in words."""
    return f"multiples of {side_of([BLOCKS[format]])}"


def _multiplies(owner: type[nn.Module]) -> bool:
    return issubclass(owner, nn.Linear) or multiplies_stacks(owner)


def multiplies_stacks(owner: type[nn.Module]) -> bool:
    return getattr(owner, "multiplies_decoded", False)
