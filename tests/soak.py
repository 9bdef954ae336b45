# SPDX-License-Identifier: Apache-2.0
"""``make soak``: kills by the thousand, and a long run that is killed again and again.

    python -m tests.soak                              1,000 kills and 2,000 steps: an hour
    python -m tests.soak --jobs 6                     the same on 16 cores
    python -m tests.soak --kills 30 --steps 100       a minute

kills   ranks save in a loop under one strategy after another and are killed at random moments: one
        rank, all at once, or one after another. What was reported saved is there, whole, and of one
        step; the next ranks resume from it under another strategy.
steps   the trainer, killed at random moments of steps, saves and evaluations, and resumed; its end
        equals that of the run to which nothing happened, bit for bit. Memory and file descriptors
        of that one stay flat.

This process imports torch once and forks every rank, which then costs milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.report import RESULTS, Table, circumstances, write
from shardwise.checkpoint import Manifest, Store, valid_checkpoints
from shardwise.core.placements import STRATEGIES
from shardwise.report.html import read_events
from shardwise.train import loop
from tests.faults.test_store_kill import assert_holds, fork, model_at, set_step
from tests.train_runs import make_trainer, write_text

WAYS = ("one rank", "all ranks", "staggered")
RANKS = {name: 4 if name in ("hsdp", "hfsdp") else 2 for name in STRATEGIES}
KILLS, STEPS = 1000, 2000  # of a whole run

NO_PLAN = SimpleNamespace(as_dict=dict, compared=lambda *_: {}, check=lambda *_: [], elements={})


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="folders in which saves are killed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to record figures")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Each restart would plan the run: seconds that are not about kills.
    loop.Trainer._plan = lambda trainer: NO_PLAN  # type: ignore
    facts = circumstances(arguments)
    facts["command"] = "python -m tests.soak " + shlex.join(arguments)
    with tempfile.TemporaryDirectory(prefix="shardwise-soak-") as scratch:
        root, calls = Path(scratch), []
        for job in range(asked.jobs if asked.kills else 0):
            share = len(range(job, asked.kills, asked.jobs))
            calls.append(partial(kill_saves, root / f"kills-{job}", share, asked.seed + job))
        if asked.steps:
            config = configuration(root, asked.steps)
            calls += [partial(calm_run, root / "calm", config)]
            calls += [partial(rough_run, root / "rough", config, asked.seed)]
        results = at_once(calls)
        tables = [table_of_saves(results[: asked.jobs])] if asked.kills else []
        if asked.steps:
            seconds, kills = results[-2:]
            tables.append(table_of_steps(root, asked.steps, seconds, kills))
    for table in tables:
        print(table.markdown(), flush=True)
    short = "" if asked.kills >= KILLS and asked.steps >= STEPS else "-short"
    for path in write(tables, facts, f"soak-cpu{short}", asked.results):
        print(path)


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of calls, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(number) for number in range(len(calls))]
        jobs = [
            fork(lambda call=call, place=place: place.write_text(json.dumps(call())))
            for call, place in zip(calls, places, strict=True)
        ]
        ended = [os.waitpid(job, 0)[1] for job in jobs]
        assert not any(ended), f"the errors stand above: {ended}"
        return [json.loads(place.read_text()) for place in places]


# ------------------------------------------------------------------------------ ranks to kill


class Ranks:
    """Forked ranks of one process group."""

    def __init__(self, folder: Path, size: int, work: Callable[[int], Any]) -> None:
        self.folder, self.size = folder, size
        meeting = folder / "meeting"
        meeting.unlink(missing_ok=True)

        def run(rank: int) -> None:
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size
            )
            try:
                work(rank)
            except Exception as error:
                # Another rank is dead, and this one has noticed before it is killed too.
                if not (folder / "killing").exists():
                    (folder / f"failed-{rank}").write_text(repr(error))
                    raise
            os._exit(0)

        for left in folder.glob("failed-*"):
            left.unlink()
        (folder / "killing").unlink(missing_ok=True)
        self.pids = [fork(lambda rank=rank: run(rank)) for rank in range(size)]
        self._ended: dict[int, int] = {}

    def running(self) -> bool:
        """Whether all ranks run still; what one has died of by itself is raised."""
        for pid in self.pids:
            if pid not in self._ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self._ended[pid] = status
        if any(status for status in self._ended.values()):
            self.kill("all ranks", random.Random(0))
            said = {path.name: path.read_text() for path in self.folder.glob("failed-*")}
            raise AssertionError(f"a rank has died by itself: {self._ended} {said}")
        return len(self._ended) < self.size

    def kill(self, way: str, rng: random.Random) -> None:
        """SIGKILL to every rank; which come first, and how long after them the others."""
        (self.folder / "killing").touch()
        order = rng.sample(self.pids, self.size)
        for number, pid in enumerate(order):
            if way == "staggered" or (way == "one rank" and number == 1):
                time.sleep(rng.uniform(0.0, 0.02 if way == "staggered" else 0.1))
            if pid not in self._ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for pid in order:
            if pid not in self._ended:
                self._ended[pid] = os.waitpid(pid, 0)[1]

    def wait(self, ready: Callable[[], Any]) -> None:
        """Until that is so, or the ranks have ended well."""
        limit = time.monotonic() + 3600
        while self.running() and not ready():
            assert time.monotonic() < limit, "the ranks never came to that"
            time.sleep(0.002)


# ------------------------------------------------------------------------------ kills of saves


def save_in_a_loop(rank: int, size: int, strategy: str, root: Path) -> None:
    """Resume whatever lies there, then save as fast as possible, reporting each one."""
    placements = STRATEGIES[strategy]
    axes = {"dp_outer": 2, "dp": size // 2} if placements.num_axes == 2 else {"dp": size}
    mesh = sw.init_mesh(**axes, device_type="cpu")
    model = sw.fully_shard(model_at(0), mesh=mesh, placements=placements)
    optimizer = sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())
    store = Store(root / "checkpoints", keep=2, timeout=60)
    found = store.resume(model, optimizer)
    step = found[1]["step"] if found is not None else 0
    report = os.open(root / "reported", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    (root / f"ready-{rank}").touch()
    while True:
        step += 1
        set_step(model, step)
        store.save(step, model, optimizer, {"step": step})  # which waits for the one before
        set_step(model, -7)  # training goes on while it is written
        waits = step % 3 == 0
        if waits:
            store.wait()
        if rank == 0:
            os.write(report, f"{step if waits else step - 1}\n".encode())


def _reported(root: Path) -> int:
    """The newest step of which a rank has said that it is saved."""
    lines = (root / "reported").read_bytes().split(b"\n")[:-1]
    return max(map(int, lines), default=0)


def kill_saves(root: Path, kills: int, seed: int) -> dict[str, Any]:
    """How many kills came in which way, the saves, and the minutes."""
    root.mkdir()
    model = model_at(0)
    sw.save(root / "warm", model, torch.optim.AdamW(model.parameters()))  # what is imported late
    rng = random.Random(seed)
    rows = {name: {"strategy": name, "ranks": RANKS[name]} for name in STRATEGIES}
    began, newest, saved, there = time.monotonic(), 0, 0, 0
    (root / "reported").touch()
    for trial in range(kills):
        strategy = list(STRATEGIES)[trial % len(STRATEGIES)]
        way, size = WAYS[trial // len(STRATEGIES) % len(WAYS)], RANKS[strategy]
        for path in root.glob("ready-*"):
            path.unlink()

        def work(rank: int, size: int = size, strategy: str = strategy) -> None:
            save_in_a_loop(rank, size, strategy, root)

        ranks = Ranks(root, size, work)
        target = _reported(root) + rng.randrange(4)
        ranks.wait(lambda size=size: len(list(root.glob("ready-*"))) == size)
        ranks.wait(lambda target=target: _reported(root) >= target)
        time.sleep(rng.uniform(0.0, 0.05))
        ranks.kill(way, rng)
        reported = _reported(root)
        valid = valid_checkpoints(root / "checkpoints")
        # Two, and one more for each kill in a row that came before the removal of older ones.
        most, there = max(3, there + 1), len(valid)
        assert there <= most, f"{there} checkpoints after trial {trial}, {most} at most"
        before, newest = newest, assert_holds(valid[-1][0]) if valid else 0
        assert newest >= max(reported, before), f"{reported} was reported, {newest} found"
        saved += newest - before
        rows[strategy][way] = rows[strategy].get(way, 0) + 1
        (root / "reported").write_text(f"{reported}\n")
        if (trial + 1) % 50 == 0:
            print(f"{root.name}: {trial + 1} kills, {saved} saves, none lost", flush=True)
    assert saved >= kills, "saves were under way"
    with Store(root / "checkpoints", keep=2) as store:  # a run that ends well cleans up
        store.save(10**7, model_at(10**7), extra={"step": 10**7})
    names = sorted(path.name for path in (root / "checkpoints").iterdir())
    assert len(names) <= 2 and names[-1] == f"step-{10**7}", names
    minutes = (time.monotonic() - began) / 60
    return {"kills": kills, "saves": saved, "minutes": minutes, "rows": [*rows.values()]}


def table_of_saves(found: Sequence[dict[str, Any]]) -> Table:
    kills, saves = (sum(one[what] for one in found) for what in ("kills", "saves"))
    return Table(
        title="Kills during saves",
        note=f"{kills} kills in {max(one['minutes'] for one in found):.1f} minutes over {saves} "
        f"saves, in {len(found)} folders at once, each resumed after each kill under the next "
        f"strategy. 0 checkpoints that were reported saved were lost, 0 were damaged or of more "
        f"than one step, and no temporary folder stayed.",
        columns={name: (name, "") for name in ("strategy", "ranks", *WAYS)},
        rows=[
            {"strategy": same[0]["strategy"], "ranks": same[0]["ranks"]}
            | {way: sum(row.get(way, 0) for row in same) for way in WAYS}
            for same in zip(*(one["rows"] for one in found), strict=True)
        ],
    )


# ------------------------------------------------------------------------------ kills of a run


def train(rank: int, folder: Path, config: dict[str, Any], watch: bool) -> None:
    """Go on from the newest checkpoint to the end; with ``watch``, note what this rank holds."""
    found = valid_checkpoints(folder / "checkpoints")
    resume = str(found[-1][0]) if found else None
    trainer = make_trainer(rank, 2, str(folder), resume, or_older=True, **config)
    real = trainer._train_step
    held: list[tuple[int, int, int]] = []

    def step(guard: Any) -> str | None:
        if trainer.step % max(1, trainer.config.steps // 40) == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            held.append((trainer.step, pages * 4096, len(os.listdir("/proc/self/fd"))))
        return real(guard)

    if watch:
        trainer._train_step = step  # type: ignore[method-assign]
    trainer.run()
    if watch:
        (folder / f"held-{rank}.json").write_text(json.dumps(held))


def configuration(root: Path, steps: int) -> dict[str, Any]:
    config = {"data": write_text(root), "steps": steps, "decay": 0.5, "timeout": 120.0, "keep": 2}
    return config | {"save_every": max(2, steps // 100), "eval_every": max(2, steps // 40)}


def calm_run(folder: Path, config: dict[str, Any]) -> float:
    """Seconds of the run to which nothing happens."""
    folder.mkdir()
    began = time.monotonic()
    Ranks(folder, 2, lambda rank: train(rank, folder, config, watch=True)).wait(lambda: False)
    return time.monotonic() - began


def rough_run(folder: Path, config: dict[str, Any], seed: int) -> dict[str, int]:
    """How often the other run was killed, and in which way."""
    folder.mkdir()
    rng, kills = random.Random(seed), dict.fromkeys(WAYS, 0)
    (folder / "events.jsonl").touch()
    finished = False
    while not finished:
        # Evaluations come at other steps each time: they change nothing that is trained.
        now = config | {"eval_every": rng.choice((0, 3, 7, config["eval_every"]))}
        target = _steps(folder) + rng.randrange(max(8, config["steps"] // 25))
        ranks = Ranks(folder, 2, lambda rank, now=now: train(rank, folder, now, watch=False))
        ranks.wait(lambda target=target: _steps(folder) > target)
        if ranks.running():
            time.sleep(rng.uniform(0.0, 0.05))
        finished = not ranks.running()
        if not finished:
            way = WAYS[sum(kills.values()) % len(WAYS)]
            ranks.kill(way, rng)
            kills[way] += 1
    return kills


def table_of_steps(root: Path, steps: int, seconds: float, kills: dict[str, int]) -> Table:
    row = {"steps": steps, "kills": sum(kills.values())}
    row |= {
        "files compared": _compare(root / "calm", root / "rough", steps),
        **_flat(root / "calm"),
    }
    ways = ", ".join(f"{count} {way}" for way, count in kills.items())
    return Table(
        title="A run that is killed again and again",
        note=f"{steps} steps of 2 ranks under zero3 with Muon and AdamW: once undisturbed "
        f"({seconds:.0f} s), once with {row['kills']} kills ({ways}) and as many resumes, "
        f"evaluated at other steps after each. Every loss is equal, and so is, bit for bit, every "
        f"file of the last checkpoint: model, optimizer, random states, position in the data. "
        f"Memory and file descriptors are those of the undisturbed ranks, after a quarter of the "
        f"run and at its end.",
        columns={name: (name, "") for name in row},
        rows=[row],
    )


def _steps(folder: Path) -> int:
    """How many steps have been logged, those that were done again too."""
    return (folder / "events.jsonl").read_bytes().count(b'{"kind": "step"')


def _flat(folder: Path) -> dict[str, Any]:
    """Memory and descriptors of the fuller rank, and that neither grows."""
    found = [json.loads((folder / f"held-{rank}.json").read_text()) for rank in range(2)]
    for held in found:
        (_, memory, files), (_, memory_later, files_later) = held[len(held) // 4], held[-1]
        assert files_later <= files + 2, f"file descriptors grow: {held}"
        assert memory_later <= memory * 1.05 + (8 << 20), f"memory grows: {held}"
    points = (len(found[0]) // 4, -1)
    early, late = ([max(at) for at in zip(*(h[n] for h in found), strict=True)] for n in points)
    return {
        "MB": f"{early[1] / 1e6:.1f}",
        "MB at the end": f"{late[1] / 1e6:.1f}",
        "descriptors": early[2],
        "at the end": late[2],
    }


def _compare(calm: Path, rough: Path, steps: int) -> int:
    """That both runs ended alike; how many files of the last checkpoints were compared."""
    losses = []
    for folder in (calm, rough):
        events = read_events(folder / "events.jsonl")
        done = [(e["step"], e["loss"], e["grad_norm"]) for e in events if e["kind"] == "step"]
        losses.append(set(done))  # a step that was done again after a kill gave the same again
    assert losses[0] == losses[1] and len(losses[0]) == steps
    last = [folder / "checkpoints" / f"step-{steps:06d}" for folder in (calm, rough)]
    ends = [Manifest.read(path) for path in last]
    assert ends[0].files == ends[1].files and len(ends[0].files) == 2, ends
    assert (ends[0].tensors, ends[0].optimizer) == (ends[1].tensors, ends[1].optimizer)
    return len(ends[0].files)


if __name__ == "__main__":
    main(sys.argv[1:])
