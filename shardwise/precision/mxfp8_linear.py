# SPDX-License-Identifier: Apache-2.0
"""x · Wᵀ with W in MXFP8, and its gradients.

::

    forward    y  = x · decode(row plane)ᵀ            one decoded matrix at a time, in a workspace
    backward   dx = dy · decode(column plane)         that the next linear uses again
               dW = dyᵀ · x                           full precision, into main_grad or autograd

Which planes are read is decided by phase, when they are read: in between, their memory may be
released and gathered again. Decoding to bf16 is exact, so the products are those of a bf16 GEMM
with fp32 accumulation over exactly the values that the codes say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.memory import counted
from shardwise.precision.mxfp8 import ROW, SIDE, MXFP8Error, Plane, decode, encode
from shardwise.precision.mxfp8_tensor import MXFP8Tensor

COMPUTE = (torch.bfloat16, torch.float32)  # decoding to them is exact; to fp16 it is not


class MainGrad(Protocol):
    """Where a weight's gradient is summed; a gathered parameter of ``fully_shard`` is one."""

    grad_added_to_main_grad: bool

    def fresh_main_grad(self) -> tuple[Tensor, bool]:
        """The memory, and whether its contents are undefined and to be overwritten."""


class Workspace:
    """Memory for one decoded matrix, kept from call to call and grown to the largest.

    The products that read it are queued on one stream, so the next decode waits for them by
    itself. One workspace serves one stream and one thread at a time; give each model its own.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def matrix(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[rows, columns], contents undefined, until the next call."""
        key = (dtype, device)
        held = self._memory.get(key)
        if held is None or held.numel() < shape.numel():
            self._memory.pop(key, None)
            del held  # the smaller one goes before the larger one comes
            # Not an inference tensor, even where an evaluation comes first: training decodes into
            # it later, and such a tensor can't be written then.
            with torch.inference_mode(False):
                fresh = torch.empty(shape.numel(), dtype=dtype, device=device)
            self._memory[key] = held = counted(fresh, "workspace")
        return held[: shape.numel()].view(shape)

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())

    def release(self) -> None:
        self._memory.clear()


class Matmul(Protocol):
    """The two products that read a weight's planes; activations are [tokens, features]."""

    def forward(self, x: Tensor, plane: Plane, bias: Tensor | None) -> Tensor:
        """x · Wᵀ + bias: [tokens, columns] to [tokens, rows]."""

    def backward(self, grad: Tensor, plane: Plane) -> Tensor:
        """dy · W: [tokens, rows] to [tokens, columns]."""


def as_it_is(activations: Tensor) -> Tensor:
    return activations


def through_mxfp8(activations: Tensor) -> Tensor:
    """[tokens, features] rounded as a native MX product rounds them: blocks of 32 features."""
    tokens = len(activations)
    padded = F.pad(activations, (0, 0, 0, -tokens % SIDE))
    return decode(encode(padded, (ROW,))[0], dtype=activations.dtype)[:tokens]


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """Decode, then an ordinary product in the activations' dtype, summed in fp32.

    Args:
        workspace: kept memory to decode into; None: memory of the moment.
        activations: what happens to x and dy before they are multiplied. ``through_mxfp8`` gives
            the numbers of hardware that multiplies MXFP8 by MXFP8.
    """

    workspace: Workspace | None = None
    activations: Callable[[Tensor], Tensor] = as_it_is

    def forward(self, x: Tensor, plane: Plane, bias: Tensor | None) -> Tensor:
        return F.linear(self.activations(x), self._weight(plane, x.dtype), bias)

    def backward(self, grad: Tensor, plane: Plane) -> Tensor:
        return torch.mm(self.activations(grad), self._weight(plane, grad.dtype))

    def _weight(self, plane: Plane, dtype: torch.dtype) -> Tensor:
        codes = plane.codes
        if self.workspace is None:
            return decode(plane, dtype=dtype)
        return decode(plane, out=self.workspace.matrix(codes.shape, dtype, codes.device))


def mxfp8_linear(
    x: Tensor,  # [..., columns], bf16 or fp32
    weight: MXFP8Tensor,  # [rows, columns]
    bias: Tensor | None = None,  # [rows]
    *,
    parameter: Tensor | None = None,
    main_grad: MainGrad | None = None,
    matmul: Matmul | None = None,
) -> Tensor:  # [..., rows], in the dtype of x
    """``F.linear`` over a weight in MXFP8; ``torch.autocast`` casts x and bias as it does there.

    Args:
        parameter: whose gradient the weight's is; None for a frozen weight.
        main_grad: adds the gradient there and announces it; autograd then gets none. None: autograd
            gets it, in the parameter's dtype, rounded once.
        matmul: the products; by default ``Emulated()``.
    """
    rows, columns = weight.shape
    x, bias = _autocast(x), None if bias is None else _autocast(bias)
    problems = []
    if x.dim() == 0 or x.shape[-1] != columns:
        problems.append(f"x of shape {tuple(x.shape)}: its last dimension must be {columns}")
    if x.dtype not in COMPUTE:
        problems.append(
            f"x of {x.dtype}: MXFP8 weights decode exactly to bf16 and fp32; cast x, or autocast "
            f"to torch.bfloat16"
        )
    if x.device != weight.device:
        problems.append(f"x on {x.device}, the weight on {weight.device}")
    if bias is not None and (tuple(bias.shape) != (rows,) or bias.dtype != x.dtype):
        problems.append(
            f"bias of shape {tuple(bias.shape)}, {bias.dtype}: expected ({rows},), {x.dtype}"
        )
    if parameter is not None and parameter.shape != weight.shape:
        problems.append(
            f"a parameter of shape {tuple(parameter.shape)} for a weight of {rows}x{columns}"
        )
    if main_grad is not None and parameter is None:
        problems.append("main_grad without a parameter: autograd would not know that it trains")
    if problems:
        raise MXFP8Error("; ".join(problems))
    how = matmul or Emulated()
    return _Linear.apply(x, parameter, bias, weight, main_grad, how)  # type: ignore[no-any-return, no-untyped-call]


def _autocast(value: Tensor) -> Tensor:
    """As torch casts operands of ``F.linear``. Here, because what is checked, decoded to and saved
    for backward is all of the dtype that is computed in."""
    kind = value.device.type
    known = torch.amp.is_autocast_available(kind)  # not for a dry run's tensors, of no device
    if not known or not torch.is_autocast_enabled(kind) or value.dtype == torch.float64:
        return value
    return value.to(torch.get_autocast_dtype(kind)) if value.is_floating_point() else value


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parameter: Tensor | None,
        bias: Tensor | None,
        weight: MXFP8Tensor,
        main_grad: MainGrad | None,
        matmul: Matmul,
    ) -> Tensor:
        # Not saved as tensors: planes may be released and gathered again before backward.
        ctx.weight, ctx.main_grad, ctx.matmul = weight, main_grad, matmul
        ctx.into = None if parameter is None else parameter.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.x_shape = x.shape
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        rows, columns = weight.shape
        y = matmul.forward(x.reshape(-1, columns), weight.plane("forward"), bias)
        return y.view(*x.shape[:-1], rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, columns = ctx.weight.shape
        grad = grad.reshape(-1, rows)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = ctx.matmul.backward(grad, ctx.weight.plane("backward")).view(ctx.x_shape)
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        if ctx.needs_input_grad[1]:
            (x,) = ctx.saved_tensors
            x = x.reshape(-1, columns)
            if ctx.main_grad is None:
                of_weight = torch.empty(rows, columns, dtype=ctx.into, device=x.device)
                add_weight_gradient(of_weight, grad, x, fresh=True)
            else:
                into, fresh = ctx.main_grad.fresh_main_grad()
                add_weight_gradient(into, grad, x, fresh=fresh)
                # Last: whoever counts gradients may release the weight from here on.
                ctx.main_grad.grad_added_to_main_grad = True
        return of_x, of_weight, of_bias, None, None, None


def add_weight_gradient(
    into: Tensor,  # [rows, columns]
    grad: Tensor,  # [tokens, rows]
    x: Tensor,  # [tokens, columns]
    *,
    fresh: bool,
) -> None:
    """``into`` becomes (where ``fresh``) or grows by dyᵀ · x, summed in fp32 and rounded once."""
    left = grad.t()
    if into.dtype == x.dtype:
        # beta 0 ignores what is there, NaN included.
        torch.addmm(into, left, x, beta=0 if fresh else 1, out=into)
    elif into.dtype == torch.float32 and x.is_cuda:
        if fresh:
            torch.mm(left, x, out_dtype=torch.float32, out=into)
        else:
            torch.addmm(into, left, x, out_dtype=torch.float32, out=into)
    else:
        product = torch.mm(left.float(), x.float())
        if fresh:
            into.copy_(product)
        else:
            into.add_(product)
