# SPDX-License-Identifier: Apache-2.0
"""``make`` draws the program of a seed: plain steps, and a few odd things at a time."""

from __future__ import annotations

import random
from typing import Any

from tests.fuzz.program import Program, walk

LEAVES = ("linear", "linear", "mlp", "mlp", "norm", "embed", "scale", "lora", "buffer", "empty")
# What a program may have beside plain steps; each draws a few.
ODD = """
tied frozen checkpoint returns calls by_rank bomb peek moe micro nosync second grad clip scale eval
freeze edit roundtrip unshard alone none late settings order lists partial zeros memory offload
reshard data_parallel bf16 fp8 muon one_unit tp compile
""".split()  # noqa: SIM905


def make(seed: int, ranks: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    odd = set(rng.sample(ODD, rng.choice((1, 2, 3, 4, 6, 8))))
    narrow = bool(odd & {"bf16", "muon", "moe", "fp8"})
    if "by_rank" in odd:  # a rank that raises alone is on its own
        odd.discard("bomb")
    if odd & {"bf16", "fp8"}:  # dtypes that do not meet
        odd -= {"partial", "moe"} if "bf16" in odd else {"partial"}
    if odd & {"tp", "compile"}:
        odd.discard("peek")
    if "fp8" in odd and ranks > 2:  # roundings choose other experts
        odd.discard("moe")
    tree = _tree(rng, odd, depth=rng.choice((1, 2, 2, 3)))
    if not any(spec["kind"] in ("linear", "mlp") for _, spec in walk(tree)):
        tree["parts"].append({"kind": "mlp"})
        tree["calls"][0].append(len(tree["parts"]) - 1)
    program: Program = {
        "seed": seed,
        "ranks": ranks,
        "width": 32 if "fp8" in odd else rng.choice((5, 6, 7, 8)),
        "dtype": "float32" if narrow or rng.random() < 0.2 else "float64",
        "odd": sorted(odd),
        "input_grad": bool(odd & {"grad", "checkpoint"}) or rng.random() < 0.3,
        "tree": tree,
        "wrap": _wrap(rng, odd, tree, ranks),
        "optimizer": "muon"
        if "muon" in odd
        else rng.choice(("sgd", "adamw", "momentum", "sw_adamw")),
    }
    mlps = [path for path, spec in walk(tree) if spec["kind"] in ("mlp", "linear", "seq")]
    paths = rng.sample(mlps, 1) if "compile" in odd and rng.random() < 0.4 else []  # seconds
    if any(spec["kind"] == "buffer" for _, spec in walk(tree)):
        paths = []  # torch's compiler keeps the buffer itself for backward
    program["compile"] = {"paths": paths, "first": rng.random() < 0.5}
    program["tp"] = "tp" in odd and ranks == 4 and program["wrap"]["strategy"].startswith("zero")
    if program["tp"]:
        program["wrap"] |= {"precision": None, "reshard": [None]}
    if program["wrap"]["unused"] == "zeros":
        program["optimizer"] = "sgd"  # for which zeros and None are the same
    paths = [path for path, _ in walk(tree)]
    ops: list[dict[str, Any]] = []
    for _ in range(rng.choice((2, 3, 3, 4))):
        _between(rng, odd, ops, paths)
        _step(rng, odd, ops, paths)
    program["ops"] = ops
    return program


def _tree(rng: random.Random, odd: set[str], depth: int) -> dict[str, Any]:
    parts = []
    for _ in range(rng.choice((1, 2, 2, 3))):
        if depth > 1 and rng.random() < 0.5:
            part = _tree(rng, odd, depth - 1)
        else:
            part = {"kind": rng.choice(LEAVES), "bias": rng.random() < 0.7}
            part |= {"base_first": rng.random() < 0.5} if part["kind"] == "lora" else {}
        for kind in ("bomb", "peek", "moe"):
            if kind in odd and rng.random() < 0.3:
                part = {"kind": kind, "parts": [part] if kind == "peek" else []}
                part |= {"calls_too": rng.random() < 0.7} if kind == "peek" else {}
        if "tied" in odd and rng.random() < 0.6:
            part["tied"] = True
        if "frozen" in odd and rng.random() < 0.4:
            part["frozen"] = rng.choice(("all", "weights", "rest", "half"))
        if "checkpoint" in odd and rng.random() < 0.4:
            part["checkpoint"] = rng.choice(("reentrant", "plain"))
        if "returns" in odd and rng.random() < 0.4:
            part["returns"] = rng.choice(("tuple", "dict", "named"))
        parts.append(part)
    order = list(range(len(parts)))
    calls = [order]
    if "calls" in odd:
        calls = [rng.choices(order, k=rng.choice((1, 2, 3))) for _ in range(rng.choice((1, 2)))]
    made = {"kind": "seq", "parts": parts, "calls": calls, "residual": rng.random() < 0.4}
    if rng.random() < 0.3:
        made["own"] = rng.choice(("used", "used", "unused"))
    return made | ({"by_rank": True} if "by_rank" in odd and rng.random() < 0.5 else {})


def _wrap(rng: random.Random, odd: set[str], tree: dict[str, Any], ranks: int) -> dict[str, Any]:
    paths = [path for path, _ in walk(tree)][1:]
    chosen = [path for path in reversed(paths) if rng.random() < 0.5 and "one_unit" not in odd]
    units = [[path] for path in sorted(chosen, key=lambda path: -path.count("."))]
    if "order" in odd:
        rng.shuffle(units)
    if "lists" in odd and len(units) > 1:
        units[:2] = [units[0] + units[1]]
    if "partial" not in odd:
        units.append([""])  # else the root is not wrapped
    strategies = ["zero3"] * 4 + ["zero0", "zero1", "zero2", "hsdp", "hfsdp"]
    wrap: dict[str, Any] = {
        "how": "data_parallel" if "data_parallel" in odd else "fully_shard",
        "strategy": rng.choice(strategies),
        "units": units,
        "unused": "zeros" if odd & {"zeros", "by_rank"} else "none",
        "memory": "trace" if "memory" in odd else "caching",
        "offload": "offload" in odd,
        "reshard": [None],
        "precision": None,
    }
    if "reshard" in odd and wrap["strategy"] == "zero3":
        parts = (2,) if ranks == 4 else ()
        wrap["reshard"] = [rng.choice((None, True, False, ranks, *parts)) for _ in range(3)]
    if "bf16" in odd:
        wrap["precision"] = {"weights": "bf16", "reduce": rng.choice(("fp32", "bf16"))}
    if "fp8" in odd:
        wrap["precision"] = {"weights": rng.choice(("mxfp8", "mxfp8_2d", "mxfp8_rowcol"))}
        wrap["precision"] |= {"reduce": "fp32"} if "moe" in odd or rng.random() < 0.8 else {}
    if wrap["how"] == "data_parallel":
        wrap["units"] = [[""]]
        wrap["strategy"] = rng.choice(("zero0", "zero1", "zero2"))
        wrap["overlap"] = rng.choice((False, True, "step"))
    return wrap


def _step(rng: random.Random, odd: set[str], ops: list[dict[str, Any]], paths: list[str]) -> None:
    """One step of training: forwards, backwards, an update."""
    count = rng.choice((2, 3)) if odd & {"micro", "nosync"} else 1
    switches = ("requires_gradient_sync", "is_last_backward", "requires_all_reduce")
    switch = f"set_{rng.choice(switches)}" if "nosync" in odd else None
    late = "late" in odd and rng.random() < 0.5  # all forwards, then all backwards
    if late:
        ops += [{"op": "forward", "slot": slot} for slot in range(count)]
    order = list(range(count))
    if late and rng.random() < 0.5:
        order.reverse()
    for place, slot in enumerate(order):
        if switch:
            ops.append({"op": "switch", "name": switch, "on": place == count - 1})
        if not late:
            ops.append({"op": "forward", "slot": slot})
        if "eval" in odd and rng.random() < 0.3:
            ops.append({"op": "eval", "mode": rng.choice(("no_grad", "inference", "dropped"))})
        if "grad" in odd and rng.random() < 0.4:
            ops.append({"op": "grad", "slot": slot, "of": rng.choice(("x", "x", "parameters"))})
        if "bomb" in odd and rng.random() < 0.3:
            ops.append(
                {
                    "op": "raise",
                    "where": rng.choice(("forward", "backward")),
                    "after": rng.choice(("reset", "zero_grad", "nothing")),
                }
            )
        again = "second" in odd and rng.random() < 0.6
        ops.append({"op": "backward", "slot": slot, "keep": again})
        if again:
            if rng.random() < 0.3:
                ops.append({"op": "forward", "slot": 9})
            ops.append({"op": "backward", "slot": slot, "keep": rng.random() < 0.1})
        if rng.random() < 0.2:
            ops.append({"op": "look"})
    if "scale" in odd:
        ops.append({"op": "scale"})
    if "clip" in odd:
        ops.append({"op": "clip"})
    ops.append({"op": "look"})
    ops.append({"op": "step"})
    ops.append({"op": "zero_grad", "none": "none" not in odd or rng.random() < 0.5})
    if rng.random() < 0.3:
        ops.append({"op": "look"})


def _between(
    rng: random.Random, odd: set[str], ops: list[dict[str, Any]], paths: list[str]
) -> None:
    path = rng.choice(paths)
    drawn = {
        "eval": {"op": "eval", "mode": rng.choice(("no_grad", "inference", "eval", "dropped"))},
        "freeze": {"op": "freeze", "path": path, "on": rng.random() < 0.5},
        "edit": {
            "op": "edit",
            "number": rng.randrange(9),
            "how": rng.choice(("mul", "data", "local")),
        },
        "roundtrip": {
            "op": "roundtrip",
            "how": rng.choice(("state_dict", "full", "optimizer", "checkpoint", "checkpoint")),
            "strategy": rng.choice(("zero0", "zero1", "zero2", "zero3")),
        },
        "unshard": rng.choice(
            (
                {"op": "unit", "name": "unshard", "path": path, "values": [rng.random() < 0.4]},
                {"op": "unit", "name": "reshard", "path": path, "values": []},
            )
        ),
        "alone": {"op": "alone", "path": path, "backward": rng.random() < 0.6},
        "settings": {
            "op": "unit",
            "name": f"set_reshard_after_{rng.choice(('forward', 'backward'))}",
            "path": path,
            "values": [rng.random() < 0.5],
        },
    }
    ops += [op for name, op in drawn.items() if name in odd and rng.random() < 0.6]
