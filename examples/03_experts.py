# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts over ranks: each rank keeps half of the experts, tokens travel to them.

torchrun --standalone --nproc-per-node 4 examples/03_experts.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.moe import mixtures_of


def main() -> float:
    mesh = sw.init_mesh()  # everything that is no expert is sharded over all ranks
    world = mesh.size()
    ep = 2 if world % 2 == 0 else 1
    grid = init_device_mesh(mesh.device_type, (world // ep, ep), mesh_dim_names=("dp", "ep"))

    model = GPT(
        GPTConfig(
            vocab_size=256, dim=64, num_layers=2, num_heads=4, context=32,
            num_experts=8, experts_per_token=2, expert_hidden_dim=64, balance_coefficient=0.01,
        )
    )  # fmt: skip
    model.init_weights(0)
    tokens_from = sw.comm.as_axis(mesh.get_group(), "dp")
    for layer in mixtures_of(model):
        layer.spread(sw.comm.as_axis(grid.get_group("ep"), "ep") if ep > 1 else None, tokens_from)
    for block in model.blocks:  # experts are sharded over the ranks that hold the same ones
        sw.fully_shard(block, mesh=mesh, meshes={"*.experts": grid["dp"]})
    sw.fully_shard(model, mesh=mesh)
    optimizer = sw.optimizer(model, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=3e-3))

    generator = torch.Generator().manual_seed(dist.get_rank())
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
        held = sum(layer.experts.num_experts for layer in mixtures_of(model))
        print(f"this rank keeps {held} of {8 * len(mixtures_of(model))} experts")
    return loss.item()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
