# SPDX-License-Identifier: Apache-2.0
"""The parameters that a ``fully_shard`` call owns: those below its modules that no inner call
owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.layout import ROW, Grain
from shardwise.shard.module import unit_of

GrainChoice = Grain | Callable[[str, nn.Parameter], Grain]


@dataclass(eq=False)
class Found:
    """One parameter and every place it is registered at."""

    name: str
    parameter: nn.Parameter
    places: list[tuple[dict[str, Any], str]]
    modules: list[nn.Module] = field(default_factory=list)  # whose parameter it is

    @property
    def owners(self) -> tuple[type[nn.Module], ...]:
        return tuple(type(module) for module in self.modules)


def outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Drop repetitions, and modules inside another of the list."""
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    unique: list[nn.Module] = []
    for module in modules:
        if id(module) not in inner and all(module is not other for other in unique):
            unique.append(module)
    return unique


def find_parameters(roots: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[Found]:
    """Parameters below ``roots`` that no inner unit owns, in registration order, tied ones once."""
    found: dict[int, Found] = {}
    skipped = {id(parameter) for parameter in ignored}
    seen: set[int] = set()
    several = len(roots) > 1
    waiting = [(root, f"{number}." if several else "") for number, root in enumerate(roots)][::-1]
    while waiting:
        module, path = waiting.pop()
        if id(module) in seen or unit_of(module) is not None:
            continue
        seen.add(id(module))
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in skipped:
                continue
            entry = found.setdefault(id(parameter), Found(f"{path}{name}", parameter, []))
            entry.places.append((module._parameters, name))
            entry.modules.append(module)
        waiting += [(child, f"{path}{name}.") for name, child in module.named_children()][::-1]
    return list(found.values())


def grain_of(found: Found, choice: GrainChoice | None) -> Grain:
    if choice is None or isinstance(choice, Grain):
        return choice or ROW
    return choice(found.name, found.parameter)


def wrap_units(model: nn.Module) -> list[nn.Module]:
    """The modules to wrap, inner before outer: every block of the outermost lists, then the model.

    A block is an entry of a ``ModuleList`` that holds
    parameters; lists inside a block, such as its experts, stay with it.
    """
    blocks: list[nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, nn.ModuleList):
            blocks += [block for block in module if any(True for _ in block.parameters())]
        else:
            waiting += list(module.children())[::-1]
    return [*outermost(blocks), model]
