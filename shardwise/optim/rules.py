# SPDX-License-Identifier: Apache-2.0
r"""Rule: what an optimizer of whole matrices computes, and where.

    before     element by element, on the rows that lie here: momentum
    compute    whole matrices of one shape, as a batch, on the rank that owns them
    after      element by element, on the rows that lie here: scale, weight decay, write

    rank 0   | A 0-3 | B 0-1 |   --\                /--   rows of A and B
    rank 1   | B 2-3 | C 0-3 |   --->  owner: batch ---->   rows of B and C

``before`` and ``after`` get lists of pieces, so that one kernel can serve them all. The states that
``before`` reads are stored like the gradient. The states that ``compute`` reads lie whole with the
owner. A rule is a frozen dataclass of its settings. A parameter group of the optimizer holds the
settings under the same names, and a step reads them there, because schedulers change them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from shardwise.core.tensor import ShardedTensor
from shardwise.kernels.polynomials import DEFAULT, cost, polynomial_of
from shardwise.kernels.tables import Matrices
from shardwise.optim.blocks import Blocks
from shardwise.optim.routing import Route
from shardwise.optim.split import Split
from shardwise.optim.storage import sharding_of

State = dict[str, Tensor]
Template = dict[str, tuple[tuple[int, ...], torch.dtype]]  # by state: its shape and dtype


class Piece(NamedTuple):
    """Where a list entry of ``before`` or ``after`` lies: elements [begin, end) of a parameter."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a rule is told in a step, beside tensors."""

    settings: Mapping[str, Any]  # the parameter group
    age: int = 0  # ``compute``: the steps that these matrices have had
    narrow: bool = False  # ``compute``: return fp16, without the scale
    scale: float = 1.0  # ``after``: the factor that the updates lack
    clip: Tensor | None = None  # see ``Clip.on_device``; with kernels only
    by_kernels: bool = False
    pieces: Callable[[], Sequence[Piece]] = tuple  # ``before``, ``after``: where each tensor lies


class Rule:
    """The base of rules. What is not overridden leaves gradients and updates as they are."""

    kind: ClassVar[str]
    row_states: ClassVar[tuple[str, ...]] = ()  # zeros at first, stored like the gradient
    has_kernels: ClassVar[bool] = False  # whether every hook can run by kernels, which also clip
    has_whole_states: ClassVar[bool] = False

    @property
    def exchange(self) -> Any:
        """Parameters of rules with equal values are exchanged together."""
        return type(self)

    def keeps(self, *hooks: str) -> bool:
        """Whether these hooks are those of the class that defines :meth:`whole`, which then may
        stand for them; else a subclass has changed one."""
        made = next(kind for kind in type(self).__mro__ if "whole" in vars(kind))
        return all(getattr(type(self), hook) is getattr(made, hook) for hook in hooks)

    def whole_states(self, rows: int, cols: int, settings: Mapping[str, Any]) -> Template:
        """The states of one matrix [rows, cols] that lie with its owner."""
        return {}

    def cost(self, rows: int, cols: int, settings: Mapping[str, Any]) -> int:
        """The load of a matrix when owners are balanced."""
        return cost(rows, cols, polynomial_of(settings.get("preset", DEFAULT)))

    def factor(self, rows: int, cols: int, settings: Mapping[str, Any]) -> float:
        """The factor on the update of a whole matrix [rows, cols]."""
        return 1.0

    def before(
        self,
        gradients: list[Tensor],
        states: dict[str, list[Tensor]],
        places: list[Tensor],
        step: Step,
    ) -> None:
        """Write the values to compute from to ``places``, in fp32. Gradients are only read."""
        torch._foreach_copy_(places, gradients)

    def compute(self, batch: Tensor, state: State, step: Step) -> Tensor:
        """The updates of whole matrices [n, rows, cols], in new memory. ``state`` is empty exactly
        in the first step of these matrices, and is written in place."""
        raise NotImplementedError

    def compute_blocks(self, batch: Tensor, blocks: Blocks, step: Step) -> Tensor:
        """:meth:`compute` from this rank's blocks of rows or columns, which do not move; for
        ``tensor_parallel="distributed"``."""
        raise NotImplementedError

    def after(self, weights: list[Tensor], updates: list[Tensor], step: Step) -> None:
        """Subtract the updates from the weights, in place."""
        settings = step.settings
        if settings["weight_decay"]:
            torch._foreach_mul_(weights, 1 - float(settings["lr"]) * settings["weight_decay"])
        pairs = zip(updates, weights, strict=True)
        torch._foreach_sub_(weights, [update.to(weight.dtype) for update, weight in pairs])

    def whole(
        self,
        gradients: Matrices,
        states: dict[str, Matrices],
        weights: Matrices,
        most_bytes: int,
        step: Step,
    ) -> None:
        """All three hooks for matrices that this rank owns and stores whole, by kernels, as many at
        a time as ``most_bytes`` of memory allow."""
        raise NotImplementedError


@dataclass(eq=False)
class MatrixParameter:
    """One parameter of a matrix optimizer: a matrix, or several."""

    name: str
    parameter: Tensor
    route: Route
    group: dict[str, Any]  # the parameter group of the optimizer
    rule: Rule

    @cached_property
    def split_here(self) -> tuple[Split | None, bool]:
        """The split of this rank's block (without tensor parallelism, of the parameter), and
        whether the matrices in it are whole."""
        sharding, split = sharding_of(self.parameter), self.route.split
        if split is None or not any(sharding.blocked):
            return split, not any(sharding.blocked)
        count, shape = sharding.count(sharding.blocked), tuple(self.parameter.shape)
        within = split.within(shape, sharding.block_dim, count, sharding.block)
        assert within is not None, "refused at construction"
        return within

    @property
    def pinned(self) -> bool:
        """Whether the layout stores every matrix on one rank on purpose."""
        if not isinstance(self.parameter, ShardedTensor):
            return False
        grain = self.parameter.cut.layout.items[self.parameter.cut.index].grain
        # A stack [n, rows, cols] is cut between its matrices.
        stacked = len(self.route.shape_of(self.parameter.shape)) == 3
        return grain.kind == "tensor" and (grain.count == 1 or stacked)


# ------------------------------------------------------------------------------ settings

# By name: the numbers are 0 or more and below this bound; how many numbers there are.
RANGES = {
    "lr": (math.inf, 1),
    "weight_decay": (math.inf, 1),
    "eps": (math.inf, 1),
    "momentum": (1.0, 1),
    "betas": (1.0, 2),
}
_FLAGS: dict[str, tuple[Any, ...]] = {"nesterov": (True, False), "fused": (True, False, None)}


def range_problems(settings: Any, names: Iterable[str] = (*RANGES, *_FLAGS)) -> list[str]:
    """A sentence for each of these settings whose value no optimizer can step with."""
    problems = []
    for name in (name for name in names if hasattr(settings, name)):
        value = getattr(settings, name)
        if name in _FLAGS and not any(value is flag for flag in _FLAGS[name]):
            problems.append(f"{name}={value!r} must be one of {_FLAGS[name]}")
        if name in RANGES:
            below, count = RANGES[name]
            numbers = [value] if count == 1 else value if isinstance(value, list | tuple) else []
            if len(numbers) != count or not all(_is_number(one, below) for one in numbers):
                several = "" if count == 1 else f"{count} numbers, each "
                bound = "finite" if below == math.inf else f"below {below:g}"
                problems.append(f"{name}={value!r} must be {several}0 or more, and {bound}")
    return problems


def _is_number(value: Any, below: float) -> bool:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_meta or value.is_complex():
            return False
        value = value.item()
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < below


def group_of(settings: Any, parameters: Sequence[Tensor]) -> dict[str, Any]:
    """A parameter group that holds the settings under their names, as values for a checkpoint; and
    the settings themselves as "rule", which the optimizer takes out."""
    values = {entry.name: getattr(settings, entry.name) for entry in fields(settings)}
    if settings.kind == "function":
        values["function"] = settings.name
    return {"params": list(parameters), "kind": settings.kind, "rule": settings} | values


def changed(settings: Any, changes: dict[str, Any]) -> Any:
    """The settings with some changed; raises what no optimizer can step with."""
    known = [entry.name for entry in fields(settings)]
    if unknown := [name for name in changes if name not in known]:
        raise ValueError(f"{', '.join(unknown)} is unknown; there are {', '.join(known)}")
    return replace(settings, **changes)
