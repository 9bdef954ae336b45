# SPDX-License-Identifier: Apache-2.0
"""The harness itself: what comes back, what a failure says, and that the next test still works."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.optim import matrix_group
from tests import ranks
from tests.ranks import RanksFailed, run_ranks

ROOT = Path(__file__).parents[2]


def sum_of_ranks(rank: int, world_size: int, scale: float) -> float:
    value = torch.tensor(rank * scale)
    dist.all_reduce(value)
    return value.item()


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def raise_on_every_rank(rank: int, world_size: int) -> None:
    raise ValueError(f"rank {rank} does not like it")


def raise_while_others_communicate(rank: int, world_size: int) -> None:
    dist.barrier()
    if rank == 0:
        raise ValueError("rank 0 left the others alone")
    dist.all_reduce(torch.ones(1))


def hang_on(rank: int, world_size: int, hanging: int) -> str:
    if rank == hanging:
        sleep_for_ever()
    return "done"


def sleep_for_ever() -> None:
    while True:
        time.sleep(100)


def end_process(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


def return_tensors(rank: int, world_size: int) -> dict[str, object]:
    weight = torch.nn.Parameter(torch.arange(1000.0))
    return {"parameter": weight, "views": [weight[rank : rank + 1], (weight * 2)[:2]], "n": 1}


def random_numbers(rank: int, world_size: int) -> tuple[float, float]:
    numbers = torch.rand(()).item(), random.random()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return numbers


def defaults(rank: int, world_size: int) -> tuple[bool, bool, int]:
    is_single_precision = torch.get_default_dtype() == torch.float32
    return is_single_precision, torch.is_grad_enabled(), torch.get_num_threads()


def assert_works(world_size: int) -> None:
    assert run_ranks(sum_of_ranks, world_size, 1.0) == [sum(range(world_size))] * world_size


def assert_gone(*process_ids: int) -> None:
    """A moment is allowed: the ranks of a session that was killed must notice by themselves."""
    until = time.monotonic() + 100
    for process_id in process_ids:
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < until:
                os.kill(process_id, 0)
                time.sleep(0.02)
            pytest.fail(f"the rank with process id {process_id} is still there")


# ------------------------------------------------------------------------------------- a clean run


@pytest.mark.parametrize("world_size", [1, 2])
def test_results_come_back_in_rank_order(world_size: int) -> None:
    total = 2.0 * sum(range(world_size))
    assert run_ranks(sum_of_ranks, world_size, 2.0) == [total] * world_size
    assert len(set(run_ranks(process_id, world_size))) == world_size


def test_fresh_processes_are_not_the_pool_and_end_with_the_call() -> None:
    pooled = run_ranks(process_id, 1)
    fresh = run_ranks(process_id, 1, fresh=True)
    assert fresh != pooled
    assert_gone(*fresh)
    assert run_ranks(process_id, 1) == pooled


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_ranks_are_stopped_while_other_pools_work() -> None:
    pool = run_ranks(process_id, 2)
    run_ranks(process_id, 1)
    states = [Path(f"/proc/{pid}/stat") for pid in pool]
    until = time.monotonic() + ranks.PATIENCE_SECONDS
    while any(state.read_text().rpartition(")")[2].split()[0] != "T" for state in states):
        assert time.monotonic() < until, "they go on"
    assert run_ranks(process_id, 2) == pool
    assert_works(2)


def test_every_call_starts_from_the_same_state() -> None:
    first = run_ranks(random_numbers, 2)
    assert first[0] == first[1] == run_ranks(random_numbers, 2)[0]
    assert run_ranks(defaults, 2) == [(True, True, 1)] * 2


def test_tensors_come_back_as_plain_compact_copies() -> None:
    for rank, result in enumerate(run_ranks(return_tensors, 2)):
        views = result["views"]
        assert isinstance(views, list)
        assert type(result["parameter"]) is torch.Tensor
        assert views[0].tolist() == [rank]
        assert views[1].tolist() == [0.0, 2.0]
        assert views[0].untyped_storage().nbytes() == 4


def test_a_pool_that_holds_too_many_files_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    (before,) = run_ranks(process_id, 1)
    monkeypatch.setattr(ranks, "MAX_OPEN_FILES", 0)
    assert run_ranks(process_id, 1) == [before]
    assert_gone(before)


# ------------------------------------------------------------------------------------- failures


def test_an_exception_on_every_rank_shows_every_traceback() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(raise_on_every_rank, 2)
    assert "raise_on_every_rank failed on 2 ranks" in str(caught.value)
    for rank in (0, 1):
        assert f"--- rank {rank}: raised" in str(caught.value)
        assert f"ValueError: rank {rank} does not like it" in caught.value.reports[rank]
        assert "in raise_on_every_rank" in caught.value.reports[rank]
    assert_works(2)


def test_ranks_left_alone_in_a_collective_are_shown_long_before_the_timeout() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(raise_while_others_communicate, 2)
    assert time.monotonic() - started < ranks.PATIENCE_SECONDS / 2
    assert "rank 0 left the others alone" in caught.value.reports[0]
    assert "in all_reduce" in caught.value.reports[1]
    assert "in raise_while_others_communicate" in caught.value.reports[1]
    assert_works(2)


def test_a_hang_is_killed_in_the_time_given_and_shows_its_stack() -> None:
    before = run_ranks(process_id, 2)
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(hang_on, 2, 1, timeout=4)
    assert 4 <= time.monotonic() - started < ranks.PATIENCE_SECONDS / 2
    assert "hang_on timed out (4 s) on 2 ranks, ranks still running: [1]" in str(caught.value)
    assert caught.value.reports[0] == "returned"
    assert "in sleep_for_ever" in caught.value.reports[1]
    assert_gone(*before)
    assert_works(2)


def test_a_dead_process_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(end_process, 2)
    assert "died, exit code 7" in caught.value.reports[0]
    assert "died, exit code -9 (SIGKILL)" in caught.value.reports[1]
    assert_works(2)


def test_a_rank_killed_between_calls_is_reported_by_the_next_call() -> None:
    os.kill(run_ranks(process_id, 1)[0], signal.SIGKILL)
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(process_id, 1)
    assert_works(1)


def test_a_local_function_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="top level"):
        run_ranks(lambda rank, world_size: None, 2)


# ------------------------------------------------------- a rank's answers, without the processes


def answer_to(work: Callable[[], object]) -> dict[str, Any]:
    here, there = multiprocessing.Pipe()
    ranks._answer(there, work)
    return pickle.loads(here.recv_bytes())


def test_a_system_exit_is_a_failure_not_a_silent_end() -> None:
    assert "SystemExit: 3" in answer_to(lambda: sys.exit(3))["traceback"]


def test_a_bare_assert_shows_small_values_and_describes_tensors() -> None:
    def check() -> None:
        expected, rows = 12, torch.zeros(3, 4)
        if rows.numel() == expected:
            raise AssertionError

    text = answer_to(check)["traceback"]
    assert "expected = 12" in text
    assert "rows = Tensor (3, 4) torch.float32" in text


def test_a_tensor_subclass_is_refused_as_a_result() -> None:
    class Sharded(torch.Tensor):
        pass

    with pytest.raises(TypeError, match=r"Sharded.*return its to_local\(\) or full_tensor\(\)"):
        ranks._as_plain_values([torch.zeros(1).as_subclass(Sharded)])


# ------------------------------------------------------------------------------ whole sessions


SESSION = """
import os, signal, threading
from tests import ranks
from tests.ranks import run_ranks
from tests.unit.test_ranks import hang_on, process_id

ranks.PRELOADED = []  # nothing of the library runs here

def test_it():
    print("pids", *run_ranks(process_id, 2), *run_ranks(process_id, 1), flush=True)  # 2 are paused
    # While the rank is busy: an idle one would find its pipe closed.
    threading.Timer(0.5, os.kill, (os.getpid(), signal.{signal})).start()
    run_ranks(hang_on, 1, 0)
"""


def run_session(folder: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    with open(f"{folder}/said", "w") as file:
        os.dup2(file.fileno(), 1)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    plugins = ["-p", "no:cacheprovider", "-p", "tests.conftest"]
    sys.exit(pytest.main(["-s", *plugins, "-c", str(ROOT / "pyproject.toml"), folder]))


def test_no_rank_outlives_an_interrupted_session(tmp_path: Path) -> None:
    sessions = {}
    for ending in ("SIGINT", "SIGKILL"):
        (tmp_path / ending).mkdir()
        (tmp_path / ending / "test_session.py").write_text(SESSION.format(signal=ending))
        sessions[ending] = ranks.rank_context().Process(
            target=run_session, args=(str(tmp_path / ending),)
        )
        sessions[ending].start()
    for ending, session in sessions.items():
        session.join(ranks.PATIENCE_SECONDS)
        said = (tmp_path / ending / "said").read_text()
        found = re.search(r"pids (\d+) (\d+) (\d+)", said)
        assert found is not None, said
        assert ("KeyboardInterrupt" in said) == (ending == "SIGINT"), said
        assert_gone(*map(int, found.groups()))


def replace_one(rank: int, world_size: int) -> bool:
    found = matrix_group.evenly_is_cheaper
    matrix_group.evenly_is_cheaper = lambda plan: True
    return found.__name__ == "evenly_is_cheaper"


def test_what_a_call_replaced_is_put_back() -> None:
    """Ranks serve one test after the other."""
    assert [run_ranks(replace_one, 2) for _ in range(2)] == [[True, True]] * 2
