# SPDX-License-Identifier: Apache-2.0
"""Hugging Face accelerate: its FSDP2 plugin with shardwise's ``fully_shard`` and with torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp

import shardwise as sw
from shardwise.shard.module import units_of
from tests.interop.frameworks import (
    LIBRARIES,
    accelerate_state,
    batch,
    mean_over_ranks,
    needs,
    tiny_llama,
)
from tests.ranks import on_ranks, run_ranks

needs("accelerate", "transformers")

BLOCKS = {"auto_wrap_policy": "transformer_based_wrap", "reshard_after_forward": True}
CASES: dict[str, dict[str, Any]] = {
    "blocks": {},
    # Rank 0's values are distributed to a model on the meta device, with assign=True.
    "loaded from rank 0": {"plugin": {"cpu_ram_efficient_loading": True}},
    "loaded from rank 0, tied": {"plugin": {"cpu_ram_efficient_loading": True}, "tied": True},
    "activation checkpoints": {"plugin": {"activation_checkpointing": True}},
    "accumulated": {"accumulate": 2},
    "wrapped beforehand": {"plugin": {"auto_wrap_policy": "no_wrap"}, "wrapped": True},
}


def prepared(library: str, case: dict[str, Any], plugin: Any) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=case.get("accumulate", 1),
    )
    assert accelerator.is_fsdp2
    model = tiny_llama(
        tied=case.get("tied", False),
        seed=dist.get_rank() if plugin.cpu_ram_efficient_loading else 0,
    )
    if case.get("wrapped"):
        shard: Any = sw.fully_shard if library == "shardwise" else torch_fsdp.fully_shard
        for layer in model.model.layers:
            shard(layer)
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with LIBRARIES[library]():
        return accelerator, *accelerator.prepare(model, optimizer)


def train(accelerator: Any, model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        with accelerator.accumulate(model):
            words = batch(step, dist.get_rank())
            loss = model(input_ids=words, labels=words).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_losses_are_those_of_fsdp2(rank: int, world_size: int, name: str) -> None:
    """Digit for digit; both libraries train, and neither hands over the other's modules."""
    case = CASES[name]
    found = {}
    for library in LIBRARIES:
        with accelerate_state(**BLOCKS | case.get("plugin", {})) as plugin:
            accelerator, model, optimizer = prepared(library, case, plugin)
            assert any(units_of(model)) == (library == "shardwise")
            held = {id(one) for group in optimizer.param_groups for one in group["params"]}
            assert held == {id(one) for one in model.parameters()}
            found[library] = train(accelerator, model, optimizer, range(4))
    assert found["shardwise"] == found["torch"]
    assert found["shardwise"][-1] < found["shardwise"][0]


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_states_are_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    run_ranks(check_states, 2, kind, str(tmp_path))


def check_states(rank: int, world_size: int, kind: str, folder: str) -> None:
    """save_state and load_state, clipping, and a state dict for one file."""
    with accelerate_state(**BLOCKS, state_dict_type=kind) as plugin:
        accelerator, model, optimizer = prepared("shardwise", {}, plugin)
        train(accelerator, model, optimizer, range(2))
        accelerator.save_state(folder)
        expected = train(accelerator, model, optimizer, range(2, 4))
        accelerator.load_state(folder)
        assert train(accelerator, model, optimizer, range(2, 4)) == expected
        whole = accelerator.get_state_dict(model)
        assert bool(whole) == (rank == 0)
        for name, value in sw.full_state_dict(model).items():
            assert rank or torch.equal(whole[name], value), name
        words = batch(0, rank)
        accelerator.backward(model(input_ids=words, labels=words).loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1
        again = torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])
        torch.testing.assert_close(float(again), 0.1, rtol=1e-4, atol=0)
