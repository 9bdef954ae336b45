# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step: tokens per second, model FLOPs utilisation, memory, load of the experts."""

from __future__ import annotations

import functools
import resource
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.moe import mixtures_of
from shardwise.moe.router import statistics_of
from shardwise.train.config import TrainConfig
from shardwise.train.own_model import flops_per_token
from shardwise.train.world import World

# FLOP/s of dense products in bf16, from the data sheets.
_PEAKS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40": 181e12,
}


class Speed:
    """The figures that follow from a step's time."""

    def __init__(self, config: TrainConfig, world: World, model: nn.Module) -> None:
        self.tokens = config.batch * config.model.context
        flops = flops_per_token(config, model.parameters()) * self.tokens
        self.ideal = flops / (peak_flops(world.device) * world.size)  # seconds
        self.device = world.device

    def of(self, seconds: float) -> dict[str, Any]:
        return {
            "seconds": seconds,
            "tokens_per_second": self.tokens / seconds,
            "mfu": self.ideal / seconds,
            "memory": peak_memory(self.device),
        }


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype | None = None) -> float:
    """FLOP/s of one device: for known GPUs from a table, else measured with products in ``dtype``
    (default: fp32 on CPUs, bf16 on GPUs)."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, peak in _PEAKS.items():
            if part in name:
                return peak
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    best = 0.0
    # A small product first: on CPUs without bf16 products, a large one would take seconds.
    for size in (128, 1024) if device.type == "cpu" else (1024, 8192):
        a = torch.ones(size, size, dtype=dtype, device=device)
        for _ in range(3):
            began = time.perf_counter()
            (a @ a)[0, 0].item()
            best = max(best, 2 * size**3 / (time.perf_counter() - began))
        if 2 * 8**3 * size**3 / best > 0.5:
            break
    return best


def peak_memory(device: torch.device) -> int:
    """The peak of the memory so far, in bytes: of torch on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(used) * (1 if sys.platform == "darwin" else 1024)


# ------------------------------------------------------------------------------ experts


class ExpertLoad:
    """The load of each expert in the last step, for the metrics and for the routers' biases."""

    def __init__(self, model: nn.Module) -> None:
        self.routers = [layer.router for layer in mixtures_of(model)]
        self.device = next(model.parameters()).device
        self.counts: list[list[int]] = []  # [layer][expert]

    def tally(self) -> Tensor:
        """This rank's counts since the last step, on the device, to be summed over ranks."""
        if not self.routers:
            return torch.empty(0, device=self.device)
        return torch.stack([router.tally() for router in self.routers]).flatten()

    def after_step(self, skipped: Tensor) -> None:
        """Update the routers' biases unless the step was skipped; reset the counts (collective)."""
        for router in self.routers:
            router.update_bias(unless=skipped)

    def figures(self, total: Tensor) -> dict[str, Any]:
        """The metrics of a step, the worst of all layers, from the sum of all ranks' tallies."""
        if not self.routers:
            return {}
        counts = total.view(len(self.routers), -1)  # [layers, experts]
        self.counts = [[int(count) for count in layer] for layer in counts.tolist()]
        statistics = statistics_of(counts)
        return {f"expert_{name}": float(value.max()) for name, value in statistics.items()}
