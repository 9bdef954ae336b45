# SPDX-License-Identifier: Apache-2.0
"""Rehearsals: more ranks than GPUs, so that several NCCL ranks run on one GPU.

    torchrun --nproc-per-node 4 ...      rank 0   rank 1   rank 2   rank 3
    on a machine with one GPU            |------------- cuda:0 ----------|

NCCL refuses two ranks of one host on one GPU. It knows hosts by ``NCCL_HOSTID``: with an id of its
own each rank is a host, and NCCL sends through sockets on the loopback interface. The processes
take turns on the GPU: the code, the collectives and the bits are those of the large job, the speed
is not.
"""

from __future__ import annotations

import os
from collections import Counter

import torch
import torch.distributed as dist

from shardwise.core import comm
from shardwise.core.agreement import all_ranks

SHARED = (
    "%d ranks share one GPU: a rehearsal, with the collectives of the large job over sockets of "
    "this machine. It is slow, and its speed says nothing"
)


def use_gpu() -> torch.device:
    """Make the GPU of this rank the current device; return it. The ranks of a machine with fewer
    GPUs share them."""
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    device = torch.device("cuda", local_rank % max(1, count))
    torch.cuda.set_device(device)
    return device


def ranks_per_gpu(device: torch.device) -> int:
    """The number of ranks on one GPU, of the GPU with most (collective over the hosts). If ranks
    share a GPU, prepare NCCL for that; call this before the first collective on a GPU."""
    # LOCAL_WORLD_SIZE and device_count do not tell: SLURM may show each rank another GPU alone.
    gpus = comm.agree(str(torch.cuda.get_device_properties(device).uuid), all_ranks())
    most = max(Counter(gpus).values())
    if most > 1:
        share_gpu(dist.get_rank())
    return most


def share_gpu(rank: int) -> None:
    """Let NCCL run this rank on a GPU that other ranks of this machine use, too. Call this on every
    rank before NCCL's first collective. Variables that are set already stay as they are."""
    variables = {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_MAX_NCHANNELS": "2",  # each channel takes memory on the GPU, for each rank
    }
    for name, value in variables.items():
        os.environ.setdefault(name, value)
