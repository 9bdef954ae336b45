# SPDX-License-Identifier: Apache-2.0
"""Found: the parameters below modules that no inner unit owns, each with all its places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shardwise.core.tensor import ShardedTensor
from shardwise.moe.grouped_linear import GroupedLinear
from shardwise.shard.module import unit_of
from shardwise.shard.parameter import carry_attributes


@dataclass(eq=False)
class Found:
    """One parameter and every place where it is registered."""

    name: str
    parameter: nn.Parameter
    places: list[tuple[dict[str, Any], str]]
    modules: list[nn.Module] = field(default_factory=list)  # the modules that register it

    @cached_property
    def local(self) -> Tensor:
        """The tensor to lay out: the parameter itself, or this rank's tile of a DTensor, with the
        attributes of the parameter."""
        if not isinstance(self.parameter, DTensor) or isinstance(self.parameter, ShardedTensor):
            return self.parameter
        tile = self.parameter._local_tensor.detach()
        tile.requires_grad_(self.parameter.requires_grad)
        carry_attributes(self.parameter, tile)
        return tile

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that is laid out."""
        return tuple(self.local.shape)

    @cached_property
    def uneven(self) -> bool:
        """Whether ranks of tensor parallelism hold tiles of different shapes."""
        parameter = self.parameter
        if not isinstance(parameter, DTensor):
            return False
        parts: dict[int, int] = {}  # by dimension: the number of parts that it is cut into
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            if isinstance(placement, Shard):
                parts[placement.dim] = parts.get(placement.dim, 1) * size
        return any(parameter.shape[dim] % number for dim, number in parts.items())


def outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """``modules`` without repetitions, and without modules that are inside others of the list."""
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return [module for module in dict.fromkeys(modules) if id(module) not in inner]


def modules_below(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """(path with a dot at its end, module) below ``roots``, without wrapped modules and what is
    inside of them."""
    seen: set[nn.Module] = set()
    several = len(roots) > 1
    named = [(f"{number}." if several else "", root) for number, root in enumerate(roots)]
    waiting = [(path, root, True) for path, root in reversed(named)]
    while waiting:
        path, module, is_root = waiting.pop()
        if module in seen or (unit_of(module) is not None and not is_root):
            continue
        seen.add(module)
        yield path, module
        children = [(f"{path}{name}.", child, False) for name, child in module.named_children()]
        waiting += reversed(children)


def find_parameters(roots: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[Found]:
    """Parameters below ``roots`` that no inner unit owns, in the order of registration. A tied
    parameter is listed once."""
    found: dict[int, Found] = {}
    left = {id(parameter) for parameter in ignored}
    for path, module in modules_below(roots):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in left:
                entry = found.setdefault(id(parameter), Found(f"{path}{name}", parameter, []))
                entry.places.append((module._parameters, name))
                entry.modules.append(module)
    return list(found.values())


def spread_linear(found: Found) -> GroupedLinear | None:
    """The linear that a parameter of spread experts belongs to; None for other parameters."""
    for module in found.modules:
        if isinstance(module, GroupedLinear) and module.is_spread:
            return module
    return None


def experts_text(found: Found) -> str:
    """The numbers of the experts in a parameter of spread experts, in words; "" for others."""
    linear = spread_linear(found)
    if linear is None:
        return ""
    first, last = linear.first_expert, linear.first_expert + linear.num_experts - 1
    return f"experts {first} to {last} of {linear.total_experts}"
