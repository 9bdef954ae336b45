# SPDX-License-Identifier: Apache-2.0
"""Work that fails on some ranks raises one error on all of them, in one exchange."""

from __future__ import annotations

import pytest

from shardwise.checkpoint import CheckpointError, DamagedError, MismatchError, SaveError
from shardwise.checkpoint.errors import joint_error
from shardwise.core.agreement import all_ranks, together
from tests.ranks import run_ranks

Outcome = tuple[str, str] | tuple[int, list[int]]


def attempt(rank: int, world_size: int, problems: dict[int, Exception]) -> Outcome:
    def work() -> int:
        if rank in problems:
            raise problems[rank]
        return 10 * rank

    try:
        return together(work, all_ranks(), facts=lambda made: made + 1, error=joint_error)
    except (CheckpointError, SaveError) as error:
        return type(error).__name__, str(error)


def test_without_a_problem_everyone_has_everyones_facts() -> None:
    assert run_ranks(attempt, 3, {}) == [(0, [1, 11, 21]), (10, [1, 11, 21]), (20, [1, 11, 21])]


@pytest.mark.parametrize(
    ("problems", "expected"),
    [
        ({1: DamagedError("bad")}, ("DamagedError", "rank 1: bad")),
        ({0: SaveError("no"), 2: SaveError("no")}, ("SaveError", "ranks 0, 2: no")),
        (dict.fromkeys(range(3), MismatchError("all")), ("MismatchError", "all")),
        (
            {0: MismatchError("other"), 1: DamagedError("bad")},
            ("DamagedError", "rank 0: other\nrank 1: bad"),
        ),
        (
            {0: MismatchError("other"), 2: OSError("gone")},
            ("CheckpointError", "rank 0: other\nrank 2: gone"),
        ),
        ({2: OSError("gone")}, ("CheckpointError", "OSError: rank 2: gone")),
        ({0: KeyError()}, ("CheckpointError", "KeyError: rank 0: KeyError")),
    ],
    ids=["one", "two alike", "all alike", "damage first", "others", "a stranger", "no text"],
)
def test_every_rank_raises_what_any_has_found(
    problems: dict[int, Exception], expected: tuple[str, str]
) -> None:
    assert run_ranks(attempt, 3, problems) == [expected] * 3


def test_a_process_alone_needs_no_group() -> None:
    axis = all_ranks()
    assert (axis.rank, axis.size) == (0, 1)
    assert together(lambda: 4, axis, facts=str) == (4, ["4"])
    with pytest.raises(ValueError, match=r"^here$"):
        together(lambda: (_ for _ in ()).throw(OSError("here")), axis)
