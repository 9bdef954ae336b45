# SPDX-License-Identifier: Apache-2.0
"""Containers: tensors inside the arguments and results of a forward (in lists, objects, ...)."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

# (a container that was given to a forward, the container that forward got: a copy or the same, the
# items of that container at first, the former item by the id of the new one), in order
Swaps = list[tuple[Any, Any, list[tuple[Any, Any]], dict[int, Any]]]


def look_into(value: Any, seen: set[int]) -> Iterator[Any]:
    """The tensors inside ``value``, and objects that cannot be looked into."""
    if isinstance(value, Tensor):
        yield value
        return
    if value is None or isinstance(value, _SIMPLE):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inside: Iterable[Any] = value.values()
    elif isinstance(value, (tuple, list, set, frozenset, deque)):
        inside = value
    elif isinstance(value, _CLOSED) or not (hasattr(value, "__dict__") or _slots(value)):
        leaves, _ = tree_flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            yield value
            return
        inside = leaves
    else:
        names = [*getattr(value, "__dict__", ()), *_slots(value)]
        inside = [getattr(value, name, None) for name in names]
    for item in inside:
        yield from look_into(item, seen)


def _slots(value: Any) -> list[str]:
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    return [name for name in names if not name.startswith("__")]


_SIMPLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range)
_SIMPLE += (slice, type, enum.Enum, numpy.ndarray, numpy.generic, nn.Module, ModuleType)  # type: ignore[assignment]
_CLOSED = (FunctionType, BuiltinFunctionType, MethodType, GeneratorType, partial)


def cast_floats(value: Any, dtype: torch.dtype | None, swaps: Swaps | None = None) -> Any:
    """``value`` with every floating-point tensor inside cast to ``dtype``; None changes nothing.

    Containers are copied, because a checkpoint inside the forward keeps its container and reads the
    casts when it recomputes, after the forward. With ``swaps``, ``put_back`` repeats on the given
    containers what the forward has written to the copies.
    """
    if dtype is None:
        return value
    cast = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
    return map_tensors(cast, value, swaps, in_place=False)


def map_tensors(
    change: Callable[[Tensor], Tensor],
    value: Any,
    swaps: Swaps | None = None,
    around: tuple[int, ...] = (),
    *,
    in_place: bool = True,
) -> Any:
    """Apply ``change`` to every tensor inside nested containers, dataclasses and registered
    pytrees.

    A container without changes is returned as the same object. A container with changes is copied.
    But with ``swaps`` and ``in_place``, lists, dicts, deques and dataclasses are changed in place
    until ``put_back``, because a forward may write to its arguments (a cache, a list of losses).
    Attributes that a forward sets on the copy of a registered pytree are written back. ``around``:
    the ids of the containers around ``value``, which it may contain again.
    """
    again = partial(map_tensors, change, swaps=swaps, in_place=in_place)
    if isinstance(value, Tensor):
        return change(value)
    kind = type(value)
    if kind is tuple:
        items = [again(item, around=around) for item in value]
        return value if all(map(is_, items, value)) else kind(items)
    if value is None or kind in (int, float, bool, str) or id(value) in around:
        return value
    copies = () if in_place else [held for given, held, *_ in swaps or () if given is value]
    if copies:
        return copies[0]  # the container was given twice
    around += (id(value),)
    if kind in _WRITABLE or dataclasses.is_dataclass(kind):
        pairs = [(key, old, again(old, around=around)) for key, old in _items(value)]
        changed = [(key, old, new) for key, old, new in pairs if new is not old]
        given = value
        if changed and (swaps is None or not in_place):
            value = copy.copy(value)
        for key, _, new in changed:
            _set(value, key, new)
        if changed and swaps is not None:
            before = {id(new): old for _, old, new in changed}
            swaps.append((given, value, _items(value), before))
        return value
    leaves, spec = tree_flatten(value, is_leaf=lambda inner: inner is not value)
    if len(leaves) == 1 and leaves[0] is value:
        return value  # nothing that torch knows how to open
    items = [again(leaf, around=around) for leaf in leaves]
    if all(map(is_, items, leaves)):
        return value
    copied = tree_unflatten(items, spec)
    if swaps is not None:
        before = dict(zip(map(id, items), leaves, strict=True))
        swaps.append((value, copied, _items(copied), before))
    return copied


def put_back(swaps: Swaps) -> None:
    """Undo the changes in place, except where a forward has written since. Repeat on the given
    containers what the forward has written to their copies."""
    while swaps:
        given, held, first, before = swaps.pop()
        if held is not given:
            _write_back(given, held, first, before)
            continue
        for key, item in _items(held):
            if id(item) in before:
                _set(held, key, before[id(item)])


def _write_back(
    given: Any, held: Any, first: list[tuple[Any, Any]], before: dict[int, Any]
) -> None:
    """Repeat on ``given`` what was written to its copy ``held``, whose items were ``first``."""
    now = _items(held)
    if isinstance(given, (list, deque)):
        if [id(item) for _, item in now] != [id(item) for _, item in first]:
            given.clear()
            given.extend(before.get(id(item), item) for _, item in now)
        return
    removed = dict(first)
    for key, item in now:
        if removed.pop(key, held) is not item:
            _set(given, key, before.get(id(item), item))
    for key in removed:
        given.pop(key, None) if isinstance(given, dict) else delattr(given, key)


_WRITABLE = (list, deque, dict, OrderedDict, defaultdict)


def _items(container: Any) -> list[tuple[Any, Any]]:
    if isinstance(container, (list, deque)):
        return list(enumerate(container))
    if isinstance(container, dict) and not dataclasses.is_dataclass(container):
        return list(container.items())
    names = [*getattr(container, "__dict__", ()), *_slots(container)]  # a slot may have no value
    return [(name, getattr(container, name)) for name in names if hasattr(container, name)]


def _set(container: Any, key: Any, item: Any) -> None:
    if isinstance(container, dict) and dataclasses.is_dataclass(container):
        setattr(container, key, item)  # outputs of transformers hold each value twice
    elif isinstance(container, (list, deque, dict)):
        container[key] = item
    else:
        object.__setattr__(container, key, item)  # works for frozen dataclasses too
