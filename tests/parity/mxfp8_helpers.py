# SPDX-License-Identifier: Apache-2.0
"""The same training with fp8 weights and with bf16 weights that are quantised at use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.precision import fp8_native
from shardwise.precision.fp8 import BLOCKS, COLUMN, ROW, decode, encode, plane_over
from shardwise.precision.fp8_weight import Coded, Products
from shardwise.shard import checks
from shardwise.shard import wrap as wrapping
from shardwise.shard.module import units_of
from tests.models import STRATEGIES, mesh_for
from tests.whole import whole_tensors

WIDTH, WORDS, DEPTH, STEPS = 64, 32, 2, 3
Kind = Literal["mxfp8", "native", "fp8_block"]  # native: mxfp8 with products="native"
WIDTHS: dict[Kind, int] = {"fp8_block": 128}  # where blocks are wider than those of MXFP8
PRODUCTS: dict[Kind, Products] = {"mxfp8": "emulated", "native": "native", "fp8_block": "fp8"}


def coded(value: Tensor, kind: Kind = "mxfp8") -> Coded:
    """A matrix of values as modules see a weight in fp8."""
    blocks = (ROW, COLUMN) if kind == "native" else (BLOCKS[kind],)
    planes = [(plane.codes, plane.scales) for plane in encode(value.detach(), blocks)]
    backward = planes[1] if planes[1:] else None
    return Coded.of(value.shape, planes[0], backward, PRODUCTS[kind])


class Encoded(torch.autograd.Function):
    """The gradient of the decoded values is the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kind: Kind) -> Coded:
        return coded(weight, kind)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class QuantisedAtUse(nn.Linear):
    """fp8 off: the weight is whole and bf16, and is encoded where it is multiplied by."""

    kind: Kind = "mxfp8"

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, Encoded.apply(self.weight, self.kind), self.bias)


def off_in_the_same_groups() -> Any:
    """bf16 is gathered in the groups of fp8. Gradients must go the same way, collective by
    collective."""
    return mock.patch.object(wrapping, "codec_of", return_value=None)


def multiply_decoded(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, phase: str
) -> Tensor:
    """Compute what hardware does, which no test machine has: MXFP8 times MXFP8."""
    weight = decode(plane_over(codes, scales), dtype=torch.float32)
    rows = F.pad(x.float(), (0, 0, 0, -len(x) % 32))
    values = decode(encode(rows, (ROW,))[0], dtype=torch.float32)[: len(x)]
    y = values @ (weight.t() if phase == "forward" else weight)
    return (y if bias is None else y + bias.float()).to(x.dtype)


@contextmanager
def native_by_decoding() -> Iterator[None]:
    """Let ``products="native"`` run on any device."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(checks, "native_problem", return_value=None))
        stack.enter_context(mock.patch.object(fp8_native, "multiply", multiply_decoded))
        yield


class Layer(nn.Module):
    """Matrices that fp8 takes, and vectors that it does not."""

    def __init__(self, linear: type[nn.Linear], checkpointed: bool, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = linear(width, 3 * width)
        self.down = linear(3 * width, width, bias=False)
        self.checkpointed = checkpointed

    def forward(self, hidden: Tensor) -> Tensor:
        if self.checkpointed and torch.is_grad_enabled():
            return hidden + checkpoint(self.compute, hidden, use_reentrant=False)
        return hidden + self.compute(hidden)

    def compute(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """A tied pair of linears, a frozen one, an embedding that stays bf16, an odd head."""

    def __init__(
        self,
        linear: type[nn.Linear],
        *,
        outside: bool = False,
        inside: bool = False,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(linear, inside, width) for _ in range(DEPTH))
        self.first, self.second = linear(width, width), linear(width, width)
        self.second.weight = self.first.weight
        self.frozen = linear(width, width, bias=False).requires_grad_(False)
        self.head = nn.Linear(width, 17)
        self.outside = outside

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            if self.outside and torch.is_grad_enabled():
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        hidden = torch.tanh(self.first(hidden))
        hidden = hidden + self.frozen(torch.tanh(self.second(hidden)))
        return self.head(hidden)


STORED = {
    *(f"layers.{number}.{name}.weight" for number in range(DEPTH) for name in ("up", "down")),
    "first.weight",
    "frozen.weight",
}


def make(on: bool, kind: Kind = "mxfp8", **options: Any) -> Model:
    """The same values on every rank and in every call; ``on``: for fp8 storage."""
    torch.manual_seed(0)
    off = type("Off", (QuantisedAtUse,), {"kind": kind})
    options = {"width": WIDTHS.get(kind, WIDTH)} | options
    return Model(nn.Linear if on else off, **options)


def precision_of(on: bool, kind: Kind = "mxfp8") -> sw.Precision:
    if not on:
        return sw.Precision(weights="bf16", reduce="fp32")
    weights = "mxfp8" if kind == "native" else kind
    return sw.Precision(weights=weights, reduce="fp32", products=PRODUCTS[kind])


def wrap(model: Model, strategy: str, world_size: int, **options: Any) -> Model:
    placements = STRATEGIES[strategy]
    options = {"mesh": mesh_for(placements, world_size), "placements": placements} | options
    for layer in model.layers:
        sw.fully_shard(layer, **options)
    return sw.fully_shard(model, **options)


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "muon":
        return sw.optimizer(
            model, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=1e-2, weight_decay=0.1)
        )
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1
    )


def tokens(step: int, microbatch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * microbatch + rank)
    return torch.randint(0, 17, (2, 6), generator=generator)


def loss_of(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    output = model(batch)
    return F.cross_entropy(output.flatten(0, 1).float(), batch.flatten()), output.detach()


def train(
    model: nn.Module,
    rank: int,
    *,
    optimizer: torch.optim.Optimizer,
    steps: range = range(STEPS),
    microbatches: int = 1,
    evaluate: bool = False,
) -> dict[str, Tensor]:
    """Everything that two runs can be compared by: losses, outputs, main grads, main weights."""
    seen: dict[str, Tensor] = {}
    for step in steps:
        for microbatch in range(microbatches):
            model.set_is_last_backward(microbatch == microbatches - 1)
            loss, output = loss_of(model, tokens(step, microbatch, rank))
            (loss / microbatches).backward()
            seen[f"loss {step}.{microbatch}"] = loss.detach()
            seen[f"output {step}.{microbatch}"] = output
        if step in (steps[0], steps[-1]):
            named = model.named_parameters()
            grads = {f"grad {step} {name}": p.grad for name, p in named if p.grad is not None}
            seen |= whole_tensors(grads)
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            with torch.no_grad():
                seen[f"evaluation {step}"] = model(tokens(step, 77, rank))
    return seen | whole_tensors({f"main {name}": p for name, p in model.named_parameters()})


def parts_of(name: str, weight: Coded) -> dict[str, Tensor]:
    return {f"{name} {part}": getattr(weight, part) for part in weight.__tensor_flatten__()[0]}


def staged_weights(model: nn.Module) -> list[bool]:
    """By group in fp8: whether bf16 is gathered, and encoded by every rank."""
    groups = [group for unit in units_of(model) for group in unit.groups if group.format]
    return [bool(group.codec.staged_because(group.layout)) for group in groups]


def planes_seen(model: nn.Module) -> dict[str, Tensor]:
    """Codes and scales of every stored weight, as gathered now."""
    found: dict[str, Tensor] = {}
    for unit in units_of(model):
        for group in unit.groups:
            if group.format is None:
                continue
            group.gather(unit.runtime)
            group.wait(unit.runtime)
            for item, parameter in zip(group.items, group.unsharded, strict=True):
                for name, tensor in parts_of(f"{unit.name} {item.name}", parameter).items():
                    found[name] = tensor.clone()
            group.release(unit.runtime)
    return found


def expected_planes(model: nn.Module, kind: Kind) -> dict[str, Tensor]:
    """The same from the main weights, by definition: encode(bf16(main))."""
    found: dict[str, Tensor] = {}
    for unit in units_of(model):
        for group in unit.groups:
            if group.format is None:
                continue
            for item, parameter in zip(group.items, group.sharded, strict=True):
                whole = parameter.detach().full_tensor().to(torch.bfloat16)
                found |= parts_of(f"{unit.name} {item.name}", coded(whole, kind))
    return found


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys(), (
        f"{what}: {sorted(found.keys() ^ expected.keys())[:6]} on one side only"
    )
    assert found, f"{what}: nothing to compare"
    differing = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    assert not differing, f"{what}: {len(differing)} of {len(found)} differ, first {differing[:4]}"
