# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks in a plan keep what the compiler keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.models.gpt import GPT, Block, GPTConfig
from shardwise.planning.compiled import SEQUENCES, kept_by
from shardwise.planning.figures import Plan

SMALL = GPTConfig(
    dim=32, num_layers=2, num_heads=4, num_kv_heads=2, context=12, hidden_dim=48, vocab_size=33
)


@pytest.mark.parametrize("recompute", ["none", "pointwise"])
def test_a_block_keeps_what_its_graph_keeps(recompute: Any) -> None:
    """In fp64: the norm of fp32 on a CPU is a function of its own."""
    config = replace(SMALL, recompute=recompute)
    model = GPT(config).double()
    table = model.rotary.table(12, torch.device("cpu"), torch.float64)
    hidden = torch.randn(SEQUENCES, 12, 32, dtype=torch.float64, requires_grad=True)
    kept = kept_by(model.blocks[0], (hidden.shape, table.shape), torch.float64)
    block: Any = model.blocks[0]
    block.compile_forward(backend="aot_eager_decomp_partition", fullgraph=True, dynamic=False)
    known = {t.untyped_storage()._cdata for t in (hidden, table, *block.parameters())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(hidden, table)
    own = sum(nbytes for storage, nbytes in saved.items() if storage not in known)
    assert kept.nbytes * SEQUENCES == own > 0 and out[1] is None and kept.place == 0
    assert kept.holds_input == (hidden.untyped_storage()._cdata in saved)


def test_a_plan_of_compiled_blocks_holds_less() -> None:
    def planned(recompute: Any, *, compiles: bool = True) -> Plan:
        config = replace(SMALL, recompute=recompute)
        with torch.device("meta"):
            model, block = GPT(config), Block(config, 0)
        kept = kept_by(block, ((SEQUENCES, 12, 32), (2, 12, 1, 8)), torch.bfloat16)
        more = {"compiled": dict.fromkeys(model.blocks, kept)} if compiles else {}
        precision = sw.Precision(weights="bf16", reduce="fp32")
        return sw.plan(model, {"dp": 2}, batch=(8, 12), precision=precision, **more)

    eager, none, again = planned("none", compiles=False), planned("none"), planned("pointwise")
    assert again.activations < none.activations < eager.activations
    assert planned("block").activations < again.activations
    assert again.calls == eager.calls and again.rest == eager.rest
