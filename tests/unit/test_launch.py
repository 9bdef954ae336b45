# SPDX-License-Identifier: Apache-2.0
"""Kernels launched in their compiled form: what is kept fits what Triton would compile."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels are an extra")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from shardwise.kernels import launch  # noqa: E402


@triton.jit
def _kernel(a_desc, x_ptr, count, rate, wide: tl.constexpr, kind: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN202
    pass


FLAT = torch.zeros(4096)
BOX = launch.boxes(FLAT.view(64, 64), [16, 16])
# One change at a time, and some that Triton compiles nothing new for.
ARGUMENTS: list[tuple[Any, ...]] = [
    (BOX, FLAT, 2, 0.5),
    (BOX, FLAT, 3, 0.25),
    (BOX, FLAT[4:], 2, 0.5),
    (BOX, FLAT[1:], 2, 0.5),
    (BOX, FLAT.half(), 2, 0.5),
    (BOX, FLAT, 1, 0.5),
    (BOX, FLAT, 0, 0.5),
    (BOX, FLAT, -16, 0.5),
    (BOX, FLAT, 2**31, 0.5),
    (BOX, FLAT, 2**31 - 1, 0.5),
    (BOX, FLAT, -(2**31), 0.5),
    (BOX, FLAT, 2**63 - 1, 0.5),
    (BOX, FLAT, 2**63, 0.5),
    (BOX, FLAT, 2, 1),
    (BOX, FLAT, True, 0.5),
    (BOX, FLAT, None, 0.5),
    (launch.boxes(FLAT.view(64, 64), [16, 32]), FLAT, 2, 0.5),
    (launch.boxes(FLAT.view(32, 128), [16, 16]), FLAT, 2, 0.5),
    (launch.boxes(FLAT.half().view(64, 64), [16, 16]), FLAT, 2, 0.5),
]


class Compiled:
    """Stands for Triton's compiled kernel."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        """The order of arguments that ``CompiledKernel.__getitem__`` of Triton uses."""
        grid, (stream, *fixed), rest = args[:3], args[3:9], args[9:]
        assert (stream, *fixed) == (77, "function", "metadata", None, None, None)
        self.calls.append((grid, *rest))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """The forms that Triton was asked for, launches by Triton included."""
    found: list[Compiled] = []

    def ordinary(self: Any, grid: Any) -> Any:
        return lambda *args, **constants: found.append(Compiled()) or found[-1]

    monkeypatch.setattr(type(_kernel), "__getitem__", ordinary)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    return found


def test_arguments_of_one_kind_share_a_form_and_others_never_do(made: list[Compiled]) -> None:
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(_kernel.signature, _kernel.params, backend)
    forms: dict[str, int] = {}  # the number of forms made, by what Triton compiles for
    for arguments in ARGUMENTS:
        for constants in ({"wide": 1, "kind": tl.float32}, {"wide": 2, "kind": tl.float16}):
            _, kind, _ = bind(*arguments, **constants)
            before = len(made)
            launch.run(_kernel, (5,), *arguments, **constants, num_warps=4)
            if len(made) == before:
                assert str(kind) in forms, "a form was used that Triton compiled for another kind"
            forms[str(kind)] = forms.get(str(kind), 0) + len(made) - before
    assert max(forms.values()) <= 2, "kept forms serve other values of the same kind"


def test_a_kept_form_gets_addresses_and_constants_in_the_kernel_s_order(
    made: list[Compiled],
) -> None:
    options = {"kind": tl.float32, "wide": 8, "num_warps": 4}
    for _ in range(3):
        launch.run(_kernel, (5, 7), BOX, FLAT[4:], 2, 0.5, **options)
    (form,) = made
    address = FLAT.data_ptr() + 16
    assert form.calls == [((5, 7, 1), BOX, address, 2, 0.5, 8, tl.float32)] * 2


def test_another_device_or_option_is_another_form(
    made: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    for device, warps in ((0, 4), (1, 4), (0, 8), (0, 4), (1, 4), (0, 8)):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        launch.run(_kernel, (1,), BOX, FLAT, 2, 0.5, wide=1, kind=tl.float32, num_warps=warps)
    assert [len(form.calls) for form in made] == [1, 1, 1]


def test_boxes_are_triton_s_own_and_hold_no_memory_of_another_tensor() -> None:
    first, second = (torch.zeros(64, 64) for _ in range(2))
    for tensor in (first, second):
        assert launch.boxes(tensor, [16, 16]) == TensorDescriptor.from_tensor(tensor, [16, 16])
        assert launch.boxes(tensor, [16, 16]).base is tensor
    assert all(known["base"] is None for known in launch._boxes.values())
    for wrong in (torch.zeros(65 * 64)[1:-63].view(64, 64), torch.zeros(64, 63)[:, :16]):
        for _ in range(2):
            with pytest.raises(AssertionError, match="aligned"):
                launch.boxes(wrong, [16, 16])
