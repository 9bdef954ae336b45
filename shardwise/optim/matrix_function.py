# SPDX-License-Identifier: Apache-2.0
"""``sw.matrix_optimizer``: an optimizer of one matrix, written for one device, as a function.

    @sw.matrix_optimizer
    def heavy_ball(gradient, state, *, lr, beta=0.9):      # [n, rows, cols]: n matrices
        if not state:                                       # the first step of these matrices
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].mul_(beta).add_(gradient)
        return lr * state["momentum"]                       # subtracted from the weights

    opt = sw.optimizer(model, matrix=heavy_ball(lr=0.1), elementwise=sw.adamw(lr=3e-4))

``state`` holds tensors whose first dimension counts the matrices. The other dimensions are free:
[n, rows, rows] for a preconditioner, [n] for a number. The library brings each gradient to the
owner of its matrix, stores the state there, saves and loads the state under any strategy, and
applies weight decay: ``heavy_ball(lr=0.1, weight_decay=0.01)``. Every option is a field of the
parameter group, so schedulers and groups of ``add_param_group`` can change it.

On a CPU the function gets one matrix at a time (n = 1), so its results do not depend on which
matrices a rank owns. On a GPU it gets all matrices of one shape.
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
Template = dict[str, tuple[tuple[int, ...], torch.dtype]]  # by state: its shape and dtype
_LIBRARY_OPTIONS = ("weight_decay", "wire")  # options that the library takes, not the function
FUNCTIONS: dict[str, MatrixOptimizer] = {}  # by name; the last function of a name


class FunctionName(str):
    """The name of a matrix optimizer, with the optimizer: other functions may have the same name.

    A parameter group holds a FunctionName. State dicts, checkpoints and pickles hold plain text."""

    optimizer: MatrixOptimizer

    def __reduce__(self) -> Any:
        return str, (str(self),)


@dataclass(frozen=True)
class FunctionSettings:
    """A matrix optimizer with its options; calling a :class:`MatrixOptimizer` returns it."""

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
    """A function ``(gradient, state, *, lr, ...) -> update``; a call with options returns
    :class:`FunctionSettings`."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self.name = function, getattr(function, "__name__", "matrix_optimizer")
        self.__doc__ = function.__doc__
        parameters = list(inspect.signature(function).parameters.values())
        positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        variadic = [p for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        taken = [name for name in _LIBRARY_OPTIONS if name in self.options]
        if len(positional) != 2 or variadic or "lr" not in self.options or taken:
            raise TypeError(
                f"{self.name}{inspect.signature(function)}: a matrix optimizer takes (gradient, "
                f"state, *, lr, ...), with options by keyword, and without *args, **kwargs and "
                f"{' and '.join(_LIBRARY_OPTIONS)}, which the library takes"
            )
        self._templates: dict[Any, Template] = {}
        FUNCTIONS[self.name] = self

    def __repr__(self) -> str:
        return f"{self.name}{inspect.signature(self.function)}"

    def __call__(self, *arguments: Any, **options: Any) -> FunctionSettings:
        """Settings for ``sw.optimizer(matrix=...)``."""
        if arguments:
            raise TypeError(
                f"{self.name}(...) takes options by keyword, as in {self.name}(lr=0.01), and "
                f"returns settings for sw.optimizer; the plain function is {self.name}.function"
            )
        known = (*self.options, *_LIBRARY_OPTIONS)
        unknown = [name for name in options if name not in known]
        filled = {name: options.get(name, default) for name, default in self.options.items()}
        missing = [name for name, value in filled.items() if value is inspect.Parameter.empty]
        if unknown or missing:
            wrong = f"{', '.join(unknown)} is unknown" if unknown else f"{missing[0]} is missing"
            raise TypeError(f"{self.name}(...): {wrong}; it takes {', '.join(known)}")
        given = {name: options[name] for name in _LIBRARY_OPTIONS if name in options}
        lr, name = filled.pop("lr"), FunctionName(self.name)
        name.optimizer = self
        return FunctionSettings(function=name, lr=lr, options=filled, **given)

    def run(self, gradient: Tensor, state: State, group: Mapping[str, Any]) -> Tensor:
        """The update of a batch, with the options in its parameter group."""
        options = {name: group[name] for name in self.options}
        return self.function(gradient, state, **options)


def matrix_optimizer(function: Callable[..., Tensor]) -> MatrixOptimizer:
    """Make a function of whole matrices an optimizer of sharded models; see the module's text."""
    return MatrixOptimizer(function)


def function_of(group: Mapping[str, Any]) -> MatrixOptimizer:
    """The optimizer that ``group["function"]`` names."""
    name = group["function"]
    if isinstance(name, FunctionName):
        return name.optimizer
    if name not in FUNCTIONS:
        raise ValueError(
            f"this process has no matrix optimizer {name!r}: import the file that defines it "
            f"(imported so far: {', '.join(sorted(FUNCTIONS)) or 'none'})"
        )
    return FUNCTIONS[name]


def template_of(rows: int, cols: int, group: Mapping[str, Any]) -> Template:
    """The states of one matrix [rows, cols]; raises the fault of a function that cannot work.

    The function runs once on the meta device, or on zeros if it reads values."""
    function = function_of(group)
    options = {name: group[name] for name in function.options}
    # Without the learning rate, which schedulers change in every step: no shape depends on it.
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
    except (NotImplementedError, RuntimeError, ValueError):  # the function reads values
        state, gradient = {}, torch.zeros(1, rows, cols)
        update = function.run(gradient, state, options)
    problem = problem_of(function.name, gradient, update, state)
    if problem is not None:
        raise ValueError(problem)
    return _template_of_state(state)


def problem_of(
    name: str, gradient: Tensor, update: Any, state: State, template: Template | None = None
) -> str | None:
    """The first fault in the results of a function for a batch, in words, or None."""
    subject = f"{name}, for gradients {list(gradient.shape)},"
    if not isinstance(update, Tensor):
        return f"{subject} returned a {type(update).__name__}: return the update, a tensor"
    if update.shape != gradient.shape or update.dtype != gradient.dtype:
        return (
            f"{subject} returned {list(update.shape)} of {update.dtype}: return an update of the "
            f"gradient's shape and of {gradient.dtype}"
        )
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.ndim < 1 or len(value) != len(gradient):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            return (
                f"{subject} left state[{key!r}] = {shape}: a state is a tensor whose first "
                f"dimension is {len(gradient)}, with one entry for each matrix"
            )
    if template is not None and _template_of_state(state) != template:
        return (
            f"{subject} changed its state from {template} to {_template_of_state(state)}: keep the "
            f"names, shapes and dtypes of the first step"
        )
    return None


def _template_of_state(state: State) -> Template:
    return {name: (tuple(value.shape[1:]), value.dtype) for name, value in state.items()}
