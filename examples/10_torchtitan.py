# SPDX-License-Identifier: Apache-2.0
"""A run built in torchtitan's order: one import differs.

    torchrun --standalone --nproc-per-node 2 examples/10_torchtitan.py

meta device -> activation checkpoints -> compiled blocks -> fully_shard -> to_empty -> weights
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardwise as sw
from shardwise import fully_shard  # torchtitan: from torch.distributed.fsdp import fully_shard
from shardwise.models.gpt import GPT, GPTConfig


def main() -> None:
    mesh = sw.init_mesh()
    device = mesh.device_type
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=256, dim=64, num_layers=2, num_heads=4, context=32))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, block in list(model.blocks.named_children()):
        block = checkpoint_wrapper(block, preserve_rng_state=False)
        block.compile(backend="inductor" if device == "cuda" else "eager", fullgraph=True)
        model.blocks.register_module(name, fully_shard(block, mesh=mesh, mp_policy=policy))
    tail: list[nn.Module] = [model.norm, model.head]
    fully_shard(tail, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    torch.manual_seed(0)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    words = torch.arange(64, device=device).view(2, 32) * 7 % 256
    for step in range(8):
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1).float(), words.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.3f}  norm {norm.item():.3f}")
    with tempfile.TemporaryDirectory() as mine:
        dist.broadcast_object_list(folder := [mine])
        dcp.save(get_model_state_dict(model), checkpoint_id=folder[0])


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
