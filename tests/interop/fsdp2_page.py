# SPDX-License-Identifier: Apache-2.0
"""docs/fsdp2_contract.md, drawn from two files of outcomes (their commands are on the page):

python -m tests.interop.fsdp2_page
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "fsdp2_contract.md"
CONTRACT = ROOT / "benchmarks" / "results" / "fsdp2-contract.json"
SUITE = ROOT / "benchmarks" / "results" / "torch-suite.json"

# ------------------------------------------------------------------------------ cases

POINTS = {
    "1": "tensor parallelism: DTensors first, then sharded",
    "2": "Muon under tensor parallelism",
    "3": "parameters that got no gradient",
    "4": "whole parameters after forward",
    "4b": "lists of modules",
    "5": "a start on the meta device, loading",
    "6": "optimizer states",
    "7": "torch.optim, autograd.grad",
    "8": "knobs",
    "9": "torch.compile",
    "10": "pipelines, DDP, averages, pickling",
    "11": "frameworks",
    "habit": "what people do to parameters",
}


def point(row: str) -> str:
    return re.split(r"[ :]", row)[0]


def contract_summary() -> str:
    rows = json.loads(CONTRACT.read_text())
    lines = ["| | cases | torch FSDP2 | shardwise |", "|---|---|---|---|"]
    for key, title in {**POINTS, "": "all"}.items():
        found = [pair for row, pair in rows.items() if not key or point(row) == key]
        theirs, ours = zip(*found, strict=True)
        lines.append(f"| {title} | {len(found)} | {held(theirs)} | {held(ours)} |")
    return "\n".join(lines)


def held(outcomes: tuple[str, ...]) -> str:
    count = Counter("fails" if "fails" in one else one for one in outcomes)
    works = count["works"] + count["the same losses"]
    alone = f", {count['not run']} not run" if count["not run"] else ""
    return f"{works} work" + (f", {count['fails']} fail" if count["fails"] else "") + alone


def contract_rows() -> str:
    rows = json.loads(CONTRACT.read_text())
    lines = ["| case | torch FSDP2 | shardwise |", "|---|---|---|"]
    order = list(POINTS)
    for row in sorted(rows, key=lambda row: (order.index(point(row)), row)):
        theirs, ours = (text.replace("|", "\\|") for text in rows[row][:2])
        lines.append(f"| {row.removeprefix('11 ')} | {theirs} | {ours} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------ torch's suite

# Why a test that torch passes does not pass here, by a part of its name.
REASONS: dict[str, tuple[str, ...]] = {
    "looks into torch's own objects, or counts their calls and collectives": (
        "LazyInit",
        "ManagedModules",
        "Prefetch::",
        "Frozen",
        "communication_count",
        "manual_reshard_with",
        "set_reshard_after_forward",
        "size1_reduceop",
        "buffers_resolves_to_max",
        "reshard_toggle",
        "modules_to_run_forward_empty",
        "share_comm_context",
    ),
    "asserts where torch cuts: dimensions, placements, meshes without names": (
        "shard_largest_dim",
        "shard_diff_dim",
        "test_shard_dtensor_parameters",
        "test_shard_tensor_parameters",
        "dtensor_sharded_params",
    ),
    "the same error in other words": (
        "State::test_fully_shard_deepcopy",
        "reapply",
        "invalid_mesh_ndim",
        "invalid_meta_device_init",
        "invalid_shard_dim",
        "separate_fsdp_groups_error",
    ),
    "expects an error; works here": (
        "without_mesh_dim_names",
        "uneven_shard_largest_dim",
        "raise_noncontiguous",
        "raise_scalar",
        "validation_mesh_mismatch",
        "validation_reshard_after_forward_int_spmd",
        "validation_spmd_mesh_non_dtensor",
    ),
    "refused here, by name and with the way to go: extensions of gathers, hooks on the all-reduce, "
    "NCCL's allocator, torch.func, parameters that were replaced after wrapping": (
        "reset_sharded_param_in_lazy_init",
        "AllGatherExtension",
        "CustomHook",
        "comm_hooks",
        "MixedPrecisionJVP",
    ),
    "rounding: one element of 1024 is off by 1.09e-5, where 1e-5 is allowed": (
        "test_compute_dtype",
    ),
}


def reason(test: str) -> str | None:
    found = [why for why, parts in REASONS.items() if any(part in test for part in parts)]
    return found[-1] if found else None  # the last: "uneven_shard_largest_dim" is no "largest_dim"


def suite() -> str:
    results: dict[str, dict[str, str]] = json.loads(SUITE.read_text())
    passes = {test: found for test, found in results.items() if found.get("torch") == "passes"}
    telling = {test: found for test, found in passes.items() if found.get("nothing") == "fails"}
    passed = sum(found["shardwise"] == "passes" for found in telling.values())
    left = [test for test, found in passes.items() if found["shardwise"] != "passes"]
    beside = len(left) - (len(telling) - passed)
    lines = [
        f"Of {len(results)} tests torch passes {len(passes)} on 2 CPU ranks (those that ask for 4 "
        f"devices: on 4); most of the other {len(results) - len(passes)} need CUDA, NCCL or more "
        f"ranks. A `fully_shard` that does nothing fails {len(telling)} of the {len(passes)}; "
        f"shardwise passes **{passed} of the {len(telling)}**. All that it does not pass, with "
        f"{beside} more that doing nothing passes:",
        "",
        "| why | tests | which |",
        "|---|---|---|",
    ]
    for why in REASONS:
        tests = [test.rpartition("::test_")[2] for test in left if reason(test) == why]
        lines.append(f"| {why} | {len(tests)} | {', '.join(f'`{one}`' for one in tests)} |")
    return "\n".join(lines)


def unexplained() -> list[str]:
    """Tests that torch passes, that fail here, and that no reason explains."""
    results: dict[str, dict[str, str]] = json.loads(SUITE.read_text())
    return [
        test
        for test, found in results.items()
        if found.get("torch") == "passes" != found.get("shardwise") and reason(test) is None
    ]


PARTS = {"summary": contract_summary, "suite": suite, "cases": contract_rows}
PLACE = re.compile(r"(<!-- drawn: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def drawn() -> str:
    return PLACE.sub(lambda place: f"{place[1]}{PARTS[place[2]]()}\n{place[3]}", PAGE.read_text())


def write() -> None:
    PAGE.write_text(drawn())


if __name__ == "__main__":
    write()
