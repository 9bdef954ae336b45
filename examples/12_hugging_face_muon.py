# SPDX-License-Identifier: Apache-2.0
"""Pre-train a Hugging Face model with Muon, and save it for ``from_pretrained``.

torchrun --standalone --nproc-per-node 2 examples/12_hugging_face_muon.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

import shardwise as sw

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
CONFIG = Qwen3Config(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **SIZES)


def main() -> None:
    mesh = sw.init_mesh()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    for layer in model.model.layers:
        sw.fully_shard(layer, mesh=mesh)
    sw.fully_shard(model, mesh=mesh)
    optimizer = sw.optimizer(model, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=3e-3))
    if dist.get_rank() == 0:
        print(sw.routing_report(model))  # which parameter goes to Muon, and why

    text = torch.tensor(list(Path(__file__).read_bytes()), device=mesh.device_type)
    generator = torch.Generator().manual_seed(dist.get_rank())  # every rank its own windows
    for step in range(20):
        starts = torch.randint(0, len(text) - 64, (8,), generator=generator)
        words = torch.stack([text[start : start + 64] for start in starts])
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.3f}")

    with tempfile.TemporaryDirectory() as mine, torch.no_grad():
        dist.broadcast_object_list(folder := [mine])
        model.save_pretrained(folder[0])  # on every rank; rank 0 writes
        dist.barrier()
        again = AutoModelForCausalLM.from_pretrained(folder[0]).to(mesh.device_type)
        torch.testing.assert_close(again(words).logits, model(words).logits)
        dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
