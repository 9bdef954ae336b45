# SPDX-License-Identifier: Apache-2.0
"""The page of a run: plotly accepts its charts, names are escaped, nothing is fetched."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from plotly.graph_objects import Figure

from shardwise.planning.plan import plan
from shardwise.report import html
from shardwise.report.charts import (
    COLUMNS,
    FIRST,
    Chart,
    columns,
    experts_chart,
    lanes_chart,
    loss_chart,
    memory_bars,
    memory_chart,
    planned_bar,
    run_charts,
)
from shardwise.report.events import points_of
from shardwise.report.html import compare_runs, report_html, write_report
from tests.models import Model

EVIL = "</script><script>alert(\"1\")</script><img src=x onerror=alert(1)> & 'quoted'"
VOID = {"meta", "br", "img", "link", "hr", "input"}
Event = dict[str, Any]


@pytest.fixture(autouse=True)
def small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the 5 MB of plotly.js; one test has them."""
    monkeypatch.setattr(html, "_plotly", lambda: "let Plotly")


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


def planned() -> dict[str, Any]:
    with torch.device("meta"):
        model = Model(40, 3)
    return plan(model, {"dp": 2}, "zero3", optimizer="muon").as_dict()


def events(steps: int = 120) -> list[Event]:
    config = {"name": EVIL, "model": {"width": 64}, "seed": 3}
    corpus = {"name": EVIL, "sha256": "ab" * 32}
    run = {"kind": "run", "config": config, "defaults": config | {"seed": 0}, "corpus": corpus}
    run |= {"command": "shardwise train --seed 3", "machine": "a small one", "revision": "abc123"}
    found: list[Event] = [run | {"versions": {"torch": "2.13"}, "time": 1.8e9}]
    found.append({"kind": "plan", "plan": planned()})
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
                "expert_load_max": 1.5,
                "expert_idle_share": 0.1,
            }
        )
        if step % 40 == 0:
            found.append({"kind": "eval", "step": step, "loss": 1.4, "bits_per_byte": bits + 0.1})
        if step == 60:
            found.append({"kind": "resume", "step": 50, "path": "checkpoints/step-50"})
    found.append({"kind": "experts", "step": steps, "counts": [[30, 10], [20, 20]]})
    found.append({"kind": "skip", "step": 90, "grad_norm": "nan"})
    found += [{"kind": "sample", "text": EVIL}, profile(), {"kind": "end", "reason": "done"}]
    return found


def charts() -> dict[str, Chart]:
    run = events()
    found = {
        "loss": loss_chart({EVIL: run}),
        "losses": loss_chart({EVIL: run, "other": events(60)}),
        "lanes": lanes_chart(profile()),
        "memory": memory_chart(profile()),
        "bars": memory_bars(planned(), profile(), run),
        "experts": experts_chart(run),
    }
    found |= {chart.title: chart for chart in run_charts({EVIL: run})}
    found |= {f"both {chart.title}": chart for chart in run_charts({EVIL: run, "b": run})}
    assert len(found) == 14 and all(chart is not None for chart in found.values())
    return {name: chart for name, chart in found.items() if chart is not None}


@pytest.fixture(scope="module")
def drawn() -> dict[str, Chart]:
    return charts()


def traces(chart: Chart | None) -> dict[str, dict[str, Any]]:
    """The traces that a legend names."""
    assert chart is not None
    return {t["name"]: t for t in chart.data if t.get("showlegend", True) and t.get("name")}


# ------------------------------------------------------------------------------ every chart


def test_plotly_accepts_every_chart(drawn: dict[str, Chart]) -> None:
    for chart in drawn.values():
        Figure({"data": chart.data, "layout": chart.layout})
        assert chart.data and json.loads(chart.json())["data"] == chart.data
    with pytest.raises(ValueError, match="colour"):  # the negative control
        Figure({"data": [drawn["loss"].data[0] | {"colour": "red"}]})


def test_names_are_shown_as_they_are_never_run(drawn: dict[str, Chart]) -> None:
    """Runs, spans, waits and corpora are named by others; plotly reads tags and entities."""
    recorded = profile()
    recorded["spans"][0]["name"] = recorded["stalls"][0][2] = EVIL
    recorded["memory"]["start"][EVIL] = 1
    named = [loss_chart({EVIL: events(), "b": events()}), lanes_chart(recorded)]
    for chart in (*named, memory_chart(recorded), *drawn.values()):
        assert chart is not None
        text = [t.get(key) for t in chart.data for key in ("name", "hovertext", "text")]
        words = str(text)
        assert "<script" not in words and "<img" not in words
        assert "<" not in chart.json()
    assert all("&lt;/script" in str(chart and chart.data) for chart in named)
    impossible = Chart(title="", about="", data=[{"x": float("nan")}], layout={})
    with pytest.raises(ValueError, match="JSON"):  # a browser reads no NaN
        impossible.json()


# ------------------------------------------------------------------------------ what they show


def test_the_loss_shows_train_held_out_and_resumes() -> None:
    chart = loss_chart({"run": events()})
    assert chart is not None and "held out 2.150 bits per byte at step 120" in chart.about
    lines = traces(chart)
    assert set(lines) == {"train", "held out"}
    assert lines["held out"]["x"] == [40000, 80000, 120000], "an evaluation has its step's tokens"
    assert 7000 not in lines["train"]["x"], "not a number"
    assert chart.layout["shapes"][0]["x0"] == 50000 and chart.logs
    assert loss_chart({"run": [{"kind": "step", "step": 1, "loss": "nan"}]}) is None
    assert loss_chart({"run": []}) is None


def test_a_spike_of_a_long_run_is_drawn() -> None:
    """One step of a hundred thousand, which every n-th point would miss."""
    y = [9.0 if step == 77_777 else 2.0 for step in range(100_000)]
    x, low, high, mean = columns(range(100_000), y)
    assert len(x) == len(low) == len(high) == len(mean) == COLUMNS + FIRST
    assert max(high) == 9.0 and max(low) == 2.0 and x[-1] == 99_999 and x[:3] == [0, 1, 2]
    assert max(y[:: 100_000 // COLUMNS]) == 2.0, "the negative control"
    assert columns(range(3), [1.0, 5.0, 3.0])[:3] == [[0, 1, 2], [1, 5, 3], [1, 5, 3]]
    steep = columns(range(9000), [1000.0 / (step + 1) for step in range(9000)])[3]
    assert steep[0] == 1000.0 and steep[1] == 500.0, "no mean at the begin"


def test_what_was_done_again_after_a_resume_is_drawn_once() -> None:
    """Killed at step 6, resumed from 3: steps 4 to 6 of the first life are gone."""
    again: list[Event] = [{"kind": "step", "step": s, "loss": 9.0} for s in range(1, 7)]
    dropped = [{"kind": "skip", "step": 5, "grad_norm": "nan"}]
    again += [*dropped, {"kind": "resume", "step": 3}]
    again += [{"kind": "step", "step": s, "loss": 2.0, "grad_norm": 1.0} for s in range(4, 6)]
    again += dropped
    assert [(s, y) for s, _, y in points_of(again, "loss")] == [
        (1, 9),
        (2, 9),
        (3, 9),
        (4, 2),
        (5, 2),
    ]
    (norm,) = run_charts({"run": again})
    assert "steps dropped: 1" in norm.about and norm.layout["yaxis"]["type"] == "log"


def test_the_bars_of_memory_add_up_to_the_plan() -> None:
    made = planned()
    assert sum(planned_bar(made).values()) == made["total"] > 0
    assert memory_bars({}, profile(), []) is None, "one bar explains nothing"
    chart = memory_bars(made, profile(), [{"kind": "step", "step": 1, "memory": 1 << 20}])
    assert chart is not None and "measured 1.00 MiB" in chart.about
    ends = {"the plan": 0.0, "measured": 0.0}
    for trace in chart.data:
        for row, begin, length in zip(trace["y"], trace["base"], trace["x"], strict=True):
            ends[row] = max(ends.get(row, 0.0), begin + length)
    unit = 1 << (20 if "MiB" in chart.layout["xaxis"]["title"]["text"] else 10)
    assert ends["the plan"] * unit == pytest.approx(made["total"]), "bars stand end to end"


def test_lanes_show_every_span_every_wait_and_the_number() -> None:
    chart, recorded = lanes_chart(profile()), profile()
    assert chart is not None and chart.title == "Exposed communication: 20.0 % of the step"
    lines = traces(chart)
    assert len(lines["waiting"]["x"]) == len(recorded["stalls"])
    assert sum(len(t["x"]) for t in chart.data) == len(recorded["spans"]) + len(recorded["stalls"])
    assert lines["backward"]["base"] == pytest.approx([5, 7]), "milliseconds"
    assert "could only wait for a collective" in chart.note, "the definition stands under it"
    assert lanes_chart({"spans": []}) is None


def test_the_areas_of_memory_show_the_peak() -> None:
    chart = memory_chart(profile())
    assert chart is not None and "peak 12.0 KiB at 1.00 ms of 10.0 ms" in chart.about
    stacked = [sum(values) for values in zip(*(t["y"] for t in chart.data), strict=True)]
    assert len(chart.data) == 4 and max(stacked) == pytest.approx(12.0)
    assert memory_chart({"seconds": 1.0, "memory": {"changes": [], "start": {}}}) is None


def test_experts_are_shown_over_the_even_share() -> None:
    chart = experts_chart(events())
    assert chart is not None and chart.data[0]["z"] == [[1.5, 0.5], [1, 1]]
    assert experts_chart([{"kind": "step", "step": 1}]) is None


# ------------------------------------------------------------------------------ the page


class Reader(HTMLParser):
    """Tags that close, text by tag, and attributes that could run or fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.problems: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name.startswith("on") or name in ("src", "href"):
                self.problems.append(f"{tag} {name}={value}")
        if tag not in VOID:
            self.open.append(tag)

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
    assert reader.tags.count("script") == 3 and "img" not in reader.tags, "data, plotly, ours"
    assert "default-src 'none'" in page, "the browser fetches nothing"
    figures = json.loads(reader.texts["script"][0])
    assert len(figures) == reader.tags.count("figure") == 9
    assert EVIL in "".join(reader.texts["pre"]), "the sample is shown as it is"
    assert "Collectives per step and rank" in page and "Shard map" in page, "the plan"
    assert EVIL in "".join(reader.texts["h1"])
    for words in (
        "shardwise train --seed 3",
        "a small one, abc123",
        "2027-01-15 08:00 UTC",
        "2.13",
    ):
        assert words in page, words
    tiles = page[page.index('class="tiles"') : page.index("<figure")]
    assert tiles.count("<b>") == 5 and "20.0%" in tiles and "GPU idle 1.2%" in tiles
    own, everything = page.split("All settings</summary>")
    assert "model.width" not in own and "model.width" in everything, "defaults are folded away"
    assert "<th>seed</th><td>3</td>" in own


def test_the_library_is_in_the_page_and_the_page_fits_into_a_mail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    runs = []
    for name in ("one", "two", "three", "four"):
        (tmp_path / name).mkdir()
        runs.append(tmp_path / name)
        long = "".join(json.dumps(event) + "\n" for event in events(4000))
        (runs[-1] / "events.jsonl").write_text(long)
    for page in (write_report(runs[0]), compare_runs(runs, tmp_path / "all.html")):
        text = page.read_text()
        assert "plotly.js v" in text and len(text) < 6e6
    monkeypatch.setattr(html, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"shardwise\[train\]"):
        write_report(runs[0])


def test_a_page_is_made_of_whatever_is_there() -> None:
    everything = events()
    for kinds in ((), ("step",), ("run",), ("profile",), ("plan",), ("sample",), ("eval",)):
        some = [event for event in everything if event["kind"] in kinds]
        reader = read(report_html(some, "run"))
        assert reader.problems == [] and reader.open == [], kinds
    odd = [{"kind": "step"}, {"kind": "run", "config": None, "corpus": None}]
    assert read(report_html(odd, "run")).problems == []


def test_several_runs_are_one_page(tmp_path: Path) -> None:
    first, second = events(), events(60)
    second[0] = second[0] | {"config": {"name": EVIL, "model": {"width": 96}, "seed": 3}}
    for name, run in (("one", first), ("two", second)):
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps(event) + "\n" for event in run)
        (tmp_path / name / "events.jsonl").write_text(lines)
    page = compare_runs([tmp_path / "one", tmp_path / "two"], tmp_path / "both.html").read_text()
    reader = read(page)
    assert reader.problems == [] and reader.open == [] and reader.tags.count("figure") == 5
    assert "model.width" in page and ">96<" in page and ">64<" in page, "what differs"
    assert "versions.torch" not in page and ">held-out bits per byte<" in page
    with pytest.raises(ValueError, match="three holds no events"):
        compare_runs([tmp_path / "one", tmp_path / "three"], tmp_path / "both.html")
    with pytest.raises(ValueError, match="named twice"):
        compare_runs([tmp_path / "one"] * 3, tmp_path / "both.html")


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no events\.jsonl"):
        write_report(tmp_path)
    (tmp_path / "events.jsonl").write_text('not json\n[1, 2]\n"x"\n')
    with pytest.raises(ValueError, match="no events yet"):
        write_report(tmp_path)
