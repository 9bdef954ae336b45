# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests of frameworks: a tiny Llama, its batches, an accelerator on CPU ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.integrations.fsdp2 import in_place_of_torch

VOCABULARY = 48


def needs(*packages: str) -> None:
    """Skip a file of tests where a package is missing. It is imported by ranks alone: each worker
    collects all files, and these packages take seconds."""
    if missing := [name for name in packages if find_spec(name) is None]:
        pytest.skip(f"not installed: {missing}", allow_module_level=True)


def tiny_llama(*, tied: bool = False, seed: int = 0) -> Any:
    """Two layers whose sizes divide unevenly over two ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=20,
            intermediate_size=36,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            tie_word_embeddings=tied,
            initializer_range=0.2,
        )
    )


def batch(step: int, rank: int) -> Tensor:
    """Words of one rank and step, [2, 8]."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, VOCABULARY, (2, 8), generator=generator)


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@contextmanager
def launched() -> Iterator[None]:
    """The environment of a rank that torchrun began; what frameworks add to it is taken back."""
    before = dict(os.environ)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "HF_HUB_OFFLINE": "1"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def accelerate_reset() -> None:
    """Forget accelerate's state, which it keeps for the life of a process."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@contextmanager
def accelerate_state(**plugin: Any) -> Iterator[Any]:
    """accelerate with its FSDP2 plugin on CPU ranks, which it knows on accelerators only: the state
    that it would come to there."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    with launched():
        accelerate_reset()
        state = Accelerator(cpu=True).state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**{"fsdp_version": 2} | plugin)
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        try:
            yield state.fsdp_plugin
        finally:
            accelerate_reset()


LIBRARIES = {"torch": nullcontext, "shardwise": in_place_of_torch}
