# SPDX-License-Identifier: Apache-2.0
"""Experts spread over ranks as users meet them: what is derived, and what is refused by name."""

from __future__ import annotations

import copy
import io
import math
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.core import comm
from shardwise.moe import GroupedMLP, MixtureOfExperts, Routing, swiglu
from tests.contract.helpers import raised
from tests.models import mesh_of
from tests.moe_models import EXPERTS, HIDDEN, WIDTH, Net, Way, batch, whole
from tests.ranks import on_ranks, run_ranks


def grid(dp: int, ep: int) -> Any:
    return init_device_mesh("cpu", (dp, ep), mesh_dim_names=("dp", "ep"))


def spread_net(mesh: Any, **way: Any) -> Net:
    net = Net(Way(**way))
    net.moe.spread(comm.as_axis(mesh.get_group("ep"), "ep"))
    return net


def wrapped(mesh: Any, placements: Any = None, **way: Any) -> Net:
    net = spread_net(mesh, **way)
    placements = placements or sw.zero(3)
    sw.fully_shard(net.moe.experts, mesh=mesh["dp"], placements=placements)
    sw.fully_shard(net, mesh=mesh_of(mesh.size()), placements=placements)
    return net


# ------------------------------------------------------------------------------------- wrapping


@on_ranks(4)
def test_spread_experts_are_not_wrapped_with_the_rest(rank: int, world_size: int) -> None:
    mesh, everybody = grid(world_size // 2, 2), mesh_of(world_size)
    ways: dict[str, Any] = {  # by a parameter that the message names
        "moe.experts.fc1.weight": lambda net: sw.fully_shard(net, mesh=everybody),
        "moe.experts.fc2.bias": lambda net: sw.data_parallel(net, mesh=everybody),
        "moe.experts.fc2.weight": lambda net: sw.data_parallel(
            net, mesh=everybody, meshes={"*fc1*": mesh["dp"]}
        ),
        # What is no expert sees the tokens of all ranks: reduced over some it drifts apart.
        "router.weight": lambda net: sw.fully_shard(net.moe, mesh=mesh),
    }
    for name, wrap in ways.items():
        net = spread_net(mesh)
        text = raised(lambda wrap=wrap, net=net: wrap(net), ValueError)
        assert f"'{name}'" in text or "more" in text, text
        assert type(net.moe.experts.fc2.weight) is nn.Parameter, "nothing was changed"


@on_ranks(2)
def test_ranks_keep_values_of_their_own_experts(rank: int, world_size: int) -> None:
    """One unit, and every rank has other experts: loaded values and buffers of these differ."""
    mesh = grid(1, world_size)
    net = spread_net(mesh)
    kept = io.BytesIO()
    torch.save(net.state_dict(), kept)  # plain tensors come back
    kept.seek(0)
    meshes = {"*.experts": mesh["dp"]}
    net.moe.experts.register_buffer("seen", torch.full((2,), float(rank)), persistent=False)
    sw.data_parallel(net, mesh=mesh_of(world_size), placements=sw.zero(1), meshes=meshes)
    assert net.moe.experts.seen.tolist() == [rank, rank]
    net.load_state_dict(torch.load(kept))
    optimizer = sw.optimizer(net, matrix=sw.muon(lr=0.1), elementwise=sw.adamw(lr=0.1))
    net(batch(0, rank, world_size)).backward()
    optimizer.step()


@on_ranks(2)
def test_ranks_with_other_experts_do_not_share_a_mesh(rank: int, world_size: int) -> None:
    """Without an axis only the ranks together can tell that they hold different experts."""
    mlp = GroupedMLP(4, 8, 8, activation=swiglu())
    mlp.spread(2 * rank, 2)
    message = raised(lambda: sw.fully_shard(mlp, mesh=mesh_of(world_size)), ValueError)
    assert "experts 0 to 1 of 4" in message and "experts 2 to 3 of 4" in message


# ------------------------------------------------------------------------------------- gradients


def truth(ranks: int, pairs: int) -> tuple[Net, Tensor]:
    """One process with all experts: gradients, and their norm. Shares are counted in pairs."""
    plain = Net(Way())
    for step in range(pairs):
        part = torch.cat([batch(0, rank, ranks) for rank in (2 * step, 2 * step + 1)])
        (plain(part) / pairs).backward()
    return plain, nn.utils.get_total_norm([p.grad for p in plain.parameters()])


def gradients(rank: int, world_size: int, strategy: str, layout: str) -> list[float]:
    """No divisor is set by hand; torch's own clipping sees all experts on every rank."""
    pairs = world_size // 2
    mesh, (plain, norm) = grid(pairs, 2), truth(world_size, pairs)
    if strategy == "data_parallel":
        net: Any = spread_net(mesh, weights=layout)
        sw.data_parallel(net, mesh=mesh_of(world_size), meshes={"*.experts": mesh["dp"]})
    else:
        net = wrapped(mesh, sw.zero(int(strategy[-1])), weights=layout)
    net(batch(0, rank, world_size)).backward()
    first, named = net.moe.first_expert, dict(plain.named_parameters())
    compared = 0
    for name, parameter in net.named_parameters():
        got = parameter.grad.full_tensor()
        stem, number = name.rstrip("0123456789"), name[len(name.rstrip("0123456789")) :]
        want = named[stem].grad
        if ".experts." in name:
            mine = slice(first, first + EXPERTS // 2)
            want = want[first + int(number)] if number else want[mine]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6, msg=name)
        compared += 1
    assert compared >= 8
    found = [
        float(nn.utils.get_total_norm([p.grad for p in net.parameters()], foreach=foreach))
        for foreach in (True, False)
    ]
    found.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
    found.append(float(nn.utils.get_total_norm([p.grad for p in net.parameters()])))
    # An optimizer of nothing but experts: no parameter of it lies on all ranks.
    experts = [(name, p) for name, p in net.named_parameters() if "fc2.weight" in name]
    alone = nn.utils.get_total_norm([plain.moe.experts.fc2.weight.grad]) * 0.5 / norm
    found.append(float(sw.Muon(experts).clip_grad_norm(1e9) / alone))
    infinite, one = torch.zeros(()), torch.ones(())
    if first == 0:  # on the ranks with one half of the experts
        experts[0][1].grad.to_local().fill_(math.inf)
    grads = [parameter.grad for _, parameter in experts]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, infinite, one)  # as GradScaler does
    return [*found, float(infinite), float(norm)]


@pytest.mark.parametrize(
    ("ranks", "strategy", "layout"),
    [(4, "zero3", "grouped"), (4, "data_parallel", "indexed"), (2, "zero1", "indexed")],
)
def test_expert_gradients_and_their_norm_are_those_of_one_process(
    ranks: int, strategy: str, layout: str
) -> None:
    results = run_ranks(gradients, ranks, strategy, layout)
    for foreach, one_by_one, clipped, after, alone, infinite, norm in results:
        assert foreach == one_by_one == clipped == pytest.approx(norm, rel=1e-5)
        assert after == pytest.approx(0.5, rel=1e-4)
        assert alone == pytest.approx(1.0, rel=1e-4)
        assert infinite == 1.0, "every rank leaves the step out"
    assert all(result == results[0] for result in results), "the same on every rank, bit for bit"


@on_ranks(2)
def test_a_divisor_that_is_given_wins(rank: int, world_size: int) -> None:
    net = wrapped(grid(1, 2))
    net.moe.experts.set_gradient_divide_factor(8.0)  # type: ignore[operator]
    net(batch(0, rank, world_size)).backward()
    plain, _ = truth(world_size, 1)
    got = net.moe.experts.fc1.weight.grad.full_tensor()  # type: ignore[union-attr]
    first = net.moe.first_expert
    want = plain.moe.experts.fc1.weight.grad[first : first + 2] / 4  # type: ignore[index]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)


# ------------------------------------------------------------------------------------- checkpoints


def plain_checkpoint(rank: int, world_size: int, folder: str, how: str) -> str:
    mesh = grid(1, 2)
    net: Any = wrapped(mesh)
    state: Any = {"model": net.state_dict()}
    if how == "states":
        optimizer = torch.optim.AdamW(net.parameters())
        net(batch(0, rank, world_size)).backward()
        optimizer.step()
        states = dict(enumerate(optimizer.state.values()))
        state = {f"{n}.{k}": v for n, one in states.items() for k, v in one.items()}
    with pytest.raises(dcp.api.CheckpointException, match=r"sw\.save") as caught:
        dcp.save(state, checkpoint_id=folder)
    if how == "wrapped":  # what was saved whole, elsewhere, is not read into a part either
        whole = f"{folder}/whole"
        dcp.save({"w": torch.ones(EXPERTS // 2, 2 * WIDTH, HIDDEN)}, checkpoint_id=whole)
        with pytest.raises(dcp.api.CheckpointException, match=r"sw\.load"):
            dcp.load({"w": net.moe.experts.fc1.weight}, checkpoint_id=whole)
        assert float(net.moe.experts.fc1.weight.full_tensor().std()) > 0.1, "not written"
    return str(caught.value)


@pytest.mark.parametrize("how", ["wrapped", "states"])
def test_a_plain_distributed_checkpoint_of_spread_experts_is_refused(how: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for message in run_ranks(plain_checkpoint, 2, folder, how):
            assert "other ranks hold other experts" in message


def unwrapped_checkpoint(rank: int, world_size: int, folder: str, layout: str, torchs: bool) -> Any:
    """Experts that nobody wrapped, or torch's own FSDP2: plain tensors, or its DTensors."""
    mesh = grid(1, 2)
    net = spread_net(mesh, weights=layout)
    if torchs:
        torch_fully_shard(net.moe.experts, mesh=mesh["dp"])
    before = {name: whole(value) for name, value in net.named_parameters()}
    experts = {name: value for name, value in net.state_dict().items() if ".fc2." in name}
    states = {"state_dict": net.state_dict(), "copied": copy.deepcopy(net.state_dict())}
    states["options"] = get_model_state_dict(net, options=StateDictOptions(cpu_offload=True))
    room = {name: torch.empty_like(value) for name, value in experts.items()}
    if not torchs:
        states["narrow"] = {name: value.bfloat16() for name, value in experts.items()}
    for how, state in states.items():
        for save in (dcp.save, lambda *a, **k: dcp.async_save(*a, **k).result()):
            with pytest.raises(dcp.api.CheckpointException, match=r"sw\.save"):
                save({"model": state}, checkpoint_id=f"{folder}/{how}")
    dcp.save({name: torch.zeros(v.shape) for name, v in experts.items()}, checkpoint_id=folder)
    for target in (experts, *([] if torchs else [room])):
        with pytest.raises(dcp.api.CheckpointException, match=r"sw\.load"):
            dcp.load(target, checkpoint_id=folder)
    # All else takes them for the tensors that they are.
    kept = io.BytesIO()
    torch.save(net.moe.experts.fc2.state_dict(), kept)
    kept.seek(0)
    loaded = torch.load(kept, weights_only=not torchs)
    assert {type(value) for value in loaded.values()} <= {Tensor, DTensor}
    net.load_state_dict(net.state_dict(), assign=True)
    for name, value in net.named_parameters():
        assert type(value) in (nn.Parameter, DTensor), name
        torch.testing.assert_close(whole(value), before[name], rtol=0, atol=0)


@pytest.mark.parametrize(("layout", "torchs"), [("grouped", False), ("indexed", True)])
def test_a_plain_distributed_checkpoint_of_unwrapped_experts_is_refused(
    layout: str, torchs: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(unwrapped_checkpoint, 2, folder, layout, torchs)


# ------------------------------------------------------------------------------------- router


def biases(rank: int, world_size: int, wrapper: str) -> Tensor:
    """``spread(ep)`` on dp x ep, without ``tokens``: the bias follows the tokens of all ranks."""
    torch.manual_seed(0)
    routing = Routing(num_experts=4, experts_per_token=2, bias_rate=0.1)
    layer = MixtureOfExperts(routing, 8, 16, activation=swiglu())
    mesh = grid(2, 2)
    layer.spread(comm.as_axis(mesh.get_group("ep"), "ep"))
    if wrapper == "torch":
        torch_fully_shard(layer.experts, mesh=mesh["dp"])
        torch_fully_shard(layer, mesh=mesh_of(world_size))
    else:
        sw.fully_shard(layer.experts, mesh=mesh["dp"])
        if wrapper == "hsdp":
            whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_outer", "dp"))
            sw.fully_shard(layer, mesh=whole, placements=sw.hsdp())
        else:
            sw.fully_shard(layer, mesh=mesh_of(world_size))
    x = torch.randn(7, 8, generator=torch.Generator().manual_seed(rank))
    x += 3 if rank < 2 else -3  # other experts are busy in the other replica
    layer(x)[0].sum().backward()
    counted = layer.router.load.clone()
    dist.all_reduce(counted)
    layer.router.update_bias()
    assert torch.equal(layer.router.expert_bias, 0.1 * (counted.mean() - counted).sign())
    return layer.router.expert_bias


@pytest.mark.parametrize("wrapper", ["zero3", "hsdp", "torch"])
def test_router_biases_are_the_same_on_all_replicas(wrapper: str) -> None:
    first, *others = run_ranks(biases, 4, wrapper)
    assert first.abs().max() > 0 and all(torch.equal(first, other) for other in others)


# ------------------------------------------------------------------------------------- delayed


class Delayed(nn.Module):
    """Experts without an exchange that would cover their weight gradients."""

    def __init__(self, delay: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(HIDDEN, HIDDEN)
        self.experts = GroupedMLP(2, HIDDEN, WIDTH, activation=swiglu())
        self.experts.delay_weight_gradient = delay

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32)
        return self.experts(self.before(x), ends, torch.ones(len(x))).square().mean()


def rows(rank: int) -> Tensor:
    return torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(rank))


def delayed_net(wrapper: str, world_size: int) -> Any:
    net: Any = Delayed()
    mesh = mesh_of(world_size)
    if wrapper == "data_parallel":
        sw.data_parallel(net, mesh=mesh)
    elif wrapper != "plain":
        shard: Any = torch_fully_shard if wrapper == "torch" else sw.fully_shard
        shard(net.experts, mesh=mesh)
        shard(net, mesh=mesh)
    return net


@pytest.mark.parametrize(("wrapper", "kind"), [("zero3", "sw"), ("data_parallel", "torch")])
@on_ranks(2)
def test_a_step_and_a_clip_without_backward_dw_are_refused_at_once(
    rank: int, world_size: int, wrapper: str, kind: str
) -> None:
    net = delayed_net(wrapper, world_size)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    if kind == "sw":
        optimizer = sw.optimizer(net, matrix=sw.muon(), elementwise=sw.adamw(lr=0.1))
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    before = [whole(parameter) for parameter in net.parameters()]
    net(rows(rank)).backward()
    other.step()  # trains nothing of this model
    uses = [optimizer.step, *([lambda: optimizer.clip_grad_norm(0.1)] if kind == "sw" else [])]
    for use in uses:
        message = raised(use, RuntimeError)
        assert "fc1.weight" in message and "backward_dw()" in message
    net.experts.backward_dw()
    optimizer.step()
    assert not any(map(torch.equal, before, map(whole, net.parameters())))


def test_delayed_gradients_that_nothing_would_reduce_are_refused_in_the_first_forward() -> None:
    """Of parameters that torch's own units (or nobody) wrapped: one step late without an error."""
    for wrapper in ("torch", "plain"):
        for message in run_ranks(first_forward, 2, wrapper):
            assert "delay_weight_gradient" in message and "no main_grad" in message


def first_forward(rank: int, world_size: int, wrapper: str) -> str:
    net = delayed_net(wrapper, world_size)
    if wrapper == "torch":
        net.experts.set_reshard_after_backward(False)
    return raised(lambda: net(rows(rank)), RuntimeError)


class Penalised(Delayed):
    """Reads a weight of its experts beside the kernels that bring its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.experts.fc1.weight.square().mean()


@pytest.mark.parametrize("wrapper", ["zero3", "data_parallel"])
@pytest.mark.parametrize("delay", [False, True])
@on_ranks(2)
def test_a_penalty_adds_to_the_gradients_that_kernels_bring(
    rank: int, world_size: int, delay: bool, wrapper: str
) -> None:
    net: Any = Penalised(delay)
    shard: Any = sw.data_parallel if wrapper == "data_parallel" else sw.fully_shard
    shard(net, mesh=mesh_of(world_size))
    plain = Penalised(False)
    for step in range(2):
        net(rows(rank + 2 * step)).backward()
        net.experts.backward_dw()
        for each in range(world_size):
            (plain(rows(each + 2 * step)) / world_size).backward()
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@pytest.mark.parametrize(
    ("delay", "wrapper"),
    [(False, "plain"), (False, "zero3"), (True, "zero3"), (True, "data_parallel")],
)
@on_ranks(2)
def test_gradients_of_inputs_leave_the_experts_gradients_alone(
    rank: int, world_size: int, delay: bool, wrapper: str
) -> None:
    net, plain = delayed_net(wrapper, world_size), Delayed(False)
    net.experts.delay_weight_gradient = delay
    for step in range(2):
        x = rows(rank + 2 * step).requires_grad_()
        loss = net(x)
        ours = torch.autograd.grad(loss, x, retain_graph=True)[0]
        assert torch.equal(ours, torch.autograd.grad(plain(x), x)[0])
        net.experts.backward_dw()
        assert step or all(parameter.grad is None for parameter in net.parameters())
        loss.backward()
        net.experts.backward_dw()
        for each in [rank] if wrapper == "plain" else range(world_size):
            (plain(rows(each + 2 * step)) / (1 if wrapper == "plain" else world_size)).backward()
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            got = one.grad if wrapper == "plain" else one.grad.full_tensor()
            torch.testing.assert_close(got, other.grad)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ZeroDivisionError


@on_ranks(2)
def test_an_iteration_that_was_given_up_owes_nothing(rank: int, world_size: int) -> None:
    for how in ("reset", "raised"):
        net, plain = delayed_net("zero3", world_size), Delayed(False)
        if how == "raised":
            hook = net.before.register_forward_hook(lambda _, __, x: Raises.apply(x))
            with pytest.raises(ZeroDivisionError):
                net(rows(rank) * 3).backward()
            hook.remove()
        else:
            net(rows(rank) * 3).backward()  # an iteration that is given up
        net.reset_iter_state()
        net(rows(rank)).backward()
        net.experts.backward_dw()
        for each in range(world_size):
            (plain(rows(each)) / world_size).backward()
        for (name, one), other in zip(net.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad, msg=f"{how} {name}")


@pytest.mark.parametrize("delay", [True, False])
def test_weights_that_change_before_their_backward_are_noticed(delay: bool) -> None:
    for change in ("fc1", "fc2"):
        net = Delayed(delay)
        loss = net(rows(0))
        with torch.no_grad():
            getattr(net.experts, change).weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"weights of experts.* changed in place"):
            loss.backward()
