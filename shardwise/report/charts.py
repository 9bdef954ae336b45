# SPDX-License-Identifier: Apache-2.0
"""The charts of a page, as plotly.js draws them: loss and other figures over a run or several runs;
memory, lanes and shards of one rank.

A run may have a million steps, and a chart has a thousand columns. The steps of one column become
a band from the lowest to the highest value and a line through their mean, so that no spike is lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy

from shardwise.report.events import Event, events_of, last, number, points_of
from shardwise.report.trace import LANES, Profile
from shardwise.words import seconds_text, size_text

Trace = dict[str, Any]
Point = tuple[float, float, float]  # (step, tokens, value)
COLUMNS = 1500
FIRST = 200  # steps at the begin of a run that are all drawn, for logarithmic axes
FEW = 60  # largest number of points that are drawn as dots
# After Okabe and Ito: colour-blind people can distinguish them, on both themes.
BLUE, ORANGE, GREEN, RED = "#1B7FC4", "#E69F00", "#009E73", "#D55E00"
SKY, PINK, YELLOW, GREY = "#56B4E9", "#CC79A7", "#D9C400", "#8A8F98"
VIOLET, MINT = "#6A5ACD", "#8FD3B6"
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY)
DASHES = ("solid", "dot", "dash")  # for more runs than colours

# Words and colour of each kind of bytes, in the order in which they are stacked.
KINDS = {
    "main": ("main weights", BLUE),
    "compute": ("compute weights", SKY),
    "staging": ("weights before fp8 encoding", VIOLET),
    "workspace": ("one decoded matrix", PINK),
    "grad": ("gradients", ORANGE),
    "grad_transient": ("gradients in reduction", RED),
    "grad_accumulator": ("accumulated gradients", YELLOW),
    "receive": ("received messages", PINK),
    "step": ("optimizer step", MINT),
    "pool_idle": ("idle memory pool", GREY),
    "optimizer": ("optimizer state", GREEN),
    "transient": ("more at the peak", YELLOW),
    "activations": ("activations", VIOLET),
    "measured": ("measured", GREY),
}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure: traces and layout of plotly.js, and the words around it."""

    title: str
    about: str
    data: list[Trace]
    layout: dict[str, Any]
    height: int = 280
    wide: bool = False
    logs: bool = False  # whether the page offers logarithmic axes
    note: str = ""

    def json(self) -> str:
        """The figure for plotly.js, inside a script of a page: no name may end the script."""
        figure = {"data": self.data, "layout": self.layout}
        text = json.dumps(figure, separators=(",", ":"), allow_nan=False)
        return text.replace("<", "\\u003c")


# ------------------------------------------------------------------------------ over a run


def columns(x: Sequence[float], y: Sequence[float], count: int = COLUMNS) -> list[list[float]]:
    """[x, lowest, highest, mean] of each column; the first steps have a column each. The mean is
    taken over a neighbourhood, smaller at the begin, so that a steep fall is not drawn late."""
    size = len(y)
    edges = numpy.arange(size + 1)
    if size > count + FIRST:
        edges = numpy.append(
            numpy.arange(FIRST), numpy.linspace(FIRST, size, count + 1).astype(int)
        )
    begin, last = edges[:-1], edges[1:] - 1
    middle = (begin + last) // 2
    reach = numpy.minimum.reduce(
        [numpy.full(len(middle), size // 100), middle // 4, size - 1 - middle]
    )
    totals = numpy.append(0.0, numpy.cumsum(y))
    mean = (totals[middle + reach + 1] - totals[middle - reach]) / (2 * reach + 1)
    low, high = (pick.reduceat(numpy.asarray(y), begin) for pick in (numpy.minimum, numpy.maximum))
    return [values.tolist() for values in (numpy.asarray(x)[last], low, high, mean)]


def line(
    name: str, x: Sequence[float], y: Sequence[float], *, band: bool = False,
    count: int = COLUMNS, **style: Any,
) -> list[Trace]:  # fmt: skip
    """The traces of one line: the values, or (``band``) what was lowest and highest, faintly, and
    the mean."""
    group = {"legendgroup": name, "type": "scatter", "mode": "lines"}
    shown = group | {"name": escape(name, quote=False), "line": {"width": 2.4} | style}
    if not len(y):
        return []
    at, low, high, mean = columns(x, y, count)
    if not band:
        few = {"mode": "lines+markers"} if len(y) <= FEW else {}
        return [shown | {"x": _short(at), "y": _short(high)} | few]
    edges = [value for both in zip(low, high, strict=True) for value in both]
    faint = group | {
        "x": _short(value for value in at for _ in (low, high)), "y": _short(edges),
        "line": style | {"width": 1}, "opacity": 0.35, "showlegend": False, "hoverinfo": "skip",
    }  # fmt: skip
    return [faint, shown | {"x": _short(at), "y": _short(mean)}]


def _short(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.5g}") if abs(value) < 1e5 else round(value) for value in values]


def axes(x: str, y: str, **more: Any) -> dict[str, Any]:
    layout = {
        "xaxis": {"title": {"text": x}, "exponentformat": "B"},
        "yaxis": {"title": {"text": y}, "exponentformat": "B"},
        "hovermode": "x unified",
    }
    return layout | more


Runs = Mapping[str, Sequence[Event]]


def styles(runs: Runs) -> dict[str, dict[str, Any]]:
    """Colour and dash of each run."""
    return {
        name: {"color": PALETTE[at % 8], "dash": DASHES[at // 8 % 3], "width": 2}
        for at, name in enumerate(runs)
    }


def loss_chart(runs: Runs) -> Chart | None:
    """The loss over tokens; None without a loss. Of one run: of training and held out. Of several
    runs: held out, if every run has a curve of it."""
    alone = len(runs) == 1
    in_bits = any(number(e.get("bits_per_byte")) is not None for es in runs.values() for e in es)
    field, word = ("bits_per_byte", "bits per byte") if in_bits else ("loss", "nats per token")
    trained = {name: points_of(events, field) for name, events in runs.items()}
    held_out = {name: points_of(events, field, "eval") for name, events in runs.items()}
    if not any(trained.values()):
        return None
    layout = axes("tokens", word)

    def drawn(name: str, points: Sequence[Point], **style: Any) -> list[Trace]:
        return line(name, [p[1] for p in points], [p[2] for p in points], **style)

    if alone:
        ((name, events),) = runs.items()
        step, _, value = (held_out[name] or trained[name])[-1]
        corpus = last(events, "run").get("corpus") or {}
        kind = "held out" if held_out[name] else "train"
        about = f"{kind} {value:.3f} {word} at step {step:,.0f}"
        about += f", corpus {corpus['name']}" if corpus.get("name") else ""
        data = drawn("train", trained[name], band=True, color=BLUE)
        data += drawn("held out", held_out[name], color=ORANGE)
        at = {step: tokens for step, tokens, _ in trained[name]}
        resumed = [event.get("step") for event in events if event.get("kind") == "resume"]
        layout["shapes"] = [upright(at[step]) for step in resumed if step in at]
        about += "; dotted: resumed" if layout["shapes"] else ""
    else:
        evaluated = all(len(points) > 1 for points in held_out.values())
        about, data = "held out" if evaluated else "of training", []
        for name, style in styles(runs).items():
            shown = (held_out if evaluated else trained)[name]
            data += drawn(name, shown, band=not evaluated, count=COLUMNS // len(runs), **style)
    return Chart(title="Loss", about=about, data=data, layout=layout, height=460, wide=True,
                 logs=True)  # fmt: skip


def upright(x: float) -> dict[str, Any]:
    """A dotted vertical line over the whole height."""
    dotted = {"color": RED, "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": dotted}


def _rate(position: int) -> Callable[[Event], Any]:
    return lambda event: [*event.get("lr", ()), None, None][position]


# title: (label of y, the lines: (name, field)).
_OVER_STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gradient norm": ("norm", {"": "grad_norm"}),
    "Learning rate": ("learning rate", {"matrices": _rate(0), "the rest": _rate(1)}),
    "Speed": ("tokens per second", {"": "tokens_per_second"}),
    "Experts, worst layer": (
        "load, share", {"busiest, over the even share": "expert_load_max",
                        "share without work": "expert_idle_share"},
    ),
}  # fmt: skip


def run_charts(runs: Runs) -> Iterator[Chart]:
    """Norm, learning rate, speed and experts, of one run or of several runs on the same axes."""
    looks, alone = styles(runs), len(runs) == 1
    for title, (y_label, fields) in _OVER_STEPS.items():
        layout, data = axes("steps", y_label), []
        band = title != "Learning rate"
        about = "faint: lowest and highest, strong: mean" if band else ""
        for run, events in runs.items():
            for at, (what, read) in enumerate(fields.items()):
                points = points_of(events, read)
                style = looks[run] | ({"color": PALETTE[at]} if alone else {"dash": DASHES[at]})
                name = " ".join(filter(None, ("" if alone else run, what)))
                data += line(name or title, [p[0] for p in points], [p[2] for p in points],
                             band=band, count=COLUMNS // len(runs), **style)  # fmt: skip
        layout["showlegend"] = len(fields) > 1 or not alone
        if title == "Gradient norm":
            layout["yaxis"]["type"] = "log"
            skips = [e["step"] for es in runs.values() if alone for e in events_of(es, "skip")]
            layout["shapes"] = [upright(step) for step in skips]
            about += f"; steps dropped: {len(skips)}" if skips else ""
        if data:
            yield Chart(title=title, about=about, data=data, layout=layout, logs=True)


def experts_chart(events: Sequence[Event]) -> Chart | None:
    """The load of every expert of every layer in the last evaluated step; None without experts."""
    event = last(events, "experts")
    if not event.get("counts"):
        return None
    share = [[count * len(layer) / max(1, sum(layer)) for count in layer]
             for layer in event["counts"]]  # fmt: skip
    scale = [[0, BLUE], [0.5, "#F2F0E6"], [1, RED]]
    heat = {
        "type": "heatmap", "z": [_short(layer) for layer in share], "zmid": 1, "zmin": 0, "zmax": 2,
        "colorscale": scale, "xgap": 1, "ygap": 1, "colorbar": {"thickness": 10, "outlinewidth": 0},
        "hovertemplate": "layer %{y}, expert %{x}: %{z}x the even share<extra></extra>",
    }  # fmt: skip
    about = f"load over the even share (1.0) at step {event['step']:,.0f}"
    layout = axes("expert", "layer", hovermode="closest")
    for axis, count in (("xaxis", len(share[0])), ("yaxis", len(share))):
        layout[axis]["dtick"] = max(1, count // 16)
    layout["xaxis"]["showgrid"] = layout["yaxis"]["showgrid"] = False
    return Chart(title="Load of every expert", about=about, data=[heat], layout=layout)


# ------------------------------------------------------------------------------ one step

_COLOURS = {
    "forward": BLUE,
    "backward": VIOLET,
    "library": GREY,
    "gather": SKY,
    "reduce": ORANGE,
    "outer": YELLOW,
    "exchange": PINK,
    "optimizer": GREEN,
}
EXPOSED = (
    "Exposed communication is the time in which the compute lane could only wait for a collective "
    "(hatched). On the host that is time inside wait(), for messages and for adding them up; on a "
    "device, time its compute stream stood still for another stream."
)


def _sort(span: Profile) -> str:
    if span["lane"] != "compute" or span.get("library"):
        return "library" if span["lane"] == "compute" else str(span["lane"])
    return "backward" if span["name"].startswith(("backward", "recompute")) else "forward"


def _time_unit(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 2 else (1e-3, "ms") if seconds >= 2e-3 else (1e-6, "µs")


def bars(name: str, boxes: Iterable[tuple[Any, float, float, str, str]], **style: Any) -> Trace:
    """Horizontal bars: (row, begin, length, tip, label) of each."""
    y, base, x, tips, labels = (list(column) for column in zip(*boxes, strict=True))
    return {
        "type": "bar", "orientation": "h", "name": escape(name, quote=False), "hoverinfo": "text",
        "y": y, "base": base, "x": x, "hovertext": [escape(tip, quote=False) for tip in tips],
        "text": [escape(label, quote=False) for label in labels], "textposition": "inside",
        "insidetextanchor": "middle", "textangle": 0, "marker": {"line": {"width": 0}} | style,
    }  # fmt: skip


def rows_layout(x_label: str, **more: Any) -> dict[str, Any]:
    layout = axes(x_label, "", barmode="overlay", hovermode="closest", bargap=0.25)
    layout["yaxis"] |= {"autorange": "reversed", "fixedrange": True, "showgrid": False}
    return layout | {"uniformtext": {"minsize": 9, "mode": "hide"}} | more


def lanes_chart(profile: Profile) -> Chart | None:
    """Lanes of compute, gathers, reductions and the optimizer, and the exposed communication."""
    spans = profile.get("spans", [])
    if not spans:
        return None
    seconds, exposed = float(profile["seconds"]), float(profile.get("exposed", 0))
    unit, name = _time_unit(seconds)
    data = []
    for sort, colour in _COLOURS.items():
        boxes = []
        for span in (span for span in spans if _sort(span) == sort):
            length = span["end"] - span["begin"]
            tip = f"{span['name']}: {seconds_text(length)}"
            tip += f", {size_text(span['nbytes'])} received" if "nbytes" in span else ""
            label = span["name"].rsplit(" ", 1)[-1] if sort in ("forward", "backward") else ""
            boxes.append((span["lane"], span["begin"] / unit, length / unit, tip, label))
        if boxes:
            data.append(bars(sort, boxes, color=colour))
    waits = [
        ("compute", b / unit, (e - b) / unit, f"waiting for {reason}: {seconds_text(e - b)}", "")
        for b, e, reason in profile.get("stalls", [])
    ]
    if waits:
        hatched = {"shape": "/", "size": 5, "solidity": 0.4, "fgcolor": "#ffffff", "bgcolor": RED}
        data.append(bars("waiting", waits, color=RED, pattern=hatched))
    lanes = [lane for lane in LANES if any(span["lane"] == lane for span in spans)]
    layout = rows_layout(f"time in the step ({name})")
    layout["yaxis"] |= {"categoryorder": "array", "categoryarray": lanes, "type": "category"}
    about = f"one step of {seconds_text(seconds)} on this rank, times of the "
    return Chart(
        title=f"Exposed communication: {100 * exposed:.1f} % of the step",
        about=f"{about}{profile.get('clock', 'host')}; drag to zoom", data=data, layout=layout,
        height=110 + 46 * len(lanes), wide=True, note=EXPOSED,
    )  # fmt: skip


def moments(profile: Profile) -> list[tuple[float, dict[str, int]]]:
    """The bytes held from each moment on; of a column of the chart, the fullest moment."""
    memory, seconds = profile.get("memory") or {}, float(profile["seconds"])
    held = dict(memory.get("start", {}))
    found = {-1: (0.0, dict(held))}  # by column
    for at, kind, nbytes in memory.get("changes", []):
        held[kind] = held.get(kind, 0) + nbytes
        now, column = min(float(at), seconds), int(COLUMNS * at / seconds)
        before = found.get(column, (now, {}))
        if sum(held.values()) >= sum(before[1].values()):
            found[column] = now, dict(held)
    found[COLUMNS + 1] = seconds, held
    return list(found.values()) if memory.get("changes") else []


def in_order(kinds: Iterable[str]) -> list[str]:
    present = set(kinds)
    return [kind for kind in KINDS if kind in present] + sorted(present - set(KINDS))


def byte_unit(nbytes: float) -> tuple[float, str]:
    """The unit of an axis that ends at so many bytes."""
    power = min(4, int(math.log2(max(nbytes, 1)) // 10))
    return 1024.0**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]


def memory_chart(profile: Profile) -> Chart | None:
    """Stacked areas, one for each kind, over the time of the step."""
    found = moments(profile) if profile else []
    if not found:
        return None
    seconds = float(profile["seconds"])
    peak_at, held = max(found, key=lambda moment: sum(moment[1].values()))
    peak = sum(held.values())
    (unit, name), (per, size) = _time_unit(seconds), byte_unit(peak)
    times = _short(at / unit for at, _ in found)
    data = []
    for kind in in_order(kind for _, held in found for kind in held):
        words, colour = KINDS.get(kind, (kind, GREY))
        values = [held.get(kind, 0) for _, held in found]
        if any(values):
            data.append({
                "type": "scatter", "mode": "lines", "name": escape(words, quote=False), "x": times,
                "y": _short(value / per for value in values), "stackgroup": "bytes",
                "line": {"shape": "hv", "width": 0, "color": colour}, "fillcolor": colour,
                "text": [size_text(value) for value in values],
                "hovertemplate": "%{text}",
            })  # fmt: skip
    about = f"peak {size_text(peak)} at {seconds_text(peak_at)} of {seconds_text(seconds)}"
    if profile.get("clock") == "device":
        about += " by the host's clock, which is ahead of the device"
    layout = axes(f"time in the step ({name})", size)
    layout["yaxis"]["rangemode"] = "tozero"
    about += "; the library's own buffers, no activations"
    return Chart(title="Memory over one step", about=about, data=data, layout=layout, height=330,
                 wide=True)  # fmt: skip


def planned_bar(plan: Mapping[str, Any]) -> dict[str, int]:
    """The parts of the plan's total."""
    found = {kind: plan["rest"].get(kind, 0) for kind in ("main", "compute")}
    found |= {"grad": plan["loaded"].get("grad", 0), "optimizer": plan["optimizer_bytes"]}
    found["activations"] = plan.get("activations") or 0
    # Gradients need not all exist at the peak.
    found["grad"] -= min(found["grad"], max(0, sum(found.values()) - plan["total"]))
    return found | {"transient": max(0, plan["total"] - sum(found.values()))}


def memory_bars(plan: Mapping[str, Any], profile: Profile, steps: Sequence[Event]) -> Chart | None:
    """The memory that was planned and measured, one bar each; None if only one is known."""
    measured = max((m for e in steps if (m := number(e.get("memory"))) is not None), default=0)
    if not plan or not measured:
        return None
    rows = {"the plan": planned_bar(plan), "measured": {"measured": int(measured)}}
    on_device = profile.get("clock") == "device"
    whole = "the GPU's allocator" if on_device else "the whole process, Python and torch too"
    planned = "with" if plan.get("activations") is not None else "without"
    per, size = byte_unit(float(max(sum(bar.values()) for bar in rows.values())))
    data = []
    for row, bar in rows.items():
        begin = 0
        for kind in in_order(bar):
            if nbytes := bar[kind]:
                words, colour = KINDS[kind]
                tip = f"{words}: {size_text(nbytes)}"
                box = (row, begin / per, nbytes / per, tip, size_text(nbytes))
                data.append(bars(words, [box], color=colour))
                begin += nbytes
    totals = ", ".join(f"{name} {size_text(sum(bar.values()))}" for name, bar in rows.items())
    note = f"the plan: {planned} activations; measured: the peak of {whole}."
    return Chart(title="Memory of one rank", about=totals, data=data, layout=rows_layout(size),
                 height=224, wide=True, note=note)  # fmt: skip
