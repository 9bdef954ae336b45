# SPDX-License-Identifier: Apache-2.0
"""A small model with everything that a checkpoint must keep, and a training loop over it.

Odd shapes, a tied head, a buffer, a frozen parameter, dropout: what a wrong name, a lost generator
or a piece in the wrong place would change, shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.core.placements import STRATEGIES
from tests.models import mesh_for
from tests.whole import whole_tensors

WORDS, WIDTH, BATCH = 17, 10, 12


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width, bias=False)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Embedding, blocks, a head that is the embedding; 14 parameters, one frozen; one buffer."""

    def __init__(self, width: int = WIDTH, layers: int = 2, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.position = nn.Parameter(torch.randn(5, width), requires_grad=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words) + self.position.detach()
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def wrap(net: Net, strategy: str, world_size: int, **options: Any) -> Net:
    """Each block, then the model; "plain" leaves it alone."""
    if strategy == "plain":
        return net
    placements = STRATEGIES[strategy]
    options = {"mesh": mesh_for(placements, world_size), "placements": placements} | options
    for block in net.blocks:
        sw.fully_shard(block, **options)
    return sw.fully_shard(net, **options)


def by_grain(grain: sw.Grain) -> dict[str, Any]:
    """Options of ``wrap`` that cut parameters elsewhere."""
    return {"grain": lambda name, parameter: grain}


def one_group(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)


def two_groups(net: nn.Module) -> torch.optim.Optimizer:
    """Other groups, in another order, frozen ones left out."""
    trainable = [p for p in net.parameters() if p.requires_grad]
    vectors = [p for p in reversed(trainable) if p.dim() < 2]
    matrices = [p for p in trainable if p.dim() >= 2]
    groups: Iterable[dict[str, Any]] = ({"params": vectors}, {"params": matrices})
    return torch.optim.AdamW(groups, lr=3e-2)


def muon(net: nn.Module) -> torch.optim.Optimizer:
    return sw.optimizer(net, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=1e-2))


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, dampening=0.5)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": one_group,
    "two_groups": two_groups,
    "muon": muon,
    "sgd": momentum,
}


def batch(position: int, rank: int, world_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + position)
    words = torch.randint(0, WORDS, (BATCH, 5), generator=generator)
    return words.chunk(world_size)[rank]


def train_step(
    net: Net, optimizer: torch.optim.Optimizer, position: int, rank: int, world_size: int
) -> float:
    words = batch(position, rank, world_size)
    loss = F.cross_entropy(net(words).flatten(0, 1), words.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    net.seen += words.numel() * world_size
    return loss.item()


def make(
    strategy: str, optimizer: str, world_size: int, seed: int, **options: Any
) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = wrap(Net(), strategy, world_size, **options)
    return net, OPTIMIZERS[optimizer](net)


def trained(
    strategy: str, optimizer: str, rank: int, world_size: int, seed: int, **options: Any
) -> tuple[Net, torch.optim.Optimizer]:
    """After two steps."""
    net, stepper = make(strategy, optimizer, world_size, seed, **options)
    for step in range(2):
        train_step(net, stepper, step, rank, world_size)
    return net, stepper


def whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def everything(net: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Every value that must survive, whole (collective)."""
    found = dict(net.state_dict())
    assert len(found) == 16 and "seen" in found and "scratch" not in found
    if optimizer is None:
        return whole_tensors(found)
    states = 0
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = torch.as_tensor(value)
            states += 1
    assert states >= 13, "optimizer states are compared too"
    return whole_tensors(found)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), f"{name} differs"
