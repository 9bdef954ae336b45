# SPDX-License-Identifier: Apache-2.0
"""Pictures and the page: well-formed, self-contained, escaped, inside their frames."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from shardwise.report.html import compare_runs, loss_svg, read_events, report_html, write_report
from shardwise.report.plan import plan
from shardwise.report.series import loss_canvas, series, smoothed, thinned
from shardwise.report.shard_map import map_canvas
from shardwise.report.step_pictures import (
    lanes_canvas,
    memory_bars_canvas,
    memory_canvas,
    planned_bar,
)
from shardwise.report.svg import Canvas, Scale, ink_on, spread, text_width, ticks
from tests.models import Model

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "</script><script>alert(\"1\")</script><img src=x onerror=alert(1)> & 'quoted'"
VOID = {"meta", "br", "img", "link", "hr", "input"}
Event = dict[str, Any]


def model() -> Model:
    with torch.device("meta"):
        return Model(40, 3)


def profile() -> Event:
    """A step of two units, by hand: 10 ms, of which 2 were waited."""
    spans = []
    for number, (name, begin, end) in enumerate(
        [("forward a", 1, 3), ("forward b", 3, 4), ("backward b", 5, 7), ("backward a", 7, 8)]
    ):
        spans.append({"lane": "compute", "name": name, "begin": begin / 1e3, "end": end / 1e3})
        gather = {"lane": "gather", "name": "all_gather over dp", "nbytes": 1024 * number + 1}
        spans.append(gather | {"begin": begin / 1e3 - 1e-3, "end": begin / 1e3})
    spans.append({"lane": "reduce", "name": "reduce_scatter over dp", "begin": 7e-3, "end": 8e-3})
    spans.append({"lane": "optimizer", "name": "step", "begin": 9e-3, "end": 0.01})
    return {
        "kind": "profile",
        "seconds": 0.01,
        "clock": "host",
        "spans": spans,
        "stalls": [[0.0, 0.001, "all_gather over axis 'dp'"], [0.008, 0.009, "reduce_scatter"]],
        "exposed": 0.2,
        "exposed_seconds": 0.002,
        "idle": 0.0125,
        "memory": {
            "start": {"main": 4096},
            "changes": [
                [0.001, "compute", 8192],
                [0.004, "compute", -8192],
                [0.005, "grad_transient", 4096],
                [0.006, "grad", 2048],
                [0.008, "grad_transient", -4096],
            ],
        },
    }


def events(steps: int = 120) -> list[Event]:
    corpus = {"name": "stdlib", "sha256": "ab" * 32, "unigram": 4.7, "bigram": 3.4, "zlib": 2.1}
    run = {"kind": "run", "config": {"name": EVIL, "model": {"width": 64}}, "corpus": corpus}
    found: list[Event] = [run | {"world_size": 2, "versions": {"torch": "2.13"}}]
    planned = plan(model(), {"dp": 2}, "zero3", optimizer="muon").as_dict()
    found.append({"kind": "plan", "plan": planned})
    for step in range(1, steps + 1):
        bits = 2.0 + 6.0 / step
        found.append(
            {
                "kind": "step",
                "step": step,
                "loss": bits * 0.693,
                "bits_per_byte": "nan" if step == 7 else bits,
                "tokens": 1000 * step,
                "tokens_per_second": 5000.0,
                "grad_norm": 60.0 if step == 30 else 1.0,
                "lr": [0.02, 0.003],
                "mfu": 0.25,
                "memory": 1 << 30,
            }
        )
        if step % 40 == 0:
            found.append({"kind": "eval", "step": step, "loss": 1.4, "bits_per_byte": bits + 0.1})
        if step == 60:
            found.append({"kind": "resume", "step": 50, "path": "checkpoints/step-50"})
    found += [{"kind": "sample", "text": EVIL}, profile(), {"kind": "end", "reason": "done"}]
    return found


def canvases() -> dict[str, Canvas]:
    recorded = profile()
    made = plan(model(), {"dp_outer": 2, "dp": 2}, "hfsdp", name=EVIL)
    many = plan(model(), {"dp": 500}, "zero3")
    found = {
        "loss": loss_canvas(events()),
        "lanes": lanes_canvas(recorded),
        "memory": memory_canvas(recorded),
        "map": map_canvas(made.as_dict()["shard_map"]),
        "map of many": map_canvas(many.as_dict()["shard_map"]),
        "loss by logarithm": loss_canvas(events(), log=True),
        "memory bars": memory_bars_canvas(made.as_dict(), recorded, events()),
    }
    found |= {canvas.title: canvas for canvas in series({"": events()})}
    assert all(canvas is not None for canvas in found.values())
    return {name: canvas for name, canvas in found.items() if canvas is not None}


NAMES = ["loss", "lanes", "memory", "map", "map of many", "loss by logarithm"]
NAMES += ["memory bars", "Gradient norm", "Learning rate", "Speed"]


@pytest.fixture(scope="module")
def drawn() -> dict[str, Canvas]:
    return canvases()


# ------------------------------------------------------------------------------ every picture


def outside(text: str) -> list[str]:
    """Addresses that a browser would fetch."""
    plain = text.replace("http://www.w3.org/2000/svg", "")
    found = re.findall(r"(?:https?:)?//[\w.-]+\.\w+|(?:src|href)\s*=|@import|url\((?!#)", plain)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_xml_and_needs_nothing_else(name: str, drawn: dict[str, Canvas]) -> None:
    for standalone in (True, False):
        text = drawn[name].render(standalone=standalone)
        root = ElementTree.fromstring(text)
        assert root.tag == f"{SVG}svg" and len(list(root.iter())) > 15
        assert outside(text) == []
        assert not list(root.iter(f"{SVG}script"))
        assert len([e for e in root.iter(f"{SVG}title") if e.text]) > 1, "tips"


def cut_off(canvas: Canvas) -> list[str]:
    """Texts and boxes that leave the canvas."""
    root = ElementTree.fromstring(canvas.render())
    found = []
    for element in root.iter(f"{SVG}text"):
        words = element.text or ""
        x, y = float(element.attrib["x"]), float(element.attrib["y"])
        width = text_width(words, float(element.attrib["font-size"]))
        left = x - {"start": 0, "middle": width / 2, "end": width}[element.attrib["text-anchor"]]
        turned = "transform" in element.attrib
        if not 0 < y < canvas.height or (
            not turned and (left < -1 or left + width > canvas.width + 1)
        ):
            found.append(words)
    for element in root.iter(f"{SVG}rect"):
        if "x" in element.attrib:
            x, y, width, height = (float(element.attrib[n]) for n in ("x", "y", "width", "height"))
            if x < 0 or x + width > canvas.width + 0.01 or y + height > canvas.height:
                found.append(f"box at {x}, {y}")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_cut_off_at_the_edges(name: str, drawn: dict[str, Canvas]) -> None:
    assert cut_off(drawn[name]) == []
    assert drawn[name].render().count("<text") > 5


def test_the_checks_of_pictures_see_what_is_wrong() -> None:
    """Negative controls of the two tests above."""
    assert outside('<image href="https://example.org/x.png"/>')
    assert outside("<style>@import 'x'</style>") and outside('fill="url(file.svg)"')
    canvas = Canvas(100, 100, "x")
    canvas.text(10, 50, "fits")
    assert cut_off(canvas) == []
    canvas.text(60, 50, "too long to fit")
    canvas.text(10, 104, "below")
    canvas.rect(90, 10, 20, 5)
    assert cut_off(canvas) == ["too long to fit", "below", "box at 90.0, 10.0"]


def test_names_are_shown_as_they_are_never_run() -> None:
    """Parameters, spans, waits and corpora are named by others."""
    named = plan(model(), {"dp": 2}).as_dict()["shard_map"]
    named["units"][0]["name"] = named["units"][0]["items"][0]["name"] = EVIL
    recorded = profile()
    recorded["spans"][0]["name"] = recorded["stalls"][0][2] = EVIL
    run = events()
    run[0]["corpus"]["name"] = EVIL
    for canvas in (map_canvas(named), lanes_canvas(recorded), loss_canvas(run)):
        assert canvas is not None
        for standalone in (True, False):
            text = canvas.render(standalone=standalone)
            assert EVIL not in text and "<script" not in text
            everything = ElementTree.fromstring(text).iter()
            values = [value for e in everything for value in (e.text, *e.attrib.values()) if value]
            assert any(EVIL in value for value in values), "and yet it is there to read"


def test_labels_do_not_lie_on_each_other(drawn: dict[str, Canvas]) -> None:
    root = ElementTree.fromstring(drawn["loss"].render())
    right = [e for e in root.iter(f"{SVG}text") if float(e.attrib["x"]) > 700]
    heights = sorted(float(element.attrib["y"]) for element in right)
    assert len(heights) == 5, [element.text for element in right]
    assert all(b - a >= 16 for a, b in pairwise(heights))


# ------------------------------------------------------------------------------ what they show


def test_the_loss_shows_train_held_out_lines_and_resumes() -> None:
    text = loss_svg(events())
    assert text is not None
    for words in ("train 2.0", "held out 2.15", "unigram entropy 4.700", "bigram entropy 3.400"):
        assert words in text, words
    assert "zlib 2.100" in text and "resumed at step 50" in text and "corpus stdlib" in text
    assert ">tokens<" in text and ">bits per byte<" in text
    assert "nan" not in text
    plain = loss_svg([{"kind": "step", "step": 1, "loss": 3.0}, {"kind": "step", "step": 2}])
    assert plain is not None and ">steps<" in plain and ">nats per token<" in plain
    assert loss_svg([{"kind": "step", "step": 1, "loss": "nan"}]) is None
    assert loss_svg([]) is None


def test_a_spike_of_a_long_run_is_drawn() -> None:
    """One step of a hundred thousand, which every n-th point would miss."""
    points = [(float(s), 9.0 if s == 77_777 else 2.0, float(s)) for s in range(100_000)]
    kept = thinned(points)
    assert len(kept) <= 1702 and max(y for _, y, _ in kept) == 9.0 and kept[-1] == points[-1]
    assert max(y for _, y, _ in points[:: len(points) // 1500]) == 2.0, "the negative control"
    assert len(smoothed(points)) <= 1702 and thinned(points[:1500]) == points[:1500]


def test_logarithms_of_both_axes_are_a_picture_of_their_own() -> None:
    scale = Scale(1, 1000, 0, 300, log=True)
    assert [round(scale(value)) for value in (1, 10, 100, 1000)] == [0, 100, 200, 300]
    assert scale.ticks(7) == [1, 3, 10, 30, 100, 300, 1000] and Scale(0, 10, 0, 1).ticks(5)[1] == 2
    page = report_html(events())
    assert 'class="either"' in page and ">log axes<" in page
    flat = [{"kind": "step", "step": step, "loss": 0.0} for step in range(1, 4)]
    assert 'class="either"' in report_html(flat), "zero has no logarithm: both are straight"


def test_several_runs_are_one_page(tmp_path: Path) -> None:
    first, second = events(), events(60)
    second[0] = second[0] | {"config": {"name": EVIL, "model": {"width": 96}}}
    for name, run in (("one", first), ("two", second)):
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps(event) + "\n" for event in run)
        (tmp_path / name / "events.jsonl").write_text(lines)
    page = compare_runs([tmp_path / "one", tmp_path / "two"], tmp_path / "both.html").read_text()
    reader = read(page)
    assert reader.problems == [] and reader.open == [] and outside(page) == []
    assert "model.width" in page and ">96<" in page and ">64<" in page, "what differs"
    assert "versions.torch" not in page, "what does not"
    assert reader.tags.count("figure") == 5 and ">held-out bits per byte<" in page
    with pytest.raises(ValueError, match="three holds no events"):
        compare_runs([tmp_path / "one", tmp_path / "three"], tmp_path / "both.html")


def test_the_bars_of_memory_add_up_to_the_plan() -> None:
    made = plan(model(), {"dp": 2}, "zero3", optimizer="muon").as_dict()
    assert sum(planned_bar(made).values()) == made["total"] > 0
    assert memory_bars_canvas({}, profile(), []) is None, "one bar explains nothing"
    measured = [{"kind": "step", "step": 1, "memory": 1 << 30}]
    drawn = memory_bars_canvas(made, profile(), measured)
    assert (
        drawn is not None and "1.00 GiB" in drawn.render() and "the whole process" in drawn.render()
    )


def test_what_was_done_again_after_a_resume_is_drawn_once() -> None:
    """Killed at step 6, resumed from 3: steps 4 to 6 of the first life are gone."""
    again: list[Event] = [{"kind": "step", "step": s, "loss": 9.0} for s in range(1, 7)]
    again += [{"kind": "resume", "step": 3}]
    again += [{"kind": "step", "step": s, "loss": 2.0} for s in range(4, 6)]
    dropped = [{"kind": "skip", "step": 5, "grad_norm": "nan"}]
    happened: list[Event] = [*again[:6], *dropped, *again[6:], *dropped]
    happened += [{"kind": "error", "step": 6, "text": "the end of it"}]
    page = report_html(happened + [{"kind": "step", "step": 5, "grad_norm": 1.0}])
    assert "Gradient norm, steps dropped: 1" in page and "the end of it" in page
    text = loss_svg(again)
    assert text is not None
    tips = re.findall(r"<title>step (\d): train ([\d.]+)", text)
    assert tips == [("1", "9.000"), ("2", "9.000"), ("3", "9.000"), ("4", "2.000"), ("5", "2.000")]


def test_lanes_show_every_span_every_wait_and_the_number(drawn: dict[str, Canvas]) -> None:
    text = drawn["lanes"].render()
    recorded = profile()
    assert "Exposed communication: 20.0 % of the step" in text
    assert text.count("url(#waiting)") == len(recorded["stalls"]) + 1, "and one in the legend"
    for span in recorded["spans"]:
        assert f"<title>{span['name']}: " in text
    assert "could only wait for a collective" in text, "the definition stands under the picture"
    assert lanes_canvas({"spans": []}) is None


def test_the_areas_of_memory_add_up(drawn: dict[str, Canvas]) -> None:
    text = drawn["memory"].render()
    assert "peak 12.0 KiB at 1.00 ms of 10.0 ms" in text
    root = ElementTree.fromstring(text)
    areas = list(root.iter(f"{SVG}polygon"))
    assert len(areas) == 4
    floor = max(float(p.split(",")[1]) for p in areas[0].attrib["points"].split())
    heights = []
    for area in areas:  # the top of the highest stack is that of the total
        heights.append(min(float(p.split(",")[1]) for p in area.attrib["points"].split()))
    assert min(heights) < heights[0] < floor
    assert memory_canvas({"memory": {"changes": [], "start": {}}}) is None


def test_the_shard_map_holds_every_byte_of_every_parameter_once() -> None:
    made = plan(model(), {"dp": 3}, "zero3")
    canvas = map_canvas(made.as_dict()["shard_map"])
    tips = re.findall(
        r"<title>(rank \d): (\S+) \[.*?; ([\d.]+) (\w+), bytes ([\d,]+) to ([\d,]+)",
        canvas.render(),
    )
    held: dict[str, int] = {}
    for _, name, _, _, begin, end in tips:
        held[name] = held.get(name, 0) + int(end.replace(",", "")) - int(begin.replace(",", ""))
    for unit in made.units:
        for group in unit.groups:
            for item in group.layout.items:
                assert held[item.name] == 4 * item.numel, item.name


# ------------------------------------------------------------------------------ the page


class Reader(HTMLParser):
    """Tags that close, text by tag, and attributes that could run or fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.problems: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.ids: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name.startswith("on") or name in ("src", "href"):
                self.problems.append(f"{tag} {name}={value}")
            if name == "id":
                self.ids.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


def test_the_page_is_whole_escaped_and_alone() -> None:
    page = report_html(events(), EVIL)
    reader = read(page)
    assert reader.problems == [] and reader.open == []
    assert reader.tags.count("script") == 1, "the page's own"
    assert reader.tags.count("figure") == 9 and "img" not in reader.tags
    assert len(set(reader.ids)) == len(reader.ids), "ids are unique"
    shown = "".join(reader.texts["pre"])
    assert shown.startswith(EVIL), "the sample is shown as it is"
    assert "Collectives per step and rank" in shown, "the plan"
    assert EVIL in "".join(reader.texts["h1"])
    assert outside(page.replace("onerror", "").replace("src=x", "")) == []
    heads = ("Configuration", "model.width", "Versions", "2.13", "What happened")
    for words in (*heads, "20.0 %", "1.2 %"):  # exposed, idle
        assert words in page, words
    assert page.count("\n", page.index("<script>")) < 100, "a hundred lines of script"


def test_a_page_that_is_not_whole_is_noticed() -> None:
    """Negative control of the reader."""
    assert read("<main><p>x</main>").problems
    assert read('<p onclick="x">a</p><a href="http://x.org">').problems
    assert read(f"<pre>{EVIL}</pre>").tags.count("script") == 1


def test_a_page_is_made_of_whatever_is_there() -> None:
    everything = events()
    for kinds in ((), ("step",), ("run",), ("profile",), ("plan",), ("sample",), ("eval",)):
        some = [event for event in everything if event["kind"] in kinds]
        reader = read(report_html(some))
        assert reader.problems == [] and reader.open == []
    odd = [{"kind": "step"}, {"kind": "run", "config": None, "corpus": None}, {"kind": "profile"}]
    assert read(report_html(odd)).problems == []


def test_a_run_is_written_down_even_when_it_was_cut_off(tmp_path: Path) -> None:
    lines = [json.dumps(event) for event in events()]
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(lines) + '\n{"kind": "step", "st')
    assert len(read_events(path)) == len(lines)
    page = write_report(tmp_path)
    assert page == tmp_path / "report.html" and EVIL not in page.read_text()
    ElementTree.parse(tmp_path / "loss.svg")
    assert {p.name for p in tmp_path.iterdir()} == {"events.jsonl", "loss.svg", "report.html"}


DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
DAMAGE = (None, "x", -1, True, [], {}, [1], {"a": "b"}, 10**400, "1e999", DEEP, {"step": DEEP})


def damaged(value: Any, depth: int = 3) -> Iterator[Any]:
    """The value with one of its parts replaced by something else."""
    yield from DAMAGE
    parts = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:2])
        if isinstance(value, list)
        else ()
    )
    for key, part in parts if depth else ():
        for other in damaged(part, depth - 1):
            copy = dict(value) if isinstance(value, dict) else list(value)
            copy[key] = other
            yield copy
        if isinstance(value, dict):
            yield {name: item for name, item in value.items() if name != key}


def test_damaged_events_are_left_out_with_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = events(3)
    first = {event["kind"]: at for at, event in reversed(list(enumerate(whole)))}
    rng = random.Random(0)
    count = 0
    for at in first.values():
        cases = list(damaged(whole[at]))
        for case in rng.sample(cases, 12):
            lines = [json.dumps(event) for event in [*whole[:at], case, *whole[at + 1 :]]]
            (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
            reader = read(write_report(tmp_path).read_text())
            assert reader.problems == [] and reader.open == [], case
            count += 1
    assert count >= 12 * 6 and any("left out" in record.message for record in caplog.records)
    caplog.clear()
    lines = [json.dumps(event) for event in whole]
    lines[1], lines[2] = "[" * 10**5, '{"kind": "step", "step": [1]}'
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    write_report(tmp_path)
    assert any("(lines 2, 3)" in record.message for record in caplog.records), caplog.messages


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no events\.jsonl"):
        write_report(tmp_path)
    (tmp_path / "events.jsonl").write_text('not json\n[1, 2]\n"x"\n')
    with pytest.raises(ValueError, match="no events yet"):
        write_report(tmp_path)


def test_ticks_are_round_positions_keep_their_gap_and_scales_their_contrast() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0, 96 * 2**20, base=2) == [n * 2**25 for n in range(4)]
    assert ticks(3, 3) == [3]
    for low, high in ((0.0013, 0.0192), (-5, 7), (1e9, 3e9), (0, 0.3)):
        found = ticks(low, high)
        assert 2 <= len(found) <= 8 and low <= found[0] and found[-1] <= high * 1.000001
    assert spread([10, 11, 12, 90], 15, 0, 100) == [10, 25, 40, 90]
    assert spread([95, 96], 10, 0, 100) == [90, 100]
    assert Scale(0, 10, 100, 200)(5) == 150 and Scale(3, 3, 0, 10)(3) == 5
    assert ink_on("#E69F00") == "#000000" and ink_on("#0072B2") == "#ffffff"
