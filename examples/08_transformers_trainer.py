# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer with ``fsdp=True``, sharded by shardwise.

torchrun --standalone --nproc-per-node 2 examples/08_transformers_trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shardwise.integrations.fsdp2 import in_place_of_torch

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIG = LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **SIZES)


def fsdp_on_cpu(arguments: TrainingArguments) -> None:
    """accelerate knows FSDP on GPUs only: bring it to the state that it would have there."""
    state = Accelerator(cpu=True).state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
    state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            fsdp=True,
            fsdp_config={"state_dict_type": "FULL_STATE_DICT"},
            max_steps=8,
            learning_rate=3e-3,
            logging_steps=1,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        )
        if arguments.use_cpu:
            fsdp_on_cpu(arguments)
        torch.manual_seed(0)
        words = torch.arange(32 * 24).view(32, 24) * 7 % 256
        rows: Any = [{"input_ids": row, "labels": row} for row in words]
        trainer = Trainer(LlamaForCausalLM(CONFIG), arguments, train_dataset=rows)
        with in_place_of_torch():
            trainer.train()
        trainer.save_model(f"{folder}/model")
        trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
