# SPDX-License-Identifier: Apache-2.0
"""``sw.matrix_optimizer``: an optimizer of one matrix, written for one device, as a function.

    @sw.matrix_optimizer
    def heavy_ball(gradient, state, *, lr, beta=0.9):      # [n, rows, cols], n matrices alike
        if not state:                                       # their first step
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].mul_(beta).add_(gradient)
        return lr * state["momentum"]                       # is subtracted from the weights

    opt = sw.optimizer(model, matrix=heavy_ball(lr=0.1), elementwise=sw.adamw(lr=3e-4))

``state`` holds tensors whose first dimension counts the matrices; the others are free: [n, rows,
rows] for a preconditioner, [n] for a number. The library brings each gradient to the owner of its
matrix, keeps the state there, and saves and loads the state under any strategy. Weight decay is the
library's: ``heavy_ball(lr=0.1, weight_decay=0.01)``. Every option is a field of the parameter
group, so that schedulers and groups of ``add_param_group`` can change it.

On a CPU the function sees one matrix at a time (n = 1), so that its results do not depend on which
matrices a rank owns; on a GPU all of one shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from shardwise.optim.settings import range_problems
from shardwise.words import choice_problems

State = dict[str, Tensor]
Template = dict[str, tuple[tuple[int, ...], torch.dtype]]  # of a state: shape of one, and dtype
_OURS = ("weight_decay", "wire")  # options that the library takes, not the function
FUNCTIONS: dict[str, MatrixOptimizer] = {}  # by name, of several of a name the last


class FunctionName(str):
    """The name of a matrix optimizer, and itself: others may have the same name. Parameter groups
    have one, state dicts and checkpoints the plain text, and copies that go to other processes."""

    optimizer: MatrixOptimizer

    def __reduce__(self) -> Any:
        return str, (str(self),)


@dataclass(frozen=True)
class FunctionSettings:
    """A matrix optimizer with its options: what a :class:`MatrixOptimizer` returns."""

    kind: ClassVar[str] = "function"

    function: str
    lr: float
    weight_decay: float = 0.0
    wire: Literal["fp32", "fp16"] = "fp32"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = range_problems(self) + choice_problems(self)
        if problems:
            raise ValueError(f"{self.function}(...) cannot work: " + "; ".join(problems))


class MatrixOptimizer:
    """A function ``(gradient, state, *, lr, ...) -> update``; call it with options for settings."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self.name = function, getattr(function, "__name__", "matrix_optimizer")
        self.__doc__ = function.__doc__
        parameters = list(inspect.signature(function).parameters.values())
        positional = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        self.options = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
        odd = [one for one in parameters if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        taken = [name for name in _OURS if name in self.options]
        if len(positional) != 2 or odd or "lr" not in self.options or taken:
            raise TypeError(
                f"{self.name}{inspect.signature(function)}: a matrix optimizer takes (gradient, "
                f"state, *, lr, ...), options by keyword, without *args, **kwargs and "
                f"{' and '.join(_OURS)}, which the library takes"
            )
        self._templates: dict[Any, Template] = {}
        FUNCTIONS[self.name] = self

    def __repr__(self) -> str:
        return f"{self.name}{inspect.signature(self.function)}"

    def __call__(self, *arguments: Any, **options: Any) -> FunctionSettings:
        """Settings for ``sw.optimizer(matrix=...)``."""
        if arguments:
            raise TypeError(
                f"{self.name}(...) takes options by keyword, as in {self.name}(lr=0.01), and gives "
                f"settings for sw.optimizer; the function itself is {self.name}.function"
            )
        unknown = [name for name in options if name not in (*self.options, *_OURS)]
        filled = {name: options.get(name, default) for name, default in self.options.items()}
        missing = [name for name, value in filled.items() if value is inspect.Parameter.empty]
        if unknown or missing:
            wrong = f"{', '.join(unknown)} is unknown" if unknown else f"{missing[0]} is missing"
            raise TypeError(
                f"{self.name}(...): {wrong}; it takes {', '.join((*self.options, *_OURS))}"
            )
        ours = {name: options[name] for name in _OURS if name in options}
        lr, name = filled.pop("lr"), FunctionName(self.name)
        name.optimizer = self
        return FunctionSettings(function=name, lr=lr, options=filled, **ours)

    def run(self, gradient: Tensor, state: State, group: Mapping[str, Any]) -> Tensor:
        """The update of a batch, with the options that its parameter group has now."""
        options = {name: group[name] for name in self.options}
        return self.function(gradient, state, **options)


def matrix_optimizer(function: Callable[..., Tensor]) -> MatrixOptimizer:
    """Have a function of whole matrices train sharded models; see the module's text."""
    return MatrixOptimizer(function)


def function_of(group: Mapping[str, Any]) -> MatrixOptimizer:
    name = group["function"]
    if isinstance(name, FunctionName):
        return name.optimizer
    if name not in FUNCTIONS:
        raise ValueError(
            f"there is no matrix optimizer {name!r} in this process: import the file that defines "
            f"it; there are {', '.join(sorted(FUNCTIONS)) or 'none'}"
        )
    return FUNCTIONS[name]


def template_of(rows: int, cols: int, group: Mapping[str, Any]) -> Template:
    """The states of one matrix [rows, cols]: the function runs once without values, on the meta
    device, or on zeros where it looks at values. Raises what is wrong with it."""
    function = function_of(group)
    options = {name: group[name] for name in function.options}
    # Schedulers change the learning rate in every step; no state has a shape by it.
    key = rows, cols, repr({name: value for name, value in options.items() if name != "lr"})
    if key not in function._templates:
        function._templates[key] = _template(function, rows, cols, options)
    return function._templates[key]


def _template(
    function: MatrixOptimizer, rows: int, cols: int, options: Mapping[str, Any]
) -> Template:
    state: State = {}
    try:
        gradient = torch.zeros(1, rows, cols, device="meta")
        update = function.run(gradient, state, options)
    except (NotImplementedError, RuntimeError, ValueError):  # no values to look at
        state, gradient = {}, torch.zeros(1, rows, cols)
        update = function.run(gradient, state, options)
    problem = problem_of(function.name, gradient, update, state)
    if problem is not None:
        raise ValueError(problem)
    return {name: (tuple(value.shape[1:]), value.dtype) for name, value in state.items()}


def problem_of(
    name: str, gradient: Tensor, update: Any, state: State, template: Template | None = None
) -> str | None:
    """The first fault of the results for a batch, in words, or None."""
    what = f"{name}, for gradients {list(gradient.shape)},"
    if not isinstance(update, Tensor):
        return f"{what} returned a {type(update).__name__}: return the update, a tensor"
    if update.shape != gradient.shape or update.dtype != gradient.dtype:
        return (
            f"{what} returned {list(update.shape)} of {update.dtype}: return an update of the "
            f"gradient's shape and of {gradient.dtype}"
        )
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.ndim < 1 or len(value) != len(gradient):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            return (
                f"{what} left state[{key!r}] = {shape}: states are tensors with a first dimension "
                f"of {len(gradient)}, one entry for each matrix"
            )
    found = {key: (tuple(value.shape[1:]), value.dtype) for key, value in state.items()}
    if template is not None and found != template:
        return f"{what} changed its state from {template} to {found}: names, shapes, dtypes stay"
    return None
