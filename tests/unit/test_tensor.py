# SPDX-License-Identifier: Apache-2.0
"""ShardedTensor against plain tensors: shards must compute what an unsharded run computes."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise import comm
from shardwise.layout import ELEMENT, ROW, TENSOR, Grain, Item, Layout, plan
from shardwise.tensor import Cut, ShardedTensor, Version
from tests.ranks import run_ranks

SHAPES = {
    "wide": (7, 13),
    "cube": (3, 5, 2),
    "vector": (37,),
    "tall": (150, 3),
    "one_row": (1, 6),
    "scalar": (),
}
# (world size, mesh shape, sharded axes, shards per holder)
MESHES = [
    (1, (1,), (True,), 1),
    (2, (2,), (True,), 1),
    (3, (3,), (True,), 1),
    (4, (4,), (True,), 1),
    (2, (2,), (True,), 3),
    (4, (2, 2), (False, True), 1),
    (4, (2, 2), (True, True), 1),
    (4, (2, 2), (True, True), 2),
    (2, (2,), (False,), 1),
]
CASES = [(*mesh, grain) for mesh in MESHES for grain in (ROW, ELEMENT)]
CASES += [(3, (3,), (True,), 1, TENSOR), (4, (2, 2), (True, True), 1, TENSOR)]
SOME_CASES = [
    (1, (1,), (True,), 1, ROW),
    (3, (3,), (True,), 1, ROW),
    (3, (3,), (True,), 1, ELEMENT),
    (4, (2, 2), (False, True), 1, ROW),
    (4, (2, 2), (True, True), 2, ELEMENT),
]
NAN = float("nan")


# ---------------------------------------------------------------------- what tests are made of


@lru_cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


class World:
    """All SHAPES in one flat buffer, as this rank holds it. Padding is NaN: reading it shows."""

    def __init__(
        self, mesh_shape: Sequence[int], sharded: Sequence[bool], finer: int, grain: Grain
    ) -> None:
        self.mesh = _mesh(tuple(mesh_shape))
        self.sharded = tuple(sharded)
        holders = math.prod(size for size, cut in zip(mesh_shape, sharded, strict=True) if cut)
        items = [Item(name, shape, grain) for name, shape in SHAPES.items()]
        self.layout: Layout = plan(tuple(items), holders * finer)
        self.cuts = [
            Cut(self.layout, index, self.mesh, self.sharded) for index in range(len(items))
        ]

    def tensors(
        self, fulls: dict[str, Tensor], *, requires_grad: bool = False, fresh_cuts: bool = False
    ) -> dict[str, ShardedTensor]:
        """One buffer filled with pieces of full tensors, and ShardedTensors over it."""
        first = self.cuts[0]
        run = self.layout.num_shards // first.num_holders
        begin = first.shard_index * run * self.layout.shard_size
        dtype = next(iter(fulls.values())).dtype
        flat = torch.full((run * self.layout.shard_size,), NAN, dtype=dtype)
        result = {}
        for index, (name, full) in enumerate(fulls.items()):
            cut = self.cuts[index]
            if fresh_cuts:
                cut = Cut(self.layout, index, self.mesh, self.sharded)
            lo, hi = cut.piece
            start = self.layout.starts[index] + lo - begin if hi > lo else 0
            local = flat[start : start + hi - lo].view(cut.local_shape)
            local.copy_(full.reshape(-1)[lo:hi].view(cut.local_shape))
            result[name] = ShardedTensor(local, cut, requires_grad=requires_grad, version=Version())
        return result


def _fulls(seed: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }


def _check(actual: ShardedTensor, expected: Tensor) -> None:
    """The gathered value is bitwise the expected one, and so is the local piece."""
    assert type(actual) is ShardedTensor
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    full = actual.full_tensor()
    assert type(full) is Tensor
    torch.testing.assert_close(full, expected, rtol=0, atol=0, equal_nan=True)
    piece = actual.cut.take(expected)
    torch.testing.assert_close(actual.to_local(), piece, rtol=0, atol=0, equal_nan=True)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _parameters(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: nn.Parameter(one) for name, one in tensors.items()}


def _run(fn: Callable[..., Any], case: tuple[Any, ...], *args: Any) -> list[Any]:
    world_size, *rest = case
    return run_ranks(fn, world_size, *rest, *args)


# ---------------------------------------------------------------------- pieces and gathering


def check_full_tensor(rank: int, world_size: int, *case: Any) -> list[tuple[int, int]]:
    world = World(*case)
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn):
        fulls = {name: full.to(dtype) for name, full in _fulls().items()}
        if dtype != torch.float32:  # NaN padding exists for floats only
            for cut, full in zip(world.cuts, fulls.values(), strict=True):
                tensor = ShardedTensor(cut.take(full).clone(), cut)
                assert torch.equal(_bytes(tensor.full_tensor()), _bytes(full))
            continue
        for name, tensor in world.tensors(fulls).items():
            _check(tensor, fulls[name])
            assert isinstance(tensor, DTensor)
            replicated = tensor.redistribute(placements=[Replicate()] * world.mesh.ndim)
            assert type(replicated) is DTensor or not any(world.sharded)
            assert torch.equal(replicated.to_local(), fulls[name])
            assert tensor.redistribute(placements=tensor.placements) is tensor
    # -0.0 and NaN payloads survive both ways of gathering
    odd = torch.full(SHAPES["tall"], -0.0)
    tensor = ShardedTensor(world.cuts[3].take(odd).clone(), world.cuts[3])
    assert torch.equal(_bytes(tensor.full_tensor()), _bytes(odd))
    return [cut.piece for cut in world.cuts]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_full_tensor_is_right_for_every_parameter(case: tuple[Any, ...]) -> None:
    pieces = _run(check_full_tensor, case)
    if case[0] > 1 and any(case[2]):
        # no empty comparison: the cases must contain what makes this hard
        rows = {hi - lo for piece in pieces for lo, hi in piece}
        assert 0 in rows and len(rows) > 2


def check_order_of_axes(rank: int, world_size: int) -> tuple[int, ...]:
    world = World((2, 2), (True, True), 1, ROW)
    assert world.cuts[0].coordinate == (rank // 2, rank % 2)
    return (world.cuts[0].shard_index, *world.cuts[3].piece)


def test_inner_axis_is_the_major_one() -> None:
    results = run_ranks(check_order_of_axes, 4)
    assert [result[0] for result in results] == [0, 2, 1, 3]
    pieces = sorted(result[1:] for result in results)
    assert pieces[0][0] == 0 and sum(hi - lo for lo, hi in pieces) == 450


def check_tensor_grain_gathers_by_sum(rank: int, world_size: int) -> list[str]:
    world = World((3,), (True,), 1, TENSOR)
    tensor = world.tensors(_fulls())["tall"]
    with comm.record() as calls:
        _check(tensor, _fulls()["tall"])
    return [call.operation for call in calls]


def test_a_tensor_with_one_owner_is_not_gathered_padded() -> None:
    # three ranks would receive three tensors' worth of padding
    assert run_ranks(check_tensor_grain_gathers_by_sum, 3) == [["all_reduce"]] * 3


def check_construction(rank: int, world_size: int) -> None:
    world = World((2,), (True,), 1, ROW)
    cut = world.cuts[0]
    with pytest.raises(ValueError, match=r"'wide'.*pass shape"):
        ShardedTensor(torch.zeros(99), cut)
    with pytest.raises(ValueError, match="one entry per axis"):
        Cut(world.layout, 0, world.mesh, (True, True))
    with pytest.raises(ValueError, match="inner ones"):
        Cut(world.layout, 0, _mesh((2, 1)), (True, False))
    with pytest.raises(ValueError, match="multiple of 2"):
        Cut(plan((Item("a", (4, 4)),), 3), 0, world.mesh, (True,))


def test_construction_is_checked() -> None:
    run_ranks(check_construction, 2)


# ---------------------------------------------------------------------- optimizers


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True, amsgrad=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw_loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw_default": lambda p: torch.optim.AdamW(p, lr=0.1),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd_loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "adagrad_fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "adagrad_foreach": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
    "rmsprop_foreach": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, foreach=True),
    "lion_like_adamax": lambda p: torch.optim.Adamax(p, lr=0.1, foreach=True),
}


def check_optimizers(rank: int, world_size: int, *case: Any) -> None:
    world = World(*case)
    for name, make in OPTIMIZERS.items():
        plain = _parameters(_fulls())
        ours = _parameters(world.tensors(_fulls()))
        plain_optimizer = make(list(plain.values()))
        optimizer = make(list(ours.values()))
        before = [one.version.count for one in ours.values()]
        for step in range(3):
            grads = _fulls(seed=10 + step)
            sharded = world.tensors(grads, fresh_cuts=step == 1)
            for key, parameter in ours.items():
                plain[key].grad = grads[key]
                parameter.grad = sharded[key]
            plain_optimizer.step()
            optimizer.step()
        for key, parameter in ours.items():
            assert isinstance(parameter, nn.Parameter)
            # Element by element the same kernel runs, but a vector's tail may be rounded otherwise
            # than its middle (fused multiply-add): bitwise where the local has whole vectors.
            torch.testing.assert_close(
                parameter.full_tensor(), plain[key].data, rtol=2e-6, atol=2e-7, msg=f"{name} {key}"
            )
            for state, value in optimizer.state[parameter].items():
                if state != "step":
                    assert type(value) is ShardedTensor and value.version is None
                    assert value.cut is parameter.cut
        counts = [one.version.count for one in ours.values()]
        assert all(now > then for now, then in zip(counts, before, strict=True)), name


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_optimizers_equal_unsharded(case: tuple[Any, ...]) -> None:
    _run(check_optimizers, case)


def check_bitwise(rank: int, world_size: int) -> None:
    """Rows of 16 floats: every local is whole SIMD vectors, so nothing may differ."""
    mesh = _mesh((world_size,))
    layout = plan((Item("a", (9, 16)), Item("b", (5, 32)), Item("c", (2, 16))), world_size)
    for name, make in OPTIMIZERS.items():
        generator = torch.Generator().manual_seed(3)
        fulls = [torch.randn(item.shape, generator=generator) for item in layout.items]
        cuts = [Cut(layout, index, mesh, (True,)) for index in range(3)]
        plain = [nn.Parameter(full.clone()) for full in fulls]
        ours = [
            nn.Parameter(ShardedTensor(cut.take(full).clone(), cut))
            for cut, full in zip(cuts, fulls, strict=True)
        ]
        optimizers = make(plain), make(ours)
        for _ in range(3):
            for cut, one, other in zip(cuts, plain, ours, strict=True):
                one.grad = torch.randn(one.shape, generator=generator)
                other.grad = ShardedTensor(cut.take(one.grad).clone(), cut)
            for optimizer in optimizers:
                optimizer.step()
        for one, other in zip(plain, ours, strict=True):
            assert torch.equal(other.full_tensor(), one.data), name


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_optimizers_are_bitwise_equal(world_size: int) -> None:
    run_ranks(check_bitwise, world_size)


# ---------------------------------------------------------------------- reductions


def check_reductions(rank: int, world_size: int, *case: Any) -> None:
    world = World(*case)
    fulls = _fulls()
    close = {"rtol": 1e-5, "atol": 1e-6}
    for name, tensor in world.tensors(fulls).items():
        full = fulls[name]
        for order in (2, 1, 0, 3, -1, math.inf, -math.inf):
            ours = torch.linalg.vector_norm(tensor, order)
            assert type(ours) is Tensor
            torch.testing.assert_close(ours, torch.linalg.vector_norm(full, order), **close)
        for op in ("sum", "mean", "max", "min", "amax", "amin", "any", "all", "norm"):
            ours, theirs = getattr(tensor, op)(), getattr(full, op)()
            assert type(ours) is Tensor and ours.dtype == theirs.dtype, op
            torch.testing.assert_close(ours, theirs, **close)
        torch.testing.assert_close(torch.norm(tensor), torch.norm(full), **close)
        assert torch.count_nonzero(tensor > 0) == torch.count_nonzero(full > 0)
        assert (tensor > 0).sum() == (full > 0).sum()
        assert not (tensor > 100).any() and (tensor < 100).all()
        assert torch.equal(tensor, tensor.clone()) and torch.equal(tensor, full)
        assert not torch.equal(tensor, tensor + 1)
        if full.ndim == 1:
            torch.testing.assert_close(tensor.dot(tensor), full.dot(full), **close)
            torch.testing.assert_close(tensor.sum(dim=0), full.sum(dim=0), **close)
        if full.ndim == 2:
            torch.testing.assert_close(tensor.sum(dim=(0, 1)), full.sum(), **close)
            with pytest.raises(NotImplementedError, match=f"'{name}'.*only the whole"):
                tensor.sum(dim=0)
            with pytest.raises(NotImplementedError, match=f"'{name}'"):
                tensor.max(dim=0)
        if full.ndim == 0:
            assert tensor.item() == full.item()
        # NaN somewhere is NaN everywhere, also for a maximum
        poisoned = full.clone().view(-1)
        poisoned[-1] = NAN
        sharded = ShardedTensor(tensor.cut.take(poisoned.view(full.shape)).clone(), tensor.cut)
        for value in (
            sharded.max(),
            sharded.min(),
            sharded.sum(),
            torch.linalg.vector_norm(sharded, math.inf),
            torch.linalg.vector_norm(sharded),
        ):
            assert value.isnan()
    # large half-precision values: partial norms must not overflow when squared
    large = {name: full * 0 + 100.0 for name, full in _fulls(dtype=torch.float16).items()}
    for name, tensor in world.tensors(large).items():
        expected = torch.linalg.vector_norm(large[name], dtype=torch.float32)
        torch.testing.assert_close(
            torch.linalg.vector_norm(tensor).float(), expected, rtol=1e-3, atol=0
        )


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_reductions_are_global(case: tuple[Any, ...]) -> None:
    _run(check_reductions, case)


def check_clipping(rank: int, world_size: int, *case: Any) -> list[list[str]]:
    world = World(*case)
    extra = torch.randn(4, 4, generator=torch.Generator().manual_seed(5))
    collectives = []
    for foreach in (None, True, False):
        for order in (2.0, math.inf, 1.0):
            plain = [*_parameters(_fulls()).values(), nn.Parameter(extra.clone())]
            ours = [*_parameters(world.tensors(_fulls())).values(), nn.Parameter(extra.clone())]
            grads = {name: grad * 10 for name, grad in _fulls(seed=2).items()}
            for one, grad in zip(plain, [*grads.values(), extra], strict=True):
                one.grad = grad.clone()
            for one, grad in zip(ours, [*world.tensors(grads).values(), extra], strict=True):
                one.grad = grad.clone()
            expected = nn.utils.clip_grad_norm_(plain, 1.0, order, foreach=foreach)
            with comm.record() as calls:
                norm = nn.utils.clip_grad_norm_(ours, 1.0, order, foreach=foreach)
            if foreach is not False:
                collectives.append([call.operation for call in calls])
            assert type(norm) is Tensor
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
            for one, other in zip(ours, plain, strict=True):
                grad = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
                torch.testing.assert_close(grad, other.grad, rtol=1e-6, atol=1e-9)
            total = nn.utils.get_total_norm([one.grad for one in ours], foreach=foreach)
            torch.testing.assert_close(
                total, nn.utils.get_total_norm([one.grad for one in plain]), rtol=1e-5, atol=0
            )
    return collectives


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_clip_grad_norm_equals_unsharded(case: tuple[Any, ...]) -> None:
    _, mesh_shape, sharded, *_ = case
    axes = sum(cut and size > 1 for cut, size in zip(sharded, mesh_shape, strict=True))
    for collectives in _run(check_clipping, case):
        assert len(collectives) == 6
        # one per sharded axis for the whole list; none over the replicated axis
        assert all(len(calls) == axes for calls in collectives)
        assert collectives[0] == ["all_reduce"] * axes


def check_grad_scaler(rank: int, world_size: int, *case: Any) -> None:
    world = World(*case)
    for fused in (False, True):
        for bad in (False, True):
            ours = _parameters(world.tensors(_fulls()))
            plain = _parameters(_fulls())
            grads = _fulls(seed=4)
            if bad:
                grads["wide"][-1, -1] = math.inf  # on one rank only
            sharded = world.tensors({name: grad * 1024 for name, grad in grads.items()})
            runs = []
            for parameters, theirs in ((ours, sharded), (plain, grads)):
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
                optimizer = torch.optim.AdamW(list(parameters.values()), lr=0.1, fused=fused)
                scaler.scale(torch.zeros(()))  # makes the scale tensor
                for name, parameter in parameters.items():
                    grad = theirs[name]
                    parameter.grad = grad if parameters is ours else grad * 1024
                scaler.step(optimizer)
                scaler.update()
                runs.append(scaler.get_scale())
            assert runs[0] == runs[1] == (512.0 if bad else 1024.0)
            for name, parameter in ours.items():
                full = parameter.full_tensor()
                torch.testing.assert_close(full, plain[name].data, rtol=2e-6, atol=2e-7)
                assert torch.equal(full, _fulls()[name]) == bad


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_grad_scaler_skips_on_every_rank_or_none(case: tuple[Any, ...]) -> None:
    _run(check_grad_scaler, case)


# ---------------------------------------------------------------------- ops, copies, refusals


def check_pointwise(rank: int, world_size: int, *case: Any) -> None:
    world = World(*case)
    fulls, others = _fulls(1), _fulls(2)
    ours, theirs = world.tensors(fulls), world.tensors(others, fresh_cuts=True)
    for name in SHAPES:
        a, b, x, y = ours[name], theirs[name], fulls[name], others[name]
        _check(a + b, x + y)
        _check(a * 2 - 1, x * 2 - 1)
        _check(2 - a, 2 - x)
        _check(a + torch.tensor(3.0), x + 3.0)
        _check(a * y, x * y)  # a plain tensor of the global shape
        _check(y * a, y * x)
        _check(torch.where(a > 0, a, b), torch.where(x > 0, x, y))
        _check(torch.lerp(a, b, 0.3), torch.lerp(x, y, 0.3))
        _check(torch.addcmul(a, a, b, value=2), torch.addcmul(x, x, y, value=2))
        _check(torch.isfinite(a), torch.isfinite(x))
        _check(a.to(torch.bfloat16), x.to(torch.bfloat16))
        _check(a.double(), x.double())
        _check(a.masked_fill(a > 0, 0.0), x.masked_fill(x > 0, 0.0))
        _check(a.clamp(min=0).sqrt(), x.clamp(min=0).sqrt())
        _check(torch.zeros_like(a), torch.zeros_like(x))
        _check(torch.full_like(a, 7), torch.full_like(x, 7))
        _check(a.new_zeros(a.shape), torch.zeros_like(x))
        _check(a.view_as(a), x)
        _check(a.reshape(a.shape), x)
        _check(a.contiguous(), x)
        _check(a.cpu(), x)
        assert a.is_floating_point() and a.numel() == x.numel() and a.stride() == x.stride()
        with pytest.raises(NotImplementedError, match="plain tensor"):
            y.clone().add_(a)
        target = torch.empty_like(a)
        assert torch.add(a, b, out=target) is target
        _check(target, x + y)
    lists = list(ours.values()), list(theirs.values())
    plains = list(fulls.values()), list(others.values())
    sums = torch._foreach_add(*lists)
    for one, other in zip(sums, torch._foreach_add(*plains), strict=True):
        _check(one, other)
    mixed = torch._foreach_mul([*lists[0], torch.ones(3)], 2.0)
    assert type(mixed[-1]) is Tensor and torch.equal(mixed[-1], torch.full((3,), 2.0))
    torch._foreach_copy_(lists[0], list(others.values()))
    for name in SHAPES:
        _check(ours[name], others[name])


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_pointwise_ops_keep_the_cut(case: tuple[Any, ...]) -> None:
    _run(check_pointwise, case)


def check_copies(rank: int, world_size: int, *case: Any) -> None:
    world = World(*case)
    elsewhere = World(*case[:3], TENSOR if case[3] != TENSOR else ROW)
    fulls, others = _fulls(1), _fulls(2)
    ours = world.tensors(fulls)
    moved = elsewhere.tensors(others)
    for name, tensor in ours.items():
        tensor.copy_(others[name])
        _check(tensor, others[name])
        tensor.copy_(torch.zeros(()))
        _check(tensor, torch.zeros_like(fulls[name]))
        tensor.copy_(moved[name])  # another cut: through its full_tensor()
        _check(tensor, others[name])
        tensor.copy_(fulls[name].double())
        _check(tensor, fulls[name])
        if fulls[name].ndim and world.mesh.ndim == 1:
            chunked = distribute_tensor(others[name], world.mesh, [Shard(0)])
            tensor.copy_(chunked)
            _check(tensor, others[name])
            with pytest.raises(NotImplementedError, match="DTensor with other placements"):
                tensor + chunked
        with pytest.raises(NotImplementedError, match=r"copy its full_tensor\(\)"):
            torch.empty(tensor.shape).copy_(tensor)
        with pytest.raises(NotImplementedError, match="shape"):
            tensor.copy_(torch.zeros(2, 99))
        if not tensor.cut.matches(moved[name].cut):
            with pytest.raises(NotImplementedError, match=f"'{name}'.*lie otherwise"):
                tensor + moved[name]


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_copy_takes_anything_of_the_global_shape(case: tuple[Any, ...]) -> None:
    _run(check_copies, case)


def check_refusals(rank: int, world_size: int) -> None:
    world = World((2,), (True,), 1, ROW)
    tensor = world.tensors(_fulls())["wide"]
    plain = torch.randn(13, 4)
    for what in (
        lambda: tensor @ plain,
        lambda: tensor.t(),
        lambda: tensor[0],
        lambda: tensor[:, 1:],
        lambda: tensor.view(-1),
        lambda: tensor.view(torch.int32),
        lambda: tensor.cumsum(0),
        lambda: tensor.softmax(-1),
        lambda: tensor.sort(),
        lambda: tensor.argmax(),
        lambda: tensor.std(),
        lambda: torch.cat([tensor, tensor]),
        lambda: torch.stack([tensor, tensor]),
        lambda: nn.functional.linear(torch.randn(2, 13), tensor),
        lambda: nn.functional.dropout(tensor, 0.5),
        lambda: nn.init.orthogonal_(tensor),
        lambda: tensor + torch.randn(13),
        lambda: tensor.new_zeros(3),
        lambda: tensor.resize_(3, 3),
        lambda: tensor.tolist(),
        lambda: tensor.item(),
        lambda: torch._foreach_max([tensor]),
        lambda: tensor.clone(memory_format=torch.channels_last),
        lambda: tensor.bernoulli_(torch.rand(7, 13)),
    ):
        with pytest.raises(NotImplementedError, match="'wide'"):
            what()
    with pytest.raises(
        NotImplementedError, match=r"aten.mm.default on 'wide'.*shard of \[7, 13\].*full_tensor"
    ):
        tensor @ plain
    with pytest.raises(NotImplementedError, match=r"copy_\(\)"):
        tensor.data = torch.zeros(7, 13)
    with pytest.raises(NotImplementedError, match="one rank's piece"):
        torch.save(tensor, io.BytesIO())
    with pytest.raises(NotImplementedError, match="grad_placements"):
        tensor.full_tensor(grad_placements=[Replicate()])
    with pytest.raises(NotImplementedError, match="redistribute"):
        tensor.redistribute(placements=[Shard(1)])
    # a plain DTensor that was given our placement can't be moved wrongly
    impostor = DTensor.from_local(
        tensor.to_local(), world.mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )
    with pytest.raises(NotImplementedError, match="unevenly"):
        impostor.full_tensor()
    assert "'wide'" in repr(tensor) and len(repr(tensor)) < 200


def test_what_would_be_wrong_is_refused_by_name() -> None:
    run_ranks(check_refusals, 2)


def check_init(rank: int, world_size: int, *case: Any) -> None:
    world = World(*case)
    fills: list[Callable[[Any], Any]] = [
        lambda t: t.uniform_(-1, 1),
        lambda t: t.normal_(0, 0.02),
        lambda t: t.bernoulli_(0.3),
        lambda t: t.random_(0, 10),
        lambda t: t.exponential_(2.0),
        lambda t: nn.init.trunc_normal_(t, std=0.02),
        lambda t: nn.init.constant_(t, 3.0),
        lambda t: nn.init.kaiming_uniform_(t, a=5**0.5) if t.ndim > 1 else nn.init.ones_(t),
        lambda t: nn.init.xavier_normal_(t) if t.ndim > 1 else nn.init.zeros_(t),
    ]
    ours = _parameters(world.tensors(_fulls()))
    plain = _parameters(_fulls())
    for fill in fills:
        for parameters in (plain, ours):
            torch.manual_seed(7)
            for parameter in parameters.values():
                with torch.no_grad():
                    fill(parameter)
        for name, parameter in ours.items():
            assert torch.equal(parameter.full_tensor(), plain[name].data), name
            assert parameter.version.count > 0
    torch.manual_seed(1)
    mine = torch.randn_like(ours["tall"])
    torch.manual_seed(1)
    assert torch.equal(mine.full_tensor(), torch.randn_like(plain["tall"]))


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_random_init_equals_unsharded(case: tuple[Any, ...]) -> None:
    _run(check_init, case)


def check_versions(rank: int, world_size: int) -> None:
    world = World((2,), (True,), 1, ROW)
    for tensor in world.tensors(_fulls()).values():
        parameter = nn.Parameter(tensor)
        version = tensor.version
        assert (
            parameter.version is version
            and parameter.to_local().data_ptr() == tensor.to_local().data_ptr()
        )
        writes: list[Callable[[], Any]] = [
            lambda p=parameter: p.data.mul_(2),
            lambda p=parameter: p.detach().zero_(),
            lambda p=parameter: p.data.copy_(torch.zeros(p.shape)),
            lambda p=parameter: torch._foreach_add_([p.data], 1.0),
            lambda p=parameter: p.data.uniform_(),
            lambda p=parameter: torch.add(p.data, 1, out=p.data),
        ]
        for write in writes:
            before = version.count
            write()
            assert version.count == before + 1
        before = version.count
        with torch.no_grad():
            parameter + 1
            parameter.clone().add_(1)
            torch.zeros_like(parameter).add_(1)
        parameter.full_tensor()
        assert version.count == before


def test_every_write_is_counted_once() -> None:
    run_ranks(check_versions, 2)


# ---------------------------------------------------------------------- modules


class Model(nn.Module):
    def __init__(self, tensors: dict[str, Any]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


def check_module(rank: int, world_size: int) -> None:
    world = World((2,), (True,), 1, ROW)
    fulls = _fulls()
    model = Model(world.tensors(fulls))
    # deepcopy: the same cut, other memory, its own version, and the grad comes along
    model.wide.grad = torch.ones_like(model.wide)
    twin = copy.deepcopy(model)
    for name, parameter in twin.named_parameters():
        assert type(parameter) is ShardedTensor and isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad and parameter.cut is getattr(model, name).cut
        _check(parameter.detach(), fulls[name])
        with torch.no_grad():
            parameter.zero_()
        _check(getattr(model, name).detach(), fulls[name])
    _check(twin.wide.grad, torch.ones(7, 13))
    # conversions swap parameters in place
    twin.to(torch.bfloat16)
    assert twin.wide.dtype == torch.bfloat16 and type(twin.wide) is ShardedTensor
    twin.float().load_state_dict(fulls)  # plain full tensors
    for name, parameter in twin.named_parameters():
        _check(parameter.detach(), fulls[name])
    # meta to real
    on_meta = model.to("meta")
    assert on_meta.wide.is_meta and on_meta.wide.to_local().is_meta
    on_meta.to_empty(device="cpu")
    assert type(on_meta.wide) is ShardedTensor and on_meta.wide.device.type == "cpu"
    on_meta.load_state_dict(twin.state_dict())
    for name, parameter in on_meta.named_parameters():
        _check(parameter.detach(), fulls[name])
    # swapping a plain parameter for a sharded one keeps the object that others hold
    plain = nn.Linear(13, 7, bias=False)
    held = plain.weight
    torch.utils.swap_tensors(held, nn.Parameter(world.tensors(fulls)["wide"]))
    assert plain.weight is held and type(held) is ShardedTensor
    _check(held.detach(), fulls["wide"])
    # autograd at rest: a penalty on a parameter
    held.grad = None
    (held * 2).sum().backward()
    assert torch.equal(torch.as_tensor(2.0).expand(7, 13), _full(held.grad))
    held.requires_grad_(False)
    assert not held.requires_grad


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_modules_copy_convert_and_swap() -> None:
    run_ranks(check_module, 2)


# ---------------------------------------------------------------------- checkpoints


def check_save(rank: int, world_size: int, *case: Any) -> None:
    *case_, folder = case
    tensors = World(*case_).tensors(_fulls())
    dcp.save({"model": tensors, "step": torch.tensor(3)}, checkpoint_id=folder)


def check_load(rank: int, world_size: int, *case: Any) -> None:
    *case_, folder = case
    fulls = _fulls()
    tensors = World(*case_).tensors({name: full * 0 for name, full in fulls.items()})
    versions = {name: tensor.version.count for name, tensor in tensors.items()}
    state = {"model": tensors, "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=folder)
    assert state["step"] == 3
    for name, tensor in tensors.items():
        _check(tensor, fulls[name])
        if tensor.to_local().numel():
            assert tensor.version.count > versions[name]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_checkpoint_round_trip_and_reshard(case: tuple[Any, ...], tmp_path: Path) -> None:
    _run(check_save, case, str(tmp_path))
    # what is on disk is each element once
    metadata = dcp.FileSystemReader(str(tmp_path)).read_metadata()
    for name, shape in SHAPES.items():
        chunks = metadata.state_dict_metadata[f"model.{name}"].chunks
        assert sum(math.prod(chunk.sizes) for chunk in chunks) == math.prod(shape)
    _run(check_load, case, str(tmp_path))
    other = CASES[(CASES.index(case) + 7) % len(CASES)]
    assert other[1:] != case[1:]
    _run(check_load, other, str(tmp_path))
    # and a plain reader sees plain tensors
    state = {"model": {name: torch.zeros(shape) for name, shape in SHAPES.items()}}
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    for name, full in _fulls().items():
        assert torch.equal(state["model"][name], full)


def check_plain_to_ours(rank: int, world_size: int, *case: Any) -> None:
    """A checkpoint of torch's own DTensors loads into ours, and the other way round."""
    world = World(*case[:-1])
    folder = case[-1]
    fulls = {name: full for name, full in _fulls().items() if full.ndim}
    chunked = {
        name: distribute_tensor(full, world.mesh, [Shard(0)]) for name, full in fulls.items()
    }
    dcp.save(dict(chunked), checkpoint_id=folder + "/torch")
    ours = world.tensors({name: full * 0 for name, full in _fulls().items()})
    del ours["scalar"]
    dcp.load(dict(ours), checkpoint_id=folder + "/torch")
    for name, tensor in ours.items():
        _check(tensor, fulls[name])
    dcp.save(dict(ours), checkpoint_id=folder + "/ours")
    for tensor in chunked.values():
        tensor.zero_()
    dcp.load(dict(chunked), checkpoint_id=folder + "/ours")
    for name, tensor in chunked.items():
        assert torch.equal(tensor.full_tensor(), fulls[name])
    # asynchronous saves stage a copy first
    future = dcp.async_save(dict(ours), checkpoint_id=folder + "/async")
    for tensor in ours.values():
        tensor.zero_()
    future.result()
    dcp.load(dict(ours), checkpoint_id=folder + "/async")


@pytest.mark.parametrize("grain", [ROW, ELEMENT], ids=str)
def test_checkpoints_exchange_with_torch(grain: Grain, tmp_path: Path) -> None:
    run_ranks(check_plain_to_ours, 3, (3,), (True,), 1, grain, str(tmp_path))


def check_state_dict_helpers(rank: int, world_size: int, *case: Any) -> None:
    world = World(*case)
    fulls = _fulls()
    model = Model(world.tensors(fulls))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    for name, grad in world.tensors(_fulls(2)).items():
        getattr(model, name).grad = grad
    optimizer.step()
    optimizer.zero_grad()
    expected = {name: p.full_tensor() for name, p in model.named_parameters()}
    gathered = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert sorted(gathered) == (sorted(SHAPES) if rank == 0 else [])
    for name, tensor in gathered.items():
        assert type(tensor) is Tensor and torch.equal(tensor, expected[name])
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    states = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    moments = {
        name: optimizer.state[p]["exp_avg"].full_tensor() for name, p in model.named_parameters()
    }
    for name in SHAPES:
        assert torch.equal(full[name], expected[name])
        assert torch.equal(states["state"][name]["exp_avg"], moments[name])

    for broadcast in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        fresh = Model(world.tensors({name: value * 0 for name, value in fulls.items()}))
        versions = {name: p.version.count for name, p in fresh.named_parameters()}
        others = torch.optim.AdamW(fresh.parameters(), lr=0.1, foreach=True)
        source = dict(full) if rank == 0 or not broadcast else {}
        if broadcast and any(not c.in_rows and len(c.shape) and any(c.sharded) for c in world.cuts):
            # a cut inside rows is no block of rows: torch's way of loading is refused on every rank
            with pytest.raises(NotImplementedError, match="cut inside its rows"):
                set_model_state_dict(fresh, source, options=options)
            continue
        set_model_state_dict(fresh, source, options=options)
        set_optimizer_state_dict(
            fresh, others, states if rank == 0 or not broadcast else {}, options=options
        )
        for name, parameter in fresh.named_parameters():
            assert type(parameter) is ShardedTensor
            _check(parameter.detach(), expected[name])
            assert parameter.version.count > versions[name]
            moment = others.state[parameter]["exp_avg"]
            assert torch.equal(_full(moment), moments[name]), (name, broadcast)
    # a sharded state dict, loaded back
    sharded = get_model_state_dict(model)
    fresh = Model(world.tensors({name: value * 0 for name, value in fulls.items()}))
    set_model_state_dict(fresh, sharded)
    for name, parameter in fresh.named_parameters():
        _check(parameter.detach(), expected[name])


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_state_dict_helpers(case: tuple[Any, ...]) -> None:
    # fresh: a refusal in the middle of torch's broadcasts may leave one of them in flight
    world_size, *rest = case
    run_ranks(check_state_dict_helpers, world_size, *rest, fresh=case[-1] == ELEMENT)
