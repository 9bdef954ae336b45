# SPDX-License-Identifier: Apache-2.0
"""One picture of memory: what the plan expects, what the library's buffers held, what was measured.

the plan          main | compute | gradients | optimizer | transient | activations
buffers           the same kinds at the fullest moment of the recorded step
measured          one bar: of the GPU's allocator, or of the whole process on a CPU
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.report.axes import WIDTH, Key, draw_title, draw_x_axis, title_height
from shardwise.report.series import Event, number
from shardwise.report.sizes import size_text, tick_text
from shardwise.report.step_pictures import fullest_moment
from shardwise.report.svg import GREEN, GREY, KIND_COLOURS, ORANGE, YELLOW, Canvas, Scale
from shardwise.report.table import KINDS

Bar = dict[str, int]
_COLOURS = KIND_COLOURS | {
    "optimizer": GREEN,
    "transient": YELLOW,
    "other": GREY,
    "measured": GREY,
    "grad": ORANGE,
}
_WORDS = KINDS | {
    "optimizer": "optimizer state",
    "transient": "more at the peak",
    "activations": "activations",
    "measured": "measured",
}
ROW, GAP = 34, 30
CUT = 8  # times what is planned: from there on the whole process is not drawn to scale


def planned_bar(plan: Mapping[str, Any]) -> Bar:
    """The plan's total, by what it consists of."""
    found = {
        "main": plan["rest"].get("main", 0),
        "compute": plan["rest"].get("compute", 0),
        "grad": plan["loaded"].get("grad", 0),
        "optimizer": plan["optimizer_bytes"],
        "activations": plan.get("activations") or 0,
    }
    # At the peak not all gradients need be there.
    found["grad"] -= min(found["grad"], max(0, sum(found.values()) - plan["total"]))
    return found | {"transient": max(0, plan["total"] - sum(found.values()))}


def memory_bars_canvas(
    plan: Mapping[str, Any], profile: Mapping[str, Any], steps: Sequence[Event]
) -> Canvas | None:
    """None where fewer than two of the three are known."""
    measured = max((m for e in steps if (m := number(e.get("memory"))) is not None), default=0)
    device = profile.get("clock") == "device"
    rows: list[tuple[str, str, Bar]] = []
    if plan:
        followed = plan.get("activations") is not None
        words = "activations included" if followed else "activations are not in it"
        rows.append(("the plan", f"peak of one step; {words}", planned_bar(plan)))
    if profile.get("memory", {}).get("changes"):
        about = "the library's own, at the fullest moment of the recorded step, without optimizer"
        rows.append(("buffers", f"{about} state and activations", fullest_moment(dict(profile))))
    if measured:
        where = "the GPU's allocator" if device else "the whole process: Python and torch too"
        rows.append(("measured", f"peak of {where}", {"measured": int(measured)}))
    if len(rows) < 2:
        return None
    kinds = [kind for kind in _WORDS if any(bar.get(kind) for _, _, bar in rows)]
    kinds += sorted({kind for _, _, bar in rows for kind in bar} - set(_WORDS))
    keys = [Key(_WORDS.get(kind, kind), _COLOURS.get(kind, GREY)) for kind in kinds]
    title, about = "Memory of one rank", "from what is planned to what is used"
    top = title_height(about, keys, WIDTH)
    bottom = top + len(rows) * (ROW + GAP)
    canvas = Canvas(WIDTH, bottom + 44, f"{title}, {about}")
    draw_title(canvas, title, about, keys)
    most = float(max(sum(bar.values()) for _, _, bar in rows))
    # A process holds Python and torch too. Where these are most of it, their bar is cut short.
    least = max(sum(bar.values()) for _, _, bar in rows if "measured" not in bar)
    most = most if most <= CUT * least else 1.5 * least
    x = Scale(0, most * 1.12, 100, WIDTH - 24)
    draw_x_axis(canvas, x, top, bottom, "bytes", lambda value: tick_text(size_text(value)), base=2)
    for position, (name, about, bar) in enumerate(rows):
        y, at = top + 4 + position * (ROW + GAP), 0
        canvas.text(90, y + 22, name, size=13, anchor="end", font_weight=600)
        for kind in kinds:
            nbytes = bar.get(kind, 0)
            if nbytes > 0:
                tip = f"{name}: {_WORDS.get(kind, kind)} {size_text(nbytes)}"
                left, right = x(at), x(min(at + nbytes, most))
                colour = _COLOURS.get(kind, GREY)
                canvas.rect(left, y, right - left, ROW, fill=colour, class_="edge", tip=tip)
                at += nbytes
        if at > most:
            canvas.rect(x(most) - 24, y, 12, ROW, class_="paper")  # the bar goes on
        canvas.text(x(min(at, most)) + 6, y + 22, size_text(at), size=12)
        canvas.text(x.begin, y + ROW + 15, about, size=11, class_="faint")
    return canvas
