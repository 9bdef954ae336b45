# SPDX-License-Identifier: Apache-2.0
"""``make`` draws the program of a seed: plain steps, and odd things by the table of features."""

from __future__ import annotations

import random
from typing import Any

from tests.fuzz.program import Program, walk

LEAVES = ("linear", "mlp", "lora") * 2 + ("norm", "embed", "scale", "buffer", "empty")
ROUNDTRIPS = ("state_dict", "full", "optimizer", "checkpoint", "checkpoint")
# Methods of wrapped modules that change no values.
CALLS = (
    ("unshard", False), ("reshard",),
    ("set_reshard_after_forward", True), ("set_reshard_after_forward", False),
    ("set_reshard_after_backward", True), ("set_reshard_after_backward", False),
)  # fmt: skip
# How often a program has each feature, in percent. Pairs and triples of them find most.
FEATURES = {
    # the modules
    "tied": 12, "frozen": 25, "returns": 12, "calls": 20, "moe": 20, "hooks": 15, "checkpoint": 25,
    # how it is wrapped
    "one_unit": 8, "order": 8, "lists": 10, "memory": 12, "offload": 10, "reshard": 40,
    "data_parallel": 15,
    # dtypes and optimizers
    "bf16": 14, "fp8": 12, "muon": 18,
    # backwards and gradients
    "micro": 30, "nosync": 25, "late": 15, "second": 20, "grad": 15, "clip": 15, "scale": 10,
    "none": 15, "forgotten": 8,
    # between steps
    "eval": 30, "freeze": 25, "edit": 15, "roundtrip": 35, "units": 20,
}  # fmt: skip
# What does not go with a feature: dtypes that do not meet.
WITHOUT = {"fp8": ("moe", "bf16"), "bf16": ("moe",)}


def make(seed: int, ranks: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    much = rng.choice((0.4, 1.0, 1.0, 1.5))
    odd = {name for name, percent in FEATURES.items() if rng.random() < much * percent / 100}
    for name, others in WITHOUT.items():
        odd -= set(others) if name in odd else set()
    tree = _tree(rng, odd, depth=rng.choice((1, 2, 2, 3)))
    if not any(spec["kind"] in ("linear", "mlp") for _, spec in walk(tree)):
        tree["parts"].append({"kind": "mlp"})
        tree["calls"][0].append(len(tree["parts"]) - 1)
    # float64 where a rounding could choose other experts, or grow in Newton-Schulz.
    wide = odd & {"moe", "muon"} or rng.random() < 0.7
    program: Program = {
        "ops": [],
        "wrap": _wrap(rng, odd, tree, ranks),
        "tree": tree,
        "optimizer": rng.choice(("sgd", "adamw", "momentum", "sw_adamw")),
        "ranks": ranks,
        "seed": seed,
        "width": 32 if "fp8" in odd else rng.choice((5, 6, 7, 8)),
        "dtype": "float64" if wide and not odd & {"bf16", "fp8"} else "float32",
        "odd": sorted(odd),
        "input_grad": bool(odd & {"grad", "checkpoint"}) or rng.random() < 0.3,
    }
    if "muon" in odd:
        program["optimizer"] = "muon"
    for number in range(rng.choice((2, 3, 3, 4))):
        program["ops"] += _between(rng, odd, program, number)
        program["ops"] += _step(rng, odd, program)
    return program


def _tree(rng: random.Random, odd: set[str], depth: int) -> dict[str, Any]:
    parts = []
    for _ in range(rng.choice((1, 2, 2, 3))):
        if depth > 1 and rng.random() < 0.5:
            part = _tree(rng, odd, depth - 1)
        else:
            part = {"kind": rng.choice(LEAVES), "bias": rng.random() < 0.7}
            part |= {"base_first": rng.random() < 0.5} if part["kind"] == "lora" else {}
            part |= {"kind": "moe"} if "moe" in odd and rng.random() < 0.3 else {}
        if "tied" in odd and rng.random() < 0.5:
            part["tied"] = True
        if "frozen" in odd and rng.random() < 0.4:
            part["frozen"] = rng.choice(("all", "weights", "rest", "half"))
        if "checkpoint" in odd and rng.random() < 0.4:
            # A reentrant one runs a backward of its own: each weight is used inside one only.
            once = not odd & {"calls", "tied", "grad"}
            part["checkpoint"] = rng.choice(("reentrant", "plain")) if once else "plain"
        if "returns" in odd and rng.random() < 0.4:
            part["returns"] = rng.choice(("tuple", "dict"))
        elif "hooks" in odd and rng.random() < 0.4:
            part["hook"] = rng.choice(("forward", "pre", "backward"))
        parts.append(part)
    order = list(range(len(parts)))
    calls = [order]
    if "calls" in odd:
        calls = [rng.choices(order, k=rng.choice((1, 2, 3))) for _ in range(rng.choice((1, 2)))]
    made = {"kind": "seq", "parts": parts, "calls": calls, "residual": rng.random() < 0.2}
    if rng.random() < 0.3:
        made["own"] = rng.choice(("used", "used", "unused"))
    return made


def _wrap(rng: random.Random, odd: set[str], tree: dict[str, Any], ranks: int) -> dict[str, Any]:
    paths = [path for path, _ in walk(tree)][1:]
    chosen = [path for path in reversed(paths) if rng.random() < 0.5 and "one_unit" not in odd]
    # Weights that are tied belong to one unit.
    tied = [path for path, spec in walk(tree) if spec.get("tied") and spec["kind"] == "linear"]
    inside = {
        path: sum(one == path or one.startswith(path + ".") for one in tied) for path in chosen
    }
    units = [[path] for path in chosen if inside[path] in (0, len(tied))]
    if "order" in odd:  # of siblings: what is wrapped first is inside
        rng.shuffle(units)
    units.sort(key=lambda unit: -unit[0].count("."))
    if "lists" in odd and len(units) > 1:
        units[:2] = [units[0] + units[1]]
    wrap: dict[str, Any] = {
        "data_parallel": "data_parallel" in odd,
        "overlap": rng.random() < 0.5,
        "strategy": rng.choice(["zero3"] * 4 + ["zero0", "zero1", "zero2", "hsdp", "hfsdp"]),
        "units": units,
        "memory": "trace" if "memory" in odd else "caching",
        "offload": "offload" in odd,
        "reshard": [],
        "precision": None,
    }
    if "reshard" in odd and wrap["strategy"] == "zero3":
        parts = (2,) if ranks == 4 else ()
        wrap["reshard"] = [rng.choice((None, True, False, ranks, *parts)) for _ in range(3)]
    if "bf16" in odd:
        wrap["precision"] = {"weights": "bf16", "reduce": rng.choice(("fp32", "fp32", "bf16"))}
    if "fp8" in odd:
        wrap["precision"] = {"weights": "mxfp8", "reduce": "fp32"}
    if wrap["data_parallel"]:
        wrap |= {"units": [], "strategy": rng.choice(("zero0", "zero1", "zero2"))}
    return wrap


def _step(rng: random.Random, odd: set[str], program: Program) -> list[dict[str, Any]]:
    """One step of training: forwards, backwards, an update."""
    ops: list[dict[str, Any]] = []
    count = rng.choice((2, 3)) if odd & {"micro", "nosync"} else 1
    switches = ("requires_gradient_sync", "is_last_backward", "requires_all_reduce")
    switch = f"set_{rng.choice(switches)}" if "nosync" in odd else None
    late = "late" in odd and rng.random() < 0.5  # all forwards, then all backwards
    forwards = [{"op": "forward", "slot": slot} for slot in range(count)]
    ops += forwards if late else []
    order = list(range(count))
    if late and rng.random() < 0.5:
        order.reverse()
    for place, slot in enumerate(order):
        if switch:
            ops.append({"op": "switch", "name": switch, "on": place == count - 1})
        if not late:
            ops.append(forwards[slot])
        if "eval" in odd and rng.random() < 0.3:
            ops.append({"op": "eval", "mode": rng.choice(("no_grad", "inference", "dropped"))})
        if "grad" in odd and rng.random() < 0.4:
            ops.append({"op": "grad", "slot": slot})
        again = "second" in odd and rng.random() < 0.6
        ops.append({"op": "backward", "slot": slot, "keep": again})
        if again:
            if rng.random() < 0.3:
                ops.append({"op": "forward", "slot": 9})
            ops.append({"op": "backward", "slot": slot, "keep": rng.random() < 0.1})
        if "forgotten" in odd and place < count - 1 and rng.random() < 0.5:
            ops.append({"op": "zero_grad", "none": True})  # what waits is dropped with it
        if rng.random() < 0.2:
            ops.append({"op": "look"})
    if "scale" in odd:
        ops.append({"op": "scale"})
    if "clip" in odd and rng.random() < 0.8:
        ops.append({"op": "clip"})
    ops.append({"op": "look"})
    if "units" in odd and rng.random() < 0.3:
        ops.append(_unit(rng, program))
    ops.append({"op": "step"})
    if "forgotten" not in odd or rng.random() < 0.7:  # else the next gradients are added
        ops.append({"op": "zero_grad", "none": "none" not in odd or rng.random() < 0.5})
    return [*ops, {"op": "look"}] if rng.random() < 0.3 else ops


def _unit(rng: random.Random, program: Program) -> dict[str, Any]:
    path = rng.choice(["", *(path for unit in program["wrap"]["units"] for path in unit)])
    return {"op": "unit", "path": path, "call": rng.choice(CALLS)}


def _between(
    rng: random.Random, odd: set[str], program: Program, number: int
) -> list[dict[str, Any]]:
    """Ops between two steps."""
    stage = rng.randrange(3 if program["wrap"]["data_parallel"] else 4)
    modes = ("no_grad", "inference", "eval", "dropped")
    path = rng.choice([path for path, _ in walk(program["tree"])])
    on, half = bool(number) and rng.random() < 0.5, rng.random() < 0.3
    edit, way = rng.choice(("mul", "data", "local")), rng.choice(ROUNDTRIPS)
    drawn: dict[str, dict[str, Any]] = {
        "eval": {"op": "eval", "mode": rng.choice(modes)},
        "freeze": {"op": "freeze", "path": path, "on": on, "half": half},
        "edit": {"op": "edit", "number": rng.randrange(9), "how": edit},
        "roundtrip": {"op": "roundtrip", "how": way, "strategy": f"zero{stage}"},
        "units": _unit(rng, program),
    }
    return [op for name, op in drawn.items() if name in odd and rng.random() < 0.6]
