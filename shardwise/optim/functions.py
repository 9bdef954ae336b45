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

NorMuon and SOAP follow below, to read, copy and change: ``ANY[name](lr=...)``.
``examples/optimizers`` has more.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardwise.kernels import newton_schulz
from shardwise.kernels.polynomials import polynomial_of
from shardwise.optim.rules import Rule, State, Step, Template, range_problems

STEP = "step"  # the option that the library fills with the number of the step


@dataclass(frozen=True, kw_only=True)
class Function(Rule):
    """The settings of a matrix optimizer. Each function has a subclass, whose fields are its
    options too."""

    kind: ClassVar[str] = "function"
    has_whole_states: ClassVar[bool] = True

    function: ClassVar[Callable[..., Tensor]]
    name: ClassVar[str]
    options: ClassVar[dict[str, Any]]  # with their defaults; ``lr`` is one
    counts_steps: ClassVar[bool]
    templates: ClassVar[dict[Any, Template]]

    lr: float
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if problems := range_problems(self, ("lr", "weight_decay")):  # options are its own
            raise ValueError(f"{self.name}(...) cannot work: " + "; ".join(problems))

    def whole_states(self, rows: int, cols: int, settings: Mapping[str, Any]) -> Template:
        """The states of one matrix [rows, cols]; raises the fault of a function that cannot work.

        The function runs once on the meta device, or on zeros if it reads values."""
        # Without the learning rate, which schedulers change in every step: no shape depends on it.
        others = {name: settings[name] for name in self.options if name != "lr"}
        key = rows, cols, repr(others)
        if key not in self.templates:
            state: State = {}
            try:
                gradient = torch.zeros(1, rows, cols, device="meta")
                update = self.run(gradient, state, settings)
            except (NotImplementedError, RuntimeError, ValueError):  # the function reads values
                state, gradient = {}, torch.zeros(1, rows, cols)
                update = self.run(gradient, state, settings)
            _check(self.name, gradient, update, state)
            self.templates[key] = _template_of(state)
        return self.templates[key]

    def compute(self, batch: Tensor, state: State, step: Step) -> Tensor:
        if batch.is_meta:  # a plan, which has no values
            return torch.zeros_like(batch)
        _, rows, cols = batch.shape
        template = self.whole_states(rows, cols, step.settings)
        update = self.run(batch, state, step.settings, step.age + 1)
        _check(self.name, batch, update, state)
        if (left := _template_of(state)) != template:
            raise ValueError(
                f"{self.name} changed its state from {template} to {left}: keep the names, "
                f"shapes and dtypes of the first step"
            )
        if step.age == 0 and not bool(torch.isfinite(update).all()):
            kind = "finite" if bool(torch.isfinite(batch).all()) else "NaN or infinite"
            raise ValueError(
                f"{self.name}, for {kind} gradients {list(batch.shape)}, returned NaN or "
                f"infinity in its first step: look at its divisions and roots, or at the loss"
            )
        return update

    @classmethod
    def run(
        cls, gradient: Tensor, state: State, settings: Mapping[str, Any], step: int = 1
    ) -> Tensor:
        """The update of a batch, with the options in its parameter group."""
        options = {name: settings[name] for name in cls.options}
        if cls.counts_steps:
            options[STEP] = step
        return cls.function(gradient, state, **options)


def matrix_optimizer(function: Callable[..., Tensor]) -> type[Any]:
    """Make a function of whole matrices an optimizer of sharded models; see the module's text.

    Returns a class of settings, for ``sw.optimizer(matrix=...)``: its fields are the options of the
    function, and ``weight_decay``. The plain function is ``.function``."""
    name = getattr(function, "__name__", "matrix_optimizer")
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    counts_steps = STEP in options
    options.pop(STEP, None)
    variadic = [p for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if len(positional) != 2 or variadic or "lr" not in options or "weight_decay" in options:
        raise TypeError(
            f"{name}{inspect.signature(function)}: a matrix optimizer takes (gradient, state, *, "
            f"lr, ...), with options by keyword, and without *args, **kwargs and weight_decay, "
            f"which the library takes"
        )
    made: list[tuple[str, Any, Any]] = [
        (key, Any, field() if value is inspect.Parameter.empty else field(default_factory=value_of))
        for key, value in options.items()
        for value_of in [partial(copy, value)]
    ]
    facts = {"name": name, "options": options, "counts_steps": counts_steps, "templates": {}}
    facts |= {"function": staticmethod(function), "__doc__": function.__doc__}
    return make_dataclass(name, made, bases=(Function,), namespace=facts, frozen=True, kw_only=True)


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


# ------------------------------------------------------------------------------ NorMuon and SOAP


def orthogonalise(matrices: Tensor, preset: str = "keller") -> Tensor:
    """Approximately U V' of each matrix [n, rows, cols] = U S V', by Newton-Schulz."""
    return newton_schulz.orthogonalise(matrices, polynomial_of(preset)).to(matrices.dtype)


@matrix_optimizer
def normuon(
    gradient: Tensor,
    state: State,
    *,
    lr: float,
    momentum: float = 0.95,
    beta2: float = 0.95,
    eps: float = 1e-8,
) -> Tensor:
    """NorMuon (Li et al. 2025, arXiv:2510.05491): an orthogonal update. Each row is divided by a
    running average of its root mean square, and the update is scaled to an RMS of 0.2 lr."""
    if not state:
        state["momentum"] = torch.zeros_like(gradient)
        state["second"] = torch.zeros_like(gradient[:, :, :1])  # [n, rows, 1]
    buffer = state["momentum"].lerp_(gradient, 1 - momentum)
    update = orthogonalise(buffer)
    second = state["second"].lerp_(update.square().mean(-1, keepdim=True), 1 - beta2)
    update = update / (second.sqrt() + eps)
    norm: Tensor = torch.linalg.matrix_norm(update, keepdim=True)
    return 0.2 * lr * math.sqrt(gradient[0].numel()) * update / (norm + eps)


@matrix_optimizer
def soap(
    gradient: Tensor,
    state: State,
    *,
    lr: float,
    step: int = 1,
    betas: tuple[float, float] = (0.95, 0.95),
    shampoo_beta: float = 0.95,
    frequency: int = 10,
    eps: float = 1e-8,
) -> Tensor:
    """SOAP (Vyas et al. 2024, arXiv:2409.11321): Adam in Shampoo's eigenbasis.

    The first step sets the basis and changes no weight, as in the authors' code. Every
    ``frequency`` steps, one step of a power iteration (QR) improves the basis."""
    grams = {"left": gradient @ gradient.mT, "right": gradient.mT @ gradient}
    if not state:
        state["mean"], state["second"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        for side, gram in grams.items():
            state[side] = (1 - shampoo_beta) * gram
            # Largest eigenvalues first.
            state[f"{side}_basis"] = torch.linalg.eigh(gram).eigenvectors.flip(-1).contiguous()
        return torch.zeros_like(gradient)
    count = step - 1  # of averages: the first step has none
    left, right = state["left_basis"], state["right_basis"]
    mean = state["mean"].lerp_(gradient, 1 - betas[0])
    second = state["second"].lerp_((left.mT @ gradient @ right).square(), 1 - betas[1])
    corrected = second.sqrt() / (1 - betas[1] ** count) ** 0.5 + eps
    update: Tensor = left.mT @ mean @ right / (1 - betas[0] ** count) / corrected
    update = left @ update @ right.mT
    for side, gram in grams.items():
        state[side].lerp_(gram, 1 - shampoo_beta)
    if count % frequency == 0:
        _improve_basis(state, "left", dim=-2)
        _improve_basis(state, "right", dim=-1)
    return lr * update


def _improve_basis(state: State, side: str, dim: int) -> None:
    """Sort a basis by eigenvalue, largest first, and bring it closer to the eigenvectors. The
    second moments, whose dimension ``dim`` it spans, are sorted in the same way."""
    gram, basis = state[side], state[f"{side}_basis"]
    eigenvalues = (basis.mT @ gram @ basis).diagonal(dim1=-2, dim2=-1)
    order = eigenvalues.argsort(dim=-1, descending=True)
    basis = basis.gather(-1, order[:, None, :].expand_as(basis))
    index = order[:, :, None] if dim == -2 else order[:, None, :]
    state["second"] = state["second"].gather(dim, index.expand_as(state["second"]))
    state[f"{side}_basis"] = torch.linalg.qr(gram @ basis).Q.contiguous()


ANY = {function.name: function for function in (normuon, soap)}
