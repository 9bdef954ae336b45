# SPDX-License-Identifier: Apache-2.0
"""Importing shardwise changes nothing in torch or in the interpreter (I15)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# Runs in a fresh interpreter. Compares, by identity, every function and class of torch's modules
# and every method of torch's classes; the hooks of the interpreter; the settings of the compiler.
SCRIPT = """
import gc, importlib, json, pkgutil, sys, threading, types

import torch, torch._dynamo, torch._inductor.config
import torch.distributed.checkpoint.state_dict, torch.distributed.fsdp
import torch.distributed.tensor.parallel, torch.nn.utils.parametrize, torch.utils.checkpoint

hooks = []
sys.addaudithook(lambda event, _: hooks.append(event) if event == "sys.addaudithook" else None)
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
# Before 2.13 torch needs a rule to dispatch operations on a subclass of DTensor.
KINDS = (property, classmethod, staticmethod)
ALLOWED = ["torch._library.simple_registry.GenericTorchDispatchRuleHolder.find"] if OLD else []


def snapshot():
    found = {
        "gc.callbacks": list(gc.callbacks),
        "audit hooks": list(hooks),
        "hooks of sys": [sys.excepthook, sys.unraisablehook, threading.excepthook],
        "finders": list(sys.meta_path),
        "torch._dynamo.config": torch._dynamo.config.shallow_copy_dict(),
        "torch._inductor.config": torch._inductor.config.shallow_copy_dict(),
    }
    found = {name: repr(value) for name, value in found.items()}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] != "torch" or not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if name.startswith("__") or not callable(value):
                continue
            found[f"{module_name}.{name}"] = value
            if isinstance(value, type) and str(value.__module__).startswith("torch"):
                for inner, attribute in list(vars(value).items()):
                    if callable(attribute) or isinstance(attribute, KINDS):
                        found[f"{value.__module__}.{value.__qualname__}.{inner}"] = attribute
    return found


def changes(before):
    after = snapshot()
    return sorted(
        name
        for name, value in before.items()
        if name in after and value is not after[name] and name not in ALLOWED
        if not isinstance(value, str) or value != after[name]
    )


def by_import():
    import shardwise

    for found in pkgutil.walk_packages(shardwise.__path__, "shardwise."):
        if found.name.split(".")[1] not in ("__main__", "integrations", "kernels"):
            importlib.import_module(found.name)


def replace(owner, name):
    setattr(owner, name, lambda *args: None)


PLANTED = {
    "by import": by_import,
    "a function": lambda: replace(torch.nn.utils, "get_total_norm"),
    "a method": lambda: replace(torch.optim.Optimizer, "zero_grad"),
    "a constructor": lambda: setattr(torch.distributed.tensor.DTensor, "__new__", staticmethod(id)),
    "gc": lambda: gc.callbacks.append(lambda *_: None),
    "audit": lambda: sys.addaudithook(lambda *_: None),
    "exceptions": lambda: setattr(sys, "excepthook", print),
    "compiler": lambda: torch._dynamo.config.nontraceable_tensor_subclasses.add(int),
}
answer = {}
for name, plant in PLANTED.items():
    before = snapshot()
    plant()
    answer[name] = changes(before)
print(json.dumps(answer))
"""


def test_an_import_changes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("by import") == []
    assert found == {  # what a patch looks like
        "a function": ["torch.nn.utils.get_total_norm"],
        "a method": ["torch.optim.optimizer.Optimizer.zero_grad"],
        "a constructor": ["torch.distributed.tensor.DTensor.__new__"],
        "gc": ["gc.callbacks"],
        "audit": ["audit hooks"],
        "exceptions": ["hooks of sys"],
        "compiler": ["torch._dynamo.config"],
    }
