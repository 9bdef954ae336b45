# SPDX-License-Identifier: Apache-2.0
"""``make`` draws the program of a seed: plain steps, and odd things by the table of features."""

from __future__ import annotations

import random
from typing import Any

from tests.fuzz.program import Program, walk

LEAVES = ("linear", "linear", "mlp", "mlp", "norm", "embed", "scale", "lora", "lora", "buffer")
LEAVES += ("empty",)
CHECKPOINTS = ("reentrant", "plain")
GATHERS = (("unshard", True), ("unshard", False), ("reshard",))
# How often a program has each feature, in percent. Pairs and triples of them find most.
FEATURES = {
    # the modules
    "tied": 12, "frozen": 25, "returns": 12, "calls": 20, "by_rank": 6, "peek": 5, "moe": 20,
    "by_attribute": 12, "hooks": 15, "hooked": 10,
    # activation checkpoints, torch.compile
    "checkpoint": 25, "compile": 3,
    # how it is wrapped
    "one_unit": 8, "order": 8, "lists": 10, "partial": 4, "zeros": 8, "memory": 12, "offload": 10,
    "reshard": 40, "data_parallel": 15, "tp": 40, "spread": 50,
    # dtypes and optimizers
    "bf16": 14, "fp8": 12, "muon": 18,
    # backwards
    "micro": 30, "nosync": 25, "late": 15, "second": 20, "grad": 15, "double": 12, "penalty": 14,
    "bomb": 8,
    # gradients
    "clip": 15, "scale": 10, "none": 15, "keep": 15, "accumulate_hook": 12, "forgotten": 8,
    # between steps
    "eval": 30, "freeze": 25, "edit": 15, "roundtrip": 25, "unshard": 12, "alone": 10,
    "settings": 12, "average": 15, "snapshot": 25,
}  # fmt: skip
# What does not go with a feature: dtypes that do not meet, ranks that would wait for each other,
# and what is refused by name, so that nothing after it would be compared.
WITHOUT = {
    "by_rank": "bomb spread compile second double keep partial",
    "zeros": "keep",
    "fp8": "partial moe spread peek double bf16 compile tp penalty",
    "bf16": "partial moe spread tp",
    "tp": "peek compile reshard double spread lists penalty average by_attribute",
    "compile": "peek hooks hooked by_attribute double",
    "partial": "clip bomb",
    "double": "checkpoint moe spread bomb offload",
    "penalty": "unshard accumulate_hook spread",
    "spread": "lists partial offload",
    "lists": "peek",
}


def make(seed: int, ranks: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    much = rng.choice((0.4, 1.0, 1.0, 1.5))
    odd = {name for name, percent in FEATURES.items() if rng.random() < much * percent / 100}
    if ranks != 4:
        odd.discard("tp")
    if "moe" not in odd or ranks == 3:
        odd.discard("spread")
    for name, others in WITHOUT.items():
        if name in odd:
            odd -= set(others.split())
    tree = _tree(rng, odd, depth=rng.choice((1, 2, 2, 3)))
    if not any(spec["kind"] in ("linear", "mlp") for _, spec in walk(tree)):
        tree["parts"].append({"kind": "mlp"})
        tree["calls"][0].append(len(tree["parts"]) - 1)
    program: Program = {
        "seed": seed,
        "ranks": ranks,
        "width": rng.choice((5, 6, 7, 8)),
        "dtype": _dtype(rng, odd),
        "odd": sorted(odd),
        "input_grad": bool(odd & {"grad", "double", "checkpoint"}) or rng.random() < 0.3,
        "tree": tree,
        "wrap": _wrap(rng, odd, tree, ranks),
        "optimizer": rng.choice(("sgd", "adamw", "momentum", "sw_adamw")),
        "tp": "tp" in odd,
        "spread": rng.choice((2, ranks)) if "spread" in odd else 0,
    }
    if "muon" in odd:
        program["optimizer"] = "muon"
    if "fp8" in odd:
        program["width"] = 128 if program["wrap"]["precision"]["weights"] == "fp8_block" else 32
    if program["spread"] or program["tp"]:
        if not program["wrap"]["strategy"].startswith("zero"):
            program["wrap"]["strategy"] = "zero3"
        program["wrap"]["reshard"] = [None]
    if program["wrap"]["unused"] == "zeros":
        program["optimizer"] = "sgd"  # for which zeros and None are the same
    mlps = [path for path, spec in walk(tree) if spec["kind"] in ("mlp", "linear", "seq")]
    paths = rng.sample(mlps, 1) if "compile" in odd else []  # seconds
    if any(spec["kind"] == "buffer" for _, spec in walk(tree)):
        paths = []  # torch's compiler the buffer itself for backward
    program["compile"] = {"paths": paths, "first": rng.random() < 0.5}
    program["ops"] = []
    for number in range(rng.choice((2, 3, 3, 4))):
        _between(rng, odd, program, number)
        _step(rng, odd, program)
    return program


def _dtype(rng: random.Random, odd: set[str]) -> str:
    """float64 where a rounding could choose other experts, or grow in Newton-Schulz."""
    if odd & {"bf16", "fp8"}:
        return "float32"
    return "float64" if odd & {"moe", "muon"} or rng.random() < 0.7 else "float32"


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
        for name in ("tied", "by_attribute", "hooked"):
            if name in odd and rng.random() < 0.5:
                part[name] = True
        if "frozen" in odd and rng.random() < 0.4:
            part["frozen"] = rng.choice(("all", "weights", "rest", "half"))
        if "checkpoint" in odd and rng.random() < 0.4:
            part["checkpoint"] = "plain" if "accumulate_hook" in odd else rng.choice(CHECKPOINTS)
        if "returns" in odd and rng.random() < 0.4:
            part["returns"] = rng.choice(("tuple", "dict", "named"))
        elif "hooks" in odd and rng.random() < 0.4:
            part["hook"] = rng.choice(("forward", "pre", "backward"))
            part.pop("by_attribute", None)
        parts.append(part)
    order = list(range(len(parts)))
    calls = [order]
    if "calls" in odd:
        calls = [rng.choices(order, k=rng.choice((1, 2, 3))) for _ in range(rng.choice((1, 2)))]
    made = {"kind": "seq", "parts": parts, "calls": calls, "residual": rng.random() < 0.2}
    if rng.random() < 0.3:
        made["own"] = rng.choice(("used", "used", "unused"))
    return made | ({"by_rank": True} if "by_rank" in odd and rng.random() < 0.5 else {})


def _wrap(rng: random.Random, odd: set[str], tree: dict[str, Any], ranks: int) -> dict[str, Any]:
    paths = [path for path, _ in walk(tree)][1:]
    chosen = [path for path in reversed(paths) if rng.random() < 0.5 and "one_unit" not in odd]
    # Weights that are tied belong to one unit.
    tied = [path for path, spec in walk(tree) if spec.get("tied") and spec["kind"] == "linear"]
    inside = {
        path: sum(one == path or one.startswith(path + ".") for one in tied) for path in chosen
    }
    chosen = [path for path in chosen if inside[path] in (0, len(tied))]
    units = [[path] for path in sorted(chosen, key=lambda path: -path.count("."))]
    if "order" in odd:  # of siblings: what is wrapped first is inside
        rng.shuffle(units)
        units.sort(key=lambda unit: -unit[0].count("."))
    if "lists" in odd and len(units) > 1:
        units[:2] = [units[0] + units[1]]
    if "partial" not in odd:
        units.append([""])  # else the root is not wrapped
    if "by_rank" in odd:  # ranks may differ inside a unit, and not in which units they run
        units = [[""]]
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
    if "double" in odd:  # else it is refused
        wrap["strategy"] = rng.choice(("zero0", "zero1", "zero2"))
    if "reshard" in odd and wrap["strategy"] == "zero3":
        parts = (2,) if ranks == 4 else ()
        wrap["reshard"] = [rng.choice((None, True, False, ranks, *parts)) for _ in range(3)]
    if "bf16" in odd:
        wrap["precision"] = {"weights": "bf16", "reduce": rng.choice(("fp32", "fp32", "bf16"))}
    if "fp8" in odd:
        formats = ("mxfp8", "fp8_block")
        wrap["precision"] = {"weights": rng.choice(formats), "reduce": "fp32"}
    if wrap["how"] == "data_parallel":
        wrap["units"] = [[""]]
        wrap["strategy"] = rng.choice(("zero0", "zero1", "zero2"))
        wrap["overlap"] = rng.random() < 0.5
    return wrap


def _step(rng: random.Random, odd: set[str], program: Program) -> None:
    """One step of training: forwards, backwards, an update."""
    ops = program["ops"]
    count = rng.choice((2, 3)) if odd & {"micro", "nosync"} else 1
    switches = ("requires_gradient_sync", "is_last_backward", "requires_all_reduce")
    switch = f"set_{rng.choice(switches)}" if "nosync" in odd else None
    late = "late" in odd and rng.random() < 0.5  # all forwards, then all backwards
    forwards = [
        {"op": "forward", "slot": slot, "penalty": "penalty" in odd and rng.random() < 0.5}
        for slot in range(count)
    ]
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
        if "freeze" in odd and "checkpoint" not in odd and rng.random() < 0.2:
            ops.append(_freeze(rng, program, rng.random() < 0.2))
        if "grad" in odd and rng.random() < 0.4:
            ops.append({"op": "grad", "slot": slot})
        if "bomb" in odd and rng.random() < 0.3:
            where = rng.choice(("forward", "backward"))
            after = ("reset", "zero_grad", "nothing") if where == "forward" else ("reset",)
            ops.append({"op": "raise", "where": where, "after": rng.choice(after)})
        again = "second" in odd and rng.random() < 0.6
        double = "double" in odd and rng.random() < 0.7
        ops.append({"op": "backward", "slot": slot, "keep": again, "double": double})
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
    if "keep" in odd and rng.random() < 0.5:
        ops.append({"op": "keep", "what": rng.choice(("gradients", "gradients", "values"))})
    if "unshard" in odd and rng.random() < 0.3:
        ops.append(_unit(program, rng, "unshard", False))
    ops.append({"op": "step"})
    if "forgotten" not in odd or rng.random() < 0.7:  # else the next gradients are added
        ops.append({"op": "zero_grad", "none": "none" not in odd or rng.random() < 0.5})
    if rng.random() < 0.3:
        ops.append({"op": "look"})


def _unit(program: Program, rng: random.Random, name: str, *values: Any) -> dict[str, Any]:
    paths = [path for unit in program["wrap"]["units"] for path in unit]
    return {"op": "unit", "name": name, "path": rng.choice(paths or [""]), "values": list(values)}


def _freeze(rng: random.Random, program: Program, on: bool) -> dict[str, Any]:
    paths = [path for path, _ in walk(program["tree"])]
    return {"op": "freeze", "path": rng.choice(paths), "on": on, "half": rng.random() < 0.3}


def _between(rng: random.Random, odd: set[str], program: Program, number: int) -> None:
    """Ops between two steps."""
    ops = program["ops"]
    units = [path for unit in program["wrap"]["units"] for path in unit] or [""]
    strategies = ("zero0", "zero1", "zero2", "zero3")[: 3 if "double" in odd else 4]
    drawn: dict[str, dict[str, Any]] = {
        "eval": {"op": "eval", "mode": rng.choice(("no_grad", "inference", "eval", "dropped"))},
        "freeze": _freeze(rng, program, bool(number) and rng.random() < 0.5),
        "accumulate_hook": {"op": "hook", "number": rng.randrange(9)},
        "edit": {
            "op": "edit",
            "number": rng.randrange(9),
            "how": rng.choice(("mul", "data", "local")),
        },
        "average": {"op": "average", "back": number > 1 and rng.random() < 0.5},
        "snapshot": {"op": "snapshot", "load": number > 0 and rng.random() < 0.6},
        "roundtrip": {
            "op": "roundtrip",
            "how": rng.choice(("state_dict", "full", "optimizer", "checkpoint", "checkpoint")),
            "strategy": rng.choice(strategies),
        },
        "unshard": _unit(program, rng, *rng.choice(GATHERS)),
        "alone": {"op": "alone", "path": rng.choice(units), "backward": rng.random() < 0.6},
        "settings": _unit(
            program,
            rng,
            f"set_reshard_after_{rng.choice(('forward', 'backward'))}",
            rng.random() < 0.5,
        ),
    }  # fmt: skip
    ops += [op for name, op in drawn.items() if name in odd and rng.random() < 0.6]
