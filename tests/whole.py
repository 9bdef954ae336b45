# SPDX-License-Identifier: Apache-2.0
"""Whole tensors of a sharded model, all in one exchange.

``full_tensor`` sends each tensor by itself, which takes as long as the step that a test looks at.
Here every rank tells its pieces of all tensors at once, with their places:

    rank 0   weight rows 0-4, bias 0-3 ...  --\\
    rank 1   weight rows 5-9, bias 4-9 ...  --->  every rank puts all of them together
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core import comm
from shardwise.core.agreement import all_ranks


def whole_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the whole tensors (collective over all ranks, each of which must hold the same
    ones). Pieces that several ranks hold must be the same bits on all of them."""
    mine: list[tuple[str, Any]] = []
    blocks: list[bytes] = []
    for name, tensor in tensors.items():
        if (cut := getattr(tensor, "cut", None)) is not None:
            local = tensor.detach().to_local().contiguous()  # type: ignore[attr-defined]
            mine.append((name, [(tuple(begin), tuple(size)) for begin, size in cut.boxes]))
            blocks.append(local.view(-1).view(torch.uint8).cpu().numpy().tobytes())
    everyone = comm.agree((mine, b"".join(blocks)), all_ranks()) if mine else []
    made = {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype) for name, _ in mine}
    seen: dict[tuple[str, Any], bytes] = {}
    for rank, (theirs, data) in enumerate(everyone):
        assert [name for name, _ in theirs] == [*made], f"rank {rank} holds other tensors"
        at = 0
        for name, boxes in theirs:
            out = made[name]
            for box in boxes:
                count = math.prod(box[1])
                held = data[at : at + count * out.element_size()]
                at += len(held)
                if not count:
                    continue
                if (first := seen.setdefault((name, box), held)) is not held:
                    assert first == held, f"'{name}' differs between its replicas (rank {rank})"
                    continue
                piece = torch.frombuffer(bytearray(held), dtype=out.dtype).view(box[1])
                where = zip(*box, strict=True)
                out[tuple(slice(begin, begin + size) for begin, size in where)] = piece
        assert at == len(data), f"'{name}': its boxes are not all that rank {rank} holds"
    covered = dict.fromkeys(made, 0)
    for name, (_, size) in seen:
        covered[name] += math.prod(size)
    assert covered == {name: tensor.numel() for name, tensor in made.items()}, "pieces overlap"
    return {name: made[name] if name in made else _whole(one) for name, one in tensors.items()}


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    return whole_tensors(dict(model.named_parameters()))


def whole_state(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Parameters by name, and states as "name key"."""
    return whole_tensors(
        {
            f"{name} {key}".strip(): value
            for name, parameter in model.named_parameters()
            for key, value in ({"": parameter} | optimizer.state[parameter]).items()
        }
    )


def _whole(tensor: Tensor) -> Tensor:
    """A plain tensor, or one of torch's DTensors."""
    tensor = tensor.detach()
    return getattr(tensor, "full_tensor", tensor.clone)().clone()  # type: ignore[no-any-return]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    pairs = {name: (value.cpu(), expected[name].cpu()) for name, value in found.items()}
    wrong = [name for name, pair in pairs.items() if not torch.equal(*pair)]
    assert not wrong, wrong
