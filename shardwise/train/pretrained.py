# SPDX-License-Identifier: Apache-2.0
"""Saved weights: a Hugging Face folder to begin a run with, a model to generate text with.

    config.json, model.safetensors                       a folder in the layout of the hub
    config.json, model.safetensors.index.json, ...       the same in several files
    RUN/checkpoints/step-000300                          a checkpoint of ``shardwise train``

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

from shardwise.checkpoint import CheckpointError, load
from shardwise.checkpoint.values import dtype_name, parse_json
from shardwise.models.gpt import GPT, generate
from shardwise.models.gpt_config import GPTConfig
from shardwise.models.hugging_face import config_from_hf, parameters_from_hf
from shardwise.shard.state_dict import load_full_state_dict
from shardwise.train.codecs import (
    Bytes,
    Codec,
    codec_named,
    decode_text,
    encode_text,
    open_codec,
    saved_codec,
)
from shardwise.train.config import TrainConfig
from shardwise.train.folder import TOKENIZER, newest_checkpoint, saved_run
from shardwise.train.own_model import HF, make_model

# Fields of a GPTConfig about training, which a config.json does not contain.
_LOSSES = ("head_z_coefficient", "z_coefficient", "sequence_balance_coefficient")
_OF_TRAINING = ("recompute", "delay_expert_gradients", *_LOSSES)
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class HubFolder(Mapping[str, Tensor]):
    """The tensors of a Hugging Face folder by name. A tensor is read at each access."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        index = self.folder / _INDEX
        if not (self.folder / "config.json").is_file():
            raise ValueError(
                f"{folder} holds no Hugging Face model: it has no config.json. Give a folder with "
                f"config.json and safetensors"
            )
        if index.is_file():
            files = json_object(index).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(n, str) for n in files.values()):
                raise ValueError(f"{index} holds no weight_map of tensors to file names")
            self._files: dict[str, str] = files
        elif (self.folder / _SINGLE).is_file():
            with self._open(_SINGLE) as file:
                self._files = dict.fromkeys(file.keys(), _SINGLE)
        else:
            raise ValueError(
                f"{folder} holds neither {_SINGLE} nor {_INDEX}, and other formats can't be read: "
                f"save the model with safetensors"
            )

    @property
    def config(self) -> GPTConfig:
        """The configuration of a GPT that computes the same."""
        try:
            return config_from_hf(json_object(self.folder / "config.json"))
        except ValueError as error:
            raise ValueError(f"{self.folder}: {error}") from None

    def _open(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        path = self.folder / name
        if not path.is_file():  # opening a pipe would wait for its writer
            raise ValueError(f"{path} does not exist, or is no regular file")
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read ({error})") from None

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
    value = parse_json(path.read_bytes(), str(path))
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def begin_from(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """The configuration with the model and the tokenizer of ``init_from``.

    The context is the shorter of the two of the recipe and of the weights. ``changes`` (flags)
    replace values.
    """
    assert config.init_from is not None
    folder = HubFolder(config.init_from)
    if config.module is None:
        values = vars(folder.config) | {name: getattr(config.model, name) for name in _OF_TRAINING}
    else:  # transformers builds the model: only the vocabulary and the context matter
        described = json_object(folder.folder / "config.json")
        values = vars(config.model) | {"vocab_size": described.get("vocab_size", 0)}
        values["context"] = described.get("max_position_embeddings", config.model.context)
    values["context"] = min(values["context"], config.model.context)
    values |= changes.get("model", {})
    tokenizer = config.tokenizer
    if "tokenizer" not in changes and (folder.folder / "tokenizer.json").is_file():
        tokenizer = config.init_from
    return TrainConfig.from_json(config.to_json() | {"model": values, "tokenizer": tokenizer})


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


# ------------------------------------------------------------------------------ trained models


def open_model(path: str | Path) -> tuple[nn.Module, Codec | None]:
    """The model and the tokenizer of a run, a checkpoint or an exported folder, in this process."""
    place = Path(path).expanduser()
    if not place.is_dir():
        raise ValueError(f"{path}: there is no such run, checkpoint or exported folder")
    if (place / _SINGLE).is_file() or (place / _INDEX).is_file():
        folder = HubFolder(place)
        try:
            model: nn.Module = GPT(folder.config)
        except ValueError:  # no GPT: transformers builds the model, with its full context
            config = TrainConfig(
                module=f"{HF}{place}", init_from=str(place), model=GPTConfig(context=1 << 20)
            )
            return make_model(begin_from(config, {})), saved_codec(place)
        for state in parameters_from_hf(folder, folder.config):
            load_full_state_dict(model, state, strict=False)
        return model, saved_codec(place)
    checkpoint = newest_checkpoint(place)
    config = dataclasses.replace(saved_run(checkpoint), init_from=None)
    model = make_model(config)
    load(checkpoint, model, restore_random=False)
    return model, codec_of_run(checkpoint, config)


def codec_of_run(checkpoint: Path, config: TrainConfig) -> Codec | None:
    """The tokenizer of the run that wrote a checkpoint: from the run's folder, or from its
    configuration. ``None`` for tokens of an unknown tokenizer."""
    saved = saved_codec(checkpoint.parent.parent / TOKENIZER)
    if saved is not None:
        return saved
    kind, size = codec_named(config.tokenizer)
    if kind == "bytes":
        return Bytes() if config.model.vocab_size == size else None
    if kind == "file":
        return open_codec(config.tokenizer)
    raise CheckpointError(
        f"{checkpoint} was trained with a learned tokenizer ({config.tokenizer}), which is in the "
        f"folder of the run ({TOKENIZER}/): move the checkpoint back into that folder"
    )


def tokenizer_files(codec: Codec | None) -> dict[str, bytes]:
    """The files of a tokenizer for an export, as transformers reads them."""
    if codec is None:
        return {}
    ends = {"eos_token_id": codec.end, "pad_token_id": codec.end}
    return {**codec.files(), "generation_config.json": json.dumps(ends, indent=2).encode()}


def export_options(config: TrainConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Options of ``sw.export`` for the model of a run. The names of a module of the user stay. A
    model of transformers gets its ``config.json``, with the dtype of the exported weights."""
    if config.module is None:
        return {}
    described = None
    if config.module.startswith(HF):
        place = Path(config.module.removeprefix(HF)).expanduser()
        place = place / "config.json" if place.is_dir() else place
        if not place.is_file():
            raise ValueError(
                f"{place}, which describes the model of this run, does not exist any more: restore "
                f"it"
            )
        described = json_object(place) | {"vocab_size": config.model.vocab_size}
        described |= dict.fromkeys(("dtype", "torch_dtype"), dtype_name(dtype))
    return {"convert": lambda name, tensor: {name: tensor}, "config": described}


def text_after(model: nn.Module, codec: Codec, prompt: str, num_tokens: int, **options: Any) -> str:
    """The text that a model generates after ``prompt``, up to the end of a document.

    ``options`` are those of :func:`shardwise.models.gpt.generate`.
    """
    tokens = encode_text(codec, prompt) or [codec.end]
    prompt_tokens = torch.tensor([tokens], device=next(model.parameters()).device)
    generated = generate(model, prompt_tokens, num_tokens, **options)[0, len(tokens) :].tolist()
    if codec.end in generated:
        generated = generated[: generated.index(codec.end)]
    return decode_text(codec, tokens + generated)[len(decode_text(codec, tokens)) :]
