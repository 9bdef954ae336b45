# SPDX-License-Identifier: Apache-2.0
"""The training loop, on every rank.

    batch -> forward, backward (microbatches) -> clip -> step -> agree -> log, evaluate, save

Once a step, the ranks agree on the mean loss, on requests to stop and on the load of each expert.
Every decision depends on these values alone, so all ranks decide the same.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from shardwise.checkpoint import CheckpointError, LoadReport, SaveError, Store
from shardwise.checkpoint.manifest import versions
from shardwise.checkpoint.meeting import GIVEN_UP
from shardwise.core import comm, streams
from shardwise.core.memory import ledger
from shardwise.debugging import debug, watch_if_asked
from shardwise.models.gpt import generate
from shardwise.optim.storage import local_of
from shardwise.planning.engine import elements_of
from shardwise.planning.figures import Plan
from shardwise.planning.plan import plan
from shardwise.report.origin import origin
from shardwise.report.trace import record_step
from shardwise.shard.formats import precision_report
from shardwise.train.build import Parts, build, build_scheduler, use_deterministic_algorithms
from shardwise.train.config import TrainConfig
from shardwise.train.fit import placements_of, plan_inputs, precision_of
from shardwise.train.hub import load_weights
from shardwise.train.launch import Guard, World
from shardwise.train.logs import EventFile, Events, ExpertLoad, Sink, Speed, peak_memory
from shardwise.train.tokenise import MissingExtraError, Tokenizer, open_tokenizer
from shardwise.train.tokens import INFO, TOKENS
from shardwise.words import quoted, size_text

CONFIG, EVENTS, CHECKPOINTS = "config.json", "events.jsonl", "checkpoints"
TOKENIZER = "tokenizer"  # a folder with the files of the run's tokenizer, for a sample and exports
KEPT = "kept"  # a folder with the checkpoints of ``keep_every``
PROMPT = "def "
SAMPLE_SECONDS = 5.0
# Fields of the configuration that change no number of a step: a resumed run may have others.
_WITHOUT_EFFECT = frozenset(
    ("hours", "eval_every", "eval_windows", "save_every", "keep", "keep_every", "max_skipped")
    + ("timeout", "sample", "profile_step")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Issued:
    """A step that the device may still be working on."""

    step: int
    figures: Callable[[], list[float]]  # waits: loss, auxiliary loss, norm, load of the experts
    norms: list[tuple[str, Tensor]]  # of the gradients of this rank, by parameter
    lr: list[Any]
    began: Any  # marks of the trainer's clock
    ended: Any


class BrokenGradientError(RuntimeError):
    """Too many steps in a row had a gradient that is not finite."""


class Trainer:
    """A run on one rank."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        folder: Path,
        *,
        resume: Path | None = None,
        or_older: bool = False,
        fitted: dict[str, Any] | None = None,
        sinks: Iterable[Sink] = (),
    ) -> None:
        if config.deterministic:
            use_deterministic_algorithms()
        seed = config.seed * 1_000_003 + world.rank
        torch.manual_seed(seed)
        random.seed(seed)  # a user's model may draw from any of them
        numpy.random.seed(seed % 2**32)
        self.world, self.folder = world, folder
        self.parts: Parts = build(config, world, fitted)
        self.config = self.parts.config
        self.step = 0
        self.skipped, self._skipped_in_a_row = 0, 0  # steps whose gradient was not finite
        self.speed = Speed(self.config, world, self.parts.model)
        self.experts = ExpertLoad(self.parts.model)
        # A resumed run begins with the configuration with "auto"; with what was decided beside it.
        model = dataclasses.replace(self.config.model, recompute=config.model.recompute)
        recorded = dataclasses.replace(config, model=model).to_json()
        recorded |= {"fitted": self.parts.fitted, "corpus": self.parts.corpus.sha256}
        options: dict[str, Any] = {"timeout": self.config.timeout, "config": recorded}
        self.store = Store(folder / CHECKPOINTS, self.config.keep, **options)
        loaded = LoadReport(config={k: v for k, v in recorded.items() if k not in _WITHOUT_EFFECT})
        if resume is not None:
            resume = self._restore(resume, or_older, loaded)
        elif self.config.init_from is not None:
            world.together(lambda: load_weights(self.parts.model, self.config))
        self._first_step = self.step
        self._compiles = self.config.compiles(world.device.type)
        self._issued: list[Issued] = []  # steps whose figures have not been read
        self._clock = streams.Clock(world.device)
        self._ended = self._clock.mark()  # the time from here on belongs to the next step
        self._saving: tuple[int, float] | None = None  # of the save in progress: step, time waited
        self._unsaved: str | None = None  # the reason why the last save failed
        self.events = Events()
        world.together(self._keep_tokenizer)
        if world.first:
            again = resume is not None or (folder / EVENTS).exists()
            self.events = Events([EventFile(folder / EVENTS), *sinks])
            self.events("run", **self._describe())
            self.plan = self._plan()
            self.events("plan", plan=self.plan.as_dict())
            if self.parts.decision is not None:
                self.events("note", text=self.parts.decision)
            if again:  # path null: the earlier run in this folder was never saved
                path = resume and str(resume)
                self.events("resume", step=self.step, path=path, text=resume and str(loaded))

    def _restore(self, path: Path, or_older: bool, report: LoadReport) -> Path:
        """Load a checkpoint, or an older one if it is damaged and ``or_older``; return its path."""
        parts = self.parts
        # The options of the groups come from the configuration, not from the checkpoint: a flag of
        # the resumed run may have changed them.
        groups = parts.optimizer.param_groups
        configured = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        resumed = self.store.resume(
            parts.model, parts.optimizer, path=path, or_older=or_older, report=report
        )
        assert resumed is not None
        loaded, extra = resumed
        if not {"step", "data", "skipped"} <= extra.keys():
            raise CheckpointError(
                f"{loaded} was not written by 'shardwise train': its extra holds {sorted(extra)}, "
                f"and no 'step'. Load it with sw.load, or resume from a run"
            )
        if self.config.steps < extra["step"]:
            raise ValueError(
                f"steps={self.config.steps}, and {loaded} was saved after step {extra['step']}: "
                f"give at least as many steps, or begin a new run without --resume"
            )
        for group, options in zip(groups, configured, strict=True):
            group.update(options)
        self.step, self.skipped = extra["step"], extra["skipped"]
        parts.scheduler = build_scheduler(self.config, parts.optimizer, self.step)
        parts.sampler.load_state_dict(extra["data"])
        return loaded

    def _keep_tokenizer(self) -> None:
        if self.world.first and (folder := self.parts.corpus.folder) is not None:
            ignore, there = shutil.ignore_patterns(TOKENS, INFO), self.folder / TOKENIZER
            shutil.copytree(folder, there, ignore=ignore, dirs_exist_ok=True)

    # ------------------------------------------------------------------------ the whole run

    def run(self) -> float | None:
        """Train until the last step or a request to stop, and save; return the bits per byte of the
        held-out text, or the loss, if they were computed."""
        try:
            return self._run()
        except torch.OutOfMemoryError as error:  # in a step or in an evaluation
            config = self.config
            raise torch.OutOfMemoryError(
                f"step {self.step + 1} does not fit this device with microbatches of "
                f"{config.share(self.world.size)} x {config.model.context} tokens: resume with "
                f"more --microbatches (now {config.num_microbatches}), with --recompute block, or "
                f"on more ranks. {error}"
            ) from None

    def _run(self) -> float | None:
        config, reason = self.config, None
        scored: float | None = None
        # A run that ends before its profile step records the last step.
        profiled = min(self.step + config.profile_step, config.steps) if config.profile_step else 0
        with Guard(hours=config.hours) as guard:
            self._ended = self._clock.mark()
            while self.step < config.steps and reason is None:
                if self.step + 1 == profiled:
                    with record_step(self.world.device) as profile:
                        reason = self._train_step(guard)
                    self.events("profile", step=self.step, **profile)
                    self._ended = self._clock.mark()  # reading the profile belongs to no step
                else:
                    reason = self._train_step(guard)
                done, every = self.step == config.steps, config.eval_every
                scores = every > 0 and (self.step % every == 0 or done)
                saves = self.step % config.save_every == 0 or done or reason
                if scores or saves:
                    reason = self._conclude(guard) or reason
                if scores:
                    scored = self.evaluate()
                if saves:
                    self.save()
                self._report_save(wait=False)
                if scores or saves:  # their time belongs to no step
                    self._ended = self._clock.mark()
            if reason is not None:
                self.events("stop", step=self.step, reason=reason)
            self._finish_saving()
            if reason is None and config.sample:
                self.sample()
        self.events("end", step=self.step, reason=reason or "finished")
        self.events.close()
        return scored

    # ------------------------------------------------------------------------ one step

    def _train_step(self, guard: Guard) -> str | None:
        """Take one optimizer step; return the reason to stop after it, if any."""
        parts, config = self.parts, self.config
        with self._examined() as calls:
            losses = self._forward_backward()
            planned = len(calls)
            # If the norm is not finite, the step changes nothing, on all ranks.
            norm = parts.optimizer.clip_grad_norm(config.clip, in_step=True)
            figures = (losses, norm.reshape(1), self.experts.tally())
            read_figures = streams.read_later(torch.cat([figure.double() for figure in figures]))
            norms = parts.optimizer.last_norms
            del calls[planned:]  # the norm is not planned
            parts.optimizer.step()
            self.experts.after_step(~torch.isfinite(norm))
        parts.optimizer.zero_grad()
        rates = parts.scheduler.get_last_lr()  # of this step
        parts.scheduler.step()
        if self.step == self._first_step and config.eval_every and self._compiles:
            self._score(islice(parts.held_out, 1))  # compiles evaluation in the time of this step
        self.step += 1
        began, self._ended = self._ended, self._clock.mark()
        made = {"step": self.step, "lr": rates, "began": began, "ended": self._ended}
        self._issued.append(Issued(figures=read_figures, norms=norms, **made))
        # The host issues the next step to a GPU before it waits for this step.
        return self._conclude(guard, keep=1 if self.world.device.type == "cuda" else 0)

    @contextmanager
    def _examined(self) -> Iterator[list[comm.Call]]:
        """Compare the ranks in the first step of this start, and the second step with the plan: its
        collectives, and what it held. (The first also sends what is equal on all ranks from then
        on.)"""
        cuda = self.world.device.type == "cuda"
        if self.step == self._first_step:
            watch_if_asked(self.parts.model)  # SHARDWISE_DEBUG=1: in every step
            with nullcontext() if comm.observer is not None else debug(self.parts.model):
                yield []
            return
        if self.step > self._first_step + 1:
            yield []
            return
        ledger.reset_peak()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        with comm.record() as calls:
            yield calls
        if self.world.first:
            rows, wrong = self.plan.compared(calls, ledger), self.plan.check(calls, ledger)
            elements = self._elements()
            for what in sorted(elements.keys() | self.plan.elements.keys()):
                rows[what] = own, seen = self.plan.elements.get(what, 0), elements.get(what, 0)
                wrong += [f"{what}: {seen:,}, planned {own:,}"] * (own != seen)
            if cuda and self.plan.followed is not None:  # else activations were not planned
                planned, peak = self.plan.total, peak_memory(self.world.device)
                rows["bytes of the device at the peak"] = planned, peak
                if abs(peak - planned) > max(0.05 * planned, 64 << 20):
                    wrong.append(f"peak: {size_text(peak)}, planned {size_text(planned)}")
            self.events("receipt", step=self.step + 1, rows=rows, differences="; ".join(wrong))

    def _elements(self) -> dict[str, int]:
        """The elements of this rank's model by optimizer and by format."""
        optimized = {"matrix": 0, "elementwise": 0}
        for group in self.parts.optimizer.param_groups:
            kind = "elementwise" if group["kind"] == "elementwise" else "matrix"
            optimized[kind] += sum(parameter.numel() for parameter in group["params"])
        return elements_of(self.parts.model, optimized)

    def _forward_backward(self) -> Tensor:
        """Compute the gradients of this rank's share. Return [2]: the mean loss of the tokens, and
        the auxiliary loss of the routers."""
        tokens, targets = self.parts.batches.next()
        parts, count = self.parts, self.config.num_microbatches
        total, auxiliary = torch.zeros(2, device=self.world.device)
        pieces = zip(tokens.chunk(count), targets.chunk(count), strict=True)  # [share, context]
        for number, (piece, answers) in enumerate(pieces):
            parts.model.set_is_last_backward(number == count - 1)  # type: ignore[operator]
            loss = parts.model(piece, answers) / count
            loss.backward()
            total += loss.detach()
            added: Tensor | None = getattr(parts.model, "auxiliary", None)
            if added is not None:
                auxiliary += added / count
        return torch.stack([total - auxiliary, auxiliary])

    def _conclude(self, guard: Guard, keep: int = 0) -> str | None:
        """Read, agree on and log the steps that were issued, except the last ``keep``; return the
        reason to stop, if any (collective)."""
        reason = None
        while len(self._issued) > keep:
            reason = self._conclude_step(self._issued.pop(0), guard) or reason
        return reason

    def _conclude_step(self, issued: Issued, guard: Guard) -> str | None:
        config, world = self.config, self.world
        loss, auxiliary, norm, *load = issued.figures()
        if math.isfinite(norm):
            self._skipped_in_a_row = 0
        else:
            self._count_skip(issued, norm)
        asked = guard.asked
        agreed = torch.tensor(
            [loss, auxiliary, float(asked is not None), *load], dtype=torch.float64
        )
        comm.all_reduce(agreed, world.axis).wait()
        (mean, extra), stops = (agreed[:2] / world.size).tolist(), int(agreed[2])
        # Counted from the position: steps before a resume may have had another batch size.
        samples = self.parts.sampler.position - (self.step - issued.step) * config.batch
        seconds = self._clock.seconds(issued.ended, since=issued.began)
        self.events(
            "step",
            step=issued.step,
            loss=mean,
            bits_per_byte=self.parts.corpus.bits_per_byte(mean),
            grad_norm=norm,
            lr=issued.lr,
            tokens=samples * config.model.context,
            skipped=self.skipped,
            **({"auxiliary_loss": extra} if self.experts.routers else {}),
            **self.experts.figures(agreed[3:]),
            **self.speed.of(seconds),
        )
        if issued.step == self._first_step + 1 and self._compiles:
            text = f"step {issued.step} took {seconds:.1f} s with the compilation of the model"
            self.events("note", text=text)
        return (asked or "another rank was asked to stop") if stops else None

    def _count_skip(self, issued: Issued, norm: float) -> None:
        """Count a step that was skipped, as its norm is not finite on any rank, and name the
        gradients (collective). One that this rank did not compute is NaN by intention."""
        own = [name for name, norm in issued.norms if not math.isfinite(norm)]
        found = comm.agree(own, self.world.axis)
        names = list(dict.fromkeys(name for of_a_rank in found for name in of_a_rank))
        self.skipped += 1
        self._skipped_in_a_row += 1
        self.events("skip", step=issued.step, grad_norm=norm, gradients=names)
        if self._skipped_in_a_row > self.config.max_skipped:
            raise BrokenGradientError(
                f"step {issued.step}: the gradient's norm is {norm}, and was not finite in "
                f"{self._skipped_in_a_row} steps in a row; now in {quoted(names)}. Lower the "
                f"learning rates, check the data, or raise max_skipped. A parameter without a "
                f"gradient on one of the ranks counts as not finite: see docs/debug.md"
            )

    # ------------------------------------------------------------------------ evaluation and saving

    @torch.no_grad()
    def _score(self, batches: Iterable[tuple[Tensor, Tensor, int]]) -> Tensor:
        """Return [2]: the sum of the losses of this rank's held-out tokens, and their number."""
        model, device = self.parts.model, self.world.device
        model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for tokens, targets, scored in batches:
            loss = model(tokens.to(device), targets.to(device))
            if scored:  # else a module of the user may give NaN
                sums[0] += loss.double() * scored
                sums[1] += scored
        model.train()
        return sums

    def evaluate(self) -> float:
        """Compute the bits per byte of the held-out text, or its loss, if its bytes are unknown;
        each token is scored on one rank."""
        corpus, sums = self.parts.corpus, self._score(self.parts.held_out).cpu()
        comm.all_reduce(sums, self.world.axis).wait()
        mean = float(sums[0] / sums[1])
        bits = corpus.bits_per_byte(mean, self.parts.held_out.scored)
        self.events("eval", step=self.step, loss=mean, bits_per_byte=bits)
        if self.experts.counts:
            self.events("experts", step=self.step, counts=self.experts.counts)
        return mean if bits is None else bits

    def save(self) -> None:
        """Start a save; training continues once the tensors are copied. A failed save gives a
        warning, and an error only if no later save succeeds."""
        began = time.perf_counter()
        self._report_save()
        position = self.parts.sampler.state_dict()
        extra = {"step": self.step, "data": position, "skipped": self.skipped}
        try:
            refuse_broken_weights(self.parts.model, self.world.axis)
            self.store.save(self.step, self.parts.model, self.parts.optimizer, extra)
            self._saving = self.step, time.perf_counter() - began
        except CheckpointError:
            raise  # this model can't be saved at all: the same on every rank
        except Exception as error:  # a full disk, or no memory for the copy on this rank alone
            self._save_failed(self.step, error)

    def _report_save(self, *, wait: bool = True) -> None:
        """Report a save once it is on the disk; with ``wait``, wait for it."""
        if self._saving is None or not (wait or self.store.idle):
            return
        (step, stalled), self._saving = self._saving, None
        try:
            path = self.store.wait()
        except SaveError as error:
            self._save_failed(step, error)
            return
        self._unsaved = None
        assert path is not None
        self.events("save", step=step, path=os.path.relpath(path), stalled=stalled)
        if self.world.first and self.config.keep_every and step % self.config.keep_every == 0:
            shutil.copytree(path, self.folder / KEPT / path.name)

    def _save_failed(self, step: int, error: Exception) -> None:
        self._unsaved = f"step {step} was not saved: {error}"
        if step < self.config.steps:  # the failure of the last save is raised instead
            self.events("warning", step=step, text=self._unsaved)

    def _finish_saving(self) -> None:
        """Wait for the last save. If it has failed, raise the same error on every rank: if only
        some ranks ended, the others would fail with an error of the transport."""
        self._report_save()
        unsaved: list[str | None] = comm.agree(self._unsaved, self.world.axis)
        if unsaved[0] is None:  # rank 0 has published the checkpoint, whatever other ranks saw
            return
        if self.world.first:
            self.store.remove_leftovers()
        texts = [text for text in unsaved if text is not None]
        raise SaveError(next((text for text in texts if GIVEN_UP not in text), texts[0]))

    def sample(self) -> None:
        """Log a text that the model generates until a rank's clock ends it, if rank 0 has the
        tokenizer (collective). A module whose forward needs targets gives no logits, and no
        sample."""
        model, config, world = self.parts.model, self.config, self.world
        end = time.monotonic() + SAMPLE_SECONDS
        needed = [p for p in inspect.signature(model.forward).parameters.values() if p.kind < 2]
        tokenizer = prompt = None
        if world.first and all(p.default is not p.empty for p in needed[1:]):
            tokenizer = self._open_tokenizer()
            prompt = tokenizer and tokenizer.encode([PROMPT.encode()])[0][:-1].tolist()
        if (prompt := comm.agree(prompt, world.axis)[0]) is None:
            return
        with torch.compiler.set_stance("force_eager"):  # the length grows with every token
            made = generate(
                model,
                torch.tensor([prompt], device=world.device),
                config.sample,
                context=config.model.context,
                temperature=0.8,
                generator=torch.Generator().manual_seed(config.seed),
                until=lambda: any(comm.agree(time.monotonic() > end, world.axis)),
            )[0].tolist()
        if tokenizer is not None:
            text = made[len(prompt) :]
            text = text[: text.index(tokenizer.end)] if tokenizer.end in text else text
            self.events("sample", text=tokenizer.decode(prompt + text))

    def _open_tokenizer(self) -> Tokenizer | None:
        folder = self.parts.corpus.folder
        try:
            return None if folder is None else open_tokenizer(folder)
        except MissingExtraError as error:
            self.events("note", text=f"{error} (the run ends without a sample)")
            return None

    def _plan(self) -> Plan:
        """The plan of this run on rank 0; see ``shardwise plan``."""
        config, world = self.config, self.world
        model, mesh, options = plan_inputs(config, precision_of(config, world), world)
        return plan(model, mesh, placements_of(config, world), rank=0, **options)

    def _describe(self) -> dict[str, Any]:
        config, corpus, model, world = self.config, self.parts.corpus, self.config.model, self.world
        experts = f", {model.num_experts} experts" if model.num_experts else ""
        layers = config.module or f"{model.num_layers} layers x {model.dim}{experts}"
        shape = config.mesh_shape(world.size, world.num_nodes)
        mesh = " x ".join(f"{name} {size}" for name, size in shape.items())
        mesh += f", experts over ep {config.ep}" if config.ep > 1 else ""
        return {
            **origin(world.device, world.size),
            "config": config.to_json(),
            "defaults": TrainConfig().to_json(),
            "model": {
                "parameters": sum(p.numel() for p in self.parts.model.parameters()),
                "text": f"{layers}, context {model.context}, vocabulary {model.vocab_size}",
            },
            "corpus": {
                "name": corpus.name,
                "sha256": corpus.sha256,
                "text": self.parts.sampler.described(config.steps),
            },
            "world_size": world.size,
            "num_nodes": world.num_nodes,
            "mesh": shape,
            "device": str(world.device.type),
            "strategy": f"{config.strategy} over {mesh}, {config.optimizer}",
            "weights": precision_report(self.parts.model).as_dict(),
            "out": str(self.folder),
            "versions": versions(),
        }


def refuse_broken_weights(model: nn.Module, axis: comm.Axis) -> None:
    """Raise on every rank where a trained weight of any rank is not finite (collective)."""
    trained = (p for p in model.parameters() if p.requires_grad and p.is_floating_point())
    pieces = [piece for p in trained if (piece := local_of(p).detach()).numel()]
    norms = [norm.float() for norm in torch._foreach_norm(pieces, math.inf)] if pieces else []
    finite = not norms or bool(torch.stack(norms).isfinite().all())
    if not all(comm.agree(finite, axis)):
        raise SaveError(
            "weights are not finite: an update was too large. Resume from the last checkpoint "
            "(--resume) with lower learning rates"
        )
