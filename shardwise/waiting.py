# SPDX-License-Identifier: Apache-2.0
"""WaitingGradient: ``.grad`` of a parameter while earlier microbatches wait to be reduced.

Those are sums of one rank, or of a part of the ranks: no gradient that could be shown. None would
say that there is nothing, and every ``zero_grad`` passes over None:

    p.grad = None, p.grad.zero_()     drops what waits for this parameter: all forms of zero_grad
    anything else                     raises, by name
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch.utils._pytree import tree_leaves

UNREDUCED = (
    "Call set_is_last_backward(True), set_requires_all_reduce(True) and "
    "set_requires_gradient_sync(True) before the last backward of a step"
)


class WaitingGradient:
    """Stands for the gradient of ``parameter``; knows what the forms of ``zero_grad`` ask."""

    grad_fn = None
    is_sparse = requires_grad = False

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter

    def zero_(self) -> WaitingGradient:
        self._parameter.grad = None
        return self

    def requires_grad_(self, requires_grad: bool = True) -> WaitingGradient:
        return self

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"'{self._parameter.cut.name}'.grad is not complete: gradients of earlier microbatches "
            f"still wait unreduced. {UNREDUCED}, or zero_grad() to drop them"
        )

    __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __iadd__ = __imul__ = __getitem__ = (
        _refuse
    )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        found = (one for one in tree_leaves((args, kwargs)) if isinstance(one, WaitingGradient))
        next(found)._refuse()
