# SPDX-License-Identifier: Apache-2.0
"""Hooks for saved tensors that others set around units: they see activations and no gathered
weights, and stay those that they were."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph

import shardwise as sw
from shardwise.shard.flow import in_recomputation
from shardwise.shard.fp8_parameter import _save_undecoded as save_undecoded
from tests.contract.helpers import (
    assert_gradients_equal,
    average_gradients,
    options_for,
    pair,
    vector_loss,
    vectors,
)
from tests.contract.test_kept import ByKernel, Keeping, Recomputed, Turning, keeping_hooks, wrap
from tests.ranks import on_ranks


def two_losses(net: Any, rank: int, step: int) -> Tensor:
    return 2 * vector_loss(net, rank, step)


def offloads() -> Any:
    return graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda packed: packed)


@pytest.mark.parametrize("hooks", [partial(keeping_hooks, True), graph.save_on_cpu, offloads])
@on_ranks(2)
def test_views_of_weights_under_hooks_for_saved_tensors(
    rank: int, world_size: int, hooks: Callable[[], Any]
) -> None:
    """Others' hooks see activations, and no weights that will be given back: what is kept is found
    as it is without hooks, and gradients are right, of a second backward too."""
    kept: list[Any] = []
    keep = lambda weight: kept.append(weight[:2])  # noqa: E731
    net, plain = pair(lambda: nn.Sequential(*(one(keep) for one in KINDS)))
    plain(vectors(rank))
    truth = [one.clone() for one in kept]
    blocks = wrap(net, "zero3", world_size)
    for step in range(3):
        kept.clear()
        with hooks():
            loss = net(vectors(rank, step)).square().mean()
            assert not any(block.live for block in blocks)
            assert len(kept) == len(truth) and all(map(torch.equal, kept, truth))
        loss.backward(retain_graph=True)
        loss.backward()
        average_gradients(plain, partial(two_losses, step=step), world_size)
        assert_gradients_equal(net, plain)
        assert not any(block.live for block in blocks)
        net.zero_grad(), plain.zero_grad()


KINDS = (Keeping, Turning, ByKernel, Recomputed)


def raises(*_: Any) -> None:
    raise ValueError("no")


@on_ranks(2)
def test_hooks_are_those_of_before_after_every_forward(rank: int, world_size: int) -> None:
    """For units in units, called by themselves, that raise at any depth, in a hook, or in part."""
    net = nn.Sequential(Keeping(), nn.Sequential(Keeping(), Turning()))
    for one in (*net[1], net[1], net):
        sw.fully_shard(one, **options_for("zero3", world_size))
    top = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
    pack, unpack = (lambda saved: (saved,)), (lambda packed: packed[0])
    with graph.saved_tensors_hooks(pack, unpack):
        for broken in (None, net[0], net[1][0], net[1], net):
            handles = []
            if broken is not None:
                handles = [broken.register_forward_pre_hook(raises, prepend=True)]
                handles += [broken.register_forward_hook(raises)]
            for _ in range(2):
                for called in (net, net[1], net[1][1]):
                    with suppress(ValueError):
                        called(vectors(rank))
                    assert top(True) == (pack, unpack), (broken, called)
                for handle in handles[:1]:
                    handle.remove()  # the second time the hook after forward raises
            for handle in handles:
                handle.remove()
    assert top(True) is None


def interrupts(*_: Any) -> None:
    raise KeyboardInterrupt


@on_ranks(2)
def test_hooks_after_a_forward_that_the_user_interrupted(rank: int, world_size: int) -> None:
    """torch calls no hook of a module then: a ``with`` still ends with its own hooks."""
    net = nn.Sequential(Keeping(), nn.Sequential(Keeping(), Turning()))
    for one in (*net[1], net[1], net):
        sw.fully_shard(one, **options_for("zero3", world_size))
    top = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
    seen: list[Tensor] = []
    outer = (lambda saved: saved), (lambda packed: packed)
    pack, unpack = (lambda saved: seen.append(saved) or saved), (lambda packed: packed)
    for broken in (net[0], net[1][0], net[1]):
        with graph.saved_tensors_hooks(*outer):
            with graph.saved_tensors_hooks(pack, unpack):
                handle = broken.register_forward_pre_hook(interrupts)
                with suppress(KeyboardInterrupt):
                    net(vectors(rank))
                handle.remove()
                seen.clear()
                net(vectors(rank)).square().sum().backward()
                assert seen
            assert top(True) == outer
        assert top(True) is None


@on_ranks(2)
def test_weights_that_are_not_gathered_for_backward_under_hooks(rank: int, world_size: int) -> None:
    """Are refused as without hooks, and never read."""
    net = nn.Sequential(Keeping(), Turning(), Keeping())
    wrap(net, "zero3", world_size)
    net[1].set_unshard_in_backward(False)
    with keeping_hooks(True):
        loss = net(vectors(rank)).square().sum()
    with pytest.raises(RuntimeError, match=r"not gathered again \(set_unshard_in_backward"):
        loss.backward()


def test_a_recomputation_is_known_where_its_hook_is_wrapped() -> None:
    """As before torch 2.13, for weights in fp8: hooks beside it would hide weights from it."""

    class Older(torch.utils.checkpoint._recomputation_hook):
        pass

    save_undecoded(Older)
    with Older(lambda: None, 0):  # type: ignore[arg-type]
        assert in_recomputation()
    assert not in_recomputation()
