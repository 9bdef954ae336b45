# SPDX-License-Identifier: Apache-2.0
"""Layers that read the same x, joined in graphs of torch.compile, against the layers one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

import shardwise as sw
from shardwise.precision import fp8_block, fp8_graphs
from shardwise.precision.fp8 import SQUARE_128, encode
from shardwise.precision.fp8_functions import products
from shardwise.precision.fp8_tensor import FP8Tensor
from tests.contract.helpers import options_for
from tests.one_card import UNTRACED
from tests.ranks import on_ranks

pytestmark = pytest.mark.cpu_only(UNTRACED)

WIDTH = 256


class Layers(nn.Module):
    """Three layers that read one x, two of them alike; two with biases that read another."""

    def __init__(self, width: int = WIDTH, deep: int = 3 * WIDTH) -> None:
        super().__init__()
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, deep) for _ in range(2))
        self.down = nn.Linear(deep, width, bias=False)
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        x = x + self.out(self.query(h) * torch.cat([self.key(h), torch.tanh(self.value(h))], -1))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def operator_of(node: Any) -> str | None:
    if "shardwise" not in str(node.target):
        return None
    name = str(node.target).split(".")[1]
    if name == "fp8_linears":
        first, *others = node.args[0]
        of_heads = ", heads" * (first.meta["val"].dim() == 4)
        return name + (of_heads, ", gated", ", norm")[len(others)]
    return name + ", gated" * (len(node.args) == 9)


def backend(change: Callable[[Any], object], seen: list[Counter[str]]) -> Any:
    def compiler(module: Any, inputs: Any) -> Any:
        change(module.graph)
        module.recompile()
        seen.append(Counter(filter(None, map(operator_of, module.graph.nodes))))
        kept = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        seen[-1]["sums kept"] = sum(name.startswith("add") for name in kept)
        return make_boxed_func(module.forward)

    def partition(module: Any, inputs: Any, **options: Any) -> Any:
        if change is fp8_graphs.join:
            fp8_graphs.keep(module.graph)
        return min_cut_rematerialization_partition(module, inputs, **options)

    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )


@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
@on_ranks(lambda strategy: 2 if strategy == "zero3" else 1)  # dynamic shapes: every rank traces 8 s
def test_joined_layers_compute_as_one_by_one(rank: int, world_size: int, strategy: str) -> None:
    results, graphs = [], []
    for change in (None, lambda graph: None, fp8_graphs.join):
        torch.manual_seed(0)
        net = Layers()
        precision = sw.Precision(weights="fp8_block", reduce="fp32")
        sw.fully_shard(net, **options_for(strategy, world_size), precision=precision)
        seen: list[Counter[str]] = []
        model: Any = net
        if change is not None:
            model = torch.compile(net, backend=backend(change, seen), dynamic=strategy == "zero1")
        generator = torch.Generator().manual_seed(rank)
        # Planes are released in between, and gathered again.
        for batch in (3, 2) if strategy == "zero1" else (2, 2):
            x = torch.randn(batch, 100, WIDTH, generator=generator).requires_grad_()
            y = model(x)
            y.backward(torch.randn(y.shape, generator=generator.manual_seed(rank)).to(y.dtype))
        assert x.grad is not None
        grads = {name: p.grad.full_tensor() for name, p in net.named_parameters()}
        results.append({"y": y.detach(), "dx": x.grad, **grads})
        graphs.append(seen)
    eager, plain, joined = results
    assert graphs[1] == [
        Counter(fp8_quantise=4, fp8_product=7),
        Counter(fp8_linear_backward=7),
    ]
    # In the buffer ``out``, of the query's size, lies between the query and its key and value.
    assert graphs[2] == [
        Counter({"fp8_linears": 2, "fp8_linears, norm": 2}),
        Counter({"fp8_linear_backward": 5, "sums kept": 1}),
    ]
    for name, expected in plain.items():
        apart = (joined[name] - expected).norm() / expected.norm()
        assert apart < 0.02, f"{name}: {apart}"
        assert (eager[name] - expected).norm() < 0.1 * expected.norm(), name


@pytest.mark.parametrize(
    ("width", "deep", "forward"),
    [
        # The codes of gate and up follow one another, but a last block is partial: two products.
        (256, 448, {"fp8_linears": 2, "fp8_linears, norm": 2}),
        (288, 432, {"fp8_linears": 4}),  # norms and SwiGLU are written before they are quantised
    ],
)
@on_ranks(1)
def test_layers_with_partial_blocks_compute_as_one_by_one(
    rank: int, world_size: int, width: int, deep: int, forward: dict[str, int]
) -> None:
    results = []
    for change in (lambda graph: None, fp8_graphs.join):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = Layers(width, deep)
        precision = sw.Precision(weights="fp8_block", reduce="fp32")
        sw.fully_shard(net, **options_for("zero3", world_size), precision=precision)
        assert len(sw.precision_report(net).stored) == 7
        seen: list[Counter[str]] = []
        model: Any = torch.compile(net, backend=backend(change, seen), fullgraph=True)
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(2, 100, width, generator=generator).requires_grad_()
        y = model(x)
        y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
        assert x.grad is not None
        grads = {name: p.grad.full_tensor() for name, p in net.named_parameters()}
        results.append({"y": y.detach(), "dx": x.grad, **grads})
    assert seen[0] == Counter(forward) and "fp8_linear_backward, gated" not in seen[1], seen
    plain, joined = results
    for name, expected in plain.items():
        apart = (joined[name] - expected).norm() / expected.norm()
        assert apart < 0.02, f"{name}: {apart}"


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fused": lambda gate, up: up * F.silu(gate),
    "silu twice": lambda gate, up: F.silu(F.silu(gate)) * up,
    "heads": lambda gate, up: (gate + up).view(2, 6, -1, 128).transpose(1, 2).reshape(gate.shape),
    "norms of parts": lambda gate, up: F.rms_norm(
        gate.unflatten(2, (6, 128)), (128,), up[0, 0, :128], 1e-5
    ).flatten(2),
    "one more factor": lambda gate, up: 2.0 * (F.silu(gate) * up),
}


class Gated(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.down(WAYS[self.way](self.gate(x), self.up(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", WAYS)
@on_ranks(1)
def test_swiglu_is_part_of_the_products_around_it(rank: int, world_size: int, way: str) -> None:
    """And nothing that only looks like it."""
    results, graphs = [], []
    for change in (lambda graph: None, fp8_graphs.join):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = Gated(way)
        precision = sw.Precision(weights="fp8_block", reduce="fp32")
        sw.fully_shard(net, **options_for("zero3", world_size), precision=precision)
        seen: list[Counter[str]] = []
        model: Any = torch.compile(net, backend=backend(change, seen))
        generator = torch.Generator().manual_seed(3)
        for batch in (2, 3)[: 2 if way == "fused" else 1]:  # no whole blocks of tokens
            length = 128 if way == "heads" else 100
            x = torch.randn(batch, length, WIDTH, generator=generator).requires_grad_()
            y = model(x)
            y.backward(torch.randn(y.shape, generator=generator.manual_seed(4)).to(y.dtype))
        assert x.grad is not None
        grads = {name: p.grad.full_tensor() for name, p in net.named_parameters()}
        results.append({"y": y.detach(), "dx": x.grad, **grads})
        graphs.append(seen[-2:])
    plain, fused = results
    expected_graphs = [{"fp8_linears": 2}, {"fp8_linear_backward": 2}]
    if way == "fused":
        expected_graphs = [
            {"fp8_linears": 1, "fp8_linears, gated": 1},
            {"fp8_linear_backward": 1, "fp8_linear_backward, gated": 1},
        ]
    if way == "heads":
        expected_graphs[0] = {"fp8_linears": 1, "fp8_linears, heads": 1}
    assert graphs[1] == [Counter(each) for each in expected_graphs]
    for name, expected in plain.items():
        apart = (fused[name] - expected).norm() / expected.norm()
        assert apart < 0.02, f"{name}: {apart}"


def test_weights_that_lie_apart_are_multiplied_one_by_one() -> None:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(rows, 256, generator=generator) for rows in (128, 384)]
    apart = [FP8Tensor.encode(value, "fp8_block") for value in values]
    (whole,) = encode(torch.cat(values), (SQUARE_128,))
    for phase, columns in (("forward", 256), ("backward", 512)):
        x = torch.randn(128, columns, generator=generator).bfloat16()
        codes, scales, *_ = fp8_block.quantise(x, True, 0, "exact")
        found = products(codes, scales, apart, phase, torch.float32)  # type: ignore[arg-type]
        expected = fp8_block.multiply(codes, scales, whole, phase, torch.float32)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_what_others_asked_of_inductor_is_still_done() -> None:
    from torch._inductor import config

    asked: list[Any] = []
    # Not by monkeypatch, which would hide the option from every later test of the process.
    with config.patch(post_grad_custom_pre_pass=asked.append):
        fp8_graphs.install()
        fp8_graphs.install()
        graph = torch.fx.Graph()
        config.post_grad_custom_pre_pass(graph)  # type: ignore[operator, misc, union-attr, call-arg]
        assert asked == [graph]
        assert config.post_grad_custom_pre_pass.uuid() is None  # type: ignore[union-attr]
