# SPDX-License-Identifier: Apache-2.0
"""Leaf: a parameter as forward and its kernels see it, a view of gathered memory.

A kernel that computes a weight gradient itself adds it to ``main_grad``, which is zero before the
first contribution, and sets ``grad_added_to_main_grad = True``. A kernel that can overwrite saves
the zeroing with ``fresh_main_grad()``. The kernel may give autograd any gradient or none.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.core.compat import make_wrapper
from shardwise.core.hooks import OWNER
from shardwise.core.tile import Tile
from shardwise.precision.fp8_weight import Coded
from shardwise.shard.gradient import Gradients


class _Leaf:
    # Whether a kernel that wrote ``main_grad`` gave autograd nothing, so that a gradient from
    # autograd is of other uses and counts too.
    others_count = False
    _gradients: weakref.ref[Gradients] | None = None
    _index = 0
    _added = False

    @property
    def main_grad(self) -> Tensor:
        """The memory in which this microbatch's gradient is summed, ready to be added to."""
        view, fresh = self.fresh_main_grad()
        if fresh:
            view.zero_()
            self._of_group.written.add(self._index)
        return view

    def fresh_main_grad(self) -> tuple[Tensor, bool]:
        """The same memory, and whether its contents are undefined and must be overwritten."""
        return self._of_group.destination(self._index)

    def delay(self) -> None:
        """Declare, inside a backward, that the gradient may come after the end of this backward."""
        self._of_group.delay(self._index)

    @property
    def delayed(self) -> bool:
        """Whether a forward has said that its backward will call ``delay()``. The parameter is no
        input of a node then, so no graph shows that a gradient will come."""
        return self._of_group.late

    @delayed.setter
    def delayed(self, value: bool) -> None:
        self._of_group.late = self._of_group.late or value

    @property
    def grad_added_to_main_grad(self) -> bool:
        return self._added

    @grad_added_to_main_grad.setter
    def grad_added_to_main_grad(self, value: bool) -> None:
        gradients = self._of_group
        self._added = bool(value) and gradients.is_wanted(self._index)
        if self._added:
            gradients.kernel_wrote(self._index)

    @property
    def _of_group(self) -> Gradients:
        gradients = self._gradients() if self._gradients is not None else None
        if gradients is None:
            raise RuntimeError("this parameter's group is gone; the model was deleted or rebuilt")
        return gradients

    @property
    def _shardwise_owner(self) -> str:
        """The parameter's name, by which hooks know that no optimizer may hold this tensor."""
        return self._of_group.name(self._index)

    def full_tensor(self) -> Tensor:
        """The whole main weight (collective), for scripts that call it gathered or not."""
        return self._of_group.sharded[self._index].full_tensor()  # type: ignore[attr-defined,no-any-return]

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Register the hook on the parameter at rest, whose gradient the hook will read."""
        return self._of_group.sharded[self._index].register_post_accumulate_grad_hook(hook)

    def local_gradient(self, grad: Tensor) -> Tensor:
        """The gradient that autograd brought, as a plain tensor of the shape that is laid out."""
        return grad


class Leaf(_Leaf, nn.Parameter):
    """A plain tensor over the gathered memory."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor of the values: hooks of saved tensors may use torch.save."""
        return self.detach().as_subclass(Tensor).clone().__reduce_ex__(protocol)


class TileLeaf(_Leaf, DTensor):  # type: ignore[misc]
    """A DTensor as tensor parallelism placed it, whose local tensor is the gathered memory."""

    _tile: Tile
    _local_tensor: Tensor
    _is_param: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing. The constructor of DTensor would import torch's compiler, and that import
        keeps the frame of the caller alive."""

    @staticmethod
    def of(tile: Tile, memory: Tensor, requires_grad: bool) -> TileLeaf:
        made = TileLeaf._around(memory, tile.seen_spec(memory.dtype), requires_grad)
        made._tile, made._is_param = tile, True
        return made

    @staticmethod
    def _around(memory: Tensor, spec: Any, requires_grad: bool) -> TileLeaf:
        made: Any = make_wrapper(
            TileLeaf,
            spec.shape,
            spec.stride,
            memory.storage_offset(),  # as DTensor does; torch.compile relies on it
            dtype=memory.dtype,
            device=memory.device,
            requires_grad=requires_grad,
        )
        made._local_tensor, made._spec = memory, spec
        return made  # type: ignore[no-any-return]

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> TileLeaf:
        """For torch.compile, whose graphs expect the traced class."""
        plain: Any = DTensor.__tensor_unflatten__(inner, context, size, stride)
        return TileLeaf._around(plain._local_tensor, plain._spec, plain.requires_grad)

    def local_gradient(self, grad: Tensor) -> Tensor:
        return self._tile.local_gradient(grad)


class CodedLeaf(_Leaf, Coded):
    """A weight in fp8, whose codes and scales are the gathered memory."""

    @property
    def called(self) -> str:  # type: ignore[override]
        return f"'{self._of_group.name(self._index)}'"


AnyLeaf = Leaf | TileLeaf | CodedLeaf


def leaf_over(memory: Tensor, tile: Tile | None, requires_grad: bool) -> AnyLeaf:
    """A leaf over a view of gathered memory. ``.data`` has a version counter of its own, which a
    gather does not move: the bytes come back, and the values are the same."""
    if tile is not None:
        return TileLeaf.of(tile, memory.data, requires_grad)
    if isinstance(memory, Coded):
        made: Any = CodedLeaf.like(memory, requires_grad)
        made._is_param = True
        return made  # type: ignore[no-any-return]
    return Leaf(memory.data, requires_grad=requires_grad)


def carry_attributes(source: Tensor, target: Tensor) -> None:
    """Copy the attributes that users and frameworks set on a parameter (``_no_decay``, marks of
    tensor parallelism, ...) to another tensor that stands for the parameter."""
    ours = ("_local_tensor", "_spec", "cut", "buffer", "_gradients", "_index", OWNER)
    for name, value in vars(source).items():
        if name not in vars(target) and name not in ours:
            setattr(target, name, value)
