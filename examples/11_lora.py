# SPDX-License-Identifier: Apache-2.0
"""Fine-tune LoRA adapters of a frozen, sharded model with Muon; the file holds the adapters alone.

torchrun --standalone --nproc-per-node 2 examples/11_lora.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIG = LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **SIZES)


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def main() -> None:
    mesh = sw.init_mesh()
    model = get_peft_model(base(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    for layer in model.get_base_model().model.layers:
        sw.fully_shard(layer, mesh=mesh)
    sw.fully_shard(model, mesh=mesh)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = sw.Muon(adapters, lr=0.02)
    words = torch.arange(64, device=mesh.device_type).view(2, 32) * 7 % 256
    for step in range(8):
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.3f}")

    with tempfile.TemporaryDirectory() as mine, torch.no_grad():
        dist.broadcast_object_list(folder := [mine])
        model.save_pretrained(folder[0])  # on every rank; rank 0 writes
        dist.barrier()
        again = PeftModel.from_pretrained(base(), folder[0]).to(mesh.device_type)
        torch.testing.assert_close(again(words).logits, model(words).logits)
        dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
