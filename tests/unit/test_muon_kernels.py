# SPDX-License-Identifier: Apache-2.0
"""How the step uses the kernels, with the torch definitions in their place: which matrices are
packed, what is left to the exchange, and that both arrive at the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.kernels import newton_schulz as kernels
from shardwise.optim import matrix_group, muon
from tests.kernel_cases import pack_reference
from tests.models import Weights, mesh_of
from tests.parity.helpers import small_rounds
from tests.ranks import run_ranks

pytest.importorskip("triton", reason="the kernels are an extra: pip install shardwise[triton]")


def orthogonalise_packed(packed: Any, polynomial: Any) -> Tensor:
    matrices = packed.unpadded(packed.values).float()
    found = torch.zeros_like(packed.values)
    packed.unpadded(found).copy_(kernels.orthogonalise(matrices, polynomial))
    return found


def accumulate(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    outs: Sequence[Tensor],
    *,
    beta: float,
    nesterov: bool,
    clip: Tensor | None = None,
) -> None:
    from shardwise.kernels.muon import momentum_reference

    assert all(len({piece.dtype for piece in column}) == 1 for column in (grads, states, outs))
    for grad, state, out in zip(grads, states, outs, strict=True):
        out.copy_(momentum_reference(grad, state, beta=beta, nesterov=nesterov, clip=clip))


def apply(
    weights: Sequence[Tensor], updates: Any, *, clip: Tensor | None = None, **options: Any
) -> None:
    from shardwise.kernels.muon import apply_reference

    for weight, update in zip(weights, updates, strict=True):
        if isinstance(updates, Tensor):
            update = update[: weight.shape[0], : weight.shape[1]]
        weight.copy_(apply_reference(weight, update, **options))


@contextmanager
def definitions() -> Iterator[None]:
    """A CPU that seems to have kernels."""
    from shardwise.kernels import muon as passes

    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (kernels, "uses_kernels", lambda device: True),
        (passes, "normalise", passes.normalise_reference),
        (passes, "pack", pack_reference),
        (passes, "accumulate", accumulate),
        (kernels, "orthogonalise_packed", orthogonalise_packed),
        (passes, "apply", apply),
    ]
    before = [getattr(place, name) for place, name, _ in places]
    for place, name, value in places:
        setattr(place, name, value)
    try:
        yield
    finally:
        for (place, name, _), value in zip(places, before, strict=True):
            setattr(place, name, value)


SHAPES = {
    "a": (16, 16), "b": (16, 16), "tall": (24, 9), "wide": (9, 24),
    "experts": (3, 8, 12), "stacked": (20, 10), "interleaved": (20, 10), "vector": (7,),
}  # fmt: skip
SPLITS = {"stacked": sw.Split.stacked(12, 8), "interleaved": sw.Split.interleaved(2)}
LOCAL = {"a", "b", "tall", "wide", "experts", "stacked"}


def trained(
    wrap: Callable[[Weights], Any] | None = None, **options: Any
) -> tuple[dict[str, Tensor], Any]:
    model = Weights(SHAPES, seed=2)
    sw.route(model, split=SPLITS)
    if wrap is not None:
        wrap(model)
    settings = sw.muon(**{"lr": 0.1, "weight_decay": 0.2} | options)
    optimizer = sw.optimizer(model, matrix=settings, elementwise=sw.adamw(lr=0.1))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            full = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.zeros_like(parameter).copy_(full)
        optimizer.step()
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in ({"": parameter} | optimizer.state[parameter]).items():
            value = value.detach()
            found[f"{name} {key}"] = getattr(value, "full_tensor", value.clone)()
    return found, optimizer


def assert_close(
    found: dict[str, Tensor], expected: dict[str, Tensor], *, cautious: bool = False
) -> None:
    """Batches are fp16 on the way to the kernels: 11 bits.

    ``cautious`` decay goes by the sign of an update: of 1,400 elements one or two are so near 0
    that the last bits decide it, and with it a step's decay (lr · weight decay · weight).
    """
    assert found.keys() == expected.keys() and len(found) == 8 + 7 + 3
    flipped = 0
    for name, value in found.items():
        off = (value - expected[name]).abs()
        decay = 0.1 * 0.2 * 1.01 * expected[name].abs() if cautious else 0.0
        assert bool((off <= 2e-3 + decay).all()), name
        flipped += int((off > 2e-3).sum())
    assert flipped <= 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decay": "cautious", "scale": "match_rms_adamw"},
        {"nesterov": False},
        {"preset": "polar_express"},
    ],
    ids=str,
)
def test_whole_matrices_are_packed_and_the_rest_is_not(options: dict[str, Any]) -> None:
    expected, plain = trained(**options)
    assert not plain._matrix_groups[0].fused
    with definitions():
        found, optimizer = trained(**options)
    (group,) = optimizer._matrix_groups
    names = {group.members[position].name for starts in group.local.values() for position in starts}
    assert group.fused and names == LOCAL, "interleaved blocks are taken apart by the exchange"
    assert len(group.exchange.excluded) == 4 + 3 + 2
    assert_close(found, expected, cautious=options.get("decay") == "cautious")


def test_batches_are_cut_where_they_grow_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    original = muon._apply

    def counting(weights: Any, *args: Any) -> None:
        lengths.append(len(weights))
        original(weights, *args)

    monkeypatch.setattr(muon, "_apply", counting)
    with definitions():
        expected, _ = trained()
        longest = max(lengths)
        lengths.clear()
        monkeypatch.setattr(matrix_group.MatrixGroup, "local_bytes", 1)
        found, _ = trained()
    assert longest > 1 and max(lengths) == 1
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


class Halved(sw.muon):
    """Weights are halved after each step, and updates are half as long."""

    def compute(self, batch: Tensor, state: Any, step: Any) -> Tensor:
        return super().compute(batch, state, step) / 2

    def after(self, weights: list[Tensor], updates: list[Tensor], step: Any) -> None:
        super().after(weights, updates, step)
        torch._foreach_mul_(weights, 0.5)


def test_hooks_that_a_subclass_changes_run_where_kernels_serve_too() -> None:
    found = []
    for kernels_there in (False, True):
        with definitions() if kernels_there else nullcontext():
            model = Weights({"a": (16, 16), "tall": (24, 9), "experts": (3, 8, 12)}, seed=2)
            optimizer = sw.optimizer(model, matrix=Halved(lr=0.1), elementwise=None)
            for parameter in model.parameters():
                parameter.grad = torch.cos(parameter.detach())
            optimizer.step()
        found.append([parameter.detach() for parameter in model.parameters()])
    before = Weights({"a": (16, 16), "tall": (24, 9), "experts": (3, 8, 12)}, seed=2)
    for mine, its, old in zip(*found, before.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=2e-3)
        assert (its.norm() / old.norm()) < 0.6


def sharded(rank: int, world_size: int) -> list[str]:
    """Whole matrices and travelling ones, all rounds at once and one matrix at a time."""
    plain, _ = trained()
    kept: Any = None
    with definitions():
        whole, _ = trained()
        for stage, nbytes in ((3, 1 << 28), (3, 1), (0, 1 << 28), (0, 1)):
            placements = sw.zero(stage)
            with small_rounds(nbytes):
                found, optimizer = trained(
                    lambda model, placements=placements: sw.fully_shard(
                        model, mesh=mesh_of(world_size), placements=placements
                    )
                )
            (group,) = optimizer._matrix_groups
            assert group.narrow and group.exchange.results == torch.float16
            assert group.exchange.communicates
            different = [name for name in whole if not torch.equal(found[name], whole[name])]
            assert not different, (stage, nbytes, different)
            assert_close(found, plain)
            kept = kept or group
    return sorted({kept.members[n].name for starts in kept.local.values() for n in starts})


def test_ranks_pack_what_stays_and_exchange_what_travels() -> None:
    kept = run_ranks(sharded, 2)
    names = [name for one in kept for name in one]
    assert names and len(set(names)) < len(LOCAL) + 1
    assert set(names) <= LOCAL


def mixed(rank: int, world_size: int) -> None:
    """Gradients of two dtypes in one exchange, which kernels read as they are."""
    found = []
    for kernels_there in (True, False):
        model = Weights(dict.fromkeys("abcdefgh", (16, 12)), seed=2)
        sw.fully_shard(model, mesh=mesh_of(world_size), placements=sw.zero(0))
        with definitions() if kernels_there else nullcontext():
            optimizer = sw.optimizer(model, matrix=sw.muon(lr=0.1), elementwise=None)
            for name, parameter in model.named_parameters():
                parameter.grad = torch.zeros_like(parameter)
                generator = torch.Generator().manual_seed(ord(name))
                full = torch.randn(parameter.shape, generator=generator).bfloat16()
                parameter.grad.copy_(full)
                if name in "acd" and kernels_there:
                    parameter.grad, narrow = None, parameter.grad.to(torch.bfloat16)
                    parameter.grad_dtype = torch.bfloat16
                    parameter.grad = narrow
            optimizer.clip_grad_norm(1e9, in_step=True)
            clip = torch.tensor([1.0, 0.0]) if kernels_there else None  # as on a GPU
            vars(optimizer)["_take_clip"] = partial(tuple, (clip, True))
            optimizer.step()
        found.append([p.full_tensor() for p in model.parameters()])
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=2e-3)


def test_gradients_of_two_dtypes_share_an_exchange() -> None:
    run_ranks(mixed, 2)
