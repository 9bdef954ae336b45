# SPDX-License-Identifier: Apache-2.0
"""Where the host spends a training step: ``python -m benchmarks.host`` on a machine with a GPU.

For bf16 and for fp8, a process each: milliseconds in which the host issues each phase to an idle
device, with kernels launched as they are and as Triton launches them; what one call of each part
takes; and a profile of each phase. Backward is profiled in the thread of its caller. Arguments:
precisions other than these two.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.fp8_steps import MODELS, TINY, optimizer_of, wrapped
from benchmarks.workers import Options, in_processes

WARMUPS, ROUNDS, LINES = 4, 7, 32
PHASES = ("forward", "backward", "update")


class Forgetful(dict[Any, Any]):
    """No compiled form is kept: every launch is Triton's own."""

    def get(self, key: Any, default: Any = None) -> Any:
        return None


def worker(rank: int, options: Options, mesh: DeviceMesh) -> dict[str, Any]:
    precision, kind = options.systems
    device = torch.device(options.device)
    config = TINY if options.tiny else MODELS["0.96B"][0]
    model, inputs, targets, loss_of = wrapped(config, precision, device, mesh, False)
    optimizer = optimizer_of(model, kind)
    losses = []

    def forward() -> None:
        losses[:] = [loss_of(model(inputs), targets)]

    def backward() -> None:
        losses.pop().backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    phases: list[Callable[[], None]] = [forward, backward, update]
    for _ in range(WARMUPS):
        for phase in phases:
            phase()
    title = f"{precision}, {kind}"
    print(f"{title}: host ms, {times(phases)}")
    if device.type == "cuda":
        from shardwise.kernels import launch

        kept, launch._compiled = launch._compiled, Forgetful()
        print(f"{title}: host ms as Triton launches, {times(phases)}")
        launch._compiled = kept
        with torch.autograd.set_multithreading_enabled(False):
            print(f"{title}: host ms in one thread, {times(phases)}")
    profiles = [cProfile.Profile() for _ in phases]
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(3):
            for phase, profile in zip(phases, profiles, strict=True):
                synchronise()
                profile.runcall(phase)
    for name, profile in zip(PHASES, profiles, strict=True):
        text = io.StringIO()
        stats = pstats.Stats(profile, stream=text).sort_stats("tottime")
        stats.print_stats(LINES)
        print(f"---- {title}, {name}, 3 steps\n" + text.getvalue().split("\n\n", 1)[1])
    if precision == "fp8_block" and device.type == "cuda":
        parts(device)
    return {}


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def times(phases: list[Callable[[], None]]) -> str:
    """The medians of phases, each issued to an idle device."""
    found: list[list[float]] = [[] for _ in phases]
    for _ in range(ROUNDS):
        for phase, one in zip(phases, found, strict=True):
            synchronise()
            began = time.perf_counter()
            phase()
            one.append(1e3 * (time.perf_counter() - began))
    middle = [statistics.median(one) for one in found]
    words = [f"{name} {value:.1f}" for name, value in zip(PHASES, middle, strict=True)]
    return ", ".join(words) + f"; together {sum(middle):.1f}, least {sum(map(min, found)):.1f}"


def microseconds(call: Callable[[], object], count: int = 200) -> float:
    """The host's time for one call; few enough that the queue of launches never fills up."""
    found = []
    for _ in range(5):
        synchronise()
        began = time.perf_counter()
        for _ in range(count):
            call()
        found.append(1e6 * (time.perf_counter() - began) / count)
    return statistics.median(found)


def parts(device: torch.device) -> None:
    """What one call takes the host; small shapes, so that the device is never behind."""
    from shardwise.kernels import fp8_codes as kernels
    from shardwise.kernels import launch
    from shardwise.precision import fp8_block
    from shardwise.precision.fp8 import SQUARE_128, encode

    bf16 = torch.bfloat16
    x, w = (torch.randn(512, 512, device=device, dtype=bf16) for _ in range(2))
    (plane,) = encode(w, (SQUARE_128,))
    quantised = fp8_block.quantise(x, True, 128)
    rows, weight = quantised[:2], (plane.codes, plane.scales)
    codes = plane.codes.view(torch.float8_e4m3fn)
    out = torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {
        "mm": lambda: torch.mm(x, w),
        "mm out": lambda: torch.mm(x, w, out=out),
        "_scaled_mm": lambda: torch._scaled_mm(
            codes, codes.t(), scale_a=quantised[1].t(), scale_b=plane.scales.t(), out_dtype=bf16
        ),
        "_scaled_mm of one scale": lambda: torch._scaled_mm(
            codes, codes.t(), scale_a=plane.scales[0, 0], scale_b=plane.scales[0, 0], out_dtype=bf16
        ),
        "multiply, forward": lambda: fp8_block.multiply(*rows, *weight, "forward", bf16),
        "multiply, backward": lambda: fp8_block.multiply(*rows, *weight, "backward", bf16),
        "turn": lambda: kernels.turn(plane.codes, plane.scales),
        "memory of quantise": lambda: fp8_block.empty(x, True, 128),
        "quantise": lambda: fp8_block.quantise(x, True, 128),
        "operator quantise": lambda: torch.ops.shardwise.fp8_quantise.default(x, True, 128),
        "new_empty": lambda: x.new_empty(512, 512),
        "view and t": lambda: (plane.codes.view(torch.float8_e4m3fn), codes.t()),
    }
    for name, call in calls.items():
        print(f"{name}: {microseconds(call):.1f} us")
    launch._compiled = Forgetful()
    for name in ("turn", "quantise"):
        print(f"{name} as Triton launches: {microseconds(calls[name]):.1f} us")


def main(arguments: list[str]) -> None:
    gpu = torch.cuda.is_available()
    options = Options(device="cuda" if gpu else "cpu", systems=(), rounds=1, tiny=not gpu)
    for precision in arguments or ("bf16", "fp8_block"):
        chosen = Options(**{**vars(options), "systems": (precision, "adamw")})
        in_processes(worker, 1, "nccl" if gpu else "gloo", chosen)


if __name__ == "__main__":
    main(sys.argv[1:])
