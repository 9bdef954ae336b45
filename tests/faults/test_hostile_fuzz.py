# SPDX-License-Identifier: Apache-2.0
"""Any mutation of any file of a checkpoint ends in a named error, or changes nothing."""

from __future__ import annotations

import json
import random
import resource
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.checkpoint import (
    CheckpointError,
    DamagedError,
    MismatchError,
    verify,
)
from tests.faults.test_hostile_files import MEMORY, save_two, snapshot, stepped
from tests.faults.test_safe_loading import seal
from tests.ranks import run_ranks

OTHERS: tuple[Any, ...] = (None, True, -1, 0, 1, 10**9, 10**30, 1.5, "", "x", "\x1b", [], {}, [[]])
OTHERS += ({"$": "tuple", "v": [1]}, {"$": "x"}, {"$": "bytes", "v": "AAAA"}, float("nan"))


def places_in(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        return [before] * bool(before) + [
            place for key, item in pairs[:12] for place in places_in(item, (*before, key))
        ]
    return [before]


def mutate_json(path: Path, name: str, rng: random.Random) -> None:
    content = json.loads((path / name).read_text())
    body = content["body"] if name == "manifest.json" else content
    place = rng.choice(places_in(body))
    holder = body
    for key in place[:-1]:
        holder = holder[key]
    if rng.random() < 0.2:
        del holder[place[-1]]
    else:
        holder[place[-1]] = rng.choice(OTHERS)
    if name == "manifest.json":
        changed = body
        seal(path, lambda body: (body.clear(), body.update(changed))[0])  # type: ignore[func-returns-value]
    else:
        (path / name).write_text(json.dumps(content))
        seal(path)


def mutate_bytes(path: Path, name: str, rng: random.Random) -> None:
    data = bytearray((path / name).read_bytes())
    for _ in range(rng.choice((1, 1, 4))):
        at = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            del data[at : at + rng.randrange(1, 9)]
        else:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
    (path / name).write_bytes(data)
    seal(path)


def fuzz(rank: int, world_size: int, path: str, seed: int, rounds: int) -> dict[str, int]:
    """Read many wrong checkpoints: only named errors come out; a refused one changes nothing."""
    rng, folder = random.Random(seed), Path(path)
    whole = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, limits[1]))
    counts = {"refused": 0, "taken": 0}
    model, optimizer = stepped()
    try:
        for _ in range(rounds):
            name = rng.choice([*sorted(whole), "index.json", "state.json"])
            if name.endswith(".json"):
                mutate_json(folder, name, rng)
            else:
                mutate_bytes(folder, name, rng)
            wrong = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
            before = snapshot(model, optimizer)
            report = verify(folder)
            str(report).encode()
            error: CheckpointError | None = None
            try:
                sw.load(folder, model, optimizer)
            except CheckpointError as refused:
                error = refused
            about = f"{name}: {error!r:.999}; {report}; {wrong[name]!r:.2000}"
            if error is None:
                assert report.ok, f"verify refuses what load takes: {about}"
                model, optimizer = stepped()
            else:
                assert snapshot(model, optimizer) == before, f"changed: {about}"
                # What does not fit a model or an optimizer, verify cannot tell.
                fits = not isinstance(error, MismatchError)
                assert not fits or isinstance(error, DamagedError), f"nobody's error: {about}"
                assert not fits or not report.ok, f"verify calls it sound: {about}"
            counts["taken" if error is None else "refused"] += 1
            for known, data in whole.items():
                (folder / known).write_bytes(data)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return counts


@pytest.mark.parametrize("seed", range(3))
def test_no_mutation_gets_through_as_anything_but_a_named_error(seed: int, tmp_path: Path) -> None:
    path = save_two(tmp_path / "store") / "step-000002"
    [counts] = run_ranks(fuzz, 1, str(path), seed, 100)
    assert counts["refused"] > 30, "the mutations are wrong ones"
    assert counts["taken"] > 0, "and not all of them matter"
