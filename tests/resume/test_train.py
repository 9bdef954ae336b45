# SPDX-License-Identifier: Apache-2.0
"""A run that stopped and went on is the run that never stopped, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwise.checkpoint import CheckpointError, Manifest, export, save
from shardwise.moe import mixtures_of
from shardwise.report.html import write_report
from shardwise.shard.module import units_of
from shardwise.shard.state_dict import full_state_dict
from shardwise.train.codecs import Bytes
from shardwise.train.config import FIXED, TrainConfig
from shardwise.train.folder import newest_checkpoint
from shardwise.train.loop import Trainer
from shardwise.train.session import Request, resolve
from shardwise.train.weights import open_model, text_after
from tests.ranks import run_ranks
from tests.train_runs import TINY, events_of, make_trainer, values_of, write_text

Seen = tuple[dict[str, torch.Tensor], torch.Tensor]


def finish(trainer: Trainer) -> Seen:
    trainer.run()
    return values_of(trainer), torch.get_rng_state()


def straight(rank: int, world_size: int, folder: str, changes: dict[str, Any]) -> Seen:
    return finish(make_trainer(rank, world_size, folder, **changes))


def resumed(rank: int, world_size: int, folder: str, path: str, changes: dict[str, Any]) -> Seen:
    torch.manual_seed(99)  # whatever the process did before
    return finish(make_trainer(rank, world_size, folder, path, **changes))


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    return {e["step"]: (e["loss"], e["grad_norm"]) for e in events_of(folder, "step")}


def compare(strategy: str, optimizer: str, world_size: int, tmp_path: Path, **changes: Any) -> None:
    usual = {"strategy": strategy, "optimizer": optimizer, "data": write_text(tmp_path)}
    changes = usual | changes
    first, second = tmp_path / "first", tmp_path / "second"
    expected = run_ranks(straight, world_size, str(first), changes)
    assert sorted(losses(first)) == list(range(1, 9))
    point = second / "checkpoints" / "step-000004"
    point.parent.mkdir(parents=True)
    shutil.copytree(first / "checkpoints" / "step-000004", point)
    found = run_ranks(resumed, world_size, str(second), str(point), changes)
    assert losses(second) == {step: v for step, v in losses(first).items() if step > 4}
    held_out = [[(e["step"], e["loss"]) for e in events_of(f, "eval")] for f in (first, second)]
    assert held_out[0][1:] == held_out[1] != []
    for (values, rng), (again, rng_again) in zip(expected, found, strict=True):
        assert values.keys() == again.keys()
        for name in values:
            assert torch.equal(values[name], again[name]), name
        assert torch.equal(rng, rng_again)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "ranks"),
    [("zero0", "muon", 2), ("zero1", "adamw", 3), ("zero3", "muon", 2), ("hfsdp", "muon", 4)],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    strategy: str, optimizer: str, ranks: int, tmp_path: Path
) -> None:
    """zero2 and hsdp are resumed in interop/test_support, and by ``sw.load`` in test_anything."""
    compare(strategy, optimizer, ranks, tmp_path)


def test_reading_a_profile_is_no_time_of_the_step_after_it(tmp_path: Path) -> None:
    changes = {"data": write_text(tmp_path), "steps": 2, "profile_step": 1, "eval_every": 0}
    run_ranks(straight, 1, str(tmp_path / "run"), changes)
    (profile,), steps = (events_of(tmp_path / "run", kind) for kind in ("profile", "step"))
    # Times in events are rounded to a millisecond.
    assert steps[1]["seconds"] <= steps[1]["time"] - profile["time"] + 1e-3


def test_with_weights_in_mxfp8(tmp_path: Path) -> None:
    wide = dataclasses.replace(TINY.model, dim=32)
    # The last two of eight steps are in bf16.
    options = {"precision": "mxfp8", "final_bf16": 0.25, "keep": 4}
    compare("zero3", "muon", 2, tmp_path, model=wide, **options)
    for folder in (tmp_path / "first", tmp_path / "second"):
        (note,) = events_of(folder, "note")
        assert note["text"] == "step 6: bf16 from here on (final_bf16)"
        checkpoints = sorted((folder / "checkpoints").iterdir())
        saved = [Manifest.read(path).config["precision"] for path in checkpoints]
        assert saved == ["mxfp8", "mxfp8", "bf16"]
    (run,) = events_of(tmp_path / "first", "run")
    weights, (planned,) = run["weights"], events_of(tmp_path / "first", "plan")
    assert weights["format"] == "mxfp8" and weights["stored"] >= 7 * wide.num_layers
    kept = {name: why for why, names in weights["kept"].items() for name in names}
    named = "read by an embedding; include=('*', 'embedding.weight') stores it too"
    assert kept["embedding.weight"] == named
    assert kept["blocks.*.attention_norm.weight"] == "read by RMSNorm, not only by linears"
    assert re.search(rf"stored as mxfp8 +{weights['stored']} ", planned["plan"]["text"])
    page = write_report(tmp_path / "first").read_text()
    assert "Weights in MXFP8" in page and "read by an embedding" in page
    assert "gathered in backward" in page
    narrow = {"precision": "mxfp8_2d", "data": write_text(tmp_path)}
    for said in run_ranks(refuse, 2, str(tmp_path / "narrow"), None, narrow):
        assert "none of the" in said and "can be stored so" in said and "multiples of 32" in said


def test_what_fp8_loses_is_told_with_each_evaluation(tmp_path: Path) -> None:
    wide = dataclasses.replace(TINY.model, dim=128, hidden_dim=128, num_layers=1)
    changes = {"precision": "fp8_block", "model": wide, "steps": 3, "eval_every": 2}
    run_ranks(straight, 1, str(tmp_path / "run"), changes | {"data": write_text(tmp_path)})
    found = [event for event in events_of(tmp_path / "run", "fp8") if event["values"] > 0]
    assert [event["step"] for event in found] == [2, 3], "the last step, too"


def test_with_a_mixture_of_many_short_documents_and_a_cosine(tmp_path: Path) -> None:
    """Documents are apart in every window, and each source is in the middle of an epoch."""
    (tmp_path / "short").mkdir()
    for number in range(60):
        (tmp_path / "short" / f"{number}.txt").write_text(
            f"{number} ends soon; " * (1 + number % 3)
        )
    data = f"{tmp_path / 'short'}:0.7,{write_text(tmp_path)}:0.3"
    compare("zero3", "muon", 2, tmp_path, data=data, schedule="cosine", final=0.0)


OWN = """
import torch
from torch import nn

class Cell(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.mix, self.norm = nn.Linear(dim, dim), nn.LayerNorm(dim)

    def forward(self, x):
        before = torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
        return x + torch.tanh(self.mix(self.norm(before)))

class Tiny(nn.Module):
    def __init__(self, words, dim=16):
        super().__init__()
        self.embedding = nn.Embedding(words, dim)
        self.cells = nn.ModuleList(Cell(dim) for _ in range(2))
        self.head = nn.Linear(dim, words)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for cell in self.cells:
            x = cell(x)
        return self.head(x)

def build(config):
    return Tiny(config.model.vocab_size)

def wrong(config):
    return 3
"""


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_with_a_module_of_ones_own(lora_rank: int, tmp_path: Path) -> None:
    """The same loop, resume, evaluation and sample; and with LoRA, where the rest is frozen."""
    (tmp_path / "own.py").write_text(OWN)
    name = f"{tmp_path / 'own.py'}:build"
    optimizer = "adamw" if lora_rank else "muon"
    compare("zero3", optimizer, 2, tmp_path, module=name, lora_rank=lora_rank, sample=3)
    run = events_of(tmp_path / "first", "run")[0]
    assert run["model"]["text"].startswith(name) and run["model"]["parameters"] > 8000
    # What was trained is what moved, and it is what is exported.
    begun = run_ranks(values_at_rest, 1, str(tmp_path), name, 0)[0]
    export(tmp_path / "first" / "checkpoints" / "step-000008", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == begun.keys()
    moved = {key for key in begun if not torch.equal(begun[key], found[key])}
    linears = {f"cells.{n}.mix.weight" for n in range(2)}
    assert moved == (linears if lora_rank else begun.keys())
    model, codec = open_model(tmp_path / "first")
    torch.manual_seed(0)  # a document may end at once
    assert codec is not None and len(text_after(model, codec, "a", 5)) >= 1
    wrong = {"module": name.replace("build", "wrong"), "data": str(tmp_path / "text.txt")}
    said = run_ranks(refuse, 2, str(tmp_path / "b"), None, wrong)
    assert all("returned a int; it must return a torch.nn.Module" in text for text in said)


def test_the_end_of_a_document_ends_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(model: Any, drawn: torch.Tensor, count: int) -> torch.Tensor:
        return torch.cat([drawn, torch.tensor([[0x62, 0xC3, Bytes.end, 0x63][:count]])], dim=1)

    monkeypatch.setattr("shardwise.train.weights.generate", draw)
    assert text_after(torch.nn.Linear(1, 1), Bytes(), "a", 4) == "b\ufffd"
    assert text_after(torch.nn.Linear(1, 1), Bytes(), "a", 1) == "b"


def values_at_rest(
    rank: int, world_size: int, folder: str, module: str, lora_rank: int
) -> dict[str, torch.Tensor]:
    data = f"{folder}/text.txt"
    changes = {"module": module, "lora_rank": lora_rank, "data": data}
    return full_state_dict(make_trainer(rank, world_size, f"{folder}/rest", **changes).parts.model)


# ------------------------------------------------------------------------------ another world size


def positions(
    rank: int, world_size: int, folder: str, path: str | None, changes: dict[str, Any]
) -> tuple[list[int], float]:
    """The windows that this rank trained on, and the held-out loss at the start."""
    seen: list[int] = []
    trainer = make_trainer(rank, world_size, folder, path, **changes)
    bits = trainer.evaluate()
    real = trainer.parts.sampler.windows

    def noted(position: int) -> Any:
        windows = real(position)
        seen.extend(int(window) for window in windows)
        return windows

    trainer.parts.sampler.windows = noted  # type: ignore[method-assign]
    trainer.run()
    return seen, bits


def test_another_number_of_ranks_neither_repeats_nor_skips(tmp_path: Path) -> None:
    # No decay: learning rates that fall towards the last step would depend on which it is.
    changes = {"data": write_text(tmp_path), "steps": 4, "decay": 0.0}
    whole = tmp_path / "whole"
    run_ranks(positions, 2, str(whole), None, {**changes, "steps": 8})
    two = run_ranks(positions, 2, str(tmp_path / "a"), None, changes)
    path = tmp_path / "a" / "checkpoints" / "step-000004"
    for world_size, strategy in ((1, "zero0"), (3, "zero3"), (4, "hfsdp")):
        more = {**changes, "steps": 8, "strategy": strategy}
        out = tmp_path / f"b{world_size}"
        rest = run_ranks(positions, world_size, str(out), str(path), more)
        trained = [w for seen, _ in two for w in seen] + [w for seen, _ in rest for w in seen]
        assert len(trained) == 8 * 12 and len(set(trained)) == len(trained)
        # The same steps, summed by other ranks in another order: near, not equal.
        far, near = losses(whole), losses(out)
        assert all(near[step][0] == pytest.approx(far[step][0], abs=1e-4) for step in near)
        assert sorted(near) == [5, 6, 7, 8]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a run of eight steps on it; nobody writes to it."""
    folder = tmp_path_factory.mktemp("finished")
    run_ranks(straight, 2, str(folder / "run"), {"data": write_text(folder)})
    return folder


def refuse(
    rank: int, world_size: int, folder: str, path: str | None, changes: dict[str, Any]
) -> str:
    try:
        make_trainer(rank, world_size, folder, path, **changes)
    except ValueError as error:
        return str(error)
    return "nothing was wrong"


def test_a_checkpoint_of_another_model_or_other_data_is_refused_on_every_rank(
    finished: Path, tmp_path: Path
) -> None:
    data, path = finished / "text.txt", str(finished / "run" / "checkpoints" / "step-000004")
    wider = dataclasses.replace(TINY.model, dim=32)
    said = run_ranks(refuse, 2, str(tmp_path / "b"), path, {"data": str(data), "model": wider})
    assert said[0] == said[1] and "wq.weight" in said[0] and "[16, 16]" in said[0]
    other = tmp_path / "other.txt"
    other.write_text("something else entirely. " * 400)
    said = run_ranks(refuse, 2, str(tmp_path / "c"), path, {"data": str(other)})
    assert "other data" in said[0]
    said = run_ranks(refuse, 2, str(other / "below"), None, {"data": str(data)})
    assert said[0] == said[1] and "below cannot be written to" in said[0], "not rank 0 alone"


# ------------------------------------------------------------------------------ other flags

# What a resumed run is asked to change, field by field: the new value, and which of the figures of
# ``seen`` must then differ. A new field of TrainConfig fails until it stands here or in FIXED.
EFFECTS: dict[str, tuple[Any, str]] = {
    "documents": ("joined", "documents"),
    "steps": (10, "steps"),
    "batch": (24, "tokens"),
    "microbatches": (2, "microbatches"),
    "strategy": ("hsdp", "placements"),
    "keep_weights": ("on", "placements"),
    "replicas": (1, "mesh"),
    "ep": (2, "experts"),
    "matrix_lr": (0.04, "lr"),
    "lr": (6e-3, "lr"),
    "weight_decay": (0.5, "values"),
    "warmup": (7, "lr"),
    "schedule": ("cosine", "lr"),
    "decay": (0.0, "lr"),
    "final": (0.9, "lr"),
    "clip": (1e-3, "values"),
    "precision": ("bf16", "values"),
    "compile": ("on", "compiled"),
    "eval_every": (1, "evaluated"),
    "eval_windows": (3, "held_out"),
    "save_every": (1, "saved"),
    "keep": (1, "kept"),
    "max_skipped": (3, "max_skipped"),
    "timeout": (50.0, "timeout"),
    "sample": (4, "sampled"),
    "profile_step": (1, "profiled"),
    "deterministic": (True, "deterministic"),
}
LATER = range(5, 11)  # the steps of a run that goes on after step 4 to step 10


def rates(config: TrainConfig) -> list[list[float]]:
    """By step: the learning rates in its event, which are those of the step after it."""
    both = (config.matrix_lr, config.lr)
    return [[rate * config.factor(step) for rate in both] for step in LATER]


# Fields that one run takes together: each shows in its figure alone, which must be this.
TOGETHER: dict[str, Any] = {
    "steps": 10,
    "batch": [step * 24 * TINY.model.context for step in LATER],
    "microbatches": 2,
    **dict.fromkeys(("matrix_lr", "lr", "warmup", "decay")),  # see ``rates``
    "compile": True,
    "eval_every": [*LATER],
    "save_every": [*LATER],
    "keep": 1,
    "max_skipped": 3,
    "timeout": 50.0,
    "sample": 1,
    "profile_step": [5],
    "deterministic": True,
}
NEEDS = {"replicas": {"strategy": "hsdp"}}  # what a field means nothing without
BESIDE = ("documents", "keep_weights", "ep")  # nothing but each of them moves its figure
ROUTED = dataclasses.replace(TINY.model, num_experts=4, experts_per_token=2)
REFUSED = {
    "model": (dataclasses.replace(TINY.model, dim=32), r"attention\.wq\.weight"),
    "data": ("other text", "other data"),
    **{
        name: (value, f"{name}=")
        for name, value in {
            "seed": 1,
            "tokenizer": "bpe:300",
            "held_out": 0.2,
            "optimizer": "adamw",
            "init_from": "elsewhere",
            "module": "elsewhere.py:build",
            "lora_rank": 4,
        }.items()
    },
}


def test_every_field_is_classified() -> None:
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    # parity/test_tensor_parallel_train resumes with another tp; lora_alpha needs a lora_rank, and
    # final_bf16 weights in fp8: see test_with_weights_in_mxfp8.
    elsewhere = {"tp", "lora_alpha", "final_bf16"}
    assert EFFECTS.keys() | REFUSED.keys() | elsewhere == fields
    assert not EFFECTS.keys() & REFUSED.keys()
    assert FIXED.keys() <= REFUSED.keys()


def seen(
    rank: int, world_size: int, folder: str, path: str, changes: dict[str, Any]
) -> dict[str, Any]:
    """What a resumed run does, as far as it can be seen from outside of its configuration."""
    before = torch.are_deterministic_algorithms_enabled()
    calls: list[int] = []
    try:
        trainer = make_trainer(rank, world_size, folder, path, **changes)
        trainer.parts.model.register_forward_pre_hook(
            lambda model, args: calls.append(len(args[0])) if model.training else None
        )
        with torch.compiler.set_stance("force_eager"):  # compilers are slow on a CPU
            trainer.run()
        unit = next(iter(units_of(trainer.parts.model)))
        steps = events_of(folder, "step") if rank == 0 else []
        return {
            "steps": trainer.step,
            "tokens": [event["tokens"] for event in steps],
            "microbatches": len(calls) / (trainer.step - 4),
            "placements": str(unit.groups[0].placements),
            "mesh": [axis.size for axis in unit.groups[0].ranks.axes],
            "compiled": trainer.parts.model.softmax is not None,
            "experts": [layer.experts.num_experts for layer in mixtures_of(trainer.parts.model)],
            "lr": [event["lr"] for event in steps],
            "groups": [group["lr"] for group in trainer.parts.optimizer.param_groups],
            "values": {name: value.tolist() for name, value in values_of(trainer).items()},
            "evaluated": [event["step"] for event in events_of(folder, "eval")],
            "held_out": [event["loss"] for event in events_of(folder, "eval")],
            "saved": [event["step"] for event in events_of(folder, "save")],
            "kept": len(trainer.store.checkpoints()),
            "max_skipped": trainer.skips.limit,
            "timeout": trainer.store.timeout,
            "sampled": len(events_of(folder, "sample")),
            "profiled": [event["step"] for event in events_of(folder, "profile")],
            "documents": trainer.parts.model.document_end,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Resumes a run after step 4 with some changes; gives what is seen, and remembers it."""
    root = tmp_path_factory.mktemp("begun")
    data = write_text(root)
    known: dict[str, dict[str, Any]] = {}

    def go_on(**changes: Any) -> dict[str, Any]:
        if (key := repr(sorted(changes.items()))) in known:
            return known[key]
        first = {"model": ROUTED, "data": data}
        source = root / "source" / "checkpoints" / "step-000004"
        if not source.exists():
            run_ranks(straight, 2, str(root / "source"), {**first, "steps": 8})
        folder = root / f"resumed-{len(known)}"
        shutil.copytree(source, folder / "checkpoints" / "step-000004")
        path = str(folder / "checkpoints" / "step-000004")
        known[key] = run_ranks(seen, 2, str(folder), path, {**first, **changes})[0]
        written = json.loads((folder / "config.json").read_text())
        assert all(written[name] == value for name, value in changes.items()), "config.json"
        (*_, newest) = sorted((folder / "checkpoints").iterdir())
        assert Manifest.read(newest).config == written
        return known[key]

    return go_on


@pytest.mark.parametrize("name", [name for name in EFFECTS if name not in TOGETHER])
def test_what_is_given_on_resume_takes_effect(name: str, begun: Any) -> None:
    needed = NEEDS.get(name, {})
    changes = {one: EFFECTS[one][0] for one in (BESIDE if name in BESIDE else (name,))}
    figure = EFFECTS[name][1]
    assert begun(**needed, **changes)[figure] != begun(**needed)[figure]


def test_what_is_given_together_takes_effect(begun: Any) -> None:
    changes = {name: EFFECTS[name][0] for name in TOGETHER}
    without, found = begun(), begun(**changes)
    expected = {EFFECTS[name][1]: figure for name, figure in TOGETHER.items()}
    asked = dataclasses.replace(TINY, **changes)
    expected["lr"] = rates(asked)
    for name in ("matrix_lr", "lr", "warmup", "decay"):  # each of them shows
        assert rates(dataclasses.replace(asked, **{name: getattr(TINY, name)})) != expected["lr"]
    assert {figure: found[figure] for figure in expected} == expected
    assert all(without[figure] != expected[figure] for figure in expected)
    assert found["groups"] == found["lr"][-1]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_change_on_resume_is_refused_by_name(
    name: str, finished: Path, tmp_path: Path
) -> None:
    data, run = str(finished / "text.txt"), finished / "run"
    config = dataclasses.replace(TINY, data=data)
    value, said = REFUSED[name]
    if name in FIXED:
        request = Request(out=str(run), resume="latest", changes={name: value})
        with pytest.raises(ValueError, match=said):
            resolve(request)
        same = dataclasses.replace(request, changes={name: getattr(config, name)})
        assert resolve(same).config.data == data, "the same value again is no change"
        return
    if name == "data":
        value = str(tmp_path / "other.txt")
        Path(value).write_text("something else entirely. " * 400)
    path = str(run / "checkpoints" / "step-000004")
    for text in run_ranks(refuse, 2, str(tmp_path / "b"), path, {"data": data, name: value}):
        assert re.search(said, text), text


def test_fewer_steps_than_were_done_are_refused(finished: Path, tmp_path: Path) -> None:
    path = str(finished / "run" / "checkpoints" / "step-000004")
    changes = {"data": str(finished / "text.txt"), "steps": 2}
    for text in run_ranks(refuse, 2, str(tmp_path / "b"), path, changes):
        assert "steps=2: " in text and "step-000004 has done 4 of them already" in text


def older_one(rank: int, world_size: int, folder: str, path: str, data: str, older: bool) -> Any:
    try:
        trainer = make_trainer(rank, world_size, folder, path, or_older=older, data=data)
    except ValueError as error:
        return str(error)
    return trainer.step


@pytest.mark.parametrize("damage", ["a bit", "zeros", "a pipe"])
def test_a_damaged_newest_checkpoint_gives_way_to_an_older_one_if_any_will_do(
    damage: str, finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever each of the ranks has seen of it."""
    data, run = str(finished / "text.txt"), tmp_path / "run"
    shutil.copytree(finished / "run", run)
    newest = run / "checkpoints" / "step-000008"
    shard = newest / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(len(content)) if damage == "zeros" else content)
    if damage == "a pipe":
        shard.unlink()
        os.mkfifo(shard)
    assert run_ranks(older_one, 2, str(run), str(newest), data, True) == [4, 4]
    said = run_ranks(older_one, 2, str(run), str(newest), data, False)
    assert all("__1_0.distcp" in text for text in said), "asked for by name, it is refused by name"
    if damage == "a pipe":  # seen without a look at the bytes, by export and generate too
        assert newest_checkpoint(run).name == "step-000004"
        assert "step-000004, the newest of those that are valid, is used" in caplog.text


def foreign(rank: int, world_size: int, folder: str, data: str) -> str:
    """A sound checkpoint of the same model that no trainer has written."""
    here = Path(folder)
    trainer = make_trainer(rank, world_size, str(here / "one"), data=data)
    save(here / "saved", trainer.parts.model, trainer.parts.optimizer, extra={"epoch": 1})
    try:
        make_trainer(rank, world_size, str(here / "two"), str(here / "saved"), data=data)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_checkpoint_of_another_program_is_named(tmp_path: Path) -> None:
    for message in run_ranks(foreign, 2, str(tmp_path), write_text(tmp_path)):
        assert "saved" in message and "'step'" in message and "sw.load" in message
