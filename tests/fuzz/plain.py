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

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.01}
MUON = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.05}


class QuantisedAtUse(nn.Linear):
    """A linear whose weight is encoded and decoded where it is multiplied by."""

    precision: sw.Precision

    def forward(self, input: Tensor) -> Tensor:
        weight = Encoded.apply(self.weight, self.precision.weights)
        return F.linear(input, weight, self.bias)


class Narrow:
    """A plain model whose modules compute with copies of its parameters in bf16; ``mains`` are the
    parameters, which an optimizer trains."""

    def __init__(self, model: nn.Module, precision: sw.Precision | None) -> None:
        self.mains = dict(model.named_parameters())
        names = {id(main): name for name, main in self.mains.items()}
        self.copies = {
            name: nn.Parameter(main.detach().bfloat16(), requires_grad=main.requires_grad)
            for name, main in self.mains.items()
        }
        self.written = {name: main._version for name, main in self.mains.items()}
        for module in model.modules():
            for name, main in module._parameters.items():
                if main is not None:
                    module._parameters[name] = self.copies[names[id(main)]]
            if isinstance(module, nn.Linear) and precision is not None:
                module.__class__ = QuantisedAtUse
                module.precision = precision

    @torch.inference_mode(False)
    def refresh(self) -> None:
        """Bring the copies up to date, before a forward."""
        for name, main in self.mains.items():
            copied = self.copies[name].requires_grad_(main.requires_grad)
            if self.written[name] != main._version:
                copied.data = main.detach().bfloat16()
                self.written[name] = main._version

    def freeze(self) -> None:
        """Follow a ``requires_grad_(False)`` since forward."""
        for name, main in self.mains.items():
            if not main.requires_grad:
                self.copies[name].requires_grad_(False)


class PlainMuon(torch.optim.Optimizer):
    """Muon for matrices, one after another, and torch's AdamW for the rest."""

    def __init__(self, named: dict[str, Tensor], matrices: set[str]) -> None:
        groups = [
            {"params": [p for name, p in named.items() if (name in matrices) == kind], "kind": kind}
            for kind in (True, False)
        ]
        super().__init__([group for group in groups if group["params"]], {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    (self.matrix if group["kind"] else self.other)(p, p.grad, self.state[p])

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

    def other(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        if not state:
            state |= {"step": 0, "first": torch.zeros_like(p), "second": torch.zeros_like(p)}
        (one, two), lr = SETTINGS["betas"], SETTINGS["lr"]  # type: ignore[misc]
        state["step"] += 1
        first = state["first"].lerp_(grad, 1 - one)
        second = state["second"].mul_(two).addcmul_(grad, grad, value=1 - two)
        p.mul_(1 - lr * SETTINGS["weight_decay"])  # type: ignore[operator]
        scale = math.sqrt(1 - two ** state["step"])
        p.addcdiv_(
            first,
            (second.sqrt() / scale).add_(SETTINGS["eps"]),  # type: ignore[arg-type]
            value=-lr / (1 - one ** state["step"]),
        )


def plain_optimizer(name: str, model: nn.Module, named: dict[str, Tensor]) -> Any:
    """torch's optimizer, or Muon as above, for a plain model. ``sw.optimizer`` leaves alone what is
    frozen when it is built."""
    trained = {one: p for one, p in named.items() if p.requires_grad}
    match name:
        case "muon":
            routed = sw.optimizer(model, matrix=sw.muon(**MUON), elementwise=sw.adamw(**SETTINGS))
            kinds = {id(p): group["kind"] for group in routed.param_groups for p in group["params"]}
            own = dict(model.named_parameters())
            matrices = {n for n, p in own.items() if kinds.get(id(p)) == "matrix"}
            return PlainMuon(trained, matrices)
        case "sw_adamw":
            return torch.optim.AdamW(trained.values(), **SETTINGS)  # type: ignore[arg-type]
        case "adamw":
            return torch.optim.AdamW(named.values(), **SETTINGS)  # type: ignore[arg-type]
    return torch.optim.SGD(named.values(), lr=0.05, momentum=0.9 * (name == "momentum"))
