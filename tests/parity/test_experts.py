# SPDX-License-Identifier: Apache-2.0
"""Experts spread over 4 ranks equal all experts on one rank with the whole batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardwise as sw
from shardwise.core import comm
from shardwise.moe.activation import swiglu
from shardwise.moe.layer import MixtureOfExperts
from shardwise.moe.router import Routing
from tests.models import mesh_of
from tests.one_card import device_type
from tests.ranks import on_ranks, run_ranks

EXPERTS, HIDDEN, WIDTH, TOKENS = 8, 16, 24, 20  # tokens per rank


def routing(**options: Any) -> Routing:
    return Routing(num_experts=EXPERTS, experts_per_token=2, **options)


def build(axis: comm.Axis | None, options: dict[str, Any], **layer: Any) -> MixtureOfExperts:
    """The same weights everywhere: every rank makes all experts and keeps its own."""
    torch.manual_seed(7)
    shared = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.SiLU()) if layer.pop("shared", 0) else None
    whole = MixtureOfExperts(
        routing(**options), HIDDEN, WIDTH, activation=swiglu(), shared=shared, bias=True, **layer
    )
    for parameter in whole.experts.parameters():
        nn.init.normal_(parameter, std=0.4)
    if axis is None:
        return whole
    part = MixtureOfExperts(
        routing(**options),
        HIDDEN,
        WIDTH,
        activation=swiglu(),
        shared=shared,
        bias=True,
        axis=axis,
        **layer,
    )
    part.router.load_state_dict(whole.router.state_dict())
    mine = slice(part.first_expert, part.first_expert + EXPERTS // axis.size)
    for name, parameter in part.experts.named_parameters():
        parameter.data.copy_(whole.experts.get_parameter(name)[mine])
    return part


def at(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"


def batch(ranks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ranks * TOKENS, HIDDEN, generator=generator)
    x[: TOKENS // 2] = x[0]  # half of rank 0's tokens go one way: very uneven
    return x, torch.randn(ranks * TOKENS, HIDDEN, generator=generator)


def run(layer: MixtureOfExperts, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Any]:
    x = x.clone().requires_grad_()
    out, routes = layer(x)
    loss = (out - target).square().sum() / len(x) + routes.loss
    loss.backward()
    layer.backward_dw()
    assert x.grad is not None
    return out.detach(), x.grad, routes


def spread(rank: int, world_size: int, options: dict[str, Any], layer: dict[str, Any]) -> None:
    axis = comm.as_axis(torch.distributed.group.WORLD, "ep")
    part = build(axis, options, **layer)
    whole = build(None, options, **layer)
    x, target = batch(world_size)
    mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
    with comm.record() as calls:
        out, dx, routes = run(part, x[mine], target[mine])
    expected, expected_dx, all_routes = run(whole, x, target)
    torch.testing.assert_close(out, expected[mine], rtol=1e-5, atol=1e-5)
    # Rank losses are means over their own tokens: their mean is the loss of the whole batch.
    torch.testing.assert_close(dx / world_size, expected_dx[mine], rtol=1e-4, atol=1e-6)
    total = routes.counts.clone()
    comm.all_reduce(total, axis).wait()
    assert total.tolist() == all_routes.counts.tolist()
    assert total.max() > 1.3 * total.float().mean()
    first = part.first_expert
    compared = 0
    for name, parameter in part.experts.named_parameters():
        reference = whole.experts.get_parameter(name).grad
        assert parameter.grad is not None and reference is not None
        want = reference[first : first + len(parameter)]
        got = parameter.grad / world_size
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
        compared += 1
    assert compared == 4
    gradient = part.router.weight.grad
    assert gradient is not None
    comm.all_reduce(gradient, axis, divisor=world_size).wait()
    torch.testing.assert_close(gradient, whole.router.weight.grad, rtol=1e-4, atol=1e-6)
    # Exact sizes: rows and weights out, rows back, the same for gradients; and the counts once.
    exchanges = [call for call in calls if call.operation == "all_to_all"]
    away = int(routes.counts.sum()) - int(routes.counts[first : first + len(want)].sum())
    assert len(exchanges) == 7
    assert exchanges[1].nbytes == away * HIDDEN * 4 and exchanges[2].nbytes == away * 4


@pytest.mark.parametrize("layer", [{}, {"shared": True}], ids=str)
def test_four_ranks_equal_one(layer: dict[str, Any]) -> None:
    run_ranks(spread, 4, {"balance_loss": 0.1, "z_loss": 0.01, "score": "sigmoid"}, layer)


@on_ranks(4)
def test_the_bias_is_moved_by_the_load_of_all_ranks(rank: int, world_size: int) -> None:
    axis = comm.as_axis(torch.distributed.group.WORLD, "ep")
    options = {"bias_rate": 0.25}
    part, whole = build(axis, options), build(None, options)
    x, target = batch(world_size)
    for _ in range(3):
        run(part, x[rank * TOKENS : (rank + 1) * TOKENS], target[:TOKENS])
        run(whole, x, target)
        part.router.update_bias()
        whole.router.update_bias()
    assert whole.router.expert_bias.abs().sum() > 0
    assert torch.equal(part.router.expert_bias, whole.router.expert_bias)


def run_sum(layer: MixtureOfExperts, x: Tensor, target: Tensor) -> tuple[Tensor, Any, Any]:
    out, routes = layer(x.clone().requires_grad_())
    (out - target).square().sum().backward()
    return out.detach(), None, routes


@on_ranks(4)
def test_a_rank_without_tokens(rank: int, world_size: int) -> None:
    """A rank without tokens still computes for the others."""
    axis = comm.as_axis(torch.distributed.group.WORLD, "ep")
    part, whole = build(axis, {}), build(None, {})
    x, target = batch(1)
    own = x if rank == 0 else x[:0]
    out, _, _ = run_sum(part, own, target[: len(own)])
    expected, _, _ = run_sum(whole, x, target)
    torch.testing.assert_close(out, expected[: len(own)], rtol=1e-5, atol=1e-5)
    first, n = part.first_expert, EXPERTS // world_size
    for name, parameter in part.experts.named_parameters():
        reference = whole.experts.get_parameter(name).grad
        assert parameter.grad is not None and reference is not None
        torch.testing.assert_close(
            parameter.grad, reference[first : first + n], rtol=1e-4, atol=1e-5
        )


def experts_that_do_not_divide(rank: int, world_size: int) -> str:
    axis = comm.as_axis(torch.distributed.group.WORLD, "ep")
    try:
        MixtureOfExperts(
            Routing(num_experts=6, experts_per_token=1), 8, 8, activation=swiglu(), axis=axis
        )
    except ValueError as error:
        return str(error)
    return ""


def test_experts_that_do_not_divide_are_refused_on_every_rank() -> None:
    for message in run_ranks(experts_that_do_not_divide, 4):
        assert "6 experts cannot be spread evenly over ep=4" in message


# ------------------------------------------------------------------------------ under strategies


class Net(nn.Module):
    """A linear, experts, a linear."""

    def __init__(self, axis: comm.Axis | None = None, **layer: Any) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.before = nn.Linear(HIDDEN, HIDDEN)
        self.moe = build(axis, {"balance_loss": 0.1}, **layer)
        torch.manual_seed(12)
        self.after = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mixed, routes = self.moe(self.before(x))
        return self.after(x + mixed), routes.loss


def loss_of(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    out, balance = net(x)
    return (out - target).square().sum() / len(x) + balance


def whole_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # type: ignore[no-any-return]


def sharded(rank: int, world_size: int, strategy: str, layer: dict[str, Any]) -> None:
    """Data parallel alone: every rank has all experts, cut by the strategy."""
    net, plain = Net(**layer), Net(**layer)
    mesh = init_device_mesh(device_type(), (world_size,), mesh_dim_names=("dp",))
    placements = sw.zero(int(strategy[-1]))
    sw.fully_shard(net.moe.experts, mesh=mesh, placements=placements)
    sw.fully_shard(net, mesh=mesh, placements=placements)
    x, target = batch(world_size)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.005) for model in (net, plain)]
    for _ in range(2):
        for micro in range(2):
            net.set_is_last_backward(micro == 1)  # type: ignore[operator]
            parts = slice(rank * TOKENS, (rank + 1) * TOKENS)
            loss_of(net, x[parts] + micro, target[parts]).backward()
            for other in range(world_size):
                parts = slice(other * TOKENS, (other + 1) * TOKENS)
                (loss_of(plain, x[parts] + micro, target[parts]) / world_size).backward()
        named = dict(net.named_parameters())
        assert len(named) == len(list(plain.parameters()))
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            found, expected = whole_gradient(named[name]), parameter.grad
            assert (found - expected).norm() < 1e-4 * expected.norm(), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("layout", ["grouped", "indexed"])
@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3"])
def test_experts_train_under_strategies(strategy: str, layout: str) -> None:
    run_ranks(sharded, 2, strategy, {"weight_layout": layout})


@pytest.mark.parametrize("delay", [False, True])
@on_ranks(4)
def test_experts_spread_over_one_axis_and_sharded_over_another(
    rank: int, world_size: int, delay: bool
) -> None:
    """2 x 2 ranks: experts over ``ep``, each cut over the two ranks of ``dp`` that hold it."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "ep"))
    axis = comm.as_axis(mesh.get_group("ep"), "ep")
    net = Net(axis, delay_weight_gradient=delay)
    plain = Net()
    sw.fully_shard(net.moe.experts, mesh=mesh["dp"], placements=sw.zero(3))
    everybody = init_device_mesh(device_type(), (4,), mesh_dim_names=("dp",))
    sw.fully_shard(net, mesh=everybody, placements=sw.zero(3))
    x, target = batch(world_size)
    mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
    loss_of(net, x[mine], target[mine]).backward()
    # The balance loss counts shares over ``ep``; so does the truth, pair by pair.
    for pair in range(2):
        both = slice(2 * pair * TOKENS, 2 * (pair + 1) * TOKENS)
        (loss_of(plain, x[both], target[both]) / 2).backward()
    first = net.moe.first_expert
    truth = dict(plain.named_parameters())
    compared = 0
    for name, parameter in net.named_parameters():
        want = truth[name].grad
        assert want is not None
        if name.startswith("moe.experts."):
            want = want[first : first + EXPERTS // 2]
        torch.testing.assert_close(
            whole_gradient(parameter),
            want,
            rtol=1e-4,
            atol=1e-5,
            msg=at(name),
        )
        compared += 1
    assert compared == len(truth) == 9


@on_ranks(2)
def test_experts_under_a_precision_policy(rank: int, world_size: int) -> None:
    """A precision policy casts rows and weights; router weights stay fp32, gradients too."""
    net, plain = Net(), Net().bfloat16()
    mesh = init_device_mesh(device_type(), (world_size,), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (net.moe.experts, net):
        sw.fully_shard(module, mesh=mesh, placements=sw.zero(3), mp_policy=policy)
    x, target = batch(world_size)
    mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
    loss_of(net, x[mine], target[mine]).backward()
    for other in range(world_size):
        parts = slice(other * TOKENS, (other + 1) * TOKENS)
        (loss_of(plain, x[parts].bfloat16(), target[parts]) / world_size).backward()
    named = dict(net.named_parameters())
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        got, want = whole_gradient(named[name]), parameter.grad.float()
        assert got.dtype == torch.float32
        assert (got - want).norm() < 2e-2 * want.norm(), name


@pytest.mark.parametrize("strategy", ["zero0", "zero3", "data_parallel"])
@on_ranks(2)
def test_delayed_weight_gradients_are_reduced_when_they_come(
    rank: int, world_size: int, strategy: str
) -> None:
    """With no exchange to hide them in, weight gradients come after backward, by backward_dw."""
    net, plain = Net(delay_weight_gradient=True), Net()
    mesh = init_device_mesh(device_type(), (world_size,), mesh_dim_names=("dp",))
    model: nn.Module = net
    if strategy == "data_parallel":
        model = sw.data_parallel(net, mesh=mesh, placements=sw.zero(1), bucket_mb=1)
    else:
        placements = sw.zero(int(strategy[-1]))
        sw.fully_shard(net.moe.experts, mesh=mesh, placements=placements)
        sw.fully_shard(net, mesh=mesh, placements=placements)
    published: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: published.append(name))
    x, target = batch(world_size)
    mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
    for step in range(2):
        loss_of(model, x[mine] + step, target[mine]).backward()
        assert not any("moe.experts" in name for name in published)
        with pytest.raises(RuntimeError, match=r"fc2\.weight.*call backward_dw\(\)"):
            loss_of(model, x[mine], target[mine])
        net.moe.backward_dw()
        assert sorted(published) == sorted(name for name, _ in net.named_parameters())
        for other in range(world_size):
            parts = slice(other * TOKENS, (other + 1) * TOKENS)
            (loss_of(plain, x[parts] + step, target[parts]) / world_size).backward()
        named = dict(net.named_parameters())
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            gradient = whole_gradient(named[name])
            assert gradient.dtype == torch.float32
            torch.testing.assert_close(
                gradient,
                parameter.grad,
                rtol=1e-4,
                atol=1e-5,
                msg=at(name),
            )
        model.zero_grad()
        plain.zero_grad()
        published.clear()


# ------------------------------------------------------------------------------ a mesh of their own


class Stack(nn.Module):
    """Matrices [experts, out, in]."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width, width) / width)
        self.bias = nn.Parameter(torch.randn(count, width))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.einsum("td,ehd->th", hidden, self.weight) + self.bias.sum(0)


def sparse(seed: int) -> nn.Module:
    """A linear, and experts that are others on other ranks."""
    torch.manual_seed(0)
    dense = nn.Linear(8, 8)
    torch.manual_seed(seed)
    return nn.Sequential(OrderedDict(dense=dense, experts=Stack(3, 8)))


@on_ranks(4)
def test_experts_in_buckets_are_reduced_over_their_own_mesh(rank: int, world_size: int) -> None:
    """2 expert-parallel ranks, and 2 that hold the same experts: {0, 2} and {1, 3}."""
    grid = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("expert_dp", "ep"))

    def batch(of: int) -> Tensor:
        return torch.randn(5, 8, generator=torch.Generator().manual_seed(of))

    grads: dict[str, list[Tensor]] = {}
    for other in range(world_size):
        twin = sparse(100 + other % 2)
        twin(batch(other)).square().mean().backward()
        for name, parameter in twin.named_parameters():
            # What an expert's ranks saw is summed over them and divided by all ranks.
            if "experts" not in name or other % 2 == rank % 2:
                grads.setdefault(name, []).append(parameter.grad)  # type: ignore[arg-type]
    weights = dict(sparse(100 + rank % 2).named_parameters())
    for pattern in ("experts", "experts.*", "expert?"):
        meshes = {pattern: grid["expert_dp"]}
        model = sw.data_parallel(sparse(100 + rank % 2), mesh=mesh_of(4), meshes=meshes)
        for dtype in (torch.float32, torch.float64):
            for name, parameter in model.to(dtype).named_parameters():  # new buffers, one divisor
                assert torch.equal(parameter.full_tensor().float(), weights[name]), "no rank's lost"
                assert parameter.device_mesh.size() == (2 if "experts" in name else 4), name
            model(batch(rank).to(dtype)).square().mean().backward()
            for name, parameter in model.named_parameters():
                expected = (sum(grads[name]) / world_size).to(dtype)
                found = parameter.grad.full_tensor()
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
            model.zero_grad()
    model(batch(rank).to(dtype)).square().mean().backward()
    optimizer = sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())
    with sw.comm.record() as calls:
        optimizer.step()
    assert not calls, "experts stay whole on their ranks"
