# SPDX-License-Identifier: Apache-2.0
"""A run built in torchtitan's order, on torch's own FSDP2: the optimizer alone differs.

    torchrun --standalone --nproc-per-node 2 examples/16_keep_fsdp2_torchtitan.py

meta device -> compiled blocks -> fully_shard -> to_empty -> weights -> optimizer
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import shardwise as sw
from shardwise.models.gpt import GPT, GPTConfig


def main() -> None:
    mesh = sw.init_mesh()
    device = mesh.device_type
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=256, dim=64, num_layers=2, num_heads=4, context=32))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        block.compile(backend="inductor" if device == "cuda" else "eager")
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    torch.manual_seed(0)
    model.init_weights()
    optimizer = sw.optimizer(model, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=3e-3))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4)
    words = torch.arange(64, device=device).view(2, 32) * 7 % 256
    for step in range(8):
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1).float(), words.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.3f}  norm {norm.full_tensor().item():.3f}")
    with tempfile.TemporaryDirectory() as mine:
        dist.broadcast_object_list(folder := [mine])
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
