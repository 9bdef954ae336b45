# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.shown_rate 1.5e-4``: one more learning rate of AdamW for the shown run.

The same text, steps and seeds as the stored run; the seeds run side by side, so the seconds are
those of the stored AdamW run, whose steps are the same. ``--add FILE`` puts what was found into the
stored tables and draws the figure anew, with the better of the two rates.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report, shown_run
from benchmarks.muon_vs_adamw import picture, reached
from benchmarks.runs import Curve, finished, mean_of, run_jobs
from benchmarks.shown_results import Shown, Size
from shardwise.report.svg import BLUE, ORANGE

NAME = "AdamW"


def measure(options: argparse.Namespace) -> Path:
    """Train with this rate; the file with the mean of the seeds."""
    size = shown_run.SMOKE if options.smoke else shown_run.FULL
    most = min(size.most, int(options.text * 2**20))
    shown = Shown(
        size=Size(**{**vars(size), "steps": options.steps, "most": most}),
        scratch=options.scratch,
        results=options.out,
        seeds=options.seeds,
        parts=(),
        until=time.monotonic() + options.seconds - 10,
        facts=report.circumstances([]),
        best={"adamw": options.rate, "muon": 0.02},
    )
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(options.scratch / "inductor"))
    with ThreadPoolExecutor(1) as pool:
        warming = pool.submit(shown_run.warm, shown, experts=False)
        shown_run.read_text(shown)
        shown_run.all_tokens(shown)
        warming.result()
    jobs = [shown.run("adamw", seed) for seed in range(options.seeds)]
    curves = finished(jobs, run_jobs(jobs, at_once=len(jobs), until=shown.until))
    made = {"rate": options.rate, "seeds": len(curves), "date": shown.facts["date"]}
    options.out.mkdir(parents=True, exist_ok=True)
    path: Path = options.out / f"shown-rate-{options.rate:g}.json"
    path.write_text(json.dumps(made | {"curve": asdict(mean_of(NAME, curves))}, indent=1))
    return path


def add(path: Path, folder: Path, name: str) -> list[Path]:
    """Put a measured rate into the stored results of the shown run."""
    made = json.loads(path.read_text())
    facts = json.loads((folder / f"{name}.json").read_text())
    tables = {table["title"]: table for table in facts.pop("tables")}
    runs, points = tables["The shown run"]["rows"], tables["Curves"]["rows"]
    curves = {case: _stored(case, points) for case in ("Muon", NAME)}
    new = Curve(**made["curve"] | {"seconds": curves[NAME].seconds})
    assert new.tokens == curves[NAME].tokens, "other steps than the stored run's"
    at = next(place for place, row in enumerate(runs) if row["case"] == NAME)
    row = runs[at] | {"rate": made["rate"], "seeds": made["seeds"], "bits": new.bits[-1]}
    row["spread"] = (new.high[-1] - new.low[-1]) / 2 if made["seeds"] > 1 else None
    if new.bits[-1] < curves[NAME].bits[-1]:
        curves[NAME] = new
        tables["Curves"]["rows"] = points = [
            point | _values(new, place) if point["case"] == NAME else point
            for point, place in zip(points, _places(points), strict=True)
        ]
        runs[at], row = row, runs[at]
    runs.insert(at + 1, row | {"case": f"{NAME}, another rate", "there": None})
    for one in runs[:at]:
        one["there"] = reached(curves["Muon"], curves[NAME].bits[-1])
    note = f"- AdamW {made['rate']:g}: measured {made['date']}, seeds side by side"
    tables["The shown run"]["note"] += f"\n{note}"
    ends = ", ".join(f"{case} {curve.bits[-1]:.3f}" for case, curve in curves.items())
    about = f"held-out bits per byte, mean of seeds, best of several rates, one GPU: {ends}"
    recipe = name.removeprefix("shown-run-")
    title = f"{recipe} on the text of its machine"
    drawn = picture(title, about, {ORANGE: curves[NAME], BLUE: curves["Muon"]})
    (folder / f"{name}.svg").write_text(drawn.render())
    written = report.write(
        [report.Table(**table) for table in tables.values()], facts, name, folder
    )
    return [*written, folder / f"{name}.svg"]


def _stored(case: str, points: Sequence[dict[str, Any]]) -> Curve:
    mine = [point for point in points if point["case"] == case]
    keys = ("tokens", "seconds", "bits", "low", "high")
    columns = {key: [point[key] for point in mine] for key in keys}
    return Curve(name=case, bigram=mine[0]["bigram"], step=0.0, **columns)


def _places(points: Sequence[dict[str, Any]]) -> list[int]:
    """The place of each point in its own curve."""
    counts: dict[str, int] = {}
    found = []
    for point in points:
        found.append(counts.get(point["case"], 0))
        counts[point["case"]] = found[-1] + 1
    return found


def _values(curve: Curve, at: int) -> report.Row:
    return {"bits": curve.bits[at], "low": curve.low[at], "high": curve.high[at]}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    option = parser.add_argument
    option("rate", type=float, nargs="?")
    option("--smoke", action="store_true", help="a dry run, tiny, on any machine")
    option("--seconds", type=float, default=200.0, help="the whole of it ends by then")
    option("--steps", type=int, default=240)
    option("--seeds", type=int, default=2)
    option("--text", type=float, default=400, help="MiB of text at the most")
    option("--scratch", type=Path, default=Path("/tmp/shown-rate"), help="for text and runs")
    option("--out", type=Path, default=report.RESULTS)
    option("--add", type=Path, metavar="FILE", help="measure nothing; put this file into --out")
    option("--name", default="shown-run-gpt_124m", help="the stored results")
    options = parser.parse_args(arguments)
    if options.add is not None:
        print(*add(options.add, options.out, options.name), sep="\n")
    else:
        print(measure(options))


if __name__ == "__main__":
    main(sys.argv[1:])
