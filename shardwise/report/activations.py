# SPDX-License-Identifier: Apache-2.0
"""The memory of a microbatch beside the library's own buffers, followed on meta tensors.

    forward     every operation's result, for as long as anybody (autograd, the model) holds it
    backward    the same, while what was saved is given back; recomputed blocks come and go again
    ledger      gathered weights, gradients: at the same moments

A storage counts from the operation that makes it to its end, in blocks of 512 bytes as CUDA's
allocator gives them. Operations for which the meta device takes another way than a GPU (attention,
RMSNorm, products of experts) are replaced by stand-ins that hold what the GPU's kernels hold.
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
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.memory import Ledger
from shardwise.moe.activation import Form
from shardwise.moe.coded import Into, parts_of
from shardwise.moe.grouped_mlp import GroupedMLP
from shardwise.moe.products import LoopProducts, Rows, Weight

BLOCK = 512  # bytes that CUDA's allocator rounds to
WORKSPACE = 2 * (32 << 20)  # of cuBLAS: one for the thread of forward, one for that of backward


class Follower(TorchDispatchMode):
    """Counts live storages, and the highest sum of them and of what a ledger holds."""

    def __init__(self, model: nn.Module, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger
        # By address: the bytes of a storage, and a reference that tells of its end.
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self.live = sum(-(-buffer.nbytes // BLOCK) * BLOCK for buffer in model.buffers())
        # By function and kinds of arguments: makes a tensor like the result, where that is new.
        self._known: dict[Any, Callable[[], Tensor]] = {}
        self.peak = 0  # with the ledger's bytes
        self.at_peak = 0  # of it, those followed here

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = None if func._schema.is_mutable else _kind((func, args, *kwargs.items()))
        known = self._known.get(call)
        result = func(*args, **kwargs) if known is None else known()
        made = _storages(result)
        if made:
            # Views of what was given are no new memory.
            given = _storages((args, kwargs)) if known is None else {}
            for key, storage in made.items():
                if key not in given and key not in self._alive:
                    nbytes = -(-storage.nbytes() // BLOCK) * BLOCK
                    gone = weakref.ref(storage, partial(self._end, key))
                    self._alive[key] = (nbytes, gone)
                    self.live += nbytes
            if call is not None and known is None and not made.keys() & given.keys():
                self._remember(call, result)
            self.note()
        return result

    def _remember(self, call: Any, result: Any) -> None:
        """Make the results of equal calls at once: some functions take long to find their shape."""
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
        """The ledger counts the memory of this tensor from here on."""
        self._forget(tensor.untyped_storage()._cdata)

    def note(self, kind: str = "", nbytes: int = 0) -> None:
        """Something has grown, here or in the ledger."""
        if self._ledger.total + self.live > self.peak:
            self.peak, self.at_peak = self._ledger.total + self.live, self.live


def _storages(
    value: Any, found: dict[int, torch.UntypedStorage] | None = None
) -> dict[int, torch.UntypedStorage]:
    """The memory on the meta device of the tensors inside, by address."""
    found = {} if found is None else found
    if isinstance(value, Tensor):
        if value.is_meta:
            storage = getattr(value, "_local_tensor", value).untyped_storage()
            found[storage._cdata] = storage
    elif isinstance(value, list | tuple):
        for one in value:
            _storages(one, found)
    elif isinstance(value, dict):
        for one in value.values():
            _storages(one, found)
    return found


def _kind(value: Any) -> Any:
    """The facts that the shape of a result depends on; None where they are not known."""
    if isinstance(value, Tensor):
        plain = value.is_meta and type(value) in (Tensor, nn.Parameter)
        return (value.shape, value.stride(), value.dtype) if plain else None
    if isinstance(value, list | tuple):
        kinds = tuple(map(_kind, value))
        return None if None in kinds else kinds
    return type(value), value


@contextmanager
def following(model: nn.Module, follower: Follower, ledger: Ledger) -> Iterator[None]:
    """Follow what ``model`` computes on meta tensors, with a ledger that counts the rest."""
    ledger.watchers.append(follower.note)
    ledger.adopted = follower.adopt
    choices = [module.choice for module in model.modules() if isinstance(module, GroupedMLP)]
    before = [(choice.chosen, choice.chosen_for) for choice in choices]
    for choice in choices:
        choice.chosen, choice.chosen_for = ("fused", _SizedProducts()), None
    try:
        with follower, _StandIns():
            yield
    finally:
        ledger.watchers.remove(follower.note)
        ledger.adopted = None
        for choice, (chosen, dtype) in zip(choices, before, strict=True):
            choice.chosen, choice.chosen_for = chosen, dtype


# ------------------------------------------------------------------------------ stand-ins


class _StandIns(TorchFunctionMode):
    """Attention and RMSNorm as a GPU computes them: fused, and nothing saved but what they need."""

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
    """Flash attention of [B, H, T, D]. Results lie in memory as what they belong to does: a model
    that reshapes them may copy."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        q, k, v, _, sums = ctx.saved_tensors
        held = [torch.empty_like(sums), q.new_empty(q.shape, dtype=torch.float32)]  # dq is added up
        gradients = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        if k.shape[1] != q.shape[1]:  # a gradient for each query head, added up afterwards
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
    """The grouped products by the memory that the fused kernels take."""

    def linear(self, x: Rows, weight: Weight, ends: Tensor) -> Tensor:
        return parts_of(x)[0].new_empty(len(x), weight.shape[1], dtype=x.dtype)

    def input_gradient(self, dy: Rows, weight: Weight, ends: Tensor) -> Tensor:
        return parts_of(dy)[0].new_empty(len(dy), weight.shape[2], dtype=dy.dtype)

    def weight_gradient(self, dy: Tensor, x: Tensor, ends: Tensor, into: Into) -> Tensor:
        return into.memory(dy, x, ends)

    def activated(
        self, x: Rows, weight: Weight, bias: Tensor | None, p: Tensor, ends: Tensor, form: Form
    ) -> tuple[Tensor, Tensor]:
        z = self.linear(x, weight, ends)
        return z, z.new_empty(len(z), z.shape[1] // form.activation.inputs_per_output)

    def activation_backward(
        self, dh: Tensor, z: Tensor, p: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(z), dh, z.new_empty(len(z), dtype=torch.float32)
