# SPDX-License-Identifier: Apache-2.0
"""A steady step sends what ``sw.comm.record()`` lists, to the byte, and nothing else (I16)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.core import comm
from tests.contract.helpers import STRATEGIES, Net, ranks_for, word_loss, wrap
from tests.ranks import on_ranks

pytestmark = pytest.mark.cpu_only("counts the messages that gloo's collectives are made of")

WAYS = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object"),
    *("all_reduce", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "monitored_barrier", "new_group"),
    *("recv", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    *("scatter", "scatter_object_list", "send"),
)


class Functional(TorchDispatchMode):
    """Notes collectives that are operators, as those of torch's DTensor."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and func._schema.name not in ("c10d::send", "c10d::recv_"):
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def unexplained(step: Any) -> tuple[int, list[str]]:
    """The bytes that a step sends from rank to rank and does not list, and the calls of
    torch.distributed that are no message from rank to rank."""
    sent, others = 0, list[str]()
    isend = dist.isend

    def count(tensor: Tensor, *rest: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes
        return isend(tensor, *rest)

    def note(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: others.append(name) or function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, sw.comm.record() as calls, Functional(others):
        patch.setattr(dist, "isend", count)
        for name in WAYS:
            if hasattr(dist, name):
                patch.setattr(dist, name, note(name, getattr(dist, name)))
        step()
    assert len(calls) > 1 and sent > 0
    return sent - sum(map(sent_bytes, calls)), others


def sent_bytes(call: comm.Call) -> int:
    """Bytes that leave a rank in gloo's messages of one collective."""
    if call.operation == "all_to_all":
        return call.nbytes
    if call.operation == "all_reduce":
        assert call.size == 2 or call.nbytes < 1024, "larger ones take two rounds"
        return call.nbytes * (call.size - 1)
    return call.nbytes * (call.size - 1) // call.size


OPTIMIZERS: dict[str, Any] = {
    "torch": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2),
    "adamw": lambda net: sw.optimizer(net, matrix=None, elementwise=sw.adamw(lr=1e-2)),
    "muon": lambda net: sw.optimizer(net, matrix=sw.muon(), elementwise=sw.adamw(lr=1e-2)),
}


def train(net: Any, optimizer: Any, rank: int, in_step: bool) -> None:
    for last in (False, True):
        net.set_is_last_backward(last)
        word_loss(net, rank).backward()
    if isinstance(optimizer, torch.optim.AdamW):
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    else:
        optimizer.clip_grad_norm(0.1, in_step=in_step)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "data_parallel"])
@on_ranks(ranks_for)
def test_a_steady_step_sends_what_it_lists(
    rank: int, world_size: int, strategy: str, kind: str
) -> None:
    net = wrap(Net(), world_size, strategy)
    optimizer = OPTIMIZERS[kind](net)
    step = partial(train, net, optimizer, rank, in_step=strategy == "zero1")
    for _ in range(2):
        step()
    assert [unexplained(step) for _ in range(2)] == [(0, []), (0, [])]


@on_ranks(2)
def test_a_round_of_the_hosts_is_found(rank: int, world_size: int) -> None:
    """The negative control."""
    net, axis = wrap(Net(), world_size, "zero3"), comm.as_axis(dist.group.WORLD)  # type: ignore[arg-type]
    step = partial(train, net, OPTIMIZERS["muon"](net), rank, in_step=False)
    for _ in range(2):
        step()
    for check, found in (
        (lambda *_: comm.agree(rank, axis), (0, ["all_gather"])),
        (lambda *_: dist.all_reduce(torch.ones(1)), (0, ["all_reduce"])),
    ):
        hook = net.register_forward_pre_hook(lambda *_: (check(), None)[1])  # noqa: B023
        extra, others = unexplained(step)
        hook.remove()
        assert (extra, [name for name in others if "::" not in name][:1]) == found
