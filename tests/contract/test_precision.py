# SPDX-License-Identifier: Apache-2.0
"""``MixedPrecisionPolicy``, field by field, and ``Precision``, which says the same and more."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardwise as sw
from tests.contract.helpers import (
    STRATEGIES,
    WIDTH,
    Net,
    Trial,
    assert_at_rest,
    assert_close,
    full,
    logged,
    on,
    pair,
    ranks_for,
    trial,
    vector_loss,
    vectors,
    word_loss,
    wrap,
)
from tests.ranks import on_ranks, run_ranks

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MIXED = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)


class Spy(nn.Module):
    """Notes the dtypes that it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor, *, extra: dict[str, Tensor] | None = None) -> Tensor:
        self.seen = {"x": x.dtype, "weight": self.linear.weight.dtype}
        self.seen |= {name: value.dtype for name, value in (extra or {}).items()}
        y = self.linear(x.to(self.linear.weight.dtype))
        self.seen["y"] = y.dtype
        return y


def spy(world_size: int, strategy: str = "zero3", **policy: Any) -> Any:
    return wrap(Spy(), world_size, strategy, mp_policy=MixedPrecisionPolicy(**policy))


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(ranks_for)
def test_dtypes_of_weights_and_gradients_are_what_travels(
    rank: int, world_size: int, strategy: str
) -> None:
    sizes: list[dict[str, int]] = []
    for weights, reduce in ((FP32, None), (BF16, None), (BF16, FP32)):
        net = spy(world_size, strategy, param_dtype=weights, reduce_dtype=reduce)
        with sw.comm.record() as calls:
            net(vectors(rank)).sum().backward()
        assert net.seen == {"x": weights, "weight": weights, "y": weights}
        assert net.linear.weight.dtype == net.linear.weight.grad.dtype == FP32
        sizes.append({call.operation: call.nbytes for call in calls})
    for operation, nbytes in sizes[1].items():
        assert sizes[0][operation] == 2 * nbytes
        assert sizes[2][operation] == nbytes * (1 if operation == "all_gather" else 2)
    assert set(sizes[1]) - {"all_gather"}, "something was reduced"


class Tiny(nn.Module):
    """A gradient of 1 + 2^-9 on each rank: bf16 cannot hold it, fp32 can."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x).sum()


@on(*STRATEGIES, make=Tiny, mp_policy=MIXED)
def test_sums_in_fp32_lose_nothing(t: Trial) -> None:
    """Rank 0 contributes 256, the others 1 each. Their sum is exact in fp32 only."""
    t.net.set_gradient_divide_factor(1.0)
    for microbatch in range(3):
        t.net.set_is_last_backward(microbatch == 2)
        t.net(torch.full((4,), 256.0 if t.rank == 0 else 1.0)).backward()
    expected = torch.full((4,), 3.0 * (256 + t.world_size - 1))
    assert torch.equal(full(t.net.scale.grad), expected)


@on_ranks(2)
def test_inputs_and_outputs_are_cast_or_left(rank: int, world_size: int) -> None:
    net = spy(world_size, param_dtype=BF16, output_dtype=FP32)
    extra = {"mask": torch.ones(2, dtype=torch.int64), "bias": torch.ones(2)}
    x = vectors(rank).requires_grad_()
    y = net(x, extra=extra)
    assert (net.seen["x"], net.seen["bias"], net.seen["y"], y.dtype) == (BF16, BF16, BF16, FP32)
    assert net.seen["mask"] == torch.int64, "integers are no one's to cast"
    assert extra["bias"].dtype == FP32, "the caller's own is untouched"
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == FP32
    with torch.no_grad():
        assert net(vectors(rank)).dtype == FP32
    kept = spy(world_size, param_dtype=BF16, cast_forward_inputs=False)
    kept(vectors(rank))
    assert kept.seen["x"] == FP32 and kept.seen["weight"] == BF16


@pytest.mark.parametrize(
    ("strategy", "weights"),
    [(strategy, BF16) for strategy in STRATEGIES] + [("zero1", FP16), ("zero3", FP16)],
    ids=str,
)
@on_ranks(ranks_for)
def test_low_precision_training_follows_fp32(
    rank: int, world_size: int, strategy: str, weights: torch.dtype
) -> None:
    """The main weights stay fp32: updates too small for the compute dtype add up."""
    policy = MixedPrecisionPolicy(param_dtype=weights, reduce_dtype=FP32)
    t = trial(rank, world_size, strategy, mp_policy=policy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in t.both]
    start = {name: value.detach().clone() for name, value in t.plain.named_parameters()}
    for step in range(5):
        t.add(word_loss, step)
        for each in optimizers:
            each.step()
            each.zero_grad()
    for name, value in t.plain.named_parameters():
        moved = (value.detach() - start[name]).abs().max().item()
        assert moved > 0
        # What is lost is a small part of the way, whatever the size of the weight.
        assert_close(full(t.net.get_parameter(name)), value.detach(), name, 0.1 * moved)
    assert all(state["momentum_buffer"].dtype == FP32 for state in optimizers[0].state.values())


@pytest.mark.parametrize("value", ["int8", torch.int32, torch.float8_e4m3fn, "fp31"])
def test_a_dtype_that_no_weight_can_have_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="weights"):
        sw.Precision(weights=value)
    with pytest.raises(ValueError, match="cast_inputs"):
        sw.Precision(cast_inputs="no")  # type: ignore[arg-type]


def born(dtype: torch.dtype) -> Net:
    net = pair(Net)[0].to(dtype)
    net.head.requires_grad_(dtype != BF16)
    return net  # type: ignore[no-any-return]


def train(rank: int, world_size: int, strategy: str) -> tuple[float, list[str]]:
    """The share of elements that five small steps have moved."""
    net = wrap(born(BF16), world_size, strategy)
    seen: set[torch.dtype] = set()
    net.blocks[0].up.register_forward_pre_hook(lambda m, _: seen.add(m.weight.dtype))
    before = {name: full(p).clone() for name, p in net.named_parameters()}
    with logged() as texts:
        optimizer = sw.optimizer(net, matrix=sw.muon(lr=1e-4), elementwise=sw.adamw(lr=1e-4))
    for name, p in net.named_parameters():
        frozen = name.startswith("head")
        assert p.dtype == (BF16 if frozen else FP32), name
        states = [v for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
        assert frozen is not bool(states) and all(v.dtype == FP32 for v in states), name
    for step in range(5):
        word_loss(net, rank, step).backward()
        assert {p.grad.dtype for p in net.parameters() if p.requires_grad} == {FP32}
        optimizer.step()
        optimizer.zero_grad()
    assert seen == {BF16}, "computed with as it came"
    moved = total = 0
    for name, p in net.named_parameters():
        changed = full(p) != before[name]
        if name.startswith("head"):
            assert not changed.any()
        elif "embedding" not in name:  # of which only the rows that were read have gradients
            moved, total = moved + int(changed.sum()), total + changed.numel()
    return moved / total, texts


@pytest.mark.parametrize("strategy", [*STRATEGIES, "data_parallel"])
def test_small_steps_move_a_model_that_came_in_bf16(strategy: str) -> None:
    found = run_ranks(train, ranks_for(strategy), strategy)
    assert all(share > 0.99 and not texts for share, texts in found), found


@on_ranks(2)
def test_the_choice_of_the_user_holds(rank: int, world_size: int) -> None:
    """The dtype asked for is taken; ``.to`` follows; fp64 and integers keep their dtype."""

    def dtypes(net: Any) -> set[torch.dtype]:
        return {p.dtype for p in net.parameters() if p.requires_grad}

    assert dtypes(wrap(born(BF16), world_size, precision=sw.Precision(main="bf16"))) == {BF16}
    net = wrap(born(FP16), world_size, mp_policy=MixedPrecisionPolicy(BF16))
    assert dtypes(net) == {FP32} and dtypes(net.to(BF16)) == {BF16}
    assert dtypes(wrap(born(FP64), world_size)) == {FP64}


class Gated(nn.Module):
    """A bf16 projection under an fp32 router, as MoE models have it, and integers beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH, dtype=BF16)
        self.gain = nn.Parameter(torch.rand(WIDTH, dtype=FP64))
        self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(WIDTH) > 0.3, requires_grad=False)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: value.dtype for name, value in self.named_parameters()}
        gate = self.router(x.to(self.router.weight.dtype)).sigmoid().float()
        y = self.projection(x.to(self.projection.weight.dtype)).float() * gate
        return (y[..., self.order] * self.mask).double() * self.gain


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(ranks_for)
def test_parameters_of_several_dtypes_share_a_unit(
    rank: int, world_size: int, strategy: str, mixed: bool
) -> None:
    t = trial(rank, world_size, strategy, Gated, **({"mp_policy": MIXED} if mixed else {}))
    for step in range(3):
        t.add(vector_loss, step)
        assert_at_rest(t.net, t.before)
        for name, theirs in t.plain.named_parameters():
            ours = t.net.get_parameter(name)
            # fp32 for what is trained in fewer bits; any other keeps its dtype.
            assert ours.dtype == (FP32 if theirs.dtype == BF16 else theirs.dtype), name
            floats = theirs.is_floating_point()
            assert t.net.seen[name] == (BF16 if mixed and floats else theirs.dtype), name
            if not floats:
                assert ours.grad is None and torch.equal(full(ours), theirs), name
                continue
            tolerance = 2e-2 if mixed or theirs.dtype == BF16 else 1e-6
            assert ours.grad.dtype == ours.dtype and theirs.grad.abs().max() > 0
            assert_close(full(ours.grad), theirs.grad, name, tolerance)
        t.zero_grad()
        with torch.no_grad():
            for parameter in (*t.net.parameters(), *t.plain.parameters()):
                if parameter.requires_grad:
                    parameter.mul_(0.5)  # exact in every dtype


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(ranks_for)
def test_main_weights_may_be_wider_than_the_model(
    rank: int, world_size: int, strategy: str
) -> None:
    """``Precision(main=...)``: a bf16 model trained over fp32 main weights."""
    precision = sw.Precision(weights="bf16", reduce="fp32", main="fp32")
    t = trial(rank, world_size, strategy, partial(_narrow, Spy), precision=precision)
    weight, whole = t.net.linear.weight, t.plain.linear.weight.detach().float()
    assert weight.dtype == FP32 and torch.equal(full(weight), whole)
    vector_loss(t.net, rank).backward()
    assert t.net.seen["weight"] == BF16 and weight.grad.dtype == FP32
    with torch.no_grad():
        weight.add_(2.0**-12)  # lost in bf16, kept in main
    assert torch.equal(full(weight), whole + 2.0**-12)


def _narrow(make: Any) -> Any:
    return make().to(BF16)
