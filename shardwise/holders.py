# SPDX-License-Identifier: Apache-2.0
"""Find out whether the user still holds views of gathered weights, before their memory is freed.

Between a forward and its backward, autograd holds views of weights. Backward reads them after the
weights are gathered again, so their memory can be freed until then. A view in a list, a closure or
an attribute of a module may be read at any time, so its memory must stay.

Hooks for saved tensors that are set around a unit (``save_on_cpu`` and other ways to offload
activations) do not see views of gathered weights; autograd holds these as it does without hooks. A
view that a hook keeps would look like a view that the user holds, and a hook that copies the view
on its own stream would read the memory after its release.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


def storage_of(tensor: Tensor) -> int:
    """An identifier of the memory of a tensor. It exists for a tensor without elements, too: ranks
    must decide alike."""
    return int(tensor.untyped_storage()._cdata)


def count_holders(storage: torch.UntypedStorage) -> int:
    """The number of tensors that use the memory, plus 1 for the Python object ``storage``."""
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined,no-any-return]


def count_references(tensors: Sequence[Any]) -> list[int]:
    """The number of references that Python objects hold to each tensor, beside this list."""
    unreferenced, *counts = [getrefcount(x) for x in (object(), *tensors)]
    # torch holds a reference to each Python object whose tensor C++ uses, too.
    by_torch = [isinstance(x, Tensor) and x._use_count() > 1 for x in tensors]  # type: ignore[attr-defined]
    return [n - unreferenced - 1 - held for n, held in zip(counts, by_torch, strict=True)]


_num_collections = 0  # collections that may have moved young objects to the old generation


def _count_collections(phase: str, info: dict[str, int]) -> None:
    global _num_collections
    _num_collections += phase == "start" and info["generation"] > 0


gc.callbacks.append(_count_collections)


def time_now() -> int:
    """A counter that changes whenever young objects may have become old: see :func:`is_kept`."""
    return _num_collections


def is_kept(storage: torch.UntypedStorage, ours: set[int], since: int) -> bool:
    """Whether Python objects hold tensors in the memory, apart from the tensors with the ids
    ``ours``. References of autograd do not count, nor those of its nodes written in Python.
    ``since``: ``time_now()`` from before such tensors existed; old objects are searched only if
    some of these tensors may have become old."""
    objects = [x for age in (0, 1) for x in gc.get_objects(age)]
    if since != time_now():  # read last: making the list may start a collection
        objects += gc.get_objects(2)
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, (Tensor, *_OF_AUTOGRAD))}
    found: list[Any] = list({id(x): x for x in objects if type(x) in kinds}.values())
    objects.clear()  # the list refers to the tensors, too
    inside = {id(x) for x in found if isinstance(x, Tensor) and _lies_in(x, storage)}
    if inside <= ours:
        return False
    counts = dict(zip(map(id, found), count_references(found), strict=True))
    # Objects that only autograd holds: its nodes, and tensors, which may hold tensors (DTensors).
    of_autograd = [x for x in found if isinstance(x, _OF_AUTOGRAD) or not counts[id(x)]]
    by_autograd = Counter(map(id, _referents(of_autograd)))
    return any(counts[number] > by_autograd[number] for number in inside - ours)


def _lies_in(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    stored: bool = torch._C._has_storage(tensor)  # type: ignore[attr-defined]
    return stored and torch._C._storage_address(tensor) == storage._cdata  # type: ignore[attr-defined,no-any-return]


def _referents(objects: list[Any]) -> list[Any]:
    """All objects that these refer to, also through dicts, lists and tuples."""
    found: list[Any] = []
    seen: set[int] = set()
    while objects:
        referents = gc.get_referents(*objects)
        found += referents
        containers = (x for x in referents if type(x) in (dict, list, tuple))
        objects = [x for x in containers if id(x) not in seen]
        seen.update(map(id, objects))
    return found


# ------------------------------------------------------------------ hooks for saved tensors


class _Saved:
    """A view of weights that autograd saved while the user's hooks were set."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def unpack(self) -> Tensor:
        """The view. Raises as autograd does without hooks; with hooks it compares no versions."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"backward reads a weight {list(self._tensor.shape)} that was written since its "
                f"forward, or that is not gathered again (set_unshard_in_backward(False))"
            )
        return self._tensor


_OF_AUTOGRAD = (FunctionCtx, _Saved)  # Python objects that belong to nodes of a graph


class _BesideWeights:
    """The user's hooks for saved tensors, without the views of gathered weights."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self._pack, self._unpack, self.depth = pack, unpack, 1

    def pack(self, tensor: Tensor) -> Any:
        local: Any = getattr(tensor, "_local_tensor", tensor)
        stored: bool = torch._C._has_storage(local)  # type: ignore[attr-defined]
        if stored and hasattr(local.untyped_storage(), "shardwise_lent"):
            return _Saved(tensor)
        return self._pack(tensor)

    def unpack(self, packed: Any) -> Tensor:
        return packed.unpack() if type(packed) is _Saved else self._unpack(packed)


def mark_lent(storage: torch.UntypedStorage) -> None:
    """Hide tensors in the memory from the user's hooks from now on."""
    storage.shardwise_lent = True  # type: ignore[attr-defined]


def hooks_of_others() -> bool:
    """Whether hooks for saved tensors are set that see weights as well."""
    top = _top_hooks()
    return top is not None and _beside_weights(top) is None


def hide_from_hooks() -> None:
    """At the beginning of a unit's forward, hide weights from hooks that the user has set around
    it. Hooks that are graph modules stay: torch.compile traces them. Our hooks replace the user's
    on the same level, so whoever set those removes ours after an interrupt, which no module sees.
    """
    top = _top_hooks()
    if top is None or isinstance(top[0], torch.nn.Module):
        return
    ours = _beside_weights(top)
    if ours is not None:
        ours.depth += 1
    else:
        ours = _BesideWeights(*top)
        _replace_hooks(ours.pack, ours.unpack)


def show_to_hooks() -> None:
    """At the end of that forward, or when it raises, set the user's hooks again."""
    top = _top_hooks()
    ours = None if top is None else _beside_weights(top)
    if ours is not None:
        ours.depth -= 1
        if not ours.depth:
            _replace_hooks(ours._pack, ours._unpack)


def _top_hooks() -> tuple[Any, Any] | None:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined,no-any-return]


def _replace_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()  # type: ignore[attr-defined]
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)  # type: ignore[attr-defined]


def _beside_weights(top: tuple[Any, Any]) -> _BesideWeights | None:
    owner = getattr(top[0], "__self__", None)
    return owner if isinstance(owner, _BesideWeights) else None
