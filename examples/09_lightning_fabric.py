# SPDX-License-Identifier: Apache-2.0
"""Lightning Fabric: ``ModelParallelStrategy`` asks for a function that wraps the model.

    torchrun --standalone --nproc-per-node 2 examples/09_lightning_fabric.py

For ``lightning.Trainer`` call ``shard(self.model, self.device_mesh)`` in ``configure_model``.
"""

from __future__ import annotations

import tempfile

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw


def build() -> nn.Sequential:
    blocks = [nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 32), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Embedding(256, 32), *blocks, nn.Linear(32, 256))


def shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for block in list(model.children())[1:-1]:
        sw.fully_shard(block, mesh=mesh["data_parallel"])
    return sw.fully_shard(model, mesh=mesh["data_parallel"])


def main() -> None:
    strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    with fabric.init_module(empty_init=True):  # on the meta device: no rank ever has all of it
        model = build()
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))
    words = torch.arange(64, device=fabric.device).view(2, 32) * 7 % 256
    for step in range(8):
        for last in (False, True):
            with fabric.no_backward_sync(model, enabled=not last):
                loss = F.cross_entropy(model(words).flatten(0, 1), words.flatten())
                fabric.backward(loss / 2)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"step {step}  loss {loss.item():.3f}")
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": model, "optimizer": optimizer, "step": 8}
        fabric.save(f"{folder}/checkpoint", state)  # in the folder of rank 0


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
