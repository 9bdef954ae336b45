# SPDX-License-Identifier: Apache-2.0
"""Matrix optimizers as functions, each in a file that can be copied: ANY[name](lr=...)."""

from shardwise.optim.functions.adamuon import adamuon
from shardwise.optim.functions.dion import dion
from shardwise.optim.functions.muon import muon
from shardwise.optim.functions.normuon import normuon
from shardwise.optim.functions.scion import scion, spectral_lion
from shardwise.optim.functions.shampoo import shampoo
from shardwise.optim.functions.soap import soap

ANY = {one.name: one for one in (muon, normuon, adamuon, soap, shampoo, dion, scion, spectral_lion)}
