# SPDX-License-Identifier: Apache-2.0
"""What only an accelerator can show: ``python -m tests.device`` on a machine with a GPU.

CI has none, so pytest does not collect this. One NCCL rank: memory that is really freed, streams
that do not race, offloading, fp16 scaling. `make test-gpu` trains on several.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.core.streams import Lanes
from tests.ranks import run_ranks

TOKENS = 61
STRATEGIES = ("zero0", "zero1", "zero2", "zero3", "hsdp", "hfsdp")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width + 5)  # rows that divide by nothing
        self.down = nn.Linear(4 * width + 5, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, recompute: bool = False, width: int = 96) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def mesh_for(strategy: str, world_size: int) -> tuple[DeviceMesh, sw.Placements]:
    if strategy.startswith("zero"):
        return init_device_mesh("cuda", (world_size,), mesh_dim_names=("dp",)), sw.zero(
            int(strategy[-1])
        )
    outer = 2 if world_size % 2 == 0 else 1
    shape = (outer, world_size // outer)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("dp_outer", "dp"))
    return mesh, sw.hsdp() if strategy == "hsdp" else sw.hfsdp()


def wrap(net: Net, strategy: str, world_size: int, **options: object) -> Net:
    mesh, placements = mesh_for(strategy, world_size)
    for block in net.blocks:
        sw.fully_shard(block, mesh=mesh, placements=placements, **options)  # type: ignore[arg-type]
    return sw.fully_shard(net, mesh=mesh, placements=placements, **options)  # type: ignore[arg-type]


def batch(step: int, micro: int, rank: int, world_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + micro)
    tokens = torch.randint(0, TOKENS, (12, 16), generator=generator)
    return tokens.chunk(world_size)[rank].cuda()


def train(net: Net, rank: int, world_size: int, micros: int, steps: int = 4) -> list[Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=3e-2, momentum=0.9, fused=True)
    losses = []  # left on the device: reading one would make the host wait and hide races
    for step in range(steps):
        for micro in range(micros):
            if isinstance(net, sw.ShardedModule):
                net.set_is_last_backward(micro == micros - 1)
            tokens = batch(step, micro, rank, world_size)
            logits = net(tokens).float()
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) / micros
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def values(net: Net) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, sw.ShardedTensor) else p.detach()).cpu()
        for name, p in net.named_parameters()
    }


def build(recompute: bool = False, width: int = 96) -> Net:
    torch.manual_seed(7)
    return Net(recompute, width)


class Serial(Lanes):
    """Everything on one stream: the truth that overlap must not change."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._streams = dict.fromkeys(self._streams, None)

    def on(self, lane: str) -> contextlib.AbstractContextManager[object]:  # type: ignore[override]
        return contextlib.nullcontext()

    def _stream(self, lane: str) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)


def check_races(rank: int, world_size: int, strategy: str) -> None:
    """Kernels long enough to overlap, no host waits: the same bits as on one stream."""
    precision = sw.Precision(weights="bf16", reduce="fp32")
    runs = []
    for serial in (True, False):
        net = wrap(build(width=1536), strategy, world_size, precision=precision)
        if serial:
            net._shardwise_unit._comm_ctx.lanes = Serial(torch.device("cuda", 0))
        losses = train(net, rank, world_size, 2, steps=6)
        runs.append((losses, values(net)))
    (losses, expected), (overlapped, found) = runs
    assert all(map(torch.equal, overlapped, losses)), (overlapped, losses)
    assert losses[-1] < 0.9 * losses[0], "it did not learn"
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def check_offload(rank: int, world_size: int, strategy: str) -> None:
    net = wrap(build(), strategy, world_size)
    train(net, rank, world_size, 2)
    offloaded = wrap(build(), strategy, world_size, offload_policy=CPUOffloadPolicy())
    assert all(p.device.type == "cpu" for p in offloaded.parameters())
    train(offloaded, rank, world_size, 2)
    ours, theirs = values(offloaded), values(net)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)


def check_memory(rank: int, world_size: int, strategy: str) -> None:
    """Deleting the model gives every byte back, at once."""
    warm = build().cuda()
    warm(batch(0, 0, rank, world_size)).float().mean().backward()  # cuBLAS takes its workspace
    del warm
    gc.collect()
    torch.cuda.synchronize()
    before, ledger_before = torch.cuda.memory_allocated(), dict(sw.ledger.snapshot())
    gc.disable()
    net = wrap(build(), strategy, world_size, precision=sw.Precision(weights="bf16"))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    tokens = batch(0, 0, rank, world_size)
    net(tokens).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del net, optimizer, tokens
    gc.enable()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before, torch.cuda.memory_allocated() - before
    assert sw.ledger.snapshot() == ledger_before


def check_scaler(rank: int, world_size: int, strategy: str) -> None:
    net = wrap(build(), strategy, world_size, precision=sw.Precision(weights="fp16", reduce="fp32"))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    before = values(net)
    for broken in (False, True):
        tokens = batch(0, 0, rank, world_size)
        loss = F.cross_entropy(net(tokens).float().flatten(0, 1), tokens.flatten())
        scaler.scale(loss).backward()
        if broken and rank == world_size - 1:
            for parameter in net.parameters():
                parameter.grad.to_local().fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = values(net)
        changed = any(not torch.equal(after[name], before[name]) for name in after)
        assert changed is not broken, "an overflow on one rank must skip the step on all"
        before = after


def main() -> int:
    failures = 0
    checks: list[tuple[object, ...]] = [(check_memory, name) for name in STRATEGIES]
    checks += [(check_races, name) for name in ("zero1", "zero3", "hfsdp")]
    checks += [(check_offload, "zero3"), (check_offload, "hfsdp"), (check_scaler, "zero3")]
    for check, strategy in checks:
        label = f"{check.__name__} {strategy}"  # type: ignore[attr-defined]
        try:
            run_ranks(check, 1, strategy, backend="nccl", timeout=100)  # type: ignore[arg-type]
            print("ok    ", label, flush=True)
        except Exception:
            failures += 1
            print("FAILED", label, traceback.format_exc()[-2500:], flush=True)
    print(f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
