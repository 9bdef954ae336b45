# SPDX-License-Identifier: Apache-2.0
"""Kernels launched in their compiled form: what is kept fits what Triton would compile."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
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

import shardwise as sw  # noqa: E402
from shardwise.kernels import ahead, launch, newton_schulz  # noqa: E402
from shardwise.optim import matrix_group  # noqa: E402
from tests.models import Weights  # noqa: E402


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


# ------------------------------------------------------------------------------ ahead of a launch

MATRICES = {
    "a": (128, 128), "b": (128, 128), "tall": (768, 256), "wide": (256, 768), "stack": (3, 32, 64),
    "odd": (129, 200), "exchanged": (256, 192), "vector": (256,),
}  # fmt: skip


def test_a_step_asks_for_no_form_that_was_not_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[bool, set[tuple[str, str]]] = {True: set(), False: set()}  # by whether ahead
    backend = CUDABackend(GPUTarget("cuda", 90, 32))

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        bind = create_function_from_signature(self.signature, self.params, backend)
        asked[warmup].add((self.__name__, str(bind(*args, **constants)[1:])))
        return SimpleNamespace(run=lambda *args: None, function=None, packed_metadata=None)

    monkeypatch.setattr(type(_kernel), "run", note)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    monkeypatch.setattr(newton_schulz, "uses_kernels", lambda device: True)
    monkeypatch.setattr(matrix_group, "kernels_everywhere", lambda device, axes: True)
    model = Weights(MATRICES)
    sw.route(model, split={"exchanged": sw.Split.interleaved(2)})
    optimizer = sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())
    optimizer.compile_ahead()
    assert not asked[False] and asked[True]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with torch.no_grad():
        for group in optimizer._matrix_groups or ():
            assert list(group.step(optimizer.state, torch.zeros(2)))
    assert asked[True] < asked[False]
    late = {name for name, _ in asked[False] - asked[True]}
    assert late == {"_momentum_kernel", "_update_kernel"}, "of the pieces of an exchange alone"
    kernels = ("momentum", "normalise", "factors", "symmetric", "product", "block", "update")
    assert {name for name, _ in asked[True]} == {f"_{kernel}_kernel" for kernel in kernels}


@pytest.mark.parametrize("fails", [False, True])
def test_a_launch_waits_for_what_is_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """And raises what the compilation raised. A thread loads no launcher: of two threads that did,
    one could get the launcher of the other's kernel ("takes exactly 38 arguments (30 given)")."""
    begun, may_end, made, loaded = threading.Event(), threading.Event(), [], []

    def compile(*args: Any, **options: Any) -> Any:
        begun.set()
        assert may_end.wait(60)
        if fails:
            raise RuntimeError("no such instruction")
        made.append(threading.get_ident())
        return Compiled()

    class Compiled:
        function = packed_metadata = None
        launch_metadata = staticmethod(lambda *args: None)

        @property
        def run(self) -> Any:
            loaded.append(threading.get_ident())
            return lambda *args: None

    class Driver:
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

    monkeypatch.setattr(triton.compiler, "compile", compile)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    fresh = triton.jit(_kernel.fn)
    options = {"wide": 1, "kind": tl.float32, "num_warps": 4}
    box = launch.boxes(torch.empty(64, 64, device="meta"), [16, 16])
    flat = torch.empty(4096, device="meta")
    ahead.compile_ahead(lambda: launch.run(fresh, (5,), box, flat, 2, 0.5, **options))
    assert begun.wait(60) and not made, "it goes on in a thread"
    may_end.set()
    if fails:
        with pytest.raises(RuntimeError, match="no such instruction"):
            launch.run(fresh, (5,), BOX, FLAT, 2, 0.5, **options)
    else:
        launch.run(fresh, (5,), BOX, FLAT, 2, 0.5, **options)
        assert len(made) == 1 and made != [threading.get_ident()]
        assert set(loaded) == {threading.get_ident()}
