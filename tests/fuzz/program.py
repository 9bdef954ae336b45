# SPDX-License-Identifier: Apache-2.0
"""A random training program as data (JSON): a tree of small modules, how it is wrapped, and ops.

    {"ranks": 2, "dtype": "float64", "tree": {"kind": "seq", "parts": [...], "calls": [[0, 1]]},
     "wrap": {"strategy": "zero3", "units": [["parts.0"]], ...},
     "optimizer": "adamw", "ops": [{"op": "forward", "slot": 0}, {"op": "backward", ...}, ...]}

Every module takes (x [rows, width], tokens [rows]) and returns x, or a container with it: any tree
of them runs. ``build`` makes the modules of a program, ``draw.py`` draws one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.moe import MixtureOfExperts, Routing, swiglu

Program = dict[str, Any]
WORDS, ROWS = 11, 5


@dataclass
class Clock:
    """The step of training, of which the modules of one model know."""

    step: int = 0


class Node(nn.Module):
    """A module of the tree; ``spec`` is its part of the program."""

    count: Tensor  # of forwards, where the kind is buffer

    def __init__(self, spec: dict[str, Any], width: int, clock: Clock) -> None:
        super().__init__()
        self.spec, self.clock = spec, clock
        kind, bias = spec["kind"], spec.get("bias", True)
        if kind == "linear":
            self.fc = nn.Linear(width, width, bias)
        elif kind == "mlp":
            inner = 2 * width
            self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        elif kind == "norm":
            self.norm = nn.LayerNorm(width)
        elif kind == "embed":
            self.table = nn.Embedding(WORDS, width)
        elif kind == "scale":
            self.gain = nn.Parameter(torch.ones(width) + 0.1 * torch.randn(width))
            self.shift = nn.Parameter(torch.randn(()))
        elif kind == "lora":
            self.fc = nn.Linear(width, width).requires_grad_(False)
            self.a = nn.Parameter(0.3 * torch.randn(3, width))
            self.b = nn.Parameter(0.3 * torch.randn(width, 3))
        elif kind == "buffer":
            self.register_buffer("count", torch.zeros((), dtype=torch.float32))
        elif kind == "moe":
            self.moe = MixtureOfExperts(
                Routing(num_experts=4, experts_per_token=2), width, width, activation=swiglu()
            )
            for parameter in self.moe.parameters():
                nn.init.normal_(parameter, std=0.4)
        elif spec.get("own"):  # parameters of a node with parts: "used" or "unused"
            self.own = nn.Parameter(torch.ones(width) + 0.1 * torch.randn(width))
        self.parts = nn.ModuleList(Node(part, width, clock) for part in spec.get("parts", ()))

    def forward(self, x: Tensor, tokens: Tensor) -> Any:
        y = getattr(self, self.spec["kind"] + "_")(x, tokens)
        match self.spec.get("returns"):
            case "tuple":
                return y, [None, y * 0.5]
            case "dict":
                return {"main": y, "aux": {"half": y * 0.5}}
        return y

    def linear_(self, x: Tensor, tokens: Tensor) -> Any:
        return torch.tanh(self.fc(x))

    def mlp_(self, x: Tensor, tokens: Tensor) -> Any:
        return x + self.down(F.gelu(self.up(x)))

    def norm_(self, x: Tensor, tokens: Tensor) -> Any:
        return self.norm(x)

    def embed_(self, x: Tensor, tokens: Tensor) -> Any:
        return x + self.table(tokens)

    def scale_(self, x: Tensor, tokens: Tensor) -> Any:
        return x * self.gain + self.shift

    def lora_(self, x: Tensor, tokens: Tensor) -> Any:
        base = self.fc(x) if self.spec.get("base_first") else None
        low = F.linear(F.linear(x, self.a), self.b)
        return torch.tanh((self.fc(x) if base is None else base) + low)

    def buffer_(self, x: Tensor, tokens: Tensor) -> Any:
        if self.training:
            self.count.add_(1)
        return x * (1 + 0.01 * self.count)

    def moe_(self, x: Tensor, tokens: Tensor) -> Any:
        return x + self.moe(x)[0]

    def empty_(self, x: Tensor, tokens: Tensor) -> Any:
        return torch.tanh(x)

    def seq_(self, x: Tensor, tokens: Tensor) -> Any:
        calls, y = self.spec["calls"], x
        for number in calls[self.clock.step % len(calls)] if self.parts else ():
            part: Any = self.parts[number % len(self.parts)]
            how = part.spec.get("checkpoint")
            if how is not None and torch.is_grad_enabled():
                y = first(checkpoint(part, y, tokens, use_reentrant=how == "reentrant"))
            else:
                y = first(part(y, tokens))
        y = y * self.own if self.spec.get("own") == "used" else y
        return y + x if self.spec.get("residual") else y


def first(value: Any) -> Any:
    """The tensor of a container, with what stands beside it."""
    if isinstance(value, tuple):
        return value[0] + value[1][1]
    return value["main"] + value["aux"]["half"] if isinstance(value, dict) else value


def walk(spec: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(path of the module, its part of the program), outer before inner."""
    yield path, spec
    for number, part in enumerate(spec.get("parts", ())):
        yield from walk(part, f"{path}.parts.{number}".lstrip("."))


def build(program: Program, clock: Clock) -> Node:
    """The modules of a program, with the same values wherever they are built."""
    torch.manual_seed(program["seed"])
    dtype = getattr(torch, program["dtype"])
    model = Node(program["tree"], program["width"], clock).to(dtype)
    tied = None
    for path, spec in walk(program["tree"]):
        module: Any = model.get_submodule(path)
        if spec.get("tied") and spec["kind"] == "linear":
            if tied is not None:
                module.fc.weight = tied
            tied = module.fc.weight
        if how := spec.get("frozen"):
            for number, parameter in enumerate(module.parameters()):
                matrix = parameter.dim() > 1
                if {"all": True, "weights": matrix, "rest": not matrix, "half": number % 2}[how]:
                    parameter.requires_grad_(False)
        if how := spec.get("hook"):
            _hook(module, how)
    return model


def _hook(module: nn.Module, how: str) -> None:
    """A hook of torch's on a module, which changes values."""
    match how:
        case "forward":
            module.register_forward_hook(lambda module, args, y: y * 0.9)
        case "pre":
            module.register_forward_pre_hook(lambda module, args: (args[0] * 1.1, *args[1:]))
        case "backward":
            module.register_full_backward_hook(lambda module, grads, _: tuple(map(_less, grads)))


def _less(grad: Tensor | None) -> Tensor | None:
    """A smaller gradient; of tokens there is none, or zeros."""
    return grad if grad is None or not grad.is_floating_point() else grad * 0.8
