# SPDX-License-Identifier: Apache-2.0
"""Unit: what one call wrapped, gathered and released together, and its way through a step.

    forward      pre_forward    gather, show whole weights to the modules, prefetch who comes next
                 post_forward   release (or keep), watch the gradients of the outputs
    backward     before  -->  inside  -->  behind      one pass of autograd
                 enter          the first gradient of an output: gather, prefetch, count what comes
                 leave          a gate: the call is over
                 advance        no call is open and no gradient is missing: release the weights
                                first, then reduce the groups, in their order
    end          what is left (calls without a gate, parameters without a gradient) is completed

In a backward each group is reduced in its turn, the same order on every rank. Weights that stay
(``zero(0)`` to ``zero(2)``, buckets) let a group reduce as soon as its own gradients have come and
the groups before it are through.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from shardwise.core import comm
from shardwise.core.compat import inside_backward
from shardwise.core.memory import weakly
from shardwise.core.streams import annotate
from shardwise.precision import Precision
from shardwise.precision.policy import Stored
from shardwise.shard.call import Call, cast_floats
from shardwise.shard.flow import SharedLanes
from shardwise.shard.group import Group
from shardwise.shard.model import Model
from shardwise.words import quoted

# (the parameter dictionary of a module, name in it, group, index). The dictionary, not the module,
# so that no place keeps a model alive. Tied parameters have several places.
Place = tuple[dict[str, Any], str, int, int]


class Unit:
    """The state behind one ``fully_shard`` or ``data_parallel``."""

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        groups: Sequence[Group],
        places: Sequence[Place],
        *,
        precision: Precision,
        release_after_forward: bool | None = None,
        kept_axis: comm.Axis | None = None,
        unused: str = "none",
        options: dict[str, Any] | None = None,
        waits: bool = True,
    ) -> None:
        """``release_after_forward``: None for all units but the root. ``waits``: whether the first
        module waits for all groups; False: each module waits for its own."""
        self.name, self.precision = name, precision
        self.modules = [weakref.ref(module) for module in modules]
        self.groups, self.places = list(groups), list(places)
        self.places_of: list[list[tuple[dict[str, Any], str, int]]] = [[] for _ in groups]
        for parameters, local, number, index in places:
            self.places_of[number].append((parameters, local, index))
        self.release_after_forward, self.kept_axis = release_after_forward, kept_axis
        self.release_after_backward = self.gather_in_backward = True
        self.sync = self.last = self.reduce_outer = True
        self.unused, self.options, self.waits = unused, options or {}, waits
        self.forward_prefetch: list[weakref.ref[Unit]] | None = None  # None: by the order of before
        self.backward_prefetch: list[weakref.ref[Unit]] | None = None
        self.stored: dict[tuple[int, int], Stored] = {}  # for reports
        self.verb = ""  # the call that made this unit
        self.model: Model | None = None
        self.moved: set[int] = set()  # the modules of a list that ``.to()`` and the like have moved
        self._comm_ctx = SharedLanes()  # torch's name: its ``share_comm_ctx`` sets it
        self.shown = False  # whether the modules hold whole weights
        self.shown_again = False  # whether they will again, after the state dict that is made now
        self.calls: list[Call] = []  # the forwards that run now
        self.ran: set[int] = set()  # the modules that ran since the weights were gathered
        self.open: set[Call] = set()  # the calls that backward has entered and not left
        self.backward: Literal["before", "inside", "behind"] = "before"
        self.turn = len(groups)  # the first group that this backward has not reduced
        # Who ran after this unit the last time, and who was through before it. Unlike positions in
        # a list this forgives calls that come or stay away.
        self.follower: weakref.ref[Unit] | None = None
        self.predecessor: weakref.ref[Unit] | None = None
        self.connect()

    def connect(self) -> None:
        """Listen to the groups, whose buffers may be new after a move."""
        for group in self.groups:
            group.gradients.arrived = weakly(self.arrived)
            group.main.before_step = weakly(self.hide_at_rest)

    @property
    def runtime(self) -> Model:
        assert self.model is not None, "the root's first forward makes the model"
        return self.model

    @property
    def is_root(self) -> bool:
        return self.model is not None and self.model.root is self

    @property
    def writes(self) -> list[int]:
        return [group.writes for group in self.groups]

    # ------------------------------------------------------------------ forward

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        model = self.model or Model.start(self, module)
        again = inside_backward()  # a checkpoint runs this forward once more
        if model.in_backward and not again:
            raise RuntimeError(
                "the last backward raised an exception, and left a part of its gradients: call "
                "reset_iter_state() on the root module"
            )
        if not again and not self.calls:
            model.lanes.refuse_capture(f"forward of '{self.name}'")
            if self.is_root and not self.ran:
                model.begin_forward()
            elif not model.in_forward:
                self.tidy()  # the unit is called by itself; the root tidies all units
        with annotate(self.name, "gather for forward"):
            self.expose(self.waits)
            if not again:
                model.entered(self)
        call = Call(self, self.writes)
        self.calls.append(call)
        args, kwargs = cast_floats((args, kwargs), self.precision.input_dtype)
        recorded = torch.is_grad_enabled() and bool(self.groups)
        return call.pass_inputs(args, kwargs) if recorded else (args, kwargs)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        call = self.calls.pop() if self.calls else None
        if call is not None and torch.is_grad_enabled() and self.groups:
            call.watch(output)
        if not inside_backward():
            model = self.runtime
            model.left(self)
            self.ran.add(id(module))
            if len(self.ran) == len(self.modules) and not self.calls:
                self.end_forward()
            if self.is_root and not self.calls and not self.ran:
                model.end_forward()
        return cast_floats(output, self.precision.output_dtype)

    def end_forward(self) -> None:
        """All modules have run (or the root's forward is over, and some have): put weights away."""
        self.ran.clear()
        if not self.waits:
            self.wait_for(range(len(self.groups)))  # also for those that no module has waited for
        with annotate(self.name, "release after forward"):
            if self.releases_after_forward:
                self.put_away(part=torch.is_grad_enabled())
            elif not torch.is_grad_enabled() or not any(g.comes_and_goes for g in self.groups):
                self.hide()  # after an evaluation users write to parameters and build optimizers

    @property
    def releases_after_forward(self) -> bool:
        if self.release_after_forward is None:
            return not self.is_root
        return self.release_after_forward

    def tidy(self) -> None:
        """Before a forward: forget calls that an exception has ended, follow ``requires_grad_``."""
        self.calls.clear()
        self.ran.clear()
        if self.moved:
            raise RuntimeError(
                f"some modules of unit '{self.name}' were moved (.to(), .half(), to_empty()) and "
                f"others were not: their parameters share a buffer. Move all of them"
            )
        late = [g.gradients.name(i) for g in self.groups for i in sorted(g.gradients.delayed)]
        if late:
            raise RuntimeError(
                f"the weight gradients of {quoted(late)} of unit '{self.name}' are still to be "
                f"computed: call backward_dw() before the next forward"
            )
        for group in self.groups:
            if group.is_moved and not group.without_values:
                group.adopt()
                self.connect()
            group.follow_trainability()

    # ------------------------------------------------------------------ whole weights

    def gather(self) -> None:
        """Begin to gather. Buckets are listed in the order of backward, so the last comes first."""
        for group in reversed(self.groups):
            group.gather(self.runtime)

    def wait(self) -> None:
        for group in self.groups:
            group.wait(self.runtime)

    def wait_for(self, numbers: Iterable[int], *_: Any) -> None:
        """A module that reads these groups runs next (``overlap_gather``)."""
        for number in numbers if self.model is not None else ():
            if self.groups[number].pending:
                self.groups[number].wait(self.runtime)
                self._show(number)

    def expose(self, wait: bool = True) -> None:
        """Let the modules see whole weights. Without ``wait`` each module waits for its own."""
        self.gather()
        if wait:
            self.wait()
        self.show()

    def show(self) -> None:
        """Show what has come; :meth:`wait_for` shows the rest."""
        if not self.shown:
            self.shown = True
            for number, group in enumerate(self.groups):
                if not group.pending:
                    self._show(number)

    def _show(self, number: int) -> None:
        leaves = self.groups[number].unsharded
        for parameters, name, index in self.places_of[number]:
            parameters[name] = leaves[index]

    def hide(self) -> None:
        """Let the modules hold the parameters at rest; whether each trains is carried over."""
        if self.shown:
            self.shown = False
            for group in self.groups:
                group.follow_trainability()
            for parameters, name, number, index in self.places:
                parameters[name] = self.groups[number].sharded[index]

    def hide_at_rest(self) -> None:
        """The same, unless a forward or a backward runs that needs whole weights."""
        if not self.calls and not (self.model is not None and self.model.in_backward):
            self.hide()

    def put_away(self, release: bool = True, part: bool = False) -> None:
        """Hide the whole weights and give their memory back. ``part``: each of k ranks may keep
        1/k for a backward."""
        self.ran.clear()
        self.hide()
        if self.model is None:
            return
        for group in self.groups:
            if part and self.kept_axis is not None:
                group.keep_part(self.model, self.kept_axis)
            if release:
                group.release(self.model)

    def take_assigned(self) -> None:
        """Take over values that ``load_state_dict(assign=True)`` put in place of parameters."""
        for parameters, name, number, index in self.places:
            value, sharded = parameters.get(name), self.groups[number].sharded[index]
            if value is not None and value is not sharded:
                parameters[name] = sharded
                self.groups[number].assign(index, value)
        self.connect()

    # ------------------------------------------------------------------ backward

    def enter(self, call: Call) -> None:
        """The gradient of an output has come."""
        model = self.runtime
        model.begin_backward()
        if call.writes != self.writes:
            raise RuntimeError(
                f"the weights of unit '{self.name}' were written (by an optimizer, a load, an "
                f"operation) between a forward and its backward, which would read other weights: "
                f"write before forward or after backward"
            )
        self.begin_gradients()
        if self.backward != "inside":  # behind: one more call of a unit that seemed complete
            self.backward = "inside"
            if self.gather_in_backward:
                with annotate(self.name, "gather for backward"):
                    self.expose()
                    model.prefetch_before(self)
        self.open.add(call)

    def begin_gradients(self) -> None:
        """Backward has come to this unit: count the gradients that it will bring."""
        if self.backward == "before":
            self.turn = 0
            for group in self.groups:
                group.follow_trainability()
                group.gradients.begin(self.sync, self.last and self.reduce_outer, self.unused)
        elif self.runtime.is_nested:  # a reentrant checkpoint: the graph inside was not known
            for group in self.groups:
                group.gradients.expect()

    def leave(self, call: Call) -> None:
        """Autograd has computed the gradients of the inputs of a call."""
        self.open.discard(call)
        self.advance()

    def arrived(self) -> None:
        """The gradient of a parameter has come."""
        if self.model is not None:
            self.model.for_inputs = False
        self.advance()

    def advance(self, force: bool = False) -> None:
        """Go on as far as the gradients allow."""
        if self.backward == "before" and not force:
            self._refuse_released()
            return
        groups = self.groups
        if self.backward == "inside":
            missing = sum(group.gradients.missing_elements for group in groups)
            if 0 < missing <= max(group.gradients.one_more for group in groups):
                # The weights of two units, the gradients of this one and the packed gradients of
                # the one before take the memory of four units: free these before the last comes.
                self.runtime.finish_issued()
            if force or not (self.open or missing):
                self.backward = "behind"
                self.open.clear()
                self.put_away(self.release_after_backward)
        self.runtime.reduce_in_order(self)
        if not inside_backward():
            self.runtime.end_reductions()  # the last delayed gradient has come

    def reduce_groups(self) -> bool:
        """Reduce the groups whose turn has come; return whether none is left in this backward."""
        while self.turn < len(self.groups) and not self.runtime.for_inputs:
            group = self.groups[self.turn]
            gradients = group.gradients
            # What else comes is not known inside of a reentrant checkpoint.
            stays = not (group.comes_and_goes or gradients.missing or gradients.late)
            stays = stays and not self.runtime.is_nested
            if gradients.delayed or not (self.backward == "behind" or stays):
                return False
            self.turn += 1
            if group.trainable or gradients.pending:
                with annotate(self.name, "reduce gradients"):
                    gradients.reduce(self.runtime)
        return self.backward != "before"

    def _refuse_released(self) -> None:
        """A gradient has come before any gradient of an output: the parameter was used outside of
        forward, after ``unshard()``. It is reduced at the end of this backward."""
        if self.model is None or not inside_backward():
            return
        self.model.begin_backward()
        gone = [g for g in self.groups if g.whole is not None and not g.whole.live]
        if gone:
            raise RuntimeError(
                f"a gradient reached parameters of unit '{self.name}' while their weights are "
                f"released, and not through the outputs of its forward: use parameters inside the "
                f"module's forward, or between unshard() and backward, or wrap the module with "
                f"reshard_after_forward=False"
            )

    def reset(self) -> None:
        """Forget a forward or a backward that was left by an exception, with its gradients."""
        self.calls.clear()
        self.open.clear()
        self.backward, self.turn = "before", len(self.groups)
        self.put_away()
        for group in self.groups:
            group.gradients.forget(under_way=False)
            for parameter in group.sharded:
                parameter.grad = None

    # ------------------------------------------------------------------ torch's names

    # Torch's ``register_fsdp_forward_method``, ``share_comm_ctx`` and pipeline stages use these
    # names. The tuple is empty, so torch does nothing for groups of parameters.
    _fsdp_param_groups: tuple[()] = ()
    _fsdp_param_group: None = None  # torch 2.11 had one

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self.pre_forward(module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.post_forward(module, output)

    @property
    def _state_ctx(self) -> Model:
        return self.runtime

    def _root_post_backward_final_callback(self) -> None:
        """A pipeline schedule ends a step."""
        self.runtime.reduce_waiting()
