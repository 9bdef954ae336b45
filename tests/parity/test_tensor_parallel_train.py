# SPDX-License-Identifier: Apache-2.0
"""GPT over tensor parallelism: its loss without the whole vocabulary, and its plan."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.core import comm
from shardwise.core.memory import separate_ledger
from shardwise.core.placements import STRATEGIES
from shardwise.models.gpt import GPT, generate
from shardwise.models.gpt_config import GPTConfig
from shardwise.models.loss import IGNORED, linear_cross_entropy
from shardwise.models.tensor_parallel import cut_over
from tests.one_card import device_type, ranks_device
from tests.ranks import on_ranks, run_ranks
from tests.tensor_parallel import grid, whole

MODEL = GPTConfig(dim=16, num_layers=2, num_heads=4, num_kv_heads=2, context=16, vocab_size=33)


@on_ranks(2)
def test_the_loss_of_a_cut_vocabulary(rank: int, world_size: int) -> None:
    """An uneven vocabulary, targets on either rank and unscored ones, logits that overflow, chunks
    of rows."""
    mesh = grid(1, 2)["tp"]
    hidden, head = torch.randn(2, 3, 5), 200 * torch.randn(7, 5)
    targets = torch.tensor([[0, 3, 6], [IGNORED, 4, IGNORED]])
    for z, chunk in ((0.0, 1 << 20), (0.01, 1 << 20), (0.01, 4)):
        plain = [one.clone().requires_grad_() for one in (hidden, head)]
        expected = linear_cross_entropy(*plain, targets, z_coefficient=z)
        expected.backward()
        mine = [
            distribute_tensor(one, mesh, [how]).requires_grad_()
            for one, how in ((hidden, Replicate()), (head, Shard(0)))
        ]
        with comm.record() as calls:
            loss = linear_cross_entropy(*mine, targets, z_coefficient=z, chunk=chunk)
        sent = sum(call.nbytes for call in calls)
        assert sent == 3 * targets.numel() * 4, "three numbers for each token"
        # Two for each chunk: of 6 rows, though the second rank's words would fit in fewer.
        assert len(calls) == (2 if chunk > 4 else 12)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        for one, its in zip(mine, plain, strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), its.grad)
    assert linear_cross_entropy(*mine, torch.full_like(targets, IGNORED)).item() == 0
    with torch.no_grad():
        second = torch.arange(7)[:, None] == 5  # of the second rank
        broken = torch.where(second, float("nan"), head)
        cut = distribute_tensor(broken, mesh, [Shard(0)])
        assert linear_cross_entropy(mine[0], cut, targets).isnan()


@pytest.mark.parametrize(("recompute", "tied"), [("none", True), ("block", False)])
@on_ranks(4)
def test_the_model_is_that_of_one_process(
    rank: int, world_size: int, recompute: str, tied: bool
) -> None:
    config = dataclasses.replace(MODEL, tied=tied, recompute=recompute, head_z_coefficient=0.01)
    mesh, alone = grid(2, 2), GPT(config).to(device_type())
    alone.init_weights(3)
    with torch.device("meta"):
        model = GPT(config)
    cut_over(model, mesh["tp"])
    for block in model.blocks:
        sw.fully_shard(block, mesh=mesh)
    sw.fully_shard(model, mesh=mesh)
    model.to_empty(device=device_type())
    model.init_weights(3)
    tokens = torch.randint(0, 33, (4, 17), generator=torch.Generator().manual_seed(5))
    mine = tokens[2 * mesh.get_local_rank("dp") :][:2]
    seen: list[torch.Size] = []
    model.blocks[0].register_forward_hook(lambda module, args, out: seen.append(args[0].shape))
    loss = model(mine[:, :-1], mine[:, 1:])
    assert seen == [torch.Size((2, 8, 16))], "a part of every sequence between products"
    loss.backward()
    alone(tokens[:, :-1], tokens[:, 1:]).backward()
    torch.testing.assert_close(loss.detach(), alone(mine[:, :-1], mine[:, 1:]).detach())
    for (name, one), its in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(whole(one), its), name
        assert isinstance(one, DTensor) and one.device_mesh.ndim == 2, name
        assert torch.allclose(whole(one.grad), its.grad, atol=1e-5), name
    with torch.no_grad():  # 7 tokens, which do not fall into two parts
        logits = model(tokens[:, :7])
        torch.testing.assert_close(logits, alone(tokens[:, :7]), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            model(mine[:, :7], mine[:, 1:8]), alone(mine[:, :7], mine[:, 1:8])
        )
    drawn = [generate(m, tokens[:1, :3], 2, context=16, temperature=0) for m in (model, alone)]
    assert torch.equal(*drawn)


# On a GPU matrices are orthogonalised in 16 bits, those that tensor parallelism cuts apart.
NEAR = 1e-4 if ranks_device() == "cpu" else 2e-3
PAGE = Path(__file__).parents[2] / "docs" / "tensor_parallel.md"


@on_ranks(4)
def test_the_example_of_the_page(rank: int, world_size: int) -> None:
    """For 16 GPUs there, for 4 CPU ranks here: three axes."""
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    assert "dp=4" in code
    alone = GPT(MODEL).to(device_type())
    alone.init_weights(3)
    names: dict[str, Any] = {"model": GPT(MODEL).to(device_type())}
    names["model"].init_weights(3)
    exec(code.replace("dp=4", "dp=1"), names)  # the page, as a reader types it
    model, optimizer, mesh = names["model"], names["optimizer"], names["mesh"]
    assert mesh.mesh_dim_names == ("dp_outer", "dp", "tp")
    assert model.blocks[0].feed_forward.down.weight.placements[-1] == Shard(1)
    reference = sw.optimizer(alone, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=3e-4))
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 33, (4, 16), generator=generator)
        mine = tokens[2 * mesh.get_local_rank("dp_outer") :][:2]
        model(mine, mine).backward()
        alone(tokens, tokens).backward()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    for (name, mine), its in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), its.detach(), atol=NEAR, rtol=0, msg=name.__add__)


# ------------------------------------------------------------------------------ plans


class Sent(TorchDispatchMode):
    """The collectives that DTensors issue, as ``comm.record`` counts its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations on local tensors come next
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional" and name in OPERATIONS:
            whole = args[0].nbytes * (2 if name == "all_gather_into_tensor" else 1)
            self.calls.append((OPERATIONS[name], "tp", whole))
        return func(*args, **(kwargs or {}))


OPERATIONS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
OPERATIONS |= {"all_reduce": "all_reduce", "all_to_all_single": "all_to_all"}
Found = tuple[dict[str, int], list[tuple[str, str, int]]]


def measured(rank: int, world_size: int, strategy: str, recompute: Any) -> Found:
    """Bytes at rest and all collectives of a step but the optimizer's, as a rank finds them."""
    mesh = grid(2, 2)
    with separate_ledger() as ledger:
        with torch.device("meta"):
            model = GPT(dataclasses.replace(MODEL, recompute=recompute))
        cut_over(model, mesh["tp"])
        for unit in (*model.blocks, model):
            sw.fully_shard(unit, mesh=mesh, placements=STRATEGIES[strategy])
        model.to_empty(device=device_type())
        model.init_weights(0)
        optimizer = sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        for step in range(2):
            with comm.record() as calls, Sent() as sent:
                model(tokens, tokens).backward()
            if step == 0:
                optimizer.step()
                optimizer.zero_grad()
        found = [(c.operation, c.axis, c.nbytes) for c in calls] + sent.calls
        optimizer.zero_grad()
        return ledger.snapshot(), found


@pytest.mark.parametrize(("strategy", "recompute"), [("zero1", "block"), ("zero3", "none")])
def test_a_plan_is_that_of_one_ranks_tiles(strategy: str, recompute: Any) -> None:
    with torch.device("meta"):
        model = GPT(dataclasses.replace(MODEL, recompute=recompute))
    options: dict[str, Any] = {"optimizer": "muon", "device": "cpu", "batch": (2, 16)}
    made = sw.plan(model, {"dp": 2, "tp": 2}, strategy, **options)
    assert "over dp=2 x tp=2 (4 ranks)" in str(made)
    assert made.num_parameters == model.num_parameters
    rest, calls = run_ranks(measured, 4, strategy, recompute)[0]
    assert made.rest["main"] == rest["main"] > 0
    planned = Counter({k: n for k, n in made.calls.items() if k.operation != "all_to_all"})
    assert planned == Counter(comm.Call(op, axis, 2, nbytes) for op, axis, nbytes in calls)
    alone = sw.plan(model, {"dp": 2}, strategy, **options)
    assert made.rest["main"] < 0.6 * alone.rest["main"]
    assert 0.4 * alone.activations < made.activations < alone.activations


def test_a_plan_of_a_model_whose_cut_is_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="the cut of its parameters is unknown"):
        sw.plan(torch.nn.Linear(4, 4), {"dp": 2, "tp": 2})
    with pytest.raises(ValueError, match="tp=3 does not divide num_heads=4"):
        sw.plan(GPT(MODEL), {"dp": 2, "tp": 3})
