# SPDX-License-Identifier: Apache-2.0
"""Experts that are spread over ranks, gathered for a whole state dict."""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.core import comm
from shardwise.moe.grouped_linear import GroupedLinear
from shardwise.moe.layer import mixtures_of


def spread_linears(model: nn.Module) -> dict[str, tuple[GroupedLinear, comm.Axis]]:
    """The linears whose experts are spread over ranks, by name, with the axis of these ranks."""
    axes = {
        linear: mixture.axis
        for mixture in mixtures_of(model)
        for linear in (mixture.experts.fc1, mixture.experts.fc2)
    }
    spread = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, GroupedLinear) and module.is_spread:
            axis = axes.get(module)
            if axis is None:
                raise ValueError(
                    f"'{name}' has {module.num_experts} of {module.total_experts} experts, and "
                    f"the ranks that have the others are not known: spread the experts with "
                    f"MixtureOfExperts.spread(axis), or save with sw.save"
                )
            spread[name] = module, axis
    return spread


def gather_experts(
    name: str, last: str, value: Tensor, linear: GroupedLinear, axis: comm.Axis
) -> dict[str, Tensor]:
    """A tensor of a linear from all ranks: one stack of experts, or one entry for each expert."""
    value = value.detach().contiguous()
    gathered = value.new_empty(axis.size, *value.shape)
    comm.all_gather(gathered.view(-1), value.view(-1), axis).wait()
    if last in linear.layouts:
        return {name: gathered.flatten(0, 1)}
    kind = last.rstrip("0123456789")
    index, stem = int(last[len(kind) :]), name[: len(name) - len(last)]
    return {
        f"{stem}{kind}{rank * linear.num_experts + index}": part
        for rank, part in enumerate(gathered)
    }
