# SPDX-License-Identifier: Apache-2.0
"""``dry_run``: the real code on meta tensors, as one rank of a large mesh, measured as it runs.

    fake process group   rank 3 of 64, nobody else there; collectives are counted, none is sent
    meta tensors         shapes without bytes; the ledger counts what they would take
    fully_shard          hooks, prefetch, reductions: what a real step runs, in its real order

A plan is arithmetic about that code; a dry run is that code. They must agree to the byte, and the
tests say so. What a dry run knows beyond a plan: whether the model's forward and backward go
through, and in which order its units really come.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import comm
from shardwise.memory import ledger
from shardwise.optim.gradients import set_replica_ranges
from shardwise.placements import Placements
from shardwise.precision import Precision
from shardwise.report.plan import Plan, plan
from shardwise.shard.call import map_tensors
from shardwise.shard.data_parallel import data_parallel
from shardwise.shard.fully_shard import fully_shard
from shardwise.shard.module import unit_of, units_of
from shardwise.shard.runtime import Runtime
from shardwise.shard.unit import Unit
from shardwise.shard.wrapping import GrainChoice, wrap_units
from shardwise.streams import Lanes

TOKENS = (1, 8)  # of the default batch; parameters and their gradients do not depend on it


def dry_run(
    model: nn.Module,
    mesh_shape: Mapping[str, int],
    placements: Placements | str = "zero3",
    *,
    rank: int = 0,
    loss: Callable[[nn.Module], Tensor] | None = None,
    precision: Precision | None = None,
    optimizer: str = "adamw",
    microbatches: int = 1,
    wrap: Sequence[nn.Module] | None = None,
    reshard_after_forward: bool | int | None = None,
    bucket_mb: float | None = None,
    grain: GrainChoice | None = None,
    memory: int | None = None,
    other_bytes: int = 0,
    name: str | None = None,
) -> Plan:
    """As :func:`~shardwise.report.plan.plan`, with the figures of one real step on meta tensors.

    Work is issued as on a CUDA device. The model must be on the meta device, and is wrapped by
    this: build another for real use. The process must have no process group of its own; one is
    made for the time of the run.

    Args:
        rank: which rank of the mesh this process poses as.
        loss: runs forward and returns what ``backward`` starts from; default: the sum of the
            outputs for a batch of token ids.
    """
    made = plan(
        model,
        mesh_shape,
        placements,
        precision=precision,
        optimizer=optimizer,
        microbatches=microbatches,
        wrap=wrap,
        reshard_after_forward=reshard_after_forward,
        bucket_mb=bucket_mb,
        grain=grain,
        memory=memory,
        other_bytes=other_bytes,
        name=name,
        rank=rank,
    )
    _check(model, made, rank)
    modules = list(wrap) if wrap is not None else wrap_units(model)
    modules = [module for module in modules if module is not model] + [model]
    options: dict[str, Any] = {
        "placements": made.options.placements,
        "precision": made.options.precision,
    }
    before = dict(ledger.current)
    with _posing(made, rank) as mesh, _counting_meta():
        with torch.device("meta"):
            if bucket_mb is not None:
                data_parallel(model, mesh=mesh, bucket_mb=bucket_mb, **options)
            for module in modules if bucket_mb is None else ():
                fully_shard(
                    module,
                    mesh=mesh,
                    reshard_after_forward=reshard_after_forward,
                    grain=grain,
                    **options,
                )
        for path, parameter in model.named_parameters():
            set_replica_ranges(parameter, made.turns.get(path))  # as the optimizer would
        units = _start(model)
        rest = _since(before)
        run = partial(_step, model, loss or _sum_of_outputs, microbatches)
        run()  # the first step gathers frozen weights too, and makes buffers
        _update(units)
        ledger.reset_peak()
        timeline: list[tuple[str, str, int]] = []

        def note(kind: str, nbytes: int) -> None:
            if nbytes:
                busy = [unit for unit in units if unit.phase.value != "resting"]
                doing = f"{busy[-1].phase.value} {busy[-1].name}" if busy else "at rest"
                timeline.append((doing, kind, nbytes))

        ledger.watchers.append(note)
        try:
            with comm.record() as calls:
                run()
        finally:
            ledger.watchers.remove(note)
        result = replace(
            made,
            source=f"dry run as rank {rank} of {made.mesh.num_ranks}",
            rest=rest,
            loaded=_since(before),
            peak=_since(before, ledger.peak),
            peak_total=ledger.peak_total - sum(before.values()),
            calls=Counter(calls),
            timeline=tuple(timeline),
        )
        # The model dies with its process group: its buffers must not be counted any longer.
        for unit in units:
            unit.groups.clear()
            unit.places.clear()
            unit.members = None
        return result


def _check(model: nn.Module, made: Plan, rank: int) -> None:
    problems = []
    real = [name for name, value in model.named_parameters() if not value.is_meta]
    if real:
        problems.append(
            f"{len(real)} parameters ('{real[0]}', ...) are not on the meta device: build the "
            f"model under torch.device('meta')"
        )
    if not 0 <= rank < made.mesh.num_ranks:
        problems.append(f"rank {rank} of a mesh of {made.mesh.num_ranks}: name one that exists")
    if made.options.ep > 1:
        problems.append(
            f"experts are spread over ep={made.options.ep}, and rows without values cannot be "
            f"routed: plan without a dry run"
        )
    if dist.is_initialized():
        problems.append("this process has a process group already: run it in one that has none")
    if problems:
        raise ValueError("dry_run: " + "; ".join(problems))


@contextmanager
def _posing(made: Plan, rank: int) -> Iterator[DeviceMesh]:
    """Be one rank of the mesh, alone."""
    # A testing module of torch, and the one way to be a rank of many in one process.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks, excepthook = made.mesh.num_ranks, sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield init_device_mesh("cpu", made.mesh.sizes, mesh_dim_names=made.mesh.names)
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook  # torch's own writes "[rank3]:" before every line of errors


@contextmanager
def _counting_meta() -> Iterator[None]:
    ledger.counts_meta = True
    try:
        yield
    finally:
        ledger.counts_meta = False


class _PretendedLanes(Lanes):
    """A device that does at once whatever it is told: everything is issued as on CUDA."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))
        self.asynchronous = True

    def on(self, lane: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self, lane: str = "compute") -> None:
        return None

    def join(self, lane: str, other: str) -> None: ...

    def synchronize(self, event: Any = None) -> None: ...


def _start(model: nn.Module) -> list[Unit]:
    """What the first forward of a root does, but for values: there are none."""
    units = list(units_of(model))
    names = {
        id(unit): path
        for path, module in model.named_modules()
        for unit in (getattr(module, "_shardwise_unit", None),)
    }
    runtime = Runtime(torch.device("meta"), list(units), (), lanes=_PretendedLanes())
    for unit in units:
        unit.is_root = unit is unit_of(model)
        unit.name = names[id(unit)] or type(model).__name__.removeprefix("FSDP")
        unit.adopt_runtime(runtime)
        for group in unit.groups:
            group.show_whole()
    return units


def _step(model: nn.Module, loss: Callable[[nn.Module], Tensor], microbatches: int) -> None:
    for number in range(microbatches):
        model.set_is_last_backward(number == microbatches - 1)  # type: ignore[operator]
        with torch.device("meta"):
            value = loss(model)
        value.backward()  # type: ignore[no-untyped-call]


def _update(units: Sequence[Unit]) -> None:
    """What an optimizer does, as far as buffers can tell: it writes what has gradients."""
    for unit in units:
        for group in unit.groups:
            if group.trainable:
                group.main.version.count += 1
            for parameter in group.sharded:
                parameter.grad = None
            group.gradients.tidy()


def _since(before: Mapping[str, int], now: Mapping[str, int] | None = None) -> dict[str, int]:
    """Bytes by kind beyond what other models of this process hold."""
    held = {kind: n - before.get(kind, 0) for kind, n in (now or ledger.current).items()}
    return {kind: nbytes for kind, nbytes in sorted(held.items()) if nbytes}


def _sum_of_outputs(model: nn.Module) -> Tensor:
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(collect, model(torch.zeros(TOKENS, dtype=torch.int64)))
    if not found:
        raise ValueError(
            f"{type(model).__name__} gave no output that needs a gradient for token ids of shape "
            f"{TOKENS}: pass loss, a function of the model"
        )
    return sum((tensor.float().sum() for tensor in found[1:]), found[0].float().sum())
