# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own FSDP2 suite, unedited, on gloo ranks without a GPU.

    git clone --filter=blob:none https://github.com/pytorch/pytorch
    python -m tests.torch_suite pytorch/test/distributed/_composable --library shardwise
    python -m tests.torch_suite pytorch/test/distributed/_composable --library torch     and nothing
    python -m tests.interop.fsdp2_page

The tests are not in torch's wheel, so they come from its repository. Each runs in fresh processes,
as many as its class asks for on a machine with ``--devices`` devices; CPU ranks stand for these.
Two things are not asked: the shapes of local shards (whole tensors are compared) and a GPU.
``nothing`` is a ``fully_shard`` that does nothing: a test that it passes says nothing. Outcomes go
to benchmarks/results/torch-suite.json; those of earlier calls stay, so a run may come in parts.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "torch-suite.json"
LIBRARIES = ("torch", "nothing", "shardwise")
FILES = ("state", "clip_grad_norm_", "init", "autograd", "frozen", "ignore_params", "state_dict")
FILES += ("dtensor", "extensions", "mixed_precision", "comm", "2d_composability", "training")
MOST_RANKS = 4
HELD: list[Any] = []
# Compare local tensors of models that are wrapped in two ways: here, whole ones.
WHOLE = ("test_partial_group_forward_grad_accum_chunked",)
WHOLE += ("test_partial_group_forward_then_standalone",)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("sources", type=Path)
    parser.add_argument("--library", choices=LIBRARIES, default="shardwise")
    parser.add_argument("--files", nargs="*", default=FILES)
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a test")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


# ------------------------------------------------------------------------------ a CPU for the tests


class Proxy(types.ModuleType):
    """The name ``torch`` of a test file, with some other values."""

    def __init__(self, real: Any, **other: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(other, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


def prepare(devices: int, library: str, in_two_dimensions: bool) -> tuple[type, Any]:
    """The base class of the tests, and the ``torch`` that they see."""
    import torch
    import torch.distributed as dist
    from torch.distributed import fsdp

    torch.set_num_threads(1)
    torch.cpu.device_count = lambda: devices
    import torch.testing._internal.common_distributed as common
    import torch.testing._internal.common_utils as utils

    def needs(count: int, **_: Any) -> Any:
        def decorate(test: Any) -> Any:
            @functools.wraps(test)
            def run(*args: Any, **kwargs: Any) -> Any:
                if count > max(devices, dist.get_world_size()):
                    raise unittest.SkipTest(f"needs {count} devices")
                return test(*args, **kwargs)

            return test if inspect.isclass(test) else run

        return decorate

    def as_it_is(*args: Any, **kwargs: Any) -> Any:
        return lambda test: test

    common.skip_if_lt_x_gpu = needs
    common.requires_nccl_version = common.requires_accelerator_dist_backend = as_it_is
    import torch.testing._internal.common_fsdp as base

    class Base(utils.TestCase):
        world_size = 2
        rank = property(lambda self: dist.get_rank(), lambda self, value: None)
        process_group = property(lambda self: dist.distributed_c10d._get_default_group())
        device_type = property(lambda self: "cpu")
        device = property(lambda self: torch.device("cpu"))

        def run_subtests(self, *args: Any, **kwargs: Any) -> Any:
            return common.run_subtests(self, *args, **kwargs)  # type: ignore[no-untyped-call]

        # A rank's piece may be empty here where torch's is not.
        def assertGreater(self, a: Any, b: Any, msg: Any = None) -> None:
            if not (a == b == 0 and library == "shardwise"):
                super().assertGreater(a, b, msg)

        def assertNotEqual(self, x: Any, y: Any, *args: Any, **kwargs: Any) -> None:
            if not (isinstance(x, torch.Tensor) and x.numel() == 0):
                super().assertNotEqual(x, y, *args, **kwargs)

        def perThreadSetUp(self) -> None:
            torch._dynamo.reset()

        def perThreadTearDown(self) -> None: ...
        def init_pg(self, *args: Any, **kwargs: Any) -> None: ...
        def destroy_pg(self, *args: Any, **kwargs: Any) -> None: ...

    base.DEVICE_COUNT = devices
    base.FSDPTest = base.FSDPTestMultiThread = base.FSDPTestContinuous = Base
    base.check_sharded_parity = same_whole_tensors
    if in_two_dimensions:
        import torch.testing._internal.distributed._tensor.common_dtensor as common_dtensor

        common_dtensor.DTensorContinuousTestBase = common_dtensor.DTensorTestBase = Base
        common.MultiProcContinuousTest = common.MultiProcessTestCase = Base
    _drop_device_ids(torch.nn.parallel.DistributedDataParallel)
    if library == "shardwise":
        from shardwise.integrations.fsdp2 import in_place_of_torch

        replacing = in_place_of_torch()
        replacing.__enter__()
        HELD.append(replacing)  # to the end of the process: dropped, it would put torch's back
        assert fsdp.fully_shard.__module__.startswith("shardwise.")
    elif library == "nothing":
        from torch.distributed._composable import fsdp as composable
        from torch.distributed.fsdp import _fully_shard

        def nothing(module: Any, *args: Any, **kwargs: Any) -> Any:
            return module

        nothing.state = fsdp.fully_shard.state  # type: ignore[attr-defined]
        fsdp.fully_shard = composable.fully_shard = _fully_shard.fully_shard = nothing
    return Base, _torch_of_tests(torch, devices)


def _torch_of_tests(torch: Any, devices: int) -> Any:
    class Kind(type):
        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, torch.device)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            made = torch.device(*(args[:1] if args[0] == "cpu" else args), **kwargs)
            return torch.device("cpu") if made.type == "cpu" else made

    class Device(metaclass=Kind):
        """torch.device, in which CPU ranks have no index."""

    def vector_norm(x: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.linalg.vector_norm(x, *args, **kwargs) if x.numel() else x.new_zeros(())

    cuda = Proxy(
        torch.cuda,
        device_count=lambda: devices,
        synchronize=lambda *_: None,
        set_device=lambda *_: None,
    )
    linalg = Proxy(torch.linalg, vector_norm=vector_norm)
    return Proxy(torch, device=Device, cuda=cuda, linalg=linalg)


def _drop_device_ids(ddp: Any) -> None:
    begin = ddp.__init__

    def on_the_cpu(self: Any, module: Any, device_ids: Any = None, *_: Any, **more: Any) -> None:
        more.pop("output_device", None)
        begin(self, module, **more)

    ddp.__init__ = functools.wraps(begin)(on_the_cpu)


def same_whole_tensors(
    test: Any, replicated: Any, sharded: Any, prefixes_to_ignore: Any = ()
) -> None:
    from torch.distributed.tensor import DTensor

    def whole(tensor: Any) -> Any:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    pairs = zip(replicated.named_parameters(), sharded.named_parameters(), strict=True)
    for (name, expected), (found, parameter) in pairs:
        for prefix in prefixes_to_ignore:
            found = found.replace(prefix, "")
        test.assertEqual(name, found)
        test.assertIsInstance(parameter, DTensor)
        test.assertEqual(parameter.full_tensor(), whole(expected).detach())
        test.assertEqual(expected.grad is None, parameter.grad is None)
        if expected.grad is not None:
            test.assertEqual(parameter.grad.full_tensor(), whole(expected.grad))


# ------------------------------------------------------------------------------ running


def tests_of(module: Any, base: type) -> Iterator[tuple[Any, str]]:
    for name, kind in sorted(vars(module).items()):
        own = (
            inspect.isclass(kind) and issubclass(kind, base) and kind.__module__ == module.__name__
        )
        for test in sorted(dir(kind)) if own and not name.startswith("_") else ():
            if test.startswith("test_"):
                yield kind, test


def child(rank: int, ranks: int, folder: Path, kind: Any, name: str, library: str) -> None:
    import torch.distributed as dist
    import torch.testing._internal.common_utils as utils

    log = open(folder / f"log{rank}", "w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    code = 1
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
        utils.set_rng_seed()
        if library == "shardwise" and name in WHOLE:
            import shardwise as sw

            sw.ShardedTensor.to_local = sw.ShardedTensor.full_tensor  # type: ignore[method-assign]
        kind.world_size = ranks
        test = kind(name)
        run = getattr(test, name)
        if getattr(kind, "__unittest_skip__", False) or getattr(run, "__unittest_skip__", False):
            raise unittest.SkipTest("by its decorator")
        test.perThreadSetUp()
        if "setUp" in vars(kind):
            kind.setUp(test)
        run()
        code = 0
    except unittest.SkipTest as reason:
        print(reason)
        code = 2
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


OTHERS_FAULT = ("Connection closed", "Connection reset", "Read error")


def outcome(kind: Any, name: str, arguments: argparse.Namespace) -> tuple[str, str]:
    ranks: Any = getattr(kind, "world_size", 2)
    ranks = ranks if isinstance(ranks, int) else ranks.fget(kind.__new__(kind))
    ranks = ranks if ranks <= MOST_RANKS else 2
    with tempfile.TemporaryDirectory() as place:
        codes: dict[int, int | None] = {}
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                child(rank, ranks, Path(place), kind, name, arguments.library)
            codes[pid] = None
        begin, failed = time.monotonic(), None
        while None in codes.values():
            for pid in [pid for pid, code in codes.items() if code is None]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                codes[pid] = os.waitstatus_to_exitcode(status) if ended else None
            now = time.monotonic()
            failed = failed or (now if any(codes.values()) else None)
            if now - begin > arguments.limit or (failed and now - failed > 5):
                for pid in [pid for pid, code in codes.items() if code is None]:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        logs = [(Path(place) / f"log{rank}").read_text() for rank in range(ranks)]
    found = set(codes.values())
    if found == {0}:
        return "passes", ""
    said = [log for log, code in zip(logs, codes.values(), strict=True) if code == 1] or logs
    own = [log for log in said if not any(words in log for words in OTHERS_FAULT)]
    text = (own or said)[0]
    if arguments.verbose:
        print(text[-7000:])
    lines = [line for line in text.splitlines() if "Error" in line or "Exception" in line]
    why = (lines or text.splitlines() or [""])[-1].strip()[:300]
    return ("skipped" if 2 in found and 1 not in found else "fails" if 1 in found else "hangs"), why


def run_file(file: str, arguments: argparse.Namespace) -> None:
    # A package that torch's tests import, for what they do not assert here.
    quiet = dict.fromkeys(("assertExpectedInline", "assertExpected"), lambda *_, **__: None)
    stub: Any = types.ModuleType("expecttest")
    stub.TestCase = type("TestCase", (unittest.TestCase,), quiet)
    sys.modules.setdefault("expecttest", stub)
    base, seen = prepare(arguments.devices, arguments.library, "composability" in file)
    path = next(arguments.sources.rglob(f"test_*{file}.py"))
    path = next((one for one in arguments.sources.rglob(f"test_fully_shard_{file}.py")), path)
    sys.path.insert(0, str(path.parent))
    module: Any = importlib.import_module(path.stem)
    module.torch = seen
    for kind, name in tests_of(module, base):
        key = f"{file}::{kind.__name__}::{name}"
        if any(part in key for part in arguments.only.split(",")):
            found, why = outcome(kind, name, arguments)
            print(f"{found:8} {key}   {why}", flush=True)
            results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            known = results.setdefault(key, {}).get(arguments.library, "")
            if found != "skipped" or not known:  # with fewer devices than another time
                results[key][arguments.library] = found
            RESULTS.write_text(json.dumps(results, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    given = parsed()
    for which in given.files:
        # In a process of its own: the tests change torch, and classes share their base.
        pid = os.fork()
        if pid == 0:
            run_file(which, given)
            sys.stdout.flush()
            os._exit(0)
        _, ended = os.waitpid(pid, 0)
        if ended:
            sys.exit(f"{which}: stopped with status {ended}")
