# SPDX-License-Identifier: Apache-2.0
"""The figures of a run, and several runs side by side: their losses on the same axes, how they
ended, what differs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.report.series import Event, events_of, losses_canvas, number
from shardwise.report.sizes import count_text, size_text
from shardwise.report.svg import Canvas

Find = Callable[[Sequence[Event]], float | None]


def comparison_parts(
    runs: Mapping[str, Sequence[Event]],
) -> tuple[list[Canvas], dict[str, list[str]], dict[str, list[str]]]:
    """Pictures of the loss, straight and by logarithms; final figures; different settings."""
    # All runs by the same loss: the held-out one where each has a curve of it.
    evaluated = all(len(events_of(events, "eval")) > 1 for events in runs.values())
    both = (losses_canvas(runs, evaluated=evaluated, log=log) for log in (False, True))
    pictures = [canvas for canvas in both if canvas is not None]
    ends = _rows([figures_of(events) for events in runs.values()])
    return pictures, ends, _differences(runs)


def _last(kind: str, field: str) -> Find:
    def find(events: Sequence[Event]) -> float | None:
        found = events_of(events, kind)
        return number(found[-1].get(field)) if found else None

    return find


def _ranked(field: str, share: float) -> Find:
    """The value that so large a share of steps does not exceed: 0.5 is the median."""

    def find(events: Sequence[Event]) -> float | None:
        values = [v for e in events_of(events, "step") if (v := number(e.get(field))) is not None]
        return sorted(values)[int(share * (len(values) - 1))] if values else None

    return find


FIGURES: dict[str, tuple[Find, Callable[[float], str]]] = {
    "held-out bits per byte": (_last("eval", "bits_per_byte"), lambda v: f"{v:.3f}"),
    "bits per byte, last step": (_last("step", "bits_per_byte"), lambda v: f"{v:.3f}"),
    "loss of the last step": (_last("step", "loss"), lambda v: f"{v:.3f}"),
    "steps": (_last("step", "step"), lambda v: f"{v:,.0f}"),
    "tokens": (_last("step", "tokens"), count_text),
    "tokens per second, median": (_ranked("tokens_per_second", 0.5), count_text),
    "MFU, median": (_ranked("mfu", 0.5), lambda v: f"{100 * v:.1f} %"),
    "highest gradient norm": (_ranked("grad_norm", 1.0), lambda v: f"{v:.3g}"),
    "memory of a rank, most": (_ranked("memory", 1.0), size_text),
}


def figures_of(events: Sequence[Event]) -> dict[str, str]:
    """The few numbers that people ask for first, those that a run has."""
    found = ((words, find(events), text) for words, (find, text) in FIGURES.items())
    return {words: text(value) for words, value, text in found if value is not None}


def _rows(columns: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """A row for each name that any column has."""
    names = dict.fromkeys(name for one in columns for name in one)
    return {name: [one.get(name, "") for one in columns] for name in names}


def _differences(runs: Mapping[str, Sequence[Event]]) -> dict[str, list[str]]:
    """The fields of the configurations that are not the same in all runs."""
    rows = _rows([_flat(_started(events)) for events in runs.values()])
    return {name: cells for name, cells in rows.items() if len(set(cells)) > 1}


def _started(events: Sequence[Event]) -> Mapping[str, Any]:
    run = next((event for event in reversed(events) if event.get("kind") == "run"), {})
    kept = {"world_size": run.get("world_size"), "versions": run.get("versions")}
    return {"config": run.get("config") or {}, **kept}


def _flat(value: Any, name: str = "") -> dict[str, str]:
    if isinstance(value, Mapping):
        found: dict[str, str] = {}
        for key, item in value.items():
            found |= _flat(item, f"{name}.{key}" if name else str(key))
        return found
    return {name.removeprefix("config."): value if isinstance(value, str) else json.dumps(value)}
