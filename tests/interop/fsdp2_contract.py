# SPDX-License-Identifier: Apache-2.0
"""The contract of FSDP2, as cases: a registry, a model, and what cases have in common."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import shardwise as sw
from tests.contract.helpers import assert_close, full

LIBRARIES = {"torch": torch_fsdp.fully_shard, "shardwise": sw.fully_shard}
Case = Callable[[Any], None]
CASES: dict[str, Case] = {}
RANKS: dict[str, int] = {}  # on which a case runs
CPU_ONLY: dict[str, str] = {}  # why a GPU leaves a case out
TORCH_FAILS: dict[str, str] = {}  # a part of the error that torch raises


def case(
    name: str, *, torch_fails: str | None = None, ranks: int = 2, cpu_only: str | None = None
) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        # As a command, the file of the cases is read twice: as the command, and under its name.
        assert CASES.get(name, function).__qualname__ == function.__qualname__, name
        CASES[name], RANKS[name] = function, ranks
        if cpu_only is not None:
            CPU_ONLY[name] = cpu_only
        if torch_fails is not None:
            TORCH_FAILS[name] = torch_fails
        return function

    return add


# ------------------------------------------------------------------------------ a model


class Net(nn.Module):
    """An embedding, two blocks, and a tail that is wrapped as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, padding_idx=0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 12, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def shard_net(shard: Any, net: Any, **more: Any) -> Any:
    """As torchtitan and accelerate wrap: blocks, the tail as a list, the model."""
    for block in net.blocks:
        shard(block, **more)
    shard([net.norm, net.output], **more)
    shard(net, **more)
    return net


def both(shard: Any, **more: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    plain = Net()
    return shard_net(shard, copy.deepcopy(plain), **more), plain


def words() -> Tensor:
    return torch.arange(24).view(3, 8) * 5 % 12  # the same on every rank


def step(model: Any, optimizer: Any) -> None:
    loss = model(words()).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same(net: Any, plain: Any, tolerance: float = 1e-5) -> None:
    theirs = dict(plain.named_parameters())
    assert [name for name, _ in net.named_parameters()] == list(theirs)
    for name, parameter in net.named_parameters():
        assert_close(
            full(parameter.detach()).float(), theirs[name].detach().float(), name, tolerance
        )


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x))  # type: ignore[no-any-return]


def trains(net: Any, plain: Any) -> None:
    for model in (net, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            step(model, optimizer)
    assert_same(net, plain)
