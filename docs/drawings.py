# SPDX-License-Identifier: Apache-2.0
"""``python -m docs.drawings``: draw the SVG files of docs/img anew, each in light and in dark.

A drawing comes from the code itself (a plan, a recorded step) or from a file in benchmarks/results.
A test draws them again and compares (tests/unit/test_documents.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import shardwise as sw
from shardwise.core.placements import STRATEGIES
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.report import plan as planning
from shardwise.report.activations import Follower
from shardwise.report.figures import KINDS
from shardwise.report.shard_map import draw_unit
from shardwise.report.step_pictures import lanes_canvas
from shardwise.report.svg import (
    BLUE,
    GREEN,
    GREY,
    KIND_COLOURS,
    ORANGE,
    PINK,
    RED,
    SKY,
    WIDTH,
    YELLOW,
    Canvas,
    Key,
    Scale,
    draw_axes,
    draw_title,
    draw_x_axis,
    ink_on,
)
from shardwise.words import size_text, tick_text

HERE = Path(__file__).parent
IMAGES = HERE / "img"
RESULTS = HERE.parent / "benchmarks" / "results"


def model_of(**values: int) -> GPT:
    sizes = {"vocab_size": 256, "dim": 64, "num_layers": 2, "num_heads": 4, "context": 32}
    with torch.device("meta"):
        return GPT(GPTConfig(**(sizes | values)))  # type: ignore[arg-type]


def tables(name: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of a result file, by the title of their table."""
    held = json.loads((RESULTS / f"{name}.json").read_text())
    return {table["title"]: table["rows"] for table in held["tables"]}


def short(name: str) -> str:
    """blocks.0.feed_forward.down.weight: down of block 0."""
    words = name.removesuffix(".weight").split(".")
    return f"{words[1]}.{words[-1]}" if words[0] == "blocks" else words[-1]


def two_strategies() -> Canvas:
    """The weights of two blocks over four ranks: cut between rows, and with whole matrices."""
    model = model_of()
    cut = sw.plan(model, {"dp": 4}, "zero3", optimizer="muon")
    whole = sw.plan(model, {"dp": 4}, "zero1", optimizer="muon", bucket_mb=25)
    panels = [
        ("fully_shard, zero(3): each block cut between rows", cut.shard_map["units"][1]),
        ("data_parallel, zero(1): each matrix whole on one rank", whole.shard_map["units"][0]),
    ]
    about = "main weights of two transformer blocks on 4 ranks; one colour a parameter, to scale"
    canvas = Canvas(WIDTH, 0, "One model, two strategies")
    at = draw_title(canvas, "One model, two strategies", about, [Key("padding", "")]) + 4
    for name, unit in panels:
        items = [item | {"name": short(item["name"])} for item in unit["items"]]
        at = draw_unit(canvas, unit | {"name": name, "items": items}, at, 70)
    canvas.height = at - 6
    return canvas


def strategies() -> Canvas:
    """Bytes of one rank under each strategy, by the plan."""
    model = model_of(vocab_size=32768, dim=768, num_layers=4, num_heads=12, context=1024)
    bars = {}
    for name, strategy in STRATEGIES.items():
        mesh = {"dp": 8} if strategy.num_axes == 1 else {"dp_outer": 2, "dp": 4}
        bars[name] = bars_of(sw.plan(model, mesh, strategy, optimizer="muon"))
    return bars_canvas(bars)


BARS = {
    "main": "main weights",
    "compute": "compute weights kept",
    "grad": "gradients",
    "optimizer": "optimizer state",
    "transient": "at the peak beyond that",
}
_BAR_COLOURS = KIND_COLOURS | {"transient": RED, "optimizer": GREEN}


def bars_of(plan: planning.Plan) -> dict[str, int]:
    """The memory of one rank as a bar: at rest, with gradients, and what the peak adds."""
    held = {
        "main": plan.rest.get("main", 0),
        "compute": plan.rest.get("compute", 0),
        "grad": plan.loaded.get("grad", 0),
        "optimizer": plan.optimizer_bytes,
    }
    return held | {"transient": plan.peak_total + plan.optimizer_bytes - sum(held.values())}


def bars_canvas(bars: Mapping[str, Mapping[str, int]]) -> Canvas:
    """Stacked bars, one a strategy."""
    keys = [Key(words, _BAR_COLOURS[kind]) for kind, words in BARS.items()]
    about = "peak of one step by the plan, activations not counted"
    canvas = Canvas(WIDTH, 0, "bytes per rank by strategy")
    top = draw_title(canvas, "Bytes per rank by strategy", about, keys)
    canvas.height = top + 320
    highest = max(sum(bar.values()) for bar in bars.values())
    frame = draw_axes(
        canvas,
        top=top + 14,
        height=262,
        x_range=(0, 1),
        y_range=(0, highest * 1.08),
        x_label="",
        y_label="bytes per rank",
        x_text=lambda value: "",
        y_text=lambda value: tick_text(size_text(value)),
        y_base=2,
    )
    step = (frame.x.end - frame.x.begin) / len(bars)
    width = min(84.0, step * 0.62)
    for position, (name, bar) in enumerate(bars.items()):
        middle = frame.x.begin + step * (position + 0.5)
        base = 0
        for kind, words in BARS.items():
            nbytes = bar.get(kind, 0)
            if nbytes:
                y = frame.y(base + nbytes)
                canvas.rect(
                    middle - width / 2,
                    y,
                    width,
                    frame.y(base) - y,
                    class_="edge",
                    stroke_width=1,
                    fill=_BAR_COLOURS[kind],
                    tip=f"{name}: {words} {size_text(nbytes)}",
                )
            base += nbytes
        style: dict[str, Any] = {"size": 12, "anchor": "middle", "font_weight": 400}
        canvas.text(middle, frame.y(base) - 6, size_text(base), **style)
        canvas.text(middle, frame.bottom + 20, name, **style)
    return canvas


def memory() -> Canvas:
    """Everything that a rank holds over one step, activations included, by the plan."""
    held: list[dict[str, int]] = []

    class Recording(Follower):
        def note(self, kind: str = "", nbytes: int = 0) -> None:
            super().note(kind, nbytes)
            if self.peak == 0:  # the measured step begins
                held.clear()
            held.append(self._ledger.snapshot() | {"activations": self.live})

    model = model_of(vocab_size=4096, dim=512, num_layers=6, num_heads=8, context=512)
    with patch.object(planning, "Follower", Recording):
        plan = sw.plan(model, {"dp": 8}, "zero3", optimizer="muon", batch=(4, 512))
    kinds = [kind for kind in (*KINDS, "activations") if any(one.get(kind) for one in held)]
    keys = [Key(KINDS.get(kind, kind), KIND_COLOURS[kind]) for kind in kinds]
    peak = max(sum(one.values()) for one in held)
    about = "6 blocks of width 512 under zero(3), rank 0 of 8, 4 x 512 tokens: "
    about += f"{size_text(peak)} at the peak, {size_text(plan.optimizer_bytes)} of momentum besides"
    canvas = Canvas(WIDTH, 0, "Memory over one step")
    top = draw_title(canvas, "Memory over one step", about, keys)
    canvas.height = top + 300
    frame = draw_axes(
        canvas, top=top, height=248, x_range=(0, len(held) - 1),
        y_range=(0, peak * 1.06), x_label="operations of one step, in order",
        y_label="bytes on this rank", x_text=lambda value: f"{value:,.0f}",
        y_text=lambda value: tick_text(size_text(value)), y_base=2,
    )  # fmt: skip
    stride = max(1, len(held) // 600)
    shown = [max(held[at : at + stride], key=lambda one: sum(one.values()))
             for at in range(0, len(held), stride)]  # fmt: skip
    floor = [0] * len(shown)
    for kind in kinds:
        ceiling = [low + one.get(kind, 0) for low, one in zip(floor, shown, strict=True)]
        line = [(frame.x(at * stride), frame.y(value)) for at, value in enumerate(ceiling)]
        under = [(frame.x(at * stride), frame.y(value)) for at, value in enumerate(floor)]
        canvas.area([*line, *reversed(under)], fill=KIND_COLOURS[kind], tip=KINDS.get(kind, kind))
        floor = ceiling
    return canvas


def unit() -> Canvas:
    """A schedule, not a measurement: three units, the middle one in colour."""
    phases = [  # (lane, begin, end, unit, words)
        *((0, 1 + u, 2 + u, u, f"forward {u}") for u in range(3)),
        *((1, u + (u == 0) * 0.0, u + 0.8, u, f"gather {u}") for u in range(3)),
        *((0, 5 + 1.6 * k, 6.5 + 1.6 * k, 2 - k, f"backward {2 - k}") for k in range(3)),
        *((1, 4.1 + 1.6 * k, 4.9 + 1.6 * k, 2 - k, f"gather {2 - k}") for k in range(3)),
        *((2, 6.6 + 1.6 * k, 7.8 + 1.6 * k, 2 - k, f"reduce {2 - k}") for k in range(3)),
    ]
    held = [(3, 1, 3, 1, "whole weights"), (3, 5.7, 8.1, 1, "whole weights"),
            (4, 7.2, 9.4, 1, "gradients"), (4, 9.4, 11.2, 1, "its shard")]  # fmt: skip
    lanes = ["compute", "gather lane", "reduce lane", "held: weights", "held: gradients"]
    about = "three units under zero(3); the middle one is in colour, the others are grey"
    canvas = Canvas(WIDTH, 310, "The life of a unit in one step")
    top = draw_title(canvas, "The life of a unit in one step", about) + 6
    x = Scale(0, 11.2, 130, WIDTH - 24)
    colours = {0: BLUE, 1: SKY, 2: ORANGE, 3: SKY, 4: YELLOW}
    for lane, name in enumerate(lanes):
        y = top + lane * 42
        canvas.text(120, y + 19, name, size=12, anchor="end")
        canvas.rect(x.begin, y, x.end - x.begin, 30, class_="pad", opacity=0.55)
    for lane, begin, end, number, words in [*phases, *held]:
        colour = colours[lane] if number == 1 else GREY
        y, left, width = top + lane * 42, x(begin), x(end) - x(begin)
        canvas.rect(left, y, width, 30, fill=colour, class_="edge", stroke_width=1,
                    opacity=1 if number == 1 else 0.45)  # fmt: skip
        ink = {"class_": "", "fill": ink_on(colour)} if number == 1 else {"class_": "faint"}
        canvas.text(left + width / 2, y + 19, words, size=10.5, anchor="middle", **ink)
    draw_x_axis(canvas, x, top, top + 210, "", str)
    canvas.text((x.begin + x.end) / 2, top + 228, "time", anchor="middle", class_="faint")
    return canvas


def replicas() -> Canvas:
    """What Muon sends and holds, over AdamW's."""
    lines = tables("replicas")
    colours = dict(zip(lines, (BLUE, ORANGE, GREEN, PINK), strict=True))
    keys = [Key(name, colour) for name, colour in colours.items()]
    about = "gpt_1b, one step of the busiest rank, by replicas; below 1.0: less than AdamW"
    panels = [
        ("sent_ratio", "bytes sent / AdamW", (0.95, 1.06)),
        ("peak_ratio", "peak memory / AdamW", (0.0, 1.1)),
    ]
    canvas = Canvas(WIDTH, 0, "Muon over AdamW, 2 to 4096 replicas")
    top = draw_title(canvas, canvas.title, about, keys)
    canvas.height = top + 2 * 230
    for number, (field, words, y_range) in enumerate(panels):
        frame = draw_axes(
            canvas, top=top + number * 230, height=170, x_range=(1, 12), y_range=y_range,
            x_label="replicas" if number else " ", y_label=words,
            x_text=lambda value: f"{2**round(value):,}", y_text=lambda value: f"{value:.2f}",
        )  # fmt: skip
        canvas.line(frame.x.begin, frame.y(1), frame.x.end, frame.y(1), class_="axis",
                    stroke_dasharray="5 4")  # fmt: skip
        for name, rows in lines.items():
            points = [(frame.x(math.log2(r["replicas"])), frame.y(r[field])) for r in rows]
            canvas.path(points, stroke=colours[name], stroke_width=2)
            for (x, y), row in zip(points, rows, strict=True):
                tip = f"{name}, {row['replicas']:,} replicas: {row[field]:.3f}"
                canvas.circle(x, y, 3, fill=colours[name], tip=tip)
    return canvas


def peers() -> Canvas:
    """Step times of whole systems, over torch FSDP2 in the same run."""
    cpu, gpu = tables("fsdp-gloo-fake-cpu"), tables("fsdp-gpu-fake-nvidia-h200")
    step = tables("muon-step-nvidia-h200")["GPT step, 1 nccl rank"]
    muon = {row["case"]: row["ratio"] for row in step}
    named = {"none": "no wrapping", "ddp": "torch DDP", "fsdp2": "torch FSDP2"}
    named |= {f"zero{stage}": f"shardwise zero({stage})" for stage in range(4)}
    panels = {
        "2 gloo ranks on 2 cores, 16.8M-parameter MLP, AdamW": cpu["Whole step, 2 gloo ranks"],
        "one H200, 0.96B GPT, AdamW, one NCCL rank": gpu["GPT step, 1 nccl rank"],
        "one H200, 0.96B GPT, AdamW, rank 0 of 8 pretended": gpu["GPT step, rank 0 of 8 (`fake`)"],
        "one H200, 0.96B GPT, Muon; over AdamW under the same wrapping": [
            {"system": name, "step_ratio": muon[name]}
            for name in ("torch FSDP2, torch.optim.Muon", "shardwise zero(3), Muon",
                         "shardwise data_parallel, Muon")
        ],
    }  # fmt: skip
    panels = {
        title: [(named.get(row["system"], row["system"]), row["step_ratio"]) for row in rows
                if not row["system"].endswith("trace")]
        for title, rows in panels.items()
    }  # fmt: skip
    rows = sum(map(len, panels.values()))
    about = "time of a training step over torch FSDP2's in the same run; shorter is faster"
    canvas = Canvas(WIDTH, 70 + 24 * rows + 40 * len(panels), "A training step beside peers")
    at = draw_title(canvas, canvas.title, about) + 8
    x = Scale(0, 1.8, 250, WIDTH - 60)
    for title, found in panels.items():
        canvas.text(16, at + 12, title, size=13, font_weight=600)
        at += 22
        canvas.line(x(1), at, x(1), at + 24 * len(found), class_="axis", stroke_dasharray="4 3")
        for system, value in found:
            ours = system.startswith("shardwise")
            canvas.text(240, at + 15, system, size=12, anchor="end")
            canvas.rect(x(0), at + 3, x(value) - x(0), 17, fill=BLUE if ours else GREY, rx=2)
            edge = x(1) if 0.93 < value < 1 else x(value)
            canvas.text(edge + 6, at + 16, f"{value:.3f}", size=11, class_="faint")
            at += 24
        at += 18
    return canvas


def lanes() -> Canvas:
    """The step that ``shardwise train smoke`` recorded."""
    drawn = lanes_canvas(json.loads((HERE / "recorded_step.json").read_text()))
    assert drawn is not None
    return drawn


DRAWINGS: dict[str, Callable[[], Canvas]] = {
    "two-strategies": two_strategies,
    "strategies": strategies,
    "memory": memory,
    "unit": unit,
    "replicas": replicas,
    "peers": peers,
    "lanes": lanes,
}


# Pictures that a benchmark drew, by their names here.
BENCHED = {
    "muon-adamw": "muon-vs-adamw-default",
    "optimizers": "optimizers-default",
    "shown-run": "shown-run-gpt_124m",
}


def benched(name: str, dark: bool) -> str:
    """The picture that a benchmark wrote beside its results, in one theme."""
    text = (RESULTS / f"{name}.svg").read_text()
    before, _, rest = text.partition("@media(prefers-color-scheme:dark){")
    night, _, after = rest.partition("}</style>")
    return f"{before}{night if dark else ''}</style>{after}"


def draw(names: Sequence[str] = tuple(DRAWINGS)) -> dict[str, str]:
    """The text of every file, by name."""
    canvases = {name: DRAWINGS[name]() for name in names}
    found = {}
    for dark, theme in ((False, "light"), (True, "dark")):
        for name, canvas in canvases.items():
            found[f"{name}-{theme}.svg"] = canvas.render(dark=dark) + "\n"
        found |= {f"{name}-{theme}.svg": benched(file, dark) for name, file in BENCHED.items()}
    return found


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for file, text in draw().items():
        (IMAGES / file).write_text(text)
