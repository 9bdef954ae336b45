# SPDX-License-Identifier: Apache-2.0
"""Training with fp8 weights, and the same training with bf16 weights quantised at use."""

from __future__ import annotations

import weakref
from typing import Any, get_args
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.precision.fp8 import Plane, encode
from shardwise.precision.fp8_functions import Recipe, fp8_linear
from shardwise.precision.fp8_tensor import READS, Format, FP8Tensor, Matrices, Reads
from shardwise.shard.fp8_group import GROUPS, FP8Weight
from shardwise.shard.fp8_parameter import FP8Parameter
from shardwise.shard.group import Group
from shardwise.shard.module import units_of
from tests.models import STRATEGIES, mesh_for
from tests.whole import whole_tensors

WIDTH, WORDS, DEPTH, STEPS = 64, 32, 2, 3
WIDTHS: dict[Format, int] = {"fp8_block": 128}  # where blocks are wider than those of MXFP8


def recipe_of(format: Format) -> Recipe:
    return precision_of(True, format).recipe


class QuantisedAtUse(nn.Linear):
    """fp8 off: the weight is whole and bf16, and is encoded where it is multiplied by."""

    format: Format = "mxfp8_rowcol"

    def forward(self, input: Tensor) -> Tensor:
        planes = FP8Tensor.encode(self.weight.detach(), self.format)
        parameter = self.weight if self.weight.requires_grad else None
        recipe = recipe_of(self.format)
        return fp8_linear(input, planes, self.bias, parameter=parameter, recipe=recipe)


class AtUse(Group):
    """fp8 off in the groups of fp8 on: bf16 is gathered and stays bf16 until it is multiplied by.

    The weights' way is that of every bf16 group; the gradients' way must be that of MXFP8 groups,
    collective by collective.
    """

    format: Format = "mxfp8_rowcol"
    matmul = None

    def _whole_parameter(self, index: int, requires_grad: bool) -> FP8Parameter:
        weight = FP8Weight(weakref.ref(self), index)
        return FP8Parameter.of(weight, requires_grad, self.precision.recipe, self.device)

    def plane(self, index: int, phase: Reads) -> Plane:
        block, rounding = READS[self.format][phase], self.precision.rounding
        return encode(self.whole.view(index), (block,), rounding=rounding)[0]


class SquareAtUse(AtUse):
    format: Format = "mxfp8_2d"


class BlockAtUse(AtUse):
    format: Format = "fp8_block"


AT_USE = {group.format: group for group in (AtUse, SquareAtUse, BlockAtUse)}


def off_in_the_same_groups() -> Any:
    return mock.patch.dict(GROUPS, AT_USE)


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


def make(on: bool, format: Format = "mxfp8_rowcol", **options: Any) -> Model:
    """The same values on every rank and in every call; ``on``: for fp8 storage."""
    torch.manual_seed(0)
    off = type("Off", (QuantisedAtUse,), {"format": format})
    options = {"width": WIDTHS.get(format, WIDTH)} | options
    return Model(nn.Linear if on else off, **options)


def precision_of(on: bool, format: Format = "mxfp8_rowcol") -> sw.Precision:
    return sw.Precision(weights=format if on else "bf16", reduce="fp32")


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


def planes_seen(model: nn.Module) -> dict[str, Tensor]:
    """Codes and scales of every stored weight, as gathered now."""
    found: dict[str, Tensor] = {}
    for unit in units_of(model):
        for group in unit.groups:
            if group.format is None:
                continue
            for phase in ("forward", "backward"):
                group.gather(unit.runtime, phase=phase)
                group.wait(unit.runtime)
            for item, parameter in zip(group.items, group.unsharded, strict=True):
                for name, tensor in parameter.quantised.state_dict().items():
                    found[f"{unit.name} {item.name} {name}"] = tensor.clone()
            group.release(unit.runtime)
    return found


def expected_planes(model: nn.Module, format: Format) -> dict[str, Tensor]:
    """The same from the main weights, by definition: encode(bf16(main))."""
    found: dict[str, Tensor] = {}
    for unit in units_of(model):
        for group in unit.groups:
            if group.format is None:
                continue
            for item, parameter in zip(group.items, group.sharded, strict=True):
                whole = parameter.detach().full_tensor().to(torch.bfloat16)
                # Embeddings are stored as rows, whatever matrices are stored as.
                stored = format if group.format in get_args(Matrices) else group.format
                for name, tensor in FP8Tensor.encode(whole, stored).state_dict().items():
                    found[f"{unit.name} {item.name} {name}"] = tensor
    return found


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys(), (
        f"{what}: {sorted(found.keys() ^ expected.keys())[:6]} on one side only"
    )
    assert found, f"{what}: nothing to compare"
    differing = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    assert not differing, f"{what}: {len(differing)} of {len(found)} differ, first {differing[:4]}"
