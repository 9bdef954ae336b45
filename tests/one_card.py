# SPDX-License-Identifier: Apache-2.0
"""The tests' ranks on one GPU: ``pytest --device cuda``.

The processes share the GPU by time slices and send through sockets (``core/rehearsal.py``): this
shows what is right, never what is fast.

    pytest process   sees no GPU: what runs no ranks is a test of the CPU
      rank 0         NCCL, cuda:0
      rank 1         NCCL, cuda:0

What a test makes without naming a device lies on the GPU, as under ``torch.set_default_device``,
and so do the modules of the library's models. The rest of the library gets no such help.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from shardwise.core.rehearsal import share_gpu

DEVICE = "SHARDWISE_TEST_DEVICE"  # of the ranks of this session: cpu or cuda
GPU = "SHARDWISE_TEST_GPU"  # what CUDA_VISIBLE_DEVICES was before the session hid the GPU
MPS = "CUDA_MPS_PIPE_DIRECTORY"
UNTRACED = "torch.compile would trace what puts a test's tensors on the GPU"
MODELS = ("shardwise.models", "shardwise.moe")
_here = "cpu"


def ranks_device() -> str:
    """The type of device that ranks of this session have, unless a test asks for a backend."""
    return os.environ.get(DEVICE, "cpu")


def device_type() -> str:
    """The type of this process's device: "cuda" in an NCCL rank, else "cpu"."""
    return _here


def use_device(name: str) -> None:
    """Give all ranks of this session, of this process and its workers, a device."""
    if name == "cuda" and ranks_device() == "cpu":
        os.environ[DEVICE] = name
        os.environ[GPU] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
        _serve_side_by_side()
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _serve_side_by_side() -> None:
    """Let kernels of several processes run at the same time until this process ends, if NVIDIA's
    Multi-Process Service is installed. Ranks that wait for each other then need no time slices, and
    tests take a fifth of the time."""
    if (control := shutil.which("nvidia-cuda-mps-control")) is None:
        return
    folder = tempfile.mkdtemp(prefix="mps-")
    os.environ[MPS] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder
    if subprocess.run([control, "-d"], check=False).returncode == 0:
        stop = partial(subprocess.run, [control], input="quit\n", text=True, check=False)
        atexit.register(stop, env=dict(os.environ))
    else:
        del os.environ[MPS]


def ordered_ranks(number: int) -> int:
    """The number of ranks for a test that adds in one order under every strategy. Our messages do,
    on a CPU; NCCL adds three or more terms in another order in each collective."""
    return number if ranks_device() == "cpu" else 2


def join_one_card(rank: int) -> None:
    """Make this process, which has not used CUDA yet, an NCCL rank on the GPU of all ranks."""
    global _here
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[GPU]
    share_gpu(rank)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # a product has the same bits on all streams
    torch.cuda.set_device(0)
    _here = "cuda"


def on_device(name: str) -> contextlib.AbstractContextManager[object]:
    """Make tensors on this device wherever a test names none."""
    return contextlib.nullcontext() if name == "cpu" else _OnDevice(name)


class _OnDevice(TorchFunctionMode):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.makers = name, _device_constructors()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or func not in self.makers or kwargs.get("device"):
            return func(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("shardwise") and not caller.startswith(MODELS):
            return func(*args, **kwargs)
        if (generator := kwargs.get("generator")) is not None:  # the same numbers on every device
            return func(*args, **kwargs | {"device": generator.device}).to(self.name)
        return func(*args, **kwargs | {"device": self.name})


def write_results(
    path: Path, *, passed: int, failed: list[str], left_out: Mapping[str, int]
) -> None:
    """Write what a session showed, and where."""
    versions = {"torch": torch.__version__}
    if ranks_device() == "cuda":
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        versions["card"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    results = {
        "date": date.today().isoformat(),
        "command": " ".join(["pytest", *sys.argv[1:]]),
        "device": ranks_device(),
        **versions,
        "passed": passed,
        "failed": failed,
        "left_out": left_out,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
