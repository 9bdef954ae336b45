# SPDX-License-Identifier: Apache-2.0
"""NCCL ranks whose partner is gone end by themselves, and say which collective they waited for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.faults.dying_rank import TIMEOUT
from tests.one_card import MPS, ranks_device
from tests.ranks import counts

pytestmark = pytest.mark.skipif(ranks_device() == "cpu", reason="GPU alone: ranks of NCCL")
STARTING = 90.0  # seconds until the ranks have begun, on a busy machine
AFTER = 30.0  # seconds that a rank may take to end, once its process group has given up


def run(how: str, folder: Path) -> tuple[list[int], list[str]]:
    """Exit codes and output of both ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2"}
    environment.pop(MPS, None)  # what serves many processes may not outlive one that is killed
    ranks, files = [], []
    for rank in range(2):
        files.append(folder / f"{how}-{rank}")
        with files[-1].open("w") as output:
            command = [sys.executable, "-m", "tests.faults.dying_rank", how]
            one = subprocess.Popen(
                command, env=environment | {"RANK": str(rank)}, stdout=output, stderr=output
            )
        ranks.append(one)
    counts["nccl"] += 1
    deadline = time.monotonic() + STARTING + TIMEOUT + AFTER
    try:
        codes = [one.wait(max(0.1, deadline - time.monotonic())) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    return codes, [file.read_text() for file in files]


@pytest.mark.parametrize("how", ["killed", "raises", "skips"])
def test_the_others_end_with_the_collective_that_they_waited_for(how: str, tmp_path: Path) -> None:
    codes, output = run(how, tmp_path)
    assert "step 1:" in output[0] and "step 3:" not in output[0], output
    assert codes[0] != 0, "the rank that was left ends, and not as if all were well"
    assert re.search("OpType=|WorkNCCL|NCCL error|out of step", output[0]), output[0]
    if how == "raises":
        assert "the script's own error" in output[1]
