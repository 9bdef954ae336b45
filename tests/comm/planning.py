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
# Their first step is not like the others: frozen weights that stay whole are gathered by it alone,
# and the memory for decoded matrices grows in it.
SETTLES = ("half frozen", "born narrow", "blocks of 32", "recomputing")


def mesh_shape(strategy: str, world_size: int) -> dict[str, int]:
    two = strategy in ("hsdp", "hfsdp")
    return {"dp_outer": 2, "dp": world_size // 2} if two else {"dp": world_size}


def facts_of(made: Plan) -> Facts:
    return {
        "rest": made.rest,
        "loaded": made.loaded,
        "peak": made.peak,
        "peak_total": made.peak_total,
        "calls": made.calls,
    }


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
    rank: int,
    world_size: int,
    model_name: str,
    strategy: str,
    precision: str,
    microbatches: int,
    options: Facts,
) -> tuple[list[Facts], int]:
    """Two real steps with AdamW; and the bytes of its state on this rank."""
    torch.manual_seed(0)
    model = MODELS[model_name]()
    books = Books()
    before = dict(sw.ledger.current)
    wrap(model, world_size, strategy, precision, options)
    rest = books()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable)
    headless = model_name == "backbone"
    found = []
    for step in range(2):
        sw.ledger.reset_peak()
        issued: Counter[comm.Call] = Counter()
        for microbatch in range(microbatches):
            model.set_is_last_backward(microbatch == microbatches - 1)
            batch = tokens(step, microbatch, rank, world_size)
            with comm.record() as calls:
                loss = model(batch).square().mean() if headless else loss_of(model, batch)
                loss.backward()
            issued.update(calls)
        peak = {k: n - before.get(k, 0) for k, n in sorted(sw.ledger.peak.items())}
        found.append(
            {
                "rest": rest,
                "loaded": books(),
                "peak": {kind: nbytes for kind, nbytes in peak.items() if nbytes},
                "peak_total": sw.ledger.peak_total - sum(before.values()),
                "calls": issued,
            }
        )
        optimizer.step()
        optimizer.zero_grad()
    state = sum(
        value.to_local().nbytes
        for entry in optimizer.state.values()
        for name, value in entry.items()
        if name != "step"
    )
    return found, state


Case = tuple[str, int]  # (precision, microbatches)
CASES: list[Case] = [("fp32", 2), ("bf16", 1), ("bf16 wire", 4)]
FEW: list[Case] = [("bf16", 1), ("bf16 wire", 3)]


def check_all(
    rank: int, world_size: int, model_name: str, strategy: str, cases: list[Case], options: Facts
) -> list[tuple[str, int, list[Facts], int]]:
    return [
        (
            precision,
            count,
            *measure(rank, world_size, model_name, strategy, precision, count, options),
        )
        for precision, count in cases
    ]


def assert_planned(
    world_size: int, model_name: str, strategy: str, cases: list[Case], **options: Any
) -> None:
    with torch.device("meta"):
        model = MODELS[model_name]()
    everyone = run_ranks(check_all, world_size, model_name, strategy, cases, options)
    compared = 0
    for position, (precision, microbatches, _, _) in enumerate(everyone[0]):
        made = plan(
            model,
            mesh_shape(strategy, world_size),
            strategy,
            precision=PRECISIONS[precision],
            microbatches=microbatches,
            device=ranks_device(),
            **options,
        )
        states = [result[position][3] for result in everyone]
        assert made.optimizer_bytes == states[0] > 0, (precision, states)
        for result in everyone:
            steps = result[position][2][1 if model_name in SETTLES else 0 :]
            for number, step in enumerate(steps):
                what = f"{strategy} {precision}, {microbatches} microbatches, step {number}"
                for name, predicted in facts_of(made).items():
                    assert step[name] == predicted, (what, name, step[name], predicted)
                    compared += 1
    assert compared >= world_size * len(cases) * 5
