# SPDX-License-Identifier: Apache-2.0
"""The memory of a microbatch besides the library's own buffers, measured on meta tensors.

    forward     the result of every operation, as long as autograd or the model holds it
    backward    the same, while saved tensors are released; recomputed blocks use memory again
    ledger      gathered weights and gradients, at the same moments

A storage counts from the operation that creates it until it is freed, in blocks of 512 bytes like
those of CUDA's allocator. Some operations work differently on the meta device than on a GPU
(attention, RMSNorm, products of experts). Stand-ins replace them, with the memory of the GPU
kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.core.compat import TorchDispatchMode
from shardwise.core.memory import Ledger
from shardwise.moe.activation import Form
from shardwise.moe.grouped_mlp import GroupedMLP
from shardwise.moe.products import Into, LoopProducts

BLOCK = 512  # bytes; CUDA's allocator rounds up to a multiple
WORKSPACE = 2 * (32 << 20)  # of cuBLAS, for two threads: that of forward and that of backward


class Follower(TorchDispatchMode):
    """Counts the bytes of live storages, and the peak of these bytes and the ledger's bytes."""

    def __init__(self, model: nn.Module, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger
        # By address: the bytes of a storage, and a reference that reports its end.
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self.live = sum(-(-buffer.nbytes // BLOCK) * BLOCK for buffer in model.buffers())
        # By function and kinds of arguments: creates a tensor like the result, if that is no view.
        self._known: dict[Any, Callable[[], Tensor]] = {}
        self.peak = 0  # the ledger's bytes included
        self.at_peak = 0  # the live bytes at the peak, without the ledger's

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = None if func._schema.is_mutable else _kind((func, args, *kwargs.items()))
        known = self._known.get(call)
        result = func(*args, **kwargs) if known is None else known()
        returned = _storages(result)
        if returned:
            # Views of arguments are no new memory.
            given = _storages((args, kwargs)) if known is None else {}
            for key, storage in returned.items():
                if key not in given and key not in self._alive:
                    nbytes = -(-storage.nbytes() // BLOCK) * BLOCK
                    self._alive[key] = nbytes, weakref.ref(storage, partial(self._end, key))
                    self.live += nbytes
            if call is not None and known is None and not returned.keys() & given.keys():
                self._remember(call, result)
            self.note()
        return result

    def _remember(self, call: Any, result: Any) -> None:
        """Create the results of equal calls directly: some functions need long for the shape."""
        if type(result) is Tensor:
            form, dtype = (result.shape, result.stride()), result.dtype
            alike = partial(torch.empty_strided, *form, dtype=dtype, device="meta")
            if alike().untyped_storage().nbytes() == result.untyped_storage().nbytes():
                self._known[call] = alike

    def _end(self, key: int, reference: Any) -> None:
        if key in self._alive and self._alive[key][1] is reference:
            self._forget(key)

    def _forget(self, key: int) -> None:
        self.live -= self._alive.pop(key, (0, None))[0]

    def adopt(self, tensor: Tensor) -> None:
        """From now on the ledger counts the memory of this tensor."""
        self._forget(tensor.untyped_storage()._cdata)

    def note(self, kind: str = "", nbytes: int = 0) -> None:
        """Update the peak. Called when memory has grown, here or in the ledger."""
        if self._ledger.total + self.live > self.peak:
            self.peak, self.at_peak = self._ledger.total + self.live, self.live


def _storages(
    value: Any, storages: dict[int, torch.UntypedStorage] | None = None
) -> dict[int, torch.UntypedStorage]:
    """The storages of the meta tensors in ``value``, by address."""
    storages = {} if storages is None else storages
    if isinstance(value, Tensor):
        if value.is_meta:
            storage = getattr(value, "_local_tensor", value).untyped_storage()
            storages[storage._cdata] = storage
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            _storages(item, storages)
    return storages


def _kind(value: Any) -> Any:
    """The facts that decide the shape of a result; None where they are unknown."""
    if isinstance(value, Tensor):
        plain = value.is_meta and type(value) in (Tensor, nn.Parameter)
        return (value.shape, value.stride(), value.dtype) if plain else None
    if isinstance(value, list | tuple):
        kinds = tuple(map(_kind, value))
        return None if None in kinds else kinds
    return type(value), value


@contextmanager
def following(model: nn.Module, follower: Follower, ledger: Ledger) -> Iterator[None]:
    """Count the memory of the computation of ``model``; ``ledger`` counts the library's buffers."""
    ledger.watchers.append(follower.note)
    ledger.adopted = follower.adopt
    experts = [module for module in model.modules() if isinstance(module, GroupedMLP)]
    for module in experts:
        module.products = _SizedProducts()
    try:
        with follower, _StandIns():
            yield
    finally:
        ledger.watchers.remove(follower.note)
        ledger.adopted = None
        for module in experts:
            module.products = None


# ------------------------------------------------------------------------------ stand-ins


class _StandIns(TorchFunctionMode):
    """Attention and RMSNorm as a GPU computes them: fused, saving what its kernels save."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention" and kwargs.get("attn_mask") is None:
            return _Attention.apply(*args[:3])  # type: ignore[no-untyped-call]
        if name == "rms_norm" and args[0].is_meta:
            given = [*args, *(kwargs[key] for key in ("weight", "eps") if key in kwargs)]
            return _Norm.apply(given[0], given[2] if len(given) > 2 else None)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


class _Attention(torch.autograd.Function):
    """Flash attention of [B, H, T, D]. Results have the strides of the tensors that they belong to,
    because a model that reshapes them may have to copy."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        q, k, v, _, sums = ctx.saved_tensors
        held = [torch.empty_like(sums), q.new_empty(q.shape, dtype=torch.float32)]  # dq in fp32
        gradients = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        if k.shape[1] != q.shape[1]:  # a gradient for each query head, summed afterwards
            held += [torch.empty_like(q), torch.empty_like(q)]
        del held
        return gradients


class _Norm(torch.autograd.Function):
    """torch's fused RMSNorm, which saves its input and one number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


class _SizedProducts(LoopProducts):
    """Grouped products that take the memory of the fused kernels."""

    def product(self, rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        return rows.new_empty(len(rows), matrices.shape[2])

    def weight_gradient(self, dy: Tensor, x: Tensor, ends: Tensor, into: Into) -> Tensor:
        return into.memory(dy, x, ends)

    def activated(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, p: Tensor, ends: Tensor, form: Form
    ) -> tuple[Tensor, Tensor]:
        z = self.linear(x, weight, ends)
        return z, z.new_empty(len(z), z.shape[1] // form.activation.inputs_per_output)

    def activation_backward(
        self, dh: Tensor, z: Tensor, p: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(z), dh, z.new_empty(len(z), dtype=torch.float32)
