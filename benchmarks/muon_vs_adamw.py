# SPDX-License-Identifier: Apache-2.0
"""``shardwise bench muon-vs-adamw``: the same run with both optimizers, by tokens and by time.

Each curve is a `shardwise train` of its own, one after another. AdamW gets several learning rates
and is judged by its best; Muon runs at the recipe's.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.runs import Curve, Job, finished, run_jobs
from shardwise.report.svg import (
    BLUE,
    GREEN,
    ORANGE,
    WIDTH,
    Canvas,
    Key,
    draw_axes,
    draw_title,
)
from shardwise.words import count_text, tick_text

PANEL = 300


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """The words that every comparison of runs takes."""
    parser = argparse.ArgumentParser(
        prog=f"shardwise bench {name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", default="default")
    parser.add_argument("--steps", type=int, help="default: the recipe's")
    parser.add_argument(
        "--results", type=Path, default=report.RESULTS, help="folder for .md, .json and .svg"
    )
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("muon-vs-adamw", __doc__)
    add = parser.add_argument
    add("--adamw-lr", type=float, nargs="+", default=[2e-3, 5e-3, 1e-2])
    add("--name", help="of the result files; default: muon-vs-adamw-<recipe>")
    return parser.parse_args(arguments)


def picture(title: str, about: str, curves: Mapping[str, Curve]) -> Canvas:
    """Two panels, one axis of loss: against tokens, and against the time that they took. ``curves``
    are by colour, the last drawn on top."""
    keys = [Key(curve.name, colour) for colour, curve in curves.items()]
    keys.append(Key("bigram", GREEN))
    canvas = Canvas(WIDTH, 0, about)
    top = draw_title(canvas, title, about, keys)
    canvas.height = top + 2 * (PANEL + 70)
    bigram = next(iter(curves.values())).bigram
    values = [bits for curve in curves.values() for bits in curve.bits] + [bigram]
    panels: list[tuple[Callable[[Curve], list[float]], str, Callable[[float], str]]] = [
        (lambda curve: curve.tokens, "tokens", lambda value: tick_text(count_text(value))),
        (lambda curve: curve.seconds, "seconds of training", lambda value: f"{value:g}"),
    ]
    for number, (along, label, text) in enumerate(panels):
        frame = draw_axes(
            canvas,
            top=top + number * (PANEL + 70),
            height=PANEL,
            x_range=(0, max(x for curve in curves.values() for x in along(curve))),
            y_range=(min(values) - 0.1, max(values) + 0.1),
            x_label=label,
            y_label="bits per byte",
            x_text=text,
            y_text=lambda value: f"{value:g}",
        )
        level = frame.y(bigram)
        canvas.line(frame.x.begin, level, frame.x.end, level, stroke=GREEN, stroke_dasharray="6 4")
        for colour, curve in curves.items():
            if curve.low:
                edges = [zip(along(curve), edge, strict=True) for edge in (curve.low, curve.high)]
                low, high = ([(frame.x(x), frame.y(y)) for x, y in edge] for edge in edges)
                canvas.area([*low, *reversed(high)], fill=colour, opacity=0.25)
            points = [
                (frame.x(x), frame.y(y)) for x, y in zip(along(curve), curve.bits, strict=True)
            ]
            canvas.path(points, stroke=colour, stroke_width=2.2)
            for (x, y), bits in zip(points, curve.bits, strict=True):
                canvas.circle(x, y, 3.5, fill=colour, tip=f"{curve.name}: {bits:.3f}")
    return canvas


def table(curves: Sequence[Curve], best: Curve) -> report.Table:
    rows: list[report.Row] = [
        {
            "case": curve.name,
            "bits": curve.bits[-1],
            "tokens": curve.tokens[-1] / 1e6,
            "seconds": curve.seconds[-1],
            "there": reached(curve, best.bits[-1]),
        }
        for curve in curves
    ]
    columns = {
        "case": ("optimizer", "s"),
        "bits": ("held-out bits/byte", ".3f"),
        "tokens": ("M tokens", ".2f"),
        "seconds": ("training s", ".1f"),
        "there": ("s to AdamW's best", ".1f"),
    }
    note = (
        f"Bigram model of the same text: {best.bigram:.3f} bits/byte. *s to AdamW's best*: the\n"
        f"seconds of training until {best.bits[-1]:.3f}, on a line between evaluations."
    )
    return report.Table(title="Muon and AdamW", note=note, columns=columns, rows=rows)


def reached(curve: Curve, bits: float) -> float | None:
    """When the curve came down to ``bits``."""
    before: tuple[float, float] | None = None
    for at, value in zip(curve.seconds, curve.bits, strict=True):
        if value <= bits:
            if before is None:
                return at
            share = (before[1] - bits) / (before[1] - value)
            return before[0] + share * (at - before[0])
        before = (at, value)
    return None


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    facts = report.circumstances(arguments)
    facts["command"] = "shardwise bench muon-vs-adamw " + shlex.join(arguments)
    words = [options.recipe, *(["--steps", str(options.steps)] if options.steps else [])]
    with tempfile.TemporaryDirectory() as scratch:
        asked = {"Muon": ["--optimizer", "muon"]}
        for lr in options.adamw_lr:
            asked[f"AdamW, lr {lr:g}"] = ["--optimizer", "adamw", "--lr", str(lr)]
        jobs = [
            Job(name=name, words=[*words, *more], folder=Path(scratch) / str(number))
            for number, (name, more) in enumerate(asked.items())
        ]
        muon, *others = finished(jobs, run_jobs(jobs))
    best = min(others, key=lambda curve: curve.bits[-1])
    name = options.name or f"muon-vs-adamw-{options.recipe}"
    paths = report.write([table([muon, *others], best)], facts, name, options.results)
    drawing = options.results / f"{name}.svg"
    about = f"held-out bits per byte: Muon {muon.bits[-1]:.3f}, {best.name} {best.bits[-1]:.3f}"
    drawing.write_text(picture("Muon and AdamW", about, {ORANGE: best, BLUE: muon}).render())
    print(paths[0].read_text())
    print("written:", *paths, drawing)


if __name__ == "__main__":
    main(sys.argv[1:])
