# SPDX-License-Identifier: Apache-2.0
"""The base of the engine: values, arithmetic, streams, memory, collectives, tensors at rest."""
