# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism inside, sharding outside: torch cuts the layers, shardwise the rest.

    torchrun --standalone --nproc-per-node 4 examples/04_tensor_parallel.py

A checkpoint of these 2 x 2 ranks loads on any other number of ranks, with or without ``tp``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from shardwise.models.gpt import GPT, GPTConfig

PLAN = {
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(),
    "feed_forward.gate": ColwiseParallel(),
    "feed_forward.up": ColwiseParallel(),
    "feed_forward.down": RowwiseParallel(),
}


def main() -> float:
    mesh = sw.init_mesh(tp=2)  # dp takes the rest of the ranks
    config = GPTConfig(vocab_size=256, dim=64, num_layers=2, num_heads=4, context=32, qk_norm=False)
    model = GPT(config)
    model.init_weights(0)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], PLAN)  # 1. torch cuts the products over tp
        sw.fully_shard(block, mesh=mesh, placements=sw.zero(3))  # 2. shardwise shards over dp
    sw.fully_shard(model, mesh=mesh, placements=sw.zero(3))
    # Each matrix is orthogonalised whole, although every rank has a tile of it.
    optimizer = sw.optimizer(model, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=3e-3))

    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())  # tp ranks: the same
    for step in range(20):
        start = torch.randint(0, 200, (8, 1), generator=generator)
        tokens = (start + torch.arange(33)).to(mesh.device_type)  # count upwards
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1:2d}  loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        weight = model.blocks[0].attention.wq.weight
        print(f"wq {list(weight.shape)} lies over {weight.device_mesh.mesh_dim_names}")
    return loss.item()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
