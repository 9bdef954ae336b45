# SPDX-License-Identifier: Apache-2.0
"""``shardwise bench loss``: head and cross-entropy, forward and backward: in chunks (the
trainer's), plain, and torch's own where it has one. Time, memory and error."""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import report
from benchmarks.measure import memory_meter, milliseconds
from benchmarks.report import Row, Table
from shardwise.models.loss import CHUNK, linear_cross_entropy, softmax_and_gradient

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ head.T).float(), targets)


def losses(compiled: bool) -> dict[str, Loss]:
    """Each way by name; those that torch does not have are left out."""
    softmax = torch.compile(softmax_and_gradient, dynamic=False) if compiled else None

    def chunked(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        chunk = CHUNK if compiled else CHUNK >> 8  # the CPU's shapes are smaller
        return linear_cross_entropy(hidden, head, targets, softmax=softmax, chunk=chunk)

    found: dict[str, Loss] = {"chunks": chunked, "plain": plain}
    if compiled:
        found["plain, compiled"] = torch.compile(plain, dynamic=False)
    if (torchs := getattr(F, "linear_cross_entropy", None)) is not None:
        found["torch's"] = torchs
    return found


def step(loss: Loss, hidden: Tensor, head: Tensor, targets: Tensor) -> None:
    hidden.grad = head.grad = None
    loss(hidden, head, targets).backward()


def on_host(run: Callable[[], object]) -> float:
    times = []
    for _ in range(6):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[1:])


def table(shapes: Sequence[tuple[int, int, int]], device: torch.device) -> Table:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows: list[Row] = []
    for tokens, width, words in shapes:
        generator = torch.Generator(device).manual_seed(0)
        options = {"device": device, "generator": generator}
        hidden = torch.randn(tokens, width, **options).to(dtype).requires_grad_()  # type: ignore[arg-type]
        head = (torch.randn(words, width, **options) / width**0.5).to(dtype).requires_grad_()  # type: ignore[arg-type]
        targets = torch.randint(words, (tokens,), **options)  # type: ignore[arg-type]
        logits = hidden.detach()[:256].double() @ head.detach().double().T
        exact = float(F.cross_entropy(logits, targets[:256]))
        for name, loss in losses(device.type == "cuda").items():
            run = partial(step, loss, hidden, head, targets)
            row: Row = {"shape": f"{tokens:,} x {width:,} x {words:,}", "name": name}
            try:
                with torch.no_grad():
                    row["error"] = abs(float(loss(hidden[:256], head, targets[:256])) - exact)
                row["ms"] = milliseconds(run) if device.type == "cuda" else on_host(run)
                hidden.grad = head.grad = None
                with memory_meter(device) as meter, meter.phase("step"):
                    run()
                found = meter.phases["step"]
                row["mib"] = (found.peak - found.start) / 2**20
            except (RuntimeError, NotImplementedError) as error:
                print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
            rows.append(row)
            print(row, flush=True)
    return Table(
        title="Head and loss",
        note="Forward and backward of the head's product and the mean cross-entropy; tokens x\n"
        "width x words. *peak*: beyond the inputs, gradients included. *error*: of the loss of\n"
        "256 tokens, against fp64.",
        columns={
            "shape": ("tokens x width x words", "s"),
            "name": ("loss", "s"),
            "ms": ("ms", ".2f"),
            "mib": ("peak MiB", ",.1f"),
            "error": ("error", ".1e"),
        },
        rows=rows,
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="shardwise bench loss", description=__doc__)
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder to write to")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = [(16384, 2048, 8192), (16384, 2048, 50304), (65536, 768, 50304)]
    if device.type == "cpu":
        shapes = [(512, 64, 4096), (1024, 64, 16384)]
    facts = report.circumstances(arguments)
    facts["command"] = "shardwise bench loss " + shlex.join(arguments)
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name().lower()
    made = [table(shapes, device)]
    paths = report.write(made, facts, f"loss-{name.replace(' ', '-')}", options.results)
    print(paths[0].read_text())


if __name__ == "__main__":
    main(sys.argv[1:])
