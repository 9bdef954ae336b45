# SPDX-License-Identifier: Apache-2.0
"""Hub: a Hugging Face folder to begin a run with, and the export of a run to such a folder.

    config.json, model.safetensors                       the layout of the hub
    config.json, model.safetensors.index.json, ...       the same in several files

Tensors are read one at a time, so a rank never holds more than a single whole parameter.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.values import parse_json
from shardwise.models.gpt_config import GPTConfig
from shardwise.models.hugging_face import config_from_hf, parameters_from_hf
from shardwise.shard.state_dict import load_full_state_dict
from shardwise.train.config import TrainConfig
from shardwise.train.exporting import export
from shardwise.train.tokenise import open_tokenizer
from shardwise.train.tokens import TOKENIZER

# Fields of a GPTConfig about training, which a config.json does not contain.
_LOSSES = ("head_z_coefficient", "z_coefficient", "sequence_balance_coefficient")
_OF_TRAINING = ("recompute", "delay_expert_gradients", *_LOSSES)
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class HubFolder(Mapping[str, Tensor]):
    """The tensors of a Hugging Face folder by name. A tensor is read at each access."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        if not (self.folder / "config.json").is_file():
            raise ValueError(f"{folder} holds no Hugging Face model: there is no config.json")
        if (self.folder / _INDEX).is_file():
            files = json_object(self.folder / _INDEX).get("weight_map")
            if not isinstance(files, dict) or not all(
                isinstance(one, str) for one in files.values()
            ):
                raise ValueError(f"{folder}: {_INDEX} holds no weight_map of tensors to file names")
            self._files: dict[str, str] = files
        else:
            with self._open(_SINGLE) as file:
                self._files = dict.fromkeys(file.keys(), _SINGLE)

    @property
    def config(self) -> GPTConfig:
        """The configuration of a GPT that computes the same."""
        return config_from_hf(json_object(self.folder / "config.json"))

    def _open(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if not (self.folder / name).is_file():  # opening a pipe would wait for its writer
            raise ValueError(f"{self.folder / name} does not exist, or is no regular file")
        try:
            return safe_open(self.folder / name, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.folder / name} cannot be read ({error})") from None

    def __getitem__(self, name: str) -> Tensor:
        with self._open(self._files[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON that can be read: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def begin_from(config: TrainConfig, *, tokenizer_given: bool = False) -> TrainConfig:
    """The configuration with the model and the tokenizer of ``init_from``.

    The context is the shorter of the two of the recipe and of the weights.
    """
    assert config.init_from is not None
    folder = HubFolder(config.init_from)
    kept = {name: getattr(config.model, name) for name in _OF_TRAINING}
    context = min(folder.config.context, config.model.context)
    model = dataclasses.replace(folder.config, context=context, **kept)
    tokenizer = config.tokenizer
    if not tokenizer_given and (folder.folder / TOKENIZER).is_file():
        tokenizer = config.init_from
    return dataclasses.replace(config, model=model, tokenizer=tokenizer)


def load_weights(model: nn.Module, config: TrainConfig) -> None:
    """Fill a wrapped model with the weights of ``init_from``, one parameter at a time. Every rank
    reads the files and keeps its pieces, without communication."""
    assert config.init_from is not None
    folder = HubFolder(config.init_from)
    try:
        for state in parameters_from_hf(folder, config.model):
            load_full_state_dict(model, state, strict=False)
    except (RuntimeError, ValueError) as error:  # names, shapes
        raise ValueError(
            f"init_from={config.init_from!r}: its weights do not fit the model of this run "
            f"({' '.join(str(error).split())}): do not change the sizes of the model"
        ) from error


def export_checkpoint(checkpoint: Path, out: Path, dtype: str = "fp32") -> list[Path]:
    """Write the weights of a run's checkpoint, with config.json and tokenizer, as transformers
    reads them; return the files."""
    files: dict[str, bytes] = {}
    end = None
    folder = checkpoint.parent.parent / "tokenizer"
    if folder.is_dir():
        tokenizer = open_tokenizer(folder)
        end = tokenizer.end
        ends = {"eos_token_id": end, "pad_token_id": end}
        files = {**tokenizer.files, "generation_config.json": json.dumps(ends, indent=2).encode()}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return export(checkpoint, out, dtype=dtypes[dtype], end_token=end, beside=files)
