# SPDX-License-Identifier: Apache-2.0
"""``report.html``: one page about a run, or about several runs, from ``events.jsonl`` alone.

    events.jsonl  -->  loss.svg      for a README or a message
                  -->  report.html   everything, self-contained: offline, dark and light

The page leaves out everything that the events file does not contain. It also leaves out, with a
note, everything damaged: an incomplete line, an event with wrong types, a part of the page that
cannot be drawn from the rest.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from shardwise.report.series import Event, events_of, loss_canvas, losses_canvas, number, series
from shardwise.report.shard_map import map_canvas
from shardwise.report.step_pictures import lanes_canvas, memory_bars_canvas, memory_canvas
from shardwise.report.svg import FONT, HATCHES, Canvas, theme_css
from shardwise.words import count_text, flattened, size_text

logger = logging.getLogger(__name__)

Made = TypeVar("Made")
EVENTS = "events.jsonl"
_HAPPENINGS = ("resume", "save", "skip", "note", "warning", "error", "stop", "end")
SHOWN = 40  # rows of _HAPPENINGS


def write_report(run_directory: str | Path) -> Path:
    """Write ``report.html``, and ``loss.svg`` where there is a loss, into a run's directory.

    Returns the path of the page.
    """
    folder = Path(run_directory)
    path = folder / EVENTS
    events, notes = _read(path)
    if not events:
        raise ValueError(f"{path} holds no events yet: wait for the first step of the run")
    drawn = report_html(events, folder.resolve().name, notes)
    if (picture := _part("the loss", loss_svg, events, notes=[])) is not None:
        _write(folder / "loss.svg", picture)
    for note in notes:
        logger.warning("%s: %s", path, note)
    return _write(folder / "report.html", drawn)


def read_events(path: Path) -> list[Event]:
    """Every sound event of an events file."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[Event], list[str]]:
    """The sound events, and a note about damaged lines."""
    events, damaged = [], []
    if not path.exists():
        raise ValueError(
            f"{path.parent} holds no {path.name}: name the directory of a run, which is printed "
            f"when the run begins"
        )
    if not path.is_file():  # reading a pipe would block
        raise ValueError(f"{path} is no regular file: move it away")
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for at, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            sound = _is_sound(event)
        except (ValueError, RecursionError):
            sound = False
        if sound:
            events.append(event)
        elif line.strip():
            damaged.append(at)
    # The last line may be incomplete because the run was killed while it wrote.
    if not damaged or damaged == [len(lines)]:
        return events, []
    shown = ", ".join(map(str, damaged[:10])) + (", ..." if damaged[10:] else "")
    return events, [f"damaged events are left out (lines {shown})"]


# Fields that must be objects, by the kind of event.
_OBJECTS = {
    "run": ("config", "corpus", "model", "weights", "versions", "mesh"),
    "plan": ("plan",),
}


def _is_sound(event: Any) -> bool:
    """Whether the fields of an event have the types that every reader expects."""
    kind = event.get("kind") if isinstance(event, dict) else None
    if not isinstance(kind, str):
        return False
    if kind in ("step", "eval", "save", "resume", "skip") and "step" in event:
        step = event["step"]
        return type(step) in (int, float) and number(step) is not None
    objects = (event.get(name) for name in _OBJECTS.get(kind, ()))
    return all(value is None or isinstance(value, dict) for value in objects)


def _part(what: str, draw: Callable[..., Made], *values: Any, notes: list[str]) -> Made | None:
    """The result of ``draw``, or None and a note if its events are damaged."""
    try:
        return draw(*values)
    except Exception as error:  # an events file may contain anything
        notes.append(f"{what} is left out: its event is damaged ({type(error).__name__}: {error})")
        return None


def loss_svg(events: Sequence[Event]) -> str | None:
    """The loss picture as a standalone file; None if no step has a loss."""
    canvas = loss_canvas(events)
    return None if canvas is None else canvas.render()


def report_html(
    events: Sequence[Event], name: str = "shardwise run", notes: list[str] | None = None
) -> str:
    """The page of a run with this name. Notes about damaged parts are on the page, and are added to
    ``notes``."""
    notes = [] if notes is None else notes

    def part(what: str, draw: Callable[..., str], *values: Any) -> str:
        return _part(what, draw, *values, notes=notes) or ""

    def picture(what: str, draw: Callable[..., Canvas | None], *values: Any) -> str:
        def figure() -> str:
            canvas = draw(*values)
            return framed([canvas] if canvas else [])

        return part(what, figure)

    run = _last(events, "run") or {}
    planned = (_last(events, "plan") or {}).get("plan") or {}
    profile = _last(events, "profile") or {}
    both = [picture("the loss", partial(loss_canvas, log=log), events) for log in (False, True)]
    figures = either(*both)
    if planned or profile:
        steps = [event for event in events if event.get("kind") == "step"]
        figures += picture("the memory", memory_bars_canvas, planned, profile, steps)
    figures += part("the charts of the run", lambda: framed(series({"": events})))
    if profile:
        figures += picture("the recorded step", lanes_canvas, profile)
        figures += picture("the memory of the recorded step", memory_canvas, profile)
    if planned.get("shard_map"):
        figures += picture("the shard map", map_canvas, planned["shard_map"])
    text = str(planned.get("text", ""))
    parts = [
        _header(name, text.partition("\n")[0]),
        part("the figures", _figures, events, profile),
        figures,
        _preformatted("A sample", str((_last(events, "sample") or {}).get("text", ""))),
        _preformatted("The plan of a step", text),
    ]
    tables = {"config": "Configuration", "weights": "Weights in MXFP8", "corpus": "Corpus"}
    tables["versions"] = "Versions"
    rest = {key: value for key, value in run.items() if key not in (*tables, "kind")}
    for title, values in [*((tables[key], run.get(key)) for key in tables), ("Run", rest)]:
        parts.append(part(title, _table, title, values or {}))
    parts.append(part("what happened", _happenings, events))
    parts += [f"<p>{escape(note)}</p>" for note in notes]
    return _page(name, parts)


def framed(canvases: Iterable[Canvas]) -> str:
    return "".join(f"<figure>{canvas.render(standalone=False)}</figure>" for canvas in canvases)


def either(straight: str, by_logarithm: str) -> str:
    """Two pictures of the same figures; a button selects which of the two the page shows."""
    if not straight or not by_logarithm:
        return straight
    return (
        f'<div class="either">{straight}{by_logarithm}'
        '<button class="turn" type="button">log axes</button></div>'
    )


def compare_runs(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Write one page about several runs, and return its path."""
    runs: dict[str, list[Event]] = {}
    notes: list[str] = []
    for folder in map(Path, folders):
        name = folder.resolve().name
        name = name if name not in runs else str(folder)
        if name in runs:
            raise ValueError(f"{folder} is named twice: name each run once")
        runs[name], found = _read(folder / EVENTS)
        notes += [f"{name}: {note}" for note in found]
    # The same loss for all runs: held out, if every run has a curve of the held-out loss.
    evaluated = all(len(events_of(events, "eval")) > 1 for events in runs.values())
    both = [
        _part("the losses", partial(losses_canvas, evaluated=evaluated, log=log), runs, notes=notes)
        for log in (False, True)
    ]
    ends = _part("the figures", lambda: _rows(list(map(figures_of, runs.values()))), notes=notes)
    differences = _part("the differences", _differences, runs, notes=notes)
    parts = [
        _header("Comparison", f"{len(runs)} runs on the same axes"),
        _grid("Where they ended", list(runs), ends or {}),
        either(*(framed([canvas] if canvas else []) for canvas in both)),
        _part("the charts", lambda: framed(series(runs)), notes=notes) or "",
        _grid("What differs between them", list(runs), differences or {}),
    ]
    return _write(Path(out), _page("Comparison", [*parts, *(f"<p>{escape(n)}</p>" for n in notes)]))


def _grid(title: str, names: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """A table with a column for each run."""
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *names))
    return _lines(title, ((name, *cells) for name, cells in rows.items()), f"<tr>{head}</tr>")


def _lines(title: str, rows: Iterable[Sequence[str]], head: str = "") -> str:
    """A table; the first cell of each row is its name. Empty if there are no rows."""
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    kind = ' class="grid"' if head else ""
    return f"<h2>{escape(title)}</h2><table{kind}>{head}{body}</table>" if body else ""


def _preformatted(title: str, text: str) -> str:
    return f"<h2>{escape(title)}</h2><pre>{escape(text)}</pre>" if text else ""


def _header(title: str, about: str) -> str:
    return f'<header><h1>{escape(title)}</h1><p class="about">{escape(about)}</p></header>'


_LIGHT = "--paper:#ffffff;--ink:#1c2128;--faint:#5c636d;--line:#dfe3e8;--back:#f4f5f7"
_DARK = "--paper:#14171c;--ink:#e8eaed;--faint:#a3aab4;--line:#2b3038;--back:#0c0e12"

_STYLE = f"""
:root{{{_LIGHT};color-scheme:light dark}}
{theme_css("svg", False)}
@media(prefers-color-scheme:dark){{:root{{{_DARK}}}
{theme_css("svg", True)}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 {FONT}}}
main{{max-width:940px;margin:0 auto;padding:28px 20px 60px}}
h1{{font-size:24px;margin:0 0 4px}}
h2{{font-size:17px;margin:34px 0 10px}}
p.about{{margin:0;color:var(--faint)}}
button{{font:inherit;color:var(--ink);background:var(--paper);border:1px solid var(--line);
border-radius:8px;padding:5px 12px;cursor:pointer;white-space:nowrap}}
.figures{{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px;
margin:22px 0}}
.figures div{{background:var(--paper);border:1px solid var(--line);border-radius:10px;
padding:10px 14px}}
.figures b{{display:block;font-size:19px;font-variant-numeric:tabular-nums}}
.figures span{{color:var(--faint);font-size:12.5px}}
figure{{margin:16px 0;background:var(--paper);border:1px solid var(--line);border-radius:10px;
padding:8px;overflow-x:auto}}
svg{{display:block;width:100%;height:auto;min-width:640px}}
svg.defs{{position:absolute;width:0;height:0;min-width:0}}
svg text{{font-family:{FONT}}}
.either{{position:relative}}.either figure+figure{{display:none}}
.either.turned figure{{display:none}}.either.turned figure+figure{{display:block}}
.turn{{position:absolute;right:14px;top:14px;font-size:12.5px;padding:3px 10px}}
table.grid th:first-child{{width:24%}}table.grid th{{width:auto}}
table{{border-collapse:collapse;width:100%;background:var(--paper);font-size:13.5px}}
td,th{{border:1px solid var(--line);padding:4px 10px;text-align:left;vertical-align:top;
overflow-wrap:anywhere}}
th{{width:34%;font-weight:500;color:var(--faint)}}
pre{{background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:14px;
white-space:pre-wrap;overflow-wrap:anywhere;font-size:13px;line-height:1.45;margin:0}}
"""

_SCRIPT = """
for (const turn of document.querySelectorAll('.turn')) turn.addEventListener('click', () => {
  turn.textContent = turn.parentNode.classList.toggle('turned') ? 'straight axes' : 'log axes';
});
"""


def _page(name: str, parts: Iterable[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}</title><style>{_STYLE}</style></head><body>"
        # not display:none, because then the pictures could not use the patterns
        f'<svg width="0" height="0" class="defs" aria-hidden="true">{HATCHES}</svg><main>'
        f"{''.join(part for part in parts if part)}</main>"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


# ------------------------------------------------------------------------------ parts of the page


def _figures(events: Sequence[Event], profile: Mapping[str, Any]) -> str:
    figures = figures_of(events)
    for field, words in (("exposed", "communication exposed"), ("idle", "GPU idle, profiled")):
        share = number(profile.get(field))
        if share is not None:
            figures[words] = f"{100 * share:.1f} %"
    cells = (f"<div><b>{escape(b)}</b><span>{escape(a)}</span></div>" for a, b in figures.items())
    return f'<div class="figures">{"".join(cells)}</div>' if figures else ""


def _happenings(events: Iterable[Event]) -> str:
    rows = [
        (event["kind"], _words({k: v for k, v in event.items() if k not in ("kind", "time")}))
        for event in events
        if event["kind"] in _HAPPENINGS
    ]
    earlier = f", the last {SHOWN} of {len(rows)}" if len(rows) > SHOWN else ""
    return _lines(f"What happened{earlier}", rows[-SHOWN:])


def _table(title: str, values: Mapping[str, Any]) -> str:
    return _lines(title, ((str(name), _words(value)) for name, value in flattened(values).items()))


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(_words, value)) if isinstance(value, list) else str(value)


def _last(events: Sequence[Event], kind: str) -> Event | None:
    return next((event for event in reversed(events) if event.get("kind") == kind), None)


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


# ------------------------------------------------------------------------------ figures of runs

Find = Callable[[Sequence[Event]], float | None]


def _final(kind: str, field: str) -> Find:
    def find(events: Sequence[Event]) -> float | None:
        found = events_of(events, kind)
        return number(found[-1].get(field)) if found else None

    return find


def _ranked(field: str, share: float) -> Find:
    """The quantile ``share`` of a field of steps: 0.5 is the median."""

    def find(events: Sequence[Event]) -> float | None:
        values = [v for e in events_of(events, "step") if (v := number(e.get(field))) is not None]
        return sorted(values)[int(share * (len(values) - 1))] if values else None

    return find


FIGURES: dict[str, tuple[Find, Callable[[float], str]]] = {
    "held-out bits per byte": (_final("eval", "bits_per_byte"), lambda v: f"{v:.3f}"),
    "held-out loss": (_final("eval", "loss"), lambda v: f"{v:.3f}"),
    "bits per byte, last step": (_final("step", "bits_per_byte"), lambda v: f"{v:.3f}"),
    "loss of the last step": (_final("step", "loss"), lambda v: f"{v:.3f}"),
    "steps": (_final("step", "step"), lambda v: f"{v:,.0f}"),
    "tokens": (_final("step", "tokens"), count_text),
    "tokens per second, median": (_ranked("tokens_per_second", 0.5), count_text),
    "MFU, median": (_ranked("mfu", 0.5), lambda v: f"{100 * v:.1f} %"),
    "highest gradient norm": (_ranked("grad_norm", 1.0), lambda v: f"{v:.3g}"),
    "memory of rank 0, most": (_ranked("memory", 1.0), size_text),
}


def figures_of(events: Sequence[Event]) -> dict[str, str]:
    """The most important numbers of a run, as far as the run has them."""
    values = {words: find(events) for words, (find, _) in FIGURES.items()}
    return {words: FIGURES[words][1](value) for words, value in values.items() if value is not None}


def _rows(columns: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """A row for each name that any column has."""
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name, "") for column in columns] for name in names}


def _differences(runs: Mapping[str, Sequence[Event]]) -> dict[str, list[str]]:
    """The fields of the configurations that differ between runs."""
    rows = _rows([_settings(events) for events in runs.values()])
    return {name: cells for name, cells in rows.items() if len(set(cells)) > 1}


def _settings(events: Sequence[Event]) -> dict[str, str]:
    run = _last(events, "run") or {}
    kept = {"world_size": run.get("world_size"), "versions": run.get("versions")}
    flat = flattened((run.get("config") or {}) | kept).items()
    return {name: v if isinstance(v, str) else json.dumps(v) for name, v in flat}
