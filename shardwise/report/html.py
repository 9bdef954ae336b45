# SPDX-License-Identifier: Apache-2.0
"""``report.html``: one page about a run, or about several runs, from ``events.jsonl`` alone.

The page holds plotly.js itself, so that one file can be mailed and works offline; by its policy the
browser fetches nothing. The page leaves out everything that the events file does not contain.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.report import charts
from shardwise.report.charts import Chart
from shardwise.report.events import EVENTS, Event, events_of, last, number, read_events
from shardwise.words import count_text, flattened, seconds_text, size_text

__all__ = ["compare_runs", "read_events", "write_report"]
Part = str | Sequence[Chart | None]  # of a page: a text, or charts
_HAPPENINGS = ("resume", "save", "skip", "note", "warning", "error", "stop", "end")
SHOWN = 40  # rows of _HAPPENINGS


def write_report(run_directory: str | Path) -> Path:
    """Write ``report.html`` into a run's directory, and return its path."""
    folder = Path(run_directory)
    events = read_events(folder / EVENTS)
    if not events:
        raise ValueError(f"{folder / EVENTS} holds no events yet: wait for the first step")
    return _write(folder / "report.html", report_html(events, folder.resolve().name))


def report_html(events: Sequence[Event], name: str) -> str:
    """The page of a run with this name."""
    run, profile, plan = last(events, "run"), last(events, "profile"), last(events, "plan")
    planned: Mapping[str, Any] = plan.get("plan") or {}
    text, runs, steps = str(planned.get("text", "")), {name: events}, events_of(events, "step")
    stored = run.get("weights") or {}
    tables = {f"Weights in {stored.get('format')}": stored}
    tables |= {"Corpus": run.get("corpus") or {}, "Versions": run.get("versions") or {}}
    parts: list[Part] = [
        _heading(name, run, text, events),
        _tiles(events, profile, planned),
        [charts.loss_chart(runs)],
        [*charts.run_charts(runs), charts.experts_chart(events)],
        [charts.memory_bars(planned, profile, steps)],
        [charts.lanes_chart(profile)],
        [charts.memory_chart(profile)],
        _text("A sample", last(events, "sample").get("text"), True),
        _settings(run),
        _happenings(events),
        _receipt(last(events, "receipt")),
        _text("The plan of a step", text),
        *(_table(title, values, fold=True) for title, values in tables.items()),
    ]
    return _page(name, parts)


def compare_runs(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Write one page about several runs, and return its path."""
    runs: dict[str, list[Event]] = {}
    for folder in map(Path, folders):
        name = folder.resolve().name
        name = name if name not in runs else str(folder)
        if name in runs:
            raise ValueError(f"{folder} is named twice: name each run once")
        runs[name] = read_events(folder / EVENTS)
    about = f"{len(runs)} runs on the same axes"
    ends = [figures_of(events) for events in runs.values()]
    parts: list[Part] = [
        f"<header><h1>Comparison</h1><p>{about}</p></header>",
        _grid("Where they ended", runs, _rows(ends)),
        [charts.loss_chart(runs)],
        list(charts.run_charts(runs)),
        _differences(runs),
    ]
    return _write(Path(out), _page("Comparison", parts))


def _page(title: str, parts: Iterable[Part]) -> str:
    """A page of texts and of lists of charts; charts that are not wide stand beside each other."""
    texts, figures = [], []
    for part in parts:
        if not isinstance(part, str):
            drawn = [chart for chart in part if chart is not None]
            figures += [chart.json() for chart in drawn]
            part = f'<div class="charts">{"".join(map(_figure, drawn))}</div>' if drawn else ""
        texts.append(part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_file('page.css')}</style></head><body><main>"
        '<button id="theme" type="button">light / dark</button>'
        f"{''.join(texts)}</main>"
        f'<script id="figures" type="application/json">[{",".join(figures)}]</script>'
        f"<script>{_plotly()}</script><script>{_file('page.js')}</script></body></html>\n"
    )


# The browser may run what the page holds, and may fetch nothing.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


def _file(name: str) -> str:
    return (resources.files(__package__) / name).read_text("utf-8")


def _plotly() -> str:
    """The text of plotly.js."""
    if find_spec("plotly") is None:
        raise ValueError(
            "plotly draws the page, and is not installed: pip install 'shardwise[train]', then "
            "`shardwise report RUN`"
        )
    return (resources.files("plotly") / "package_data" / "plotly.min.js").read_text("utf-8")


def _write(path: Path, text: str) -> Path:
    """Write a file atomically, so that a reader never sees half a page."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
    except OSError as error:
        error.filename = str(path)  # the user does not know the temporary name
        raise
    partial.replace(path)
    return path


# ------------------------------------------------------------------------------ parts of the page


def _figure(chart: Chart) -> str:
    logs = "".join(
        f'<button type="button" data-axis="{axis}axis">log {axis}</button>' for axis in "xy"
    )
    return (
        f"<figure{' class=wide' * chart.wide}><figcaption><b>{escape(chart.title)}</b>"
        f"<span>{escape(chart.about)}</span>{logs * chart.logs}</figcaption>"
        f'<div class="plot" style="height:{chart.height}px"></div>'
        f"{f'<p>{escape(chart.note)}</p>' * bool(chart.note)}</figure>"
    )


def _heading(name: str, run: Event, plan: str, events: Sequence[Event]) -> str:
    model = (run.get("model") or {}).get("text") or plan.partition("\n")[0]
    times = [when for e in events if (when := number(e.get("time"))) is not None]
    date = ""
    if times:
        date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(times[0]))
        date += f", {seconds_text(times[-1] - times[0])}"
    lines = [
        ", ".join(filter(None, (str(model), str(run.get("strategy") or "")))),
        ", ".join(filter(None, (_word(run.get(k)) for k in ("machine", "revision")))) or "",
        date,
    ]
    text = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
    command = f"<pre>{escape(str(run['command']))}</pre>" if run.get("command") else ""
    return f"<header><h1>{escape(name)}</h1>{text}{command}</header>"


def _tiles(events: Sequence[Event], profile: Event, plan: Mapping[str, Any]) -> str:
    found = figures_of(events)
    for name, field in (("communication exposed", "exposed"), ("GPU idle", "idle")):
        if (share := number(profile.get(field))) is not None:
            found[name] = f"{share:.1%}"
    if total := number(plan.get("total")):
        found["planned"] = size_text(total)
    beside = {"tokens": "steps", "tokens per second": "MFU", "memory of rank 0": "planned"}
    beside["communication exposed"] = "GPU idle"
    loss = next((name for name in found if name.startswith(("held-out", "bits", "loss"))), "")
    cells = []
    for name in (loss, *beside):
        if name in found:
            other = beside.get(name, "")
            more = f"; {other} {found[other]}" if other in found else ""
            cells.append(
                f"<div><b>{escape(found[name])}</b><span>{escape(name + more)}</span></div>"
            )
    return f'<div class="tiles">{"".join(cells)}</div>' if cells else ""


def _settings(run: Event) -> str:
    """Settings that differ from their defaults, and all settings, folded away."""
    config, defaults = (flattened(run.get(field) or {}) for field in ("config", "defaults"))
    changed = {n: v for n, v in config.items() if n not in defaults or defaults[n] != v}
    title = "Settings that are not the default" if defaults else "Settings"
    shown = _table(title, changed, fold=not defaults)
    return shown + (_table("All settings", config, fold=True) if defaults else "")


def _receipt(event: Event) -> str:
    """What the plan said and what a step did."""
    rows = [(what, *(f"{n:,}" for n in both)) for what, both in (event.get("rows") or {}).items()]
    head = "<th></th><th>planned</th><th>found</th>"
    right = "as planned" if not event.get("differences") else "not as planned"
    return _lines(f"The receipt of the first steps: {right}", rows, head, fold=True)


def _happenings(events: Iterable[Event]) -> str:
    rows = [
        (event["kind"], _word({k: v for k, v in event.items() if k not in ("kind", "time")}))
        for event in events
        if event["kind"] in _HAPPENINGS
    ]
    earlier = f", the last {SHOWN} of {len(rows)}" if len(rows) > SHOWN else ""
    return _lines(f"What happened{earlier}", rows[-SHOWN:], fold=True)


def _text(title: str, text: Any, shown: bool = False) -> str:
    return _part(title, f"<pre>{escape(str(text))}</pre>", fold=not shown) if text else ""


def _part(title: str, body: str, *, fold: bool) -> str:
    if fold:
        return f"<details><summary>{escape(title)}</summary>{body}</details>"
    return f"<h2>{escape(title)}</h2>{body}"


def _table(title: str, values: Mapping[str, Any], *, fold: bool = False) -> str:
    rows = ((str(name), _word(value)) for name, value in flattened(values).items())
    return _lines(title, rows, fold=fold)


def _grid(title: str, names: Iterable[str], rows: Mapping[str, Sequence[str]]) -> str:
    """A table with a column for each run."""
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *names))
    return _lines(title, ((name, *cells) for name, cells in rows.items()), head)


def _lines(title: str, rows: Iterable[Sequence[str]], head: str = "", *, fold: bool = False) -> str:
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    return _part(title, f"<table><tr>{head}</tr>{body}</table>", fold=fold) if body else ""


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_word(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    if value is None:
        return ""
    return ", ".join(map(_word, value)) if isinstance(value, list) else str(value)


# ------------------------------------------------------------------------------ figures of runs


def _quantile(events: Sequence[Event], field: str, share: float) -> float | None:
    values = [v for e in events_of(events, "step") if (v := number(e.get(field))) is not None]
    return sorted(values)[int(share * (len(values) - 1))] if values else None


def figures_of(events: Sequence[Event]) -> dict[str, str]:
    """The most important numbers of a run, as far as the run has them."""
    step, held = ((events_of(events, kind) or [{}])[-1] for kind in ("step", "eval"))
    found: dict[str, tuple[Any, Callable[[float], str]]] = {
        "held-out bits per byte": (held.get("bits_per_byte"), "{:.3f}".format),
        "held-out loss": (held.get("loss"), "{:.3f}".format),
        "bits per byte, last step": (step.get("bits_per_byte"), "{:.3f}".format),
        "loss of the last step": (step.get("loss"), "{:.3f}".format),
        "steps": (step.get("step"), "{:,.0f}".format),
        "tokens": (step.get("tokens"), count_text),
        "tokens per second": (_quantile(events, "tokens_per_second", 0.5), count_text),
        "MFU": (_quantile(events, "mfu", 0.5), "{:.1%}".format),
        "highest gradient norm": (_quantile(events, "grad_norm", 1.0), "{:.3g}".format),
        "memory of rank 0": (_quantile(events, "memory", 1.0), size_text),
    }
    numbers = {name: (number(value), text) for name, (value, text) in found.items()}
    return {name: text(value) for name, (value, text) in numbers.items() if value is not None}


def _rows(columns: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """A row for each name that any column has."""
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name, "") for column in columns] for name in names}


def _differences(runs: Mapping[str, Sequence[Event]]) -> str:
    """The settings that differ between runs."""
    columns = []
    for events in runs.values():
        run = last(events, "run")
        kept = {"world_size": run.get("world_size"), "versions": run.get("versions")}
        flat = flattened((run.get("config") or {}) | kept).items()
        columns.append({name: v if isinstance(v, str) else json.dumps(v) for name, v in flat})
    rows = {name: cells for name, cells in _rows(columns).items() if len(set(cells)) > 1}
    return _grid("What differs between them", runs, rows)
