# SPDX-License-Identifier: Apache-2.0
"""Speed: tokens per second, the fraction of the hardware's arithmetic that is used, memory."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch

from shardwise.train.config import TrainConfig
from shardwise.train.world import World

# Dense bf16 tensor-core FLOP/s, from the makers' data sheets.
_PEAKS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40": 181e12,
}


class Speed:
    """What a step's time means."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.tokens = config.batch * config.model.context
        flops = config.model.flops_per_token() * self.tokens
        self.ideal = flops / (peak_flops(world.device) * world.size)  # seconds
        self.device = world.device

    def of(self, seconds: float) -> dict[str, Any]:
        return {
            "seconds": seconds,
            "tokens_per_second": self.tokens / seconds,
            "mfu": self.ideal / seconds,
            "memory": peak_memory(self.device),
        }


def peak_flops(device: torch.device) -> float:
    """FLOP/s of one device: known GPUs by name; for others what a large product reaches here, on
    the threads that a rank has."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, peak in _PEAKS.items():
            if part in name:
                return peak
    size = 1024 if device.type == "cpu" else 8192
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a = torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def peak_memory(device: torch.device) -> int:
    """The most bytes so far: of the allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(used) * (1 if sys.platform == "darwin" else 1024)
