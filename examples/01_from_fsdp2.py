# SPDX-License-Identifier: Apache-2.0
"""A script for torch's FSDP2 that moved to shardwise: one import changed.

    torchrun --standalone --nproc-per-node 2 examples/01_from_fsdp2.py
    torchrun --standalone --nproc-per-node 2 examples/01_from_fsdp2.py --torch

The optimizer, the schedule, clipping and the checkpoint are torch's own. Both print the same loss.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--torch", action="store_true", help="use torch's fully_shard")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    if options.torch:
        from torch.distributed.fsdp import fully_shard
    else:
        from shardwise import fully_shard  # the line that changed

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_initialized():
        dist.init_process_group()
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(256, 64), *layers, nn.Linear(64, 256)).to(device)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=options.steps)

    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(options.steps):
        start = torch.randint(0, 200, (16, 1), generator=generator)
        tokens = (start + torch.arange(17)).to(device)  # count upwards: easy to learn
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folder)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder[0])
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}, saved in {folder[0]}")
    return loss.item()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
