# SPDX-License-Identifier: Apache-2.0
"""Holders of a memory: the tensors that lie in it, and the objects of Python that hold these.

Between a forward and its backward autograd holds views of weights, which backward reads once they
are gathered again: their memory can be given back. What a list, a closure or an attribute of a
module holds may be read at any time: its memory cannot.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


def storage_of(tensor: Tensor) -> int:
    """Which memory a tensor lies in, also where it has no elements: ranks must decide alike."""
    return int(tensor.untyped_storage()._cdata)


def count_holders(storage: torch.UntypedStorage) -> int:
    """The number of tensors that lie in the memory, and 1 for the object that is ``storage``."""
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined,no-any-return]


def count_references(tensors: Sequence[Any]) -> list[int]:
    """How many references objects of Python hold to each, beside this list."""
    alike, *counts = [getrefcount(one) for one in (object(), *tensors)]
    # torch holds one to what others than Python have too.
    torchs = [isinstance(one, Tensor) and one._use_count() > 1 for one in tensors]  # type: ignore[attr-defined]
    return [count - alike - 1 - one for count, one in zip(counts, torchs, strict=True)]


_num_collections = 0  # that may have made young objects old


def _count_collections(phase: str, info: dict[str, int]) -> None:
    global _num_collections
    _num_collections += phase == "start" and info["generation"] > 0


gc.callbacks.append(_count_collections)


def time_now() -> int:
    """Changes whenever young objects have become old: see :func:`is_kept`."""
    return _num_collections


def is_kept(storage: torch.UntypedStorage, ours: set[int], since: int) -> bool:
    """Whether objects of Python hold tensors in the memory, beside those with the ids ``ours``;
    autograd's do not count, its own nodes with their attributes among them. ``since``: what
    ``time_now()`` was before there were any; the old objects are looked through only where some of
    these may have become old."""
    ages = range(2 if since == time_now() else 3)
    young = [one for age in ages for one in gc.get_objects(age)]
    kinds = {kind for kind in set(map(type, young)) if issubclass(kind, (Tensor, FunctionCtx))}
    found: list[Any] = [one for one in young if type(one) in kinds]
    young.clear()  # it is among them
    here = {id(one) for one in found if isinstance(one, Tensor) and _lies_in(one, storage)}
    if here <= ours:
        return False
    counts = dict(zip(map(id, found), count_references(found), strict=True))
    # What autograd holds alone: its nodes, and tensors, which may hold others (DTensors).
    autograds = [one for one in found if isinstance(one, FunctionCtx) or not counts[id(one)]]
    inside = Counter(map(id, _referents(autograds)))
    return any(counts[one] > inside[one] for one in here - ours)


def _lies_in(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    stored: bool = torch._C._has_storage(tensor)  # type: ignore[attr-defined]
    return stored and torch._C._storage_address(tensor) == storage._cdata  # type: ignore[attr-defined,no-any-return]


def _referents(objects: list[Any]) -> list[Any]:
    """All that the objects refer to, also through dicts, lists and tuples."""
    found: list[Any] = []
    seen: set[int] = set()
    while objects:
        new = gc.get_referents(*objects)
        found += new
        objects = [one for one in new if type(one) in (dict, list, tuple) and id(one) not in seen]
        seen.update(map(id, objects))
    return found
