# SPDX-License-Identifier: Apache-2.0
"""Train a small byte-level model on this machine's Python sources, under any strategy.

    torchrun --standalone --nproc-per-node 2 examples/01_fully_shard.py --strategy zero3

A plain torch optimizer, plain torch clipping, a plain loop: only ``fully_shard`` is ours. Ends with
the shard
map of one block, what each strategy keeps at rest, and the loss against the bigram entropy of the
text.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw

CONTEXT, WIDTH, HEADS, LAYERS = 64, 96, 4, 3
STRATEGIES = {
    **{f"zero{stage}": sw.zero(stage) for stage in range(4)},
    "hsdp": sw.hsdp(),
    "hfsdp": sw.hfsdp(),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, context, width]
        batch, context, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, context, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, context, width / heads]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, context, WIDTH))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, context] -> [batch, context, 256]
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def corpus() -> Tensor:
    """The standard library's own sources: always there, no download."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def bigram_bits(data: Tensor) -> float:
    """Bits per byte of a model that knows only the byte before."""
    counts = torch.bincount(data[:-1] * 256 + data[1:], minlength=65536).view(256, 256).double()
    chance = counts / counts.sum(1, keepdim=True).clamp(min=1)
    logs = torch.where(counts > 0, chance, torch.ones_like(chance)).log2()
    return float(-(counts * logs).sum() / counts.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--strategy", choices=sorted(STRATEGIES), default="zero3")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="sequences a rank")
    arguments = parser.parse_args()
    two_axes = arguments.strategy in ("hsdp", "hfsdp")
    mesh = sw.init_mesh(dp_outer=2) if two_axes else sw.init_mesh()
    if two_axes and mesh.ndim != 2:
        raise SystemExit("hsdp and hfsdp need an even number of ranks")
    rank, world = dist.get_rank(), dist.get_world_size()
    placements = STRATEGIES[arguments.strategy]

    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        sw.fully_shard(block, mesh=mesh, placements=placements)
    sw.fully_shard(model, mesh=mesh, placements=placements)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=4e-3, total_steps=arguments.steps, pct_start=0.1
    )

    data, device = corpus(), next(model.parameters()).device
    held_out = data[-100_000:]
    generator = torch.Generator().manual_seed(1 + rank)  # every rank its own samples
    started = time.perf_counter()
    with sw.comm.record() as calls:
        for step in range(arguments.steps):
            starts = torch.randint(0, len(data) - 101_000, (arguments.batch,), generator=generator)
            window = torch.stack([data[s : s + CONTEXT + 1] for s in starts]).to(device)
            loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if rank == 0 and (step % 20 == 0 or step == arguments.steps - 1):
                bits = loss.item() / math.log(2)
                print(
                    f"step {step:4d}  {bits:5.2f} bits/byte  grad norm {float(norm):5.2f}",
                    flush=True,
                )
    seconds = time.perf_counter() - started

    with torch.no_grad():
        windows = held_out[: len(held_out) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
        windows = windows[:256].to(device)
        logits = model(windows[:, :-1])
        bits = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item() / math.log(2)
    if rank == 0:
        tokens = arguments.steps * arguments.batch * CONTEXT * world
        sent = sum(call.wire_bytes for call in calls) / arguments.steps
        print(f"\nheld out: {bits:.2f} bits/byte (a bigram model: {bigram_bits(data):.2f})")
        speed = f"{tokens / seconds:,.0f} tokens/s, {sent / 1e6:.2f} MB sent per rank and step"
        print(f"{arguments.strategy} on {world} ranks, {speed}")
        kept = {kind: f"{n / 1e6:.2f} MB" for kind, n in sw.ledger.snapshot().items()}
        print("at rest on this rank:", kept)
        print("\n" + sw.describe(model.blocks[0]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
