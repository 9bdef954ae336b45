# SPDX-License-Identifier: Apache-2.0
"""Hugging Face accelerate over torch's own FSDP2, with whole-matrix Muon as the optimizer.

    torchrun --standalone --nproc-per-node 2 examples/14_keep_fsdp2_accelerate.py

The script wraps the model with torch's ``fully_shard`` and gives accelerate the optimizer alone:
an optimizer of whole matrices is built after wrapping, when it can see how rows lie.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIG = LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **SIZES)


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(accelerator.device)
    mesh = sw.init_mesh()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    made = sw.optimizer(model, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=3e-3))
    optimizer = accelerator.prepare(made)
    words = torch.arange(64, device=accelerator.device).view(2, 32) * 7 % 256
    for step in range(10):
        loss = model(input_ids=words, labels=words).loss
        accelerator.backward(loss)
        made.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
