# SPDX-License-Identifier: Apache-2.0
"""Console: prints the progress of a run. Draws a live bar on a terminal or in a notebook with
ipywidgets, and prints plain lines elsewhere."""

from __future__ import annotations

import errno
import os
import sys
import time
from importlib.util import find_spec
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from shardwise.train.events import Event
from shardwise.words import count_text

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

    @property
    def _live(self) -> bool:
        """Whether a bar can be redrawn: on a terminal, and in a notebook that has widgets."""
        return self.out.is_terminal or (self.out.is_jupyter and find_spec("ipywidgets") is not None)

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

    def _step(self, event: Event) -> None:
        if self._first_step is None:
            self._first_step = event["step"] - 1
            self._began = time.monotonic() - event["seconds"]
        if self._live:
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
