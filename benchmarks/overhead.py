# SPDX-License-Identifier: Apache-2.0
"""What wrapping costs beside communication, as rank 0 of 8 on torch's `fake` backend: the
host's time in a wrapped model, less that in the bare model; and on a GPU a whole step of the GPT.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

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
    return {system: {"4": times[system, 4], "8": times[system, 8]} for system in options.systems}


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
    return row


def host_table(options: Options) -> Table:
    result = in_processes(host_worker, 1, "fake", options)
    rows = [host_row(system, figures, result["none"]) for system, figures in result.items()]
    add_ratios(rows, "unit_4", "unit_8")
    note = (
        "8 units of 4 and of 8 parameters, tiny tensors, fp32, one thread; medians, systems in\n"
        "turns. Extra = (wrapped - bare) / 8 for one forward + backward, split into a part per\n"
        "unit and one per parameter. It holds what the fake collectives take themselves (three a\n"
        "unit, some 40 us on CPU), for all alike."
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
    }
    title = f"Host time on {options.device}, rank 0 of 8 (`fake`)" + options.mark
    return Table(title=title, note=note, columns=columns, rows=rows)


def run_fake(options: Options) -> list[Table]:
    if "none" not in options.systems:
        raise ValueError("fake: overhead is measured over the bare model; add none to --systems")
    # DDP's reducer asks a collective for its result, and the fake backend has none.
    options = replace(options, systems=tuple(name for name in options.systems if name != "ddp"))
    tables = [host_table(options)]
    if options.device == "cuda" or options.tiny:
        # The bare GPT is no different as rank 0 of 8, and `gpu` measures it.
        wrapped = tuple(name for name in options.systems if name != "none")
        tables.append(run_gpt(replace(options, systems=wrapped), "fake"))
    return tables
