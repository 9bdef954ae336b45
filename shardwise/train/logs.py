# SPDX-License-Identifier: Apache-2.0
"""Logs: the events of a run, and what receives them; the figures of a step.

{"kind": "run",    "config": {...}, "corpus": {...}, "world_size": 2, "versions": {...}, ...}
{"kind": "step",   "step": 12, "loss": 2.9, "bits_per_byte": 4.2, "grad_norm": 0.7, ...}
{"kind": "eval",   "step": 50, "loss": 2.3, "bits_per_byte": 3.3}
{"kind": "save",   "step": 100, "path": "checkpoints/step-000100", "stalled": 0.2}
                   the checkpoint is on the disk; training waited for ``stalled`` seconds
{"kind": "receipt", "step": 2, "rows": {"all_gather over dp, bytes": [planned, found], ...}, ...}
{"kind": "skip",   "step": 117, "grad_norm": "nan", "gradients": ["blocks.3.wq.weight"]}
{"kind": "resume", "step": 100, "path": ..., "text": what the load did}
                   path null: begun again, nothing was saved
{"kind": "warning", "step": 200, "text": "step 200 was not saved: ..."}      {"kind": "error", ...}
{"kind": "profile", ...}  {"kind": "sample", "text": ...}  {"kind": "end", "reason": ...}
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from torch import Tensor, nn

from shardwise.moe import mixtures_of
from shardwise.moe.router import statistics_of
from shardwise.train.config import TrainConfig
from shardwise.train.fit import flops_per_token
from shardwise.train.launch import World
from shardwise.words import count_text, quoted

logger = logging.getLogger(__name__)

Event = dict[str, Any]


class Sink(Protocol):
    """A receiver of all events of a run, on the first rank."""

    def log(self, event: Event) -> None: ...

    def close(self) -> None: ...


class EventFile:
    """Appends events to a file. When ``log`` returns, the kernel has the line. An event that cannot
    be written is lost; the next one begins on a new line, also after a run that was killed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before = b"\n" if path.exists() else b""

    def log(self, event: Event) -> None:
        line = self._before + json.dumps(_plain(event), allow_nan=False).encode() + b"\n"
        self._before = b"\n"
        with self.path.open("ab", buffering=0) as file:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._before = b""

    def close(self) -> None:
        pass

    def __str__(self) -> str:
        return str(self.path)


class Events:
    """Sends events to every sink, with the time.

    Logging never ends a run: the first error of a sink gives a warning, and the run continues.
    """

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self.sinks = list(sinks)
        self._failed: set[int] = set()

    def __call__(self, kind: str, **values: Any) -> None:
        event = {"kind": kind, "time": round(time.time(), 3), **values}
        for sink in self.sinks:
            self._send(sink, "log", event)

    def close(self) -> None:
        """Close every sink, once."""
        while self.sinks:
            self._send(self.sinks.pop(), "close")

    def _send(self, sink: Sink, method: str, *event: Event) -> None:
        try:
            getattr(sink, method)(*event)
        except Exception as error:  # a sink may call any library
            if id(sink) not in self._failed:
                self._failed.add(id(sink))
                text = "%s cannot be written (%s): the run continues, and its events there are lost"
                logger.warning(text, sink, error)


def scalars(event: Event) -> dict[str, float]:
    """The numbers of a step or an evaluation, as ``train/loss``, ``held_out/loss``, ..."""
    prefix = {"step": "train", "eval": "held_out"}.get(event["kind"])
    return {
        f"{prefix}/{name}": float(value)
        for name, value in event.items()
        if prefix and name not in ("step", "time") and isinstance(value, int | float)
    }


def _plain(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: they become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


# ------------------------------------------------------------------------------ the console

LINES = 30  # lines of steps for a whole run, about


class Console:
    """The sink that prints. Only the first rank has one."""

    def __init__(self, steps: int, *, stream: TextIO | None = None) -> None:
        self.steps, self.stream = steps, stream or sys.stdout
        self._began: tuple[int, float] | None = None  # the step before the first, and its end

    def log(self, event: Event) -> None:
        lines = self._step(event) if event["kind"] == "step" else _lines_of(event, self.steps)
        self.stream.write("".join(f"{line}\n" for line in lines))
        self.stream.flush()

    def __str__(self) -> str:
        return "the console"

    def close(self) -> None:
        pass

    def _step(self, event: Event) -> list[str]:
        step = event["step"]
        if self._began is None:
            self._began = step - 1, time.monotonic() - event["seconds"]
        if step % max(1, self.steps // LINES) and step not in (1, self.steps):
            return []
        first, began = self._began
        left = int((time.monotonic() - began) / (step - first) * (self.steps - step))
        place = _place(step, self.steps)
        return [f"{place}  {_figures(event)}  {left // 60}:{left % 60:02d} left"]


def _place(step: int, steps: int) -> str:
    return f"step {step:>{len(str(steps))}}/{steps}"


def _lines_of(event: Event, steps: int) -> list[str]:
    """The lines that are printed for an event other than a step."""
    match event:
        case {"kind": "run", "corpus": corpus, "model": model}:
            lines = [
                f"model    {model['parameters'] / 1e6:.2f}M parameters, {model['text']}",
                f"data     {corpus['name']}: {corpus['text']}, sha256 {corpus['sha256'][:16]}",
                f"ranks    {event['world_size']} x {event['device']}, {event['strategy']}",
            ]
            if weights := event.get("weights"):
                lines.append(
                    f"weights  {weights['stored']} of {weights['parameters']} parameters in "
                    f"{weights['format']}, {100 * weights['share']:.1f} % of all elements; in bf16:"
                )
                kept = weights["kept"].items()
                lines += [f"         {', '.join(names)}: {why}" for why, names in kept]
            return [*lines, f"run      {event['out']}"]
        case {"kind": "resume", "path": None}:
            return ["restart  the run in this folder ended before its first checkpoint"]
        case {"kind": "resume", "path": path, "step": step, "text": text}:
            return [f"resumed  {path} after step {step}: {text}"]
        case {"kind": "eval", "step": step, "loss": loss}:
            bits = event.get("bits_per_byte")
            more = f"  {bits:.3f} bits/byte" if bits else ""
            return [f"{_place(step, steps)}  held out: loss {loss:.4f}{more}"]
        case {"kind": "receipt", "differences": text}:
            return [f"receipt  {text or 'sent what was planned, to the byte, and held it'}"]
        case {"kind": "save", "path": path, "stalled": stalled}:
            return [f"saved    {path} (training waited {stalled:.2f} s)"]
        case {"kind": "skip", "step": step, "grad_norm": norm, "gradients": names}:
            return [f"step {step} dropped: grad norm {norm}; not finite: {quoted(names)}"]
        case {"kind": "sample", "text": text}:
            text = text.replace("\n", "\n    ")
            return ["", "a text that the model generates:", f"    {text}", ""]
        case {"kind": "stop", "step": step, "reason": reason}:
            return [f"stopping after step {step}: {reason}"]
        case {"kind": "note" | "warning" as kind, "text": text}:
            return [f"{kind:8} {text}"]
    return []


def _figures(event: Event) -> str:
    """The figures of a step in one line."""
    bits, mfu, load = (event.get(key) for key in ("bits_per_byte", "mfu", "expert_load_max"))
    texts = [
        f"loss {event['loss']:.3f}",
        None if bits is None else f"{bits:.2f} bits/byte",
        f"{count_text(event['tokens_per_second'])} tok/s",
        None if mfu is None else f"{100 * mfu:.0f}% mfu",
        f"{event['memory'] / 2**30:.2f} GiB",
        f"norm {event['grad_norm']:.2f}",
        None if load is None else f"expert load {load:.1f}x",
    ]
    return "  ".join(text for text in texts if text is not None)


# ------------------------------------------------------------------------------ figures

# FLOP/s of dense products in bf16, from the data sheets.
_PEAKS = {"B200": 2.25e15, "H200": 989e12, "H100": 989e12, "A100": 312e12}
_PEAKS |= {"L40S": 362e12, "L40": 181e12}


class Speed:
    """The figures that follow from a step's time."""

    def __init__(self, config: TrainConfig, world: World, model: nn.Module) -> None:
        self.tokens, self.device = config.batch * config.model.context, world.device
        flops = flops_per_token(config, model.parameters()) * self.tokens
        peak = peak_flops(world.device)
        self.ideal = peak and flops / (peak * world.size)  # seconds

    def of(self, seconds: float) -> dict[str, Any]:
        return {
            "seconds": seconds,
            "tokens_per_second": self.tokens / seconds,
            "memory": peak_memory(self.device),
            **({"mfu": self.ideal / seconds} if self.ideal else {}),
        }


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of one device; None for a device that the table does not have."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = (peak for part, peak in _PEAKS.items() if re.search(rf"\b{part}\b", name))
    return next(known, None)


def peak_memory(device: torch.device) -> int:
    """The peak of the memory so far, in bytes: of torch on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(used) * (1 if sys.platform == "darwin" else 1024)


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
