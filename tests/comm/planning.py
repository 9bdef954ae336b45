# SPDX-License-Identifier: Apache-2.0
"""Models, and what real ranks hold and send, for the tests of plans."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.core import comm
from shardwise.core.placements import STRATEGIES
from shardwise.planning.figures import Plan
from shardwise.planning.plan import plan
from shardwise.shard.wrap import wrap_units
from tests.memory.helpers import Books
from tests.models import Layer, Model, loss_of, mesh_for, tokens
from tests.one_card import ranks_device
from tests.ranks import run_ranks

PRECISIONS = {
    "fp32": sw.Precision(),
    "bf16": sw.Precision(weights="bf16", reduce="fp32"),
    "bf16 wire": sw.Precision(weights="bf16"),
    "mxfp8": sw.Precision(weights="mxfp8"),
    "fp8_block": sw.Precision(weights="fp8_block", reduce="fp32"),
}
Facts = dict[str, Any]


class Backbone(nn.Module):
    """No embedding of its own: the root's parameters all come after its units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(10) for _ in range(3))
        self.norm = nn.LayerNorm(10)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = nn.functional.one_hot(batch % 10, 10).float()
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


def half_frozen() -> Model:
    model = Model(10, 4)
    model.embedding.requires_grad_(False)
    for layer in model.layers[:2]:
        layer.requires_grad_(False)
    model.layers[3].up.requires_grad_(False)
    return model


def uneven() -> Model:
    """Layers of different sizes: the peak depends on which two stand side by side."""
    model = Model(10, 4)
    for number, layer in enumerate(model.layers):
        layer.up = nn.Linear(10, 30 + 64 * (number % 3))
        layer.down = nn.Linear(30 + 64 * (number % 3), 10)
    return model


class Recomputing(Model):
    """Runs its first and last layer once more in backward, each a unit, and its head: a part of
    one."""

    def __init__(self) -> None:
        super().__init__(32, 3)
        self.embedding = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64)

    @property
    def recomputed(self) -> tuple[nn.Module, ...]:
        return self.layers[0], self.layers[2], self.head

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for part in (*self.layers, self.head):
            again = part in self.recomputed
            hidden = checkpoint(part, hidden, use_reentrant=False) if again else part(hidden)
        return hidden


class Stacked(Model):
    """Four matrices in one parameter, which ranks may hold apart and never cut."""

    def __init__(self) -> None:
        super().__init__(64, 1)
        self.stack = nn.Parameter(torch.randn(4, 64, 64) / 8)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for matrix in self.stack:
            hidden = hidden @ matrix
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Single(Model):
    """One matrix that an optimizer orthogonalises: replicas can only divide its rows."""

    def __init__(self) -> None:
        super().__init__(64, 1)
        self.layers = nn.ModuleList([nn.Linear(64, 64)])


MODELS: dict[str, Any] = {
    "single": Single,
    "plain": lambda: Model(10, 3),
    "backbone": Backbone,
    "half frozen": half_frozen,
    "born narrow": lambda: half_frozen().to(torch.bfloat16),
    "uneven": uneven,
    "blocks of 32": lambda: Model(32, 3),
    "wide": lambda: Model(256, 2),
    "recomputing": Recomputing,
    "stacked": Stacked,
}


def mesh_shape(strategy: str, world_size: int) -> dict[str, int]:
    two = strategy in ("hsdp", "hfsdp")
    return {"dp_outer": 2, "dp": world_size // 2} if two else {"dp": world_size}


FIGURES = ("rest", "loaded", "peak", "peak_total", "calls", "exchanged")


def wrap(model: nn.Module, world_size: int, strategy: str, precision: str, options: Facts) -> Any:
    """As planned with ``options``; the mesh."""
    placements = STRATEGIES[strategy]
    mesh = mesh_for(placements, world_size)
    common: Facts = {"mesh": mesh, "placements": placements, "precision": PRECISIONS[precision]}
    if "bucket_mb" in options:
        sw.data_parallel(model, bucket_mb=options["bucket_mb"], **common)
    else:
        for module in wrap_units(model):
            sw.fully_shard(module, **common, **options)
    return mesh


def measure(
    rank: int, world_size: int, model_name: str, strategy: str, case: Case, options: Facts
) -> Facts:
    """The figures of a second step, as plans have them: its forward finds what the first has
    brought, and what only the first needs is there (frozen weights that stay, memory to decode)."""
    torch.manual_seed(0)
    model, optimizer, books = MODELS[model_name](), None, Books()
    before, headless = dict(sw.ledger.current), model_name == "backbone"
    precision, microbatches, name = case
    mesh = wrap(model, world_size, strategy, precision, options)
    if name == "muon":
        optimizer = sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())
    else:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    rest = books()
    for step in range(2):
        sw.ledger.reset_peak()
        with comm.record() as calls:
            for microbatch in range(microbatches):
                model.set_is_last_backward(microbatch == microbatches - 1)
                batch = tokens(step, microbatch, rank, world_size)
                loss = model(batch).square().mean() if headless else loss_of(model, batch)
                loss.backward()
        loaded = books()
        with comm.record() as exchanged:
            optimizer.step()
        optimizer.zero_grad()
    peak = {kind: n - before.get(kind, 0) for kind, n in sorted(sw.ledger.peak.items())}
    found = {
        "rest": rest,
        "loaded": loaded,
        "peak": {kind: nbytes for kind, nbytes in peak.items() if nbytes},
        "peak_total": sw.ledger.peak_total - sum(before.values()),
        "calls": Counter(calls),
        "exchanged": Counter(exchanged),
        "state": state_bytes(optimizer),
        "coordinate": mesh.get_coordinate(),
    }
    with torch.no_grad():  # waits for what the step has sent: others use the group after this
        model(tokens(0, 0, rank, world_size))
    return found


def state_bytes(optimizer: Any) -> int:
    """The bytes of an optimizer's state on this rank."""
    return sum(
        value.to_local().nbytes
        for entry in optimizer.state.values()
        for name, value in entry.items()
        if name != "step"
    )


Case = tuple[str, int, str]  # (precision, microbatches, optimizer)
CASES: list[Case] = [("fp32", 2, "adamw"), ("bf16", 1, "adamw"), ("bf16 wire", 4, "adamw")]
FEW: list[Case] = [("bf16", 1, "adamw"), ("bf16 wire", 3, "adamw")]
MUON: list[Case] = [("fp32", 2, "muon")]


def check_all(
    rank: int, world_size: int, name: str, strategy: str, cases: Any, options: Any
) -> Any:
    return [measure(rank, world_size, name, strategy, case, options) for case in cases]


def assert_planned(
    world_size: int, model_name: str, strategy: str, cases: list[Case], **options: Any
) -> list[tuple[Plan, list[Facts]]]:
    """Compare every rank with its plan; give the plan of the rank that sends most, and what the
    ranks found, for each case."""
    with torch.device("meta"):
        model = MODELS[model_name]()
    everyone, made = run_ranks(check_all, world_size, model_name, strategy, cases, options), []
    for position, (precision, microbatches, optimizer) in enumerate(cases):
        given: Facts = {"precision": PRECISIONS[precision], "microbatches": microbatches}
        given |= {"optimizer": optimizer, "device": ranks_device(), **options}
        found = [results[position] for results in everyone]
        for own in found:  # they come back as dicts
            own["sent"] = Counter(own["calls"]) + Counter(own["exchanged"])
        shape = mesh_shape(strategy, world_size)
        for rank, own in enumerate(found):
            of_rank = plan(model, shape, strategy, rank=rank, **given)
            for name in FIGURES:
                what = (strategy, precision, rank, name)
                assert own[name] == getattr(of_rank, name), (*what, own[name])
            assert own["state"] == of_rank.optimizer_bytes, (strategy, precision, rank)
            assert not of_rank.check(own["sent"].elements())
        assert any(own["state"] for own in found) and found[0]["rest"]
        made.append((plan(model, shape, strategy, **given), found))
    return made
