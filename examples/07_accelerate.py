# SPDX-License-Identifier: Apache-2.0
"""Hugging Face accelerate: its FSDP2 plugin wraps with shardwise instead of torch.

    torchrun --standalone --nproc-per-node 2 examples/07_accelerate.py

The script is an ordinary one but for ``in_place_of_torch`` around ``prepare``.
"""

from __future__ import annotations

import tempfile

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.integrations.fsdp2 import in_place_of_torch

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIG = LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **SIZES)


def main() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available())
    if accelerator.device.type == "cpu":  # accelerate knows FSDP on GPUs only: say it for a CPU
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with in_place_of_torch():
        model, optimizer = accelerator.prepare(model, optimizer)
    words = torch.arange(64, device=accelerator.device).view(2, 32) * 7 % 256
    for step in range(10):
        loss = model(input_ids=words, labels=words).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}  loss {loss.item():.3f}")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # on every rank; rank 0 writes the whole weights
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
