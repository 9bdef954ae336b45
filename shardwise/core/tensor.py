# SPDX-License-Identifier: Apache-2.0
"""ShardedTensor: a DTensor whose pieces are uneven and packed in a buffer.

torch's ``Shard(0)`` means "cut as torch.chunk would". Rows that are packed into a flat buffer lie
elsewhere, and a plain DTensor over them would return wrong rows without an error:

    7 rows over 3 ranks    torch.chunk    rank 0: 0-2    rank 1: 3-5    rank 2: 6
                           a layout       rank 0: 0-1    rank 1: 2-6    rank 2: none

A ShardedTensor knows its Cut. Optimizers, gradient clipping, loss scaling, initialisation,
``full_tensor()``, ``torch.distributed.checkpoint`` and the state-dict helpers work on it unchanged.
An operation that would be wrong on a piece raises an error that names the parameter.

    p = ShardedTensor(local, cut)      local: this rank's rows (flat where rows are cut), aliased
    p.shape, p.placements              those of the whole tensor, as for any DTensor
    p.to_local(), p.full_tensor()      the piece; the whole tensor (collective)
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardwise.core.compat import BEFORE_2_13, GRAD, dispatch_first, make_wrapper, plain_attributes
from shardwise.core.cut import Backing, Cut
from shardwise.core.tensor_ops import Operations

__all__ = ["Backing", "Cut", "ShardedTensor"]

UNREDUCED = (
    "Call set_is_last_backward(True), set_requires_all_reduce(True) and "
    "set_requires_gradient_sync(True) before the last backward of a step, and backward_dw() after "
    "it where weight gradients are delayed"
)


class ShardedTensor(DTensor):
    """This rank's piece of a tensor, with the shape of the whole tensor.

    ``buffer`` counts every in-place operation on the tensor and on its aliases (``detach()``,
    ``nn.Parameter(...)``). Tensors made from it, such as optimizer states, have no buffer.
    """

    _local_tensor: Tensor
    cut: Cut
    buffer: Backing | None
    # No __slots__: torch's staging of asynchronous checkpoints copies the two slots of DTensor and
    # the __dict__, where cut and buffer are.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(
        cls, local: Tensor, cut: Cut, *, requires_grad: bool = False, buffer: Backing | None = None
    ) -> ShardedTensor:
        if local.shape != cut.local_shape:
            raise ValueError(
                f"'{cut.name}': the local tensor has shape {list(local.shape)}, but this rank "
                f"holds elements {cut.piece[0]} to {cut.piece[1]} of {list(cut.shape)}: pass a "
                f"tensor of shape {list(cut.local_shape)}"
            )
        return over_piece(local.detach(), cut, buffer, requires_grad)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: DTensor's would import torch's compiler, and that keeps the caller's frame
        alive."""

    # ------------------------------------------------------------------ torch's hooks

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _operations(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local_tensor"], (self.cut, self.buffer, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> ShardedTensor:
        cut, buffer, requires_grad = flatten_spec
        return over_piece(inner_tensors["_local_tensor"], cut, buffer, requires_grad)

    def __repr__(self) -> str:  # type: ignore[override]
        lo, hi = self.cut.piece
        requires_grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"ShardedTensor('{self.cut.name}', shape={list(self.shape)}, dtype={self.dtype}, "
            f"elements {lo} to {hi} on shard {self.cut.shard_index} of {self.cut.num_holders}, "
            f"device={self.device}{requires_grad})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError(
                f"'{self.cut.name}': only leaves of the autograd graph can be copied"
            )
        buffer = copy.deepcopy(self.buffer, memo)  # one copy for all tensors of a buffer
        new = over_piece(self._local_tensor.clone(), self.cut, buffer, self.requires_grad)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if (grad := GRAD.__get__(self)) is not None:
            new.grad = copy.deepcopy(grad, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotImplementedError(
            f"'{self.cut.name}' is one rank's piece of a tensor and cannot be used by another "
            f"process: save its full_tensor(), or use torch.distributed.checkpoint"
        )

    def _refuse_memory(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse methods of torch that use the address of the memory: this tensor has none. (For
        safetensors a NotImplementedError means that there is nothing to write.)"""
        raise RuntimeError(
            f"'{self.cut.name}' is a shard, without memory for numpy, tolist, safetensors, DLPack, "
            f"apply_, map_ or share_memory_: use full_tensor() (collective; for a model "
            f"sw.full_state_dict(model)), or to_local() for this rank's piece"
        )

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise NotImplementedError(
            f"'{self.cut.name}' is a shard, of which a part (a row) is a gathered copy: write the "
            f"whole with copy_(values), alike on every rank"
        )

    __dlpack__ = numpy = tolist = storage = _refuse_memory
    apply_ = map_ = map2_ = share_memory_ = _refuse_memory

    def data_ptr(self) -> int:
        """The address of a parameter's piece: accelerate finds the parameter in an optimizer by it.
        0 for any other tensor: torch's staging takes any other number for memory."""
        if not isinstance(self, torch.nn.Parameter):
            return 0
        if not self._local_tensor.numel():  # torch has one address for all tensors without elements
            self._local_tensor.data_ptr = functools.partial(int, id(self.cut))  # type: ignore[method-assign]
        return self._local_tensor.data_ptr()

    @property  # type: ignore[override]
    def data(self) -> ShardedTensor:
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: Tensor) -> None:
        """Write the values into the buffer, which a parameter never leaves."""
        if value.shape != self.shape or value.dtype != self.dtype:
            raise NotImplementedError(
                f"'{self.cut.name}'.data = {value.dtype} {list(value.shape)}: a parameter keeps "
                f"its buffer, its shape and {self.dtype}; model.to(dtype) converts a whole model"
            )
        with torch.no_grad():
            self.copy_(value)

    @property  # type: ignore[override]
    def grad(self) -> Any:
        """The reduced gradient, without microbatches that wait to be reduced. Setting it, to None
        too, drops these."""
        with plain_attributes():  # an attribute is no operation to trace
            return GRAD.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with plain_attributes():
            GRAD.__set__(self, value)
        if self.buffer is not None and getattr(self, "_is_param", False):
            self.buffer.waiting.discard(self.cut.index)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    # ------------------------------------------------------------------ DTensor's methods

    def to_local(self) -> Tensor:  # type: ignore[override]
        """This rank's piece, aliased. No gradient flows through it.

        Writes to it outside of an optimizer's step are not counted: call ``sw.mark_written`` after
        them.
        """
        if self.buffer is not None:
            self.buffer.await_readers()  # the caller may write
        return self._local_tensor

    def full_tensor(self) -> Tensor:  # type: ignore[override]
        """The whole tensor in new memory on every rank (collective over the axes that cut it).

        Gradients flow through it and are averaged over all ranks of the mesh (collective, in
        backward), as the gradients of a forward are.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            return _FullTensor.apply(self)  # type: ignore[no-untyped-call,no-any-return]
        with torch.no_grad():
            return self.cut.gather(self._local_tensor)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Any = None, **options: Any
    ) -> DTensor:
        """A plain DTensor made from the whole tensor, or this tensor for its own placements."""
        if tuple(placements or ()) == self.placements:
            return self
        mesh, everywhere = self.device_mesh, (Replicate(),) * self.device_mesh.ndim
        whole = DTensor.from_local(self.full_tensor(), mesh, everywhere, run_check=False)
        return whole.redistribute(device_mesh, placements, **options)

    # ------------------------------------------------------------------ distributed checkpoints

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """The write items of this rank. Replicas offer the same boxes: DCP drops the duplicates by
        offset and divides the rest among the ranks that offered them."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self._refuse_experts()
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """This rank's boxes, for a load. All ranks count the write that the load will make, also
        ranks without a box."""
        self._refuse_experts()
        if self.buffer is not None:
            self.buffer.wrote()
        return self._chunks()

    def _refuse_experts(self) -> None:
        """Refuse spread experts: DCP identifies a tensor by its name, and other ranks have other
        experts under the same name."""
        if self.cut.ranks.others is not None:
            raise NotImplementedError(
                f"'{self.cut.name}' holds some experts, and other ranks hold other experts under "
                f"the same name: torch.distributed.checkpoint would keep the experts of one rank "
                f"only. Use sw.save and sw.load, or sw.full_state_dict for one plain file"
            )

    def _chunks(self) -> list[Any]:
        """This rank's boxes; none if it holds nothing."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets, sizes) for offsets, sizes in self.cut.boxes]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """The memory of one box, to read for a save and to write for a load."""
        for (offsets, _), view in zip(self.cut.boxes, self.cut.views(self.to_local()), strict=True):
            if index.offset in (None, offsets):
                return view
        raise ValueError(
            f"{index.fqn}: no piece of '{self.cut.name}' begins at {index.offset} on this rank: "
            f"the plan was made for another layout"
        )


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharded: ShardedTensor) -> Tensor:
        ctx.cut = sharded.cut
        return sharded.cut.gather(sharded._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> ShardedTensor:
        cut: Cut = ctx.cut
        if cut.ranks.others is not None:
            raise NotImplementedError(
                f"'{cut.name}' holds some experts, which also compute tokens of other ranks: no "
                f"gradient flows through its full_tensor(). Use it inside the module's forward"
            )
        total = cut.reduce(grad.flatten().clone(), "sum", cut.ranks.axes).view(grad.shape)
        return over_piece(cut.take(total / cut.mesh.size()).contiguous(), cut)


def over_piece(
    local: Tensor, cut: Cut, buffer: Backing | None = None, requires_grad: bool = False
) -> ShardedTensor:
    """A ShardedTensor, made without checks and without ``__init__``: optimizers make hundreds per
    step.

    DTensor's own constructor would copy the storage offset of the local tensor, a view into a
    buffer, and ``data_ptr()`` would then look like memory. Without an offset it is 0.
    """
    if buffer is not None and torch.is_inference_mode_enabled():
        # A view must be a normal tensor, as its base is.
        with torch.inference_mode(False):
            return over_piece(local, cut, buffer, requires_grad)
    if BEFORE_2_13:
        dispatch_first(ShardedTensor)
    tensor: Any = make_wrapper(
        ShardedTensor,
        cut.shape,
        cut.stride,
        dtype=local.dtype,
        device=local.device,
        requires_grad=requires_grad,
    )
    tensor._local_tensor = local
    tensor._spec = cut.spec(local.dtype)
    tensor.cut = cut
    tensor.buffer = buffer
    return tensor  # type: ignore[no-any-return]


_operations = Operations(ShardedTensor, over_piece)
