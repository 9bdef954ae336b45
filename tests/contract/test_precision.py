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
    assert_at_rest,
    assert_close,
    average_gradients,
    full,
    logged,
    mesh_for,
    pair,
    raised,
    ranks_for,
    transient_bytes,
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


WAYS = (*STRATEGIES, "data_parallel")


def born(dtype: torch.dtype, frozen: bool = False) -> Net:
    torch.manual_seed(3)
    net = Net().to(dtype)
    net.head.requires_grad_(not frozen)
    return net


def wrapped(net: Net, world_size: int, way: str, **options: Any) -> Net:
    if way == "data_parallel":
        return sw.data_parallel(net, mesh=mesh_for("zero", world_size), **options)
    return wrap(net, world_size, way, **options)


def optimizer_of(model: nn.Module, lr: float = 1e-4) -> Any:
    return sw.optimizer(model, matrix=sw.muon(lr=lr), elementwise=sw.adamw(lr=lr))


def train(rank: int, world_size: int, way: str) -> tuple[float, list[str]]:
    """The share of elements that five small steps have moved."""
    net = born(torch.bfloat16, frozen=True)
    seen: set[torch.dtype] = set()
    net.blocks[0].up.register_forward_pre_hook(lambda m, _: seen.add(m.weight.dtype))
    wrapped(net, world_size, way)
    before = {name: full(p).clone() for name, p in net.named_parameters()}
    with logged() as texts:
        optimizer = optimizer_of(net)
    for name, p in net.named_parameters():
        frozen = name.startswith("head")
        assert p.dtype == (torch.bfloat16 if frozen else torch.float32), name
        states = [v for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
        assert frozen is not bool(states) and all(v.dtype == torch.float32 for v in states), name
    for step in range(5):
        word_loss(net, rank, step).backward()
        assert {p.grad.dtype for p in net.parameters() if p.requires_grad} == {torch.float32}
        optimizer.step()
        optimizer.zero_grad()
    assert seen == {torch.bfloat16}, "computed with as it came"
    moved = total = 0
    for name, p in net.named_parameters():
        changed = full(p) != before[name]
        if name.startswith("head"):
            assert not changed.any()
        elif "embedding" not in name:  # of which only the rows that were read have gradients
            moved, total = moved + int(changed.sum()), total + changed.numel()
    return moved / total, texts


@pytest.mark.parametrize("way", WAYS)
def test_small_steps_move_a_model_that_came_in_bf16(way: str) -> None:
    found = run_ranks(train, ranks_for(way), way)
    assert all(share > 0.99 for share, _ in found), found
    assert not any(texts for _, texts in found), "nothing to warn about"


@on_ranks(2)
def test_the_choice_of_the_user_holds(rank: int, world_size: int) -> None:
    """The dtype asked for is taken; ``.to`` follows; fp64 and integers keep their dtype."""
    net = wrap(born(torch.bfloat16), world_size, precision=sw.Precision(main="bf16"))
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    net = wrap(born(torch.float16), world_size, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    net.to(torch.bfloat16)
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    net = wrap(born(torch.float64), world_size)
    assert {p.dtype for p in net.parameters()} == {torch.float64}


class Gated(nn.Module):
    """A bf16 projection under an fp32 router, as MoE models have it, and integers beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.gain = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))
        self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(WIDTH) > 0.3, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x.to(self.router.weight.dtype)).sigmoid().float()
        y = self.projection(x.to(self.projection.weight.dtype)).float() * gate
        return (y[..., self.order] * self.mask).double() * self.gain


def main_dtype(parameter: Tensor) -> torch.dtype:
    """fp32 for what is trained in fewer bits; any other keeps its dtype."""
    return torch.float32 if parameter.dtype == torch.bfloat16 else parameter.dtype


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(ranks_for)
def test_parameters_of_several_dtypes_share_a_unit(
    rank: int, world_size: int, strategy: str
) -> None:
    net, plain = pair(Gated)
    dtypes = {name: parameter.dtype for name, parameter in plain.named_parameters()}
    assert len(set(dtypes.values())) == 5
    wrap(net, world_size, strategy)
    before = transient_bytes()
    for step in range(3):
        vector_loss(net, rank, step).backward()
        average_gradients(plain, lambda m, r, step=step: vector_loss(m, r, step), world_size)
        assert_at_rest(net, before)
        compared = 0
        for name, parameter in plain.named_parameters():
            ours = net.get_parameter(name)
            assert ours.dtype == main_dtype(parameter), name
            if not parameter.requires_grad:
                assert ours.grad is None
                assert torch.equal(full(ours), parameter), name
                continue
            assert ours.grad.dtype == main_dtype(parameter), name
            tolerance = 2e-2 if parameter.dtype == torch.bfloat16 else 1e-6
            assert parameter.grad.abs().max() > 0
            assert_close(full(ours.grad), parameter.grad, name, tolerance)
            compared += 1
        assert compared == 5
        net.zero_grad()
        plain.zero_grad()
        with torch.no_grad():
            for model in (net, plain):
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.mul_(0.5)  # exact in every dtype


@pytest.mark.parametrize("strategy", ["zero0", "zero3", "hfsdp"])
@on_ranks(ranks_for)
def test_mixed_precision_casts_floats_of_every_dtype_and_no_integers(
    rank: int, world_size: int, strategy: str
) -> None:
    net, plain = pair(Gated)
    seen: dict[str, torch.dtype] = {}

    def look(module: nn.Module, args: object) -> None:
        seen.update({name: value.dtype for name, value in module.named_parameters()})

    net.register_forward_pre_hook(look)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap(net, world_size, strategy, mp_policy=policy)
    vector_loss(net, rank).backward()
    average_gradients(plain, vector_loss, world_size)
    assert seen.pop("order") == torch.int64 and seen.pop("mask") == torch.bool, "never cast"
    assert set(seen.values()) == {torch.bfloat16}, seen
    assert torch.equal(full(net.order), plain.order)
    for name in ("router.weight", "projection.weight", "gain"):
        ours, theirs = net.get_parameter(name), plain.get_parameter(name)
        assert ours.dtype == main_dtype(theirs) == ours.grad.dtype, name
        assert_close(full(ours.grad), theirs.grad, name, 2e-2)
