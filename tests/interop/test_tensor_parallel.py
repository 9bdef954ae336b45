# SPDX-License-Identifier: Apache-2.0
"""torch's tensor parallelism under torch's FSDP2, on a mesh of 2 x 2: norms, steps, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.moe import GroupedLinear
from tests.ranks import run_ranks
from tests.tensor_parallel import LENGTH, Net, grid, tiled
from tests.whole import whole_state

WORDS = 20  # divides evenly: torch's own FSDP2 is the peer here


def cut(mesh: DeviceMesh, sequence: bool = False) -> Net:
    """Linears over ``tp``, everything over ``dp``; the embedding, the last norm and the head (and
    without ``sequence`` the norms) know nothing of ``tp``."""
    model = tiled(mesh, sequence, WORDS)
    if mesh["dp"].size() > 1:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def loss_of(model: nn.Module, which: int) -> Tensor:
    words = torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(which))
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten())


def optimizer_of(model: nn.Module) -> Any:
    matrix = sw.muon(lr=0.05, weight_decay=0.1)
    return sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=1e-2))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip(rank: int, world_size: int, sizes: tuple[int, int], sequence: bool) -> int:
    mesh = grid(*sizes)
    ours, one = cut(mesh, sequence), Net(WORDS)
    meshes = {p.device_mesh.ndim if isinstance(p, DTensor) else 0 for p in ours.parameters()}
    optimizers = [optimizer_of(ours), optimizer_of(one)]
    for step in range(2):
        loss_of(ours, sizes[0] * step + mesh["dp"].get_local_rank()).backward()
        for other in range(sizes[0]):
            (loss_of(one, sizes[0] * step + other) / sizes[0]).backward()
        for kind in (2.0, 1.0, float("inf")):
            theirs = optimizers[1].clip_grad_norm(1e9, kind)
            torch.testing.assert_close(optimizers[0].clip_grad_norm(1e9, kind), theirs)
        norms = [optimizer.clip_grad_norm(0.1) for optimizer in optimizers]
        assert norms[1] > 0.1, "there was something to clip"
        torch.testing.assert_close(norms[0], norms[1])
        for (name, mine), its in zip(ours.named_parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), its.grad, msg=name, atol=1e-6, rtol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, mine), its in zip(ours.named_parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(whole(mine), its, msg=name, atol=2e-4, rtol=1e-3)
    return len(meshes)


@pytest.mark.parametrize(
    ("sizes", "sequence"), [((2, 2), False), ((2, 2), True), ((1, 2), False)], ids=str
)
def test_the_norm_is_the_true_one_and_steps_are_those_of_one_process(
    sizes: tuple[int, int], sequence: bool
) -> None:
    world_size = sizes[0] * sizes[1]
    found = run_ranks(clip, world_size, sizes, sequence)
    assert found == [1 if sequence else 2] * world_size, "meshes of two kinds, or of one"


# ------------------------------------------------------------------------------ checkpoints


def trained(mesh: DeviceMesh, sequence: bool, steps: int, first: int = 0) -> tuple[Net, Any]:
    model = cut(mesh, sequence)
    optimizer = optimizer_of(model)
    go_on(model, optimizer, mesh, range(first, first + steps))
    return model, optimizer


def go_on(model: Net, optimizer: Any, mesh: DeviceMesh, steps: range) -> None:
    for step in steps:
        loss_of(model, 10 * step + mesh["dp"].get_local_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()


def save_and_load(rank: int, world_size: int, folder: str, sequence: bool) -> int:
    mesh = grid(2, 2)
    model, optimizer = trained(mesh, sequence, 2)
    saved = whole_state(model, optimizer)
    path = Path(folder) / f"{sequence}"
    sw.save(path, model, optimizer)
    for sizes in ((2, 2), (4, 1), (1, 4)):
        other, fresh = trained(grid(*sizes), sequence, 1, first=7)
        assert not torch.equal(whole(other.embedding.weight), saved["embedding.weight"])
        sw.load(path, other, fresh)
        found = whole_state(other, fresh)
        assert found.keys() == saved.keys()
        for key, value in saved.items():
            assert torch.equal(found[key], value), (sizes, key)
    again, fresh = trained(mesh, sequence, 1, first=7)
    sw.load(path, again, fresh)
    for one, its in ((model, optimizer), (again, fresh)):
        go_on(one, its, mesh, range(2, 4))
    left, right = whole_state(model, optimizer), whole_state(again, fresh)
    assert all(torch.equal(left[key], right[key]) for key in left)
    return len(saved)


def test_a_checkpoint_of_a_two_dimensional_mesh_loads_into_any_other(tmp_path: Path) -> None:
    found = run_ranks(save_and_load, 4, str(tmp_path), True)
    assert found == [16 + 4 + 3 * 12] * 4, "weights, momenta, and the states of AdamW"


# ------------------------------------------------------------------------------ experts


class Mixed(nn.Module):
    """A dense matrix on all ranks, and two of four experts on each half of them."""

    def __init__(self, half: int) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 8, bias=False)
        self.experts = GroupedLinear(4, 8, 8)
        self.experts.spread(2 * half, 2)


def expert_norm(rank: int, world_size: int) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    half = mesh.get_local_rank("ep")
    model = Mixed(half)
    fully_shard(model.experts, mesh=mesh["dp"])
    fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("all",)))
    optimizer = optimizer_of(model)
    for name, parameter in model.named_parameters():
        value = 1.0 + half if "experts" in name else 0.5
        parameter.grad = torch.full_like(parameter, value)
    squares = 2 * 64 * (1.0 + 4.0) + 48 * 0.25
    norm = optimizer.clip_grad_norm(1e9)
    torch.testing.assert_close(norm, torch.tensor(squares**0.5))
    return norm.item()


def test_experts_of_ours_under_fsdp2_are_no_copies() -> None:
    assert len(set(run_ranks(expert_norm, 4))) == 1
