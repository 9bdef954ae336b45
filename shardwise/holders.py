# SPDX-License-Identifier: Apache-2.0
"""Holders of a memory: the tensors that lie in it, and the objects of Python that hold these.

Between a forward and its backward autograd holds views of weights, which backward reads once they
are gathered again: their memory can be given back. What a list, a closure or an attribute of a
module holds may be read at any time: its memory cannot.

Hooks for saved tensors that are set around a unit (``save_on_cpu``, and others that offload
activations) see no views of weights that its forward gathered: autograd holds these as it does
without hooks. A hook that kept one would look like somebody else, and one that copies it on a
stream of its own would read it after its release.
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
    young = [one for age in (0, 1) for one in gc.get_objects(age)]
    if since != time_now():  # asked last: to make a list may collect, and make objects old
        young += gc.get_objects(2)
    kinds = {kind for kind in set(map(type, young)) if issubclass(kind, (Tensor, *_AUTOGRADS))}
    found: list[Any] = list({id(one): one for one in young if type(one) in kinds}.values())
    young.clear()  # it is among them
    here = {id(one) for one in found if isinstance(one, Tensor) and _lies_in(one, storage)}
    if here <= ours:
        return False
    counts = dict(zip(map(id, found), count_references(found), strict=True))
    # What autograd holds alone: its nodes, and tensors, which may hold others (DTensors).
    autograds = [one for one in found if isinstance(one, _AUTOGRADS) or not counts[id(one)]]
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


# ------------------------------------------------------------------ hooks for saved tensors


class _Saved:
    """A view of weights that autograd saved while hooks of others were set."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def unpack(self) -> Tensor:
        """The view; raises where autograd would without hooks, which compare no versions."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"backward reads a weight {list(self._tensor.shape)} that was written since its "
                f"forward, or that is not gathered again (set_unshard_in_backward(False))"
            )
        return self._tensor


_AUTOGRADS = (FunctionCtx, _Saved)  # objects of Python that belong to nodes of a graph


class _BesideWeights:
    """Others' hooks for saved tensors, which see no view of gathered weights."""

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
    """Hide tensors in the memory from hooks, from now on."""
    storage.shardwise_lent = True  # type: ignore[attr-defined]


def hooks_of_others() -> bool:
    """Whether hooks for saved tensors are set that see weights as well."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    return top is not None and _beside_weights(top) is None


def hide_from_hooks() -> None:
    """The forward of a unit begins: hide weights from hooks that others have set around it, but
    from graphs, which torch.compile traces. Ours take their place: after an interrupt, of which no
    module is told, whoever set them removes ours."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    if top is None or isinstance(top[0], torch.nn.Module):
        return
    if (ours := _beside_weights(top)) is not None:
        ours.depth += 1
    else:
        ours = _BesideWeights(*top)
        _replace_hooks(ours.pack, ours.unpack)


def show_to_hooks() -> None:
    """That forward has ended, or raised: the hooks are those of before it."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    if top is not None and (ours := _beside_weights(top)) is not None:
        ours.depth -= 1
        if not ours.depth:
            _replace_hooks(ours._pack, ours._unpack)


def _replace_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()  # type: ignore[attr-defined]
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)  # type: ignore[attr-defined]


def _beside_weights(top: tuple[Any, Any]) -> _BesideWeights | None:
    owner = getattr(top[0], "__self__", None)
    return owner if isinstance(owner, _BesideWeights) else None
