# SPDX-License-Identifier: Apache-2.0
"""Ops on ShardedTensors compute what they compute on whole tensors, or are refused by name."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwise.core import tensor as tensor_module
from shardwise.core.layout import ROW, TENSOR, Item, plan
from shardwise.core.mesh import Ranks
from shardwise.core.tensor import Cut, ShardedTensor
from tests.ranks import on_ranks, run_ranks
from tests.worlds import (
    SHAPES,
    SOME_CASES,
    World,
    check,
    full_tensors,
    mesh_of,
    parameters_of,
    run_case,
)

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
        plain = parameters_of(full_tensors())
        ours = parameters_of(world.tensors(full_tensors()))
        plain_optimizer = make(list(plain.values()))
        optimizer = make(list(ours.values()))
        before = [one.buffer.writes for one in ours.values()]
        for step in range(3):
            grads = full_tensors(seed=10 + step)
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
                    assert type(value) is ShardedTensor and value.buffer is None
                    assert value.cut is parameter.cut
        counts = [one.buffer.writes for one in ours.values()]
        assert all(now > then for now, then in zip(counts, before, strict=True)), name


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_optimizers_equal_unsharded(case: tuple[Any, ...]) -> None:
    run_case(check_optimizers, case)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks()
def test_optimizers_are_bitwise_equal(rank: int, world_size: int) -> None:
    """Rows of 16 floats: every local is whole SIMD vectors, so nothing may differ."""
    mesh = mesh_of((world_size,))
    layout = plan((Item("a", (9, 16)), Item("b", (5, 32)), Item("c", (2, 16))), world_size)
    for name, make in OPTIMIZERS.items():
        generator = torch.Generator().manual_seed(3)
        fulls = [torch.randn(item.shape, generator=generator) for item in layout.items]
        cuts = [Cut(layout, index, Ranks(mesh), (True,)) for index in range(3)]
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


def check_fused_skips_empty(rank: int, world_size: int) -> list[int]:
    world = World((3,), (True,), 1, TENSOR)
    tensors = list(world.tensors(full_tensors()).values())
    steps = [torch.ones(()) for _ in tensors]
    given: list[list[int]] = []

    def kernel(*lists: Any, **options: Any) -> None:
        given.append([len(one) for one in lists])
        assert all(tensor.numel() and type(tensor) is Tensor for one in lists for tensor in one)

    fused = tensor_module._operations._choose(torch.ops.aten._fused_adamw_.default)
    fused(kernel, (tensors, tensors, tensors, tensors, [], steps), {})
    held = sum(tensor.to_local().numel() > 0 for tensor in tensors)
    assert given == ([[held, held, held, held, 0, held]] if held else [])
    assert all(tensor.buffer.writes == 1 for tensor in tensors)
    return [held]


def test_fused_kernels_never_see_an_empty_local() -> None:
    held = [result[0] for result in run_ranks(check_fused_skips_empty, 3)]
    assert sum(held) == len(SHAPES) and max(held) < len(SHAPES)


# ---------------------------------------------------------------------- ops, copies, refusals


def check_pointwise(rank: int, world_size: int, *case: Any) -> None:
    world = World(*case)
    fulls, others = full_tensors(1), full_tensors(2)
    ours, theirs = world.tensors(fulls), world.tensors(others, fresh_cuts=True)
    for name in SHAPES:
        a, b, x, y = ours[name], theirs[name], fulls[name], others[name]
        check(a + b, x + y)
        check(a * 2 - 1, x * 2 - 1)
        check(2 - a, 2 - x)
        check(a + torch.tensor(3.0), x + 3.0)
        check(a * y, x * y)  # a plain tensor of the global shape
        check(y * a, y * x)
        check(torch.where(a > 0, a, b), torch.where(x > 0, x, y))
        check(torch.lerp(a, b, 0.3), torch.lerp(x, y, 0.3))
        check(torch.addcmul(a, a, b, value=2), torch.addcmul(x, x, y, value=2))
        check(torch.isfinite(a), torch.isfinite(x))
        check(a.to(torch.bfloat16), x.to(torch.bfloat16))
        check(a.double(), x.double())
        check(a.masked_fill(a > 0, 0.0), x.masked_fill(x > 0, 0.0))
        check(a.clamp(min=0).sqrt(), x.clamp(min=0).sqrt())
        check(torch.zeros_like(a), torch.zeros_like(x))
        check(torch.full_like(a, 7), torch.full_like(x, 7))
        check(a.new_zeros(a.shape), torch.zeros_like(x))
        check(a.view_as(a), x)
        check(a.reshape(a.shape), x)
        check(a.contiguous(), x)
        check(a.cpu(), x)
        assert a.is_floating_point() and a.numel() == x.numel() and a.stride() == x.stride()
        assert torch.equal(y.clone().add_(a), y + x), "a plain tensor gets the whole"
        target = torch.empty_like(a)
        assert torch.add(a, b, out=target) is target
        check(target, x + y)
    lists = list(ours.values()), list(theirs.values())
    plains = list(fulls.values()), list(others.values())
    sums = torch._foreach_add(*lists)
    for one, other in zip(sums, torch._foreach_add(*plains), strict=True):
        check(one, other)
    mixed = torch._foreach_mul([*lists[0], torch.ones(3)], 2.0)
    assert type(mixed[-1]) is Tensor and torch.equal(mixed[-1], torch.full((3,), 2.0))
    torch._foreach_copy_(lists[0], list(others.values()))
    for name in SHAPES:
        check(ours[name], others[name])


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_pointwise_ops_keep_the_cut(case: tuple[Any, ...]) -> None:
    run_case(check_pointwise, case)


def check_copies(rank: int, world_size: int, *case: Any) -> None:
    world = World(*case)
    elsewhere = World(*case[:3], TENSOR if case[3] != TENSOR else ROW)
    fulls, others = full_tensors(1), full_tensors(2)
    ours = world.tensors(fulls)
    moved = elsewhere.tensors(others)
    for name, tensor in ours.items():
        tensor.copy_(others[name])
        check(tensor, others[name])
        tensor.copy_(torch.zeros(()))
        check(tensor, torch.zeros_like(fulls[name]))
        tensor.copy_(moved[name])  # another cut: through its full_tensor()
        check(tensor, others[name])
        tensor.copy_(fulls[name].double())
        check(tensor, fulls[name])
        if fulls[name].ndim and world.mesh.ndim == 1:
            chunked = distribute_tensor(others[name], world.mesh, [Shard(0)])
            tensor.copy_(chunked)
            check(tensor, others[name])
            check(tensor + chunked, others[name] * 2)
        assert torch.equal(torch.empty(tensor.shape).copy_(tensor), tensor.full_tensor())
        with pytest.raises(NotImplementedError, match="shape"):
            tensor.copy_(torch.zeros(2, 99))
        # Another cut is gathered where it is only read: a frozen copy of a model, for an average.
        tensor.copy_(fulls[name])
        torch._foreach_add_([tensor], [moved[name]])
        check(tensor, fulls[name] + others[name])
        check(tensor.lerp(moved[name], 1.0), others[name])
        if not tensor.cut.matches(moved[name].cut):
            with pytest.raises(NotImplementedError, match=f"'{name}'.*in another way"):
                torch.mul(tensor, 2.0, out=moved[name])
            with pytest.raises(NotImplementedError, match=f"'{name}'.*in another way"):
                tensor + moved[name].detach().requires_grad_()


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_copy_takes_anything_of_the_global_shape(case: tuple[Any, ...]) -> None:
    run_case(check_copies, case)


@on_ranks(2)
def test_what_would_be_wrong_is_refused_by_name(rank: int, world_size: int) -> None:
    world = World((2,), (True,), 1, ROW)
    tensor = world.tensors(full_tensors())["wide"]
    plain = torch.randn(13, 4)
    for what in (
        lambda: tensor.t_(),
        lambda: tensor.index_put_((plain > 0,), torch.ones(())),
        lambda: tensor + torch.randn(5),
        lambda: tensor.resize_(3, 3),
        lambda: tensor.fill_diagonal_(1.0),
        lambda: tensor.clone(memory_format=torch.channels_last),
        lambda: tensor.bernoulli_(torch.rand(7, 13)),
        lambda: torch.from_dlpack(tensor),  # type: ignore[attr-defined]
        lambda: tensor.apply_(abs),
        tensor.share_memory_,
        tensor.numpy,
        tensor.tolist,
        lambda: numpy.asarray(tensor),
    ):
        with pytest.raises(RuntimeError, match="'wide'"):
            pytest.fail(f"not refused: {what()!r}")
    with pytest.raises(RuntimeError, match=r"'wide'.*sw.full_state_dict\(model\)"):
        safetensors.torch.save({"wide": tensor})
    with pytest.raises(NotImplementedError, match=r"'wide'.*copy_\(values\)"):
        nn.init.orthogonal_(tensor)
    values, alias = torch.randn(7, 13), tensor.detach()
    tensor.data = values
    check(tensor, values)
    check(alias, values)
    for wrong in (torch.zeros(7, 12), torch.zeros(7, 13, dtype=torch.float64)):
        with pytest.raises(NotImplementedError, match=r"model.to\(dtype\)"):
            tensor.data = wrong
    scalar = world.tensors(full_tensors())["scalar"]
    check(scalar.masked_fill_(torch.tensor(True), torch.tensor(2.0)), torch.tensor(2.0))
    with pytest.raises(NotImplementedError, match="one rank's piece"):
        torch.save(tensor, io.BytesIO())
    assert "'wide'" in repr(tensor) and len(repr(tensor)) < 200


def check_reads(rank: int, world_size: int, *case: Any) -> None:
    """Operations that are not computed on pieces give what they give on the whole."""
    world = World(*case)
    fulls = full_tensors()
    tensor, full = world.tensors(fulls)["wide"], fulls["wide"]
    plain = torch.randn(full.shape[1], 4, generator=torch.Generator().manual_seed(1))
    reads: list[Callable[[Any], Any]] = [
        lambda t: t @ plain,
        lambda t: t.t(),
        lambda t: t[:, 1:],
        lambda t: t.cumsum(0),
        lambda t: t.softmax(-1),
        lambda t: t.sort().values,
        lambda t: t.argmax(),
        lambda t: t.std(),
        lambda t: torch.cat([t, t]),
        lambda t: nn.functional.linear(plain.t(), t),
        lambda t: t.new_zeros(3),
        lambda t: t / t.norm(dim=1, keepdim=True),
        lambda t: t + plain[:, 0],
    ]
    for number, read in enumerate(reads):
        torch.testing.assert_close(full_of(read(tensor)), read(full), msg=str(number))
    assert f"{tensor.norm():.2f}" == f"{full.norm():.2f}"
    tensor.t().mul_(2)  # a gathered copy, no view
    check(tensor, full)
    with torch.inference_mode():
        torch.testing.assert_close(tensor.t().numpy(), full.t().numpy())
    torch.optim.SGD([nn.Parameter(tensor)]).step()  # what was read, or refused, hinders nobody
    tensor.t().clone().zero_()
    check(tensor, full)
    rows = torch.tensor([1, 3])
    for key in (0, (2, 3), slice(2, 5), rows):
        with pytest.raises(NotImplementedError, match="'wide'"):
            tensor[key] = 1.0
    # What autograd records does not mix with a rank's activations: their gradients would be lost.
    leaf = nn.Parameter(tensor)
    with pytest.raises(RuntimeError, match="mixed"):
        plain.t() @ leaf.t()
    leaf.std().backward()
    wanted = nn.Parameter(full.clone())
    wanted.std().backward()
    torch.testing.assert_close(full_of(leaf.grad), wanted.grad)
    moved = tensor.redistribute(placements=[Shard(1)] * world.mesh.ndim)
    assert type(moved) is DTensor and torch.equal(full_of(moved), full)


def full_of(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_reads_that_need_the_whole_gather_it(case: tuple[Any, ...]) -> None:
    run_case(check_reads, case)


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
    ours = parameters_of(world.tensors(full_tensors()))
    plain = parameters_of(full_tensors())
    for fill in fills:
        for parameters in (plain, ours):
            torch.manual_seed(7)
            for parameter in parameters.values():
                with torch.no_grad():
                    fill(parameter)
        for name, parameter in ours.items():
            assert torch.equal(parameter.full_tensor(), plain[name].data), name
            assert parameter.buffer.writes > 0
    torch.manual_seed(1)
    mine = torch.randn_like(ours["tall"])
    torch.manual_seed(1)
    assert torch.equal(mine.full_tensor(), torch.randn_like(plain["tall"]))


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_random_init_equals_unsharded(case: tuple[Any, ...]) -> None:
    run_case(check_init, case)


@on_ranks(2)
def test_every_write_is_counted_once(rank: int, world_size: int) -> None:
    world = World((2,), (True,), 1, ROW)
    for tensor in world.tensors(full_tensors()).values():
        parameter = nn.Parameter(tensor)
        buffer = tensor.buffer
        assert (
            parameter.buffer is buffer
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
            before = buffer.writes
            write()
            assert buffer.writes == before + 1
        before = buffer.writes
        with torch.no_grad():
            parameter + 1
            parameter.clone().add_(1)
            torch.zeros_like(parameter).add_(1)
        parameter.full_tensor()
        assert buffer.writes == before
