# SPDX-License-Identifier: Apache-2.0
"""Parts of the reference for which plain torch has nothing: narrow copies of main weights, linears
that quantise their weight at each use, and Muon on whole matrices. Nothing here is sharded, and
nothing of the engine is used: encodings and Newton-Schulz are the library's pure functions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.kernels.newton_schulz import orthogonalise
from tests.parity.mxfp8_helpers import Encoded

SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.01}
MUON: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.05}


class QuantisedAtUse(nn.Linear):
    """A linear whose weight is encoded and decoded where it is multiplied by."""

    precision: sw.Precision

    def forward(self, input: Tensor) -> Tensor:
        weight = Encoded.apply(self.weight, self.precision.weights)  # type: ignore[no-untyped-call]
        return F.linear(input, weight, self.bias)


class Narrow:
    """A plain model whose modules compute with copies of its parameters in bf16; ``mains`` are the
    parameters, which an optimizer trains."""

    def __init__(self, model: nn.Module, precision: sw.Precision) -> None:
        self.mains = dict(model.named_parameters())
        names = {id(main): name for name, main in self.mains.items()}
        self.copies = {
            name: nn.Parameter(main.detach().bfloat16(), requires_grad=main.requires_grad)
            for name, main in self.mains.items()
        }
        for module in model.modules():
            for name, main in module._parameters.items():
                if main is not None:
                    module._parameters[name] = self.copies[names[id(main)]]
            if isinstance(module, nn.Linear) and precision.weights != torch.bfloat16:
                module.__class__ = QuantisedAtUse
                module.precision = precision  # type: ignore[assignment]

    @torch.inference_mode(False)
    def refresh(self) -> None:
        """Bring the copies up to date, before a forward."""
        for name, main in self.mains.items():
            copied = self.copies[name].requires_grad_(main.requires_grad)
            copied.data = main.detach().bfloat16()


class PlainMuon(torch.optim.Optimizer):
    """Muon for matrices, one after another; torch's AdamW trains the rest."""

    def __init__(self, matrices: list[Tensor], rest: list[Tensor]) -> None:
        self.adamw = torch.optim.AdamW(rest, **SETTINGS) if rest else None
        super().__init__([{"params": matrices}], MUON)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        if self.adamw is not None:
            self.adamw.step()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.matrix(p, p.grad, self.state[p])

    def matrix(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        momentum = MUON["momentum"]
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(p)).lerp_(grad, 1 - momentum)
        settings, (rows, columns) = sw.muon(), p.shape[-2:]
        if p.dim() == 3 and rows == 2 * columns:  # gate and up of experts, one above the other
            rows //= 2
        update = grad.lerp(buffer, momentum).view(-1, rows, columns)
        update = orthogonalise(update, settings.polynomial).view_as(p)
        p.mul_(1 - MUON["lr"] * MUON["weight_decay"])
        p.add_(update.to(p.dtype) * math.sqrt(max(1.0, rows / columns)), alpha=-MUON["lr"])


def optimizer_of(name: str, model: nn.Module) -> Any:
    """The optimizer of a model, wrapped or not."""
    match name:
        case "muon":
            return sw.optimizer(model, matrix=sw.muon(**MUON), elementwise=sw.adamw(**SETTINGS))
        case "sw_adamw":
            return sw.optimizer(model, matrix=None, elementwise=sw.adamw(**SETTINGS))
        case "adamw":
            return torch.optim.AdamW(model.parameters(), **SETTINGS)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9 * (name == "momentum"))


def plain_optimizer(name: str, model: nn.Module) -> Any:
    """torch's optimizer, or Muon as above. ``sw.optimizer`` leaves alone what is frozen when it is
    built."""
    if name == "sw_adamw":
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, **SETTINGS)
    if name != "muon":
        return optimizer_of(name, model)
    groups = optimizer_of("muon", model).param_groups
    matrices = [p for group in groups for p in group["params"] if group["kind"] == "matrix"]
    rest = [p for group in groups for p in group["params"] if group["kind"] != "matrix"]
    return PlainMuon(matrices, rest)
