# SPDX-License-Identifier: Apache-2.0
"""More ranks than GPUs: which GPU a rank takes, and what NCCL is told."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.core import mesh, rehearsal
from shardwise.train import launch
from tests.ranks import run_ranks
from tests.train_runs import free_port


def nccl_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


def take_a_gpu(
    rank: int, world_size: int, gpus: list[str] | None, given: dict[str, str]
) -> tuple[int, int, dict[str, str]]:
    """(number of this rank's GPU, ranks on one GPU, variables of NCCL). ``gpus``: those that every
    rank sees; None: every rank sees one GPU, each another."""
    seen = [f"gpu {rank}"] if gpus is None else gpus
    current: list[torch.device] = []
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"LOCAL_RANK": str(rank), **given}))
        for name, function in {
            "device_count": lambda: len(seen),
            "set_device": current.append,
            "get_device_properties": lambda device: SimpleNamespace(uuid=seen[device.index]),
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        device = rehearsal.use_gpu()
        assert current == [device] and device.index is not None
        count = rehearsal.ranks_per_gpu(device)
        return device.index, count, nccl_variables()


def test_ranks_share_gpus_and_each_is_a_host_to_nccl() -> None:
    found = run_ranks(take_a_gpu, 4, ["a", "b"], {})
    assert [(number, count) for number, count, _ in found] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    hosts = [variables.pop("NCCL_HOSTID") for *_, variables in found]
    assert len(set(hosts)) == 4
    sockets = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
    sockets |= {"NCCL_MAX_NCHANNELS": "2"}
    assert [variables for *_, variables in found] == [sockets] * 4


def test_what_the_user_has_set_stays() -> None:
    given = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_MAX_NCHANNELS": "8"}
    for _, _, variables in run_ranks(take_a_gpu, 2, ["a"], given):
        assert variables.items() >= given.items() and "NCCL_HOSTID" in variables


@pytest.mark.parametrize("gpus", [["a", "b"], None], ids=["all seen", "one seen"])
def test_nothing_is_set_where_every_rank_has_a_gpu(gpus: list[str] | None) -> None:
    found = run_ranks(take_a_gpu, 2, gpus, {})
    assert found == [(rank if gpus else 0, 1, {}) for rank in range(2)]


def joined_by_the_trainer() -> None:
    joined = launch.join(30.0)
    assert (joined.device, joined.ranks_per_gpu) == (torch.device("cuda", 0), 4)


def joined_by_a_script() -> None:
    sw.init_mesh()


@pytest.mark.parametrize("join", [joined_by_the_trainer, joined_by_a_script])
def test_rank_3_of_a_machine_with_one_gpu_joins(
    join: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """NCCL is prepared before its first collective; a script hears of it in one line."""
    values = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (values | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_NET"):
        monkeypatch.setenv(name, "taken back")
        monkeypatch.delenv(name)
    chosen: list[Any] = []
    alike = SimpleNamespace(uuid="a")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: alike)
    monkeypatch.setattr(rehearsal.comm, "agree", lambda value, axis: [value] * 4)
    real, asked = dist.init_process_group, []

    def with_gloo(backend: str, **options: Any) -> None:
        asked.append(backend)
        real("gloo", **options)

    monkeypatch.setattr(dist, "init_process_group", with_gloo)
    monkeypatch.setattr(mesh, "init_device_mesh", lambda *args, **options: None)
    try:
        with caplog.at_level(logging.WARNING):
            join()
    finally:
        dist.destroy_process_group()
    assert asked == ["cpu:gloo,cuda:nccl"] and chosen == [torch.device("cuda", 0)]
    assert os.environ["NCCL_HOSTID"] == "rank0" and os.environ["NCCL_NET"] == "Socket"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (join is joined_by_a_script), said  # the trainer says it in its own output
    assert all("4 ranks share one GPU" in line for line in said)
