# SPDX-License-Identifier: Apache-2.0
"""Meshes: the ranks of a job as named axes, outer to inner: ``dp_outer``, ``dp``, ``ep``,
``tp``."""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("dp_outer", "dp", "ep", "tp")
DATA_AXES = ("dp_outer", "dp")


def init_mesh(
    *,
    dp: int | None = None,
    dp_outer: int = 1,
    ep: int = 1,
    tp: int = 1,
    device_type: str | None = None,
) -> DeviceMesh:
    """A mesh over all ranks; ``dp`` fills up what the other axes leave.

    Joins the process group that ``torchrun`` prepared if none is up, and makes a group of one where
    there is no launcher. Axes of size one are left out, except ``dp``.
    """
    _check_positive(dp=dp, dp_outer=dp_outer, ep=ep, tp=tp)
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        _join_process_group(device_type)
    world = dist.get_world_size()
    others = dp_outer * ep * tp
    if dp is None:
        dp = max(1, world // others)
    sizes = {"dp_outer": dp_outer, "dp": dp, "ep": ep, "tp": tp}
    if math.prod(sizes.values()) != world:
        shape = " x ".join(f"{name}={size}" for name, size in sizes.items() if size != 1)
        raise ValueError(
            f"a mesh of {shape or 'dp=1'} has {math.prod(sizes.values())} ranks, but the job has "
            f"{world}: change the sizes, or start {math.prod(sizes.values())} processes"
        )
    names = tuple(name for name in AXES if sizes[name] > 1 or name == "dp")
    return init_device_mesh(device_type, tuple(sizes[name] for name in names), mesh_dim_names=names)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The data-parallel axes of a mesh; a mesh that names no ``dp`` axis is data-parallel as a
    whole."""
    names = mesh.mesh_dim_names
    if names is None or "dp" not in names or set(names) <= set(DATA_AXES):
        return mesh
    return mesh[tuple(name for name in names if name in DATA_AXES)]


def default_mesh() -> DeviceMesh:
    """All ranks on one axis."""
    return init_mesh()


def _check_positive(**sizes: int | None) -> None:
    wrong = [f"{name}={size!r}" for name, size in sizes.items() if size is not None and size < 1]
    if wrong:
        raise ValueError(f"init_mesh({', '.join(wrong)}): the size of an axis is 1 or more")


def _join_process_group(device_type: str) -> None:
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
