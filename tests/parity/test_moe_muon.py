# SPDX-License-Identifier: Apache-2.0
"""Muon on experts, batched, sharded and spread, equals Muon on each expert's gate, up and down
alone, one after another, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.moe_models import EXPERTS, Way, build, by_expert
from tests.ranks import run_ranks

STEPS = 3
WAYS = {
    "plain": Way(weights="indexed"),
    "zero3": Way(ranks=2, strategy="zero3"),
    "zero3, interleaved": Way(weights="indexed", block=4, ranks=2, strategy="zero3"),
    "data_parallel": Way(block=2, ranks=2, strategy="data_parallel"),
    "ep": Way(block=8, ranks=4, ep=2, strategy="zero3"),
}


def gradient(step: int, number: int, shape: tuple[int, ...]) -> Tensor:
    """The gradient of one expert's weight, gate and up stacked."""
    generator = torch.Generator().manual_seed(100 * step + 10 * number + shape[0] % 10)
    return torch.randn(shape, generator=generator)


def looped(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """One matrix at a time, each with an optimizer of its own."""
    found = {}
    for name, value in values.items():
        number = int(name.split()[0][-1])
        parts = value.chunk(2) if "fc1" in name else (value,)
        done = []
        for index, part in enumerate(parts):
            matrix = nn.Parameter(part.clone())
            optimizer = sw.Muon([matrix], lr=0.05, weight_decay=0.0, preset="nonic")
            for step in range(STEPS):
                whole = gradient(step, number, tuple(value.shape))
                matrix.grad = whole.chunk(len(parts))[index].clone()
                optimizer.step()
            done.append(matrix.detach())
        found[name] = torch.cat(done)
    return found


def weights(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values[name] for name in values if ".experts." in name and "weight" in name}


def stepped(rank: int, world_size: int, way: Way) -> int:
    net = build(way)
    before = weights(by_expert(net, None))
    optimizer = sw.optimizer(net, matrix=sw.muon(lr=0.05), elementwise=sw.adamw())
    matrices = [p for g in optimizer.param_groups if g["kind"] == "matrix" for p in g["params"]]
    biases = [p for n, p in net.named_parameters() if ".experts." in n and "bias" in n]
    assert len(biases) >= 2 and not {*map(id, biases)} & {*map(id, matrices)}
    for step in range(STEPS):
        for path, linear in (("fc1", net.moe.experts.fc1), ("fc2", net.moe.experts.fc2)):
            shape = (linear.out_features, linear.in_features)
            full = [
                gradient(step, linear.first_expert + index, shape)
                for index in range(linear.num_experts)
            ]
            if path == "fc1":
                full = [sw.moe.convert_gate_up(one, 0, way.block, 0) for one in full]
            bundle = linear.experts("weight")
            parts = [torch.stack(full)] if bundle.grouped else full
            for parameter, part in zip(bundle.parameters, parts, strict=True):
                parameter.grad = torch.zeros_like(parameter).copy_(part)
        optimizer.step()
    found, expected = weights(by_expert(net, None)), looped(before)
    assert found.keys() == expected.keys() and len(found) == 2 * EXPERTS // way.ep
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert not torch.equal(before[name], value)
    return len(found)


@pytest.mark.parametrize("name", WAYS)
def test_every_expert_is_orthogonalised_alone(name: str) -> None:
    way = WAYS[name]
    if way.strategy == "plain":
        stepped(0, 1, way)
    else:
        run_ranks(stepped, way.ranks, way)
