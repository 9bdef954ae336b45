# SPDX-License-Identifier: Apache-2.0
"""The event that begins a run: its plan, and what other strategies would have cost."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import nn

from shardwise.placements import STRATEGIES, Placements
from shardwise.report.plan import plan
from shardwise.report.plan_pictures import bars_of
from shardwise.report.planned import as_placements, strategy_name


def plan_event(
    model: nn.Module,
    mesh_shape: Mapping[str, int],
    placements: Placements | str,
    **options: Any,
) -> dict[str, Any]:
    """The plan of a run and the bars of every strategy on the same ranks, for the events file.

    ``model`` is built under ``torch.device("meta")`` and not wrapped; ``options`` are those of
    :func:`~shardwise.report.plan.plan`; a ``batch`` among them is followed for the plan alone, the
    bars are without activations. Write it as ``{"kind": "plan", **plan_event(...)}``.
    """
    chosen = plan(model, mesh_shape, placements, **options)
    options.pop("batch", None)
    own = strategy_name(as_placements(placements))
    tp = mesh_shape.get("tp", 1)
    flat = {"dp": prod(mesh_shape.values()) // tp, "tp": tp}
    bars = {}
    for name, strategy in STRATEGIES.items():
        if name == own:
            bars[name] = bars_of(chosen)
        elif strategy.num_axes == len(mesh_shape.keys() - {"tp"}):
            bars[name] = bars_of(plan(model, mesh_shape, strategy, **options))
        elif strategy.num_axes == 1:
            bars[name] = bars_of(plan(model, flat, strategy, **options))
    bars.setdefault(own, bars_of(chosen))
    return {"plan": chosen.as_dict(), "strategies": bars}
