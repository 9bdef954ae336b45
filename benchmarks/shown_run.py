# SPDX-License-Identifier: Apache-2.0
"""``shardwise bench shown-run``: one GPU, its own text, Muon beside AdamW, from start to end.

    text of this machine -> tokens -> rates -> Muon (killed, resumed), AdamW -> more seeds, experts,
    fp8 -> export, transformers, generate

Every run is a `shardwise train` of its own. The first Muon and AdamW run have the GPU to themselves
and give the times; sweeps, other seeds, experts and fp8 share it, and give losses alone. What is
done is written at once; stages that have no time left (``--seconds``) are left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import machine_text, report
from benchmarks.runs import CLI, Job, run_jobs, start, stop, train
from benchmarks.shown_results import NAMES, Flags, Shown, Size, words_of, write
from shardwise.report.html import read_events

PROMPTS = ("def main(", "import torch", "The ")
PARTS = ("rates", "joined", "experts", "fp8")


QUIET: Flags = {"sample": 0, "profile-step": 0}
FULL = Size(
    recipe="gpt_124m",
    experts="moe_1b",
    flags={"batch": 64, "microbatches": 2, "eval-windows": 512, "held-out": 0.02, **QUIET},
    experts_flags={
        "batch": 32,
        "microbatches": 2,
        "eval-windows": 256,
        "held-out": 0.02,
        "model.recompute": "none",
        "lr": 1.2e-3,
        **QUIET,
    },
    steps=300,
    sweep_steps=60,
    after_rates=290,
    rates={"muon": (0.02, 0.04, 0.08, 0.16), "adamw": (3e-4, 6e-4, 1.2e-3)},
    lr=1.2e-3,
    fp8="fp8_block",
    most=4 << 30,
    sample=machine_text.SAMPLE,
)
SMOKE = Size(
    recipe="smoke",
    experts="moe_tiny",
    flags={"batch": 4, "eval-windows": 8, "held-out": 0.1, "nproc": 1, **QUIET},
    experts_flags={
        "batch": 2,
        "eval-windows": 4,
        "held-out": 0.1,
        "nproc": 1,
        **QUIET,
        "model.context": 32,
        "model.dim": 32,
    },
    steps=60,
    sweep_steps=4,
    after_rates=1e9,
    rates={"muon": (0.02, 0.04), "adamw": (1e-3, 3e-3)},
    lr=3e-3,
    fp8="mxfp8",
    most=400_000,
    sample=200_000,
    roots=(str(Path(json.__file__).parent), str(Path(argparse.__file__).parent / "email")),
    tokenizer="bpe:512",
)


# ------------------------------------------------------------------------------------ stages


def stage(shown: Shown, name: str, needed: float, work: Callable[[], object]) -> None:
    """A part that may fail without the others; left out where less than ``needed`` seconds are
    there. What is known is written after it."""
    began = time.monotonic()
    print(f"== {name}, {shown.left:.0f} s left", flush=True)
    try:
        if shown.left < needed:
            raise TimeoutError(f"left out: {shown.left:.0f} s were left, {needed:.0f} needed")
        work()
    except Exception as error:  # whatever it is, the other stages go on
        traceback.print_exc()
        shown.lines[name] = f"{type(error).__name__}: {error}"
    shown.text[f"{name} s"] = round(time.monotonic() - began, 1)
    try:
        with shown.lock:
            write(shown)
    except Exception:  # the events are there all the same
        traceback.print_exc()


def warm(shown: Shown, *, experts: bool) -> None:
    """Fill the caches of compiled code while the text is read: a little text, the same shapes."""
    size = shown.size
    noise: Flags = {"data": str(little_text(shown)), "save-every": 1000}
    wanted: dict[str, Flags] = {"muon": {}, "adamw": {"optimizer": "adamw"}}
    if "fp8" in shown.parts:
        wanted["fp8"] = {"precision": size.fp8}
    jobs = [
        shown.job(size.recipe, f"warm-{name}", size.flags, noise, more, steps=2)
        for name, more in wanted.items()
    ]
    if experts:
        jobs = [shown.job(size.experts, "warm-experts", size.experts_flags, noise, steps=2)]
    run_jobs(jobs, at_once=len(jobs), until=shown.until)


def little_text(shown: Shown) -> Path:
    """Tokens of a few files: with document ends and the same vocabulary as those of all text."""
    folder = shown.scratch / "little"
    with shown.reading:
        if not folder.is_dir():
            files = str(Path(argparse.__file__).parent / "*.py")
            machine_text.data([files], folder, shown.size.tokenizer)
    return folder


def read_text(shown: Shown) -> None:
    size, folder = shown.size, shown.scratch / "text"
    words = [str(folder), "--most", str(size.most / 2**20), "--sample", str(size.sample / 2**20)]
    words += ["--roots", *size.roots] if size.roots else []
    found = spoken([sys.executable, "-m", "benchmarks.machine_text", *words], shown)
    shown.text |= json.loads(found.splitlines()[-1])
    machine_text.data([str(folder / "sample.jsonl")], folder / "sample", size.tokenizer)


def spoken(command: Sequence[str], shown: Shown) -> str:
    """What a command prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(1, shown.left))
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command[1:])}: {done.stderr[-800:]}")
    return done.stdout


def all_tokens(shown: Shown) -> None:
    folder = shown.scratch / "text"
    sources = [str(folder / name) for name in ("sample.jsonl", "rest.jsonl")]
    machine_text.data(sources, folder / "tokens", str(folder / "sample"))


def find_rates(shown: Shown) -> None:
    """The best rate of each optimizer. A best one at an end of those that were tried may not be the
    best of all: the next one beyond that end is tried too, where there is time."""
    size = shown.size
    sample: Flags = {"data": str(shown.scratch / "text" / "sample"), "held-out": 0.05}
    tried: dict[str, dict[float, float]] = {optimizer: {} for optimizer in size.rates}
    asked = [(optimizer, rate) for optimizer, rates in size.rates.items() for rate in rates]
    for _ in range(3):
        jobs = [
            shown.job(
                *(size.recipe, f"sweep-{optimizer}-{rate:g}", size.flags, sample),
                *({"optimizer": optimizer}, shown.rates(optimizer, rate)),
                steps=size.sweep_steps,
            )
            for optimizer, rate in asked
        ]
        found = run_jobs(jobs, at_once=len(jobs), until=shown.until)
        for (optimizer, rate), job in zip(asked, jobs, strict=True):
            bits = found[job.name].bits[-1] if job.name in found else math.nan
            tried[optimizer][rate] = bits if math.isfinite(bits) else math.inf
        for optimizer, scores in tried.items():
            if min(scores.values()) < math.inf:
                shown.best[optimizer] = min(scores, key=scores.__getitem__)
        shown.sweep = [
            {"case": NAMES[optimizer], "rate": rate, "bits": bits if bits < math.inf else None}
            for optimizer, scores in tried.items()
            for rate, bits in sorted(scores.items())
        ]
        asked = [
            (optimizer, rate)
            for optimizer, scores in tried.items()
            if (rate := beyond(shown.best[optimizer], scores)) is not None
        ]
        if not asked or shown.left < size.after_rates:
            return


def beyond(best: float, tried: Collection[float]) -> float | None:
    """The rate to try next: twice or half of the best, where that lies at an end of those tried."""
    return 2 * best if best == max(tried) else best / 2 if best == min(tried) else None


def killed_and_resumed(shown: Shown) -> None:
    """Muon, seed 0: killed after half of its steps, and resumed from its newest checkpoint."""
    job = shown.run("muon", 0, **{"save-every": max(1, shown.size.steps // 6)})
    process = start(job)
    events = job.folder / "events.jsonl"
    half = shown.size.steps // 2 + 3  # steps beyond a checkpoint
    try:
        while process.poll() is None and shown.left > 0 and _last_step(events) < half:
            time.sleep(0.2)
        if process.poll() is None:
            os.kill(json.loads((job.folder / ".lock").read_text())["pid"], signal.SIGKILL)
            process.wait(30)
    finally:
        stop(process)
    ranks = {name: value for name, value in shown.size.flags.items() if name == "nproc"}
    resumed = Job(name=job.name, words=["--resume", *words_of(ranks)], folder=job.folder)
    curve = train(resumed, until=shown.until)
    assert curve is not None
    shown.curves["muon", 0] = curve
    shown.lines["killed and resumed"] = same_losses(read_events(events))


def _last_step(events: Path, *, resumed: bool = False) -> int:
    """The last step of a run; with ``resumed``, of its part after a resume; 0 before the first."""
    found = read_events(events) if events.is_file() else []
    begins = [at for at, event in enumerate(found) if event["kind"] == "resume"]
    if resumed:
        found = found[begins[-1] :] if begins else []
    return max((event["step"] for event in found if event["kind"] == "step"), default=0)


def same_losses(events: Sequence[dict[str, Any]]) -> str:
    """Whether the steps that were done before the kill and again after it have the same losses."""
    begins = [at for at, event in enumerate(events) if event["kind"] == "resume"]
    step = events[begins[0]]["step"]
    losses: list[dict[int, float]] = [
        {event["step"]: event["loss"] for event in part if event["kind"] == "step"}
        for part in (events[: begins[0]], events[begins[0] :])
    ]
    twice = sorted(set(losses[0]) & set(losses[1]))
    equal = sum(losses[0][one] == losses[1][one] for one in twice)
    worst = max((abs(losses[0][one] - losses[1][one]) for one in twice), default=0.0)
    return (
        f"SIGKILL after step {max(losses[0])}, resumed after step {step}; {equal} of {len(twice)} "
        f"steps that were done twice have the same loss to the last bit (largest difference "
        f"{worst:.1e})"
    )


def alone(shown: Shown) -> None:
    """AdamW with the GPU to itself, for its time."""
    curve = train(shown.run("adamw", 0), until=shown.until)
    if curve is not None:
        shown.curves["adamw", 0] = curve


def documents_joined(shown: Shown) -> None:
    """The time of a step whose documents see each other, beside the one of documents apart."""
    steps = max(4, shown.size.sweep_steps // 2)
    flags = {"documents": "joined", "eval-every": steps, "steps": steps}
    joined = train(shown.run("muon", 0, "joined", **flags), until=shown.until)
    apart = shown.curves.get(("muon", 0))
    assert apart is not None and joined is not None
    shown.lines["documents apart"] = (
        f"{1e3 * apart.step:.1f} ms a step, joined {1e3 * joined.step:.1f} ms "
        f"({apart.step / joined.step:.3f}x)"
    )


def together(shown: Shown) -> None:
    """Everything whose time does not count, on one GPU at the same time."""
    size = shown.size
    jobs: dict[Any, Job] = {}
    for seed in range(1, shown.seeds):
        for optimizer in NAMES:
            jobs[optimizer, seed] = shown.run(optimizer, seed)
    if "experts" in shown.parts:
        steps = max(4, size.steps // 3)
        jobs["experts"] = shown.job(size.experts, "experts", size.experts_flags, steps=steps)
    for seed in range(shown.seeds if "fp8" in shown.parts else 0):
        for optimizer in NAMES:
            name = f"fp8-{optimizer}-{seed}"
            jobs["fp8", optimizer, seed] = shown.run(optimizer, seed, name, precision=size.fp8)
    if not jobs:
        return
    found = run_jobs(list(jobs.values()), at_once=len(jobs), until=shown.until)
    for key, job in jobs.items():
        if job.name not in found:
            continue
        if key == "experts":
            shown.experts = found[job.name]
        elif key[0] == "fp8":
            shown.fp8[key[1:]] = found[job.name]
        else:
            shown.curves[key] = found[job.name]


def hand_over(shown: Shown) -> None:
    """Export the run, load it in transformers, and let it write."""
    hub = str(shown.scratch / "hub")
    spoken([*CLI, "export", str(shown.runs / "muon-0"), hub], shown)
    commands = {
        prompt: [*CLI, "generate", hub, "--prompt", prompt, "--tokens", "160"] for prompt in PROMPTS
    }
    loads = [sys.executable, "-m", "benchmarks.shown_run", "--check", hub]
    with ThreadPoolExecutor(1 + len(commands)) as pool:
        checked = pool.submit(spoken, loads, shown)
        texts = {prompt: pool.submit(spoken, words, shown) for prompt, words in commands.items()}
        for prompt, text in texts.items():
            shown.said[prompt] = _said(text)
        shown.lines["in transformers"] = _said(checked).strip()


def _said(text: Future[str]) -> str:
    """What was printed, or why nothing was."""
    try:
        return text.result()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"


def check(hub: Path) -> str:
    """The logits of an exported folder in transformers and in shardwise, on text of this file."""
    import torch
    import transformers

    from shardwise.models.gpt import GPT
    from shardwise.models.hugging_face import from_hf
    from shardwise.train.hub import HubFolder
    from shardwise.train.tokenise import open_tokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float32)
    folder = HubFolder(hub)
    ours = GPT(folder.config)
    ours.load_state_dict(from_hf(folder, folder.config))
    text = Path(__file__).read_text()[:3000]
    tokenizer = transformers.AutoTokenizer.from_pretrained(hub)
    tokens = open_tokenizer(hub).encode([text.encode()])[:-1].tolist()
    assert tokenizer(text)["input_ids"] == tokens, "another tokenizer"
    batch = torch.tensor([tokens[: ours.config.context]], device=device)
    with torch.no_grad():
        expected = ours.to(device).eval()(batch)
        logits = theirs.to(device).eval()(batch).logits
        worst = float((logits - expected).abs().max())
        prompt = batch[:, :8]
        made = theirs.generate(prompt, max_new_tokens=24, do_sample=False)
    same = int((logits.argmax(-1) == expected.argmax(-1)).sum())
    return (
        f"{type(theirs).__name__} of transformers {transformers.__version__}, fp32, "
        f"{batch.shape[1]} tokens: largest difference of logits {worst:.1e} (logits up to "
        f"{float(expected.abs().max()):.1f}), the same likeliest token at {same} of "
        f"{batch.shape[1]} places, the same {len(tokens)} tokens of its tokenizer; goes on with "
        f"{tokenizer.decode(made[0, 8:])!r}"
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="shardwise bench shown-run", description=__doc__)
    add = parser.add_argument
    add("--smoke", action="store_true", help="a dry run of every stage, tiny, on any machine")
    add("--seconds", type=float, default=540.0, help="the whole of it ends by then")
    add("--seeds", type=int, default=2)
    add("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="beside the two runs")
    add("--text", type=float, default=4096, help="MiB of text at the most")
    add("--steps", type=int, help="of each run; default: 300")
    add("--scratch", type=Path, default=Path("/tmp/shown-run"), help="for text and runs")
    add("--results", type=Path, default=report.RESULTS)
    add("--check", type=Path, help="compare an exported folder in transformers, and leave")
    options = parser.parse_args(arguments)
    if options.check is not None:
        print(check(options.check))
        return
    if options.scratch.is_dir() and any(options.scratch.iterdir()):
        raise SystemExit(f"error: {options.scratch} is not empty: remove it, or name a --scratch")
    until = time.monotonic() + options.seconds - 10
    size = SMOKE if options.smoke else FULL
    most = min(size.most, int(options.text * 2**20))
    size = Size(**{**vars(size), "steps": options.steps or size.steps, "most": most})
    facts = report.circumstances(arguments)
    facts["command"] = "shardwise bench shown-run " + shlex.join(arguments)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(options.scratch / "inductor"))
    shown = Shown(
        size=size,
        scratch=options.scratch,
        results=options.results,
        seeds=options.seeds,
        parts=options.parts,
        until=until,
        facts=facts,
        best={"muon": 0.02, "adamw": size.rates["adamw"][1]},
    )
    run_all(shown)
    print((options.results / f"shown-run-{size.recipe}.md").read_text())


def run_all(shown: Shown) -> None:
    """All stages. A run that needs the GPU for itself starts, which takes as long as some steps,
    while the one before it is about to end."""

    def staged(name: str, needed: float, work: Callable[[Shown], None]) -> None:
        stage(shown, name, needed, lambda: work(shown))

    def wait(future: Future[None], ready: Callable[[], bool]) -> None:
        while not future.done() and not ready():
            time.sleep(0.3)

    events = {one: shown.runs / f"{one}-0" / "events.jsonl" for one in NAMES}
    with ThreadPoolExecutor(8) as pool:
        warming = pool.submit(warm, shown, experts=False)
        if "experts" in shown.parts:
            pool.submit(warm, shown, experts=True)
        staged("text", 20, read_text)
        rest = pool.submit(staged, "tokens", 0, all_tokens)
        stage(shown, "warm", 0, warming.result)
        if "rates" in shown.parts:
            staged("rates", 60, find_rates)
        rest.result()
        muon = pool.submit(staged, "muon", 40, killed_and_resumed)
        wait(muon, lambda: _last_step(events["muon"], resumed=True) > 0)
        adamw = pool.submit(staged, "adamw", 25, alone)
        muon.result()
        if "joined" in shown.parts:
            adamw.result()
            staged("joined", 40, documents_joined)
        wait(adamw, lambda: _last_step(events["adamw"]) > 0.4 * shown.size.steps)
        others = pool.submit(staged, "together", 25, together)
        adamw.result()
        staged("hand over", 20, hand_over)
        others.result()


if __name__ == "__main__":
    main(sys.argv[1:])
