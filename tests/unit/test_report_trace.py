# SPDX-License-Identifier: Apache-2.0
"""A recorded step says what happened, in the order in which it happened."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.core import streams
from shardwise.report.trace import merged, record_step
from tests.models import loss_of, make_model, mesh_of, shard_model, tokens
from tests.ranks import run_ranks


def record(
    rank: int, world_size: int, stage: int, watched_step: int = 2
) -> tuple[dict[str, Any], list[float]]:
    model = shard_model(make_model(depth=3), sw.zero(stage), mesh_of(world_size))
    optimizer = torch.optim.AdamW(model.parameters())
    losses, profile = [], {}
    for step in range(4):
        if step == watched_step:
            with record_step() as profile:
                loss = loss_of(model, tokens(step, 0, rank, world_size))
                loss.backward()
                optimizer.step()
        else:
            loss = loss_of(model, tokens(step, 0, rank, world_size))
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert streams.watcher() is None
    return profile, losses


@pytest.fixture(scope="module")
def profiles() -> list[dict[str, Any]]:
    return [profile for profile, _ in run_ranks(record, 2, 3)]


def test_a_recorded_step_is_what_happened(profiles: list[dict[str, Any]]) -> None:
    for profile in profiles:
        spans = profile["spans"]
        lanes = {lane: [s for s in spans if s["lane"] == lane] for lane in streams_of(spans)}
        own = [span["name"] for span in lanes["compute"] if not span.get("library")]
        order = list(dict.fromkeys(own))
        expected = [f"forward layers.{number}" for number in range(3)]
        expected += [f"backward layers.{number}" for number in (2, 1, 0)]
        assert [name for name in order if "layers" in name] == expected
        assert order.index("loss") == order.index("backward Model") - 1
        assert [len(lanes[one]) for one in ("gather", "reduce", "optimizer")] == [7, 4, 1]
        for span in (*lanes["gather"], *lanes["reduce"]):
            assert 0 <= span["begin"] < span["end"] <= profile["seconds"] and span["nbytes"] > 0
        busy = sorted((span["begin"], span["end"]) for span in lanes["compute"])
        assert all(begin >= end - 1e-6 for (_, end), (begin, _) in pairwise(busy))
        waits = merged([(begin, end) for begin, end, _ in profile["stalls"]])
        total = sum(end - begin for begin, end in waits)
        assert total == pytest.approx(profile["exposed_seconds"], abs=1e-5)
        assert 0 < profile["exposed"] == profile["exposed_seconds"] / profile["seconds"] < 1
        start = profile["memory"]["start"]  # other tests' models may rest in the same process
        held, highest = dict(start), dict(start)
        for _, kind, nbytes in profile["memory"]["changes"]:
            held[kind] = held.get(kind, 0) + nbytes
            highest[kind] = max(highest.get(kind, 0), held[kind])
        for kind in ("compute", "grad_transient"):
            assert held[kind] == start.get(kind, 0) < highest[kind], kind
        assert held["grad"] > start.get("grad", 0)  # zero_grad comes after the recording
    assert json.loads(json.dumps(profiles[0])) == profiles[0]


def streams_of(spans: list[dict[str, Any]]) -> set[str]:
    return {span["lane"] for span in spans}


def test_recording_changes_no_bit() -> None:
    for stage in (1, 3):
        watched = run_ranks(record, 2, stage)
        plain = run_ranks(record, 2, stage, -1)
        assert [losses for _, losses in watched] == [losses for _, losses in plain]
        assert all(profile for profile, _ in watched) and not any(profile for profile, _ in plain)


def test_two_recordings_at_once_are_refused_and_leave_nothing_behind() -> None:
    with record_step(), pytest.raises(RuntimeError, match="recorded already"), record_step():
        pass
    assert streams.watcher() is None
    with pytest.raises(ZeroDivisionError), record_step():
        _ = 1 / 0
    assert streams.watcher() is None
    with record_step() as profile:
        pass
    assert profile["exposed"] == 0 and profile["spans"] == []


def test_union_of_intervals() -> None:
    assert merged([(1, 2), (0, 1.5), (3, 4), (3.5, 3.6)]) == [(0, 2), (3, 4)]
    assert merged([]) == []
