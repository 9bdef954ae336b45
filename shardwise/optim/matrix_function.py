# SPDX-License-Identifier: Apache-2.0
"""``sw.matrix_optimizer``: an optimizer of one matrix, written for one device, as a function.

    @sw.matrix_optimizer
    def heavy_ball(gradient, state, *, lr, beta=0.9):      # [n, rows, cols]: n matrices
        if not state:                                       # the first step of these matrices
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].mul_(beta).add_(gradient)
        return lr * state["momentum"]                       # subtracted from the weights

    opt = sw.optimizer(model, matrix=heavy_ball(lr=0.1), elementwise=sw.adamw(lr=3e-4))

A call gets matrices of one shape and of one age, the number of steps that they have had. ``state``
is empty exactly in their first step. After that it holds tensors whose first dimension counts the
matrices, to be changed in place. The other dimensions are free: [n, rows, rows] for a
preconditioner, [n] for a number. A function that has an option ``step`` gets the number of the
step, an int that begins at 1.

The library brings each gradient to the owner of its matrix, stores the state there, saves and loads
the state under any strategy, and applies weight decay: ``heavy_ball(lr=0.1, weight_decay=0.01)``.
Every option is a field of the parameter group, so schedulers and groups of ``add_param_group`` can
change it.

On a CPU the function gets one matrix at a time (n = 1), so its results do not depend on which
matrices a rank owns. On a GPU it gets all matrices of one shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardwise.optim.rules import Rule, State, Step, Template
from shardwise.optim.settings import range_problems

STEP = "step"  # the option that the library fills with the number of the step


@dataclass(frozen=True)
class FunctionSettings(Rule):
    """A matrix optimizer with its options; calling a :class:`MatrixOptimizer` returns it."""

    kind: ClassVar[str] = "function"
    has_whole_states: ClassVar[bool] = True

    optimizer: MatrixOptimizer = field(repr=False)
    lr: float
    weight_decay: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if problems := range_problems(self):
            raise ValueError(f"{self.function}(...) cannot work: " + "; ".join(problems))

    @property
    def function(self) -> str:
        return self.optimizer.name

    @property
    def exchange(self) -> Any:
        return self.optimizer

    def whole_states(self, rows: int, cols: int, settings: Mapping[str, Any]) -> Template:
        return self.optimizer.template(rows, cols, settings)

    def compute(self, batch: Tensor, state: State, step: Step) -> Tensor:
        if batch.is_meta:  # a plan, which has no values
            return torch.zeros_like(batch)
        _, rows, cols = batch.shape
        template = self.optimizer.template(rows, cols, step.settings)
        update = self.optimizer.run(batch, state, step.settings, step.age + 1)
        _check(self.function, batch, update, state)
        if (left := _template_of(state)) != template:
            raise ValueError(
                f"{self.function} changed its state from {template} to {left}: keep the names, "
                f"shapes and dtypes of the first step"
            )
        if step.age == 0 and not bool(torch.isfinite(update).all()):
            kind = "finite" if bool(torch.isfinite(batch).all()) else "NaN or infinite"
            raise ValueError(
                f"{self.function}, for {kind} gradients {list(batch.shape)}, returned NaN or "
                f"infinity in its first step: look at its divisions and roots, or at the loss"
            )
        return update


class MatrixOptimizer:
    """A function ``(gradient, state, *, lr, ...) -> update``; a call with options returns
    :class:`FunctionSettings`."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self.name = function, getattr(function, "__name__", "matrix_optimizer")
        self.__doc__ = function.__doc__
        parameters = list(inspect.signature(function).parameters.values())
        positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        self.counts_steps = STEP in self.options
        self.options.pop(STEP, None)
        variadic = [p for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        taken = "weight_decay" in self.options
        if len(positional) != 2 or variadic or "lr" not in self.options or taken:
            raise TypeError(
                f"{self!r}: a matrix optimizer takes (gradient, state, *, lr, ...), with options "
                f"by keyword, and without *args, **kwargs and weight_decay, which the library takes"
            )
        self._templates: dict[Any, Template] = {}

    def __repr__(self) -> str:
        return f"{self.name}{inspect.signature(self.function)}"

    def __call__(self, **options: Any) -> FunctionSettings:
        """Settings for ``sw.optimizer(matrix=...)``; the plain function is ``.function``."""
        known = (*self.options, "weight_decay")
        unknown = [name for name in options if name not in known]
        filled = {name: options.get(name, default) for name, default in self.options.items()}
        missing = [name for name, value in filled.items() if value is inspect.Parameter.empty]
        if unknown or missing:
            raise TypeError(
                f"{self.name}(...): {unknown=}, {missing=}; it takes {', '.join(known)}"
            )
        decay = options.get("weight_decay", 0.0)
        return FunctionSettings(self, lr=filled.pop("lr"), weight_decay=decay, options=filled)

    def run(
        self, gradient: Tensor, state: State, settings: Mapping[str, Any], step: int = 1
    ) -> Tensor:
        """The update of a batch, with the options in its parameter group."""
        options = {name: settings[name] for name in self.options}
        if self.counts_steps:
            options[STEP] = step
        return self.function(gradient, state, **options)

    def template(self, rows: int, cols: int, settings: Mapping[str, Any]) -> Template:
        """The states of one matrix [rows, cols]; raises the fault of a function that cannot work.

        The function runs once on the meta device, or on zeros if it reads values."""
        # Without the learning rate, which schedulers change in every step: no shape depends on it.
        others = {name: settings[name] for name in self.options if name != "lr"}
        key = rows, cols, repr(others)
        if key not in self._templates:
            state: State = {}
            try:
                gradient = torch.zeros(1, rows, cols, device="meta")
                update = self.run(gradient, state, settings)
            except (NotImplementedError, RuntimeError, ValueError):  # the function reads values
                state, gradient = {}, torch.zeros(1, rows, cols)
                update = self.run(gradient, state, settings)
            _check(self.name, gradient, update, state)
            self._templates[key] = _template_of(state)
        return self._templates[key]


def matrix_optimizer(function: Callable[..., Tensor]) -> MatrixOptimizer:
    """Make a function of whole matrices an optimizer of sharded models; see the module's text."""
    return MatrixOptimizer(function)


def _check(name: str, gradient: Tensor, update: Any, state: State) -> None:
    """Raise the first fault in the results of a function for a batch."""
    subject = f"{name}, for gradients {list(gradient.shape)} of {gradient.dtype},"
    if not isinstance(update, Tensor):
        raise ValueError(f"{subject} returned a {type(update).__name__}, not the update, a tensor")
    if update.shape != gradient.shape or update.dtype != gradient.dtype:
        found = f"{list(update.shape)} of {update.dtype}"
        raise ValueError(f"{subject} returned {found}: return an update like the gradient")
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.ndim < 1 or len(value) != len(gradient):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{subject} left state[{key!r}] = {shape}: a state is a tensor whose first "
                f"dimension is {len(gradient)}, with one entry for each matrix"
            )


def _template_of(state: State) -> Template:
    return {name: (tuple(value.shape[1:]), value.dtype) for name, value in state.items()}
