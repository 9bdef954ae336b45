# SPDX-License-Identifier: Apache-2.0
"""``MixedPrecisionPolicy``, field by field, and ``Precision``, which says the same and more."""

from __future__ import annotations

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
    assert_close,
    average_gradients,
    full,
    options_for,
    pair,
    raised,
    ranks_for,
    vector_loss,
    vectors,
    word_loss,
    wrap,
)
from tests.ranks import on_ranks, run_ranks

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


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


def spy(world_size: int, policy: MixedPrecisionPolicy, strategy: str = "zero3") -> Any:
    return wrap(Spy(), world_size, strategy, mp_policy=policy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(ranks_for)
def test_param_dtype_is_gathered_computed_and_reduced_in(
    rank: int, world_size: int, strategy: str
) -> None:
    sizes = []
    for dtype in (FP32, BF16):
        net = spy(world_size, MixedPrecisionPolicy(param_dtype=dtype), strategy)
        with sw.comm.record() as calls:
            net(vectors(rank)).sum().backward()
        assert net.seen == {"x": dtype, "weight": dtype, "y": dtype}
        assert net.linear.weight.dtype == FP32, "the optimizer's weight keeps its dtype"
        assert net.linear.weight.grad.dtype == FP32
        sizes.append([(call.operation, call.nbytes) for call in calls])
    wide, narrow = (dict(calls) for calls in sizes)
    assert set(narrow) - {"all_gather"}, "something was reduced"
    for operation, nbytes in narrow.items():
        assert wide[operation] == 2 * nbytes, (operation, sizes)


def reduce_dtype(rank: int, world_size: int, dtype: torch.dtype) -> list[int]:
    net = spy(world_size, MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=dtype))
    with sw.comm.record() as calls:
        net(vectors(rank)).sum().backward()
    assert net.linear.weight.grad.dtype == FP32
    return [call.nbytes for call in calls if call.operation == "reduce_scatter"]


def test_reduce_dtype_is_what_travels() -> None:
    narrow, wide = run_ranks(reduce_dtype, 2, BF16)[0], run_ranks(reduce_dtype, 2, FP32)[0]
    assert narrow and [2 * nbytes for nbytes in narrow] == wide


class Tiny(nn.Module):
    """A gradient of 1 + 2^-9 on each rank: bf16 cannot hold it, fp32 can."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x).sum()


def reduced_wide(rank: int, world_size: int, strategy: str) -> Tensor:
    """Rank 0 contributes 256, the others 1 each. Their sum is exact in fp32 only."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    net = wrap(Tiny(), world_size, strategy, mp_policy=policy)
    net.set_gradient_divide_factor(1.0)
    for microbatch in range(3):
        net.set_is_last_backward(microbatch == 2)
        net(torch.full((4,), 256.0 if rank == 0 else 1.0)).backward()
    return full(net.scale.grad)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sums_in_fp32_lose_nothing(strategy: str) -> None:
    world_size = ranks_for(strategy)
    for grad in run_ranks(reduced_wide, world_size, strategy):
        assert grad.dtype == FP32
        assert torch.equal(grad, torch.full((4,), 3.0 * (256 + world_size - 1)))


@on_ranks(2)
def test_output_dtype_is_what_leaves(rank: int, world_size: int) -> None:
    net = spy(world_size, MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32))
    y = net(vectors(rank))
    assert net.seen["y"] == BF16 and y.dtype == FP32
    y.sum().backward()
    assert net.linear.weight.grad is not None
    with torch.no_grad():
        assert net(vectors(rank)).dtype == FP32


@on_ranks(2)
def test_cast_forward_inputs_casts_floats_or_leaves_them(rank: int, world_size: int) -> None:
    net = spy(world_size, MixedPrecisionPolicy(param_dtype=BF16))
    extra = {"mask": torch.ones(2, dtype=torch.int64), "bias": torch.ones(2)}
    net(vectors(rank), extra=extra)
    assert net.seen["x"] == BF16 and net.seen["bias"] == BF16
    assert net.seen["mask"] == torch.int64, "integers are no one's to cast"
    assert extra["bias"].dtype == FP32, "the caller's own is untouched"
    x = vectors(rank).requires_grad_()
    net(x).sum().backward()
    assert x.grad is not None and x.grad.dtype == FP32
    kept = spy(world_size, MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False))
    kept(vectors(rank))
    assert kept.seen["x"] == FP32 and kept.seen["weight"] == BF16


@on_ranks(2)
def test_units_of_one_model_may_differ_in_precision(rank: int, world_size: int) -> None:
    """A precision per unit: an fp32 head over bf16 blocks."""
    net, plain = pair(Net)
    options = options_for("zero3", world_size)
    low = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    sw.fully_shard(net.blocks[0], **options, mp_policy=low)
    sw.fully_shard(net.blocks[1], **options, mp_policy=low)
    sw.fully_shard(net.head, **options, mp_policy=MixedPrecisionPolicy(param_dtype=FP32))
    sw.fully_shard(net, **options, mp_policy=MixedPrecisionPolicy())
    word_loss(net, rank).backward()
    average_gradients(plain, word_loss, world_size)
    for name, parameter in plain.named_parameters():
        assert_close(full(net.get_parameter(name).grad), parameter.grad, name, 0.03)


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
    net, plain = pair(Net)
    policy = MixedPrecisionPolicy(param_dtype=weights, reduce_dtype=FP32)
    wrap(net, world_size, strategy, mp_policy=policy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    reference = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    start = {name: value.detach().clone() for name, value in plain.named_parameters()}
    for step in range(5):
        word_loss(net, rank, step).backward()
        average_gradients(plain, lambda m, r, step=step: word_loss(m, r, step), world_size)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    for name, value in plain.named_parameters():
        moved = (value.detach() - start[name]).abs().max().item()
        assert moved > 0
        # What is lost is a small part of the way, whatever the size of the weight.
        assert_close(full(net.get_parameter(name)), value.detach(), name, 0.1 * moved)
    states = list(optimizer.state.values())
    assert states and all(state["momentum_buffer"].dtype == FP32 for state in states)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(ranks_for)
def test_main_weights_may_be_wider_than_the_model(
    rank: int, world_size: int, strategy: str
) -> None:
    """``Precision(main=...)``: a bf16 model trained over fp32 main weights."""
    torch.manual_seed(0)
    net = Spy().to(BF16)
    whole = net.linear.weight.detach().float().clone()
    precision = sw.Precision(weights="bf16", reduce="fp32", main="fp32")
    wrap(net, world_size, strategy, precision=precision)
    assert net.linear.weight.dtype == FP32
    assert torch.equal(full(net.linear.weight), whole)
    vector_loss(net, rank).backward()
    assert net.seen["weight"] == BF16 and net.linear.weight.grad.dtype == FP32
    with torch.no_grad():
        net.linear.weight.add_(2.0**-12)  # lost in bf16, kept in main
    assert torch.equal(full(net.linear.weight), whole + 2.0**-12)


@on_ranks(2)
def test_precision_and_mp_policy_together_are_refused(rank: int, world_size: int) -> None:
    policy, precision = MixedPrecisionPolicy(), sw.Precision()
    message = raised(
        lambda: wrap(Spy(), world_size, mp_policy=policy, precision=precision), ValueError
    )
    assert "precision" in message and "mp_policy" in message


@pytest.mark.parametrize("value", ["int8", torch.int32, torch.float8_e4m3fn, "fp31"])
def test_a_dtype_that_no_weight_can_have_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="weights"):
        sw.Precision(weights=value)
    with pytest.raises(ValueError, match=r"cast_inputs='no'\): True or False"):
        sw.Precision(cast_inputs="no")  # type: ignore[arg-type]
