# SPDX-License-Identifier: Apache-2.0
"""The private names of torch that shardwise uses (torch 2.11 to 2.13), each once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo as disable_dynamo
from torch._guards import TracingContext
from torch._library.simple_registry import GenericTorchDispatchRuleHolder as RuleHolder
from torch._subclasses import FakeTensorMode
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

__all__ = [
    "DTensorSpec",
    "TensorMeta",
    "TorchDispatchMode",
    "disable_dynamo",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
]

BEFORE_2_13 = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)
# Attributes of our tensors are read many times a step. This context avoids __torch_function__.
plain_attributes: Any = torch._C.DisableTorchFunctionSubclass
# A tensor of a class of its own, without memory.
make_wrapper: Any = Tensor._make_wrapper_subclass
# The gradient of a tensor, past properties of subclasses.
GRAD: Any = Tensor.grad


def compiling() -> bool:
    """Whether this code is traced, or run by a compiler on tensors without values. (Of the second,
    ``torch.compiler.is_compiling`` knows nothing before torch 2.13.)"""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


def backward_id() -> int:
    """The number of the backward that this thread runs; -1 outside. There is no public name."""
    return torch._C._current_graph_task_id()  # type: ignore[attr-defined,no-any-return]


def inside_backward() -> bool:
    """Whether this thread runs a backward. A forward in there is a recomputation."""
    return backward_id() != -1


def will_run(node: Any, asked_for: bool = False) -> bool:
    """Whether the backward that runs now will come to this node of the graph. Exact, so nobody
    waits for what never comes. (Inside a reentrant checkpoint it sees the inner graph.)

    asked_for: the answer when torch.autograd.grad asks for this gradient; nothing is accumulated.
    """
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined,no-any-return]
    except RuntimeError:
        return asked_for


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward is through; not if it raises."""
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(callback)


def run_backward(loss: Tensor) -> None:
    """``loss.backward()``, but torch function modes stay active inside. There is no public way."""
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True,
        accumulate_grad=True,
    )  # fmt: skip


@functools.cache
def dispatch_first(kind: Any) -> None:
    """Before 2.13 torch sends operations on all DTensors, subclasses too, to its C++ rules, which
    take pieces for torch's chunks. Only rules for a class and modes come earlier, and no mode is
    active while autograd runs a backward. So, from the first tensor of this class on, its own rule
    is found for every operation."""
    ours: Any = kind.__torch_dispatch__.__func__
    theirs = RuleHolder.find

    def find(self: RuleHolder, torch_dispatch_class: type) -> Any:
        return ours if torch_dispatch_class is kind else theirs(self, torch_dispatch_class)

    RuleHolder.find = find  # type: ignore[method-assign]


_leaf = torch.zeros((), requires_grad=True)


def next_number() -> int:
    """The sequence number of the next node of the graph. Autograd runs the node with the highest
    number first among those that are ready."""
    return torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined,no-any-return]


def run_first(node: Any) -> None:
    """Give a node the highest number so far, so that it runs before all that is ready with it."""
    node._set_sequence_nr(next_number())
    _leaf.view_as(_leaf)  # takes that number: nodes that are made from now on have higher ones


def register_with_torch(module: Any, unit: Any) -> None:
    """Let torch's pipeline stages find the unit of a module (as the state of torch's own
    ``fully_shard``), and let torch's ``replicate`` of an outer module leave this module out."""
    verb = fully_shard.__wrapped__  # type: ignore[attr-defined]
    module.__dict__.setdefault(STATE_KEY, {})[verb] = unit
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def grad_hooks(parameter: Any) -> list[Callable[[Any], Any]]:
    """The hooks that wait for the gradient of a parameter at rest."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def fake_tensors() -> AbstractContextManager[Any]:
    """Inside, tensors have shapes and no values, on any device."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def forward_graph(function: Callable[..., Any], *inputs: Any) -> tuple[Any, Any]:
    """The graph of forward that ``torch.compile`` makes of a function, with what it keeps for
    backward among its results; and what the function returns. Nothing is compiled to code."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def call(*given: Any) -> Any:
        return function(*given)

    # Code of its own: Dynamo counts the graphs of each, and ends at a limit.
    code = call.__code__.replace(co_firstlineno=next(_lines))
    fresh = FunctionType(code, globals(), closure=call.__closure__)
    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    made = torch.compile(fresh, backend=backend, dynamic=False, fullgraph=True)(*inputs)
    return graphs[0], made


_lines = itertools.count(1)
