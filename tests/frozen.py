# SPDX-License-Identifier: Apache-2.0
"""Imported by the process that ranks are forked from: what they need, 5 s of CPU less for each.

Its objects are never collected, so a collection in a rank does not touch, and thereby copy, their
memory. Inductor is imported without GPUs alone: it begins CUDA, which no fork can do again. (So
does ``torch.cuda.is_available()``.)
"""

import gc
from glob import glob

gc.disable()  # collections while half a million objects come: a seventh of the time

import pytest  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.run

import shardwise.api
import shardwise.train.run  # noqa: F401
from shardwise.train.launch import GPUS
from tests.products import keep_one_product

if not glob(GPUS):
    import torch._inductor.compile_fx

    # torch.manual_seed would note the caller's stack for each kind of GPU that may come yet.
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None

keep_one_product()
gc.collect()
gc.freeze()
gc.enable()
