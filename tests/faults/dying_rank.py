# SPDX-License-Identifier: Apache-2.0
"""A script of one of two ranks, of which rank 1 dies, raises, or skips a unit in its third step.

python -m tests.faults.dying_rank killed|raises|skips
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from tests.models import loss_of, make_model, mesh_of, shard_model, tokens
from tests.one_card import join_one_card, on_device

TIMEOUT = 15.0  # of the process group, in seconds


def fail(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise ValueError("the script's own error")


def main() -> None:
    how, rank, world_size = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join_one_card(rank)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=TIMEOUT))
    with on_device("cuda"):
        model = make_model(width=32, depth=3)
        shard_model(model, sw.zero(3), mesh_of(world_size))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(4):
            if rank == 1 and step == 2:
                layer: Any = model.layers[1]
                if how == "skips":
                    model.layers = torch.nn.ModuleList([model.layers[0], model.layers[2]])
                else:
                    layer.register_forward_pre_hook(lambda *_: fail(how))
            loss = loss_of(model, tokens(step, 0, rank, world_size))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sys.stdout.write(f"step {step}: {loss.item():.3f}\n")
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
