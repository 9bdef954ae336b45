# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.muon_speed``: variants of Muon's step side by side, on one GPU.

One process and one model for all variants: their optimizers take turns, a few steps each, so that a
chip that grows warm slows all alike.

    alone       one matrix, or a few: the kernels and cuBLAS, with the host ahead and not ahead
    one rank    whole steps of the 0.96B GPT under zero(3)
    rank 0 of 8 the same, on torch's ``fake`` backend: copies and launches are real, nothing travels
                (what an all-to-all receives is what it sends, as often as that fits)
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import report
from benchmarks.fp8_steps import device_use
from benchmarks.measure import GIB, StepClock
from benchmarks.models import GPTConfig, gpt_and_tokens, token_loss
from benchmarks.muon_kernels import milliseconds
from benchmarks.systems import BF16_COMPUTE, wrap_zero
from benchmarks.workers import FAKE_RANKS, Options, in_processes

ALONE = [(1, 2048, 2048), (2, 2048, 2048), (4, 2048, 2048), (1, 5632, 2048), (3, 5632, 2048)]
# By name: options of sw.muon; None: AdamW for all.
VARIANTS: dict[str, dict[str, Any] | None] = {
    "AdamW": None,
    "Muon": {},
    "Muon, polar_express": {"preset": "polar_express"},
}
TURNS, STEPS = 4, 4  # the first step of a turn is not counted


def optimizer_of(model: torch.nn.Module, options: dict[str, Any] | None) -> Any:
    import shardwise as sw

    matrix = None if options is None else sw.muon(lr=1e-4, **options)
    return sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=1e-5))


def sends_to_itself(out: torch.Tensor, source: torch.Tensor, *_: Any, **__: Any) -> None:
    """In place of ``dist.all_to_all_single``, whose fake leaves ``out`` as it was: values that no
    gradient has would take Newton-Schulz other ways."""
    for part in out.split(len(source)) if len(source) else ():
        part.copy_(source[: len(part)])


def worker(rank: int, options: Options, mesh: DeviceMesh) -> dict[str, Any]:
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    if dist.get_backend() == "fake":
        dist.all_to_all_single = sends_to_itself
    config = GPTConfig.tiny() if options.tiny else GPTConfig()
    bare, inputs, targets = gpt_and_tokens(config, device)
    model = wrap_zero(bare, mesh, BF16_COMPUTE, stage=3)
    optimizers = {name: optimizer_of(model, VARIANTS[name]) for name in options.systems}
    rows = {name: {"parts": [], "host": [], "memory": []} for name in optimizers}
    for _ in range(TURNS):
        for name, made in optimizers.items():
            clock = StepClock(device)
            for number in range(STEPS):
                clock.start()
                loss = token_loss(model(inputs), targets)
                clock.mark()
                loss.backward()
                del loss
                clock.mark()
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                    held = torch.cuda.memory_allocated()
                begin = time.perf_counter()
                made.step()
                if number:
                    rows[name]["host"].append(1e3 * (time.perf_counter() - begin))
                if cuda:
                    rows[name]["memory"].append(torch.cuda.max_memory_allocated() - held)
                clock.mark()
                made.zero_grad()
            rows[name]["parts"] += clock.intervals()[1:]
    for name, made in optimizers.items():
        if options.profile and cuda:
            token_loss(model(inputs), targets).backward()
            rows[name]["use"] = device_use(made.step)  # type: ignore[assignment]
            made.zero_grad()
        groups = made._matrix_groups or ()
        rows[name]["rounds"] = sum(len(group.exchange.rounds) for group in groups)  # type: ignore[assignment]
        states = [v for p in model.parameters() for v in made.state[p].values()]
        local = [getattr(v, "_local_tensor", v) for v in states]
        rows[name]["state"] = sum(v.nbytes for v in local)  # type: ignore[assignment]
    return rows


COLUMNS = {
    "case": ("variant", "s"),
    "step": ("step ms", ".2f"),
    "ratio": ("x AdamW", ".3f"),
    "optimizer": ("optimizer ms", ".2f"),
    "spread": ("spread %", ".1f"),
    "host": ("host ms", ".2f"),
    "state": ("state GiB", ".3f"),
    "memory": ("step GiB", ".3f"),
    "rounds": ("rounds", "d"),
}


def steps(backend: str, variants: Sequence[str], options: Options) -> report.Table:
    chosen = replace(options, systems=tuple(variants))
    found = in_processes(worker, 1, backend, chosen)
    rows: list[report.Row] = []
    for name, one in found.items():
        for row in [one["use"], *one["use"].pop("kernels")] if "use" in one else ():
            print(name, row, flush=True)
        whole = [sum(parts) for parts in one["parts"]]
        step = statistics.median(whole)
        rows.append(
            {
                "case": name,
                "step": step,
                "ratio": step / float(rows[0]["step"] if rows else step),  # type: ignore[arg-type]
                "optimizer": statistics.median(parts[-1] for parts in one["parts"]),
                "spread": 100 * (max(whole) - min(whole)) / step,
                "host": statistics.median(one["host"]),
                "state": one["state"] / GIB,
                "memory": max(one["memory"], default=0) / GIB,
                "rounds": one["rounds"],
            }
        )
    where = f"rank 0 of {FAKE_RANKS} (`fake`)" if backend == "fake" else f"1 {backend} rank"
    note = (
        f"0.96B GPT, zero(3), bf16 compute. {TURNS} turns of {STEPS} steps, the first of each not "
        f"counted; medians.\nHost: the time in which the host issues the step. Step GiB: memory "
        f"that the step takes for a while."
    )
    return report.Table(
        title=f"Steps, {where}" + options.mark, note=note, columns=COLUMNS, rows=rows
    )


def busy(function: Callable[[], object]) -> float:
    """Milliseconds on the device while the host is ahead of it; median of 9."""
    if not torch.cuda.is_available():
        return milliseconds(function)
    times = []
    for _ in range(9):
        torch.cuda._sleep(20_000_000)  # about 10 ms, in which the host issues the rest
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def alone(tiny: bool) -> report.Table:
    """The default polynomial by our kernels, and by cuBLAS (fp16 gram or bf16 direct)."""
    from shardwise.kernels.newton_schulz import iterate, orthogonalise
    from shardwise.optim.presets import DEFAULT, PRESETS, choose_form

    polynomial = PRESETS[DEFAULT]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[report.Row] = []
    for count, height, width in [(1, 48, 32)] if tiny else ALONE:
        batch = torch.randn(count, height, width, device=device)
        form = choose_form(height, width, polynomial)
        dtype = torch.float16 if form == "gram" else torch.bfloat16

        def ours(batch: torch.Tensor = batch) -> object:
            return orthogonalise(batch, polynomial)

        def theirs(
            batch: torch.Tensor = batch, form: Any = form, dtype: torch.dtype = dtype
        ) -> object:
            return iterate(batch, polynomial, form, dtype)

        row: report.Row = {"batch": f"{count} x ({height}, {width})"}
        for name, function in (("ours", ours), ("cublas", theirs)):
            row[name] = milliseconds(function)
            row[f"{name}_busy"] = busy(function)
        error = ours().float() - theirs().float()  # type: ignore[attr-defined]
        row["apart"] = float(error.norm() / ours().float().norm())  # type: ignore[attr-defined]
        rows.append(row)
    columns = {
        "batch": ("batch", ""),
        "ours": ("kernels ms", ".2f"),
        "ours_busy": ("host ahead", ".2f"),
        "cublas": ("cuBLAS ms", ".2f"),
        "cublas_busy": ("host ahead", ".2f"),
        "apart": ("apart", ".4f"),
    }
    note = f"{DEFAULT}, from fp32 to the orthogonal matrix. Host ahead: the device never waits."
    return report.Table(title="Few matrices", note=note, columns=columns, rows=rows)


PARTS: dict[str, Callable[[Sequence[str], Options], report.Table]] = {
    "alone": lambda variants, options: alone(options.tiny),
    "one": lambda variants, options: steps(
        "nccl" if options.device == "cuda" else "gloo", variants, options
    ),
    "eight": lambda variants, options: steps("fake", variants, options),
}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.muon_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    add("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    add("--tiny", action="store_true", help="dry run at toy size; no figure means much")
    add("--profile", action="store_true", help="print kernels, and host time from an idle device")
    add("--name", default="muon-speed")
    add("--results", type=Path, default=report.RESULTS)
    options = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    if not cuda and not options.tiny:
        parser.error("needs a GPU: add --tiny for a dry run on the CPU")
    facts = report.circumstances(arguments)
    facts["command"] = "python -m benchmarks.muon_speed " + shlex.join(arguments)
    device = "cuda" if cuda else "cpu"
    given = Options(device=device, systems=(), rounds=1, tiny=options.tiny, profile=options.profile)
    tables: list[report.Table] = []
    for part in options.parts:  # written after each: a later one that fails loses nothing
        tables.append(PARTS[part](options.variants, given))
        gpu = torch.cuda.get_device_name().lower().split() if cuda else ["cpu"]
        name = "-".join([options.name, *gpu, *(["tiny"] if options.tiny else [])])
        paths = report.write(tables, facts, name, options.results)
    print(paths[0].read_text())
    print("written:", *paths)


if __name__ == "__main__":
    main(sys.argv[1:])
