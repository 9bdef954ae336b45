# SPDX-License-Identifier: Apache-2.0
"""A random training program as data (JSON): a tree of small modules, how it is wrapped, and ops.

    {"ranks": 2, "dtype": "float64", "tree": {"kind": "seq", "parts": [...], "calls": [[0, 1]]},
     "wrap": {"how": "fully_shard", "strategy": "zero3", "units": [["0"], [""]], ...},
     "optimizer": "adamw", "ops": [{"op": "forward", "slot": 0}, {"op": "backward", ...}, ...]}

Every module takes (x [rows, width], tokens [rows]) and returns x, or a container with it: any tree
of them runs. ``build`` makes the modules of a program, ``draw.py`` draws one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.moe import MixtureOfExperts, Routing, swiglu

Program = dict[str, Any]
WORDS, ROWS = 11, 5


class FuzzError(Exception):
    """Raised by a program on purpose, and caught by it."""


@dataclass
class Context:
    """State that the modules of one model share: where the program stands, and what they keep."""

    step: int = 0
    rank: int = 0
    bombs: set[str] = field(default_factory=set)  # "forward" or "backward"


class Both(NamedTuple):
    main: Tensor
    aux: Tensor


class Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise FuzzError("backward")


class Node(nn.Module):
    """A module of the tree; ``spec`` is its part of the program."""

    def __init__(self, spec: dict[str, Any], width: int, context: Context) -> None:
        super().__init__()
        self.spec, self.context = spec, context
        self.given: Tensor | None = None  # its input, where that is no argument
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
        self.parts = nn.ModuleList(Node(part, width, context) for part in spec.get("parts", ()))

    def forward(self, x: Tensor | None, tokens: Tensor) -> Any:
        if x is None:
            x, self.given = self.given, None
        y = getattr(self, self.spec["kind"] + "_")(x, tokens)
        if self.spec.get("hooked") and y.requires_grad:
            y.register_hook(lambda grad: grad * 0.75)
        match self.spec.get("returns"):
            case "tuple":
                return y, [None, y * 0.5]
            case "dict":
                return {"main": y, "aux": {"half": y * 0.5}}
            case "named":
                return Both(y, y * 0.5)
        return y

    def linear_(self, x: Tensor, tokens: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))

    def mlp_(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))

    def norm_(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.norm(x)

    def embed_(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + self.table(tokens)

    def scale_(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x * self.gain + self.shift

    def lora_(self, x: Tensor, tokens: Tensor) -> Tensor:
        base = self.fc(x) if self.spec.get("base_first") else None
        low = F.linear(F.linear(x, self.a), self.b)
        return torch.tanh((self.fc(x) if base is None else base) + low)

    def buffer_(self, x: Tensor, tokens: Tensor) -> Tensor:
        if self.training:
            self.count.add_(1)
        return x * (1 + 0.01 * self.count)

    def moe_(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + self.moe(x)[0]

    def empty_(self, x: Tensor, tokens: Tensor) -> Tensor:
        return torch.tanh(x)

    def bomb_(self, x: Tensor, tokens: Tensor) -> Tensor:
        if "forward" in self.context.bombs:
            raise FuzzError("forward")
        return Raise.apply(x) if "backward" in self.context.bombs else x * 1.0

    def peek_(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Reads a weight of a child without calling the child."""
        weights = [
            p for p in self.parts[0].parameters() if p.dim() == 2 and p.shape[1] == x.shape[1]
        ]
        y = first(self.parts[0](x, tokens)) if self.spec.get("calls_too", True) else x
        return y + (F.linear(y, weights[0]).mean(1, True) if weights else 0)

    def seq_(self, x: Tensor, tokens: Tensor) -> Tensor:
        calls = self.spec["calls"]
        index = self.context.step + (self.context.rank if self.spec.get("by_rank") else 0)
        y = x
        for number in calls[index % len(calls)]:
            y = self.call(self.parts[number % len(self.parts)], y, tokens) if self.parts else y
        y = y * self.own if self.spec.get("own") == "used" else y
        return y + x if self.spec.get("residual") else y

    def call(self, part: nn.Module, x: Tensor, tokens: Tensor) -> Tensor:
        how = part.spec.get("checkpoint")
        if how is not None and torch.is_grad_enabled():
            return first(checkpoint(part, x, tokens, use_reentrant=how == "reentrant"))
        if part.spec.get("by_attribute"):
            part.given, x = x, None
        return first(part(x, tokens))


def first(value: Any) -> Tensor:
    """The tensor of a container, with what stands beside it."""
    if isinstance(value, Both):
        return value.main + value.aux
    if isinstance(value, tuple):
        return value[0] + value[1][1]
    if isinstance(value, dict):
        return value["main"] + value["aux"]["half"]
    return value


def walk(spec: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(path of the module, its part of the program), outer before inner."""
    yield path, spec
    for number, part in enumerate(spec.get("parts", ())):
        yield from walk(part, f"{path}.parts.{number}".lstrip("."))


def build(program: Program, context: Context) -> Node:
    """The modules of a program, with the same values wherever they are built."""
    torch.manual_seed(program["seed"])
    dtype = getattr(torch, program["dtype"])
    model = Node(program["tree"], program["width"], context).to(dtype)
    tied = None
    for path, spec in walk(program["tree"]):
        module = model.get_submodule(path)
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
