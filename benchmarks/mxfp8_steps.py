# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of the 0.96B GPT with bf16 and with MXFP8 weights, and what they gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.measure import GIB, StepClock, step_row
from benchmarks.models import GPT, GPTConfig, gpt_and_tokens, token_loss
from benchmarks.report import Row, Table
from benchmarks.workers import FAKE_RANKS, Options, in_processes

WARMUPS, STEPS = 3, 10


@dataclass(frozen=True, kw_only=True)
class Case:
    """How the GPT's weights are stored, and where."""

    weights: str
    stage: int = 3

    @property
    def title(self) -> str:
        return f"{self.weights}, zero({self.stage})"

    @property
    def precision(self) -> Any:
        import shardwise as sw

        return sw.Precision(weights=self.weights, reduce="fp32")


BF16, MXFP8, BLOCK = (Case(weights=weights) for weights in ("bf16", "mxfp8", "fp8_block"))
BF16_ZERO1, MXFP8_ZERO1 = (replace(case, stage=1) for case in (BF16, MXFP8))
CASES = {case.title: case for case in (BF16, MXFP8, BLOCK, BF16_ZERO1, MXFP8_ZERO1)}


def optimizer_of(model: nn.Module) -> Callable[[], None]:
    import shardwise as sw

    made = sw.optimizer(model, matrix=sw.muon(lr=1e-3), elementwise=sw.adamw(lr=1e-4))
    return lambda: (made.step(), made.zero_grad())[1]


@torch.no_grad()
def rewrite(model: nn.Module) -> None:
    """Where ranks are pretended no gradient is worth following: the same values, written anew."""
    for parameter in model.parameters():
        parameter.mul_(1.0)
        parameter.grad = None


def worker(rank: int, options: Options, mesh: DeviceMesh) -> dict[str, Any]:
    """One case alone in its process. The clock never makes the host wait for the device."""
    import shardwise as sw

    (title,) = options.systems
    case = CASES[title]
    device = torch.device(options.device)
    config = GPTConfig.tiny() if options.tiny else GPTConfig()
    model, inputs, targets = gpt_and_tokens(config, device)
    wrap = partial(sw.fully_shard, mesh=mesh, placements=sw.zero(case.stage))
    for module in (*model.blocks, model):
        wrap(module, precision=case.precision)
    update = optimizer_of(model) if mesh.size() == 1 else partial(rewrite, model)
    clock = StepClock(device)
    sent: dict[str, int] = {}
    for index in range(WARMUPS + STEPS):
        if index == WARMUPS and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        clock.start()
        with sw.comm.record() as forward:
            loss = token_loss(model(inputs), targets)
        clock.mark()
        with sw.comm.record() as backward:
            loss.backward()
        clock.mark()
        update()
        clock.mark()
        for phase, calls in (("forward", forward), ("backward", backward)):
            found = [call.nbytes for call in calls if call.operation == "all_gather"]
            sent[phase] = sum(found)
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None
    at_rest = {kind: n for kind, n in sw.ledger.snapshot().items() if kind == "compute"}
    return {
        "parts": clock.intervals()[WARMUPS:],
        "peak": peak,
        "loss": loss.item(),
        "kept": at_rest.get("compute", 0) / GIB,
        **sent,
    }


def measured(cases: Sequence[Case], backend: str, options: Options) -> Iterator[Row]:
    """One after another, each beside the first of its stage."""
    base: dict[int, Row] = {}
    for case in cases:
        done = in_processes(worker, 1, backend, replace(options, systems=(case.title,)))
        row: Row = {"case": case.title, "peak": done["peak"]}
        row |= {"loss": done["loss"], "kept": done["kept"]}
        row |= step_row(done["parts"])
        row |= gathered(done["forward"], done["backward"])
        compare(row, base.setdefault(case.stage, row))
        yield row


def gathered(forward: int, backward: int) -> Row:
    return {
        "forward_gathered": forward / GIB,
        "backward_gathered": backward / GIB,
        "gathered": (forward + backward) / GIB,
    }


def compare(row: Row, base: Row) -> None:
    for key in ("step", "peak", "gathered"):
        mine, theirs = row.get(key), base.get(key)
        if isinstance(mine, float) and isinstance(theirs, float) and theirs:
            row[f"{key}_ratio"] = mine / theirs


MODEL = "0.96B GPT (16 x 2048, 16 heads, SwiGLU 5632, vocab 32768 untied"
TIMES = {
    "case": ("weights", "s"),
    "step": ("step ms", ".1f"),
    "step_ratio": ("x bf16", ".3f"),
    "step_spread": ("spread %", ".1f"),
    "forward": ("forward", ".1f"),
    "backward": ("backward", ".1f"),
}
MEMORY = {
    "peak": ("peak GiB", ".2f"),
    "peak_ratio": ("x bf16", ".3f"),
    "kept": ("kept GiB", ".3f"),
}
BYTES = {
    "forward_gathered": ("gathered fwd GiB", ".3f"),
    "backward_gathered": ("bwd GiB", ".3f"),
    "gathered_ratio": ("x bf16", ".4f"),
}
HOW = (
    "fp32 main weights and grads, bf16 products. MXFP8: linear layers; embedding and norms\n"
    "stay bf16. kept: compute weights between steps. A fresh process per\n"
    "row, 3 + 10 steps. "
)


def planned(tiny: bool) -> Table:
    """What ``sw.plan`` says of zero(3) over 8 ranks, where one precision describes all units."""
    import shardwise as sw

    with torch.device("meta"):
        model = GPT(GPTConfig.tiny() if tiny else GPTConfig())
    rows: list[Row] = []
    for again, what in ((None, "root kept after forward"), (True, "all released after forward")):
        base: Row | None = None
        for case in (BF16, MXFP8, BLOCK):
            made = sw.plan(
                model, {"dp": FAKE_RANKS}, "zero3", precision=case.precision,
                reshard_after_forward=again,
            )  # fmt: skip
            forward, backward = (made.gathered[phase][1] for phase in ("forward", "backward"))
            row: Row = {"case": f"{case.title}, {what}", **gathered(forward, backward)}
            base = base or row
            compare(row, base)
            rows.append(row)
    return Table(
        title=f"Bytes gathered by a rank of {FAKE_RANKS}, by `sw.plan`"
        + (", TINY DRY RUN" if tiny else ""),
        note=f"{MODEL}), whole weights, once a step. By default the root (embedding, norm, head)\n"
        "stays gathered from forward to backward.",
        columns={"case": ("weights", "s"), **BYTES},
        rows=rows,
    )


def alone(backend: str, options: Options, rows: list[Row]) -> Table:
    """One rank with its optimizer: nothing is gathered, all the rest is real."""
    return Table(
        title=f"Training step, 1 {backend} rank" + options.mark,
        note=f"{MODEL}, 8 x 2048 tokens), Muon,\n" + HOW + "Bytes are gathered by several ranks "
        "only.",
        columns=TIMES | {"optimizer": ("optimizer", ".1f")} | MEMORY
        | {"loss": ("last loss", ".4f")},
        rows=rows,
    )  # fmt: skip


def pretended(options: Options, rows: list[Row]) -> Table:
    """Rank 0 of 8: no optimizer, and no loss, for what pretended ranks send is no weight."""
    return Table(
        title=f"Training step, rank 0 of {FAKE_RANKS} (`fake`)" + options.mark,
        note=f"{MODEL}, 8 x 2048 tokens),\n" + HOW + "No optimizer here.",
        columns=TIMES | MEMORY | BYTES,
        rows=rows,
    )


def run(tiny: bool) -> Iterator[Table]:
    """The tables, each again with every row that it got: what is done can be written at once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = Options(device=device, systems=(), rounds=1, tiny=tiny)
    backend = "nccl" if device == "cuda" else "gloo"
    yield planned(tiny)
    rows: list[Row] = []
    for row in measured((BF16, MXFP8, BLOCK), "fake", options):
        rows.append(row)
        yield pretended(options, rows)
    rows = []
    # zero(1) encodes once a step; zero(3) in each phase.
    for row in measured((BF16, MXFP8, BLOCK, BF16_ZERO1, MXFP8_ZERO1), backend, options):
        rows.append(row)
        yield alone(backend, options, rows)


if __name__ == "__main__":
    print(planned(tiny=False).markdown())  # no GPU, no process, a second
