# SPDX-License-Identifier: Apache-2.0
"""What wrapping costs beside communication, as rank 0 of 8 on torch's `fake` backend.

Host time and operators are the wrapped model's less the bare model's. Transient memory is the peak
over what lies at rest, in units B of the largest unit's unsharded bytes:

    allocated
      |        ___      ____            ___      ____
      |     __|   |____|    |        __|   |____|    |    <- peak - at rest = transient
      | ___|                |_______|                |__  <- at rest: shards (+ sharded grads)
      +----forward---backward-------forward---backward-->
           first microbatch         second: its grads are all at rest already
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.measure import OperatorCounter, local_bytes, memory_meter, unit_bytes
from benchmarks.models import MLP, vector_loss
from benchmarks.report import Row, Table, add_ratios
from benchmarks.steps import run_gpt
from benchmarks.systems import FULL_PRECISION, SYSTEMS
from benchmarks.workers import Options, in_processes

NUM_UNITS = 8
WARMUPS = 3


class Trainer:
    """One wrapped MLP and an optimizer without state, in the two halves that are measured."""

    def __init__(
        self, system: str, mesh: DeviceMesh, device: torch.device, *, width: int, num_pairs: int
    ) -> None:
        torch.manual_seed(0)
        with device:
            bare = MLP(width, NUM_UNITS, num_pairs)
            self.batch = torch.randn(4, width)
        self.unit_bytes = unit_bytes(bare.blocks)
        self.model = SYSTEMS[system](bare, mesh, FULL_PRECISION)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def forward(self) -> Tensor:
        return vector_loss(self.model(self.batch), self.batch)

    def update(self) -> None:
        """Between measurements: new weights, so that nothing can be kept from step to step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.forward().backward()
        self.update()


def host_worker(rank: int, options: Options, mesh: DeviceMesh) -> dict[str, Any]:
    """Forward + backward of tiny tensors, host clock only, systems and sizes in turns."""
    device = torch.device(options.device)
    trainers = {
        (system, 4 * num_pairs): Trainer(system, mesh, device, width=16, num_pairs=num_pairs)
        for num_pairs in (1, 2)
        for system in options.systems
    }
    times: dict[tuple[str, int], list[float]] = {key: [] for key in trainers}
    for turn in range(WARMUPS + 5 * options.rounds):
        for key, trainer in trainers.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            trainer.forward().backward()
            if turn >= WARMUPS:
                times[key].append(1e6 * (time.perf_counter() - started))
            trainer.update()
    operators = {}
    for system in options.systems:
        with OperatorCounter() as counter:
            trainers[system, 4].forward().backward()
        operators[system] = counter.counts
    return {
        system: {"4": times[system, 4], "8": times[system, 8], "operators": operators[system]}
        for system in options.systems
    }


def host_row(system: str, figures: dict[str, Any], bare: dict[str, Any]) -> Row:
    """Differences are taken within a turn before the median, so that a busy spell cancels out."""
    row: Row = {"system": system}
    row |= {f"pass_{size}": statistics.median(figures[size]) for size in ("4", "8")}
    if figures is bare:
        return row
    extra = {
        size: [
            (mine - base) / NUM_UNITS for mine, base in zip(figures[size], bare[size], strict=True)
        ]
        for size in ("4", "8")
    }
    per_parameter = statistics.median(
        (eight - four) / 4 for four, eight in zip(extra["4"], extra["8"], strict=True)
    )
    row |= {f"unit_{size}": statistics.median(extra[size]) for size in ("4", "8")}
    row |= {
        "per_parameter": per_parameter,
        "per_unit": statistics.median(extra["4"]) - 4 * per_parameter,
    }
    operators = Counter(figures["operators"])
    operators.subtract(bare["operators"])
    row |= {
        "operators": sum(operators.values()) / NUM_UNITS,
        "aten": operators["aten"] / NUM_UNITS,
        "markers": operators["profiler"] / NUM_UNITS,
    }
    return row


def host_table(options: Options) -> Table:
    result = in_processes(host_worker, 1, "fake", options)
    rows = [host_row(system, figures, result["none"]) for system, figures in result.items()]
    add_ratios(rows, "unit_4", "unit_8", "operators")
    note = (
        "8 units of 4 and of 8 parameters, tiny tensors, fp32, one thread; medians, systems in\n"
        "turns. Extra = (wrapped - bare) / 8 for one forward + backward, split into a part per\n"
        "unit and one per parameter. It holds what the fake collectives take themselves (three a\n"
        "unit, some 40 us on CPU), for all alike. Operators: what reaches the dispatcher for a\n"
        "4-parameter unit, where a system's own operator counts as one however much it does\n"
        "inside; profiler markers (`record_function`) are among them and shown apart."
    )
    columns = {
        "system": ("system", "s"),
        "pass_4": ("pass us, 8x4", ".0f"),
        "unit_4": ("extra/unit us", ".0f"),
        "unit_4_ratio": ("x FSDP2", ".2f"),
        "pass_8": ("pass us, 8x8", ".0f"),
        "unit_8": ("extra/unit us", ".0f"),
        "unit_8_ratio": ("x FSDP2", ".2f"),
        "per_unit": ("= per unit", ".0f"),
        "per_parameter": ("+ per parameter", ".1f"),
        "operators": ("extra ops/unit", ".1f"),
        "operators_ratio": ("x FSDP2", ".2f"),
        "aten": ("aten", ".1f"),
        "markers": ("markers", ".1f"),
    }
    title = f"Host time on {options.device}, rank 0 of 8 (`fake`)" + options.mark
    return Table(title=title, note=note, columns=columns, rows=rows)


def memory_width(options: Options) -> int:
    """On CUDA units are large beside cuBLAS's workspaces, which the allocator hands out too."""
    return 64 if options.tiny else 4096 if options.device == "cuda" else 512


def memory_worker(rank: int, options: Options, mesh: DeviceMesh) -> dict[str, float]:
    """Peaks of a steady step in units B, with fresh grads and with grads already at rest."""
    (system,) = options.systems
    device = torch.device(options.device)
    with memory_meter(device) as meter:
        trainer = Trainer(system, mesh, device, width=memory_width(options), num_pairs=1)
        for _ in range(WARMUPS):
            trainer.step()
        gc.collect()
        for microbatch in ("first", "second"):
            with meter.phase(f"{microbatch} forward"):
                loss = trainer.forward()
            with meter.phase(f"{microbatch} backward"):
                loss.backward()
            del loss
        grads = sum(local_bytes(parameter.grad) for parameter in trainer.model.parameters())
        rest = sum(local_bytes(parameter) for parameter in trainer.model.parameters())
    phases, unit = meter.phases, trainer.unit_bytes
    rest_with_grads = phases["second forward"].start
    return {
        "rest": rest / unit,
        "held": (phases["first forward"].start - rest) / unit,
        "grads": grads / unit,
        "left_over": (phases["first backward"].end - rest - grads) / unit,
        "forward": (phases["first forward"].peak - rest) / unit,
        "backward": (phases["first backward"].peak - rest - grads) / unit,
        "accumulating": (phases["second backward"].peak - rest_with_grads) / unit,
    }


def memory_table(options: Options) -> Table:
    rows: list[Row] = [
        {"system": system}
        | in_processes(memory_worker, 1, "fake", replace(options, systems=(system,)))
        for system in options.systems
    ]
    add_ratios(rows, "forward", "backward", "accumulating")
    width = memory_width(options)
    note = (
        f"8 blocks {width} -> {4 * width} -> {width}, 4 rows a batch, fp32. B, the unsharded\n"
        f"bytes of a unit, is {8 * width**2 * 4 / 1e6:.1f} MB. Transient = peak less what is at\n"
        "rest: shards in forward, shards and all sharded grads in backward. *Accumulating*: a\n"
        "second microbatch, whose grads lie at rest before it begins, so that nothing is\n"
        "subtracted which was not yet there: the backward figure to compare. *Held before\n"
        "forward*: what a system still holds of dropped grads, inputs and workspaces when a\n"
        "forward begins; it counts into the peak of forward."
    )
    columns = {
        "system": ("system", "s"),
        "rest": ("at rest B", ".2f"),
        "held": ("+ held before forward B", ".2f"),
        "grads": ("grads B", ".2f"),
        "forward": ("forward B", ".2f"),
        "forward_ratio": ("x FSDP2", ".2f"),
        "backward": ("backward B", ".2f"),
        "backward_ratio": ("x FSDP2", ".2f"),
        "accumulating": ("accumulating B", ".2f"),
        "accumulating_ratio": ("x FSDP2", ".2f"),
        "left_over": ("left after backward B", ".2f"),
    }
    title = f"Transient memory on {options.device}, rank 0 of 8 (`fake`)" + options.mark
    return Table(title=title, note=note, columns=columns, rows=rows)


def run_fake(options: Options) -> list[Table]:
    if "none" not in options.systems:
        raise ValueError("fake: overhead is measured over the bare model; add none to --systems")
    # DDP's reducer asks a collective for its result, and the fake backend has none.
    options = replace(options, systems=tuple(name for name in options.systems if name != "ddp"))
    tables = [host_table(options), memory_table(options)]
    if options.device == "cuda" or options.tiny:
        # The bare GPT is no different as rank 0 of 8, and `gpu` measures it.
        wrapped = tuple(name for name in options.systems if name != "none")
        tables.append(run_gpt(replace(options, systems=wrapped), "fake"))
    return tables
