# SPDX-License-Identifier: Apache-2.0
"""Unit: the parameters that are gathered and released together, as a machine of five facts.

phase           where the modules stand: RESTING, FORWARD, BACKWARD
calls           the forwards of the unit, each running, awaited, open or done (``call.py``)
missing         the gradients that this backward has not brought yet (``arrivals.py``)
delayed         the missing gradients that are computed later, perhaps after this backward
progress        what this backward has done for the unit: UNTOUCHED, GATHERED, PASSED, DONE

This table lists all that an event may do. ``=`` means that the fact stays.
tests/contract/test_machine.py drives random programs and finds no other step.

    event           phase                   progress
    pre_forward     resting > forward       =
    pre_forward     forward = forward       =                       a list of modules, or recursion
    pre_forward     backward = backward     =                       a recomputation
    post_forward    forward > resting       =                       no call runs: weights released
    post_forward    forward = forward       =                       more calls of the unit run
    post_forward    backward = backward     =
    end_forward     any > resting           =                       a list that ran in part
    prefetch        any = any               untouched > gathered
    prefetch        any = any               =
    pre_backward    any > backward          untouched > gathered
    pre_backward    any > backward          =
    arrived         any > backward          =                       more gradients are missing
    arrived         backward > resting      any > done              the last: release, then reduce
    inputs_done     any = any               =
    inputs_done     backward > resting      any > done              the last: release, then reduce
    pass_by         any = any               =                       nothing to do for it
    pass_by         resting = resting       any > passed            gathers, as other ranks do
    pass_by         resting = resting       any > done              and reduces zeros
    end_backward    backward > resting      any > done
    end_backward    backward = backward     =                       waits for delayed gradients
    end_backward    any > resting           =
    end_backward    forward = forward       =                       it was inside that forward
    release_unused  any = any               any > untouched         the backward is over
    rest            any > resting           =                       reshard(), or an exception

A unit is complete in backward when no gradient is missing *and* no call is open. The first
condition alone would hold too early where weights are frozen, the second where inputs need no
gradient.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.memory import weakly
from shardwise.precision.fp8_tensor import Reads
from shardwise.shard.arrivals import Arrivals, Key
from shardwise.shard.call import Call, Calls, reads_on, recomputes_inside, will_come
from shardwise.shard.containers import cast_floats
from shardwise.shard.flow import in_checkpoint, in_recomputation
from shardwise.shard.members import (
    refuse,
    refuse_create_graph,
    refuse_generator,
    refuse_side_way,
    refuse_transforms,
    refuse_written,
)
from shardwise.shard.runtime import Runtime
from shardwise.shard.wrapped import Wrapped
from shardwise.streams import annotate


class Phase(enum.Enum):
    RESTING = "resting"
    FORWARD = "forward"
    BACKWARD = "backward"


class Progress(enum.Enum):
    """The work of the running backward for one unit."""

    UNTOUCHED = "untouched"
    GATHERED = "gathered"  # the weights are gathered, or a prefetch of them has begun
    PASSED = "passed"  # this rank skips a call of the unit; another rank may have entered the call
    DONE = "done"  # the weights are released; the gradients are reduced when their turn comes


class Unit(Wrapped):
    """The state behind one ``fully_shard`` call: the wrapped modules, and how far a step is."""

    foresees = True  # whether autograd knows the gradients that come; not in a plan's sketch

    def __init__(self, *wrapped: Any, **settings: Any) -> None:
        super().__init__(*wrapped, **settings)
        self.phase, self.progress = Phase.RESTING, Progress.UNTOUCHED
        self.calls = Calls(self.modules)
        self.arrivals = Arrivals(self.groups)
        self.rebind()

    def rebind(self) -> None:
        """Connect to the buffers of the groups, which may be new after ``module.to(...)``."""
        for number, group in enumerate(self.groups):
            group.gradients.on_written = weakly(self.written, number)
            group.gradients.on_delayed = weakly(self.arrivals.delay, number)
            if self.early:
                group.main.version.on_stepped = weakly(self.gather_early, number)
        if self._runtime is not None:
            self.adopt_runtime(self._runtime)
        self.arrivals.listen(self.arrived)

    # ------------------------------------------------------------------ gradients arriving

    def arrived(self, key: Key, leaf: Tensor | None = None) -> None:
        """Autograd has brought the gradient of one parameter, complete for this backward."""
        if self.phase is not Phase.BACKWARD:
            # No gradient of an output came before: the parameter was used outside of forward.
            refuse_side_way(self)
            self._enter_backward()
        arrivals = self.arrivals
        # For a delayed gradient, autograd reports only the other uses of the parameter. The kernel
        # reports its own part through ``written``.
        if getattr(leaf, "delayed", False) or not arrivals.arrive(key):
            return
        if 0 < arrivals.elements <= arrivals.one_more:
            # The weights of two units, the gradients of this unit and the packed gradients of the
            # unit before take the memory of four units. Free the packed gradients before the last
            # gradient comes.
            self.runtime.finish_issued()
        self.group_arrived(key[0])
        if not arrivals.missing and not self.calls.open:
            self._complete()

    def group_arrived(self, number: int) -> None:
        """One more gradient of a group has come. For units that reduce each group by itself."""

    def written(self, number: int, index: int) -> None:
        """A kernel has added to the gradient of one parameter by itself. A hook of autograd reports
        when all uses of the parameter have contributed. No hook reports a delayed gradient, whose
        kernel no longer reads the weight, so a delayed gradient counts as arrived here."""
        if self.phase is not Phase.BACKWARD:
            self._enter_backward()
        if (number, index) in self.arrivals.delayed:
            self.arrived((number, index))

    @property
    def waits_for_delayed(self) -> bool:
        """Whether nothing but delayed gradients keeps this unit in backward."""
        missing, delayed = self.arrivals.missing, self.arrivals.delayed
        return 0 < len(missing) == len(delayed) and not self.calls.open

    def inputs_done(self, call: Call) -> None:
        """Autograd has computed the gradients of the inputs of one call."""
        self.calls.leave(call)
        if self.phase is Phase.BACKWARD and not self.arrivals.missing and not self.calls.open:
            self._complete()

    # ------------------------------------------------------------------ phases

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self._runtime is None:
            Runtime.start(self, module)
        return self.pre_forward(args, kwargs)

    def adopt_runtime(self, runtime: Runtime) -> None:
        super().adopt_runtime(runtime)
        for group in self.groups:
            group.main.version.unanswered = weakly(runtime.is_unanswered, self.calls)
            group.main.version.failed = weakly(runtime.has_failed)
            group.main.version.before_step = weakly(self.before_step)

    def pre_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Gather the weights, cast the inputs, and put a gate on the gradients of the inputs."""
        runtime = self.runtime
        runtime.lanes.refuse_capture(f"forward of '{self.name}'")
        refuse_transforms(self)
        recomputing = runtime.in_backward
        if not recomputing:
            self._recover()
        with annotate(self.name, "gather for forward"):
            if not recomputing and self.is_root:
                runtime.begin_forward()
            elif not recomputing and not runtime.in_forward:
                self.tidy()  # this unit is called by itself; the root tidies all units
            if self.phase is not Phase.BACKWARD:
                self.phase = Phase.FORWARD
            self.expose("forward")
            if not recomputing:
                self._prefetch(runtime.order.entered(self), self.forward_prefetch)
        recorded = torch.is_grad_enabled() and not (recomputing and in_recomputation())
        call = Call(self, self.versions, recorded, 0 if recomputing else runtime.forward)
        self.calls.begin(call)
        if recorded and not recomputing and in_checkpoint():
            for group in self.groups:
                group.reads_again = True
        args, kwargs = cast_floats((args, kwargs), self.precision.input_dtype, call.swaps)
        return call.pass_inputs(args, kwargs) if recorded and self.groups else (args, kwargs)

    def _recover(self) -> None:
        """Recover if an exception, or an interrupt by the user, ended a forward or a backward."""
        if self.runtime.has_failed():
            self.runtime.recover()
        elif not self.calls.running:
            return
        for unit in self.runtime.units:
            unit.drop_dead_calls(entering=unit is self)

    def drop_dead_calls(self, entering: bool) -> None:
        """Forget the calls that an exception ended. ``entering``: the stack has one call more,
        which begins or ends just now."""
        if self.calls.drop_dead(entering):
            self.calls.forget({self.runtime.forward})
            self._rest()  # writes to whole weights are dropped with the forward that failed

    def tidy(self) -> None:
        """Prepare for a forward: follow ``.to()`` and ``requires_grad_``, and free the memory of
        gradients that the user dropped."""
        self.follow_moves()
        self.refuse_changes()
        self.members.refuse_added(self)
        self.hide_at_rest()
        self.arrivals.refuse_delayed(self.name)
        for group in self.groups:
            group.follow_trainability()
            group.gradients.tidy()
            group.reads_again = group.reads_again and self.expects_backward
            for leaf in group.unsharded:
                leaf.delayed = leaf.delayed and self.expects_backward
        self.arrivals.listen(self.arrived)

    def post_forward(self, output: Any) -> Any:
        """Release the weights unless they are to be kept, and watch the gradients of outputs."""
        refuse_generator(self, output)
        call, runtime = self.calls.end(), self.runtime
        if not runtime.in_backward:
            runtime.order.left(self)
        awaited = call is not None and call.recorded and self._watch(call, output)
        if self.phase is Phase.FORWARD and self.calls.finished and not runtime.in_backward:
            self._end_forward(awaited)
            if self.is_root:
                runtime.end_forward()
        if call is not None and awaited:
            self.calls.wait_for(call)
        return cast_floats(output, self.precision.output_dtype)

    def _watch(self, call: Call, output: Any) -> bool:
        """Hook ``pre_backward`` to the gradients of the outputs, and of tensors that a module
        keeps. Returns whether a gradient can come."""
        try:
            return call.watch_outputs(output, self.members.side_outputs())
        except TypeError as error:
            if any(group.comes_and_goes for group in self.groups):
                raise TypeError(f"unit '{self.name}': {error}") from None
            return False

    def _end_forward(self, kept: bool) -> None:
        self.refuse_changes()
        lost = self.lost_writes()
        with annotate(self.name, "release after forward"):
            if self.releases_after_forward:
                self.hide()
                self.release_until_backward(kept)
            elif not kept or not any(group.comes_and_goes for group in self.groups):
                self.hide()  # after an evaluation, users write to parameters and build optimizers
        self.phase = Phase.RESTING
        refuse(lost)

    def end_forward(self) -> None:
        """The forward of the root is over. A list of modules of which only some ran goes to rest
        too, and so does a unit that raised an exception which the model has caught."""
        if self.phase is Phase.FORWARD:
            self.calls.stop()
            self._end_forward(torch.is_grad_enabled())

    def pre_backward(self, call: Call) -> None:
        """The first gradient of an output has come: gather the weights for backward."""
        first = call.enters()
        if first and self.gather_in_backward and call.weights != self.versions:
            refuse_written(self, call.weights)
        self.runtime.walked.add(call.forward)
        if self.phase is not Phase.BACKWARD:
            self._enter_backward()
        if first:
            self.calls.enter(call, stays=not call.gated and reads_on(self))

    def _enter_backward(self) -> None:
        self.refuse_changes()
        if self.shows_at_rest:  # the modules have held whole weights since the forward
            refuse(self.lost_writes())
            self.take_trainability()
        runtime = self.runtime
        runtime.begin_backward()
        if self.unused == "zeros":
            for unit in runtime.order.before(self):
                unit.pass_by()
        if torch.is_grad_enabled() and self.release_after_backward:
            refuse_create_graph(self)
        self.phase = Phase.BACKWARD
        for group in self.groups:
            group.follow_trainability(will_come)
        self._expect_gradients(self._foresight())
        if self.gather_in_backward:
            with annotate(self.name, "gather for backward"):
                self.expose("backward")
                if self.progress is not Progress.PASSED:  # else ``pass_by`` has prefetched
                    self._prefetch_backward()
                if self.progress is Progress.UNTOUCHED:
                    self.progress = Progress.GATHERED

    def _foresight(self) -> Callable[[Tensor], bool] | None:
        """Which gradients to wait for. None means all: all will come, or this cannot be known, and
        the end of backward finds the gradients that have not come."""
        if self.runtime.for_inputs:
            return will_come
        self.arrivals.follow()
        if not self.foresees or will_come(*self.arrivals.leaves()):
            return None
        return None if recomputes_inside(self) else will_come

    def _prefetch_backward(self) -> None:
        after = self.runtime.order.after(self)
        if after is not None and not (after.expects_backward and after.gather_in_backward):
            after = None
        self._prefetch(after, self.backward_prefetch, "backward")

    def _expect_gradients(self, comes: Callable[[Tensor], bool] | None) -> None:
        """Prepare for the gradients of a backward. ``comes``: which gradients of trained parameters
        to wait for. None means all."""
        last, zeros = self.last and self.reduce_outer, self.unused == "zeros"
        for group in self.groups:
            unwanted = self.runtime.for_inputs
            group.gradients.begin(sync=self.sync, last=last, zeros=zeros, unwanted=unwanted)
        self.arrivals.expect(comes)

    def pass_by(self, ended: bool = False) -> None:
        """This rank skips the unit, or its backward has ended. Another rank may run the unit, so
        issue the same collectives in the same order, with zeros for gradients."""
        if self.unused != "zeros" or self.progress is Progress.DONE or not self.expects_backward:
            return
        if ended and self.phase is Phase.FORWARD and not self.calls.outside:
            refuse(self._rest())  # the unit was recomputed, and no gradient came after that
        if self.phase is not Phase.RESTING:
            return
        leaves = self.arrivals.leaves()
        comes = not ended and any(map(will_come, leaves))  # through another call of the unit
        if self.gather_in_backward and self.progress is not Progress.PASSED:
            if self.progress is Progress.UNTOUCHED:
                self.gather("backward")
            self._prefetch_backward()
            # If a gradient comes, keep the weights: other ranks are in the unit and keep theirs.
            if not comes and self.release_after_backward:
                refuse(self.put_away())
        self.progress = Progress.PASSED
        if leaves and not comes:
            self.calls.forget(self.runtime.walked)
            self.phase = Phase.BACKWARD
            self._expect_gradients(lambda leaf: False)
            self._complete()

    @property
    def expects_backward(self) -> bool:
        """Whether a forward of this unit waits for its backward. The same on every rank."""
        return bool(self.calls.awaited)

    def _complete(self) -> None:
        """Release the weights first, then reduce: the two never need memory at the same time."""
        lost = self.put_away(release=self.release_after_backward)
        # A checkpoint of torch stops a recomputation as soon as it has all tensors. The forward
        # that it recomputed never ends.
        self.calls.stop()
        self.phase = Phase.RESTING
        if self.runtime.in_backward:  # else a delayed gradient came after backward
            self.progress = Progress.DONE
        if self.arrivals.trainable and not self.runtime.for_inputs:
            self.runtime.order.ready(self)
        self.runtime.finish_late()
        refuse(lost)

    @property
    def holds_turn(self) -> bool:
        """Whether the units behind must wait with reducing: this unit is in backward, or may be on
        another rank."""
        if not self.arrivals.trainable:
            return False
        if self.phase is Phase.BACKWARD:
            return not self.waits_for_delayed
        return self.unused == "zeros" and self.expects_backward

    def end_backward(self) -> None:
        """Backward is over: complete the unit, unless delayed gradients are still to come."""
        if self.phase is Phase.FORWARD and not self.calls.outside:
            refuse(self.rest())  # the unit was recomputed, and no gradient came after that
        if self.phase is not Phase.BACKWARD:
            return
        self.calls.stop()
        if self.waits_for_delayed:  # the last of them reduces, which needs no weights
            refuse(self.put_away())
            return
        self.arrivals.delayed.clear()
        self._complete()

    # ------------------------------------------------------------------ values from elsewhere

    def adopt(self) -> None:
        """Move values that ``module.to(...)`` and the like put elsewhere into the buffers."""
        for group in self.groups:
            group.adopt()
        self.rebind()

    # ------------------------------------------------------------------ weights

    def prefetch(self, reads: Reads) -> None:
        """Begin to gather, ahead of use, what forward or backward will read."""
        self.gather(reads)
        if reads == "backward" and self.progress is Progress.UNTOUCHED:
            self.progress = Progress.GATHERED

    def gather_early(self, number: int) -> None:
        """The optimizer has stepped one group: gather its weights while the optimizer computes the
        other groups. A later write makes them stale, and the next forward gathers again."""
        runtime = self._runtime  # None before the first forward, which gathers all groups
        if runtime is not None and self.phase is Phase.RESTING and not self.expects_backward:
            self.groups[number].gather(runtime)

    def expose(self, reads: Reads) -> None:
        """Gather, wait, and show the whole weights to the modules. In a staged forward, where each
        module waits for its own weights, show the weights that have arrived."""
        self.gather(reads)
        if not (self._staged and self.phase is Phase.FORWARD):
            self.wait()
        self.show()

    def show_again(self) -> None:
        """Show the whole weights again in forward or backward, after a state dict was made."""
        if self.phase is not Phase.RESTING and not self.shown:
            self.show()

    @property
    def shows_at_rest(self) -> bool:
        """Whether modules at rest hold whole weights, after ``unshard()`` or since a forward."""
        return self.shown and self.phase is Phase.RESTING

    def hide(self, force: bool = False) -> None:
        """Give the parameters at rest back to the modules. They take over ``requires_grad_`` of the
        whole parameters, if it was called after forward. ``force``: also if nothing is shown."""
        if self.shows_at_rest:
            self.take_trainability()
        if self.shown or force:
            for parameters, name, number, index in self.places:
                parameters[name] = self.groups[number].sharded[index]
            self.shown, self._here = False, [False] * len(self.groups)

    def hide_at_rest(self) -> None:
        """Hide whole weights that stayed after a forward or an ``unshard()``. Raises if they were
        written to, because such writes are lost."""
        if self.shows_at_rest:
            refuse(self.put_away(release=False))

    def release_unused(self, graph_kept: bool) -> None:
        """Backward is over: release weights that were prefetched and not used."""
        if self.unused == "zeros" or not graph_kept:  # else a backward may walk the other calls
            self.calls.forget(self.runtime.walked)
        self.progress = Progress.UNTOUCHED
        for group in self.groups:
            group.gradients.unwanted = False
        if self.phase is Phase.RESTING and self.release_after_backward:
            refuse(self.put_away())

    def rest(self) -> RuntimeError | None:
        """Go to rest from any state (``reshard``, ``reset_iter_state``). Returns the error for
        writes that are lost with the whole weights."""
        lost = self._rest()
        self.calls.awaited.clear()
        return lost

    def reset(self) -> None:
        """Go to rest and drop all gradients."""
        self.rest()
        self.progress = Progress.UNTOUCHED
        for group in self.groups:
            group.gradients.discard()

    def _rest(self) -> RuntimeError | None:
        if self._runtime is not None:
            self.wait()  # gathers under way cannot be cancelled
        lost = self.put_away(release=self._runtime is not None)
        self.phase = Phase.RESTING
        self.calls.stop()
        self.arrivals.forget()
        return lost

    def put_away(self, *, release: bool = True) -> RuntimeError | None:
        """Hide the whole weights and give their memory back. Returns the error for writes that are
        lost with the whole weights."""
        lost = self.lost_writes()
        self.hide()
        if release:
            self.release()
        return lost
