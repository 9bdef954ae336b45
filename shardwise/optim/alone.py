# SPDX-License-Identifier: Apache-2.0
"""``sw.Muon``: the same optimizer alone, in torch.optim's style.

    sw.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)

On plain parameters it runs where they are. On torch's DTensors (FSDP2, tensor parallelism) the
matrices of all shapes go to their owners and back in one exchange.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from shardwise.agreement import raise_together
from shardwise.optim.muon import MuonSettings, muon
from shardwise.optim.routing import as_matrix, recall_routes
from shardwise.optim.sharded import (
    SAME,
    ShardedOptimizer,
    matrix_defaults,
    matrix_group,
    parameter_problems,
    summary,
)
from shardwise.optim.storage import axes_of

_SETTINGS = {entry.name for entry in fields(MuonSettings)}


class Muon(ShardedOptimizer):
    """Muon on the matrices that it is given: parameters, (name, parameter) pairs, or groups."""

    def __init__(self, params: Iterable[Any], lr: float = 0.02, **settings: Any) -> None:
        """``settings`` are those of :func:`shardwise.muon`; a group may have its own."""
        entries = list(params)
        if not entries:
            raise ValueError("sw.Muon got no parameters")
        given = entries if isinstance(entries[0], dict) else [{"params": entries}]
        names: dict[int, str] = {}
        groups: list[dict[str, Any]] = []
        found: list[tuple[str, Tensor]] = []
        problems: list[str] = []
        for number, group in enumerate(given):
            own = {key: value for key, value in group.items() if key in _SETTINGS}
            unknown = [key for key in group if key not in _SETTINGS and key != "params"]
            if unknown:
                problems.append(f"group {number} has {unknown}, which Muon does not know")
            members = _named(group["params"], number, problems)
            found += members
            names |= {id(parameter): name for name, parameter in members}
            parameters = [parameter for _, parameter in members]
            groups.append(matrix_group(muon(**{"lr": lr} | settings | own), parameters))
        counts: dict[int, int] = {}
        for name, parameter in found:
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
            if counts[id(parameter)] == 2:
                problems.append(f"{name} is given twice")
        recall_routes()
        whole = [(name, p, as_matrix(p, "given to sw.Muon")) for name, p in found]
        problems += parameter_problems(found, whole)
        counted = [group | {"params": len(group["params"])} for group in groups]
        mine = [str(counted), summary([tuple(parameter.shape) for _, parameter in found])]
        axes = axes_of(parameter for _, parameter in found)
        raise_together("sw.Muon cannot work", problems, mine, axes, same=SAME)
        # torch's schedulers look there for momentum.
        super().__init__(groups, names, matrix_defaults(muon(**{"lr": lr} | settings)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices; what it leaves out is as the constructor was told."""
        if param_group.get("kind", "matrix") != "matrix":
            raise ValueError("sw.Muon is for matrices: sw.optimizer has groups of other kinds")
        super().add_param_group(self.defaults | param_group)


def _named(entries: Any, group: int, problems: list[str]) -> list[tuple[str, Tensor]]:
    entries = [entries] if isinstance(entries, Tensor) else list(entries)
    found = []
    for position, entry in enumerate(entries):
        name, parameter = f"parameter {position} of group {group}", entry
        if isinstance(entry, tuple) and len(entry) == 2:
            name, parameter = entry
        if isinstance(parameter, torch.Tensor):
            found.append((name, parameter))
        else:
            problems.append(f"{name} is a {type(parameter).__name__}, not a tensor")
    return found
