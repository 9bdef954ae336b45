# SPDX-License-Identifier: Apache-2.0
"""torch's own FSDP2, with whole-matrix Muon as its optimizer.

    torchrun --standalone --nproc-per-node 2 examples/13_keep_fsdp2.py

The model is wrapped by ``torch.distributed.fsdp.fully_shard`` and saved by torch's checkpoints.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.models.gpt import GPT, GPTConfig


def build() -> tuple[GPT, torch.optim.Optimizer]:
    model = GPT(GPTConfig(vocab_size=256, dim=64, num_layers=2, num_heads=4, context=32))
    model.init_weights(0)
    mesh = sw.init_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, sw.optimizer(model, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=3e-3))


def main() -> float:
    model, optimizer = build()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        tokens = torch.randint(0, 16, (8, 1), generator=generator).repeat(1, 33)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.3f}")

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder[0])
    again, other = build()
    states = dict(zip(("model", "optimizer"), get_state_dict(again, other), strict=True))
    dcp.load(states, checkpoint_id=folder[0])
    set_state_dict(
        again, other, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    torch.testing.assert_close(
        again(tokens[:, :-1], tokens[:, 1:]), model(tokens[:, :-1], tokens[:, 1:])
    )
    return loss.item()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
