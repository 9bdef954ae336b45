# SPDX-License-Identifier: Apache-2.0
"""Training runs that are compared by their bits.

A ``Run`` says how a model is trained. ``bits`` trains it on its ranks, once in a process of tests,
and returns what it ended with; ``facts`` returns what each rank saw on the way:

    Run("zero3", 3)   ranks 0, 1, 2   --\\
    Run("plain", 3)   one process     ---->  losses, norms, weights, optimizer states: the same bits

The oracle is ``plain``: torch in one process, nothing sharded. Its gradients are those of all
ranks, added up in the order of ranks, as our messages do on a CPU.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

import shardwise as sw
from shardwise.kernels import newton_schulz
from shardwise.optim.functions import ANY
from shardwise.shard.module import units_of
from tests import models
from tests.models import loss_of, make_model, mesh_for, mesh_of, shard_model, tokens
from tests.parity import mxfp8_helpers as fp8
from tests.parity.helpers import every_two_axis_placements
from tests.parity.programs import CHANGES, CONTEXTS, PROGRAMS
from tests.ranks import run_ranks
from tests.whole import whole_state

R, P, S = sw.Replicate(), sw.Partial(), sw.Shard()
UNNAMED = [one for one in every_two_axis_placements() if one not in models.STRATEGIES.values()]
STRATEGIES = models.STRATEGIES | {f"two axes {n}": one for n, one in enumerate(UNNAMED)}
STRATEGIES |= {
    "three axes": sw.Placements(compute=[R, R, S], grad=[P, P, S], main=[R, S, S]),
    "two of replicas": sw.Placements(compute=[R, R, S], grad=[P, P, S], main=[R, R, S]),
}
PRECISIONS = models.PRECISIONS | {"bf16 wire": sw.Precision(weights="bf16", reduce="bf16")}
NAMED = list(models.STRATEGIES)
CODED = ("mxfp8", "native", "fp8_block")
SPLITS = {
    "layers.0.up.weight": sw.Split.stacked(7, 13, 10),
    "layers.1.up.weight": sw.Split.interleaved(3),
    "layers.*.down.weight": sw.Split.heads(3, dim=1),
}
MATRICES = 3 + 3 + 2 * 3  # what falls out of them
SETTINGS = {
    "layers.*": {"lr_scale": 0.5},
    "layers.0.up.weight": {"lr_scale": 0.25, "momentum": 0.5, "scale": "unit_rms_norm"},
    "*bias": {"weight_decay": 0.0, "lr": 3e-3, "lr_scale": 2.0},
}
MUON = {
    "": {},
    "heavy ball": {"nesterov": False},
    "cautious": {"decay": "cautious", "scale": "match_rms_adamw"},
    "polar express": {"preset": "polar_express", "scale": "max_side"},
}
DEFAULTS: dict[str, Any] = {
    "data": "one",  # "one": rank 0 has all of it; "own": each rank its part; "pairs": of two
    # ranks; "lost": all have that of the last rank
    "steps": 3,
    "microbatches": 1,
    "rounds": 1,  # of microbatches, each reduced, before a step
    "lost_step": False,
    "keep_grads": False,
    "unsynced": False,  # microbatches by set_requires_gradient_sync
    "evaluate": False,
    "factor": None,  # what gradients are divided by
    "force_sum": False,
    "muon": "",
    "settings": False,  # by name pattern
    "depth": 2,
    "width": None,
    "mesh": None,
    "change": None,  # of the wrapped model
    "program": None,  # instead of the loop of steps
    "under": (),  # contexts of all of it
    "into": None,  # after half of the steps: saved, and loaded under this strategy
    "inside": False,  # recomputation, within layers and around them
    "outside": False,
}
POWER = 4.0  # of two: reductions of "one" round nothing, so gradients are the same in every world


@dataclass(frozen=True)
class Run:
    """How a model is trained; ``more``: what differs from DEFAULTS, and options of the wrapper."""

    strategy: str
    ranks: int
    optimizer: str
    format: str
    more: tuple[tuple[str, Any], ...]

    def __getattr__(self, name: str) -> Any:
        if name not in DEFAULTS:
            raise AttributeError(name)
        return dict(self.more).get(name, DEFAULTS[name])

    def but(self, strategy: str | None = None, ranks: int | None = None, **changes: Any) -> Run:
        of = {"optimizer": self.optimizer, "format": self.format} | dict(self.more) | changes
        return run(strategy or self.strategy, ranks or self.ranks, **of)

    def __str__(self) -> str:
        more = (f"{name}={value}" for name, value in self.more)
        return " ".join([self.strategy, str(self.ranks), self.optimizer, self.format, *more])

    @property
    def on(self) -> bool:
        """Weights are stored in fp8; under "at use" bf16 is gathered, and encoded by each use."""
        return self.format in CODED and "at use" not in self.under


def run(
    strategy: str, ranks: int = 2, optimizer: str = "muon", format: str = "fp32", **more: Any
) -> Run:
    kept = {name: value for name, value in more.items() if value != DEFAULTS.get(name, ...)}
    return Run(strategy, ranks, optimizer, format, tuple(sorted(kept.items())))


def bits(run: Run) -> dict[str, Tensor]:
    """Losses, norms, weights and states, whole; every rank must end with the same."""
    return _outcome(run)[0]


def facts(run: Run) -> list[dict[str, Any]]:
    """By rank: what it sent, stored and computed."""
    return _outcome(run)[1]


@cache
def _outcome(run: Run) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    found = run_ranks(execute, 1 if run.strategy == "plain" else run.ranks, run)
    values: dict[str, Tensor] = {}
    for mine, _ in found:
        for name, value in mine.items():
            assert torch.equal(value, values.setdefault(name, value)), f"ranks differ: {name}"
    return values, [seen for _, seen in found]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: object = "") -> None:
    assert found and found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())[:6]
    wrong = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    assert not wrong, f"{what}: {len(wrong)} of {len(found)} differ, first {wrong[:4]}"


def assert_pair(one: Run, expected: Run) -> None:
    """Of a run that was saved half way, what came after the load."""
    ends, wanted = bits(one), bits(expected)
    if one.into:
        wanted = {name: value for name, value in wanted.items() if name in ends}
    assert_same(ends, wanted, expected)


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], near: float = 1e-5) -> None:
    assert found and found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=near, msg=name.__add__)


# ------------------------------------------------------------------------------ on a rank


def execute(rank: int, world_size: int, run: Run) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with ExitStack() as stack:
        for name in run.under:
            stack.enter_context(CONTEXTS[name]())
        if run.format == "native":
            stack.enter_context(fp8.native_by_decoding())
        calls = stack.enter_context(sw.comm.record())
        products = stack.enter_context(counted_products())
        model, optimizer = build(run, run.strategy)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        seen: dict[str, Tensor] = {}
        half = run.steps // 2 if run.into else run.steps
        if run.program is not None:
            optimizer = PROGRAMS[run.program](model, optimizer, rank, optimizer_of) or optimizer
        else:
            train(model, optimizer, run, rank, range(half), seen)
        if run.into:
            seen = {}
            with shared_folder(rank) as path:
                sw.save(path, model, optimizer)
                model, optimizer = build(run, run.into, seed=5)
                train(model, optimizer, run, rank, range(7, 8), {})  # nothing of it may survive
                sw.load(path, model, optimizer)
            again = optimizer_of(model, run)
            again.load_state_dict(optimizer.state_dict())
            train(model, again, run, rank, range(half, run.steps), seen)
            optimizer = again
        for new, old in zip(model.parameters(), before, strict=True):
            same = not run.into and new.requires_grad and torch.equal(local(new), local(old))
            assert not same or not local(new).numel(), "a weight has not changed"
        found = {} if run.strategy == "plain" else facts_of(run, model, optimizer, calls)
        return seen | whole_state(model, optimizer), found | {"products": sum(products)}


def local(parameter: Tensor) -> Tensor:
    return getattr(parameter, "to_local", lambda: parameter)().detach()  # type: ignore[no-any-return]


def build(run: Run, strategy: str, seed: int = 0) -> tuple[Any, Any]:
    """The model, wrapped, and its optimizer."""
    model: Any
    if run.format in CODED:
        width = {} if run.width is None else {"width": run.width}
        model = fp8.make(run.on, run.format, inside=run.inside, outside=run.outside, **width)
        if seed:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
        precision = fp8.precision_of(True, run.format)
    else:
        model, precision = make_model(run.width or 10, run.depth, seed), PRECISIONS[run.format]
        split = {} if run.width else {"split": SPLITS}
        sw.route(model, settings=SETTINGS if run.settings else None, **split)
    if strategy != "plain":
        wrap(model, run, strategy, precision)
    if run.change:
        CHANGES[run.change](model)
    return model, optimizer_of(model, run)


def wrap(model: Any, run: Run, strategy: str, precision: Any) -> None:
    """``buckets zero1``: by data_parallel, over the placements of zero1."""
    placements = STRATEGIES[strategy.removeprefix("buckets ")]
    mesh = mesh_of(*run.mesh) if run.mesh and not run.into else mesh_for(placements, run.ranks)
    options = {name: value for name, value in run.more if name not in DEFAULTS}
    if options.pop("offload", False):
        options["offload_policy"] = CPUOffloadPolicy()
    if grain := options.get("grain"):
        options["grain"] = lambda *_: grain
    options |= {"mesh": mesh, "placements": placements, "precision": precision}
    if strategy.startswith("buckets"):
        sw.data_parallel(model, **{"bucket_mb": 0.003} | options)
    else:
        shard_model(model, **options)
    buckets = strategy.startswith("buckets")
    for unit in (model,) if buckets else (model, *model.layers):
        if (factor := POWER if run.data == "one" else run.factor) is not None:
            unit.set_gradient_divide_factor(factor)
        if run.force_sum:
            unit.set_force_sum_reduction_for_comms(True)


def optimizer_of(model: nn.Module, run: Run | None = None) -> Any:
    name = run.optimizer if run else "muon"
    if name in ("adamw", "sgd"):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if name == "sgd":
            return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    rates: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
    matrix = {
        "elementwise": lambda: None,
        "muon": lambda: sw.muon(**rates, **MUON[run.muon if run else ""]),
        "normuon": lambda: ANY["normuon"](**rates),
        "soap": lambda: ANY["soap"](**rates, frequency=2),
    }[name]()
    return sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=1e-2, weight_decay=0.1))


def train(
    model: Any, optimizer: Any, run: Run, rank: int, steps: range, seen: dict[str, Tensor]
) -> None:
    """Losses by step, microbatch and rank; norms by step."""
    ours = hasattr(optimizer, "clip_grad_norm")
    for step in steps:
        for _ in range(run.rounds):
            (one_process if run.strategy == "plain" else backward)(model, run, rank, step, seen)
        if ours:
            seen[f"norm {step}"] = optimizer.clip_grad_norm(0.5)
        if not run.lost_step or step < run.steps - 1:
            optimizer.step()
        optimizer.zero_grad(set_to_none=not run.keep_grads)
        if run.evaluate:
            with torch.no_grad():
                seen[f"evaluation {step}"] = model(tokens(step, 77))


def backward(model: Any, run: Run, rank: int, step: int, seen: dict[str, Tensor]) -> None:
    world_size = run.ranks
    at, of = {
        "own": (rank, world_size),
        "pairs": (rank * 2 // world_size, 2),
        "lost": (world_size - 1, world_size),
        "one": (0, 1),
    }[run.data]
    for microbatch in range(run.microbatches):
        last = microbatch == run.microbatches - 1
        (model.set_requires_gradient_sync if run.unsynced else model.set_is_last_backward)(last)
        loss = loss_of(model, tokens(step, microbatch, at, of)) / run.microbatches
        if run.data != "one" or rank == 0:
            seen[f"loss {step}.{microbatch} {at}"] = loss.detach()
        (loss * (POWER if rank == 0 else 0.0) if run.data == "one" else loss).backward()
        if run.unsynced and not last:
            assert all(parameter.grad is None for parameter in model.parameters()), "not yet"


def one_process(model: Any, run: Run, rank: int, step: int, seen: dict[str, Tensor]) -> None:
    """The gradients of all ranks, added up in their order and divided once."""
    ranks = 1 if run.data == "one" else run.ranks
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = [parameter.grad for parameter in trained]
    total: list[Tensor] = []
    for at in range(ranks):
        model.zero_grad()
        for microbatch in range(run.microbatches):
            loss = loss_of(model, tokens(step, microbatch, at, ranks)) / run.microbatches
            seen[f"loss {step}.{microbatch} {at}"] = loss.detach()
            loss.backward()
        grads = [parameter.grad for parameter in trained]
        total = [a + b for a, b in zip(total, grads, strict=True)] if total else grads
    for parameter, one, before in zip(trained, total, kept, strict=True):
        one = one / (run.factor or ranks)
        parameter.grad = one if before is None or not before.any() else before + one


@contextmanager
def shared_folder(rank: int) -> Iterator[str]:
    folder = [tempfile.mkdtemp()] if rank == 0 else [None]
    dist.broadcast_object_list(folder)
    yield f"{folder[0]}/saved"
    dist.barrier()
    if rank == 0:
        shutil.rmtree(str(folder[0]))


@contextmanager
def counted_products() -> Iterator[list[int]]:
    """How many matrices each call of Newton-Schulz has orthogonalised here."""
    original, counted = newton_schulz.orthogonalise, list[int]()

    def counting(batch: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        counted.append(len(batch))
        return original(batch, *args, **kwargs)

    newton_schulz.orthogonalise = counting  # type: ignore[assignment]
    try:
        yield counted
    finally:
        newton_schulz.orthogonalise = original


def facts_of(run: Run, model: Any, optimizer: Any, calls: list[Any]) -> dict[str, Any]:
    groups = [group for unit in units_of(model) for group in unit.groups]
    exchanges = [group.exchange for group in getattr(optimizer, "_matrix_groups", [])]
    legs = [one.to_owners for exchange in exchanges for one in exchange.rounds]
    momenta = [state.get("momentum_buffer", torch.empty(0)) for state in optimizer.state.values()]
    found = {
        "held": [local(parameter).numel() for parameter in model.parameters()],
        "calls": [(call.operation, call.axis, call.nbytes) for call in calls],
        "rounds": [len(exchange.rounds) for exchange in exchanges],
        "pieces sent": sum(sum(leg.send_sizes) for leg in legs),
        "buckets": [[(item.name, str(item.grain)) for item in group.items] for group in groups],
        "dtypes": {str(group.whole.dtype) for group in groups if group.whole and not group.format},
        "momenta": sum(local(momentum).numel() for momentum in momenta),
    }
    if run.on:
        planes = fp8.planes_seen(model)
        assert_same(planes, fp8.expected_planes(model, run.format), "codes and scales")  # type: ignore[arg-type]
        report = sw.precision_report(model)
        found |= {
            "stored": set(report.stored),
            "report": str(report),
            "staged": fp8.staged_weights(model),
            "planes": {name: tuple(value.shape) for name, value in planes.items()},
        }
    return found
