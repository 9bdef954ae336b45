# SPDX-License-Identifier: Apache-2.0
"""The state of ``shardwise bench shown-run``, and its results: tables, texts, and the events of
every run."""

from __future__ import annotations

import json
import shlex
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import fp8_learns, report
from benchmarks.muon_vs_adamw import picture, reached
from benchmarks.runs import Curve, Job, mean_of
from shardwise.report.svg import BLUE, ORANGE, Canvas

Flags = Mapping[str, str | int | float]
NAMES = {"muon": "Muon", "adamw": "AdamW"}


def words_of(flags: Flags) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large everything is."""

    recipe: str
    experts: str  # the recipe with experts
    flags: Flags  # of every run of the recipe
    experts_flags: Flags
    steps: int
    sweep_steps: int
    after_rates: float  # seconds that the stages after the rates need: with less, no more rates
    rates: dict[str, tuple[float, ...]]  # matrix-lr of Muon, lr of AdamW
    lr: float  # of Muon's other parameters
    fp8: str  # the format
    most: int  # bytes of text
    sample: int
    roots: tuple[str, ...] | None = None
    tokenizer: str = "bpe:8192"


@dataclass
class Shown:
    """The state of the whole: where things lie, and what is known by now."""

    size: Size
    scratch: Path
    results: Path
    seeds: int
    parts: Sequence[str]  # of PARTS
    until: float
    facts: dict[str, str]
    text: dict[str, Any] = field(default_factory=dict)
    sweep: list[report.Row] = field(default_factory=list)
    best: dict[str, float] = field(default_factory=dict)
    curves: dict[tuple[str, int], Curve] = field(default_factory=dict)
    fp8: dict[tuple[str, int], Curve] = field(default_factory=dict)
    experts: Curve | None = None
    lines: dict[str, str] = field(default_factory=dict)  # what was found, by subject
    said: dict[str, str] = field(default_factory=dict)  # texts that were written
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the result files
    reading: threading.Lock = field(default_factory=threading.Lock)  # of the little text

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    # ------------------------------------------------------------------------------ jobs

    def job(self, recipe: str, name: str, *flags: Flags, steps: int) -> Job:
        """A run on all tokens; later flags replace earlier ones."""
        merged: dict[str, str | int | float] = {
            "data": str(self.scratch / "text" / "tokens"),
            "steps": steps,
            "warmup": max(1, steps // 20),
            "eval-every": max(1, steps // 15),
            "save-every": steps,
            "keep": 1,
        }
        for more in flags:
            merged |= more
        return Job(name=name, words=[recipe, *words_of(merged)], folder=self.runs / name)

    def run(self, optimizer: str, seed: int, name: str = "", **more: str | int | float) -> Job:
        """A run of the recipe with the best rate."""
        steps, flags = int(more.pop("steps", self.size.steps)), self.size.flags
        chosen: Flags = {"optimizer": optimizer, "seed": seed, **self.rates(optimizer)}
        name = name or f"{optimizer}-{seed}"
        return self.job(self.size.recipe, name, flags, chosen, more, steps=steps)

    def rates(self, optimizer: str, rate: float | None = None) -> Flags:
        rate = self.best[optimizer] if rate is None else rate
        return {"lr": rate} if optimizer == "adamw" else {"matrix-lr": rate, "lr": self.size.lr}

    @property
    def runs(self) -> Path:
        return self.scratch / "runs"


# ------------------------------------------------------------------------------------ tables

RUNS = {
    "case": ("run", "s"),
    "rate": ("learning rate", ".3g"),
    "seeds": ("seeds", "d"),
    "bits": ("held-out bits/byte", ".4f"),
    "spread": ("+-", ".4f"),
    "tokens": ("M tokens", ".2f"),
    "seconds": ("training s", ".1f"),
    "speed": ("tokens/s", ",.0f"),
    "there": ("s to AdamW's end", ".1f"),
}
CURVE = {
    "case": ("run", "s"),
    "tokens": ("tokens", ",.0f"),
    "seconds": ("seconds", ".2f"),
    "bits": ("bits/byte", ".4f"),
    "low": ("lowest", ".4f"),
    "high": ("highest", ".4f"),
}


def means(shown: Shown) -> dict[str, Curve]:
    """The mean of the seeds by optimizer, with the seconds of the run that had the GPU alone."""
    found = {}
    for optimizer, name in NAMES.items():
        runs = [curve for (one, _), curve in sorted(shown.curves.items()) if one == optimizer]
        timed = shown.curves.get((optimizer, 0))
        if timed is not None:
            mean = mean_of(name, runs)
            seconds = timed.until(mean.tokens[-1]).seconds
            found[name] = Curve(**{**vars(mean), "seconds": seconds, "step": timed.step})
    return found


def tables(shown: Shown) -> list[report.Table]:
    found = means(shown)
    goal = found["AdamW"].bits[-1] if "AdamW" in found else 0.0
    rows: list[report.Row] = []
    for optimizer, name in NAMES.items():
        if name not in found:
            continue
        curve = found[name]
        count = sum(one == optimizer for one, _ in shown.curves)
        spread = (curve.high[-1] - curve.low[-1]) / 2 if count > 1 else None
        row = {"case": name, "rate": shown.best[optimizer], "seeds": count, "spread": spread}
        rows.append(row | _ends(curve) | {"there": reached(curve, goal)})
    if shown.experts is not None:
        case = f"{shown.size.experts}, Muon"
        row = {"case": case, "rate": 0.02, "seeds": 1, **_ends(shown.experts)}
        rows.append(row | {"seconds": None, "speed": None})
    bigram = next((f"{curve.bigram:.3f}" for curve in found.values()), "unknown")
    text = shown.text
    note = (
        f"{shown.size.recipe}, the same tokens for all. Text of this machine: "
        f"{text.get('documents', 0):,} documents,\n{text.get('bytes', 0) / 1e6:,.0f} MB; bigram "
        f"model of it: {bigram} bits/byte. Seconds are those of training steps of\nseed "
        f"0, which has the GPU to itself but for the start of the next run; +-: half of what lies "
        f"between the\nends of the seeds.\n\n"
        + "\n".join(f"- {name}: {line}" for name, line in shown.lines.items())
    )
    made = [report.Table(title="The shown run", note=note, columns=RUNS, rows=rows)]
    if shown.sweep:
        columns = {key: RUNS[key] for key in ("case", "rate", "bits")}
        note = f"{shown.size.sweep_steps} steps each, on a sample of the text; the best go on."
        made.append(report.Table(title="Rates", note=note, columns=columns, rows=shown.sweep))
    points = [_point(curve, at) for curve in found.values() for at in range(len(curve.bits))]
    if shown.experts is not None:
        points += [_point(shown.experts, at) for at in range(len(shown.experts.bits))]
    if points:
        made.append(report.Table(title="Curves", note="", columns=CURVE, rows=points))
    return made


def _ends(curve: Curve) -> report.Row:
    ends: report.Row = {"bits": curve.bits[-1], "tokens": curve.tokens[-1] / 1e6}
    speed = curve.tokens[-1] / curve.seconds[-1] if curve.seconds[-1] else None
    return ends | {"seconds": curve.seconds[-1], "speed": speed}


def _point(curve: Curve, at: int) -> report.Row:
    low, high = (edge[at] if edge else None for edge in (curve.low, curve.high))
    row: report.Row = {"case": curve.name, "tokens": curve.tokens[at], "bits": curve.bits[at]}
    row |= {"seconds": curve.seconds[at], "low": low, "high": high}
    return row | {"bigram": curve.bigram}


def fp8_tables(shown: Shown) -> list[report.Table]:
    """The pairs of bf16 and fp8, as `shardwise bench fp8-learns` shows them."""
    made = []
    for optimizer in NAMES:
        runs: dict[str, dict[int, fp8_learns.Run]] = {fp8_learns.BASE: {}, str(shown.size.fp8): {}}
        for seed in range(shown.seeds):
            both = (shown.curves.get((optimizer, seed)), shown.fp8.get((optimizer, seed)))
            if both[0] is None or both[1] is None:
                continue
            names = (f"{optimizer}-{seed}", f"fp8-{optimizer}-{seed}")
            folders = [shown.runs / name for name in names]
            pair = fp8_learns.paired(
                dict(zip(runs, both, strict=True)),  # type: ignore[arg-type]
                dict(zip(runs, folders, strict=True)),
            )
            for precision, run in pair.items():
                runs[precision][seed] = run
        if runs[fp8_learns.BASE]:
            flags = {**shown.size.flags, **shown.rates(optimizer), "optimizer": optimizer}
            line = shlex.join(["shardwise", "train", shown.size.recipe, *words_of(flags)])
            made.append(fp8_learns.table(runs, optimizer, line))
    return made


def drawing(shown: Shown, found: Mapping[str, Curve]) -> Canvas:
    """Bits per byte by tokens and by seconds; a band from the lowest to the highest seed."""
    ends = ", ".join(f"{name} {curve.bits[-1]:.3f}" for name, curve in found.items())
    seeds = f"mean of {shown.seeds} seeds" if shown.seeds > 1 else "one seed"
    tuned = "best of several rates" if shown.sweep else "rates not tuned"
    about = f"held-out bits per byte, {seeds}, {tuned}, one GPU: {ends}"
    colours = {ORANGE: found["AdamW"], BLUE: found["Muon"]}
    return picture(f"{shown.size.recipe} on the text of its machine", about, colours)


def write(shown: Shown) -> None:
    """Everything that is known by now."""
    name = f"shown-run-{shown.size.recipe}"
    shown.results.mkdir(parents=True, exist_ok=True)
    with tarfile.open(shown.results / f"{name}-events.tar.gz", "w:gz") as archive:
        for path in sorted(shown.runs.glob("*/events.jsonl")):
            archive.add(path, f"{path.parent.name}.jsonl")
        for path in sorted(shown.runs.glob("*.log")):
            archive.add(path, path.name)
    report.write(
        tables(shown), {**shown.facts, "text": json.dumps(shown.text)}, name, shown.results
    )
    if len(found := means(shown)) == len(NAMES):
        (shown.results / f"{name}.svg").write_text(drawing(shown, found).render())
    if made := fp8_tables(shown):
        report.write(made, shown.facts, f"fp8-learns-{shown.size.recipe}", shown.results)
    texts = [f"--- {prompt!r}\n{text}" for prompt, text in shown.said.items()]
    if texts:
        (shown.results / f"{name}.txt").write_text("\n\n".join(texts) + "\n")
