# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer over torch's own FSDP2, with whole-matrix Muon as the optimizer.

    torchrun --standalone --nproc-per-node 2 examples/15_keep_fsdp2_trainer.py

The script wraps the model and tells the Trainer so, by its mark of models that were sharded when
they were loaded. The Trainer then wraps nothing again and takes the optimizer as it is.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import shardwise as sw

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIG = LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **SIZES)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=8,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(CONFIG).to(arguments.device)
        mesh = sw.init_mesh()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        made = sw.optimizer(model, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=3e-3))
        words = torch.arange(32 * 24).view(32, 24) * 7 % 256
        rows: Any = [{"input_ids": row, "labels": row} for row in words]
        trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(made, None))
        trainer.is_distributed_loading_by_transformers = True
        trainer.train()


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
