# SPDX-License-Identifier: Apache-2.0
"""Passes over graphs of torch.compile that join fp8 layers which read the same x into one product.

::

    forward     quantise(x), x · Wqᵀ, x · Wkᵀ, x · Wvᵀ   -->  quantise(x) · [Wq Wk Wv]ᵀ
    backward    dq · Wq + dk · Wk + dv · Wv              -->  [dq dk dv] · [Wq Wk Wv]
                dqᵀ · x, dkᵀ · x, dvᵀ · x                -->  [dq dk dv]ᵀ · x

The right side of each line is one operator. If x is silu(gate) · up, forward's operator computes
quantise(silu(gate) · up) · Wᵀ, so x is written only as codes. The same is done for norms
(h · factors · weight), for the heads of attention, side by side, and in backward for the gradients
of gate and up, which are computed from the gradient of x.

This makes fewer and larger products, and less work for the host, which may need more time for a
step than the device. It is done for weights whose codes lie one after another in the gathered
memory. When a graph is made, their ``place`` tells this; when it runs, operators check it again.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

Node = Any  # of torch.fx: the types of its arguments are too many to ask for

aten, ops = torch.ops.aten, torch.ops.shardwise
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
SHAPES = (
    aten.alias.default,
    aten.permute.default,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
)


def install() -> None:
    """Install the passes in inductor, behind the passes that are there already."""
    _install("joint_custom_post_pass", keep)
    _install("post_grad_custom_pre_pass", join)


def _install(place: str, change: Callable[[Graph], None]) -> None:
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    before: Any = getattr(config, place)

    class Change(CustomGraphPass):
        changes_fp8 = True

        def __call__(self, graph: Graph) -> None:
            passes = before if isinstance(before, (list, tuple)) else [before]
            for other_pass in filter(None, passes):
                other_pass(graph)
            change(graph)

        def uuid(self) -> Any:
            mine = get_hash_for_files((__file__, str(Path(__file__).with_name("fp8_operators.py"))))
            if before is None:
                return mine
            # None: nothing is cached, as without our pass.
            theirs = before.uuid() if isinstance(before, CustomGraphPass) else None
            return theirs and (mine, theirs)

    if not getattr(before, "changes_fp8", False):
        setattr(config, place, Change())


def keep(graph: Graph) -> None:
    """Save sums (h = a + b) for backward, and not their terms, if a norm of h is written as codes.

    Forward writes h to memory anyway, for the operator that computes the norm. From the terms
    backward would have to compute h again.
    """
    for node in graph.nodes:
        if node.target is ops.fp8_quantise.default:
            h, *_ = _normed(_base(node.args[0])) or (node,)
            if h.target is aten.add.Tensor:
                h.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def join(graph: Graph) -> None:
    """Join layers in the graph of a forward or of a backward."""
    changed = False
    for node in list(graph.nodes):
        if node.target is ops.fp8_quantise.default:
            changed |= _join_products(graph, node)
    for node, terms in _sums_of_gradients(list(graph.nodes)).items():
        changed |= _join_gradients(graph, node, terms)
    for node in list(graph.nodes):
        if node.target is ops.fp8_linears.default:
            changed |= _fuse_source(node)
        elif node.target is ops.fp8_linear_backward.default:
            changed |= _fuse_swiglu_backward(node)
    if changed:
        graph.eliminate_dead_code()
        from torch._inductor.pattern_matcher import stable_topological_sort

        stable_topological_sort(graph)
        graph.lint()


def _runs(nodes: Sequence[Node], place: int) -> list[list[Node]]:
    """Runs of nodes whose weights lie one after another. ``place``: the number of the argument that
    holds the weight's place."""
    places = {node: tuple(map(int, str(node.args[place]).split())) for node in nodes}
    runs: list[list[Node]] = []
    end_of_run = None
    for node in sorted(nodes, key=places.__getitem__):
        buffer, start, size = places[node]
        if end_of_run != (buffer, start):
            runs.append([])
        runs[-1].append(node)
        end_of_run = buffer, start + size
    return runs


def _outlives(node: Node) -> bool:
    """Whether a value, or a view of the value, is an output of the graph."""
    views = (user for user in node.users if user.target in (*VIEWS, *SHAPES))
    return any(user.op == "output" for user in node.users) or any(map(_outlives, views))


def _add(graph: Graph, target: Any, *args: Any) -> Node:
    """A new node, with the shapes of its results."""
    node = graph.call_function(target, args)
    values = torch.fx.node.map_arg(args, lambda node: node.meta["val"])
    node.meta["val"] = target(*values)
    return node


def _parts(node: Node) -> dict[int, Node]:
    """The nodes that read single results of a node with several results, by the result's number."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}


def _replace(graph: Graph, old: Node, new: Node) -> None:
    old.replace_all_uses_with(new)
    graph.erase_node(old)


def _join_products(graph: Graph, quantise: Node) -> bool:
    """Replace a tensor that is quantised, and all products of its codes, by one operator. Returns
    whether this was possible."""
    x, rows, turned, rounding = quantise.args
    parts = _parts(quantise)
    products = list(parts[0].users) if 0 in parts else []
    # All arguments but the weight and its place.
    shared = {(node.target, *node.args[:2], *node.args[3:6]) for node in products}
    if not rows or len(shared) != 1 or 1 not in parts or set(parts[1].users) != set(products):
        return False
    target, codes, scales, bias, phase, dtype = shared.pop()
    if target is not ops.fp8_product.default or (codes, scales, bias, phase) != (
        parts[0], parts[1], None, "forward",
    ):  # fmt: skip
        return False
    # One tensor for outputs of the graph and for other values would keep the others in memory too.
    outputs = [node for node in products if _outlives(node)]
    others = [node for node in products if not _outlives(node)]
    runs = _runs(outputs, 6) + _runs(others, 6)
    ordered = [node for run in runs for node in run]
    with graph.inserting_before(quantise):
        joined = _add(
            graph, ops.fp8_linears.default, [x], [node.args[2] for node in ordered],
            [len(run) for run in runs], turned, rounding, dtype,
        )  # fmt: skip
        results = [_add(graph, operator.getitem, joined, index) for index in range(2 + len(runs))]
        for run, result in zip(runs, results[2:], strict=True):
            low = 0
            for node in run:
                high = low + node.meta["val"].shape[1]
                alone = len(run) == 1
                part = result if alone else _add(graph, aten.slice.Tensor, result, 1, low, high)
                _replace(graph, node, part)
                low = high
    for index, part in parts.items():
        if index < 2:
            graph.erase_node(part)
        else:
            _replace(graph, part, results[index - 2])
    graph.erase_node(quantise)
    return True


def _sums_of_gradients(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """The sums of gradients of one x that come from several fp8 layers and from nothing else, with
    the operators whose results they add."""
    terms: dict[Node, list[Node]] = {}
    for node in nodes:
        if node.target is operator.getitem and node.args[1] == 0:
            if node.args[0].target is ops.fp8_linear_backward.default:
                terms[node] = [node.args[0]]
        elif node.target in VIEWS and node.args[0] in terms and len(node.args[0].users) == 1:
            terms[node] = terms.pop(node.args[0])
        elif node.target is aten.add.Tensor and not node.kwargs and len(node.args) == 2:
            left, right = node.args
            both = left in terms and right in terms and left is not right
            if both and len(left.users) == len(right.users) == 1:
                terms[node] = terms.pop(left) + terms.pop(right)
    return {node: added for node, added in terms.items() if len(added) > 1}


def _join_gradients(graph: Graph, total: Node, terms: Sequence[Node]) -> bool:
    """Replace the backward operators of layers that read the same x by one operator for each run of
    weights. Returns whether this was possible."""
    runs = _runs(terms, 7)
    if len({node.args[2:7] for node in terms}) > 1 or len(runs) == len(terms):
        return False
    term = total.args[0]
    while term.target is aten.add.Tensor:
        term = term.args[0]
    sums = []
    with graph.inserting_before(total):
        for run in runs:
            grads = [grad for node in run for grad in node.args[0]]
            parameters = [parameter for node in run for parameter in node.args[1]]
            joined = _add(
                graph, ops.fp8_linear_backward.default, grads, parameters, *run[0].args[2:]
            )
            of_x, of_weights = (_add(graph, operator.getitem, joined, index) for index in range(2))
            # The arguments of a view are copied: a size that changes from batch to batch is a node.
            viewed = _add(graph, term.target, of_x, term.args[1]) if term.target in VIEWS else of_x
            sums.append(viewed)
            low = 0
            for node, grad in zip(run, grads, strict=True):
                high, of_weight = low + grad.meta["val"].shape[1], _parts(node).get(1)
                if of_weight is not None:
                    part = _add(graph, aten.slice.Tensor, of_weights, 0, low, high)
                    _replace(graph, of_weight, part)
                low = high
        first, *others = sums
        for other in others:
            first = _add(graph, aten.add.Tensor, first, other)
        total.replace_all_uses_with(first)
    _erase_unused(graph, total)
    return True


def _erase_unused(graph: Graph, node: Node) -> None:
    """Erase a node without users, and its inputs that then have no users, up to our operators."""
    sources = node.all_input_nodes
    graph.erase_node(node)
    if node.target is not ops.fp8_linear_backward.default:
        for source in sources:
            if not source.users:
                _erase_unused(graph, source)


# ---------------------------------------------------------------------------------------- SwiGLU

CURVES = (aten.silu.default, aten.sigmoid.default, aten.exp.default)
CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)


def _base(node: Node, targets: Sequence[Any] = VIEWS) -> Node:
    """The first node before ``node`` that is no view (or none of ``targets``)."""
    while isinstance(node, torch.fx.Node) and node.target in targets:
        node = node.args[0]
    return node


def _matrix(node: Node) -> Node | None:
    """The matrix [tokens, features] of which ``node`` is a view or a cast, if it is in memory and a
    kernel can read it."""
    node = _base(node, (*VIEWS, *CASTS))
    stored = node.op == "placeholder" or node.target in (
        operator.getitem, aten.slice.Tensor, ops.fp8_product.default,
    )  # fmt: skip
    value = node.meta.get("val")
    fits = isinstance(value, torch.Tensor) and value.dim() == 2 and value.dtype == torch.bfloat16
    if not stored or not fits or value.stride(1) != 1 or value.shape[1] % 128:
        return None
    return node


def _inputs_of(node: Node, name: str) -> list[Node]:
    """The inputs of the function ``name`` (silu or silu_backward), if ``node`` is its result; else
    an empty list.

    torch.compile replaces the function by simpler functions, some of them shared by both. Each
    keeps the name of its original (the name, because a copied graph has a copy of the function).
    """
    inside: set[Node] = set()
    inputs: dict[Node, None] = {}  # an ordered set
    todo = [_base(node)]
    if _original(todo[0]) != name:
        return []
    while todo:
        current = todo.pop()
        if _original(current) in ("silu", "silu_backward"):
            todo += [source for source in current.all_input_nodes if source not in inside]
            inside.add(current)
        else:
            inputs[current] = None
    # Only one curve: silu(silu(x)) would have two.
    return list(inputs) if sum(node.target in CURVES for node in inside) == 1 else []


def _original(node: Node) -> str:
    """The name of the function from which torch.compile made a node."""
    return str(node.meta.get("original_aten")).removeprefix("aten.").removesuffix(".default")


def _factors(node: Node) -> Sequence[tuple[Node, Node]]:
    """Both orders of the factors, if ``node`` is a product of two tensors; else nothing."""
    node = _base(node)
    two = len(node.args) == 2 and all(isinstance(arg, torch.fx.Node) for arg in node.args)
    return (node.args, node.args[::-1]) if node.target is aten.mul.Tensor and two else ()


def _gated(node: Node) -> tuple[Node, Node] | None:
    """(gate, up), if ``node`` is silu(gate) · up of matrices in memory."""
    for left, right in _factors(node):
        inputs = _inputs_of(left, "silu")
        gate, up = _matrix(inputs[0]) if len(inputs) == 1 else None, _matrix(right)
        if gate is not None and up is not None and _same_shape(gate, up):
            return gate, up
    return None


def _same_shape(first: Node, second: Node) -> bool:
    return first.meta["val"].shape == second.meta["val"].shape  # type: ignore[no-any-return]


def _fuse_source(node: Node) -> bool:
    """Let the operator compute x itself from the tensors that x is made of, if nothing else reads
    x."""
    (x,), *rest = node.args
    base = _base(x)
    if rest[2] != 128 or _outlives(base) or _uses(base) > 1:  # 128: turned in squares
        return False
    sources = _gated(base) or _normed(base) or _heads(base) or ()
    if not sources:
        return False
    shape = sources[0].meta["val"].shape
    features = shape[2] * shape[3] if len(sources) == 1 else shape[-1]
    if features != x.meta["val"].shape[1]:  # for example, a norm of parts of a token
        return False
    node.args = (list(sources), *rest)
    return True


def _heads(node: Node) -> tuple[Node] | None:
    """The heads [batch, tokens, heads, features], if ``node`` copies them in another order."""
    source = node.args[0] if node.target is aten.clone.default else None
    value = None if source is None else source.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or value.dtype != torch.bfloat16:
        return None
    whole = not value.shape[1] % 128 and not value.shape[3] % 128
    return (source,) if whole and value.stride(3) == 1 else None


def _normed(node: Node) -> tuple[Node, Node, Node] | None:
    """(h, a factor for each token, weight), if ``node`` is their product, computed in fp32."""
    if node.target not in CASTS or _dtype(node) != torch.bfloat16:
        return None
    for product, weight in _factors(node.args[0]):
        for left, factors in _factors(product):
            h, weight = _base(left, CASTS), _base(weight, CASTS)
            shape = h.meta["val"].shape
            dtypes = _dtype(h), _dtype(weight), _dtype(factors)
            if dtypes != (torch.bfloat16, torch.bfloat16, torch.float32) or shape[-1] % 128:
                continue  # 128: the kernel has no partial tiles
            expected = (*shape[:-1], 1), (shape[-1],)
            if (factors.meta["val"].shape, weight.meta["val"].shape) == expected:
                return h, factors, weight
    return None


def _dtype(node: Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _uses(node: Node) -> int:
    """The number of nodes that read a value or a view of the value."""
    return sum(_uses(user) if user.target in VIEWS else 1 for user in node.users)


def _fuse_swiglu_backward(node: Node) -> bool:
    """Let the operator compute the gradients of gate and up itself, if nothing else reads these."""
    grads, *rest = node.args
    if len(grads) != 2 or rest[1] is None or any(_uses(_base(grad)) > 1 for grad in grads):
        return False
    for gate_first in (True, False):
        sources = _gated_backward(*(grads if gate_first else grads[::-1]))
        if sources is not None:
            node.args = (sources, *rest, gate_first)
            return True
    return False


def _gated_backward(of_gate: Node, of_up: Node) -> list[Node] | None:
    """[dh, gate, up], if ``of_up`` is dh · silu(gate), and ``of_gate`` is dh · up times the
    gradient of silu at gate."""
    gate, dh = _gated(of_up) or (None, None)
    inputs = _inputs_of(of_gate, "silu_backward")
    others = [source for source in inputs if _matrix(source) is not gate]
    if gate is None or len(inputs) != 2 or len(others) != 1:
        return None
    for left, right in _factors(_base(others[0], (*VIEWS, *CASTS))):
        up = _matrix(right)
        if _matrix(left) is dh and up is not None and _same_shape(gate, up):
            return [dh, gate, up]
    return None
