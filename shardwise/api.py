# SPDX-License-Identifier: Apache-2.0
"""The public names of ``shardwise``. The package imports this file when one of them is used."""

from torch.distributed.fsdp import register_fsdp_forward_method, share_comm_ctx

from shardwise.checkpoint import LoadReport, load, save
from shardwise.core import comm
from shardwise.core.layout import ELEMENT, ROW, TENSOR, Grain, rows
from shardwise.core.memory import ledger
from shardwise.core.mesh import init_mesh
from shardwise.core.placements import Partial, Placements, Replicate, Shard, hfsdp, hsdp, zero
from shardwise.core.tensor import ShardedTensor
from shardwise.debugging import debug
from shardwise.optim.elementwise import adamw
from shardwise.optim.functions import matrix_optimizer
from shardwise.optim.muon import muon
from shardwise.optim.optimizers import Muon, optimizer, routing_report
from shardwise.optim.routing import route
from shardwise.optim.split import Split
from shardwise.planning.plan import plan
from shardwise.precision import Precision
from shardwise.precision.fp8_swiglu import swiglu_mlp
from shardwise.report.describe import describe, find_nonfinite, parameter_norms
from shardwise.shard.data_parallel import data_parallel
from shardwise.shard.formats import precision_report
from shardwise.shard.fully_shard import fully_shard
from shardwise.shard.module import ShardedModule, mark_written
from shardwise.shard.state_dict import full_state_dict, load_full_state_dict

__all__ = [
    "ELEMENT",
    "ROW",
    "TENSOR",
    "Grain",
    "LoadReport",
    "Muon",
    "Partial",
    "Placements",
    "Precision",
    "Replicate",
    "Shard",
    "ShardedModule",
    "ShardedTensor",
    "Split",
    "adamw",
    "comm",
    "data_parallel",
    "debug",
    "describe",
    "find_nonfinite",
    "full_state_dict",
    "fully_shard",
    "hfsdp",
    "hsdp",
    "init_mesh",
    "ledger",
    "load",
    "load_full_state_dict",
    "mark_written",
    "matrix_optimizer",
    "muon",
    "optimizer",
    "parameter_norms",
    "plan",
    "precision_report",
    "register_fsdp_forward_method",
    "route",
    "routing_report",
    "rows",
    "save",
    "share_comm_ctx",
    "swiglu_mlp",
    "zero",
]
