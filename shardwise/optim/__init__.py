# SPDX-License-Identifier: Apache-2.0
"""Optimizers that need whole matrices, on parameters that are cut over ranks.

routing        which optimizer a parameter belongs to
split          how a fused weight falls into matrices
newton_schulz  the iteration, with its presets
muon, adamw    the arithmetic and the settings
owners         who computes which matrix: arithmetic alone
storage        where a parameter's pieces lie
exchange       pieces to owners and back
matrices       Muon's step
tensor_parallel  matrices cut into blocks
sharded, alone  the optimizer objects
report         who goes where, printed
"""
