# SPDX-License-Identifier: Apache-2.0
"""Optimizers that need whole matrices, on parameters that are sharded over ranks.

which         routing          which optimizer a parameter belongs to
              routing_report   the same, printed
where         split            the matrices of a fused weight
              storage          the rank that stores each piece
              ownership        the rank that computes each matrix: pure arithmetic
              replicas         what each of several replicas updates
exchange      exchange         pieces to owners and back
              gradients        stored where, present on all ranks, their norm
maths         presets          Newton-Schulz by preset, and its price
              muon, adamw      the settings and the arithmetic
              matrix_function  an optimizer of one matrix, as a function; functions has some
optimizers    matrix_group     the matrices of one sharding, their exchange, and a step over them
              muon_step        Muon's part of it
              function_step    a function's, with its state on the owners
              sharded          the torch.optim.Optimizer
              optimizers       sw.optimizer and sw.Muon
"""
