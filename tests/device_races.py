# SPDX-License-Identifier: Apache-2.0
"""Gathers that start right after a slow write, on a GPU: ``python -m tests.device_races``.

    compute   |......... sleep .........| write main |
    gather    |                                      | read main

One NCCL rank in bf16. A write to the main weights waits behind a long sleep on the compute stream;
a gather that did not wait for it would read the old weights. And the other way round: a long sleep
on the gather stream before a gather, and a write that must not overtake it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import shardwise as sw
from shardwise.core.streams import Lanes
from tests.ranks import run_ranks

WIDTH = 256
CYCLES = 200_000_000  # about 0.1 s
OLD, NEW = 1.0, 2.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(stage: int, **options: Any) -> Net:
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    options = {"precision": sw.Precision(weights="bf16", reduce="fp32")} | options
    net = Net()
    for module in (*net.blocks, net):
        sw.fully_shard(module, mesh=mesh, placements=sw.zero(stage), **options)
    fill(net, OLD)
    with torch.no_grad():
        net(inputs())
    torch.cuda.synchronize()
    return net


def inputs() -> Tensor:
    return torch.ones(1, WIDTH, device="cuda", dtype=torch.bfloat16)


def fill(net: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(value)


def write_late(net: nn.Module) -> None:
    """The host is done at once; the device writes after a while."""
    torch.cuda._sleep(CYCLES)
    fill(net, NEW)


def assert_value(found: Tensor, value: float) -> None:
    torch.cuda.synchronize()
    seen = found.float().unique().tolist()
    assert seen == [value], f"read {seen}, not {value}"


# ------------------------------------------------------------------------- a gather after a write


def unshard(net: Net) -> None:
    net.blocks[1].unshard()
    assert_value(net.blocks[1].weight.clone(), NEW)


def unshard_ahead(net: Net) -> None:
    handle = net.blocks[1].unshard(async_op=True)
    handle.wait()
    assert_value(net.blocks[1].weight.clone(), NEW)


def submodule(net: Net) -> None:
    with torch.no_grad():
        assert_value(net.blocks[1](inputs()), NEW * WIDTH)


def whole_model(net: Net) -> None:
    with torch.no_grad():
        found = net(inputs())
    torch.cuda.synchronize()
    assert found.float().unique().tolist() == [(NEW * WIDTH) ** 4], found


def check_read(rank: int, world_size: int, stage: int, read: Callable[[Net], None]) -> None:
    net = make(stage)
    write_late(net)
    read(net)


def check_loaded(rank: int, world_size: int, stage: int) -> None:
    """A load on the device, then a submodule alone."""
    net = make(stage)
    state = {name: torch.full_like(p.full_tensor(), NEW) for name, p in net.named_parameters()}
    torch.cuda._sleep(CYCLES)
    net.load_state_dict(state)
    submodule(net)


def check_kept_graph(rank: int, world_size: int, stage: int) -> None:
    """A write between two backwards of one graph is refused; it is no race."""
    net = make(stage)
    x = inputs().requires_grad_()
    out = net.blocks[1](x)
    out.sum().backward(retain_graph=True)
    x.grad = None
    write_late(net)
    with pytest.raises(RuntimeError, match="were written between a forward and its backward"):
        out.sum().backward()


# ------------------------------------------------------------------------- a write after a gather


def delay_gathers(net: Net) -> None:
    """The gather lane sleeps before whatever it is given next."""
    lanes: Lanes = net.blocks[1]._shardwise_unit.runtime.lanes
    with lanes.on("gather"):
        torch.cuda._sleep(CYCLES)


def check_overtaken(rank: int, world_size: int, stage: int, how: str) -> None:
    """A gather is under way, nobody waits for it, and the weights are written once more."""
    net = make(stage)
    block, unit = net.blocks[1], net.blocks[1]._shardwise_unit
    parameter = block.weight
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    fill(net, NEW)
    torch.cuda.synchronize()
    delay_gathers(net)
    block.unshard(async_op=True)
    if how == "optimizer":
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    elif how == "to_local":
        parameter.to_local().fill_(9.0)
    else:
        fill(net, 9.0)
    assert_value(unit.groups[0].whole.view(0), NEW)  # what was gathered is what was there then


def check_offloaded(rank: int, world_size: int, stage: int) -> None:
    """The host writes pinned weights whose copy to the device has not begun."""
    net = make(stage, offload_policy=CPUOffloadPolicy())
    block, unit = net.blocks[1], net.blocks[1]._shardwise_unit
    fill(net, NEW)
    delay_gathers(net)
    block.unshard()
    unit.hide()
    fill(net, 9.0)
    assert_value(unit.groups[0].whole.view(0), NEW)


# ------------------------------------------------------------------------------------- the others


def check_capture(rank: int, world_size: int, stage: int) -> None:
    net = make(stage)
    graph = torch.cuda.CUDAGraph()
    x = inputs()
    with torch.cuda.graph(graph), torch.no_grad():
        with pytest.raises(RuntimeError, match="CUDA graph"):
            net(x)
        x.mul(2)  # a graph of something
    torch.cuda.synchronize()
    with torch.no_grad():
        net(x)  # training goes on


def main() -> int:
    checks: list[tuple[Any, ...]] = []
    for stage in (1, 3):
        for read in (unshard, unshard_ahead, submodule, whole_model):
            checks.append((check_read, stage, read))
        checks += [(check_loaded, stage), (check_kept_graph, stage)]
        checks += [(check_overtaken, stage, how) for how in ("write", "to_local", "optimizer")]
        checks += [(check_offloaded, stage), (check_capture, stage)]
    failures = 0
    for check, *arguments in checks:
        words = [getattr(argument, "__name__", str(argument)) for argument in arguments]
        label = f"{check.__name__} {' '.join(words)}"
        try:
            run_ranks(check, 1, *arguments, backend="nccl", timeout=100)
            print("ok    ", label, flush=True)
        except Exception:
            failures += 1
            print("FAILED", label, traceback.format_exc()[-2500:], flush=True)
    print(f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
