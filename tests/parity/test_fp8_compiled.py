# SPDX-License-Identifier: Apache-2.0
"""Weights in fp8 under torch.compile: codes are inputs of graphs, and no decoded copy is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import shardwise as sw
from shardwise.precision.fp8 import decode, plane_over
from shardwise.precision.fp8_weight import Coded
from tests.contract.helpers import options_for
from tests.one_card import UNTRACED
from tests.parity.mxfp8_helpers import Kind, coded, native_by_decoding, precision_of
from tests.ranks import on_ranks

pytestmark = pytest.mark.cpu_only(UNTRACED)

WIDTH, DEEP = 128, 384  # no activation has the shape of a weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, DEEP, bias=False) for _ in range(2))
        self.down = nn.Linear(DEEP, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.norm(x))
        return x + sw.swiglu_mlp(h, self.gate, self.up, self.down)


def train(model: Any, rank: int) -> list[Tensor]:
    found: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = torch.randn(2, 20, WIDTH, generator=generator).requires_grad_()
        loss = model(x).float().square().mean()
        loss.backward()
        found += [loss.detach(), x.grad]  # type: ignore[list-item]
        if len(found) == 2:
            found += [p.grad.full_tensor() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found.append(model(x.detach()))
    return found


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize("kind", ["mxfp8", "native", "fp8_block"])
@on_ranks(2)
def test_equal_blocks_share_a_graph_that_computes_the_same(
    rank: int, world_size: int, kind: Kind, strategy: str
) -> None:
    """Codes are released and gathered again between forward and backward, and over steps."""
    torch._dynamo.reset()
    counters.clear()
    runs, count = [], CompileCounterWithBackend("aot_eager")
    for compiled in (False, True):
        torch.manual_seed(0)
        blocks: list[Any] = [Block() for _ in range(4)]
        if compiled:
            blocks = [torch.compile(block, backend=count, fullgraph=True) for block in blocks]
        model = nn.Sequential(*blocks)
        options = options_for(strategy, world_size)
        with native_by_decoding():
            for unit in (*model, model):
                sw.fully_shard(unit, **options, precision=precision_of(True, kind))
            runs.append(train(model, rank))
    assert count.frame_count == 2, "one graph for training and one for evaluation, for all blocks"
    assert not counters["graph_break"]
    assert len(runs[0]) == len(runs[1]) > 8
    for mine, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("kind", ["mxfp8", "fp8_block"])
def test_a_graph_keeps_codes_and_no_decoded_weight(kind: Kind) -> None:
    torch._dynamo.reset()
    weight = coded(torch.randn(DEEP, WIDTH), kind).requires_grad_()
    backend = "aot_eager_decomp_partition"
    product = torch.compile(lambda x, w: F.linear(x.tanh(), w), backend=backend, fullgraph=True)
    y: Any = product(torch.randn(20, WIDTH, dtype=torch.bfloat16, requires_grad=True), weight)
    node = y.grad_fn
    kept = [t for t in [*node.saved_tensors, *(getattr(node, "_tensors_no_vc_check", None) or ())]
            if t is not None]  # fmt: skip
    places = {t.untyped_storage()._cdata for t in kept}
    assert weight.codes.untyped_storage()._cdata in places
    values = [t for t in kept if t.shape in (weight.shape, weight.shape[::-1])]
    assert all(t.dtype == torch.uint8 for t in values)


def test_a_compiler_that_sees_the_decoding_keeps_the_values() -> None:
    """Negative control of the test above: the same product, of operators that can be traced."""
    torch._dynamo.reset()
    weight = coded(torch.randn(DEEP, WIDTH))

    def product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        values = codes.view(torch.float8_e4m3fn).bfloat16().unflatten(-1, (-1, 32))
        factors = (scales.int() << 23).view(torch.float32).bfloat16()
        return F.linear(x.tanh(), (values * factors.unsqueeze(-1)).flatten(-2))

    assert torch.equal(
        product(torch.ones(2, WIDTH).bfloat16(), weight.codes, weight.scales),
        F.linear(
            torch.ones(2, WIDTH).bfloat16().tanh(),
            decode(plane_over(weight.codes, weight.scales)),
        ),
    )
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    x = torch.randn(20, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    result = compiled(x, weight.codes, weight.scales)
    node: Any = result.grad_fn
    kept = [*node.saved_tensors, *(getattr(node, "_tensors_no_vc_check", None) or ())]
    shapes = [t.dtype for t in kept if t is not None and t.numel() == weight.numel()]
    assert torch.bfloat16 in shapes


def test_metadata_holds_no_name_of_a_weight() -> None:
    first, second = (coded(torch.randn(64, 64)) for _ in range(2))
    assert first.__tensor_flatten__() == second.__tensor_flatten__()
    inner = {name: getattr(first, name) for name in first.__tensor_flatten__()[0]}
    again = Coded.__tensor_unflatten__(inner, first.__tensor_flatten__()[1], (64, 64), (64, 1))
    assert torch.equal(again.decode(), first.decode())
