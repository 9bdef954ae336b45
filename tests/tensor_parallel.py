# SPDX-License-Identifier: Apache-2.0
"""A small model under torch's tensor parallelism and ours, and the same one in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import shardwise as sw
from tests.one_card import device_type
from tests.whole import whole_parameters, whole_tensors

WIDTH, WORDS, LENGTH = 8, 33, 8  # two ranks have 17 and 16 words: layouts that would differ


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.final = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


@cache
def grid(*sizes: int) -> DeviceMesh:
    """(dp, tp), or (dp_outer, dp, tp)."""
    names = ("dp_outer", "dp", "tp")[-len(sizes) :]
    return init_device_mesh(device_type(), sizes, mesh_dim_names=names)


def data_rank(mesh: DeviceMesh) -> int:
    """Which of the data-parallel ranks this one is."""
    *coordinate, _ = mesh.get_coordinate() or ()
    rank = 0
    for size, at in zip(mesh.shape, coordinate, strict=False):
        rank = rank * size + at
    return rank


def tiled(mesh: DeviceMesh, sequence: bool = True, words: int = WORDS) -> Net:
    """The model over ``tp``. Without ``sequence`` the norms, the embedding and the head stay plain
    tensors."""
    model = Net(words)
    for block in model.blocks:
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(use_local_output=True),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
        parallelize_module(block, mesh["tp"], plan)
    if sequence:
        parallelize_module(
            model,
            mesh["tp"],
            {
                "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "final": SequenceParallel(),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            },
        )
    return model


def sharded(mesh: DeviceMesh, placements: sw.Placements, sequence: bool = True, **kw: Any) -> Net:
    """The same, its units sharded over the data-parallel axes."""
    model = tiled(mesh, sequence)
    for block in model.blocks:
        sw.fully_shard(block, mesh=mesh, placements=placements, **kw)
    return sw.fully_shard(model, mesh=mesh, placements=placements, **kw)


def bucketed(mesh: DeviceMesh, placements: sw.Placements, sequence: bool = True, **kw: Any) -> Net:
    return sw.data_parallel(tiled(mesh, sequence), mesh=mesh, placements=placements, **kw)


def loss_of(model: nn.Module, which: int) -> Tensor:
    words = torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(which))
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten())


def muon_of(model: nn.Module, **settings: Any) -> Any:
    matrix = sw.muon(lr=0.05, weight_decay=0.1, **settings)
    return sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=1e-2))


def adamw_of(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


Optimize = Callable[[nn.Module], Any]


def train(
    model: nn.Module, optimizer: Any, batches: list[list[int]], max_norm: float = 0.5
) -> list[dict[str, Tensor]]:
    """By step: the losses of this rank's batches and the gradient norm. Of the first step all whole
    gradients, of the last the weights after it: putting them together takes as long as a step."""
    found = []
    for number, step in enumerate(batches):
        losses = {f"loss {which}": loss_of(model, which) for which in step}
        torch.stack(list(losses.values())).mean().backward()
        values = {name: loss.detach() for name, loss in losses.items()}
        grads = {f"grad {name}": one.grad for name, one in model.named_parameters()}
        assert all(grad is not None for grad in grads.values())
        if number == 0:
            values |= whole_tensors(grads)
        if hasattr(optimizer, "clip_grad_norm"):
            values["norm"] = optimizer.clip_grad_norm(max_norm)
        else:
            values["norm"] = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        assert values["norm"] > max_norm, "there was something to clip"
        optimizer.step()
        optimizer.zero_grad()
        if number == len(batches) - 1:
            values |= whole_parameters(model)
        found.append(values)
    return found


@cache
def one_process(optimize: Optimize, num_steps: int, num_batches: int) -> list[dict[str, Tensor]]:
    """The same training, every batch on this rank."""
    model = Net()
    return train(model, optimize(model), batches(num_steps, num_batches))


def batches(num_steps: int, num_ranks: int, rank: int | None = None) -> list[list[int]]:
    """The numbers of the batches of every step; of one rank, or of all."""
    ranks = range(num_ranks) if rank is None else (rank,)
    return [[num_ranks * step + one for one in ranks] for step in range(num_steps)]


def assert_close(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    """Gradients and weights like those of one process, to rounding."""
    for step, (mine, its) in enumerate(zip(found, expected, strict=True)):
        losses = [name for name in mine if name.startswith("loss")]
        assert losses and mine.keys() - set(losses) == {k for k in its if not k.startswith("loss")}
        for name, value in mine.items():
            near = 1e-5 if name.startswith(("loss", "grad", "norm")) else 3e-4
            close = torch.allclose(value, its[name], atol=near, rtol=1e-3)
            assert close, (step, name, (value - its[name]).abs().max())
