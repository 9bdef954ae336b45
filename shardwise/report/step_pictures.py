# SPDX-License-Identifier: Apache-2.0
"""Pictures of one step: bytes by kind; lanes of work and waits; memory that was planned, held and
measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.report import svg
from shardwise.report.events import Event, number
from shardwise.report.figures import KINDS
from shardwise.report.trace import LANES
from shardwise.words import seconds_text, size_text, tick_text

Profile = dict[str, Any]
LANE_HEIGHT, LANE_GAP = 30, 12
EXPOSED = (
    "Exposed communication: the time in which the compute lane could only wait for a collective "
    "(hatched), as a share of the step.",
    "On the host that is time inside wait(), for messages and for adding them up; on a device, "
    "time its compute stream stood still for another stream.",
)


def memory_canvas(profile: Profile) -> svg.Canvas | None:
    """Stacked areas, one for each kind, over the time of the step."""
    changes = profile.get("memory", {}).get("changes", [])
    start = profile.get("memory", {}).get("start", {})
    if not changes:
        return None
    seconds = float(profile["seconds"])
    present = {change[1] for change in changes} | set(start)
    kinds = [kind for kind in KINDS if kind in present]
    kinds += sorted(present - set(kinds))
    moments = _moments(start, changes, seconds)
    peak_at, peak = max(((at, sum(held.values())) for at, held in moments), key=lambda m: m[1])
    keys = [svg.Key(KINDS.get(kind, kind), svg.KIND_COLOURS.get(kind, svg.GREY)) for kind in kinds]
    about = f"peak {size_text(peak)} at {seconds_text(peak_at)} of {seconds_text(seconds)}"
    if profile.get("clock") == "device":
        about += " by the host's clock, which is ahead of the device"
    about += "; the library's own buffers, no activations"
    canvas = svg.Canvas(svg.WIDTH, 0, f"memory by kind over one step, {about}")
    top = svg.draw_title(canvas, "Memory over one step", about, keys)
    canvas.height = top + 300
    unit, name = _time_unit(seconds)
    frame = svg.draw_axes(
        canvas,
        top=top,
        height=248,
        x_range=(0, seconds / unit),
        y_range=(0, peak * 1.06 or 1),
        x_label=f"time in the step ({name})",
        y_label="bytes on this rank",
        x_text="{:g}".format,
        y_text=lambda value: tick_text(size_text(value)),
        y_base=2,
    )
    floor = [0] * len(moments)
    for kind in kinds:
        ceiling = [low + held.get(kind, 0) for low, (_, held) in zip(floor, moments, strict=True)]
        if ceiling != floor:
            outline = _steps(moments, ceiling, seconds)
            under = _steps(moments, floor, seconds)
            most = max(held.get(kind, 0) for _, held in moments)
            canvas.area(
                [(frame.x(a / unit), frame.y(b)) for a, b in [*outline, *reversed(under)]],
                tip=f"{KINDS.get(kind, kind)}: {size_text(most)} at most",
                fill=svg.KIND_COLOURS.get(kind, svg.GREY),
            )
        floor = ceiling
    x = frame.x(peak_at / unit)
    canvas.line(x, frame.y(peak), x, frame.bottom, class_="axis", stroke_dasharray="2 3")
    canvas.circle(x, frame.y(peak), 3.5, class_="ink", tip=about)
    return canvas


def fullest_moment(profile: Profile) -> dict[str, int]:
    """The bytes of each kind at the moment when the library's buffers held most."""
    held = profile["memory"]
    moments = _moments(held.get("start", {}), held["changes"], float(profile["seconds"]))
    return max((nbytes for _, nbytes in moments), key=lambda nbytes: sum(nbytes.values()))


def _moments(
    start: dict[str, int], changes: Sequence[Sequence[Any]], seconds: float
) -> list[tuple[float, dict[str, int]]]:
    """The bytes held from each moment on. Of changes that are too close to see in the picture, only
    the fullest moment and the last are kept: this loses no peak and draws no hairlines."""
    held, found = dict(start), [(0.0, dict(start))]
    apart = seconds / 1500
    for at, kind, nbytes in changes:
        held[kind] = held.get(kind, 0) + nbytes
        now = (min(float(at), seconds), dict(held))
        close = len(found) > 2 and now[0] - found[-2][0] < apart
        if close and sum(found[-1][1].values()) <= sum(found[-2][1].values()):
            found[-1] = now
        elif close and sum(found[-2][1].values()) <= sum(found[-1][1].values()):
            found[-2:] = [found[-1], now]
        else:
            found.append(now)
    return found


def _steps(
    moments: Sequence[tuple[float, Any]], heights: Sequence[float], end: float
) -> list[tuple[float, float]]:
    """A staircase: a height holds until the next moment."""
    points: list[tuple[float, float]] = []
    for position, ((at, _), height) in enumerate(zip(moments, heights, strict=True)):
        if position:
            points.append((at, heights[position - 1]))
        points.append((at, height))
    return [*points, (end, heights[-1])]


def lanes_canvas(profile: Profile) -> svg.Canvas | None:
    """Lanes of compute, gathers, reductions and the optimizer, and the exposed communication."""
    spans = profile.get("spans", [])
    if not spans:
        return None
    seconds, exposed = float(profile["seconds"]), float(profile.get("exposed", 0))
    lanes = [lane for lane in LANES if any(span["lane"] == lane for span in spans)]
    keys = [
        svg.Key(name, colour, name == "waiting")
        for name, colour in _COLOURS.items()
        if name == "waiting" or any(_sort(span) == name for span in spans)
    ]
    title = f"Exposed communication: {100 * exposed:.1f} % of the step"
    clock = profile.get("clock", "host")
    about = f"one step of {seconds_text(seconds)} on this rank, times of the {clock}"
    canvas = svg.Canvas(svg.WIDTH, 0, title)
    top = svg.draw_title(canvas, title, about, keys)
    bottom = top + len(lanes) * (LANE_HEIGHT + LANE_GAP)
    canvas.height = bottom + 52 + 16 * len(EXPOSED) + 10
    unit, name = _time_unit(seconds)
    x = svg.Scale(0, seconds / unit, svg.LEFT, svg.WIDTH - svg.RIGHT)
    svg.draw_x_axis(canvas, x, top, bottom, f"time in the step ({name})", "{:g}".format)
    rows = {lane: top + 4 + index * (LANE_HEIGHT + LANE_GAP) for index, lane in enumerate(lanes)}
    for lane, y in rows.items():
        canvas.text(x.begin - 8, y + LANE_HEIGHT / 2 + 4, lane, size=12, anchor="end")
        canvas.rect(
            svg.LEFT, y, svg.WIDTH - svg.RIGHT - svg.LEFT, LANE_HEIGHT, class_="pad", opacity=0.55
        )
    for span in spans:
        begin, end = x(span["begin"] / unit), x(span["end"] / unit)
        tip = f"{span['name']}: {seconds_text(span['end'] - span['begin'])}"
        if "nbytes" in span:
            tip += f", {size_text(span['nbytes'])} received"
        y, width = rows[span["lane"]], max(end - begin, 0.6)
        style = {"class_": "edge", "stroke_width": 0.5} if width > 3 else {}
        canvas.rect(begin, y, width, LANE_HEIGHT, fill=_COLOURS[_sort(span)], tip=tip, **style)
        label = span["name"].rsplit(" ", 1)[-1]
        models = span["lane"] == "compute" and not span.get("library")
        if models and width > 6 + svg.text_width(label, 10):
            middle = (begin + width / 2, y + LANE_HEIGHT / 2 + 4)
            canvas.text_on(*middle, label, 10, _COLOURS[_sort(span)], anchor="middle")
    y = rows.get("compute", top)
    for begin, end, reason in profile.get("stalls", []):
        tip = f"waiting for {reason}: {seconds_text(end - begin)}"
        left = x(begin / unit)
        width = max(x(end / unit) - left, 0.6)
        canvas.rect(left, y, width, LANE_HEIGHT, fill="url(#waiting)", tip=tip)
    for position, line in enumerate(EXPOSED):
        canvas.note(16, bottom + 58 + 16 * position, line)
    return canvas


_COLOURS = {
    "forward": svg.BLUE,
    "backward": svg.VIOLET,
    "library": svg.GREY,
    "waiting": svg.RED,
    "all-gather": svg.SKY,
    "reduction": svg.ORANGE,
    "outer reduction": svg.YELLOW,
    "exchange": svg.PINK,
    "optimizer": svg.GREEN,
}
_SORTS = {
    "gather": "all-gather",
    "reduce": "reduction",
    "outer": "outer reduction",
    "exchange": "exchange",
    "optimizer": "optimizer",
}


def _sort(span: Profile) -> str:
    if span["lane"] != "compute":
        return _SORTS[span["lane"]]
    if span.get("library"):
        return "library"
    return "backward" if span["name"].startswith(("backward", "recompute")) else "forward"


def _time_unit(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 2 else (1e-3, "ms") if seconds >= 2e-3 else (1e-6, "µs")


# ------------------------------------------------------------------------------ planned and held

Bar = dict[str, int]
_BAR_COLOURS = svg.KIND_COLOURS | {"transient": svg.YELLOW, "measured": svg.GREY}
_WORDS = KINDS | {
    "optimizer": "optimizer state",
    "transient": "more at the peak",
    "activations": "activations",
    "measured": "measured",
}
ROW, GAP = 34, 30
CUT = 8  # a measured bar that is so many times longer than the others is cut short


def planned_bar(plan: Mapping[str, Any]) -> Bar:
    """The parts of the plan's total."""
    found = {
        "main": plan["rest"].get("main", 0),
        "compute": plan["rest"].get("compute", 0),
        "grad": plan["loaded"].get("grad", 0),
        "optimizer": plan["optimizer_bytes"],
        "activations": plan.get("activations") or 0,
    }
    # Gradients need not all exist at the peak.
    found["grad"] -= min(found["grad"], max(0, sum(found.values()) - plan["total"]))
    return found | {"transient": max(0, plan["total"] - sum(found.values()))}


def memory_bars_canvas(
    plan: Mapping[str, Any], profile: Mapping[str, Any], steps: Sequence[Event]
) -> svg.Canvas | None:
    """Memory that was planned, held and measured; None if fewer than two of these are known."""
    measured = max((m for e in steps if (m := number(e.get("memory"))) is not None), default=0)
    device = profile.get("clock") == "device"
    rows: list[tuple[str, str, Bar]] = []
    if plan:
        followed = plan.get("activations") is not None
        words = "activations included" if followed else "activations are not in it"
        rows.append(("the plan", f"peak of one step; {words}", planned_bar(plan)))
    if profile.get("memory", {}).get("changes"):
        about = "the library's buffers at the peak of the recorded step, without optimizer state"
        rows.append(("buffers", f"{about} and activations", fullest_moment(dict(profile))))
    if measured:
        where = "the GPU's allocator" if device else "the whole process: Python and torch too"
        rows.append(("measured", f"peak of {where}", {"measured": int(measured)}))
    if len(rows) < 2:
        return None
    kinds = [kind for kind in _WORDS if any(bar.get(kind) for _, _, bar in rows)]
    kinds += sorted({kind for _, _, bar in rows for kind in bar} - set(_WORDS))
    keys = [svg.Key(_WORDS.get(kind, kind), _BAR_COLOURS.get(kind, svg.GREY)) for kind in kinds]
    title, about = "Memory of one rank", "planned, held and measured"
    canvas = svg.Canvas(svg.WIDTH, 0, f"{title}, {about}")
    top = svg.draw_title(canvas, title, about, keys)
    bottom = top + len(rows) * (ROW + GAP)
    canvas.height = bottom + 44
    most = float(max(sum(bar.values()) for _, _, bar in rows))
    # A process also holds Python and torch. If these are most of its memory, the bar is cut short.
    least = max(sum(bar.values()) for _, _, bar in rows if "measured" not in bar)
    most = most if most <= CUT * least else 1.5 * least
    x = svg.Scale(0, most * 1.12, 100, svg.WIDTH - 24)
    svg.draw_x_axis(
        canvas, x, top, bottom, "bytes", lambda value: tick_text(size_text(value)), base=2
    )
    for position, (name, about, bar) in enumerate(rows):
        y, at = top + 4 + position * (ROW + GAP), 0
        canvas.text(90, y + 22, name, size=13, anchor="end", font_weight=600)
        for kind in kinds:
            nbytes = bar.get(kind, 0)
            if nbytes > 0:
                tip = f"{name}: {_WORDS.get(kind, kind)} {size_text(nbytes)}"
                left, right = x(at), x(min(at + nbytes, most))
                colour = _BAR_COLOURS.get(kind, svg.GREY)
                canvas.rect(left, y, right - left, ROW, fill=colour, class_="edge", tip=tip)
                at += nbytes
        if at > most:
            canvas.rect(x(most) - 24, y, 12, ROW, class_="paper")  # the bar goes on
        canvas.text(x(min(at, most)) + 6, y + 22, size_text(at), size=12)
        canvas.note(x.begin, y + ROW + 15, about)
    return canvas
