# SPDX-License-Identifier: Apache-2.0
"""Layers that read the same x, as one product in graphs of torch.compile.

::

    forward     quantise(x), x · Wqᵀ, x · Wkᵀ, x · Wvᵀ   -->  quantise(x) · [Wq Wk Wv]ᵀ
    backward    dq · Wq + dk · Wk + dv · Wv              -->  [dq dk dv] · [Wq Wk Wv]
                dqᵀ · x, dkᵀ · x, dvᵀ · x                -->  [dq dk dv]ᵀ · x

Each line is one operator. Where x is silu(gate) · up, forward's is quantise(silu(gate) · up) · Wᵀ:
x is written as codes only. So are norms, h · factors · weight, and the heads of attention, side by
side; and in backward the gradients of gate and up, computed from x's.

That is fewer and larger products, and less work for the host, which may need more time for a step
than the device. It is done for weights whose codes lie one after another in the gathered memory;
their ``place`` says so when a graph is made, and operators ask again when it runs.
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
    """Let inductor change graphs, after what others have asked it to do there."""
    _install("joint_custom_post_pass", keep)
    _install("post_grad_custom_pre_pass", join)


def _install(place: str, change: Callable[[Graph], None]) -> None:
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    before: Any = getattr(config, place)

    class Change(CustomGraphPass):
        changes_fp8 = True

        def __call__(self, graph: Graph) -> None:
            for one in before if isinstance(before, (list, tuple)) else filter(None, [before]):
                one(graph)
            change(graph)

        def uuid(self) -> Any:
            mine = get_hash_for_files((__file__, str(Path(__file__).with_name("fp8_operators.py"))))
            if before is None:
                return mine
            theirs = before.uuid() if isinstance(before, CustomGraphPass) else None
            return theirs and (mine, theirs)  # None: nothing is cached, as without this

    if not getattr(before, "changes_fp8", False):
        setattr(config, place, Change())


def keep(graph: Graph) -> None:
    """Keep sums for backward whose norms are written as codes, and not their terms: forward writes
    them for the operator that norms, and backward would read the terms twice to add them again."""
    for node in graph.nodes:
        if node.target is ops.fp8_quantise.default:
            h, *_ = _normed(_base(node.args[0])) or (node,)
            if h.target is aten.add.Tensor:
                h.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def join(graph: Graph) -> None:
    """Join layers of ``graph``, of a forward or of a backward."""
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
    """Nodes whose weights lie one after another, by the argument number ``place``."""
    places = {node: tuple(map(int, str(node.args[place]).split())) for node in nodes}
    runs: list[list[Node]] = []
    ends = None
    for node in sorted(nodes, key=places.__getitem__):
        buffer, start, size = places[node]
        if ends != (buffer, start):
            runs.append([])
        runs[-1].append(node)
        ends = buffer, start + size
    return runs


def _kept(nodes: Sequence[Node], kept: bool) -> list[Node]:
    """The nodes whose values outlive the graph (``kept``), or the others. One tensor for both kinds
    would keep the memory of the others, too."""
    return [node for node in nodes if kept == _outlives(node)]


def _outlives(node: Node) -> bool:
    views = (user for user in node.users if user.target in (*VIEWS, *SHAPES))
    return any(user.op == "output" for user in node.users) or any(map(_outlives, views))


def _add(graph: Graph, target: Any, *args: Any) -> Node:
    """A new node, which knows its shapes."""
    node = graph.call_function(target, args)
    known = torch.fx.node.map_arg(args, lambda each: each.meta["val"])
    node.meta["val"] = target(*known)
    return node


def _parts(node: Node) -> dict[int, Node]:
    """The nodes that take one result each of a node of several."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}


def _replace(graph: Graph, old: Node, new: Node) -> None:
    old.replace_all_uses_with(new)
    graph.erase_node(old)


def _join_products(graph: Graph, quantise: Node) -> bool:
    """One operator for a tensor that is quantised and all its products."""
    x, rows, turned, rounding = quantise.args
    parts = _parts(quantise)
    products = list(parts[0].users) if 0 in parts else []
    alike = {(node.target, *node.args[:2], *node.args[3:6]) for node in products}
    if not rows or len(alike) != 1 or 1 not in parts or set(parts[1].users) != set(products):
        return False
    target, codes, scales, bias, phase, dtype = alike.pop()
    if target is not ops.fp8_product.default or (codes, scales, bias, phase) != (
        parts[0], parts[1], None, "forward",
    ):  # fmt: skip
        return False
    runs = [run for each in (True, False) for run in _runs(_kept(products, each), 6)]
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
                whole = len(run) == 1
                mine = result if whole else _add(graph, aten.slice.Tensor, result, 1, low, high)
                _replace(graph, node, mine)
                low = high
    for index, part in parts.items():
        if index < 2:
            graph.erase_node(part)
        else:
            _replace(graph, part, results[index - 2])
    graph.erase_node(quantise)
    return True


def _sums_of_gradients(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Sums of nothing but gradients of one x, each of another layer, and their terms."""
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
    return {node: found for node, found in terms.items() if len(found) > 1}


def _join_gradients(graph: Graph, total: Node, terms: Sequence[Node]) -> bool:
    """One operator for the gradients of layers that read the same x."""
    runs = _runs(terms, 7)
    if len({node.args[2:7] for node in terms}) > 1 or len(runs) == len(terms):
        return False
    term = total.args[0]
    while term.target is aten.add.Tensor:
        term = term.args[0]
    sums = []
    with graph.inserting_before(total):
        for run in runs:
            grads, parameters = ([each for node in run for each in node.args[i]] for i in (0, 1))
            joined = _add(
                graph, ops.fp8_linear_backward.default, grads, parameters, *run[0].args[2:]
            )
            of_x, of_weights = (_add(graph, operator.getitem, joined, index) for index in range(2))
            # A size that changes from batch to batch is a node, so a view is copied.
            viewed = _add(graph, term.target, of_x, term.args[1]) if term.target in VIEWS else of_x
            sums.append(viewed)
            low = 0
            for node, grad in zip(run, grads, strict=True):
                high, part = low + grad.meta["val"].shape[1], _parts(node).get(1)
                if part is not None:
                    mine = _add(graph, aten.slice.Tensor, of_weights, 0, low, high)
                    _replace(graph, part, mine)
                low = high
        first, *others = sums
        for other in others:
            first = _add(graph, aten.add.Tensor, first, other)
        total.replace_all_uses_with(first)
    _erase_unused(graph, total)
    return True


def _erase_unused(graph: Graph, node: Node) -> None:
    """Erase a node that nobody reads, and what only it read, up to the operators."""
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
    """The node of which this one is a view (or also a cast)."""
    while isinstance(node, torch.fx.Node) and node.target in targets:
        node = node.args[0]
    return node


def _matrix(node: Node) -> Node | None:
    """The matrix [tokens, features] in memory of which ``node`` is a view in its dtype or wider."""
    node = _base(node, (*VIEWS, *CASTS))
    stored = node.op == "placeholder" or node.target in (
        operator.getitem, aten.slice.Tensor, ops.fp8_product.default,
    )  # fmt: skip
    value = node.meta.get("val")
    fits = isinstance(value, torch.Tensor) and value.dim() == 2 and value.dtype == torch.bfloat16
    if not stored or not fits or value.stride(1) != 1 or value.shape[1] % 128:
        return None
    return node


def _below(node: Node, name: str) -> list[Node]:
    """The inputs, where ``node`` is ``name``, silu or silu_backward: torch.compile wrote other
    functions in its place, which both may share, and each of them says so, by a name (a graph that
    was copied holds a copy of the function)."""
    inside: set[Node] = set()
    outside: dict[Node, None] = {}
    todo = [_base(node)]
    if _original(todo[0]) != name:
        return []
    while todo:
        one = todo.pop()
        if _original(one) in ("silu", "silu_backward"):
            todo += [each for each in one.all_input_nodes if each not in inside]
            inside.add(one)
        else:
            outside[one] = None
    # One curve: silu(silu(x)) looks alike.
    return list(outside) if sum(one.target in CURVES for one in inside) == 1 else []


def _original(node: Node) -> str:
    return str(node.meta.get("original_aten")).removeprefix("aten.").removesuffix(".default")


def _factors(node: Node) -> Sequence[tuple[Node, Node]]:
    """Both orders of the factors of a product of two tensors."""
    node = _base(node)
    two = len(node.args) == 2 and all(isinstance(each, torch.fx.Node) for each in node.args)
    return (node.args, node.args[::-1]) if node.target is aten.mul.Tensor and two else ()


def _gated(node: Node) -> tuple[Node, Node] | None:
    """Gate and up, where ``node`` is silu(gate) · up of matrices that lie in memory."""
    for left, right in _factors(node):
        below = _below(left, "silu")
        gate, up = _matrix(below[0]) if len(below) == 1 else None, _matrix(right)
        if gate is not None and up is not None and _alike(gate, up):
            return gate, up
    return None


def _alike(first: Node, second: Node) -> bool:
    return first.meta["val"].shape == second.meta["val"].shape  # type: ignore[no-any-return]


def _fuse_source(node: Node) -> bool:
    """Let the operator read what x is made of, where nobody else reads x."""
    (x,), *rest = node.args
    base = _base(x)
    if rest[2] != 128 or _outlives(base) or _uses(base) > 1:  # 128: turned in squares
        return False
    found = _gated(base) or _normed(base) or _heads(base) or ()
    shapes = [each.meta["val"].shape for each in found]
    wide = [shape[2] * shape[3] if len(found) == 1 else shape[-1] for shape in shapes]
    if not found or wide[0] != x.meta["val"].shape[1]:  # norms of parts of a token, for one
        return False
    node.args = (list(found), *rest)
    return True


def _heads(node: Node) -> tuple[Node] | None:
    """The heads [batch, tokens, heads, features] of which ``node`` is a copy, in another order."""
    source = node.args[0] if node.target is aten.clone.default else None
    value = None if source is None else source.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or value.dtype != torch.bfloat16:
        return None
    whole = not value.shape[1] % 128 and not value.shape[3] % 128
    return (source,) if whole and value.stride(3) == 1 else None


def _normed(node: Node) -> tuple[Node, Node, Node] | None:
    """h, a factor for each token and weight, where ``node`` is their product, computed in fp32."""
    if node.target not in CASTS or _dtype(node) != torch.bfloat16:
        return None
    for product, weight in _factors(node.args[0]):
        for left, factors in _factors(product):
            h, weight = _base(left, CASTS), _base(weight, CASTS)
            shape = h.meta["val"].shape
            fits = (
                _dtype(h) == _dtype(weight) == torch.bfloat16 and _dtype(factors) == torch.float32
            )
            fits = fits and not shape[-1] % 128  # the kernel has no partial tiles
            wanted = (*shape[:-1], 1), (shape[-1],)
            if fits and (factors.meta["val"].shape, weight.meta["val"].shape) == wanted:
                return h, factors, weight
    return None


def _dtype(node: Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _uses(node: Node) -> int:
    """How many nodes read a value, or a view of it."""
    return sum(_uses(user) if user.target in VIEWS else 1 for user in node.users)


def _fuse_swiglu_backward(node: Node) -> bool:
    grads, *rest = node.args
    if len(grads) != 2 or rest[1] is None or any(_uses(_base(grad)) > 1 for grad in grads):
        return False
    for gate_first in (True, False):
        found = _gated_backward(*(grads if gate_first else grads[::-1]))
        if found is not None:
            node.args = (found, *rest, gate_first)
            return True
    return False


def _gated_backward(of_gate: Node, of_up: Node) -> list[Node] | None:
    """dh, gate and up, where ``of_up`` is dh · silu(gate) and ``of_gate`` the gradient of silu at
    gate, times dh · up."""
    gate, dh = _gated(of_up) or (None, None)
    sources = _below(of_gate, "silu_backward")
    others = [each for each in sources if _matrix(each) is not gate]
    if gate is None or len(sources) != 2 or len(others) != 1:
        return None
    for left, right in _factors(_base(others[0], (*VIEWS, *CASTS))):
        up = _matrix(right)
        if _matrix(left) is dh and up is not None and _alike(gate, up):
            return [dh, gate, up]
    return None
