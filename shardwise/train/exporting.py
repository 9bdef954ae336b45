# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's weights as safetensors files in the layout of the Hugging Face hub.

    step-000300/            ->    model-00001-of-00003.safetensors    up to MAX_FILE_BYTES each,
      pieces of tensors           model-00002-of-00003.safetensors    or a single larger tensor
      of any number of ranks      model-00003-of-00003.safetensors
                                  model.safetensors.index.json        the file of each tensor
                                  config.json

This runs in one process, without a process group. It holds the tensors of one file and one piece
in memory at a time.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.files import HashedFile, sync_directory, write_tensors
from shardwise.checkpoint.loading import Reader, compare_bytes, write
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.meeting import is_taken, temporary
from shardwise.checkpoint.values import dtype_name, dtype_of
from shardwise.models.gpt_config import GPTConfig
from shardwise.models.hugging_face import hf_config, hf_tensors
from shardwise.moe import convert_gate_up

log = logging.getLogger(__name__)

# Converts a tensor of the model to tensors of the format: a renaming, a split, a transposition. The
# first call passes a meta tensor, for names and sizes.
Convert = Callable[[str, Tensor], dict[str, Tensor]]

MAX_FILE_BYTES = 4 << 30
_LORA = (".lora_a", ".lora_b")  # of a linear: see shardwise.train.own_model


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    end_token: int | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> list[Path]:
    """Write the model of a checkpoint to a new directory ``out``; return the files.

    If the config of the checkpoint describes its ``"model"`` (the fields of ``GPTConfig``), the
    directory can be loaded by ``transformers``. Names of any other model stay as they are.
    ``dtype`` converts floating-point tensors; the default is the dtype that each parameter had
    before it was wrapped. ``beside`` are more files, such as those of a tokenizer, and
    ``end_token`` is the token that ends a text. Every byte is checked against its sha256 before it
    is used, and ``out`` gets its name when it is complete.
    """
    source, target = Path(os.path.abspath(path)), Path(os.path.abspath(out))
    if is_taken(target):
        raise CheckpointError(f"{target} exists already: remove it or choose another directory")
    manifest = Manifest.read(source)
    compare_bytes(source, manifest)
    convert, config = _as_gpt(source, manifest, dtype, end_token)
    weights = _Weights(Reader(source, manifest), convert, dtype)
    files = _assign_files(weights)
    more = {} if config is None else {"config.json": json.dumps(config, indent=2).encode()}
    folder = temporary(target)
    folder.mkdir(parents=True)
    try:
        names = _write(folder, weights, files, more | dict(beside or {}))
        sync_directory(folder)
        os.rename(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    sync_directory(target.parent)
    return [target / name for name in names]


def _as_gpt(
    path: Path, manifest: Manifest, dtype: torch.dtype | None, end_token: int | None
) -> tuple[Convert, Mapping[str, Any] | None]:
    """The conversion and the configuration of a ``GPT``; a model of another kind has neither."""
    values = manifest.config or {}
    described = None if values.get("module") else values.get("model")
    if described is None:
        log.warning("%s does not describe its model: names stay as they are", path)
        return lambda name, tensor: {name: tensor}, None
    if dtype is None:
        names = [name for name, state in manifest.tensors if not state]
        dtype = max((_dtype_of(manifest, name) for name in names), key=lambda one: one.itemsize)
    try:
        model = GPTConfig(**described)
        config = hf_config(model, dtype=dtype_name(dtype), end_token=end_token)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the model it describes is no GPT: {error}") from error

    def convert(name: str, tensor: Tensor) -> dict[str, Tensor]:
        order = manifest.extra_states.get(f"{name.rpartition('.')[0]}._extra_state")
        if order is not None:  # gate and up of an expert: the format has all gate rows first
            tensor = convert_gate_up(tensor, order["gate_up_block"], 0, 0)
        return hf_tensors(name, tensor, config=model)

    return convert, config


def _dtype_of(manifest: Manifest, name: str) -> torch.dtype:
    """The dtype that a parameter had before it was wrapped, or the stored dtype if unknown."""
    before = manifest.dtypes.get(name)
    return dtype_of(before) if before else manifest.tensors[name, ""].dtype


class _Weights:
    """Tensors of the checkpoint in the names and dtypes of the export; of experts, one for each."""

    def __init__(self, reader: Reader, convert: Convert, dtype: torch.dtype | None) -> None:
        self._reader, self._convert, self._dtype = reader, convert, dtype
        manifest, values = reader.manifest, reader.manifest.config or {}
        self._places: dict[str, tuple[str, int | None]] = {}  # stored name, number of the expert
        for name in sorted(name for name, state in manifest.tensors if not state):
            count = manifest.tensors[name, ""].shape[0] if name in manifest.experts else None
            for index in (None,) if count is None else range(count):
                self._places[name if index is None else f"{name}{index}"] = name, index
        # Without lora_alpha in the config, parameters with these names are not LoRA's.
        rank = values.get("lora_rank") if "lora_alpha" in values else None
        self._scale = values["lora_alpha"] / rank if rank else 0.0
        self.names = [name for name in self._places if not rank or not name.endswith(_LORA)]

    def results(self, name: str, *, sketch: bool = False) -> dict[str, Tensor]:
        """What one tensor becomes; with ``sketch``, on the meta device."""
        if sketch:
            tensor = self._empty(name)[-1].to("meta")
        else:
            tensor = self._read(name)
            factors = [name.removesuffix(".weight") + last for last in _LORA]
            if self._scale and factors[0] in self._places:  # a trained product of low rank: add it
                a, b = map(self._read, factors)
                tensor = tensor + self._scale * (b @ a)
        dtype = self._dtype or _dtype_of(self._reader.manifest, self._places[name][0])
        return {
            # The bias of a router decides between close scores: keep its dtype.
            key: value.to(dtype)
            if value.is_floating_point() and not key.endswith("e_score_correction_bias")
            else value
            for key, value in self._convert(name, tensor).items()
        }

    def _empty(self, name: str) -> tuple[tuple[int, ...], Tensor, Tensor]:
        """The place of a tensor in a stored one, room for that box, and for the tensor in it."""
        stored, index = self._places[name]
        entry = self._reader.manifest.tensors[stored, ""]
        sizes = entry.shape if index is None else (1, *entry.shape[1:])
        room = torch.empty(sizes, dtype=entry.dtype, device="cpu")
        offsets = (index or 0, *(0 for _ in sizes[1:])) if sizes else ()
        return offsets, room, room if index is None else room[0]

    def _read(self, name: str) -> Tensor:
        offsets, room, tensor = self._empty(name)
        self._reader.add((self._places[name][0], ""), offsets, tuple(room.shape), room)
        write(self._reader.read())
        return tensor


def _assign_files(weights: _Weights) -> list[list[str]]:
    """The names of the tensors of each file, in order."""
    files: list[list[str]] = []
    left = 0  # bytes that still fit into the last file
    for name in weights.names:
        nbytes = sum(value.nbytes for value in weights.results(name, sketch=True).values())
        if not files or nbytes > left:
            files.append([])
            left = MAX_FILE_BYTES
        files[-1].append(name)
        left -= nbytes
    return files


def _write(
    folder: Path, weights: _Weights, files: list[list[str]], more: dict[str, bytes]
) -> list[str]:
    weight_map: dict[str, str] = {}
    total = 0
    for number, sources in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        name = "model.safetensors" if len(files) == 1 else name
        tensors = {key: one for source in sources for key, one in weights.results(source).items()}
        write_tensors(folder / name, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(value.nbytes for value in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        more = {"model.safetensors.index.json": json.dumps(index, indent=2).encode()} | more
    for name, contents in more.items():
        with HashedFile(folder / name) as file:  # it is on the disk at the end
            file.write(contents)
    return [*dict.fromkeys(weight_map.values()), *more]
