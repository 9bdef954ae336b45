# SPDX-License-Identifier: Apache-2.0
"""Small models and batches that distributed tests share; every size is odd on purpose."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from tests.one_card import device_type

ZERO = {f"zero{stage}": sw.zero(stage) for stage in range(4)}
STRATEGIES = ZERO | {"hsdp": sw.hsdp(), "hfsdp": sw.hfsdp()}
PRECISIONS: dict[str, sw.Precision | None] = {
    "fp32": None,
    "bf16": sw.Precision(weights="bf16", reduce="fp32"),
}
WORDS = 17  # rows that do not divide by 2, 3 or 4
BATCH = 12  # sequences of all ranks together: divides by 1, 2, 3 and 4


class Layer(nn.Module):
    """A residual block: matrices, vectors and a norm, so rows of several widths in one unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """Embedding, layers, head: the root unit owns parameters at both ends."""

    def __init__(self, width: int = 10, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Weights(nn.Module):
    """Parameters of these shapes by name, for optimizers alone; forward changes nothing."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], seed: int = 0, scale: float = 1.0
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator) * scale
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def filled(value: float, width: int = 9) -> nn.Module:
    """Two linear layers with one value everywhere: a mixture of two checkpoints shows."""
    made = nn.Sequential(nn.Linear(7, width), nn.Linear(width, 5))
    fill(made, value)
    return made


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def make_model(width: int = 10, depth: int = 3, seed: int = 0) -> Model:
    """The same values on every rank and in every call."""
    torch.manual_seed(seed)
    return Model(width, depth)


def tokens(step: int, microbatch: int = 0, rank: int = 0, world_size: int = 1) -> Tensor:
    """This rank's sequences; those of all ranks together are what one process would see."""
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    return torch.randint(0, WORDS, (BATCH, 5), generator=generator).chunk(world_size)[rank]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean over this rank's tokens; the mean over ranks is the mean over all."""
    return F.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten())


def ranks_for(strategy: str) -> int:
    """How many ranks show what is particular to a strategy."""
    return 4 if strategy in ("hsdp", "hfsdp") else 2


@cache
def mesh_of(*sizes: int) -> DeviceMesh:
    """A data-parallel mesh; kept, because every new one opens sockets that stay open."""
    names = {1: ("dp",), 2: ("dp_outer", "dp"), 3: ("far", "middle", "near")}[len(sizes)]
    return init_device_mesh(device_type(), sizes, mesh_dim_names=names)


def mesh_for(placements: sw.Placements, world_size: int) -> DeviceMesh:
    """One axis, or two of which the outer has two ranks."""
    if placements.num_axes == 1:
        return mesh_of(world_size)
    return mesh_of(2, world_size // 2) if world_size % 2 == 0 else mesh_of(1, world_size)


def shard_model(
    model: Model, placements: sw.Placements, mesh: DeviceMesh, **options: object
) -> Model:
    """Each layer a unit, then the model."""
    for layer in model.layers:
        sw.fully_shard(layer, mesh=mesh, placements=placements, **options)
    return sw.fully_shard(model, mesh=mesh, placements=placements, **options)
