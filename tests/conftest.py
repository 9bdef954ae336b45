# SPDX-License-Identifier: Apache-2.0
"""Settings of every test session: no rank may outlive it, and the long files come first."""

from __future__ import annotations

import gc

gc.disable()  # until all files of tests are there: torch alone would be looked at again and again

import atexit
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch.distributed as dist

from shardwise import notices
from tests.one_card import ranks_device, use_device, write_results
from tests.products import keep_one_product
from tests.ranks import counts, shut_down

# Files that take eighteen seconds of CPU or more, the longest first: workers that share the files
# (`make test`) would wait for the last of them.
LONG = (
    "faults/test_nccl_hangs.py",  # on a GPU
    "interop/test_support.py",
    "parity/test_same_bits.py",
    "parity/test_muon.py",
    "parity/test_mxfp8.py",
    "comm/test_plan.py",
    "faults/test_launch.py",
    "interop/test_compile.py",
    "parity/test_tensor_parallel.py",
    "parity/test_tensor_parallel_train.py",
    "resume/test_train.py",
    "faults/test_train.py",
    "faults/test_store_kill.py",
    "races/test_happens_before.py",
    "parity/test_fp8_compiled.py",
    "contract/test_gradients.py",
    "unit/test_interpreter.py",
    "interop/test_fsdp2_contract.py",
    "comm/test_plan_experts.py",
    "unit/test_train_fit.py",
    "resume/test_train_changes.py",
    "contract/test_uses.py",
    "memory/test_bytes.py",
    "parity/test_missing_gradients.py",
    "interop/test_dcp.py",
    "unit/test_plan.py",
    "parity/test_moe_train.py",
    "interop/test_framework_examples.py",
)
# Of these files `make test` runs what one of the patterns finds in the names of tests, `make
# nightly` all. A pattern that finds nothing is an error: a new name would leave the day unseen.
BY_DAY: dict[str, tuple[str, ...]] = {
    "comm/test_plan.py": (
        r"\[1-plain", "2-uneven-zero3", "4-recomputing", "born narrow", "half_the_bytes",
        "2-uneven-zero0", "4-single",
    ),
    "comm/test_plan_experts.py": ("zero1-2", "zero3-4", "hsdp", "every_way"),
    "faults/test_store_kill.py": ("before_any_call", "on_the_disk"),
    "fuzz/test_programs.py": (r"does\[[15]\]", "drawn", "seen", "smaller"),
    "interop/test_accelerate.py": (r"\[blocks\]", "FULL"),
    "interop/test_benchmarks.py": ("^(?!test_muon)",),
    "interop/test_compile.py": ("in place, then wrapped", "every option", "called_twice"),
    "interop/test_examples.py": ("short", "adamuon", "03", "13", "moved"),
    "interop/test_framework_examples.py": ("every_example",),
    "interop/test_lightning.py": ("fabric",),
    "interop/test_lora.py": ("zero3-Muon", "peft"),
    "interop/test_support.py": ("every_pair", "recompute, 2 microbatches"),
    "interop/test_torchtitan.py": ("two_axes",),
    "interop/test_transformers.py": ("trainer", "whole_weights"),
    "parity/test_fp8_compiled.py": ("fp8_block", "metadata"),
    "unit/test_grouped_compile.py": ("wide-stacked", "bf16"),
    "unit/test_kernels_compile.py": ("fused", "128"),
}  # fmt: skip
# Other people's software that tests run where it is installed.
PACKAGES = ("accelerate", "lightning", "peft", "tokenizers", "transformers", "triton")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="of all ranks")
    parser.addoption("--nightly", action="store_true", help="also what `make test` leaves out")
    parser.addoption("--results", type=Path, help="write what passed to this file, as JSON")
    parser.addoption("--failures", type=Path, help="append each failure to this file, as it comes")


def pytest_configure(config: pytest.Config) -> None:
    """Let no thread that wakes up interrupt another, in this process and in all that it starts. A
    thread of gloo would interrupt the one that just sent to it, inside of a lock, and poll until
    that lock is free: a third of all CPU time, where ranks outnumber cores."""
    keep_one_product()
    use_device(config.getoption("device"))
    if (path := config.getoption("failures")) and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Failures(path))
    config.addinivalue_line("markers", "cpu_only(reason): left out by --device cuda")
    # The same examples in every run; `--hypothesis-profile default` looks for others.
    hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("suite")
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit it
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="shardwise-tests-")
        atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
        if config.getoption("numprocesses", None) and config.args == config.getini("testpaths"):
            rewrite_assertions()
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def rewrite_assertions() -> None:
    """Import the tests that pytest has not stored with its assertions yet, those of a fresh clone.
    Workers would do so all at once, 19 s of CPU each; this process is beside mypy (`make test`)."""
    tag = f"{sys.implementation.cache_tag}-pytest-{pytest.__version__}"
    for file in sorted(Path(__file__).parent.glob("*/test_*.py")):
        stored = Path(cache_from_source(str(file))).with_name(f"{file.stem}.{tag}.pyc")
        if not stored.exists() or stored.stat().st_mtime < file.stat().st_mtime:
            with suppress(Exception, pytest.skip.Exception):  # workers say what is wrong
                import_module(f"tests.{file.parent.name}.{file.stem}")


def left_to_the_night(item: pytest.Item) -> bool:
    kept = BY_DAY.get("/".join(item.path.parts[-2:]))
    return kept is not None and not any(re.search(each, item.name) for each in kept)


def check_by_day(items: list[pytest.Item]) -> None:
    """Refuse patterns that find no test in a file that was collected whole."""
    names: dict[str, list[str]] = {}
    for item in items:
        names.setdefault("/".join(item.path.parts[-2:]), []).append(item.name)
    for file, kept in BY_DAY.items():
        if not (Path(__file__).parent / file).exists():
            raise RuntimeError(f"BY_DAY names {file}, which is not there")
        for pattern in kept if file in names else ():
            if not any(re.search(pattern, name) for name in names[file]):
                raise RuntimeError(f"BY_DAY: {pattern!r} finds no test in {file}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in argument for argument in config.args):
        check_by_day(items)
    named = {Path(argument.split("::")[0]).resolve() for argument in config.args}
    night = [item for item in items if left_to_the_night(item) and item.path not in named]
    if night and not config.getoption("nightly"):
        config.hook.pytest_deselected(items=night)
        items[:] = [item for item in items if item not in night]

    def rank(item: pytest.Item) -> int:
        name = item.path.as_posix()
        return next((place for place, end in enumerate(LONG) if name.endswith(end)), len(LONG))

    items.sort(key=rank)  # stable: within a file, and among the others, as they were
    for item in items if ranks_device() == "cuda" else []:
        for mark in item.iter_markers("cpu_only"):
            item.add_marker(pytest.mark.skip(reason=f"CPU alone: {mark.args[0]}"))


def pytest_collection_finish() -> None:
    """Let no collection look at modules and tests again (1.6 to 1.0 of 20 s of plans)."""
    gc.collect()
    gc.freeze()
    gc.enable()


class Failures:
    """Writes each failure at once: a session that is killed has said what it saw."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self.path.open("a") as file:
                file.write(f"===== {report.nodeid}\n{report.longreprtext}\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Leave a test without NCCL ranks out of ``--device cuda``: it has shown nothing new."""
    before = counts["nccl"]
    yield
    if ranks_device() == "cuda" and counts["nccl"] == before:
        pytest.skip("CPU alone: runs no ranks, or gloo's")


@pytest.fixture(autouse=True)
def warnings_come_again() -> None:
    """A test sees the warnings that the one before it has seen."""
    notices._warned.clear()


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Name the test that joins a process group in this process and leaves it behind."""
    before = dist.is_initialized()  # by a fixture of the whole file
    yield
    if dist.is_initialized() and not before:
        dist.destroy_process_group()
        pytest.fail("this test has left its process group to the tests after it")


def pytest_report_header() -> str | None:
    """Name the packages without which tests are skipped."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    return f"skipped without a package: {', '.join(missing)}" if missing else None


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else triton's bindings tell of leaks
    shut_down()  # after Ctrl-C too; the ranks of a session that was killed notice by themselves


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many tests a GPU left out and why, and write the results that were asked for."""
    stats = terminalreporter.stats
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in stats.get("skipped", [])
    )
    if ranks_device() == "cuda":
        for reason, number in reasons.most_common():
            terminalreporter.write_line(f"left out {number:4}  {reason}")
    if (path := config.getoption("results")) and "PYTEST_XDIST_WORKER" not in os.environ:
        failed = [report.nodeid for kind in ("failed", "error") for report in stats.get(kind, [])]
        write_results(path, passed=len(stats.get("passed", [])), failed=failed, left_out=reasons)
