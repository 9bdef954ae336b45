# SPDX-License-Identifier: Apache-2.0
"""Matrix optimizers as functions, in files that can be copied: ANY[name](lr=...)."""

from shardwise.optim.functions.dion import dion
from shardwise.optim.functions.muon_variants import adamuon, muon, normuon
from shardwise.optim.functions.scion import scion, spectral_lion
from shardwise.optim.functions.shampoo import shampoo
from shardwise.optim.functions.soap import soap

ANY = {one.name: one for one in (muon, normuon, adamuon, soap, shampoo, dion, scion, spectral_lion)}
