# SPDX-License-Identifier: Apache-2.0
"""What the units of a model are asked together, when its first forward begins; and whether modules
still hold the parameters that they were wrapped with, before every forward."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from shardwise.precision import Precision
from shardwise.precision.mxfp8_choice import Stored, stores_nothing

logger = logging.getLogger(__name__)


class Starting(Protocol):
    """A unit, as far as this is concerned."""

    precision: Precision
    stored: dict[tuple[int, int], Stored]
    forsaken: list[tuple[str, ref[Tensor]]]

    @property
    def groups(self) -> Sequence[Any]: ...


def refuse_problems(units: Sequence[Starting], names: Sequence[str]) -> None:
    """Raise for what no unit could see alone; ``names``: the units' in the model."""
    unborn = [
        f"{name}.{item.name}" if name else item.name
        for name, unit in zip(names, units, strict=True)
        for group in unit.groups
        if group.main.flat.is_meta
        for item in group.items
    ]
    if unborn:
        raise RuntimeError(
            f"parameters {unborn} are on the meta device and have no values yet: call "
            f"model.to_empty(device=...) and initialise or load them before the first forward"
        )
    for precision in dict.fromkeys(unit.precision for unit in units):
        _check_patterns(precision, [unit for unit in units if unit.precision == precision])
    coded = [unit for unit in units if unit.precision.format is not None]
    stored = [one for unit in coded for one in unit.stored.values()]
    for problem in stores_nothing(coded[0].precision.format, stored) if coded else ():
        raise ValueError(problem)
    _refuse_old_optimizers(entry for unit in units for entry in unit.forsaken)
    devices = {group.device for unit in units for group in unit.groups}
    if len(devices) > 1:
        raise RuntimeError(
            f"the units of one model are on several devices: {sorted(map(str, devices))}"
        )


def _check_patterns(precision: Precision, units: Sequence[Starting]) -> None:
    """Patterns that match nothing: refused where that leaves nothing in MXFP8. Else they may be
    meant for units that run elsewhere."""
    stored = [one for unit in units for one in unit.stored.values()]
    problems = precision.unmatched([one.name for one in stored])
    if not problems:
        return
    text = (
        f"{'; '.join(problems)} of this model. fully_shard knows parameters by their names in the "
        f"module that it is given, so without that module's own"
    )
    if not any(one.format for one in stored):
        raise ValueError(f"{text}. Nothing would be stored in {precision.format}")
    logger.warning("%s", text)


def _refuse_old_optimizers(forsaken: Iterable[tuple[str, ref[Tensor]]]) -> None:
    """An optimizer built before wrapping holds tensors that no longer belong to the model."""
    alive = {
        id(parameter): name
        for name, reference in forsaken
        if (parameter := reference()) is not None
    }
    for thing in gc.get_objects() if alive else ():
        if issubclass(type(thing), torch.optim.Optimizer):
            held = [alive[id(p)] for g in thing.param_groups for p in g["params"] if id(p) in alive]
            if held:
                raise RuntimeError(
                    f"{type(thing).__name__} was built before fully_shard and holds the old "
                    f"parameters ({', '.join(held[:4])}{', ...' if len(held) > 4 else ''}): it "
                    f"would update nothing. Build the optimizer after wrapping"
                )


# ------------------------------------------------------------------------------ after wrapping


class Wrapped(Protocol):
    """A unit, as far as the modules below it are concerned."""

    name: str
    modules: list[ref[nn.Module]]
    places: list[tuple[dict[str, Any], str, int, int]]

    @property
    def groups(self) -> Sequence[Any]: ...


class Members:
    """What a unit's modules held when they were wrapped. Whoever replaces a parameter later, adds
    one or takes one away would train without it: each is refused by name.

    Holds dictionaries of modules, not modules, so that nothing here keeps a model alive.
    """

    def __init__(self, unit: Wrapped) -> None:
        self._places = [place[0] for place in unit.places], [place[1] for place in unit.places]
        self._sharded = [unit.groups[number].sharded[index] for *_, number, index in unit.places]
        self._whole = [unit.groups[number].unsharded[index] for *_, number, index in unit.places]
        self._record(unit)

    def _record(self, unit: Wrapped) -> None:
        modules = [module for _, module in _below(unit)]
        self._children = [module._modules for module in modules]
        self._parameters = [module._parameters for module in modules]
        named = [(each, name) for each in self._parameters for name in each]
        empty = [(each, name) for each, name in named if each[name] is None]
        self._empty = [each for each, _ in empty], [name for _, name in empty]
        ours = {(id(parameters), name) for parameters, name, *_ in unit.places}
        filled = {(id(each), name) for each, name in named if each[name] is not None}
        self._ignored = filled - ours
        self._known = self._structure()

    def _structure(self) -> list[Any]:
        """Every module below, every name of a parameter."""
        inside = chain.from_iterable(map(dict.values, self._children))
        return [*inside, *chain.from_iterable(self._parameters)]

    # Before every forward and backward, so without a loop of Python's.

    def refuse_replaced(self, unit: Wrapped) -> None:
        """Raise where the modules do not hold the parameters that were wrapped."""
        for expected in (self._sharded, self._whole):
            if all(map(is_, map(dict.get, *self._places), expected)):
                return
        self._refuse_all(unit)  # unless each is one of both, where weights come by and by

    def refuse_added(self, unit: Wrapped) -> None:
        """Raise where they hold more, or are others."""
        same = all(map(is_, map(dict.get, *self._empty), repeat(None)))
        if not same or self._structure() != self._known:
            self._refuse_all(unit)
            self._record(unit)  # modules without parameters, or with units of their own

    def _refuse_all(self, unit: Wrapped) -> None:
        problems = []
        lost = {
            (id(parameters), name): (unit.groups[number], index)
            for parameters, name, number, index in unit.places
        }
        for path, module in _below(unit):
            for name, held in module._parameters.items():
                key = (id(module._parameters), name)
                if key in lost and held is not None:
                    group, index = lost.pop(key)
                    if held is not group.sharded[index] and held is not group.unsharded[index]:
                        problems.append(
                            f"'{path}{name}' was replaced, and what replaced it would be dropped: "
                            f"write values into the parameter instead (with torch.no_grad(): "
                            f"parameter.copy_(values) takes the whole tensor), or replace and tie "
                            f"parameters before wrapping"
                        )
                elif held is not None and key not in self._ignored and key not in lost:
                    problems.append(
                        f"'{path}{name}' was added, and is neither sharded nor reduced: add it "
                        f"before wrapping (ignored_params leaves it alone), or wrap its module "
                        f"with fully_shard"
                    )
        problems += [
            f"'{group.items[index].name}' is gone, and the optimizer would go on with it: remove "
            f"parameters before wrapping"
            for group, index in lost.values()
        ]
        if problems:
            raise RuntimeError(
                f"the parameters of unit '{unit.name}' changed after it was wrapped: "
                + "; ".join(problems)
            )


def _below(unit: Wrapped) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a unit and those below that no inner unit owns, with the paths to them."""
    roots = [root for reference in unit.modules if (root := reference()) is not None]
    waiting = [("", root) for root in roots][::-1]
    seen: set[int] = set()
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen or getattr(module, "_shardwise_unit", unit) is not unit:
            continue
        seen.add(id(module))
        yield path, module
        waiting += [(f"{path}{name}.", child) for name, child in module.named_children()][::-1]
