# SPDX-License-Identifier: Apache-2.0
"""Scripts that end while weights are on their way: the interpreter shuts down all the same.

One process imports what ranks need; the ranks of every case are forks of it which run to the end of
their script, so that each shuts an interpreter down:

    test  -->  this file as a script  --fork-->  rank 0, rank 1 of a case  -->  end of the script
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw

at_exit: list[Path] = []  # the file in which a rank says how it ended
SECONDS = 150.0  # from the last line of a script to the end of its process
WRAPPED = ("data_parallel", "zero1", "zero1 mxfp8")
# How scripts end. The first holds a model of each kind, the others one under data_parallel: to fork
# a rank, and to shut it down, costs more than all that it does.
CASES = ("ends", "destroys", "raises", "stays alone", "drops")
kept: list[nn.Module] = []  # as a script holds its models: to the very end


def train(rank: int, wrapped: str, end: str) -> None:
    """Two steps, the second of which leaves gathers under way."""
    torch.manual_seed(0)
    mesh = sw.init_mesh(dp=2)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    sw.route(model, elementwise=["*"])
    if wrapped == "data_parallel":
        sw.data_parallel(model, mesh=mesh, overlap_gather="step")
    else:
        precision = sw.Precision(weights="mxfp8") if "mxfp8" in wrapped else None
        options = {"mesh": mesh, "placements": sw.zero(1), "precision": precision}
        sw.fully_shard(model, **options, gather_in_step=True)
    optimizer = sw.optimizer(model, matrix=None, elementwise=sw.adamw(lr=1e-3))
    for step in range(2):
        model(torch.randn(4, 64)).square().mean().backward()
        if end == "stays alone" and step and rank:
            return
        optimizer.step()
        optimizer.zero_grad()
    if end == "drops":
        unit = model._shardwise_unit  # type: ignore[attr-defined]
        assert any(group.pending for group in unit.groups), "nothing is under way"
    else:
        kept.append(model)


def tell() -> None:
    """Say, at the very end of a rank, whether messages are still under way."""
    found = [
        one for one in sys.modules["shardwise.pending"]._under_way if getattr(one, "_works", ())
    ]
    if at_exit:
        at_exit[0].write_text("under way" if found else "landed")


def run_rank(rank: int, folder: Path, end: str) -> None:
    at_exit.append(folder / f"exit-{rank}")
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for wrapped in WRAPPED if end == "ends" else WRAPPED[:1]:
        train(rank, wrapped, end)
    for model in kept:
        unit = model._shardwise_unit  # type: ignore[attr-defined]
        assert any(group.pending for group in unit.groups), "nothing is under way"
    if end == "destroys":
        dist.destroy_process_group()
    (folder / f"rank-{rank}").write_text("through")
    if end == "raises":
        raise ValueError("the script's own")


def watch(ranks: dict[int, int], folder: Path) -> str:
    """How the ranks ended; those that have not SECONDS after their last line are killed."""
    begun: dict[int, float] = {}
    found = dict.fromkeys(ranks, "")
    deadline = time.monotonic() + 250
    while not all(found.values()):
        for rank, process in ranks.items():
            if not found[rank]:
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    found[rank] = f"exit {os.waitstatus_to_exitcode(status)}"
            if (folder / f"rank-{rank}").exists():
                begun.setdefault(rank, time.monotonic())
            late = time.monotonic() > begun.get(rank, deadline) + SECONDS
            if not found[rank] and late:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                found[rank] = "hangs after its last line" if rank in begun else "hangs"
        time.sleep(0.05)
    return ", ".join(found[rank] for rank in sorted(found))


def main() -> None:
    """Every case in turn, and a line for each."""
    import torch._dynamo  # noqa: F401  (every optimizer does)

    atexit.register(tell)  # before the library's own, so that it runs after that
    gc.freeze()  # a collection at the end of a rank would touch, and thereby copy, all of it
    started = []
    for number, end in enumerate(CASES):  # side by side: one of them waits for a peer that is gone
        folder = Path(sys.argv[1], str(number))
        folder.mkdir()
        ranks = {}
        for rank in range(2):
            process = os.fork()
            if process == 0:
                run_rank(rank, folder, end)
                return  # to the end of the script
            ranks[rank] = process
        started.append((end, ranks, folder))
    for end, ranks, folder in started:
        ended = watch(ranks, folder)
        told = {file.read_text() for file in folder.glob("exit-*")}
        sys.stdout.write(f"{end}: {ended}, messages {' and '.join(sorted(told))}\n")
        sys.stdout.flush()  # before the next fork


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    here = Path(__file__)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": f"{here.parents[2]}:{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, str(here), str(tmp_path_factory.mktemp("ranks"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split(": ", 1) for line in done.stdout.splitlines()]
    return dict(lines) | {"errors": done.stderr}


@pytest.mark.parametrize("end", CASES)
def test_a_script_that_ends_with_gathers_under_way_exits(
    outcomes: dict[str, str], end: str
) -> None:
    code = int(end == "raises")
    wanted = f"exit {code}, exit {code}, messages landed"
    assert outcomes[end] == wanted, outcomes["errors"][-3000:]


if __name__ == "__main__":
    main()
