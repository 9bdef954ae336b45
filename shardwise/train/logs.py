# SPDX-License-Identifier: Apache-2.0
"""Logs: the events of a run, and what receives them; the figures of a step.

{"kind": "run",    "config": {...}, "corpus": {...}, "world_size": 2, "versions": {...}, ...}
{"kind": "step",   "step": 12, "loss": 2.9, "bits_per_byte": 4.2, "grad_norm": 0.7, ...}
{"kind": "eval",   "step": 50, "loss": 2.3, "bits_per_byte": 3.3}
{"kind": "save",   "step": 100, "path": "checkpoints/step-000100", "stalled": 0.2}
                   the checkpoint is on the disk; training waited for ``stalled`` seconds
{"kind": "skip",   "step": 117, "grad_norm": "nan", "where": [...]}
{"kind": "resume", "step": 100, "path": ..., "text": what the load did}
                   path null: begun again, nothing was saved
{"kind": "warning", "step": 200, "text": "step 200 was not saved: ..."}      {"kind": "error", ...}
{"kind": "profile", ...}  {"kind": "sample", "text": ...}  {"kind": "end", "reason": ...}
"""

from __future__ import annotations

import errno
import functools
import io
import json
import logging
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from shardwise.moe import mixtures_of
from shardwise.moe.router import statistics_of
from shardwise.train.config import TrainConfig
from shardwise.train.fit import flops_per_token
from shardwise.train.launch import World
from shardwise.words import count_text

logger = logging.getLogger(__name__)

Event = dict[str, Any]


class Sink(Protocol):
    """A receiver of all events of a run, on the first rank."""

    def log(self, event: Event) -> None: ...

    def close(self) -> None: ...


class EventFile:
    """Appends events to a file. When ``log`` returns, the kernel has the line.

    An event that cannot be written is lost, but the file stays valid: the next event begins on a
    new line, also after a run that was killed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.FileIO | None = None
        self._torn = False

    def log(self, event: Event) -> None:
        line = json.dumps(_plain(event), allow_nan=False).encode() + b"\n"
        if self._file is not None and not self.path.exists():
            raise OSError(f"{self.path} was removed or renamed")
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._torn = not _ends_a_line(self.path)
            self._file = self.path.open("ab", buffering=0)
        line = b"\n" * self._torn + line
        self._torn = True
        while line:  # a full disk takes a part, and raises at the next write
            line = line[self._file.write(line) :]
        self._torn = False

    def close(self) -> None:
        if self._file is not None:
            with self._file as file:
                os.fsync(file.fileno())
            self._file = None

    def __str__(self) -> str:
        return str(self.path)


class Events:
    """Sends events to every sink, with the time.

    Logging never ends a run: the first error of a sink gives a warning, and the run continues.
    """

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self.sinks = list(sinks)
        self._failed: set[int] = set()
        self._step = 0

    def __call__(self, kind: str, **values: Any) -> None:
        event = {"kind": kind, "time": round(time.time(), 3), **values}
        self._step = values.get("step", self._step)
        for sink in self.sinks:
            self._try(sink, partial(sink.log, event))

    def close(self) -> None:
        """Close every sink, once."""
        sinks, self.sinks = self.sinks, []
        for sink in sinks:
            self._try(sink, sink.close)

    def _try(self, sink: Sink, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # a sink may call any library
            if id(sink) not in self._failed:
                self._failed.add(id(sink))
                logger.warning(
                    "rank 0, step %d: %s cannot be written (%s): the run continues, and events "
                    "that cannot be written there are lost",
                    self._step,
                    sink,
                    error,
                )


def scalars(event: Event) -> dict[str, float]:
    """The numbers of a step or an evaluation, as ``train/loss``, ``held_out/loss``, ..."""
    prefix = {"step": "train", "eval": "held_out"}.get(event["kind"])
    if prefix is None:
        return {}
    return {
        f"{prefix}/{name}": float(value)
        for name, value in event.items()
        if name not in ("step", "time") and isinstance(value, int | float)
    }


def _ends_a_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _plain(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: they become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


# ------------------------------------------------------------------------------ the console

LINES = 30  # plain lines for a whole run, about
PLAIN = {  # events that are printed as one line
    "save": "saved    {path} (training waited {stalled:.2f} s)",
    "note": "note     {text}",
    "warning": "warning  {text}",
    "stop": "stopping after step {step}: {reason}",
}
BAR = 16  # columns; half of it on a narrow terminal


class _Out(RichConsole):
    """A console that raises ``OSError`` on a broken pipe; rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Console:
    """The sink that prints. Only the first rank has one."""

    def __init__(self, steps: int, *, stream: TextIO | None = None) -> None:
        self.steps = steps
        self._stream = stream
        self.out = self._open()
        self.every = max(1, steps // LINES)
        self._began = time.monotonic()
        self._first_step: int | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    # ------------------------------------------------------------------------ events

    def log(self, event: Event) -> None:
        show = getattr(self, f"_{event['kind']}", None)
        try:
            if event["kind"] in PLAIN:
                self.say(PLAIN[event["kind"]].format(**event))
            elif show is not None:
                show(event)
        except OSError:
            # The terminal or the reader of the pipe is gone: drop the text that rich has buffered.
            self.out, self._progress = self._open(), None
            raise

    def _open(self) -> RichConsole:
        return _Out(file=self._stream or sys.stdout, highlight=False, soft_wrap=True)

    def __str__(self) -> str:
        return "the console"

    def say(self, text: str) -> None:
        self.out.print(text, markup=False)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _run(self, event: Event) -> None:
        corpus, model = event["corpus"], event["model"]
        say = self.say
        say(f"model    {model['parameters'] / 1e6:.2f}M parameters, {model['text']}")
        say(f"data     {corpus['name']}: {corpus['text']}, sha256 {corpus['sha256'][:16]}")
        if corpus.get("bigram") is not None:
            say(
                f"         bits per byte: unigram {corpus['unigram']:.2f}, bigram "
                f"{corpus['bigram']:.2f}, zlib {corpus['zlib']:.2f}"
            )
        say(f"ranks    {event['world_size']} x {event['device']}, {event['strategy']}")
        if weights := event.get("weights"):
            say(
                f"weights  {weights['stored']} of {weights['parameters']} parameters in "
                f"{weights['format']}, {100 * weights['share']:.1f} % of all elements; in bf16:"
            )
            for why, names in weights["kept"].items():
                say(f"         {', '.join(names)}: {why}")
        say(f"run      {event['out']}")

    def _resume(self, event: Event) -> None:
        if event["path"] is None:
            self.say("restart  the run in this folder ended before its first checkpoint")
        else:
            self.say(f"resumed  {event['path']} after step {event['step']}")
            if event.get("text"):
                self.say(f"loaded   {event['text']}")

    def _step(self, event: Event) -> None:
        if self._first_step is None:
            self._first_step = event["step"] - 1
            self._began = time.monotonic() - event["seconds"]
        if self.out.is_terminal:
            self._advance(event)
        elif event["step"] % self.every == 0 or event["step"] in (1, self.steps):
            self.say(
                f"step {event['step']:>{len(str(self.steps))}}/{self.steps}  {_figures(event)}"
                f"  {self._left(event['step'])}"
            )

    def _eval(self, event: Event) -> None:
        bits = event.get("bits_per_byte")
        shown = f"loss {event['loss']:.4f}" + (f"  {bits:.3f} bits/byte" if bits else "")
        self.say(f"step {event['step']:>{len(str(self.steps))}}/{self.steps}  held out: {shown}")

    def _skip(self, event: Event) -> None:
        where = "; ".join(event["where"][:2])
        self.say(f"step {event['step']} dropped: grad norm {event['grad_norm']} ({where})")

    def _sample(self, event: Event) -> None:
        self.close()
        self.say("")
        self.say("a text that the model generates:")
        for line in event["text"].splitlines():
            self.say("    " + line)
        self.say("")

    def _end(self, event: Event) -> None:
        self.close()

    # ------------------------------------------------------------------------ the bar

    def _advance(self, event: Event) -> None:
        if self._progress is None:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=BAR if self.out.width >= 100 else BAR // 2),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(compact=True),
                console=self.out,
            )
            self._progress.start()
            self._task = self._progress.add_task(
                "train", total=self.steps, completed=event["step"] - 1, figures=""
            )
        assert self._task is not None
        taken = len(f"step {event['step']}/{self.steps}") + BAR + len(" 0:00:00") + 2
        room = self.out.width - taken
        self._progress.update(self._task, completed=event["step"], figures=_figures(event, room))

    def _left(self, step: int) -> str:
        done = step - (self._first_step or 0)
        seconds = (time.monotonic() - self._began) / done * (self.steps - step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"


def _figures(event: Event, room: int | None = None) -> str:
    """The figures of a step in one line; only the more important figures in a narrow ``room``."""
    bits, mfu, load = (event.get(key) for key in ("bits_per_byte", "mfu", "expert_load_max"))
    # (priority, text), in the order of the line. Without room, the highest number is dropped first.
    parts = [
        (0, f"loss {event['loss']:.3f}"),
        (1, None if bits is None else f"{bits:.2f} bits/byte"),
        (5, f"norm {event['grad_norm']:.2f}"),
        (2, f"{count_text(event['tokens_per_second'])} tok/s"),
        (3, None if mfu is None else f"{100 * mfu:.0f}% mfu"),
        (4, f"{event['memory'] / 2**30:.2f} GiB"),
        (6, None if load is None else f"expert load {load:.1f}x"),
    ]
    kept = [(priority, text) for priority, text in parts if text is not None]
    while room is not None and len(kept) > 1 and len("  ".join(text for _, text in kept)) > room:
        kept.remove(max(kept))
    return "  ".join(text for _, text in kept)


# ------------------------------------------------------------------------------ figures

# FLOP/s of dense products in bf16, from the data sheets.
_PEAKS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
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
            if re.search(rf"\b{part}\b", name):
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
