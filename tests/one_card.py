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
import signal
import subprocess
import sys
import tempfile
import time
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
CONTROL = "nvidia-cuda-mps-control"
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
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if ranks_device() == "cuda" and shutil.which(CONTROL) is not None:
        folder = tempfile.mkdtemp(prefix="mps-")
        os.environ[MPS] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder
        serve_side_by_side()
        atexit.register(serve_side_by_side, on=False)


def serve_side_by_side(on: bool = True) -> None:
    """Let kernels of this process's ranks run at the same time, by a new service of NVIDIA's
    Multi-Process Service. Ranks that wait for each other then need no time slices, and tests take a
    fifth of the time. A rank that dies inside of a kernel takes its service with it: each process
    of tests has its own, and a new one after a failure."""
    if MPS not in os.environ:
        return
    folder = Path(os.environ[MPS])
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES=os.environ[GPU])
    for file in folder.glob("*.pid"):
        process = Path("/proc", file.read_text().strip())
        quit_service = partial(subprocess.run, [CONTROL], input="quit -t 1\n", text=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            quit_service(env=environment, timeout=10, capture_output=True)
        deadline = time.monotonic() + 10
        while process.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process.name), signal.SIGKILL)
    if on:
        shutil.rmtree(folder)
        folder.mkdir()
        subprocess.run([CONTROL, "-d"], env=environment, check=False)


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
