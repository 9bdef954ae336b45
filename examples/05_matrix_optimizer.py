# SPDX-License-Identifier: Apache-2.0
"""An optimizer of your own for whole matrices, written for one device, run sharded.

    torchrun --standalone --nproc-per-node 2 examples/05_matrix_optimizer.py

``sign_svd`` follows the orthogonal factor of the momentum, as Muon does, by an exact SVD.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from shardwise.models.gpt import GPT, GPTConfig


@sw.matrix_optimizer
def sign_svd(gradient: Tensor, state: dict[str, Tensor], *, lr: float, beta: float = 0.9) -> Tensor:
    """[n, rows, cols]: n matrices of one shape, each whole. The result is subtracted."""
    if not state:  # the first step of these matrices
        state["momentum"] = torch.zeros_like(gradient)
    state["momentum"].lerp_(gradient, 1 - beta)
    u, _, v = torch.linalg.svd(state["momentum"], full_matrices=False)
    rows, cols = gradient.shape[-2:]
    return lr * max(1.0, rows / cols) ** 0.5 * (u @ v)


def main() -> float:
    mesh = sw.init_mesh()
    model = GPT(GPTConfig(vocab_size=256, dim=64, num_layers=2, num_heads=4, context=32))
    model.init_weights(0)
    for block in model.blocks:
        sw.fully_shard(block, mesh=mesh)  # rows of a matrix lie on several ranks
    sw.fully_shard(model, mesh=mesh)
    optimizer = sw.optimizer(model, matrix=sign_svd(lr=0.02), elementwise=sw.adamw(lr=3e-3))

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
    return loss.item()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
